"""States passed along sequences of several ranks, for layers with a recurrent state.

A span maps the state that enters it, h, to decay * h + state: decay and state are its own. Maps of
consecutive spans make one of the same kind, so that ranks exchange maps of spans, and none waits
for the others to compute. States start anew in each document of a sequence.

N spans of this rank. The order of a span is its number in its document, over all ranks; the place
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
from hcp.exchange.sizes import ROUND_BYTES
from hcp.exchange.tables import Move
from hcp.exchange.transport import Transport


class Held(NamedTuple):
    """A span that a rank holds."""

    place: int
    span: int
    """Its number on that rank."""


Wanted = Sequence[Held]
"""Spans whose maps a rank wants, in the order of its output."""


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
        self._documents = _documents(
            [Layout(layout.plan, layout.micro_batch, rank) for rank in group]
        )
        self._spans = [_spans_of(self._documents, place) for place in range(layout.degree)]
        gathered = [self._all_before(place) for place in range(layout.degree)]
        rounds = [self._before_by(i, stride) for i, stride in enumerate(self.strides)]
        self._ways = {False: [gathered], True: rounds}
        self._most_rows = {by_rounds: _most_rows(way) for by_rounds, way in self._ways.items()}
        self._paths: dict[bool, list[StatePath]] = {}

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(document, order) of each of this rank's spans."""
        return self._spans[self._place]

    @property
    def spans_before(self) -> dict[int, int]:
        """How many spans come before this rank's last one, of each document, ascending."""
        return _spans_before(self.spans)

    @property
    def strides(self) -> list[int]:
        """How far back each round looks. In the first, a span gets the map of the one before."""
        most = max((len(spans) - 1 for spans in self._documents.values()), default=0)
        strides, covered = [1], 1
        while covered < most:
            strides.append(covered)
            covered *= 2
        return strides

    def wanting(self, number: int) -> list[int]:
        """This rank's spans that want a map in a round, by its number."""
        least = _least_order(number, self.strides[number])
        return [i for i, (_, order) in enumerate(self.spans) if order >= least]

    def cost(self, row_bytes: int) -> int:
        """Return the cost of what costs less."""
        return min(self._costs(row_bytes))

    def choose(self, row_bytes: int) -> tuple[bool, list[StatePath]]:
        """Return whether rounds cost less than the gathering, and the paths of what costs less."""
        costs = self._costs(row_bytes)
        by_rounds = costs[True] < costs[False]
        if by_rounds not in self._paths:
            self._paths[by_rounds] = [
                StatePath(wanted, self._first_rank, self._place) for wanted in self._ways[by_rounds]
            ]
        return by_rounds, self._paths[by_rounds]

    def _costs(self, row_bytes: int) -> list[int]:
        """Of the gathering and of rounds: bytes that the busiest rank gets from others, and
        ROUND_BYTES for each round."""
        return [
            self._most_rows[by_rounds] * row_bytes + len(self._ways[by_rounds]) * ROUND_BYTES
            for by_rounds in (False, True)
        ]

    def _all_before(self, place: int) -> Wanted:
        """The spans before a rank's last ones: by order, and of one order by document."""
        before = _spans_before(self._spans[place])
        return [
            self._documents[document][order]
            for order in range(max(before.values(), default=0))
            for document, end in before.items()
            if order < end
        ]

    def _before_by(self, number: int, stride: int) -> list[Wanted]:
        """What each rank wants in a round: for each of its spans, the one ``stride`` before it."""
        least = _least_order(number, stride)
        return [
            [
                self._documents[document][order - stride]
                for document, order in spans
                if order >= least
            ]
            for spans in self._spans
        ]


def _least_order(number: int, stride: int) -> int:
    """The first span that wants a map in a round. A document's first has none of spans before it:
    from the second round on, nobody wants it."""
    return stride if number == 0 else stride + 1


def _spans_before(spans: Sequence[tuple[int, int]]) -> dict[int, int]:
    return dict(sorted(dict(spans).items()))  # orders ascend


def _documents(layouts: Sequence[Layout]) -> dict[int, list[Held]]:
    """The spans of each document, in the order of tokens. A rank's padding is a document."""
    found: list[tuple[int, int, Held]] = []
    for place, layout in enumerate(layouts):
        for index, (document, span) in enumerate(
            zip(layout.span_documents, layout.spans, strict=True)
        ):
            found.append((document, span.start, Held(place, index)))
        if layout.padding:
            found.append((-1 - place, 0, Held(place, len(layout.spans))))
    documents: dict[int, list[Held]] = {}
    for document, _, held in sorted(found):
        documents.setdefault(document, []).append(held)
    return documents


def _spans_of(documents: dict[int, list[Held]], place: int) -> list[tuple[int, int]]:
    """(document, order) of each span of a rank, in the order of its rows."""
    found = [
        (held.span, document, order)
        for document, spans in documents.items()
        for order, held in enumerate(spans)
        if held.place == place
    ]
    return [(document, order) for _, document, order in sorted(found)]


