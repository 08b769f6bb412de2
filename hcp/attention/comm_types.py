"""Comm types: how keys and values travel. A layer asks for one, and each group of ranks uses one.

"p2p", "all_gather" and "a2a" are used as asked, at any degree. "a2a+p2p" asks for a number of
neighbours that exchange rows for heads; each group uses as many as it can. "auto" takes the type
that is fastest by the plan's prices. The plan, the mask and the numbers of heads decide, in exact
fractions, so that every rank of a group decides alike.

H query heads, G key-value heads, d ranks of a group, m neighbours, n = d / m places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from hcp import _core
from hcp._validate import expect_items, plain
from hcp._words import CommType
from hcp.attention.head_shares import key_heads, split
from hcp.exchange.sizes import STAGE_ROWS
from hcp.planning.cost import CostModel
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
    inner = max(m for m in range(1, degree + 1) if degree % m == 0 and m <= wish)
    return inner, degree // inner


def only_degree(plan: Plan) -> int | None:
    """The degree of a plan that may use no other, else None."""
    least, most = plan.core.min_degree, plan.core.max_degree
    return least if least == most else None


def inner_sizes(plan: Plan, layout: Layout, query_heads: int) -> list[int]:
    """The numbers of neighbours that may exchange rows for heads in this rank's group, ascending:
    divisors of its degree, each with at least one head for every neighbour, and all of them in one
    node (``ranks_per_node`` of the plan)."""
    degree, node = layout.degree, plan.core.ranks_per_node
    return [
        m
        for m in range(1, min(degree, query_heads) + 1)
        if degree % m == 0 and _within_nodes(layout.first_rank, degree, m, node)
    ]


def _within_nodes(first: int, degree: int, inner: int, node: int) -> bool:
    starts = range(first, first + degree, inner)
    return node == 0 or all(start // node == (start + inner - 1) // node for start in starts)


def choose(
    plan: Plan,
    layout: Layout,
    comm_type: str,
    sizes: Sequence[int],
    window: tuple[int, int],
    heads: tuple[int, int],
    packed: bool,
) -> CommChoice:
    """Choose what this rank's group uses. ``window``: FlashAttention's, (-1, 0) being causal.
    ``heads``: the numbers of query and of key-value heads (``NO_HEADS``: keys are latent rows).
    ``packed``: whether one call of the kernel computes all sequences of a stage, as on GPUs."""
    if comm_type not in CHOSEN:
        inner = layout.degree if comm_type == A2A else 1
        return CommChoice(comm_type, comm_type, inner, "as asked")
    if layout.degree <= 1:
        return CommChoice(comm_type, P2P, 1, f"degree {layout.degree}: nothing travels")
    if heads[1] == NO_HEADS and heads[0] > 0:
        check_prices([AUTO], plan.cost)
        return _fastest(plan, layout, window, (heads[0], 1), packed, rows_only=True)
    if heads[1] < 1 or heads[0] < 1 or heads[0] % heads[1] != 0:
        raise ValueError(
            f"query has {heads[0]} heads, expected a multiple of the {heads[1]} of key"
        )
    if plan.masks:
        return CommChoice(comm_type, ALL_GATHER, 1, "masks: just the rows that are seen, at once")
    if comm_type == A2A_P2P:
        return _hierarchical(plan, layout, math.prod(sizes[:-1]), heads[0])
    check_prices([AUTO], plan.cost)
    return _fastest(plan, layout, window, heads, packed)


def _hierarchical(plan: Plan, layout: Layout, wish: int, query_heads: int) -> CommChoice:
    inner = max(m for m in inner_sizes(plan, layout, query_heads) if m <= wish)
    node = plan.core.ranks_per_node
    limits = [f"degree {layout.degree}", f"{query_heads} query heads"]
    limits += [f"{node} ranks a node"] if node else []
    why = f"{inner} neighbours of {wish} asked for: {', '.join(limits)}"
    return CommChoice(A2A_P2P, _name_of(inner, layout.degree), inner, why)


def _name_of(inner: int, degree: int) -> str:
    return P2P if inner == 1 else A2A if inner == degree else A2A_P2P


# ---- auto ----------------------------------------------------------------------------------------

_LAUNCHES = 16
"""Kernel launches of a decoder layer, about. The price ``launch`` pays for all of them."""


def _fastest(
    plan: Plan,
    layout: Layout,
    window: tuple[int, int],
    heads: tuple[int, int],
    packed: bool,
    rows_only: bool = False,
) -> CommChoice:
    """``rows_only``: among the types that send rows, and exchange no heads."""
    prices = _Prices.of(plan.cost, layout.degree > plan.core.ranks_per_node > 0, heads)
    group = _Group(plan.cost, layout.degree, layout.lengths, window, *heads, packed)
    # In the order in which equal ones are preferred: all_gather sends least.
    times = {(ALL_GATHER, 1): group.gather(prices), (P2P, 1): group.ring(prices, 1)}
    inner = inner_sizes(plan, layout, heads[0])
    neighbours = set() if rows_only else {*inner, layout.degree} - {1}
    for m in sorted(neighbours, reverse=True):
        # Where neighbours stand in one node, so do the ranks that exchange heads.
        near = _Prices.of(plan.cost, False, heads) if m in inner else prices
        times[_name_of(m, layout.degree), m] = group.ring(prices, m) + group.head_exchange(near, m)
    (used, m), _ = min(times.items(), key=lambda item: item[1])
    listed = ", ".join(
        f"{name} {inner}: {math.ceil(time)}" if name == A2A_P2P else f"{name}: {math.ceil(time)}"
        for (name, inner), time in times.items()
    )
    return CommChoice(AUTO, used, m, f"least time of {listed}")


class _Prices(NamedTuple):
    """Prices of one token, inside a node or between nodes. If only one of the two is given, the
    other follows from it: both are bytes of the same links."""

    keys: Fraction
    """Receiving keys and values of all heads."""
    element: Fraction
    """Exchanging one head's query and output, or key and value: D + E elements."""

    @classmethod
    def of(cls, cost: CostModel, far: bool, heads: tuple[int, int]) -> _Prices:
        keys = max(cost.exchange, cost.exchange_far) if far else cost.exchange
        heads_moved = max(cost.all_to_all, cost.all_to_all_far) if far else cost.all_to_all
        query_heads, kv_heads = heads
        by_heads = Fraction(heads_moved, query_heads + kv_heads)
        by_keys = Fraction(keys, kv_heads)
        return cls(Fraction(keys) if keys else by_heads * kv_heads, by_heads or by_keys)


