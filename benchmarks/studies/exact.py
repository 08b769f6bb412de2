"""Find the best plan of small instances by OR-tools' CP-SAT.

It tells how much of makespan / bound is slack of the bound, and how much the planner loses.

    python -m pip install ortools
    python benchmarks/studies/exact.py [--ranks 8] [--sequences 12] [--seeds 5] [--seconds 20]

The model has all decisions of hcp.plan: the sequences of a group, its degree, its ranks, and its
place in time, under equal memory and cost. Times are divided and rounded down until the bound is
200,000 units, so a proven optimum holds to (sequences + groups) / 200,000. If the solver does not
finish, its own lower bound replaces the optimum.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from ortools.sat.python import cp_model

sys.path.append(str(Path(__file__).resolve().parents[1]))
from bench_plan import COSTS
from common.machine import planner_line
from common.small import instances, median_and_worst

import hcp
from hcp._words import Sync
from hcp.planning.limits import rows_held

RESOLUTION = 200_000
PRICES = {name: cost for name, (cost, _) in COSTS.items()} | {
    "gpt-1b-h200": hcp.CostModel.preset("gpt-1b-h200")
}
"""Those of the other benchmarks, and measured ones, by which plans lose most."""


@dataclass(frozen=True)
class Solved:
    """A solved instance. Times are in the cost model's unit."""

    best: int
    """The makespan of the best known plan. The planner's own is one of them."""
    proven: int
    """A lower bound for all plans. If the solver finished, it equals ``best``, to rounding."""
    finished: bool


