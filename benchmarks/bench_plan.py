"""Compare plans with a bound that no plan beats and with peers' plans, and time planning.

    python benchmarks/bench_plan.py [--families P1,X1] [--seeds 100] [--peers]
    python benchmarks/bench_plan.py --variants [--peers]     changes of a base case, one at a time
    python benchmarks/bench_plan.py --growth growth.png      time over K and over N

Columns:
  p50, p95, max   makespan / lower_bound under equal limits and cost, over the seeds; the bound
                  also holds for the peers
  ms p50, p99     CPU milliseconds of hcp.plan on one core, the least of --rounds, tables included
  ms bound        the same of hcp.lower_bound. Only with --variants
  ms tables       the same of hcp.dispatch on one rank, of eight sequences that it loaded: what all
                  ranks say is compared, and this rank's tables of rows and layers are made; nothing
                  is sent. Only with --variants
  refused         batches for which there was no plan
  groups          distinct rank intervals that the plans of all seeds use, the median of a plan
  GB nodes        keys and values that enter a node of 8 ranks from others in a step: 4 KiB per
                  token and layer, 32 layers, three times for forward and backward
  peers           median ratio; "worse": seeds on which the best of them beats hcp. Peers ignore
                  speeds and pipelines, but are judged by them

Every plan passes check_plan first. Peers are re-implemented in benchmarks/peers/planners.py.
They were made for other costs, and slow ones run only where they end in time. Makespans are by the
cost model: nothing but planning was timed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from common import families
from common.flags import end_after, parser_of
from common.machine import planner_line
from peers import planners

import hcp
from hcp.exchange.agreement import label, unlabel
from hcp.exchange.gather import Gathered, block_of, block_size, read_blocks
from hcp.planning.plan import lower_bound
from hcp.tools.check import check_plan
from hcp.tools.programs.draw import pyplot, write_figure

TOKEN_SECONDS = 1.05e-4
"""Seconds of the default cost's `token`: 6 * 7e9 operations at 400 TFLOP/s."""
NODE = 8
TOKEN_BYTES = 3 * 32 * 4096


def with_launch(milliseconds: float) -> hcp.CostModel:
    base = hcp.CostModel()
    return replace(base, launch=round(milliseconds * 1e-3 / TOKEN_SECONDS * base.token))


