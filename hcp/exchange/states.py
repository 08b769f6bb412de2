"""States passed along sequences of several ranks, for layers with a recurrent state.

A span maps the state that enters it, h, to decay * h + state: decay and state are its own. Maps of
consecutive spans make one of the same kind, so that ranks exchange maps of spans, and none waits
for the others to compute. States start anew in each document of a sequence. In a tree of texts a
span starts from the state of the span that it continues, and so may several.

N spans of this rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hcp import _core
from hcp.exchange.agreement import Stamp
from hcp.exchange.layout import Layout, copied, tensor_of
from hcp.exchange.move import copy_rows_of
from hcp.exchange.sizes import ROUND_BYTES
from hcp.exchange.tables import Move, Sections, places
from hcp.exchange.transport import Transport


class StatePasses:
    """The ways in which states of a micro-batch get from rank to rank: made once, for all layers.
    ``csrc/include/hcp/hcp.h`` says which ways there are."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """``device``: of the states."""
        self._core, self._place = layout.plan.core, (layout.micro_batch, layout.rank)
        self._device = device
        self._chosen: dict[int, bool] = {}
        self._made: dict[bool, StateTable] = {}

    def choose(self, row_bytes: int) -> StateTable:
        """Return the table of what costs less, as the core says."""
        if row_bytes not in self._chosen:
            place = self._place
            self._chosen[row_bytes] = self._core.states_by_rounds(*place, row_bytes, ROUND_BYTES)
        by_rounds = self._chosen[row_bytes]
        if by_rounds not in self._made:
            words = tensor_of(self._core.states(*self._place, by_rounds), torch.int64)
            self._made[by_rounds] = StateTable(words, by_rounds, self._device)
        return self._made[by_rounds]


class StateTable(Sections):
    """The paths of a way, and which states enter which spans."""

    SECTIONS = _core.STATES_SECTIONS
    PLACES = places(SECTIONS)

    def __init__(self, words: Tensor, by_rounds: bool, device: torch.device) -> None:
        super().__init__(words)
        self.by_rounds = by_rounds
        self.paths = self._paths()
        self._device = device

    def _paths(self) -> list[StatePath]:
        pack, arrange = self.section("PACK"), self.section("ARRANGE")
        sends, receives = self.moves("SENDS"), self.moves("RECEIVES")
        paths, begin = [], [0] * 4
        for *end, sent, output in self.records("PATHS"):
            (p, s, r, a) = itertools.starmap(slice, zip(begin, end, strict=True))
            received = sum(move.rows for move in receives[r])
            paths.append(
                StatePath(pack[p], sends[s], receives[r], arrange[a], sent, received, output)
            )
            begin = end
        return paths

    @cached_property
    def wanting(self) -> list[Tensor]:
        """int64, on the device: this rank's spans that want a map in each round."""
        wanting = copied(self.section("WANTING").flatten(), self._device)
        return list(torch.split(wanting, [x.output_rows for x in self.paths]))

    @cached_property
    def starts(self) -> int:
        """Documents and texts of this rank's spans."""
        return int(self.section("SIZES"))

    @cached_property
    def levels(self) -> list[Tensor]:
        """int64: of the states of the level before, those that each level follows from."""
        sizes = self.section("LEVELS").flatten().tolist()
        return list(torch.split(self.section("KEPT").flatten(), sizes))

    @property
    def entering(self) -> Tensor:
        """int64 (spans,): the states, of all levels, that enter this rank's spans."""
        return self.section("ENTERING").flatten()

    @cached_property
    def taken(self) -> list[Tensor | slice]:
        """The levels, and then what enters, as they index tensors of the device."""
        return [_index_of(rows, self._device) for rows in (*self.levels, self.entering)]


def _index_of(rows: Tensor, device: torch.device) -> Tensor | slice:
    """Numbers of rows as an index: a slice where they are evenly apart, which gathers nothing."""
    steps = {*rows.diff().tolist()} or {1}
    if len(rows) == 0 or len(steps) > 1 or min(steps) < 1:
        return copied(rows, device)
    return slice(int(rows[0]), int(rows[-1]) + 1, *steps)


@dataclass
class StatePath:
    """The tables by which this rank gives maps of its spans to others, and gets what it wants: a
    ``move.Path``."""

    pack: Tensor
    sends: list[Move]
    receives: list[Move]
    arrange: Tensor
    sent_rows: int
    received_rows: int
    output_rows: int


# ---- maps ----------------------------------------------------------------------------------------

Parts = tuple[Tensor, ...]
"""Maps of n spans, or n states: tensors (n, ...)."""


class MapRule(NamedTuple):
    """The functions by which maps of spans are combined and applied."""

    combine: Callable[[Parts, Parts], Parts]
    """Takes maps and the maps that follow them, gives the maps of both. Associative."""
    apply: Callable[[Parts, Parts], Parts]
    """Takes maps and the states that enter, gives the states after."""
    start: Callable[[Parts], Parts]
    """Takes maps, gives the states after them at the start of a document."""
    initial: Parts
    """One state, that of the start of a document: (1, ...)."""


