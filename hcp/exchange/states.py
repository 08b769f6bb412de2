"""States passed along sequences of several ranks, for layers with a recurrent state.

A span maps the state that enters it, h, to decay * h + state: decay and state are its own. Maps of
consecutive spans make one of the same kind, so that ranks exchange maps of spans, and none waits
for the others to compute.

N spans of this rank. The order of a span is its number in its sequence, over all ranks; the place
of a rank is its number in the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hcp.exchange.agreement import Stamp
from hcp.exchange.layout import Layout
from hcp.exchange.move import copy_rows_of
from hcp.exchange.tables import Move
from hcp.exchange.transport import Transport

ROUND_BYTES = 1 << 20
"""The price of one more round of messages, in bytes that a link carries while one starts."""


class Held(NamedTuple):
    """A span that a rank holds."""

    place: int
    span: int
    """Its number on that rank."""


Wanted = Sequence[Held | None]
"""Spans whose maps a rank wants, in the order of its output. None: zeros."""


# ---- who wants what ------------------------------------------------------------------------------


class StatePasses:
    """The ways in which states of a micro-batch get from rank to rank: made once, for all layers.

    The gathering: every rank gets the maps of all spans before its own, and composes them. Rounds:
    in each, a span gets a map of twice as many spans as in the round before (the scan of Hillis and
    Steele, https://doi.org/10.1145/7902.7903).
    """

    def __init__(self, layout: Layout) -> None:
        self._first_rank, self._place = layout.first_rank, layout.rank - layout.first_rank
        group = range(layout.first_rank, layout.first_rank + layout.degree)
        self._sequences = _sequences(
            [Layout(layout.plan, layout.micro_batch, rank) for rank in group]
        )
        self._spans = [_spans_of(self._sequences, place) for place in range(layout.degree)]
        gathered = [self._all_before(place) for place in range(layout.degree)]
        rounds = [self._before_by(stride) for stride in self._strides()]
        self._ways = {False: [gathered], True: rounds}
        self._most_rows = {by_rounds: _most_rows(way) for by_rounds, way in self._ways.items()}
        self._paths: dict[bool, list[StatePath]] = {}

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(sequence, order) of each of this rank's spans."""
        return self._spans[self._place]

    @property
    def spans_before(self) -> int:
        """The most spans that come before one of this rank's."""
        return max((order for _, order in self.spans), default=0)

    def choose(self, row_bytes: int) -> tuple[bool, list[StatePath]]:
        """Return whether rounds cost less than the gathering, and the paths of what costs less.

        The cost: bytes that the busiest rank gets from others, and ROUND_BYTES for each round."""
        costs = [
            self._most_rows[by_rounds] * row_bytes + len(self._ways[by_rounds]) * ROUND_BYTES
            for by_rounds in (False, True)
        ]
        by_rounds = costs[True] < costs[False]
        if by_rounds not in self._paths:
            self._paths[by_rounds] = [
                StatePath(wanted, self._first_rank, self._place) for wanted in self._ways[by_rounds]
            ]
        return by_rounds, self._paths[by_rounds]

    def _all_before(self, place: int) -> Wanted:
        """The spans before a rank's last ones: by order, and of one order by sequence."""
        last = dict(self._spans[place])  # orders ascend
        return [
            self._sequences[sequence][order] if order < end else None
            for order in range(max(last.values(), default=0))
            for sequence, end in sorted(last.items())
        ]

    def _before_by(self, stride: int) -> list[Wanted]:
        """What each rank wants in a round: for each of its spans, the one ``stride`` before it."""
        return [
            [
                self._sequences[sequence][order - stride] if order >= stride else None
                for sequence, order in spans
            ]
            for spans in self._spans
        ]

    def _strides(self) -> list[int]:
        """How far back each round looks. In the first, a span gets the map of the one before."""
        most = max((len(spans) - 1 for spans in self._sequences.values()), default=0)
        strides, covered = [1], 1
        while covered < most:
            strides.append(covered)
            covered *= 2
        return strides


def _sequences(layouts: Sequence[Layout]) -> dict[int, list[Held]]:
    """The spans of each sequence, in the order of tokens. A rank's padding is a sequence."""
    found: list[tuple[int, int, Held]] = []
    for place, layout in enumerate(layouts):
        for index, span in enumerate(layout.spans):
            found.append((span.sequence, span.start, Held(place, index)))
        if layout.padding:
            found.append((-1 - place, 0, Held(place, len(layout.spans))))
    sequences: dict[int, list[Held]] = {}
    for sequence, _, held in sorted(found):
        sequences.setdefault(sequence, []).append(held)
    return sequences


def _spans_of(sequences: dict[int, list[Held]], place: int) -> list[tuple[int, int]]:
    """(sequence, order) of each span of a rank, in the order of its rows."""
    found = [
        (held.span, sequence, order)
        for sequence, spans in sequences.items()
        for order, held in enumerate(spans)
        if held.place == place
    ]
    return [(sequence, order) for _, sequence, order in sorted(found)]


def _most_rows(rounds: Sequence[Sequence[Wanted]]) -> int:
    """The most rows that a rank gets from others, over all rounds."""
    by_rank = zip(*rounds, strict=True)
    return max(
        (
            sum(len({h for h in wanted if h and h.place != place}) for wanted in of_rank)
            for place, of_rank in enumerate(by_rank)
        ),
        default=0,
    )


# ---- tables --------------------------------------------------------------------------------------


class StatePath:
    """The tables by which this rank gives maps of its spans to others, and gets what it wants: a
    ``move.Path``."""

    def __init__(self, wanted: Sequence[Wanted], first_rank: int, place: int) -> None:
        """``wanted``: by each rank of the group. ``place``: this rank's."""
        own = wanted[place]
        given = [_of_rank(place, theirs) for theirs in wanted]
        taken = [_of_rank(peer, own) for peer in range(len(wanted))]
        arrived = {held: row for row, held in enumerate(held for rank in taken for held in rank)}
        self.pack = _segments(held.span for rank in given for held in rank)
        self.sends = _moves(given, first_rank)
        self.receives = _moves(taken, first_rank)
        self.arrange = _segments(-1 if held is None else arrived[held] for held in own)
        self.sent_rows, self.received_rows = len(self.pack), len(arrived)
        self.output_rows = len(own)


def _of_rank(place: int, wanted: Wanted) -> list[Held]:
    """The wanted spans that a rank holds, each once."""
    return sorted({held for held in wanted if held is not None and held.place == place})


def _segments(rows: Iterable[int]) -> Tensor:
    segments = [(row, 1) for row in rows]
    return torch.tensor(segments, dtype=torch.int64, device="cpu").view(-1, 2)


def _moves(of_ranks: Sequence[Sequence[Held]], first_rank: int) -> list[Move]:
    moves, row = [], 0
    for place, held in enumerate(of_ranks):
        if held:
            moves.append(Move(first_rank + place, row, len(held)))
        row += len(held)
    return moves


# ---- maps ----------------------------------------------------------------------------------------


class Maps(NamedTuple):
    """The map of each of some spans."""

    state: Tensor
    decay: Tensor
    apply: Callable[[Tensor, Tensor], Tensor]
    """The product of a decay and a state, or of a decay and the decay of earlier spans."""

    def after(self, earlier: Maps) -> Maps:
        """The maps of these spans together with earlier ones."""
        state = self.apply(self.decay, earlier.state) + self.state
        return Maps(state, self.apply(self.decay, earlier.decay), self.apply)

    def rows(self) -> Tensor:
        return torch.cat([self.state.flatten(1), self.decay.flatten(1)], 1)

    def of_rows(self, rows: Tensor) -> Maps:
        """Maps like these, of rows as ``rows`` gives them."""
        count, sizes = len(rows), (self.state.shape[1:], self.decay.shape[1:])
        state, decay = torch.split(rows, [math.prod(size) for size in sizes], 1)
        return Maps(state.view(count, *sizes[0]), decay.view(count, *sizes[1]), self.apply)


def pass_states(transport: Transport, passes: StatePasses, maps: Maps, stamp: Stamp) -> Tensor:
    """Return the state that enters each of this rank's spans, like ``maps.state``."""
    rows = maps.rows()
    by_rounds, paths = passes.choose(rows.shape[1] * rows.element_size())
    if by_rounds:
        return _by_rounds(transport, paths, maps, stamp)
    return _by_gathering(transport, paths[0], passes, maps, stamp)


def _by_gathering(
    transport: Transport, path: StatePath, passes: StatePasses, maps: Maps, stamp: Stamp
) -> Tensor:
    arrived = copy_rows_of(transport, path, maps.rows(), stamp)
    earlier = maps.of_rows(arrived)
    sequences = sorted({sequence for sequence, _ in passes.spans})
    count = len(sequences)
    # Of a rank that only sends, too, the result depends on what arrived: gradients come that way.
    start = maps.state.new_zeros(count, *maps.state.shape[1:]) + arrived[:0].sum()
    states = [start]
    for order in range(passes.spans_before):
        one = slice(order * count, (order + 1) * count)
        states.append(maps.apply(earlier.decay[one], states[-1]) + earlier.state[one])
    own = [order * count + sequences.index(sequence) for sequence, order in passes.spans]
    return torch.cat(states)[torch.tensor(own, dtype=torch.int64, device=start.device)]


def _by_rounds(
    transport: Transport, paths: Sequence[StatePath], maps: Maps, stamp: Stamp
) -> Tensor:
    """Rows of zeros, where a sequence has begun later, map every state to zeros."""
    before = maps.of_rows(copy_rows_of(transport, paths[0], maps.rows(), stamp))
    for path in paths[1:]:
        earlier = before.of_rows(copy_rows_of(transport, path, before.rows(), stamp))
        before = before.after(earlier)
    return before.state
