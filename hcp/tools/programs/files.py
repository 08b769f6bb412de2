"""Files of programs: lines that are added, files that are tried before work begins, and what
writers that were killed have left."""

from __future__ import annotations

import os
from pathlib import Path

from hcp._files import PathLike, is_special, naming, new_beside, new_name, target_of


def append_to_file(path: PathLike, text: str) -> None:
    """Add text at the end of a file, as UTF-8: all of it or, with OSError that names the path,
    nothing."""
    data = text.encode()
    with naming(path), Path(path).open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def expect_writable(name: str, path: PathLike) -> None:
    """Raise ValueError unless `write_file` could write this file, which nothing is written to."""
    try:
        target = target_of(path)
        if not is_special(target):
            with new_beside(target, bytes(4096)):  # on a full disk, an empty one can be made
                pass
    except OSError as error:
        raise ValueError(
            f"{name} is {os.fspath(path)}, expected a file that can be written: {error.strerror}"
        ) from None


def remove_unfinished(path: PathLike) -> None:
    """Remove what writers of this file that were killed have left beside it."""
    target = Path(path)
    for left in target.parent.glob(new_name(target, "*")):
        left.unlink(missing_ok=True)
