"""Files that hcp writes: a full disk, two writers and damage leave no broken file, and are told."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hcp
from hcp._files import write_file
from hcp.cli.plan import main as plan_main
from hcp.demo import checkpoint
from hcp.tools.programs.draw import pyplot, write_figure
from hcp.tools.programs.files import append_to_file, expect_writable
from hcp.tools.programs.launch import InputError


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Inside this context, a file of more bytes cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Run:
    """A run of the demo, with a state of its own."""

    def __init__(self, state: Mapping[str, Any], name: str = "static_cp") -> None:
        self.state, self.name = state, name

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state


def save(folder: Path, *, size: int = 9) -> checkpoint.Folder:
    made = checkpoint.Folder(str(folder))
    made.save([Run({"weights": torch.arange(size)})], {"seed": 1}, "metrics")
    return made


def picture(path: Path, size: int) -> None:
    figure, axes = pyplot().subplots()
    axes.plot(range(size % 100))
    write_figure(figure, path)


def plan(option: str) -> Callable[[Path, int], None]:
    def write(path: Path, size: int) -> None:
        lengths = path.parent / "lengths.txt"
        lengths.write_text("\n".join(str(1 + i % 7) for i in range(size // 100)))
        argv = [str(lengths), "--ranks", "2", "--max-tokens-per-rank", "99", option, str(path)]
        if plan_main(argv):
            raise OSError(27, "no plan", str(path))

    return write


NEVER_READ = ("none.txt", "--ranks", "2", "--max-tokens-per-rank", "9")
"""Arguments of a plan whose lengths nobody reads."""

WRITERS: dict[str, Callable[[Path, int], None]] = {
    "text": lambda path, size: write_file(path, "w" * size),
    "cost.json": lambda path, size: hcp.CostModel().save(path, {"words": "w" * size}),
    "memory.json": lambda path, size: hcp.MemoryModel(activation=1, limit=9).save(
        path, {"words": "w" * size}
    ),
    "loss.png": picture,
    "plan.svg": plan("--svg"),
    "plan.html": plan("--html"),
    "plan.json": plan("--trace"),
    "checkpoint.pt": lambda path, size: save(path.parent, size=size) and None,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_keeps_the_old_file_and_leaves_nothing_else(name: str, tmp_path: Path) -> None:
    path, write = tmp_path / name, WRITERS[name]
    write(path, 3000)
    old, others = path.read_bytes(), names_in(tmp_path)
    with full_disk(min(len(old) - 1, 5000)), pytest.raises((OSError, SystemExit)) as caught:
        write(path, 9000)
    assert isinstance(caught.value, SystemExit) or caught.value.filename == str(path)
    assert path.read_bytes() == old
    assert names_in(tmp_path) == others


def test_a_line_is_added_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_to_file(path, "one\n")
    with full_disk(6), pytest.raises(OSError, match="File too large") as caught:
        append_to_file(path, "twelve\n")
    assert caught.value.filename == str(path)
    append_to_file(path, "two\n")
    assert path.read_text() == "one\ntwo\n"


def test_two_writers_leave_one_of_their_files_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([k]) * (1 << 20) for k in (1, 2)]
    write_file(path, contents[0])
    failed: list[BaseException] = []

    def write(content: bytes) -> None:
        try:
            for _ in range(30):
                write_file(path, content)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_bytes() in contents
    assert failed == []
    assert names_in(tmp_path) == ["file"]


def test_a_file_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    write_file(path, "old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_file(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    write_file(os.devnull, "nothing")
    expect_writable("out", os.devnull)
    assert Path(os.devnull).is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)


def test_what_cannot_be_written_is_found_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("old")
    for path, why in (
        (tmp_path / "none" / "x", "No such file or directory"),
        (tmp_path / "file" / "x", "Not a directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(ValueError, match=f"out is {path}, expected a file that can be .*{why}"):
            expect_writable("out", path)
        for option in ("--svg", "--html", "--trace"):
            with pytest.raises(SystemExit):
                plan_main([*NEVER_READ, option, str(path)])
            assert f"argument {option}: the file is {path}, expected" in capsys.readouterr().err
    with full_disk(1000), pytest.raises(ValueError, match="written: File too large"):
        expect_writable("out", tmp_path / "file")
    expect_writable("out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "old"
    assert names_in(tmp_path) == ["file"]


# ---- the demo's checkpoints ----------------------------------------------------------------------


def test_the_older_of_two_runs_that_save_into_a_folder_is_ended(tmp_path: Path) -> None:
    older = save(tmp_path)
    (tmp_path / ".checkpoint.pt.0123.new").write_text("of a run that was killed")
    newer = save(tmp_path, size=5)
    content = (tmp_path / checkpoint.FILE).read_bytes()
    with pytest.raises(InputError, match=r"a later run saves there, .*: end one of them, or give"):
        older.save([Run({})], {}, "")
    assert (tmp_path / checkpoint.FILE).read_bytes() == content
    newer.save([Run({})], {}, "")
    assert names_in(tmp_path) == [checkpoint.FILE, checkpoint.OWNER]


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return open, (self.mark, "w")


def sealed(data: bytes) -> bytes:
    """Bytes with a hash that is theirs."""
    return checkpoint.FORMAT + hashlib.sha256(data).hexdigest().encode() + b"\n" + data


def encoded(state: object) -> bytes:
    memory = io.BytesIO()
    torch.save(state, memory)
    return memory.getvalue()


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES: dict[str, tuple[Callable[[bytes, Path], bytes], str]] = {
    "empty": (lambda good, mark: b"", "begins with b'', expected b'hcp demo checkpoint, version"),
    "foreign": (lambda good, mark: b"hello", "begins with b'hello', expected"),
    "of torch alone": (lambda good, mark: encoded({}), "begins with b'PK.*, expected"),
    "cut in its head": (
        lambda good, mark: good[:60],
        "the hash of its 0 bytes is .*cut or changed",
    ),
    "cut": (lambda good, mark: good[: len(good) // 2], "it was cut or changed. Take another copy"),
    "one bit": (lambda good, mark: flipped(good, len(good) // 2), "it was cut or changed"),
    "the last bit": (lambda good, mark: flipped(good, len(good) - 1), "it was cut or changed"),
    "a list": (lambda good, mark: sealed(encoded([1])), r"cannot be read: the data is \[1\], exp"),
    "without runs": (
        lambda good, mark: sealed(encoded({"settings": {}})),
        "cannot be read: runs is missing, expected settings, runs, metrics, random",
    ),
    "no pickle": (lambda good, mark: sealed(b"hello"), "it cannot be read: "),
    "code": (lambda good, mark: sealed(encoded(Evil(mark))), "it cannot be read: Weights only"),
    "code as a pickle": (
        lambda good, mark: sealed(pickle.dumps(Evil(mark), 2)),
        "cannot be read: ",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_an_error_with_its_path(name: str, tmp_path: Path) -> None:
    save(tmp_path)
    path, mark = tmp_path / checkpoint.FILE, tmp_path / "mark"
    damage, says = DAMAGES[name]
    path.write_bytes(damage(path.read_bytes(), mark))
    with pytest.raises(InputError, match=rf"^{path}: .*{says}"):
        checkpoint.load(tmp_path, checkpoint.read(tmp_path), [Run({})], {"seed": 1})
    assert not mark.exists()


def test_a_good_checkpoint_is_loaded(tmp_path: Path) -> None:
    save(tmp_path)
    run = Run({})
    assert checkpoint.load(tmp_path, checkpoint.read(tmp_path), [run], {"seed": 1}) == "metrics"
    assert torch.equal(run.state["weights"], torch.arange(9))
