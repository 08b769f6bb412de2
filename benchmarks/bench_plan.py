"""How far plans are from a bound that no plan beats, how long planning takes, and how peers do.

    python benchmarks/bench_plan.py [--families P1,X1] [--seeds 100] [--peers] [--scale]

Ratio: makespan / hcp.lower_bound under the same cost table, which also holds for the peers. Every
plan passes hcp.check_plan first. Times are CPU milliseconds of hcp.plan on one core, the least of
three, tables included. Peers are restated in benchmarks/peers.py; they were made for other costs.
Makespans are simulated by the cost model: nothing here was measured on GPUs.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from random import Random
from typing import Any

import families
import peers

import hcp

COSTS: dict[str, tuple[hcp.CostModel, dict[str, Any]]] = {
    "default": (hcp.CostModel(), {}),
    "no launch": (hcp.CostModel(launch=0), {}),
    "flexsp-7b": (hcp.CostModel.preset("flexsp-7b"), {"ranks_per_node": 8}),
    "hydraulis-7b-tp4": (hcp.CostModel.preset("hydraulis-7b-tp4"), {}),
}


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timed(lengths: list[int], repeats: int = 3, **request: Any) -> tuple[hcp.Plan, float]:
    best = float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        plan = hcp.plan(lengths, **request)
        best = min(best, time.process_time() - begun)
    return plan, best * 1e3


def bench(family: families.Family, cost: str, sync: str, seeds: int, with_peers: bool) -> None:
    model, limits = COSTS[cost]
    ratios, times, sizes, degrees = [], [], [], set()
    beaten: dict[str, list[float]] = {name: [] for name in peers.PEERS}
    worse = 0
    for seed in range(seeds):
        lengths = family.draw(Random(seed))
        request = {"ranks": family.ranks, "max_tokens_per_rank": family.capacity, "cost": model}
        if family.ranks % limits.get("ranks_per_node", 1) == 0:
            request |= limits
        plan, took = timed(lengths, sync=sync, **request)
        hcp.check_plan(plan, lengths)
        ratios.append(plan.makespan / plan.bound)
        times.append(took)
        sizes.append(len(lengths))
        degrees |= {(g.first_rank, g.degree) for batch in plan.micro_batches for g in batch}
        if with_peers and not limits and family.ranks <= 64:
            best = float("inf")
            for name in peers.PEERS:
                span = peers.judged(name, lengths, family.ranks, family.capacity, model, sync)
                if span is not None:
                    beaten[name].append(span / plan.bound)
                    best = min(best, span)
            worse += plan.makespan > best
    print(
        f"| {family.name} | {cost} | {sync} | {round(statistics.mean(sizes))} "
        f"| {statistics.median(ratios):.4f} | {percentile(ratios, 0.95):.4f} | {max(ratios):.4f} "
        f"| {statistics.median(times):.2f} | {percentile(times, 0.99):.2f} | {len(degrees)} |"
        + "".join(
            f" {statistics.median(values):.3f} |" if values else " - |"
            for values in beaten.values()
        )
        + (f" {worse if any(beaten.values()) else '-'} |" if with_peers else ""),
        flush=True,
    )


def scale() -> None:
    print("\n| N | K | cost | sync | ratio | ms |\n|---|---|---|---|---|---|")
    for ranks in (64, 256, 1024, 4096, 16384):
        random = Random(1)
        lengths = [families.GITHUB(random) for _ in range(8 * ranks)]
        for cost in ("default", "flexsp-7b"):
            model, limits = COSTS[cost]
            for sync in ("step", "micro_batch"):
                plan, took = timed(
                    lengths, ranks=ranks, max_tokens_per_rank=8192, cost=model, sync=sync, **limits
                )
                print(
                    f"| {ranks} | {len(lengths)} | {cost} | {sync} "
                    f"| {plan.makespan / plan.bound:.4f} | {took:.2f} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(families.BY_NAME))
    parser.add_argument("--costs", default="default,flexsp-7b")
    parser.add_argument("--syncs", default="step,micro_batch")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--scale", action="store_true")
    args = parser.parse_args()
    print(f"hcp {hcp.__version__}, Python {platform.python_version()}, {platform.machine()}\n")
    names = list(peers.PEERS) if args.peers else []
    head = ["family", "cost", "sync", "K", "p50", "p95", "max", "ms p50", "ms p99", "groups"]
    head += names + (["worse than best peer"] if args.peers else [])
    if args.families:
        print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for name in filter(None, args.families.split(",")):
        family = families.BY_NAME[name]
        for cost in args.costs.split(","):
            for sync in args.syncs.split(","):
                seeds = 1 if name in ("X1", "X6") else args.seeds
                bench(
                    family, cost, sync, seeds if family.ranks < 256 else min(10, seeds), args.peers
                )
    if args.scale:
        scale()


if __name__ == "__main__":
    main()