class _Group(NamedTuple):
    """A group's attention in one layer, in the unit of the prices."""

    cost: CostModel
    degree: int
    lengths: tuple[int, ...]
    window: tuple[int, int]
    query_heads: int
    kv_heads: int
    packed: bool

    def fixed(self, exchanges: int, stages: int) -> Fraction:
        """The size-independent cost of the exchanges, and of the kernel's calls in the stages after
        the local one.

        A ring's stage is one exchange and, for one sequence, one call: each costs half a ``step``.
        If nobody measured a step, each costs one of about sixteen launches of a layer.
        """
        calls = stages if self.packed else stages * len(self.lengths)
        step = self.cost.step or Fraction(self.cost.launch, _LAUNCHES // 2)
        return Fraction(exchanges + calls) * step / 2

    def attention(self, inner: int) -> Fraction:
        """Attention of the busiest of ``inner`` neighbours. Heads may not divide evenly."""
        pairs = sum(_pairs(self._tiled(length, inner), self.window) for length in self.lengths)
        most = -(-self.query_heads // inner)
        share = Fraction(inner * most, self.query_heads)
        return Fraction(self.cost.pair * pairs, self.degree) * share

    def ring(self, prices: _Prices, inner: int) -> Fraction:
        """Attention in a ring of n places, and the part of the exchanges that it does not hide."""
        attention, places = self.attention(inner), self.degree // inner
        share = Fraction(max(map(len, self._keys(inner))), self.kv_heads)
        rows = Fraction(sum(self.lengths)) * Fraction(places - 1, places)
        hidden = attention * (places - 1) / places if self.cost.overlap else Fraction(0)
        moved = max(Fraction(0), prices.keys * share * rows - hidden)
        return attention + moved + self.fixed(places - 1, places - 1)

    def gather(self, prices: _Prices) -> Fraction:
        """Attention under "all_gather", and the part of the exchanges that its local stage does not
        hide."""
        attention = self.attention(1)
        rows = sum(self._seen(length) for length in self.lengths)
        hidden = attention / self.degree if self.cost.overlap else Fraction(0)
        exposed = max(Fraction(0), prices.keys * rows - hidden)
        stages = max(1, min(int(rows) // STAGE_ROWS, _core.GATHERS_MAX, len(self.lengths)))
        # A sequence meets its keys in one of the stages.
        return attention + exposed + self.fixed(stages, stages if self.packed else 1)

    def head_exchange(self, prices: _Prices, inner: int) -> Fraction:
        """Exchanging a rank's rows for heads and back, without the rank's own share."""
        rows = Fraction(sum(self.lengths), self.degree)
        copies = sum(map(len, self._keys(inner)))
        moved = prices.element * (self.query_heads + copies) * rows * Fraction(inner - 1, inner)
        return moved + self.fixed(2, 0)

    def _seen(self, length: int) -> Fraction:
        """Rows that the busiest rank receives: those in the windows of its two chunks."""
        others = length - Fraction(length, self.degree)
        left, right = self.window
        if left < 0 or right < 0:
            return others
        return min(others, Fraction(2 * (left + right)))

    def _keys(self, inner: int) -> list[range]:
        """Key-value heads of each of the neighbours."""
        per_key = self.query_heads // self.kv_heads
        shares = (key_heads(own, per_key) for own in split(self.query_heads, inner))
        return [range(share.start, share.stop) for share in shares]

    def _tiled(self, length: int, inner: int) -> int:
        """A sequence's tokens when every chunk is rounded up to whole tiles."""
        chunk = 2 * (self.degree // inner) * max(1, self.cost.tile)
        return length if self.cost.tile <= 1 else -(-length // chunk) * chunk


def _pairs(length: int, window: tuple[int, int]) -> int:
    """Pairs of a query and a key that it sees: its own key, and those on its two sides."""
    return length + sum(_one_side(length, limit) for limit in window)


def _one_side(length: int, limit: int) -> int:
    most = length - 1
    if limit < 0 or limit >= most:
        return most * length // 2
    return limit * (limit + 1) // 2 + (most - limit) * limit
