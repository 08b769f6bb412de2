"""Comm types: how keys and values travel. A layer asks for one, and each group of ranks uses one.

"p2p", "all_gather" and "a2a" are used as asked, at any degree. "a2a+p2p" asks for a number of
neighbours that exchange rows for heads; each group uses as many as it can. "auto" takes the type
that is fastest by the plan's prices. The plan, the mask and the numbers of heads decide, in the
core, so that every rank of a group decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from hcp import _core
from hcp._validate import expect_items, plain
from hcp._words import CommType
from hcp.exchange.sizes import STAGE_TOKENS
from hcp.planning.cost import CostModel
from hcp.planning.limits import divisors
from hcp.planning.plan import Plan

if TYPE_CHECKING:
    from hcp.exchange.layout import Layout

P2P, ALL_GATHER, A2A, A2A_P2P = _core.COMM_TYPES
AUTO: Literal["auto"] = "auto"
COMM_TYPES: tuple[CommType, ...] = (*_core.COMM_TYPES, AUTO)
"""The types that a layer may ask for: see docs/guides/choosing-comm-type.md."""

CHOSEN = (A2A_P2P, AUTO)
"""The types under which each group chooses what it uses."""

NO_HEADS = 0
"""The number of key-value heads of latent rows."""


class CommChoice(NamedTuple):
    """The comm type that a layer asked for, and the one that its group of ranks uses."""

    asked: str
    used: str
    """"p2p", "all_gather", "a2a" or "a2a+p2p"."""
    inner: int
    """Neighbours that exchange rows for heads: 1 under "p2p" and "all_gather", all under "a2a"."""
    why: str


def check_comm_types(
    comm_types: Sequence[str], sizes: Sequence[int], degree: int | None, where: str = "comm_types"
) -> None:
    """Raise ValueError unless the types are known, and the sizes of the levels of "a2a+p2p" are
    given and fit. ``degree``: the only degree of a plan, None under dynamic degrees."""
    expect_items(where, comm_types, f"one or more of {COMM_TYPES}")
    if not comm_types:
        raise ValueError(f"{where} is {comm_types!r}, expected one or more of {COMM_TYPES}")
    for name in comm_types:
        if name not in COMM_TYPES:
            raise ValueError(f"comm_type is {name!r}, expected one of {COMM_TYPES}")
    name = "hierarchical_context_parallel_sizes"
    expect_items(name, sizes, "integers")
    if A2A_P2P not in comm_types:
        if sizes:
            raise ValueError(
                f"{name} is {list(sizes)}, but {where} has no {A2A_P2P!r} that would use it"
            )
        return
    if not sizes:
        raise ValueError(
            f"{name} is missing, expected the sizes of the levels of {A2A_P2P!r}, the inner "
            "all-to-all first and the ring last, such as [2, 4]"
        )
    if len(sizes) < 2 or any(type(plain(size)) is not int or size < 1 for size in sizes):
        raise ValueError(f"{name} is {list(sizes)}, expected two or more integers >= 1")
    if degree is not None and degree > 1 and math.prod(sizes) != degree:
        raise ValueError(
            f"{name} is {list(sizes)}, whose product is {math.prod(sizes)}, expected {degree}: the "
            "degree of every group"
        )


def exchanges_heads(comm_type: str) -> bool:
    """Whether a type that is asked for exchanges heads. "auto" can do without."""
    return comm_type in (A2A, A2A_P2P)


def check_sends_rows(comm_type: str) -> None:
    """Raise ValueError for a type that exchanges heads, asked for latent rows."""
    if exchanges_heads(comm_type):
        raise ValueError(
            f"comm_type is {comm_type!r} with expand=, expected {P2P!r}, {ALL_GATHER!r} or "
            f"{AUTO!r}: it exchanges heads, which latent rows do not have yet. Name one of these, "
            "or expand first: cp.attention(query, *expand(latent))"
        )


def check_prices(comm_types: Sequence[str], cost: CostModel) -> None:
    """Raise ValueError if "auto" is asked for and has no prices to go by."""
    if AUTO in comm_types and not cost.has_prices:
        raise ValueError(
            f"comm_type is {AUTO!r}, but the plan's cost is a table of whole times, which do not "
            "say what each comm type would take, expected prices beside it: "
            "CostModel.from_function(f, prices=a calibrated CostModel), a CostModel of prices, or "
            "name a comm type"
        )


def check_masks(comm_types: Sequence[str], plan: Plan) -> None:
    """Raise ValueError for a type that does not know masks, in a plan with masks."""
    if plan.masks and A2A_P2P in comm_types:
        raise ValueError(
            f"comm_types has {A2A_P2P!r} in a plan with masks, expected {ALL_GATHER!r}, {P2P!r}, "
            f"{A2A!r} or {AUTO!r}: a neighbourhood's rows are whole zigzag chunks"
        )


def fitted_sizes(sizes: Sequence[int], degree: int) -> tuple[int, int]:
    """Two levels for a fixed degree: the largest inner one up to that of ``sizes``."""
    wish = math.prod(sizes[:-1])
    inner = max(m for m in divisors(degree) if m <= wish)
    return inner, degree // inner


def only_degree(plan: Plan) -> int | None:
    """The degree of a plan that may use no other, else None."""
    least, most = plan.core.min_degree, plan.core.max_degree
    return least if least == most else None


def choose(
    plan: Plan,
    layout: Layout,
    comm_type: str,
    sizes: Sequence[int],
    window: tuple[int, int],
    heads: tuple[int, int],
    packed: bool,
    in_place: bool,
) -> CommChoice:
    """Choose what this rank's group uses. ``window``: FlashAttention's, (-1, 0) being causal.
    ``heads``: the numbers of query and of key-value heads (``NO_HEADS``: keys are latent rows).
    ``packed``: whether one call of the kernel computes all sequences of a stage, as on GPUs.
    ``in_place``: whether ranks read keys where their owners hold them."""
    if comm_type not in CHOSEN:
        inner = layout.degree if comm_type == A2A else 1
        return CommChoice(comm_type, comm_type, inner, "as asked")
    if layout.degree <= 1:
        return CommChoice(comm_type, P2P, 1, f"degree {layout.degree}: nothing travels")
    if heads[1] == NO_HEADS and heads[0] > 0:
        check_prices([AUTO], plan.cost)
        return _fastest(plan, layout, window, (heads[0], 1), packed, in_place, rows_only=True)
    if plan.masks:
        return CommChoice(comm_type, ALL_GATHER, 1, "masks: just the rows that are seen, at once")
    if comm_type == A2A_P2P:
        return _hierarchical(plan, layout, math.prod(sizes[:-1]), heads[0])
    check_prices([AUTO], plan.cost)
    return _fastest(plan, layout, window, heads, packed, in_place)


def _hierarchical(plan: Plan, layout: Layout, wish: int, query_heads: int) -> CommChoice:
    inner = _core.comm_inner(plan.core, layout.micro_batch, layout.rank, query_heads, wish)
    node = plan.core.ranks_per_node
    limits = [f"degree {layout.degree}", f"{query_heads} query heads"]
    limits += [f"{node} ranks a node"] if node else []
    why = f"{inner} neighbours of {wish} asked for: {', '.join(limits)}"
    return CommChoice(A2A_P2P, _name_of(inner, layout.degree), inner, why)


def _name_of(inner: int, degree: int) -> str:
    return P2P if inner == 1 else A2A if inner == degree else A2A_P2P


def _fastest(
    plan: Plan,
    layout: Layout,
    window: tuple[int, int],
    heads: tuple[int, int],
    packed: bool,
    in_place: bool,
    rows_only: bool = False,
) -> CommChoice:
    """``rows_only``: among the types that send rows, and exchange no heads. csrc/include/hcp/hcp.h
    has the times in words (``hcp_comm_times``)."""
    place = layout.micro_batch, layout.rank
    times, fastest = _core.comm_times(
        plan.core, *place, *window, *heads, packed, rows_only, in_place, STAGE_TOKENS
    )
    listed = ", ".join(
        f"{name} {inner}: {time}" if name == A2A_P2P else f"{name}: {time}"
        for name, inner, time in times
    )
    used, inner, _ = times[fastest]
    return CommChoice(AUTO, used, inner, f"least time of {listed}")
