"""docs/guides/known-faults.md names each case of others' faults, and only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guides" / "known-faults.md").read_text()
CASES = "tests/step/test_known_faults.py"


def names_in(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", (ROOT / file).read_text(), re.MULTILINE))


def test_the_page_names_every_case() -> None:
    assert sorted(names_in(CASES) - set(re.findall(r"`(test_\w+)`", PAGE))) == []


def test_every_case_that_the_page_names_exists() -> None:
    named = re.findall(r"`(?:(tests/\w+/\w+\.py)::)?(test_\w+)`", PAGE)
    assert len(named) > 15
    assert [name for file, name in named if name not in names_in(file or CASES)] == []


def test_every_fault_has_the_thread_in_which_it_was_reported_and_a_case() -> None:
    """A paragraph that begins in bold, and the list after it."""
    faults = re.findall(r"^\*\*(.+?\.)\*\* (.+?)(?=^\*\*|^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert len(faults) > 10
    without = [
        name
        for name, text in faults
        if not re.search(r"https://github.com/[\w-]+/[\w-]+/(pull|issues)/\d+", text)
        or "\n- `" not in text
    ]
    assert without == []
