"""Find the best plan of a tiny request by trying all plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

import hcp


def slow_time(c: hcp.CostModel, length: int, degree: int, node: int = 0) -> int:
    """Compute the header's formula, term by term."""
    chunk = 2 * degree * c.tile
    rows = -(-length // chunk) * chunk if c.tile > 1 else length
    pairs = sum(min(i, c.window or i) for i in range(1, rows + 1))
    attention = c.pair * pairs
    far = 0 < node < degree
    exchange = max(c.exchange, c.exchange_far) if far else c.exchange
    heads = max(c.all_to_all, c.all_to_all_far) if far else c.all_to_all
    time = -(-(attention + c.token * rows) // degree)
    if degree == 1:
        return time
    moved = exchange * (length - length // degree)
    if c.overlap:
        share = -(-attention // degree)
        moved = max(0, moved - (share - share // degree))
    return time + moved + -(-heads * length // degree) + (degree - 1) * c.step


def costs() -> st.SearchStrategy[hcp.CostModel]:
    price = st.integers(0, 1000)
    maybe = st.one_of(st.just(0), price)
    return st.builds(
        hcp.CostModel,
        pair=st.integers(1, 50),
        token=price,
        exchange=maybe,
        launch=st.one_of(st.just(0), st.integers(0, 20_000)),
        host=st.one_of(st.just(0), st.integers(0, 50_000)),
        exchange_far=maybe,
        all_to_all=maybe,
        all_to_all_far=maybe,
        step=maybe,
        window=st.one_of(st.just(0), st.integers(1, 100)),
        tile=st.one_of(st.just(0), st.integers(1, 16)),
        overlap=st.integers(0, 1),
    )


Place = tuple[int, int, int]
"""(micro-batch, first rank, degree)."""


def fullest(length: int, degree: int) -> int:
    """Return the rows of the fullest rank, chunk by chunk."""
    cuts = [k * length // (2 * degree) for k in range(2 * degree + 1)]
    chunks = [b - a for a, b in itertools.pairwise(cuts)]
    return max(chunks[j] + chunks[-1 - j] for j in range(degree))


def all_plans(lengths: list[int], ranks: int, capacity: int) -> Iterator[dict[Place, list[int]]]:
    """Yield every way to put sequences into groups, and groups into micro-batches."""
    places = [
        (batch, first, degree)
        for batch in range(len(lengths))
        for degree in range(1, ranks + 1)
        for first in range(ranks - degree + 1)
    ]
    for chosen in itertools.product(places, repeat=len(lengths)):
        groups: dict[Place, list[int]] = {}
        for s, place in enumerate(chosen):
            groups.setdefault(place, []).append(s)
        if any(
            sum(fullest(lengths[s], degree) for s in members) > capacity
            for (_, _, degree), members in groups.items()
        ):
            continue
        if any(
            a[0] == b[0] and a[1] < b[1] + b[2] and b[1] < a[1] + a[2]
            for a, b in itertools.combinations(groups, 2)
        ):
            continue
        yield groups


def optimum(lengths: list[int], ranks: int, capacity: int, cost: hcp.CostModel, sync: str) -> int:
    times = {
        (length, degree): slow_time(cost, length, degree)
        for length in lengths
        for degree in range(1, ranks + 1)
    }
    best = None
    for groups in all_plans(lengths, ranks, capacity):
        free = [0] * ranks
        for _, batch in itertools.groupby(sorted(groups.items()), lambda group: group[0][0]):
            if sync == "micro_batch":
                free = [max(free)] * ranks
            outside = set(range(ranks))
            for (_, first, degree), members in batch:
                time = cost.launch + sum(times[lengths[s], degree] for s in members)
                end = max(free[first : first + degree]) + max(cost.host, time)
                free[first : first + degree] = [end] * degree
                outside -= set(range(first, first + degree))
            for rank in outside if sync == "step" else ():
                free[rank] += max(cost.host, cost.launch)
        best = max(free) if best is None else min(best, max(free))
    assert best is not None
    return best


@st.composite
def tiny(draw: st.DrawFn) -> dict[str, Any]:
    ranks, capacity = draw(st.integers(1, 3)), draw(st.integers(4, 40))
    length = st.integers(1, ranks * (capacity - 2))
    lengths = draw(st.lists(length, min_size=1, max_size=2 if ranks == 3 else 3))
    return {"lengths": lengths, "ranks": ranks, "capacity": capacity, "cost": draw(costs())}


def chosen(*places: tuple[int, int], **limits: Any) -> dict[str, Any]:
    """Return a plan of one micro-batch. Each of its groups has one sequence."""
    groups = [
        {"first_rank": first, "degree": degree, "sequences": [s]}
        for s, (first, degree) in enumerate(places)
    ]
    return {
        "ranks": 8,
        "max_tokens_per_rank": 64,
        "lengths": [60] * len(groups),
        "micro_batches": [{"groups": groups}],
    } | limits
