"""The tables of ``hcp.exchange.states`` as lists, slow and obvious, of all ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hcp.exchange.layout import Layout
from hcp.exchange.states import StatePath, StateTable


class SpanOfRank(NamedTuple):
    """A span, and the place in the group of the rank that holds it."""

    place: int
    span: int


Spans = list[tuple[int, int]]
"""(document, order) of each span of a rank, in the order of its rows."""


def _spans_of(layout: Layout, rank: int, place: int) -> list[tuple[int, int, int]]:
    """(document, start, place) of each span of a rank; the padding is a document of its own."""
    own = Layout(layout.plan, layout.micro_batch, rank)
    starts = [span.start for span in own.spans]
    found = [(d, start, place) for d, start in zip(own.span_documents, starts, strict=True)]
    return [*found, (-1 - place, 0, place)] if own.padding else found


class Group:
    """All spans of a group."""

    def __init__(self, layout: Layout) -> None:
        self.first_rank, self.degree = layout.first_rank, layout.degree
        ranks = range(layout.first_rank, layout.first_rank + layout.degree)
        found = [x for place, rank in enumerate(ranks) for x in _spans_of(layout, rank, place)]
        # A rank's rows are in the order of sequences and tokens; its padding is last.
        rows = [
            sorted((x for x in found if x[2] == place), key=lambda x: (x[0] < 0, x))
            for place in range(len(ranks))
        ]
        self.documents: dict[int, list[SpanOfRank]] = {}
        for x in sorted(found):
            self.documents.setdefault(x[0], []).append(SpanOfRank(x[2], rows[x[2]].index(x)))
        self.spans: list[Spans] = [
            [
                (x[0], self.documents[x[0]].index(SpanOfRank(place, i)))
                for i, x in enumerate(of_rank)
            ]
            for place, of_rank in enumerate(rows)
        ]

    def before(self, place: int) -> dict[int, int]:
        """How many spans come before a rank's last one, of each document, ascending."""
        return dict(sorted(dict(sorted(self.spans[place])).items()))

    def gathered(self, place: int) -> list[SpanOfRank]:
        """The spans before a rank's last ones: by order, and of one order by document."""
        before = self.before(place)
        return [
            self.documents[document][order]
            for order in range(max(before.values(), default=0))
            for document, end in before.items()
            if order < end
        ]

    def strides(self) -> list[int]:
        most = max((len(spans) - 1 for spans in self.documents.values()), default=0)
        strides, covered = [1], 1
        while covered < most:
            strides.append(covered)
            covered *= 2
        return strides

    def wanting(self, place: int, number: int) -> list[int]:
        least = self.strides()[number] + (number > 0)
        return [i for i, (_, order) in enumerate(self.spans[place]) if order >= least]

    def in_round(self, place: int, number: int) -> list[SpanOfRank]:
        stride = self.strides()[number]
        own = [self.spans[place][i] for i in self.wanting(place, number)]
        return [self.documents[document][order - stride] for document, order in own]

    def ways(self) -> dict[bool, list[list[list[SpanOfRank]]]]:
        """What each rank wants, in each path of the gathering (False) and of rounds."""
        places = range(self.degree)
        return {
            False: [[self.gathered(place) for place in places]],
            True: [
                [self.in_round(place, number) for place in places]
                for number in range(len(self.strides()))
            ],
        }

    def rows(self) -> tuple[int, int, int]:
        """What ``hcp_states_measure`` gives."""
        most = {
            by_rounds: max(
                sum(len({h for h in path[place] if h.place != place}) for path in paths)
                for place in range(self.degree)
            )
            for by_rounds, paths in self.ways().items()
        }
        return most[False], most[True], len(self.strides())


def path(wanted: Sequence[Sequence[SpanOfRank]], first_rank: int, place: int) -> dict[str, Any]:
    """What a rank packs, sends, receives and arranges."""

    def of_rank(peer: int, spans: Sequence[SpanOfRank]) -> list[SpanOfRank]:
        return sorted({held for held in spans if held.place == peer})

    def moves(of_ranks: list[list[SpanOfRank]]) -> list[tuple[int, int, int]]:
        firsts = [sum(map(len, of_ranks[:i])) for i in range(len(of_ranks))]
        return [(first_rank + i, firsts[i], len(held)) for i, held in enumerate(of_ranks) if held]

    given = [of_rank(place, theirs) for theirs in wanted]
    taken = [of_rank(peer, wanted[place]) for peer in range(len(wanted))]
    arrived = [held for rank in taken for held in rank]
    return {
        "pack": [held.span for rank in given for held in rank],
        "sends": moves(given),
        "receives": moves(taken),
        "arrange": [arrived.index(held) for held in wanted[place]],
        "rows": (sum(map(len, given)), len(arrived), len(wanted[place])),
    }


def levels(group: Group, place: int) -> dict[str, Any]:
    """Which states of the level before each level of the gathering follows from, and which of all
    levels enters each span."""
    before = group.before(place)
    numbers = {(document, 0): i for i, document in enumerate(before)}
    reaching, kept_of = list(before), []
    for order in range(max(before.values(), default=0)):
        kept = [i for i, document in enumerate(reaching) if before[document] > order]
        reaching = [reaching[i] for i in kept]
        kept_of.append(kept)
        numbers |= {(each, order + 1): len(numbers) + i for i, each in enumerate(reaching)}
    return {
        "documents": len(before),
        "levels": kept_of,
        "entering": [numbers[span] for span in group.spans[place]],
    }


# ---- hcp's own, as lists -------------------------------------------------------------------------


def _rows(segments: Tensor) -> list[int]:
    return [row for first, count in segments.tolist() for row in range(first, first + count)]


def listed_path(given: StatePath) -> dict[str, Any]:
    return {
        "pack": _rows(given.pack),
        "sends": [tuple(move) for move in given.sends],
        "receives": [tuple(move) for move in given.receives],
        "arrange": _rows(given.arrange),
        "rows": (given.sent_rows, given.received_rows, given.output_rows),
    }


def listed_levels(table: StateTable) -> dict[str, Any]:
    return {
        "documents": table.documents,
        "levels": [kept.tolist() for kept in table.levels],
        "entering": table.entering.tolist(),
    }