class Model:
    """The model: group i < K is led by its lowest member i, and is empty if i is in another."""

    def __init__(self, plan: hcp.Plan) -> None:
        self.plan, self.lengths, self.ranks = plan, plan.lengths, plan.ranks
        self.cost = plan.cost
        self.quantum = max(1, plan.bound // RESOLUTION)
        self.most = -(-plan.makespan // self.quantum)
        self.cp = cp_model.CpModel()
        self.degrees = range(1, plan.ranks + 1)
        self.member: dict[tuple[int, int, int], Any] = {}
        self._place_sequences()
        self.heights = [self._height(i) for i in range(len(self.lengths))]
        self.makespan = self.cp.new_int_var(plan.bound // self.quantum, self.most, "makespan")

    def scaled(self, time: int) -> int:
        return time // self.quantum

    def _place_sequences(self) -> None:
        """Add the variables member[i, j, d]: sequence j is in group i, which has degree d."""
        count, most = len(self.lengths), self.plan.max_tokens_per_rank
        for j, length in enumerate(self.lengths):
            fitting = [
                d for d in self.degrees if max(rows_held(length, d, r) for r in range(d)) <= most
            ]
            for i in range(j + 1):
                for d in fitting:
                    self.member[i, j, d] = self.cp.new_bool_var(f"{i},{j},{d}")
            self.cp.add_exactly_one(self.member[i, j, d] for i in range(j + 1) for d in fitting)
        for (i, j, d), variable in self.member.items():
            if i != j:
                leader = self.member.get((i, i, d))
                self.cp.add(variable == 0) if leader is None else self.cp.add_implication(
                    variable, leader
                )
        for i in range(count):
            for d in self.degrees:
                self._keep_memory(i, d, most)

    def _keep_memory(self, i: int, d: int, most: int) -> None:
        inside = [j for j in range(i, len(self.lengths)) if (i, j, d) in self.member]
        for rows in {tuple(rows_held(self.lengths[j], d, r) for j in inside) for r in range(d)}:
            if sum(rows) > most:
                terms = [n * self.member[i, j, d] for n, j in zip(rows, inside, strict=True)]
                self.cp.add(sum(terms) <= most)

    def leads(self, i: int) -> list[tuple[int, Any]]:
        """Return (degree, the variable that group i has it) for all degrees."""
        return [(d, self.member[i, i, d]) for d in self.degrees if (i, i, d) in self.member]

    def _height(self, i: int) -> Any:
        launch = self.scaled(self.cost.launch)
        node = self.plan.core.ranks_per_node
        return sum(
            (self.scaled(self.cost.time(self.lengths[j], d, node)) + (launch if i == j else 0)) * v
            for (k, j, d), v in self.member.items()
            if k == i
        )

    def add_step(self) -> None:
        """Let ranks wait at the end only: groups are rectangles of ranks and time.

        Every rank launches every micro-batch, with rows or without, so times are counted without
        launches, which the makespan has once for each micro-batch."""
        across, along, widths, batches, used = [], [], [], [], []
        count, launch = len(self.lengths), self.scaled(self.cost.launch)
        batch_count = self.cp.new_int_var(1, count, "micro-batches")
        for i in range(count):
            used.append(self.cp.new_bool_var(f"used {i}"))
            self.cp.add(sum(v for _, v in self.leads(i)) == used[i])
            width = sum(d * v for d, v in self.leads(i))
            across.append(self._interval(width, self.ranks, used[i], f"ranks {i}"))
            widths.append(across[-1].size_expr())
            work = self.heights[i] - launch * used[i]
            along.append(self._interval(work, self.most, used[i], f"time {i}"))
            batches.append(self.cp.new_int_var(0, count - 1, f"micro-batch {i}"))
            self.cp.add(batches[i] < batch_count).only_enforce_if(used[i])
            self.cp.add(along[-1].end_expr() + launch * batch_count <= self.makespan)
        for i, j in itertools.combinations(range(count), 2):
            self._set_apart(i, j, across, along, batches, used)
        # Implied: at no time are more ranks busy than there are.
        self.cp.add_cumulative(along, widths, self.ranks)

    def _set_apart(
        self,
        i: int,
        j: int,
        across: list[Any],
        along: list[Any],
        batches: list[Any],
        used: list[Any],
    ) -> None:
        """Let two groups have other ranks, or one come after the other."""
        ways = [used[i].negated(), used[j].negated()]
        for a, b in ((i, j), (j, i)):
            beside, before = (self.cp.new_bool_var(f"{a} {way} {b}") for way in ("|", "<"))
            self.cp.add(across[a].end_expr() <= across[b].start_expr()).only_enforce_if(beside)
            self.cp.add(along[a].end_expr() <= along[b].start_expr()).only_enforce_if(before)
            self.cp.add(batches[a] < batches[b]).only_enforce_if(before)
            ways += [beside, before]
        self.cp.add_bool_or(ways)

    def _interval(self, size: Any, most: int, used: Any, name: str) -> Any:
        start, length, end = (self.cp.new_int_var(0, most, f"{name} {k}") for k in range(3))
        self.cp.add(length == size)
        return self.cp.new_optional_interval_var(start, length, end, used, name)

    def add_micro_batches(self) -> None:
        """Let all ranks wait after every micro-batch, which takes the time of its slowest group."""
        count = len(self.lengths)
        tall = [self.cp.new_int_var(0, self.most, f"height {m}") for m in range(count)]
        wide: list[list[Any]] = [[] for _ in range(count)]
        for i in range(count):
            placed = {
                (d, m): self.cp.new_bool_var(f"{i},{d},{m}")
                for d, _ in self.leads(i)
                for m in range(count)
            }
            for d, leader in self.leads(i):
                self.cp.add(sum(placed[d, m] for m in range(count)) == leader)
            for m in range(count):
                here = [placed[d, m] for d, _ in self.leads(i)]
                inside = self.cp.new_bool_var(f"{i} in {m}")
                self.cp.add(sum(here) == inside)
                self.cp.add(tall[m] >= self.heights[i]).only_enforce_if(inside)
                wide[m] += [d * placed[d, m] for d, _ in self.leads(i)]
        for m in range(count):
            self.cp.add(sum(wide[m]) <= self.ranks)
        for higher, lower in itertools.pairwise(tall):
            self.cp.add(higher >= lower)
        self.cp.add(sum(tall) <= self.makespan)

    def add_area(self) -> None:
        """Add an implied constraint that helps the solver: all rank-time is within the makespan."""
        node = self.plan.core.ranks_per_node
        launch = self.scaled(self.cost.launch)
        area = sum(
            d * (self.scaled(self.cost.time(self.lengths[j], d, node)) + (launch if i == j else 0))
            * v
            for (i, j, d), v in self.member.items()
        )  # fmt: skip
        self.cp.add(area <= self.ranks * self.makespan)


def solve(plan: hcp.Plan, seconds: float, workers: int) -> Solved:
    model = Model(plan)
    model.add_step() if plan.sync == "step" else model.add_micro_batches()
    model.add_area()
    model.cp.minimize(model.makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model.cp)
    if status == cp_model.UNKNOWN:
        return Solved(plan.makespan, plan.bound, False)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise AssertionError(f"the planner's own plan is {solver.status_name(status)} in the model")
    best = min(plan.makespan, round(solver.objective_value) * model.quantum)
    proven = max(plan.bound, round(solver.best_objective_bound) * model.quantum)
    return Solved(best, min(best, proven), status == cp_model.OPTIMAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=12)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--families", default="P1,P2,P3,P4,X1,X2,X3,X4")
    parser.add_argument("--costs", default="default,no launch,gpt-1b-h200")
    parser.add_argument("--syncs", default="step,micro_batch")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20, help="of solving, for each instance")
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    print(f"{planner_line()}, OR-tools {cp_model_version()}")
    print(f"N = {args.ranks}, C = {args.capacity}, {args.seconds:g} s each\n")
    print(
        "| family | cost | sync | K | plan / bound p50 | max | plan / optimum p50 | max "
        "| optimum / bound p50 | max | optimum proven |\n" + "|---" * 11 + "|"
    )
    drawn = instances(args.ranks, args.capacity, args.sequences)
    for name in args.families.split(","):
        for cost in args.costs.split(","):
            for sync in args.syncs.split(","):
                row(args, name, drawn[name], cost, sync)


def cp_model_version() -> str:
    return version("ortools")


def row(
    args: argparse.Namespace,
    name: str,
    draw: Callable[[Random], list[int]],
    cost: str,
    sync: Sync,
) -> None:
    of_bound, of_optimum, slack, proven = [], [], [], 0
    seeds = 1 if name == "X1" else args.seeds
    for seed in range(seeds):
        lengths = draw(Random(seed))
        plan = hcp.plan(
            lengths,
            ranks=args.ranks,
            max_tokens_per_rank=args.capacity,
            cost=PRICES[cost],
            sync=sync,
        )
        solved = solve(plan, args.seconds, args.workers)
        proven += solved.finished
        of_bound.append(plan.makespan / plan.bound)
        of_optimum.append(plan.makespan / solved.best)
        slack.append(solved.proven / plan.bound)
    print(
        f"| {name} | {cost} | {sync} | {len(lengths)} | {median_and_worst(of_bound)} "
        f"| {median_and_worst(of_optimum)} | {median_and_worst(slack)} | {proven} of {seeds} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
