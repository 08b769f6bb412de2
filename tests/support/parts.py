"""The two parts of the core's tests: what `make test` runs, and the rest, which CI runs too.

Of a test with many cases, the day draws some, and at least one. A test marked `slow` is of the
rest. Together the parts are all tests, and no test is in both.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

PARTS = ("whole", "drawn", "rest")

SHARE = 8
"""One of so many cases of a test is drawn."""


def part_of_each(items: Iterable[pytest.Item], day: str) -> dict[pytest.Item, str]:
    """Return the part of each test. The order of `items` does not matter, but all must be there."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return {
        item: "drawn" if place < _drawn_of(of_one_test) else "rest"
        for of_one_test in cases.values()
        for place, item in enumerate(sorted(of_one_test, key=lambda item: _rank(item, day)))
    }


def _drawn_of(cases: list[pytest.Item]) -> int:
    """How many cases of a test are drawn: those marked `slow` never are."""
    quick = sum(not is_slow(case) for case in cases)
    return -(-quick // SHARE)


def _rank(item: pytest.Item, day: str) -> tuple[bool, int, str]:
    return is_slow(item), zlib.crc32(f"{day} {item.nodeid}".encode()), item.nodeid


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None