def seconds(length: int, degree: int) -> float:
    """The default prices, a picosecond each, as a function."""
    moved = 4096 * (length - length // degree)
    return 1e-12 * (length * (length + 1) / degree + 24_576 * length / degree + moved)


FUNCTION = hcp.CostModel.from_function(seconds, launch=1_048_576e-12, unit=1e-12)

COSTS: dict[str, tuple[hcp.CostModel, dict[str, Any]]] = {
    "default": (hcp.CostModel(), {}),
    "no launch": (hcp.CostModel(launch=0), {}),
    "flexsp-7b": (hcp.CostModel.preset("flexsp-7b"), {"ranks_per_node": NODE}),
    "flexsp-30b": (hcp.CostModel.preset("flexsp-30b"), {"ranks_per_node": NODE}),
    "hydraulis-7b-tp4": (hcp.CostModel.preset("hydraulis-7b-tp4"), {}),
}


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timed(lengths: list[int], rounds: int, **request: Any) -> tuple[hcp.Plan, float]:
    best = math.inf
    for _ in range(rounds):
        begun = time.process_time()
        plan = hcp.plan(lengths, **request)
        best = min(best, time.process_time() - begun)
    return plan, best * 1e3


def bound_ms(lengths: list[int], rounds: int, **request: Any) -> float:
    best = math.inf
    for _ in range(rounds):
        begun = time.process_time()
        lower_bound(lengths, **request)
        best = min(best, time.process_time() - begun)
    return best * 1e3


# ---- Tables ----


class OneOfMany:
    """The transport of one rank. All others say what it says, and each has loss tokens of its own;
    rows stay where they are."""

    device, key, global_ranks = torch.device("cpu"), 0, ()

    def __init__(self, ranks: int) -> None:
        self.size, self.rank, self.steps = ranks, ranks // 2, itertools.count(1)
        self.seconds = 0.0
        """Those that other ranks' parts took, and would not take on a rank."""

    def all_gather_counted(self, payload: bytes, count: float, what: str) -> Gathered:
        """Read the blocks of all ranks, as transports do."""
        begun = time.process_time()
        block = block_of(label(what, payload), count, block_size(self.size))
        blocks = block.repeat(self.size, 1)
        blocks.view(torch.float64)[:, 1] += torch.arange(self.size) % 7
        self.seconds += time.process_time() - begun
        return unlabel(self.rank, what, read_blocks(blocks, self.rank))

    def start(self, *moves: Any, **stamp: Any) -> OneOfMany:
        return self

    def wait(self) -> None:
        pass


class Domain:
    def __init__(self, ranks: int) -> None:
        self.transport = OneOfMany(ranks)


def tables_ms(plan: hcp.Plan, rounds: int) -> float:
    """CPU milliseconds of the tables of one rank."""
    sources = [i % plan.ranks for i in range(len(plan.lengths))]
    best = math.inf
    for _ in range(rounds):
        domain: Any = Domain(plan.ranks)
        fresh = hcp.Plan(plan.core)  # as hcp.plan returns it: no tuple was asked for
        own = [n for n, at in zip(plan.lengths, sources, strict=True) if at == plan.ranks // 2]
        samples = [
            {"tokens": torch.zeros(n, dtype=torch.int64), "loss_mask": torch.ones(n)} for n in own
        ]
        begun = time.process_time()
        hcp.dispatch(fresh, samples, sources, domain)
        best = min(best, time.process_time() - begun - domain.transport.seconds)
    return best * 1e3


# ---- Cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    draw: Callable[[Random], list[int]]
    request: dict[str, Any]
    cost: str = "default"
    chance: bool = True
    """Whether seeds differ."""


def family_cases(args: argparse.Namespace) -> Iterator[Case]:
    for name in args.families.split(","):
        family = families.BY_NAME[name]
        for cost in args.costs.split(","):
            model, limits = COSTS[cost]
            request = {
                "ranks": family.ranks,
                "max_tokens_per_rank": family.capacity,
                "cost": model,
            }
            if family.stages > 1:
                request |= {"pipeline_stages": family.stages}
            if family.ranks % limits.get("ranks_per_node", 1) == 0:
                request |= limits
            for sync in args.syncs.split(","):
                yield Case(name, family.draw, request | {"sync": sync}, cost, name not in "X1 X6")


def github(ranks: int, capacity: int = 8192) -> Callable[[Random], list[int]]:
    """Draw eight sequences per rank, each cut to the rows of all ranks."""
    most = ranks * (capacity - 2)
    return lambda random: [min(most, families.GITHUB(random)) for _ in range(8 * ranks)]


def variants() -> Iterator[Case]:
    """Yield changes, one at a time, of 512 GitHub sequences on 64 ranks of 8192 tokens."""
    base = {"ranks": 64, "max_tokens_per_rank": 8192, "cost": hcp.CostModel(), "sync": "step"}
    draw = github(64)
    yield Case("base", draw, base)
    for ranks in (8, 256, 1024, 16384):
        yield Case(f"N = {ranks}", github(ranks), base | {"ranks": ranks})
    yield Case("sync", draw, base | {"sync": "micro_batch"})
    yield Case("pow2", draw, base | {"degrees": "pow2"})
    random = Random(7)
    speeds = [1 - random.uniform(0, 0.07) for _ in range(64)]
    yield Case("speeds 7%", draw, base | {"speeds": speeds})
    yield Case("4 stages", draw, base | {"pipeline_stages": 4})
    for milliseconds in (0, 20, 100):
        model = with_launch(milliseconds)
        yield Case(f"launch {milliseconds} ms", draw, base | {"cost": model}, "default, launch")
    for cost in ("flexsp-7b", "flexsp-30b", "hydraulis-7b-tp4"):
        model, limits = COSTS[cost]
        yield Case(cost, draw, base | {"cost": model} | limits, cost)
    for sync in ("step", "micro_batch"):
        yield Case(f"function, {sync}", draw, base | {"cost": FUNCTION, "sync": sync}, "function")


# ---- A row ---------------------------------------------------------------------------------------


@dataclass
class Row:
    case: Case
    sizes: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    tables: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)
    refused: int = 0
    worse: int = 0

    def add(self, lengths: list[int], rounds: int, with_peers: bool, with_tables: bool) -> None:
        self.sizes.append(len(lengths))
        try:
            plan, took = timed(lengths, rounds, **self.case.request)
        except ValueError:
            self.refused += 1
            return
        check_plan(plan, lengths)
        self.ratios.append(plan.makespan / plan.bound)
        self.times.append(took)
        if with_tables:
            self.bounds.append(bound_ms(lengths, rounds, **self.case.request))
            self.tables.append(tables_ms(plan, rounds))
        used = {(g.first_rank, g.degree) for batch in plan.micro_batches for g in batch}
        self.groups.append(len(used))
        self.bytes.append(crossings(plan) * TOKEN_BYTES / 1e9)
        # The peers know neither nodes nor other limits.
        if with_peers and self.case.request.keys() <= BARE:
            self._add_peers(plan, lengths)

    def _add_peers(self, plan: hcp.Plan, lengths: list[int]) -> None:
        spans = {}
        for name in planners.PEERS:
            span = planners.judged(name, lengths, self.case.request)
            if span is not None:
                spans[name] = span
                self.peers.setdefault(name, []).append(span / plan.bound)
        self.worse += bool(spans) and plan.makespan > min(spans.values())

    def cells(self, with_peers: bool) -> Iterator[str]:
        case = self.case
        yield from (case.name, case.cost, case.request["sync"], str(case.request["ranks"]))
        yield str(round(statistics.mean(self.sizes)))
        if not self.ratios:
            yield from ["-"] * 7 + [str(self.refused), "-", "-"]
        else:
            yield f"{statistics.median(self.ratios):.4f}"
            yield f"{percentile(self.ratios, 0.95):.4f}"
            yield f"{max(self.ratios):.4f}"
            yield f"{statistics.median(self.times):.2f}"
            yield f"{percentile(self.times, 0.99):.2f}"
            yield f"{statistics.median(self.bounds):.2f}" if self.bounds else "-"
            yield f"{statistics.median(self.tables):.2f}" if self.tables else "-"
            yield str(self.refused)
            yield f"{statistics.median(self.groups):.0f}"
            yield f"{statistics.median(self.bytes):,.0f}"
        if with_peers:
            for name in planners.PEERS:
                found = self.peers.get(name)
                yield f"{statistics.median(found):.3f}" if found else "-"
            yield str(self.worse) if self.peers else "-"


BARE = {"ranks", "max_tokens_per_rank", "cost", "sync", "pipeline_stages", "speeds"}
HEAD = ["case", "cost", "sync", "N", "K", "p50", "p95", "max", "ms p50", "ms p99", "ms bound"]
HEAD += ["ms tables", "refused", "groups", "GB nodes"]


def crossings(plan: hcp.Plan) -> int:
    """Sum over tokens the nodes of 8 ranks that their keys and values enter from outside."""
    return sum(
        plan.lengths[s] * ((g.first_rank + g.degree - 1) // NODE - g.first_rank // NODE)
        for batch in plan.micro_batches
        for g in batch
        for s in g.sequences
    )


def bench(cases: Iterator[Case], args: argparse.Namespace) -> None:
    head = HEAD + ([*planners.PEERS, "worse"] if args.peers else [])
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for case in cases:
        row = Row(case)
        for seed in range(seeds_of(case, args.seeds)):
            row.add(case.draw(Random(seed)), args.rounds, args.peers, args.variants)
        cells = list(row.cells(args.peers))
        print("| " + " | ".join(cells) + " |", flush=True)
        args.json.add(dict(zip(head, cells, strict=True)))


def seeds_of(case: Case, seeds: int) -> int:
    """Return the number of seeds: fewer if checking a plan in Python takes long."""
    if not case.chance:
        return 1
    ranks = case.request["ranks"]
    return seeds if ranks < 256 else min(seeds, 10 if ranks <= 1024 else 1)


# ---- Growth --------------------------------------------------------------------------------------


def growth(args: argparse.Namespace, path: Path, sync: str) -> None:
    """Draw milliseconds over K at N = 64, and over N at K = 8 N, with K log K + N log N."""
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    sweeps = {
        "K (N = 64)": [(64, 2**i) for i in range(6, 18)],
        "N (K = 8 N)": [(2**i, 8 * 2**i) for i in range(3, 15)],
    }
    print("\n| N | K | sync | ratio | ms | ms / (K log K + N log N), us |\n" + "|---" * 6 + "|")
    for ax, (swept, points) in zip(axes, sweeps.items(), strict=True):
        times = [grown(args, ranks, count, sync) for ranks, count in points]
        x = [count if swept[0] == "K" else ranks for ranks, count in points]
        middle = len(points) // 2
        scale = times[middle] / terms(*points[middle])
        ax.loglog(x, times, "o-", label=f"hcp.plan, sync={sync!r}")
        ax.loglog(x, [scale * terms(*p) for p in points], "k:", label="K log K + N log N")
        ax.set(xlabel=swept, ylabel="CPU milliseconds, one core")
        ax.legend()
    write_figure(figure, path)


def terms(ranks: int, count: int) -> float:
    return count * math.log2(count) + ranks * math.log2(ranks)


def grown(args: argparse.Namespace, ranks: int, count: int, sync: str) -> float:
    random, most = Random(1), ranks * 8190
    lengths = [min(most, families.GITHUB(random)) for _ in range(count)]
    plan, took = timed(lengths, args.rounds, ranks=ranks, max_tokens_per_rank=8192, sync=sync)
    share = took * 1e3 / terms(ranks, count)
    print(
        f"| {ranks} | {count} | {sync} | {plan.makespan / plan.bound:.4f} | {took:.2f} "
        f"| {share:.4f} |",
        flush=True,
    )
    row = {"N": ranks, "K": count, "sync": sync, "ratio": plan.makespan / plan.bound}
    args.json.add(row | {"ms": took, "us / (K log K + N log N)": share})
    return took


def main() -> None:
    parser = parser_of(
        __doc__,
        devices=("cpu",),
        device="cpu",
        rounds=3,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--families", default=",".join(families.BY_NAME))
    parser.add_argument("--costs", default="default,flexsp-7b")
    parser.add_argument("--syncs", default="step,micro_batch")
    parser.add_argument(
        "--seeds", type=int, default=30, help="(30; 10 for N >= 256, 1 beyond 1024)"
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--variants", action="store_true", help="instead of the families")
    parser.add_argument("--growth", type=Path, metavar="PNG", help="instead of the families")
    args = parser.parse_args()
    end_after(args.deadline)
    print(f"{planner_line()}\n")
    if args.growth:
        for sync in args.syncs.split(","):
            growth(args, args.growth.with_stem(f"{args.growth.stem}_{sync}"), sync)
    else:
        bench(variants() if args.variants else family_cases(args), args)


if __name__ == "__main__":
    main()
