"""The one writer of files: a file is the old one or the new one, whole, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

PathLike = str | os.PathLike[str]


def write_file(
    path: PathLike, content: str | bytes, *, before: Callable[[], object] = lambda: None
) -> None:
    """Write a file, text as UTF-8. One that was there is replaced once the new one is on the disk.

    Until then the new one has a name of its own, beside it: two writers never meet. ``before``:
    called just before the old file is replaced; it may raise. A pipe or a device is written to as
    it is. Raises OSError that names the path; the old file is then as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    with naming(path):
        target = target_of(path)
        if is_special(target):
            target.write_bytes(data)
            return
        with new_beside(target, data) as new:
            if target.exists():
                new.chmod(target.stat().st_mode & 0o7777)
            before()
            new.replace(target)


def target_of(path: PathLike) -> Path:
    """The file itself, where the path is a link. OSError if it must not be written."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return target


def is_special(target: Path) -> bool:
    return target.exists() and not target.is_file()


def new_name(target: Path, mark: str) -> str:
    return f".{target.name[:50]}.{mark}.new"


@contextlib.contextmanager
def new_beside(target: Path, data: bytes) -> Iterator[Path]:
    """Inside this context there is a file of these bytes on the disk, with a name of its own."""
    new = target.with_name(new_name(target, os.urandom(8).hex()))
    file = new.open("xb")
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield new
    finally:
        new.unlink(missing_ok=True)  # missing: it has replaced the old one


@contextlib.contextmanager
def naming(path: PathLike) -> Iterator[None]:
    """Inside this context, OSErrors name this path, not that of the new file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error
