"""Every HcpError has a code, and every code an entry in the page on troubleshooting."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path
from typing import get_args

import pytest

import hcp
from hcp.errors import Code
from hcp.exchange.differences import first_difference, in_words

ROOT = Path(__file__).resolve().parents[2]
CODES = get_args(Code)


def errors_made() -> dict[str, str | None]:
    """The places that make an HcpError, with its code."""
    found: dict[str, str | None] = {}
    for path in sorted((ROOT / "hcp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "HcpError",
                "hcp.HcpError",
            ):
                codes = [ast.literal_eval(k.value) for k in node.keywords if k.arg == "code"]
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                found[place] = codes[0] if codes else None
    return found


def test_every_error_has_a_code_and_every_code_an_error() -> None:
    made = errors_made()
    assert {place: code for place, code in made.items() if code not in CODES} == {}
    assert set(made.values()) == set(CODES)


def test_the_page_has_an_entry_for_each_code_and_no_other() -> None:
    page = ROOT / "docs/guides/troubleshooting.md"
    if not page.exists():
        pytest.skip("no documents here")
    assert sorted(re.findall(r"^### HCP-(.+)$", page.read_text(), re.MULTILINE)) == sorted(CODES)


def test_an_error_shows_its_code_and_survives_a_process() -> None:
    error = pickle.loads(pickle.dumps(hcp.HcpError("rank 0: too late", code="rank-late")))
    assert str(error) == "rank 0: too late [HCP-rank-late]"
    assert (error.message, error.code) == ("rank 0: too late", "rank-late")


# ---- what differs, in words ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([True, False], "x differs: True on rank 0, False on rank 1"),
        ([1, 2, 1], "x differs: 1 on ranks 0 and 2, 2 on rank 1"),
        ([1, None], "x differs: 1 on rank 0, nothing on rank 1"),
        ([1] * 6 + [2], "x differs: 1 on ranks 0, 1, 2, 3 and 2 more, 2 on rank 6"),
    ],
)
def test_a_value_that_differs_is_named_with_its_ranks(values: list[object], says: str) -> None:
    assert in_words("x", dict(enumerate(values))) == says


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[1, 2], [1, 3]], "x[1] differs: 2 on rank 0, 3 on rank 1"),
        ([[1], [1, 3]], "the number of x differs: 1 on rank 0, 2 on rank 1"),
        ([{"a": 1, "b": [0]}, {"a": 1, "b": [4]}], "x.b[0] differs: 0 on rank 0, 4 on rank 1"),
        ([{"a": 1}, {"b": 1}], "x.a differs: 1 on rank 0, nothing on rank 1"),
        ([[["n", "int"]], [["n", "float"]]], "x.n differs: ['int'] on rank 0, ['float'] on rank 1"),
        ([[1], None], "x differs: [1] on rank 0, nothing on rank 1"),
        ([[], [["n", 1]]], "x.n differs: nothing on rank 0, [1] on rank 1"),
    ],
)
def test_the_first_part_that_differs_is_found(values: list[object], says: str) -> None:
    assert first_difference("x", dict(enumerate(values))) == says
