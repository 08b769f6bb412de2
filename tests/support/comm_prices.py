"""The times of a group's comm types in exact fractions, slow and obvious: what the core's
``hcp_comm_times`` and ``hcp_comm_inner`` equal.

H query heads, G key-value heads, d ranks of a group, m neighbours, n = d / m places.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from hcp import _core
from hcp.attention.comm_types import A2A, A2A_P2P, ALL_GATHER, P2P
from hcp.attention.head_shares import key_heads, split
from hcp.exchange.layout import Layout
from hcp.exchange.sizes import STAGE_TOKENS
from hcp.planning.cost import CostModel
from hcp.planning.plan import Plan

LAUNCHES = 16
"""Kernel launches of a decoder layer, about. The price ``launch`` pays for all of them."""


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


def _name_of(inner: int, degree: int) -> str:
    return P2P if inner == 1 else A2A if inner == degree else A2A_P2P


def times(
    plan: Plan,
    layout: Layout,
    window: tuple[int, int],
    heads: tuple[int, int],
    packed: bool,
    rows_only: bool = False,
    in_place: bool = False,
) -> dict[tuple[str, int], Fraction]:
    """The time of each (comm type, neighbours) of this rank's group, in the order in which equal
    ones are preferred."""
    prices = Prices.of(plan.cost, layout.degree > plan.core.ranks_per_node > 0, heads)
    group = Group(plan.cost, layout.degree, layout.lengths, window, *heads, packed, in_place)
    found = {(ALL_GATHER, 1): group.gather(prices), (P2P, 1): group.ring(prices, 1)}
    inner = inner_sizes(plan, layout, heads[0])
    neighbours = set() if rows_only else {*inner, layout.degree} - {1}
    for m in sorted(neighbours, reverse=True):
        # Where neighbours stand in one node, so do the ranks that exchange heads.
        near = Prices.of(plan.cost, False, heads) if m in inner else prices
        found[_name_of(m, layout.degree), m] = group.ring(prices, m) + group.head_exchange(near, m)
    return found


def listed(found: dict[tuple[str, int], Fraction]) -> tuple[list[tuple[str, int, int]], int]:
    """As the core lists them: times rounded up, and the index of the least."""
    whole = [(name, inner, math.ceil(time)) for (name, inner), time in found.items()]
    exact = list(found.values())
    return whole, exact.index(min(exact))


class Prices(NamedTuple):
    """Prices of one token, inside a node or between nodes. If only one of the two is given, the
    other follows from it: both are bytes of the same links."""

    keys: Fraction
    """Receiving keys and values of all heads."""
    element: Fraction
    """Exchanging one head's query and output, or key and value: D + E elements."""

    @classmethod
    def of(cls, cost: CostModel, far: bool, heads: tuple[int, int]) -> Prices:
        keys = max(cost.exchange, cost.exchange_far) if far else cost.exchange
        heads_moved = max(cost.all_to_all, cost.all_to_all_far) if far else cost.all_to_all
        query_heads, kv_heads = heads
        by_heads = Fraction(heads_moved, query_heads + kv_heads)
        by_keys = Fraction(keys, kv_heads)
        return cls(Fraction(keys) if keys else by_heads * kv_heads, by_heads or by_keys)