def _most_rows(rounds: Sequence[Sequence[Wanted]]) -> int:
    """The most rows that a rank gets from others, over all rounds."""
    by_rank = zip(*rounds, strict=True)
    return max(
        (
            sum(len({h for h in wanted if h.place != place}) for wanted in of_rank)
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
        self.arrange = _segments(arrived[held] for held in own)
        self.sent_rows, self.received_rows = len(self.pack), len(arrived)
        self.output_rows = len(own)


def _of_rank(place: int, wanted: Wanted) -> list[Held]:
    """The wanted spans that a rank holds, each once."""
    return sorted({held for held in wanted if held.place == place})


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

Parts = tuple[Tensor, ...]
"""Maps of n spans, or n states: tensors (n, ...)."""


class Rule(NamedTuple):
    """What maps of spans do."""

    combine: Callable[[Parts, Parts], Parts]
    """Of maps and the maps that follow them: the maps of both. Associative."""
    apply: Callable[[Parts, Parts], Parts]
    """Of maps and states that enter: the states after."""
    start: Callable[[Parts], Parts]
    """Of maps: the states after them at the start of a document."""
    initial: Parts
    """One state, that of the start of a document: (1, ...)."""


def linear(multiply: Callable[[Tensor, Tensor], Tensor], initial: Tensor) -> Rule:
    """Make the rule of maps (state, decay), for a product of a decay and a state. ``initial``:
    zeros, with which nothing is multiplied, since decays may be infinite."""

    def after(maps: Parts, before: Tensor) -> Tensor:
        state, decay = maps
        return multiply(decay, before) + state

    return Rule(
        lambda earlier, later: (after(later, earlier[0]), multiply(later[1], earlier[1])),
        lambda maps, states: (after(maps, states[0]),),
        lambda maps: maps[:1],
        (initial,),
    )


class Maps(NamedTuple):
    """The map of each of some spans, as tensors of one dtype."""

    parts: Parts
    rule: Rule

    def rows(self) -> Tensor:
        return torch.cat([part.flatten(1) for part in self.parts], 1)

    def of_rows(self, rows: Tensor) -> Parts:
        """Maps like these, of rows as ``rows`` gives them."""
        sizes = [part.shape[1:] for part in self.parts]
        parts = torch.split(rows, [math.prod(size) for size in sizes], 1)
        return tuple(
            part.reshape(len(rows), *size) for part, size in zip(parts, sizes, strict=True)
        )

    def combined(self, earlier: Parts, later: Parts) -> Tensor:
        """The rows of two maps in one."""
        both = Maps(tuple(self.rule.combine(earlier, later)), self.rule)
        expected = [part.shape for part in later]
        if [part.shape for part in both.parts] != expected:
            raise ValueError(
                f"combine gave tensors of shapes {[tuple(part.shape) for part in both.parts]}, "
                f"expected {[tuple(shape) for shape in expected]}: maps like those given"
            )
        return both.rows()


def pass_states(transport: Transport, passes: StatePasses, maps: Maps, stamp: Stamp) -> Parts:
    """Return the state that enters each of this rank's spans."""
    rows = maps.rows()
    by_rounds, paths = passes.choose(rows.shape[1] * rows.element_size())
    if by_rounds:
        return _by_rounds(transport, paths, passes, maps, stamp)
    return _by_gathering(transport, paths[0], passes, maps, stamp)


def _by_gathering(
    transport: Transport, path: StatePath, passes: StatePasses, maps: Maps, stamp: Stamp
) -> Parts:
    """Levels: states that enter spans of one order, of the documents that reach so far."""
    arrived = copy_rows_of(transport, path, maps.rows(), stamp)
    before = passes.spans_before
    # Of a rank that only sends, too, the result depends on what arrived: gradients come that way.
    levels = [_initial(maps, len(before), arrived)]
    numbers = {(document, 0): i for i, document in enumerate(before)}
    reaching, row = list(before), 0
    for order in range(max(before.values(), default=0)):
        kept = [i for i, document in enumerate(reaching) if before[document] > order]
        reaching = [reaching[i] for i in kept]
        own = maps.of_rows(arrived[row : row + len(kept)])
        row += len(kept)
        index = _index(kept, arrived)
        states = tuple(state[index] for state in levels[-1])
        numbers |= {(each, order + 1): len(numbers) + i for i, each in enumerate(reaching)}
        levels.append(_applied(maps.rule, own, states) if order else maps.rule.start(own))
    wanted = _index([numbers[span] for span in passes.spans], arrived)
    return tuple(torch.cat(states)[wanted] for states in zip(*levels, strict=True))


def _by_rounds(
    transport: Transport,
    paths: Sequence[StatePath],
    passes: StatePasses,
    maps: Maps,
    stamp: Stamp,
) -> Parts:
    """``before``: rows of the map of the spans before each of this rank's, as far as is known."""
    rows = maps.rows()
    arrived = copy_rows_of(transport, paths[0], rows, stamp)
    first = _index(passes.wanting(0), rows)
    before = torch.zeros_like(rows).index_copy(0, first, arrived)
    for number, path in enumerate(paths[1:], 1):
        arrived = copy_rows_of(transport, path, before, stamp)
        own = _index(passes.wanting(number), rows)
        both = maps.combined(maps.of_rows(arrived), maps.of_rows(before[own]))
        before = before.index_copy(0, own, both)
    entering = maps.rule.start(maps.of_rows(before[first]))
    starts = _initial(maps, len(rows), arrived)
    return tuple(
        start.index_copy(0, first, state) for start, state in zip(starts, entering, strict=True)
    )


def _initial(maps: Maps, count: int, arrived: Tensor) -> Parts:
    """States of the starts of documents, which depend on no row that arrived."""
    touched = arrived[:0].sum()
    return tuple(one.expand(count, *one.shape[1:]) + touched for one in maps.rule.initial)


def _applied(rule: Rule, maps: Parts, states: Parts) -> Parts:
    found = tuple(rule.apply(maps, states))
    if [x.shape for x in found] != [x.shape for x in states]:
        raise ValueError(
            f"apply gave tensors of shapes {[tuple(x.shape) for x in found]}, expected "
            f"{[tuple(x.shape) for x in states]}: states like those that it was given"
        )
    return found


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)
