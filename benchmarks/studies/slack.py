"""Prove a sharper bound for plans whose ranks wait for each other after every micro-batch.

It tells how much of makespan / lower_bound is slack of the bound. With the default values:

    python -m pip install ortools
    python benchmarks/studies/slack.py --families P3,X2,P4,P2 --seeds 3 --rounds 16

The bound. Give every sequence j any price p_j >= 0. The worth of a micro-batch is the sum of the
prices of its sequences. Let V(h) be at least the worth of every micro-batch of height h or less. A
plan whose micro-batches are h_1 .. h_M high holds every sequence once, so that

    sum of p_j <= sum of V(h_m) = sum of h_m V(h_m) / h_m <= makespan * max over h of V(h) / h,

and no plan is faster than sum of p_j / max V(h) / h. This is the dual of the linear program that
chooses among all possible micro-batches, and its solution gives good prices. The bound holds for
any prices, also rounded ones, since it follows from V alone. V is computed here in integers, with
every division rounded to the safe side.

V. A micro-batch consists of groups of d ranks, which sum to at most N. Let the longest sequence of
a group lead it. No sequence leads twice, and the best leaders and degrees are a knapsack of N
ranks: a small dynamic program. A leader j of degree d leaves h - launch - T(j, d) of time and
d C - L_j of rows. The other sequences of the group are no longer than j and fit in both. Their
worth is at most the highest price per time of such a sequence times the time left, at most the
highest price per row times the rows left, and at most the sum of all their prices. Two rules are
relaxed: a sequence may be in several groups, and a group may hold parts of sequences.

V rises with h, so for all h from low to high, V(h) / h is at most V(high) / low. The interval with
the highest such value is split until it is narrow. No micro-batch is worth more than the sum of all
prices, so heights above 2 * lower_bound need no V.

Prices come from column generation: solve the linear program over the known micro-batches, search
for ones that are worth more than their height at a mean of its prices so far, add those, repeat.

Limits of degrees, slow ranks and alignment are ignored. They only make plans slower, so the bound
also holds with them.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import families
from common.machine import planner_line

import hcp
from hcp.planning.limits import rows_held
from hcp.planning.plan import lower_bound

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

NEVER = 1 << 60
"""The time of a sequence at a degree that does not hold it."""
WHOLE = 1 << 40
"""The approximate sum of all prices."""
NARROW = 2048
"""An interval of heights is narrow at this part of its height."""
KNOTS = 32
THIN = 128
"""The first heights differ by more than this part."""
DECIDING = 60
"""The most heights that a bound adds to those."""
APART = 512
"""Added heights differ by at least this part."""
TURNS = 4
"""The number of times that prices are searched for and proven."""
PARTS = 4
"""A round looks at one height in so many."""
PULL = 0.3
"""The weight of a round's prices in their mean."""


class Batch:
    """The sequences of a plan, shortest first, and their costs."""

    def __init__(self, plan: hcp.Plan) -> None:
        self.plan = plan
        self.order = sorted(range(len(plan.lengths)), key=lambda s: (plan.lengths[s], s))
        self.lengths = np.array([plan.lengths[s] for s in self.order], dtype=np.int64)
        self.degrees = np.arange(1, plan.ranks + 1)
        times = {length: self._times(length) for length in set(plan.lengths)}
        self.times = np.array([times[int(length)] for length in self.lengths], dtype=np.int64)
        # No sequence from i on takes less.
        self.at_least = np.minimum.accumulate(self.times[::-1])[::-1]
        rows = self.degrees * plan.max_tokens_per_rank - self.lengths[:, None]
        self.rows_left = np.maximum(rows, 0)
        """[leader, degree]"""
        shorter = np.arange(len(self.lengths))[:, None]
        fit = np.searchsorted(self.lengths, self.rows_left, side="right")
        self.limit_by_rows = np.minimum(fit, shorter)
        self.launch = plan.cost.launch

    def _times(self, length: int) -> list[int]:
        plan, node = self.plan, self.plan.core.ranks_per_node
        return [
            plan.cost.time(length, d, node)
            if max(rows_held(length, d, r) for r in range(d)) <= plan.max_tokens_per_rank
            else NEVER
            for d in range(1, plan.ranks + 1)
        ]


