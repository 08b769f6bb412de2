"""Nothing in hcp opens a file for writing but its one writer, and what adds lines for programs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WRITERS = {Path("_files.py"), Path("tools/programs/files.py")}
"""Below hcp: what replaces a file whole, and what adds lines to one."""

WRITES = {"write_text", "write_bytes", "touch", "export_chrome_trace", "tofile", "to_csv"}
"""Methods that write a file by its name."""
CALLS = {
    *("os.replace", "os.rename", "os.truncate", "os.link", "os.symlink", "os.mkfifo", "os.mknod"),
    *("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move"),
    *("tempfile.NamedTemporaryFile", "tempfile.mkstemp", "zipfile.ZipFile", "tarfile.open"),
}
MEMORY = {"savefig": 0, "torch.save": 1, "json.dump": 1, "pickle.dump": 1, "numpy.save": 0}
"""Calls that may write into memory, an `io.BytesIO` of that name, and the place of the argument."""


def opens_for_writing(call: ast.Call, name: str) -> bool:
    """Whether a call of some `open` has a mode, or flags, that write."""
    if not (name == "open" or name.endswith((".open", ".fdopen"))):
        return False
    text = ast.unparse(call)
    if name == "os.open":
        return "O_RDONLY" not in text and "os.devnull" not in text
    at = 1 if name in ("open", "io.open", "os.fdopen", "gzip.open") else 0
    modes = [k.value for k in call.keywords if k.arg == "mode"] or call.args[at : at + 1]
    for mode in modes:
        if isinstance(mode, ast.Constant) and isinstance(mode.value, str):
            return bool(set(mode.value) & set("wax+"))
    return bool(modes)  # not known here


def writes_of(source: str) -> Iterator[str]:
    """Calls in a source text that may write a file."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        last = name.rpartition(".")[2]
        into = next((at for what, at in MEMORY.items() if name.endswith(what)), None)
        if into is not None:
            given = [ast.unparse(arg) for arg in call.args[into : into + 1]]
            found = given != ["memory"]
        else:
            found = last in WRITES or name in CALLS or opens_for_writing(call, name)
        if found:
            yield f"{call.lineno}: {ast.unparse(call)}"


def test_nothing_else_opens_a_file_for_writing() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{write}"
        for path in sorted((ROOT / "hcp").rglob("*.py"))
        if path.relative_to(ROOT / "hcp") not in WRITERS
        for write in writes_of(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "open(path, mode)",
        "path.open('r+')",
        "io.open(path, 'xb')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "path.write_text('')",
        "Path(path).write_bytes(data)",
        "torch.save(state, path)",
        "figure.savefig(path)",
        "json.dump(data, file)",
        "os.replace(new, path)",
        "shutil.copyfile(one, other)",
    ],
)
def test_a_write_would_be_found(source: str) -> None:
    assert len(list(writes_of(source))) == 1


def test_reading_and_memory_are_free() -> None:
    source = "open(path); path.open(); open(path, 'rb'); torch.save(state, memory); a.replace(b, c)"
    assert list(writes_of(source)) == []