def linear(multiply: Callable[[Tensor, Tensor], Tensor], initial: Tensor) -> MapRule:
    """Make the rule of maps (state, decay), for a product of a decay and a state. ``initial``:
    zeros, with which nothing is multiplied, since decays may be infinite."""

    def after(maps: Parts, before: Parts) -> Parts:
        state, decay = maps
        decay = decay.contiguous()  # a view would keep all that arrived until the backward
        first, *others = (multiply(decay, part) for part in before)
        return first + state, *others

    return MapRule(
        lambda earlier, later: after(later, earlier), after, lambda maps: maps[:1], (initial,)
    )


class Maps(NamedTuple):
    """The map of each of some spans, as tensors of one dtype."""

    parts: Parts
    rule: MapRule

    @property
    def _side_by_side(self) -> bool:
        """Whether parts differ in the last size at most. Then views of one tensor are its rows in
        one copy, and rows are such views."""
        sizes = {part.shape[1:-1] for part in self.parts}
        return len(sizes) == 1 and all(part.dim() > 1 for part in self.parts)

    def rows(self) -> Tensor:
        if self._side_by_side:
            return torch.cat(self.parts, -1).flatten(1)
        return torch.cat([part.flatten(1) for part in self.parts], 1)

    def of_rows(self, rows: Tensor) -> Parts:
        """Maps like these, of rows as ``rows`` gives them."""
        sizes = [part.shape[1:] for part in self.parts]
        if self._side_by_side:
            widths = [size[-1] for size in sizes]
            both = rows.view(len(rows), *sizes[0][:-1], sum(widths))
            return torch.split(both, widths, -1)
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
    table = passes.choose(rows.shape[1] * rows.element_size())
    way = _by_rounds if table.by_rounds else _by_gathering
    return way(transport, table, maps, rows, stamp)


def _by_gathering(
    transport: Transport, table: StateTable, maps: Maps, rows: Tensor, stamp: Stamp
) -> Parts:
    (path,) = table.paths
    arrived = copy_rows_of(transport, path, rows, stamp)
    sizes = [len(kept) for kept in table.levels]
    own = zip(*(torch.split(part, sizes) for part in maps.of_rows(arrived)), strict=True)
    # Of a rank that only sends, too, the result depends on what arrived: gradients come that way.
    levels = [_initial(maps, table.starts, None if sizes else arrived)]
    *taken, entering = table.taken
    for number, (kept, level) in enumerate(zip(taken, own, strict=True)):
        states = tuple(_taken(state, kept) for state in levels[-1]) if number else ()
        levels.append(_applied(maps.rule, level, states) if number else maps.rule.start(level))
    return tuple(_taken(torch.cat(states), entering) for states in zip(*levels, strict=True))


def _taken(states: Tensor, rows: Tensor | slice) -> Tensor:
    """Rows of states in memory of their own: a view of some would keep all."""
    part = states[rows]
    is_part = isinstance(rows, slice) and len(part) < len(states)
    return part.clone() if is_part else part.contiguous()


def _by_rounds(
    transport: Transport, table: StateTable, maps: Maps, rows: Tensor, stamp: Stamp
) -> Parts:
    arrived = copy_rows_of(transport, table.paths[0], rows, stamp)
    first, *later = table.wanting
    # Rows of the map of the spans before each of this rank's, as far as is known.
    before = torch.zeros_like(rows).index_copy(0, first, arrived)
    for path, own in zip(table.paths[1:], later, strict=True):
        arrived = copy_rows_of(transport, path, before, stamp)
        both = maps.combined(maps.of_rows(arrived), maps.of_rows(before[own]))
        before = before.index_copy(0, own, both)
    entering = maps.rule.start(maps.of_rows(before[first]))
    starts = _initial(maps, len(rows))
    return tuple(
        start.index_copy(0, first, state) for start, state in zip(starts, entering, strict=True)
    )


def _initial(maps: Maps, count: int, arrived: Tensor | None = None) -> Parts:
    """States of the starts of documents, which depend on no row that arrived, if given."""
    starts = tuple(one.expand(count, *one.shape[1:]) for one in maps.rule.initial)
    return starts if arrived is None else tuple(x + arrived[:0].sum() for x in starts)


def _applied(rule: MapRule, maps: Parts, states: Parts) -> Parts:
    found = tuple(rule.apply(maps, states))
    if [x.shape for x in found] != [x.shape for x in states]:
        raise ValueError(
            f"apply gave tensors of shapes {[tuple(x.shape) for x in found]}, expected "
            f"{[tuple(x.shape) for x in states]}: states like those that it was given"
        )
    return found