# ---- what a micro-batch is worth -----------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """The time and rows that leaders of each degree leave in a micro-batch of some height; [leader,
    degree]."""

    left: Integers
    """The time left; less than 0 if the leader does not fit."""
    limit: NDArray[np.int32]
    """The number of the shortest sequences that may be in the group."""

    @classmethod
    def of(cls, batch: Batch, height: int) -> Room:
        left = height - batch.launch - batch.times
        fits = [
            np.searchsorted(batch.at_least[:, d], left[:, d], side="right")
            for d in range(batch.plan.ranks)
        ]
        limit = np.minimum(np.stack(fits, axis=1), batch.limit_by_rows)
        return cls(left, limit.astype(np.int32))


Choices = list[tuple[int, int]]
"""(degree, worth of the group) for one leader."""


class Rates:
    """The highest price per amount among the first i sequences, in integers, rounded up."""

    def __init__(self, prices: Integers, amounts: Integers, most: int) -> None:
        each = int((prices // amounts).max()) + 1
        largest = max(each.bit_length() + most.bit_length(), int(prices.max()).bit_length())
        self.bits = 61 - largest
        if self.bits < 0:
            raise OverflowError(f"a price of {each} for each of {most}, expected 61 bits")
        rates = -(-(prices << self.bits) // amounts)
        self.first = np.maximum.accumulate(np.concatenate([np.zeros_like(rates[:1]), rates]))

    def worth(self, rates: Integers, amounts: Integers) -> Integers:
        return -(-(rates * amounts) >> self.bits)


class Worth:
    """V(h) at given prices."""

    def __init__(self, batch: Batch, prices: Integers) -> None:
        self.batch, self.prices, self.ranks = batch, prices, batch.plan.ranks
        self.by_time = Rates(prices[:, None], batch.times, 2 * batch.plan.bound)
        self.by_row = Rates(prices, batch.lengths, int(batch.rows_left.max()))
        self.sums = np.concatenate([[0], np.cumsum(prices)])

    def values(self, room: Room) -> Integers:
        """Return the worth of the best groups, -1 if there is none; [leader, degree]."""
        rates = np.take_along_axis(self.by_time.first, room.limit, axis=0)
        timed = self.by_time.worth(rates, np.maximum(room.left, 0))
        rowed = self.by_row.worth(self.by_row.first[room.limit], self.batch.rows_left)
        fill = np.minimum(np.minimum(timed, rowed), self.sums[room.limit])
        return np.where(room.left >= 0, self.prices[:, None] + fill, -1)

    def leaders(self, room: Room, floor: int) -> dict[int, Choices]:
        """Return the leaders, with their choices, that may be in a set worth more than the floor.

        For any price r of a rank, V <= N r + the sum over leaders of their best gain: the most that
        a group of theirs is worth above r times its degree, or 0. Let the gap be this sum minus the
        floor. A choice whose gain is below the leader's best by more than the gap is in no set that
        is worth more than the floor."""
        values = self.values(room)
        held = np.flatnonzero((values >= 0).any(axis=1))
        values = values[held]
        low, high = 0, max(1, int(values.max(initial=0)))
        while high - low > 1 + low // 64:
            middle = (low + high) // 2
            above = values - middle * self.batch.degrees
            at = above.argmax(axis=1)
            used = (at + 1)[above[np.arange(len(at)), at] > 0].sum()
            low, high = (middle, high) if used > self.ranks else (low, middle)
        above = values - high * self.batch.degrees
        top = np.maximum(0, above.max(axis=1, initial=0))
        gap = self.ranks * high + int(top.sum()) - floor
        wanted = (top[:, None] - above <= gap) & (values >= 0) & self.undominated(values)
        return {
            int(held[i]): [(int(d) + 1, int(values[i, d])) for d in np.flatnonzero(wanted[i])]
            for i in self.enough(wanted, values)
        }

    def undominated(self, values: Integers) -> NDArray[np.bool_]:
        """Mark the choices that no other choice can replace.

        A micro-batch has at most N groups, so one of the N + 1 best leaders of one rank is always
        unused. A group of d ranks can be replaced by one of fewer ranks by its leader, or by none,
        together with such an unused leader for each rank that this frees, if these are worth as
        much."""
        single = np.sort(values[:, 0])
        spare = max(0, int(single[-self.ranks - 1])) if len(single) > self.ranks else 0
        gain = values - spare * self.batch.degrees
        before = np.maximum.accumulate(np.pad(gain, ((0, 0), (1, 0)))[:, :-1], axis=1)
        better = gain > before
        better[:, 0] |= values[:, 0] >= spare
        return better

    def enough(self, wanted: NDArray[np.bool_], values: Integers) -> Integers:
        """Keep only the best N / d of the leaders whose one choice is degree d."""
        alone, degree = wanted.sum(axis=1) == 1, wanted.argmax(axis=1)
        chosen = [np.flatnonzero(wanted.any(axis=1) & ~alone)]
        for d in np.unique(degree[alone]):
            same = np.flatnonzero(alone & (degree == d))
            best = np.argsort(-values[same, d], kind="stable")[: self.ranks // (int(d) + 1)]
            chosen.append(same[best])
        return np.concatenate(chosen)

    def tables(self, leaders: dict[int, Choices]) -> list[Integers]:
        """Return the most that each number of ranks is worth, for each number of first leaders."""
        tables = [np.zeros(self.ranks + 1, dtype=np.int64)]
        for choices in leaders.values():
            table = tables[-1].copy()
            for d, value in choices:
                np.maximum(table[d:], tables[-1][:-d] + value, out=table[d:])
            tables.append(table)
        return tables

    def most(self, room: Room, floor: int) -> int:
        """Return V(h), or the floor if that is more."""
        return max(floor, int(self.tables(self.leaders(room, floor))[-1][-1]))

    def best(self, room: Room, floor: int) -> Floats:
        """Return the number of times that each sequence is in the set of worth V(h).

        The set is empty if that worth is not above the floor."""
        leaders, ranks, held = self.leaders(room, floor), self.ranks, np.zeros(len(self.prices))
        tables = self.tables(leaders)
        for i, (j, choices) in reversed(list(enumerate(leaders.items()))):
            if tables[i + 1][ranks] == tables[i][ranks]:
                continue
            degree = next(
                d
                for d, value in choices
                if d <= ranks and tables[i][ranks - d] + value == tables[i + 1][ranks]
            )
            ranks -= degree
            held[j] += 1
            self._fill(held, room, j, degree - 1)
        return held

    def _fill(self, held: Floats, room: Room, j: int, d: int) -> None:
        limit = int(room.limit[j, d])
        if limit == 0:
            return
        times, lengths = self.batch.times[:limit, d], self.batch.lengths[:limit]
        by_time = int((self.prices[:limit] / times).argmax())
        by_row = int((self.prices[:limit] / lengths).argmax())
        often_by_time = int(room.left[j, d]) / int(times[by_time])
        often_by_row = int(self.batch.rows_left[j, d]) / int(lengths[by_row])
        timed, rowed = often_by_time * self.prices[by_time], often_by_row * self.prices[by_row]
        if self.sums[limit] < min(timed, rowed):
            held[:limit] += 1
        elif timed < rowed:
            held[by_time] += often_by_time
        else:
            held[by_row] += often_by_row


def proven(batch: Batch, prices: Integers, enough: int) -> tuple[int, list[int]]:
    """Return a time that no plan beats, by these prices, and the heights that decide it.

    The search does not look for more than `enough`."""
    worth, whole = Worth(batch, prices), int(prices.sum())
    least, top = batch.launch + int(batch.times.min()), 2 * batch.plan.bound
    edges = [least]
    while edges[-1] < top:
        edges.append(min(top, edges[-1] + edges[-1] // 16 + 1))
    heap = [(-whole / top, top, top, whole)]

    def add(low: int, high: int) -> None:
        value = worth.most(Room.of(batch, high), whole * low // enough)
        heapq.heappush(heap, (-value / low, low, high, value))

    add(least, least)
    for low, high in itertools.pairwise(edges):
        add(low + 1, high)
    while heap[0][2] - heap[0][1] > heap[0][1] // NARROW:
        _, low, high, value = heapq.heappop(heap)
        middle = low + (high - low) // 2
        add(low, middle)
        heapq.heappush(heap, (-value / (middle + 1), middle + 1, high, value))
    bound = min(whole * low // value for _, low, _, value in heap if value > 0)
    return bound, apart([high for _, _, high, _ in sorted(heap)])


def apart(heights: list[int]) -> list[int]:
    """Return the first heights that differ by a part of APART from all before."""
    chosen: list[int] = []
    for height in heights:
        if len(chosen) < DECIDING and all(abs(height - h) > h // APART for h in chosen):
            chosen.append(height)
    return chosen


# ---- prices --------------------------------------------------------------------------------------


class Prices:
    """Linear programs over the known micro-batches: the prices with the largest sum at which none
    of these is worth more than its height.

    A price is a sequence's least rank-time times a factor. The factor is linear between knots at
    equal shares of all rank-time. So there are few unknowns for many sequences of similar length.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        area = (batch.times * batch.degrees.astype(np.float64)).min(axis=1)
        position = np.cumsum(area) / area.sum() * KNOTS
        hats = np.maximum(0, 1 - abs(position[:, None] - np.arange(KNOTS + 1)))
        self.basis = hats * (area / area.sum())[:, None]
        self.lp = pywraplp.Solver.CreateSolver("GLOP")
        self.factors = [self.lp.NumVar(0, self.lp.infinity(), "") for _ in range(KNOTS + 1)]
        self.lp.Maximize(
            sum(float(w) * v for w, v in zip(self.basis.sum(axis=0), self.factors, strict=True))
        )
        self.area = area / area.sum()
        for j, fastest in enumerate(batch.times.min(axis=1)):
            self.add(int(fastest) + batch.launch, np.arange(len(area)) == j)
        position_of = {s: j for j, s in enumerate(batch.order)}
        for groups in batch.plan.micro_batches:
            held = np.zeros(len(area))
            held[[position_of[s] for group in groups for s in group.sequences]] = 1
            self.add(max(batch.plan.group_time(group) for group in groups), held)

    def add(self, height: int, held: NDArray[Any]) -> None:
        row = self.lp.Constraint(-self.lp.infinity(), height / self.batch.plan.bound)
        for weight, factor in zip(held @ self.basis, self.factors, strict=True):
            row.SetCoefficient(factor, float(weight))

    def solve(self) -> Floats:
        """Return the prices that solve the linear program, in parts of the plan's bound."""
        if self.lp.Solve() != pywraplp.Solver.OPTIMAL:
            raise AssertionError("GLOP found no prices")
        return np.array(self.basis @ [factor.solution_value() for factor in self.factors])


