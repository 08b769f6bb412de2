"""Sequences on single ranks are divided among them nearly evenly, and groups stand where ranks are
free soonest."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

import hcp
from hcp.planning.plan import Group
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


def arranged_end(plan: hcp.Plan, order: Iterable[tuple[Group, ...]]) -> int:
    """Return when the last rank ends, if of each micro-batch and degree the longest group stands
    where ranks are free soonest."""
    launch, free, run = plan.cost.launch, [0] * plan.ranks, [0] * plan.ranks
    for m, batch in enumerate(order):
        free = [free[r] + launch * (m - run[r]) for r in range(plan.ranks)]
        run = [m] * plan.ranks
        for degree in {group.degree for group in batch}:
            same = [group for group in batch if group.degree == degree]
            firsts = [group.first_rank for group in same]
            places = sorted((max(free[first : first + degree]), first) for first in firsts)
            times = sorted((plan.group_times(group)[-1] for group in same), reverse=True)
            for (start, first), time in zip(places, times, strict=True):
                free[first : first + degree] = [start + time] * degree
                run[first : first + degree] = [m + 1] * degree
    return max(free[r] + launch * (len(plan.micro_batches) - run[r]) for r in range(plan.ranks))


@pytest.mark.parametrize("seed", range(30))
def test_no_exchange_of_places_in_micro_batches_ends_sooner(seed: int) -> None:
    random = Random(seed)
    ranks = random.choice([7, 8, 16, 32])
    lengths = [round(8192 * 6 ** random.random()) for _ in range(4 * ranks)]
    made = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=8192, sync="step")
    check_plan(made, lengths)
    near = made.bound + made.bound // 200
    for order in (made.micro_batches, made.micro_batches[::-1]):
        assert made.makespan <= max(near, arranged_end(made, order))
