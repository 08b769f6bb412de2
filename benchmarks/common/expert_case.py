"""The case of bench_experts.py: its lengths, its contestants' plans, and its table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from random import Random
from typing import Any

from peers.planners import karmarkar_karp, plan_of, static_degree, wave_greedy

import hcp

RANKS_PER_NODE = 8
FIXED = "fixed"


def drawn(args: argparse.Namespace, tail: float, batch: int) -> list[int]:
    """Draw the lengths of a global batch: a bounded Pareto distribution."""
    random = Random(f"{args.seed} {tail} {batch}")
    least = args.max_tokens_per_rank // 4
    most = args.max_tokens_per_rank * min(4, args.ranks)
    kept = (least / most) ** tail
    lengths = []
    for _ in range(args.sequences * args.ranks):
        length = least * (1 - random.random() * (1 - kept)) ** (-1 / tail)
        lengths.append(min(most, max(8, int(length) // 8 * 8)))
    return lengths


def plans_of(
    args: argparse.Namespace, lengths: Sequence[int], cost: hcp.CostModel, degree: int
) -> dict[str, hcp.Plan]:
    """Return each contestant's plan of a batch."""
    own, ranks, capacity = list(lengths), args.ranks, args.max_tokens_per_rank
    request: dict[str, Any] = {"ranks": ranks, "max_tokens_per_rank": capacity, "cost": cost}
    request |= {"sync": "micro_batch", "ranks_per_node": min(ranks, RANKS_PER_NODE)}
    plans = {
        FIXED: plan_of(karmarkar_karp(own, ranks, capacity, cost, degree), own, request),
        "fixed, by hcp": hcp.plan(own, **request, min_degree=degree, max_degree=degree),
        "dynamic": hcp.plan(own, **request),
    }
    if ranks & (ranks - 1) == 0:
        plans["wave greedy"] = plan_of(wave_greedy(own, ranks, capacity, cost), own, request)
    return plans


def fixed_degree(args: argparse.Namespace, batches: Sequence[Sequence[int]]) -> int:
    """The one degree of all batches."""
    longest = max(max(lengths) for lengths in batches)
    return static_degree([longest], args.ranks, args.max_tokens_per_rank)


def describe(args: argparse.Namespace, tail: float, batches: Sequence[Sequence[int]]) -> str:
    lengths = sorted(length for batch in batches for length in batch)
    return (
        f"tail {tail:g}: {len(lengths)} sequences in {len(batches)} batches, {sum(lengths):,} "
        f"tokens, lengths {lengths[0]:,} to {lengths[-1]:,}, median "
        f"{lengths[len(lengths) // 2]:,}; {args.max_tokens_per_rank:,} tokens a rank, "
        f"{args.ranks} ranks, experts over {args.expert_ranks}; fixed CP "
        f"{fixed_degree(args, batches)}"
    )


def print_table(
    args: argparse.Namespace, tokens: int, seconds: dict[str, float], counts: dict[str, float]
) -> None:
    """Print a row for each contestant. ``counts``: mean micro-batches."""
    print("\n| contestant | micro-batches | tokens/s | over fixed |\n|---|---|---|---|")
    for name, took in seconds.items():
        row: dict[str, object] = {
            "contestant": name,
            "micro-batches": f"{counts[name]:.1f}",
            "tokens/s": f"{tokens / took:,.0f}",
            "over fixed": f"{seconds[FIXED] / took:.2f}",
        }
        args.json.add(row)
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