def rounded(prices: Floats) -> Integers:
    return np.floor(prices / prices.sum() * WHOLE).astype(np.int64)


def heights(batch: Batch) -> list[int]:
    """Return the heights of single sequences at all degrees, thinned out."""
    chosen = [0]
    for time_ in np.unique(batch.times[batch.times < NEVER]):
        if time_ + batch.launch > chosen[-1] + chosen[-1] // THIN:
            chosen.append(int(time_) + batch.launch)
    return [h for h in chosen[1:] if h <= batch.plan.bound]


def sharper(plan: hcp.Plan, rounds: int) -> int:
    """Return a time that no plan under the plan's limits and cost beats."""
    if plan.sync != "micro_batch" or plan.core.pipeline_stages > 1:
        raise ValueError(
            f"a plan of sync={plan.sync!r} and {plan.core.pipeline_stages} stages, "
            "expected 'micro_batch' and 1"
        )
    batch = Batch(plan)
    program, bound = Prices(batch), plan.bound
    mean = program.area
    rooms = {h: Room.of(batch, h) for h in heights(batch)}
    for _ in range(TURNS):
        for i in range(rounds):
            found = program.solve()
            mean = (1 - PULL) * mean + PULL * found
            worth = Worth(batch, rounded(mean))
            unit = WHOLE / mean.sum() / plan.bound
            for h, room in itertools.islice(rooms.items(), i % PARTS, None, PARTS):
                held = worth.best(room, int(unit * h))
                if held @ found > h / plan.bound:
                    program.add(h, held)
        least, deciding = proven(batch, rounded(mean), plan.makespan)
        bound = max(bound, least)
        rooms |= {h: Room.of(batch, h) for h in deciding if h not in rooms}
    return bound


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default="P3,X2,P4,P2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=16, help="of prices, four times")
    args = parser.parse_args()
    print(f"{planner_line()}\n")
    print(
        "| case | seed | N | K | plan / lower_bound | sharper / lower_bound "
        "| effort=2 / lower_bound "
        "| plan / sharper | CPU s |\n" + "|---" * 9 + "|"
    )
    for seed in range(args.seeds):
        for name in args.families.split(","):
            family = families.BY_NAME[name]
            lengths = family.draw(Random(seed))
            request: dict[str, Any] = {
                "ranks": family.ranks,
                "max_tokens_per_rank": family.capacity,
                "sync": "micro_batch",
            }
            plan = hcp.plan(lengths, **request)
            searched = lower_bound(lengths, **request, effort=2)
            begun = time.process_time()
            bound = sharper(plan, args.rounds)
            took = time.process_time() - begun
            print(
                f"| {name} | {seed} | {family.ranks} | {len(lengths)} "
                f"| {plan.makespan / plan.bound:.4f} | {bound / plan.bound:.4f} "
                f"| {searched / plan.bound:.4f} "
                f"| {plan.makespan / bound:.4f} | {took:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
