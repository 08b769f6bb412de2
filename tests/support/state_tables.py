"""The tables of ``hcp.exchange.states`` as lists, slow and obvious, of all ranks of a group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp import Mask
from hcp.exchange.layout import Layout
from hcp.exchange.states import StatePath, StateTable


class SpanOfRank(NamedTuple):
    """A span, and the place in the group of the rank that holds it."""

    place: int
    span: int


Key = tuple[int, int]
"""A sequence and a token; padding comes before all."""


def previous_tokens(masks: Sequence[Mask] | None, length: int) -> list[int | None]:
    """The token that each token of a sequence goes on from, None: it begins a document or text."""
    if masks is None:
        return [None, *range(length - 1)]
    positions, seen = masks[0].positions, torch.stack([mask.dense() for mask in masks]).any(0)
    found: list[int | None] = [None]
    for token in range(1, length):
        if seen[token, token - 1]:
            found.append(token - 1)
            continue
        parents = [
            k for k in range(token) if seen[token, k] and positions[k] + 1 == positions[token]
        ]
        goes_on = positions[token] == positions[token - 1] + 1
        found.append(max(parents) if parents else token - 1 if goes_on else None)
    return found


class Group:
    """All spans of a group."""

    def __init__(self, layout: Layout) -> None:
        self.first_rank, self.degree = layout.first_rank, layout.degree
        self.spans: list[list[SpanOfRank]] = []
        self.keys: dict[SpanOfRank, Key] = {}
        lasts: dict[Key, SpanOfRank] = {}
        for place in range(self.degree):
            own = Layout(layout.plan, layout.micro_batch, layout.first_rank + place)
            count = len(own.spans) + (own.padding > 0)
            self.spans.append([SpanOfRank(place, i) for i in range(count)])
            for held, span in itertools.zip_longest(self.spans[-1], own.spans):
                at = (-1, place) if span is None else (own.sequences.index(span[0]), span[1])
                self.keys[held] = at
                if span is not None:
                    lasts[at[0], span[1] + span[2] - 1] = held
        self.previous: dict[SpanOfRank, SpanOfRank | None] = {}
        self.paths: dict[SpanOfRank, list[SpanOfRank]] = {}
        masks = layout.plan.masks
        tokens = [
            previous_tokens([own[s] for own in masks.values()] if masks else None, length)
            for s, length in zip(layout.sequences, layout.lengths, strict=True)
        ]
        for held, (sequence, start) in self.keys.items():
            before = None if sequence < 0 else tokens[sequence][start]
            self.previous[held] = None if before is None else lasts[sequence, before]

    def path(self, held: SpanOfRank) -> list[SpanOfRank]:
        """The spans before one, from the first."""
        if held not in self.paths:
            before = self.previous[held]
            self.paths[held] = [] if before is None else [*self.path(before), before]
        return self.paths[held]

    def gathered(self, place: int) -> list[SpanOfRank]:
        """The spans before a rank's: by depth, and of one depth by sequence and token."""
        wanted = {held for own in self.spans[place] for held in self.path(own)}
        return sorted(wanted, key=lambda held: (len(self.path(held)), self.keys[held]))

    @cached_property
    def strides(self) -> list[int]:
        most = max((len(self.path(held)) for held in self.keys), default=0)
        strides, covered = [1], 1
        while covered < most:
            strides.append(covered)
            covered *= 2
        return strides

    def wanting(self, place: int, number: int) -> list[int]:
        least = self.strides[number] + (number > 0)
        return [held.span for held in self.spans[place] if len(self.path(held)) >= least]

    def in_round(self, place: int, number: int) -> list[SpanOfRank]:
        stride = self.strides[number]
        return [self.path(self.spans[place][i])[-stride] for i in self.wanting(place, number)]

    def ways(self) -> dict[bool, list[list[list[SpanOfRank]]]]:
        """What each rank wants, in each path of the gathering (False) and of rounds."""
        places = range(self.degree)
        return {
            False: [[self.gathered(place) for place in places]],
            True: [
                [self.in_round(place, number) for place in places]
                for number in range(len(self.strides))
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
        return most[False], most[True], len(self.strides)


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
    roots = {(*group.path(held), held)[0] for held in group.spans[place]}
    starts = {held: i for i, held in enumerate(sorted(roots, key=group.keys.__getitem__))}
    after: dict[SpanOfRank, int] = {}

    def entering(held: SpanOfRank) -> int:
        before = group.previous[held]
        return starts[held] if before is None else after[before]

    kept_of, begin = [], 0
    by_depth = itertools.groupby(group.gathered(place), lambda held: len(group.path(held)))
    for level in [list(each) for _, each in by_depth]:
        kept_of.append([entering(held) - begin for held in level])
        begin = len(starts) + len(after)
        after |= {held: begin + i for i, held in enumerate(level)}
    return {
        "starts": len(starts),
        "levels": kept_of,
        "entering": [entering(held) for held in group.spans[place]],
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
        "starts": table.starts,
        "levels": [kept.tolist() for kept in table.levels],
        "entering": table.entering.tolist(),
    }