class Group(NamedTuple):
    """A group's attention in one layer, in the unit of the prices."""

    cost: CostModel
    degree: int
    lengths: tuple[int, ...]
    window: tuple[int, int]
    query_heads: int
    kv_heads: int
    packed: bool
    in_place: bool

    def fixed(self, exchanges: int, calls: int) -> Fraction:
        """The size-independent cost of the exchanges, and of the kernel's calls in the stages after
        the local one.

        A ring's stage is one exchange and, for one sequence, one call: each costs half a ``step``.
        If nobody measured a step, each costs one of about sixteen launches of a layer.
        """
        step = self.cost.step or Fraction(self.cost.launch, LAUNCHES // 2)
        return Fraction(exchanges + calls) * step / 2

    def attention(self, inner: int) -> Fraction:
        """Attention of the busiest of ``inner`` neighbours. Heads may not divide evenly."""
        pairs = sum(pairs_of(self._tiled(length, inner), self.window) for length in self.lengths)
        most = -(-self.query_heads // inner)
        share = Fraction(inner * most, self.query_heads)
        return Fraction(self.cost.pair * pairs, self.degree) * share

    def ring(self, prices: Prices, inner: int) -> Fraction:
        """Attention in a ring of n places, and the part of the exchanges that it does not hide."""
        attention, places = self.attention(inner), self.degree // inner
        share = Fraction(max(map(len, self._keys(inner))), self.kv_heads)
        if self.in_place:
            rows = sum(self._seen(length, places) for length in self.lengths)
            stages = [self._owners(length, places) for length in self.lengths]
        else:
            rows = Fraction(sum(self.lengths)) * Fraction(places - 1, places)
            stages = [places - 1] * len(self.lengths)
        hidden = attention * max(stages) / places
        if self.in_place:
            hidden = max(hidden, self.own(inner))
        exposed = self._exposed(prices.keys * share * rows, hidden)
        return attention + exposed + self.fixed(max(stages), self._calls(stages))

    def gather(self, prices: Prices) -> Fraction:
        """Attention under "all_gather", and the part of the exchanges that its local stage does not
        hide."""
        attention = self.attention(1)
        rows = sum(self._seen(length, self.degree) for length in self.lengths)
        exposed = self._exposed(prices.keys * rows, self.own(1))
        stages = max(1, min(int(rows) // STAGE_TOKENS, _core.GATHERS_MAX, len(self.lengths)))
        # A sequence meets its keys in one of the stages.
        return (
            attention + exposed + self.fixed(stages, stages if self.packed else len(self.lengths))
        )

    def head_exchange(self, prices: Prices, inner: int) -> Fraction:
        """Exchanging a rank's rows for heads and back, without the rank's own share."""
        rows = Fraction(sum(self.lengths), self.degree)
        copies = sum(map(len, self._keys(inner)))
        moved = prices.element * (self.query_heads + copies) * rows * Fraction(inner - 1, inner)
        return moved + self.fixed(2, 0)

    def own(self, inner: int) -> Fraction:
        """Attention of a place's own rows: an even share, or that of its two chunks, which a window
        may make more."""
        places = self.degree // inner
        chunks = (self._tiled(length, inner) // (2 * places) for length in self.lengths)
        pairs = 2 * sum(pairs_of(chunk, self.window) for chunk in chunks)
        most = -(-self.query_heads // inner)
        alone = Fraction(self.cost.pair * pairs * most, self.query_heads)
        return max(self.attention(inner) / places, alone)

    def _exposed(self, moved: Fraction, hidden: Fraction) -> Fraction:
        return max(Fraction(0), moved - hidden) if self.cost.overlap else moved

    def _calls(self, stages: list[int]) -> int:
        return max(stages) if self.packed else sum(stages)

    def _owners(self, length: int, places: int) -> int:
        """The others whose chunks the windows of the busiest place reach."""
        if min(self.window) < 0:
            return places - 1
        reach = math.ceil(Fraction(max(self.window) * 2 * places, length))
        chunks = range(2 * places)
        held = [{j, 2 * places - 1 - j} for j in range(places)]
        return max(
            len({min(c, 2 * places - 1 - c) for c in chunks if near(c, own, reach)} - own)
            for own in held
        )

    def _seen(self, length: int, places: int) -> Fraction:
        """Rows that the busiest place receives: those in the windows of its two chunks."""
        others = length - Fraction(length, places)
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


def near(chunk: int, own: set[int], reach: int) -> bool:
    return any(abs(chunk - mine) <= reach for mine in own)


def pairs_of(length: int, window: tuple[int, int]) -> int:
    """Pairs of a query and a key that it sees: its own key, and those on its two sides."""
    return length + sum(_one_side(length, limit) for limit in window)


def _one_side(length: int, limit: int) -> int:
    most = length - 1
    if limit < 0 or limit >= most:
        return most * length // 2
    return limit * (limit + 1) // 2 + (most - limit) * limit
