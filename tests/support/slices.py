"""Slices of masks in slow and obvious Python: pairs one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hcp.planning.mask import Slice

Pairs = set[tuple[int, int]]


def pairs_of(part: Slice) -> Pairs:
    """The (query, key) that a slice sees."""
    low, high = part.band
    rectangle = itertools.product(range(*part.queries), range(*part.keys))
    return {(query, key) for query, key in rectangle if low <= key - query <= high}


def first_overlap(slices: Sequence[Slice]) -> tuple[int, int, Pairs] | None:
    """Two slices that see the same pairs, with these, or None."""
    for (a, one), (b, other) in itertools.combinations(enumerate(slices), 2):
        if common := pairs_of(one) & pairs_of(other):
            return a, b, common
    return None
