"""Planners that others published or ship, re-implemented in our own code.

Each takes lengths, ranks N, capacity C and a cost model, and returns micro-batches of
(first_rank, degree, sequences). They were made for other cost models, so a ratio here is a gap
under this one, not a measured slowdown. They are written for clarity: do not compare their speed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import hcp
from hcp.planning.cost import PRICES
from hcp.planning.limits import slowness_of

Group = tuple[int, int, list[int]]
Batches = list[list[Group]]
Planner = Callable[[list[int], int, int, hcp.CostModel], Batches]


def rows(length: int, degree: int) -> int:
    """Return an upper bound of the fullest rank's rows."""
    return length if degree == 1 else -(-length // degree) + (length % (2 * degree) > 0)


def static_degree(lengths: list[int], ranks: int, capacity: int) -> int:
    return next(
        d for d in range(1, ranks + 1) if ranks % d == 0 and rows(max(lengths), d) <= capacity
    )


def fixed_width(packs: list[list[int]], ranks: int, degree: int) -> Batches:
    """Place packs in order, N / d of them in each micro-batch."""
    lanes = ranks // degree
    return [
        [(lane * degree, degree, pack) for lane, pack in enumerate(packs[i : i + lanes])]
        for i in range(0, len(packs), lanes)
    ]


def static_cp(lengths: list[int], ranks: int, capacity: int, cost: hcp.CostModel) -> Batches:
    """Plan static CP without packing: one degree for all, one sequence per group."""
    degree = static_degree(lengths, ranks, capacity)
    return fixed_width([[i] for i in range(len(lengths))], ranks, degree)


def next_fit(lengths: list[int], ranks: int, capacity: int, cost: hcp.CostModel) -> Batches:
    """Plan like Megatron's dp_balanced: one degree, sequences packed in their order."""
    return next_fit_at(static_degree(lengths, ranks, capacity), lengths, ranks, capacity)


def next_fit_at(degree: int, lengths: list[int], ranks: int, capacity: int) -> Batches:
    packs: list[list[int]] = [[]]
    held = 0
    for i, length in enumerate(lengths):
        if held + rows(length, degree) > capacity:
            packs.append([])
            held = 0
        packs[-1].append(i)
        held += rows(length, degree)
    return fixed_width(packs, ranks, degree)


def karmarkar_karp(
    lengths: list[int], ranks: int, capacity: int, cost: hcp.CostModel, degree: int | None = None
) -> Batches:
    """Plan like RL trainers, at one degree (default: the least that holds the longest). Sequences
    go to data-parallel ranks by largest differencing on their times. Each of these then packs its
    own, longest first."""
    degree = degree or static_degree(lengths, ranks, capacity)
    lanes = ranks // degree
    tie = itertools.count()
    heap = []
    for i, length in enumerate(lengths):
        parts = [(cost.time(length, degree), [i])] + [(0, []) for _ in range(lanes - 1)]
        heap.append((-parts[0][0], next(tie), parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        b = sorted(b, key=lambda part: part[0])
        joined = [(s + t, p + q) for (s, p), (t, q) in zip(a, b, strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], next(tie), joined))
    batches: Batches = []
    for lane, (_, members) in enumerate(heap[0][2]):
        packs: list[tuple[int, list[int]]] = []
        for i in sorted(members, key=lambda i: -lengths[i]):
            need = rows(lengths[i], degree)
            k = next((k for k, (held, _) in enumerate(packs) if held + need <= capacity), None)
            if k is None:
                packs.append((need, [i]))
            else:
                packs[k] = (packs[k][0] + need, [*packs[k][1], i])
        for m, (_, pack) in enumerate(packs):
            if m == len(batches):
                batches.append([])
            batches[m].append((lane * degree, degree, pack))
    return batches


def power_at_least(length: int, capacity: int) -> int:
    degree = 1
    while rows(length, degree) > capacity:
        degree *= 2
    return degree


def wave_greedy(lengths: list[int], ranks: int, capacity: int, cost: hcp.CostModel) -> Batches:
    """Plan like Megatron's default_dynamic_cp: one wave at a time, powers of two, work s^2 / d.

    Each sequence goes where the most loaded rank stays least loaded. Empty ranks double the
    smallest groups."""
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    waves: Batches = []
    while left:
        cap = lengths[left[0]] * capacity * 1.05
        groups: list[tuple[int, float, int, list[int]]] = []  # degree, load, rows, members
        free, rest = ranks, []
        for i in left:
            best = None
            degree = power_at_least(lengths[i], capacity)
            while degree <= ranks:
                work = lengths[i] ** 2 / degree
                top = max((g[1] for g in groups), default=0.0)
                for k, (d, load, held, _) in enumerate(groups):
                    if d == degree and held + rows(lengths[i], d) <= capacity:
                        peak = max(top, load + work)
                        if peak <= cap and (best is None or peak < best[0]):
                            best = (peak, k, degree, work)
                peak = max(top, work)
                opens = free >= degree and (not groups or peak <= cap)
                if opens and (best is None or peak < best[0]):
                    best = (peak, -1, degree, work)
                if not groups:
                    break
                degree *= 2
            if best is None:
                rest.append(i)
                continue
            _, k, degree, work = best
            if k < 0:
                free -= degree
                groups.append((degree, work, rows(lengths[i], degree), [i]))
            else:
                d, load, held, members = groups[k]
                groups[k] = (d, load + work, held + rows(lengths[i], d), [*members, i])
        groups.sort(key=lambda g: -g[0])
        while free:
            small = next((k for k in reversed(range(len(groups))) if groups[k][0] <= free), None)
            if small is None:
                break
            d, load, held, members = groups[small]
            groups[small] = (2 * d, load / 2, held, members)
            free -= d
            groups.sort(key=lambda g: -g[0])
        waves.append(side_by_side([(d, members) for d, _, _, members in groups]))
        left = rest
    return waves


def side_by_side(groups: list[tuple[int, list[int]]]) -> list[Group]:
    placed, first = [], 0
    for degree, members in sorted(groups, key=lambda g: -g[0]):
        placed.append((first, degree, members))
        first += degree
    return placed


def best_fit_top_up(lengths: list[int], ranks: int, capacity: int, cost: hcp.CostModel) -> Batches:
    """Plan like FCP (arXiv 2602.21788): best-fit decreasing into the memory that long sequences
    open, first fit of those groups into waves, then each next rank to the slowest group."""
    bins: list[tuple[int, int, list[int]]] = []  # degree, rows, members
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        best = None
        for k, (degree, held, _) in enumerate(bins):
            room = capacity - held - rows(lengths[i], degree)
            if room >= 0 and (best is None or room < best[0]):
                best = (room, k)
        if best is None:
            degree = next(d for d in range(1, ranks + 1) if rows(lengths[i], d) <= capacity)
            bins.append((degree, rows(lengths[i], degree), [i]))
        else:
            degree, held, members = bins[best[1]]
            bins[best[1]] = (degree, held + rows(lengths[i], degree), [*members, i])
    waves: list[tuple[int, list[tuple[int, list[int]]]]] = []
    for degree, _, members in sorted(bins, key=lambda b: -b[0]):
        first = next((k for k, (free, _) in enumerate(waves) if free >= degree), None)
        if first is None:
            waves.append((ranks - degree, [(degree, members)]))
        else:
            free, groups = waves[first]
            waves[first] = (free - degree, [*groups, (degree, members)])
    return [side_by_side(topped_up(groups, free, lengths, cost)) for free, groups in waves]


def topped_up(
    groups: list[tuple[int, list[int]]], free: int, lengths: list[int], cost: hcp.CostModel
) -> list[tuple[int, list[int]]]:
    def time(degree: int, members: list[int]) -> int:
        return sum(cost.time(lengths[i], degree) for i in members)

    heap = [(-time(d, members), k, d, members) for k, (d, members) in enumerate(groups)]
    heapq.heapify(heap)
    while free:
        slowest, k, d, members = heap[0]
        wider = next((d + x for x in range(1, free + 1) if -time(d + x, members) > slowest), None)
        if wider is None:
            break
        free -= wider - d
        heapq.heapreplace(heap, (-time(wider, members), k, wider, members))
    return [(d, members) for _, _, d, members in heap]


PEERS: dict[str, Planner] = {
    "static CP": static_cp,
    "next-fit": next_fit,
    "Karmarkar-Karp": karmarkar_karp,
    "wave greedy": wave_greedy,
    "BFD + top-up": best_fit_top_up,
}
POWERS_ONLY = {"wave greedy"}
MOST_RANKS = 256
"""The most ranks for peers that take many seconds per batch beyond."""


def judged(name: str, lengths: list[int], request: dict[str, Any]) -> int | None:
    """Return the makespan of a peer's plan by hcp's judge, or None if it cannot plan these ranks or
    does not end in time. ``request``: hcp.plan's arguments; peers use ranks, capacity and cost."""
    ranks = request["ranks"]
    if ranks > MOST_RANKS or (name in POWERS_ONLY and ranks & (ranks - 1)):
        return None
    cost, capacity = request["cost"], request["max_tokens_per_rank"]
    return plan_of(PEERS[name](lengths, ranks, capacity, cost), lengths, request).makespan


def plan_of(batches: Batches, lengths: list[int], request: dict[str, Any]) -> hcp.Plan:
    """Make a plan of micro-batches. ``request``: hcp.plan's arguments."""
    groups = [
        {"groups": [{"first_rank": f, "degree": d, "sequences": s} for f, d, s in batch]}
        for batch in batches
    ]
    data = {key: value for key, value in request.items() if key not in ("cost", "speeds")}
    if "speeds" in request:
        data["slowness"] = slowness_of(request["speeds"])
    prices = dict(zip(PRICES, request["cost"].prices, strict=True))
    data |= {"lengths": lengths, "cost": prices, "micro_batches": groups}
    return hcp.Plan.from_dict(data)
