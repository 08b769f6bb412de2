"""How much of a plan's distance from its bound no plan can save."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hcp.planning.cost import CostModel
from hcp.planning.plan import Plan, lower_bound

QUICK = 1024
"""Sequences times ranks up to which a sharper bound under sync="micro_batch" takes about a quarter
of a second."""


def add_prove(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prove",
        action="store_true",
        help="prove a sharper bound, in seconds or minutes under --sync micro_batch (default: for "
        f"up to {QUICK:,} sequences x ranks)",
    )


def sharper_bound(
    made: Plan, cost: CostModel | None, limits: Mapping[str, Any], prove: bool
) -> int | None:
    """Return a time that no plan beats, at least the plan's bound; None where to prove it would
    take long and nobody asked."""
    if made.sync == "micro_batch" and made.ranks * len(made.lengths) > QUICK and not prove:
        return None
    return lower_bound(made.lengths, cost=cost, **{**limits, "effort": 2})


def slack_of(made: Plan, sharper: int | None) -> str:
    """Say how much of what a plan takes beyond its bound is proven to be slack of the bound."""
    over = made.makespan - made.bound
    if over <= 0:
        return "the plan is the fastest"
    above = f"{over / made.bound:.2%} above it"
    if sharper is None:
        return f"how much of the {above} no plan can save was not looked for (--prove)"
    if sharper == made.bound:
        return f"none of the {above} is proven to be slack of the bound"
    return (
        f"of the {above}, {(sharper - made.bound) / made.bound:.2%} are slack of the bound: a "
        "sharper one proves that no plan saves them"
    )
