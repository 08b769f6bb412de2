"""tests/README.md names every part that tests share, and every program that needs GPUs."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS / "README.md").read_text()


def first_cells(title: str) -> str:
    """Return the first cells of the table after a line of the page."""
    _, found, after = PAGE.partition(f"\n{title}\n")
    assert found, title
    table = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    assert table, title
    return "\n".join(line.split(" | ")[0] for line in table[0].splitlines()[2:])


def test_every_file_of_support_has_a_row() -> None:
    patterns = re.findall(r"`([^`]+)`", first_cells("In `support/`:"))
    files = [path.name for path in (TESTS / "support").glob("*.py") if path.stem != "__init__"]
    assert files
    assert [name for name in files if not any(fnmatch(name, each) for each in patterns)] == []
    assert [each for each in patterns if not any(fnmatch(name, each) for name in files)] == []


def test_every_program_that_needs_gpus_has_a_row_or_is_run_by_one_that_has() -> None:
    rows = set(re.findall(r"tests/cuda/([\w.]+)", first_cells("## GPUs")))
    scripts = {path.name: path.read_text() for path in (TESTS / "cuda").glob("*.sh")}
    run = {name for text in scripts.values() for name in re.findall(r"tests/cuda/([\w.]+)", text)}
    programs = [*(TESTS / "cuda").glob("check_*.py"), *(TESTS / "cuda").glob("fuzz_*.py")]
    checks = {path.name for path in programs}
    assert checks
    assert sorted({*scripts, *checks} - rows - run) == []
    assert sorted(rows - {*scripts, *checks}) == []
