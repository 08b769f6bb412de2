"""Find the best plan of small pipelines by trying all of them, under sync="micro_batch".

It tells how much of makespan / bound is slack of the bound, and how much the planner loses.

    python benchmarks/studies/exact_pipeline.py [--ranks 4] [--sequences 8] [--stages 4] [--seeds 5]
    python benchmarks/studies/exact_pipeline.py --chunks 1,2     with interleaved stages, too

Ranks of a stage wait for each other in every micro-batch, so of each set of sequences only the
placement that takes the least time counts. Every way to part the sequences into such micro-batches
and every order of them is simulated, but for those that a path of dependent passes rules out.
Interleaved, the micro-batches are whole groups of as many as there are stages, or as many as there
are sequences, and empty ones after them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common.machine import planner_line
from common.small import instances, median_and_worst

import hcp
from hcp import _core
from hcp.planning.limits import rows_held

Times = tuple[int, ...]


class Placements:
    """The least time of each set of sequences as one micro-batch. A set is a bit mask."""

    def __init__(self, plan: hcp.Plan) -> None:
        self.lengths, self.ranks, self.cost = plan.lengths, plan.ranks, plan.cost
        self.capacity = plan.max_tokens_per_rank
        self.least = functools.cache(self._least)
        self.together = functools.cache(self._together)

    def _together(self, members: int, degree: int) -> int | None:
        """The time of one group. None: its rows do not fit."""
        inside = [n for i, n in enumerate(self.lengths) if members >> i & 1]
        rows = (sum(rows_held(n, degree, rank) for n in inside) for rank in range(degree))
        if max(rows) > self.capacity:
            return None
        return self.cost.launch + sum(self.cost.time(n, degree) for n in inside)

    def _least(self, members: int, ranks: int) -> int | None:
        if members == 0:
            return 0
        best = None
        for group in with_lowest(members):
            for degree in range(1, ranks + 1):
                time = self.together(group, degree)
                rest = self.least(members & ~group, ranks - degree) if time is not None else None
                if time is None or rest is None:
                    continue
                best = max(time, rest) if best is None else min(best, max(time, rest))
        return best


def with_lowest(members: int) -> Iterator[int]:
    """Every subset that has the lowest member."""
    lowest = members & -members
    others = members ^ lowest
    subset = others
    while True:
        yield subset | lowest
        if subset == 0:
            return
        subset = (subset - 1) & others


def partings(placements: Placements, members: int) -> Iterator[Times]:
    """The times of the micro-batches of each way to part the sequences, ascending."""
    if members == 0:
        yield ()
        return
    for first in with_lowest(members):
        time = placements.least(first, placements.ranks)
        if time is not None:
            for rest in partings(placements, members & ~first):
                yield tuple(sorted((time, *rest)))


def may_be(count: int, sequences: int, stages: int, chunks: int) -> bool:
    """Whether a plan may have so many micro-batches with sequences."""
    return chunks == 1 or count % stages == 0 or count == sequences


def best_makespan(plan: hcp.Plan, stages: int, chunks: int = 1) -> int:
    """The least makespan of all plans, no more than that of this one."""
    sequences = len(plan.lengths)
    found = sorted(set(partings(Placements(plan), (1 << sequences) - 1)), key=sum)
    best = plan.makespan
    for times in found:
        if not may_be(len(times), sequences, stages, chunks):
            continue
        if sum(times) + (stages - 1) * times[0] // chunks >= best:
            continue
        empty = (0,) * (-len(times) % stages if chunks > 1 else 0)
        for order in set(itertools.permutations(times)):
            ramps = (stages - 1) * (order[0] + 2 * order[-1]) // (3 * chunks)
            if sum(times) + ramps < best:
                best = min(best, _core.pipeline_time(order + empty, stages, chunks, 0))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--chunks", default="1", help="virtual stages")
    parser.add_argument("--families", default="P1,P2,P3,P4,X2,X3")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    print(f"{planner_line()}\nN = {args.ranks}, C = {args.capacity}, K = {args.sequences}\n")
    print(
        "| family | stages | chunks | plan / bound p50 | max | plan / optimum p50 | max "
        "| optimum / bound p50 | max |\n" + "|---" * 9 + "|"
    )
    drawn = instances(args.ranks, args.capacity, args.sequences)
    asked = (args.families, args.stages, args.chunks)
    for name, stages, chunks in itertools.product(*(each.split(",") for each in asked)):
        ratios = [
            compared(args, drawn[name](Random(seed)), int(stages), int(chunks))
            for seed in range(args.seeds)
        ]
        columns = " | ".join(median_and_worst(list(x)) for x in zip(*ratios, strict=True))
        print(f"| {name} | {stages} | {chunks} | {columns} |", flush=True)


def compared(
    args: argparse.Namespace, lengths: Sequence[int], stages: int, chunks: int
) -> tuple[float, float, float]:
    """Plan / bound, plan / optimum, optimum / bound."""
    plan = hcp.plan(
        lengths,
        ranks=args.ranks,
        max_tokens_per_rank=args.capacity,
        sync="micro_batch",
        pipeline_stages=stages,
        virtual_stages=chunks,
    )
    best = best_makespan(plan, stages, chunks)
    return plan.makespan / plan.bound, plan.makespan / best, best / plan.bound


if __name__ == "__main__":
    main()
