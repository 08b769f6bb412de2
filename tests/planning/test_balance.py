"""Sequences on single ranks are divided among them nearly evenly."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import hcp
from hcp.tools.check import check_plan


def differenced(times: list[int], ranks: int) -> int:
    """Return the fullest rank's time by the differencing of Karmarkar and Karp."""
    parts = [[0] * (ranks - 1) + [time] for time in times]
    while len(parts) > 1:
        parts.sort(key=lambda part: part[-1] - part[0])
        a, b = parts.pop(), parts.pop()
        parts.append(sorted(x + y for x, y in zip(a, reversed(b), strict=True)))
    return parts[0][-1]


@pytest.mark.parametrize("seed", range(40))
def test_single_ranks_are_balanced_at_least_as_by_differencing(seed: int) -> None:
    random = Random(seed)
    ranks = random.choice([4, 8, 16])
    count = ranks * random.choice([2, 3, 4, 6, 20]) + 1
    lengths = [round(100 * 160 ** random.random()) for _ in range(count)]
    cost = hcp.CostModel(launch=0)
    one: dict[str, Any] = {"min_degree": 1, "max_degree": 1, "max_tokens_per_rank": sum(lengths)}
    made = hcp.plan(lengths, ranks=ranks, cost=cost, **one)
    check_plan(made, lengths)
    times = [cost.time(length, 1) for length in lengths]
    assert made.makespan <= differenced(times, ranks)
