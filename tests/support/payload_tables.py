"""The tables of ``hcp.exchange.payload_splits`` by slow and obvious Python, and payloads at
random."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hcp.exchange import payload_splits
from hcp.exchange.layout import Layout
from hcp.exchange.tables import Move, Route
from hcp.planning.plan import Group, Plan

# ---- a path of rows ------------------------------------------------------------------------------


class Sent(NamedTuple):
    """Rows of a source that go to a rank."""

    peer: int
    row: int
    rows: int


class Received(NamedTuple):
    """Rows of the output, in its order, and the rank that they come from."""

    peer: int
    rows: int


class RowPath:
    """The tables of rows on their way from sources to an output, made from lists of runs.

    The runs between two ranks are listed in one order by both. A row may go to several ranks.
    """

    def __init__(self, sends: Sequence[Sent], receives: Sequence[Received]) -> None:
        by_peer = sorted(sends, key=lambda run: run.peer)
        self.pack = _segments([(run.row, run.rows) for run in by_peer])
        self.sends = _moves([(run.peer, run.rows) for run in sends])
        self.receives = _moves([(run.peer, run.rows) for run in receives])
        places = {move.peer: move.row for move in self.receives}
        arranged: list[tuple[int, int]] = []
        for peer, rows in receives:
            if rows:
                arranged.append((places[peer], rows))
                places[peer] += rows
        self.arrange = _segments(arranged)
        self.sent_rows = sum(run.rows for run in sends)
        self.received_rows = self.output_rows = sum(run.rows for run in receives)


def _segments(runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    kept = [run for run in runs if run[1] > 0]
    return torch.tensor(kept, dtype=torch.int64, device="cpu").view(len(kept), 2)


def _moves(runs: Sequence[tuple[int, int]]) -> list[Move]:
    """Add up the rows of each peer, ascending, and lay them end to end."""
    rows: dict[int, int] = {}
    for peer, count in runs:
        rows[peer] = rows.get(peer, 0) + count
    moves, row = [], 0
    for peer in sorted(rows):
        if rows[peer]:
            moves.append(Move(peer, row, rows[peer]))
            row += rows[peer]
    return moves


# ---- the tokens of a sequence that take rows -----------------------------------------------------


class Takers:
    """The tokens of one sequence that take rows of its payload, in order."""

    def __init__(self, runs: Sequence[Sequence[int]]) -> None:
        """``runs``: (first token, tokens, rows of each) of tokens that follow each other. Where
        several tokens take one row, the last number of all runs is minus their number."""
        self.tokens_of_row = -runs[0][2] if runs and runs[0][2] < 0 else 1
        self._runs = [(first, tokens, max(each, 1)) for first, tokens, each in runs]
        self._tokens = [first for first, _, _ in self._runs]
        self._takers = [0, *itertools.accumulate(tokens for _, tokens, _ in self._runs)]
        self._rows = [0, *itertools.accumulate(tokens * each for _, tokens, each in self._runs)]

    @property
    def count(self) -> int:
        """Number of tokens that take rows."""
        return self._takers[-1]

    def before_token(self, token: int) -> int:
        """How many tokens that take rows come before a token."""
        run = bisect_right(self._tokens, token) - 1
        if run < 0:
            return 0
        first, tokens, _ = self._runs[run]
        return self._takers[run] + min(token - first, tokens)

    def tokens_within(self, start: int, end: int) -> list[int]:
        """The tokens from ``start`` up to ``end`` that take rows."""
        run = max(bisect_right(self._tokens, start) - 1, 0)
        found: list[int] = []
        for first, tokens, _ in self._runs[run:]:
            if first >= end:
                break
            found += range(max(first, start), min(first + tokens, end))
        return found

    def first_row(self, taker: int) -> int:
        """The first row that the taker of a number takes; all rows for the number of takers. Each
        row is counted as often as tokens take it."""
        run = bisect_right(self._takers, taker) - 1
        if run == len(self._runs):
            return self._rows[-1]
        return self._rows[run] + (taker - self._takers[run]) * self._runs[run][2]

    def before_row(self, row: int) -> int:
        """How many takers take rows before a row. ValueError if one takes rows on both sides."""
        row *= self.tokens_of_row
        run = bisect_right(self._rows, row) - 1
        if run == len(self._runs):
            return self._takers[-1]
        first, _, each = self._runs[run]
        takers, over = divmod(row - self._rows[run], each)
        if over:
            raise ValueError(
                f"token {first + takers} takes rows before and after row {row}, where a unit ends, "
                "expected rows of one unit"
            )
        return self._takers[run] + takers


# ---- who gets what -------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Consecutive rows of a sequence's payload."""

    sequence: int
    row: int
    rows: int


def ranks_of(group: Group) -> range:
    """The ranks of a group."""
    return range(group.first_rank, group.first_rank + group.degree)


class Split:
    """How the ranks of each group split one payload of a plan."""

    def __init__(
        self,
        plan: Plan,
        rule: str,
        units: Sequence[Sequence[int] | int],
        takers: Mapping[int, Takers] | None = None,
    ) -> None:
        """``rule``: one of SPLITS. ``units``: of all sequences of the plan, the rows of each unit,
        or the number of rows where each is a unit.
        ``takers``: of the sequences that this rank loaded or computes, where tokens take rows."""
        self.plan, self.rule, self.units = plan, rule, units
        self.has_takers = takers is not None
        self.takers: Mapping[int, Takers] = takers or {}
        self._ends: list[Sequence[int]] = [
            range(rows + 1) if isinstance(rows, int) else [0, *itertools.accumulate(rows)]
            for rows in units
        ]
        self._counts_units = False

    def of_units(self) -> Split:
        """The split of a payload that has one row per unit, which goes where the unit's rows go."""
        split = Split(self.plan, self.rule, self.units)
        split._counts_units = True
        return split

    def rows(self, sequence: int) -> int:
        """Rows of a sequence."""
        ends = self._ends[sequence]
        return len(ends) - 1 if self._counts_units else ends[-1]

    def units_within(self, sequence: int, row: int, rows: int) -> list[int]:
        """The rows of each unit that lies in some rows of a sequence."""
        if self._counts_units:
            return [1] * rows
        ends = self._ends[sequence]
        first, end = bisect_left(ends, row), bisect_left(ends, row + rows)
        return [b - a for a, b in itertools.pairwise(ends[first : end + 1])]

    def rows_of_micro_batches(self, rank: int) -> list[int]:
        """The number of rows that a rank has in each micro-batch."""
        return [sum(piece.rows for piece in pieces) for pieces in self._by_micro_batch(rank)]

    def _by_micro_batch(self, rank: int) -> list[list[Piece]]:
        found: list[list[Piece]] = []
        for micro_batch, groups in enumerate(self.plan.micro_batches):
            group = next((g for g in groups if rank in ranks_of(g)), None)
            found.append(self.pieces(micro_batch, group, rank) if group else [])
        return found

    def pieces(
        self, micro_batch: int, group: Group, rank: int, of: Container[int] | None = None
    ) -> list[Piece]:
        """The rows that a rank of a group has, in order. ``of``: of these sequences only."""
        if self.rule == "tokens":
            return self._pieces_of_tokens(micro_batch, rank, of)
        if self.rule == "first" and rank != group.first_rank:
            return []
        chosen = self._even(group, rank - group.first_rank) if self.rule == "even" else None
        pieces = []
        for number, sequence in enumerate(group.sequences):
            if of is not None and sequence not in of:
                continue
            first, end = chosen[number] if chosen else (0, len(self._ends[sequence]) - 1)
            if not self._counts_units:
                first, end = self._ends[sequence][first], self._ends[sequence][end]
            pieces.append(Piece(sequence, first, end - first))
        return pieces

    def _even(self, group: Group, place: int) -> list[tuple[int, int]]:
        """The units (first, end) of each sequence at a place of the group: those whose middle lies
        in its share of the group's rows."""
        total = sum(self._ends[sequence][-1] for sequence in group.sequences)
        chosen, before = [], 0
        for sequence in group.sequences:
            ends = self._ends[sequence]

            def twice_middle(unit: int, ends: Sequence[int] = ends, before: int = before) -> int:
                return (2 * before + ends[unit] + ends[unit + 1]) * group.degree

            units = range(len(ends) - 1)
            first, end = (
                bisect_left(units, 2 * total * border, key=twice_middle)
                for border in (place, place + 1)
            )
            chosen.append((first, end))
            before += ends[-1]
        return chosen

    def _pieces_of_tokens(
        self, micro_batch: int, rank: int, of: Container[int] | None
    ) -> list[Piece]:
        pieces = []
        for sequence, first, end in self._wanted(micro_batch, rank, of):
            takers = self.takers[sequence]
            row = takers.first_row(first)
            pieces.append(Piece(sequence, row, takers.first_row(end) - row))
        return pieces

    def _wanted(
        self, micro_batch: int, rank: int, of: Container[int] | None = None
    ) -> list[tuple[int, int, int]]:
        """The takers among a rank's tokens: (sequence, first, end) of each span."""
        wanted = []
        for sequence, start, rows in Layout(self.plan, micro_batch, rank).spans:
            if of is None or sequence in of:
                before = self.takers[sequence].before_token
                wanted.append((sequence, before(start), before(start + rows)))
        return wanted

    # ---- rows from where they were loaded ----

    def from_sources(self, sources: Sequence[int], rank: int) -> RowPath:
        """The path from what ``rank`` loaded, its sequences by ascending index, to what it gets,
        micro-batch after micro-batch."""
        own = [i for i, source in enumerate(sources) if source == rank]
        starts = itertools.accumulate((self.rows(i) for i in own), initial=0)
        loaded = dict(zip(own, starts, strict=False))
        sends: list[Sent] = []
        receives: list[Received] = []
        for micro_batch, groups in enumerate(self.plan.micro_batches):
            for group in groups:
                ranks = ranks_of(group)
                for peer in ranks if any(i in loaded for i in group.sequences) else ():
                    sends += [
                        Sent(peer, loaded[sequence] + row, rows)
                        for sequence, row, rows in self.pieces(micro_batch, group, peer, loaded)
                    ]
                if rank in ranks:
                    pieces = self.pieces(micro_batch, group, rank)
                    receives += [Received(sources[sequence], rows) for sequence, _, rows in pieces]
        return RowPath(sends, receives)

    # ---- results to the tokens that take them ----

    def to_tokens(self, layout: Layout) -> RowPath:
        """The path of results, one of each taker whose rows a rank has, to the ranks that have the
        takers."""
        group = Group(layout.first_rank, layout.degree, layout.sequences)
        ranks = ranks_of(group)
        held = {rank: _placed(self._held(layout.micro_batch, group, rank)) for rank in ranks}
        wanted = {rank: self._wanted(layout.micro_batch, rank) for rank in ranks}
        own = self.rule in ("whole", "tokens")  # each rank has what its tokens take
        sends = [
            Sent(peer, row, rows)
            for peer in ([layout.rank] if own else ranks)
            for run in wanted.get(peer, [])
            for row, rows in _common(run, held[layout.rank])
        ]
        receives = [
            Received(peer, rows)
            for run in wanted.get(layout.rank, [])
            for peer in ([layout.rank] if own else ranks)
            for _, rows in _common(run, held[peer])
        ]
        return RowPath(sends, receives)

    def token_rows(self, layout: Layout) -> list[int]:
        """Where a rank's tokens that take rows lie among its own rows."""
        found: list[int] = []
        offset = 0
        for sequence, start, rows in layout.spans:
            tokens = self.takers[sequence].tokens_within(start, start + rows)
            found += [offset + token - start for token in tokens]
            offset += rows
        return found

    def takers_held(self, layout: Layout) -> int:
        """How many takers' rows a rank has."""
        group = Group(layout.first_rank, layout.degree, layout.sequences)
        held = self._held(layout.micro_batch, group, layout.rank) if layout.degree else []
        return sum(end - first for _, first, end in held)

    def _held(self, micro_batch: int, group: Group, rank: int) -> list[tuple[int, int, int]]:
        """The takers whose rows a rank has: (sequence, first, end), end to end."""
        held = []
        for sequence, row, rows in self.pieces(micro_batch, group, rank):
            before = self.takers[sequence].before_row
            held.append((sequence, before(row), before(row + rows)))
        return held


_Placed = dict[int, list[tuple[int, int, int]]]
"""Of each sequence, the takers whose rows a rank has: (place among all of these, first, end)."""


def _placed(held: Sequence[tuple[int, int, int]]) -> _Placed:
    placed: _Placed = {}
    place = 0
    for sequence, first, end in held:
        placed.setdefault(sequence, []).append((place, first, end))
        place += end - first
    return placed


def _common(run: tuple[int, int, int], held: _Placed) -> Iterator[tuple[int, int]]:
    """The takers of a run that are held: (place, how many)."""
    sequence, first, end = run
    for place, low, high in held.get(sequence, ()):
        begin, stop = max(first, low), min(end, high)
        if begin < stop:
            yield place + begin - low, stop - begin


def by_sequence(plan: Plan, sources: Sequence[int], micro_batch: int, rank: int) -> RowPath:
    """A row of each sequence, from the first rank of its group to where it was loaded."""
    first = {
        sequence: (group.first_rank, place)
        for group in plan.micro_batches[micro_batch]
        for place, sequence in enumerate(group.sequences)
    }
    sends = [
        Sent(sources[sequence], place, 1)
        for sequence, (holder, place) in sorted(first.items())
        if holder == rank
    ]
    receives = [
        Received(holder, 1)
        for sequence, (holder, _) in sorted(first.items())
        if sources[sequence] == rank
    ]
    return RowPath(sends, receives)


# ---- hcp's own, as lists -------------------------------------------------------------------------


def listed(path: RowPath | Route) -> dict[str, Any]:
    """What a rank packs, sends, receives and arranges, row by row."""

    def rows(segments: torch.Tensor) -> list[int]:
        return [row for first, count in segments.tolist() for row in range(first, first + count)]

    return {
        "pack": rows(path.pack),
        "sends": [tuple(move) for move in path.sends],
        "receives": [tuple(move) for move in path.receives],
        "arrange": rows(path.arrange),
        "rows": (path.sent_rows, path.received_rows, path.output_rows),
    }


def result(call: Callable[[], Any]) -> Any:
    """What a call returns, or the words of its refusal."""
    try:
        return call()
    except ValueError as error:
        return str(error)


# ---- payloads at random --------------------------------------------------------------------------

Runs = list[list[int]]


def runs_of(tokens: Sequence[int], rows: Sequence[int]) -> Runs:
    """Join tokens that follow each other and take as many rows: (first, tokens, rows of each)."""
    runs: Runs = []
    for token, each in zip(tokens, rows, strict=True):
        if runs and runs[-1][0] + runs[-1][1] == token and runs[-1][2] == each:
            runs[-1][1] += 1
        else:
            runs.append([token, 1, each])
    return runs


class Drawn(NamedTuple):
    """A payload of a plan."""

    rule: str
    units: list[list[int] | int]
    """Of each sequence."""
    runs: list[Runs] | None

    def takers_of(self, plan: Plan, sources: Sequence[int], rank: int) -> dict[int, Takers] | None:
        """Of the sequences that a rank loaded or computes."""
        if self.runs is None:
            return None
        loaded = [i for i, source in enumerate(sources) if source == rank]
        return {i: Takers(self.runs[i]) for i in [*loaded, *computed_by(plan, rank)]}

    def slow(self, plan: Plan, sources: Sequence[int], rank: int) -> Split:
        return Split(plan, self.rule, self.units, self.takers_of(plan, sources, rank))

    def fast(self, plan: Plan, sources: Sequence[int], rank: int) -> payload_splits.Split:
        takers = None
        if self.runs is not None:
            loaded = [i for i, source in enumerate(sources) if source == rank]
            words = (
                [word for i in sequences for run in self.runs[i] for word in run]
                for sequences in (loaded, computed_by(plan, rank))
            )
            takers = payload_splits.Takers(sources, rank, [len(runs) for runs in self.runs], *words)
        return payload_splits.Split(plan, self.rule, self.units, takers)  # type: ignore[arg-type]


def computed_by(plan: Plan, rank: int) -> list[int]:
    """The sequences of a rank's groups, in the order of the plan."""
    groups = [g for groups in plan.micro_batches for g in groups if rank in ranks_of(g)]
    return [sequence for group in groups for sequence in group.sequences]


def cut(rng: random.Random, rows: int, most: int) -> list[int]:
    """Rows cut into units of some rows each."""
    units = []
    while rows:
        units.append(rng.randint(1, min(most, rows)))
        rows -= units[-1]
    return units


def draw_payload(rng: random.Random, lengths: Sequence[int], rule: str) -> Drawn:
    """A payload with or without units, whose rows nobody takes, or tokens do by one of the ways
    that hcp.Payload names."""
    ways = ["each", "counted"] if rule == "tokens" else ["none", "each", "several", "counted"]
    way, in_units = rng.choice(ways), rule != "tokens" and rng.random() < 0.6
    each = rng.randint(2 if way == "several" else 1, 4)
    units: list[list[int] | int] = []
    runs: list[Runs] = []
    for length in lengths:
        marked = sorted(rng.sample(range(length), rng.randint(0, length)))
        if way == "several":
            marked = marked[: len(marked) // each * each]
        taken = [rng.randint(1, 3) if way == "counted" else each for _ in marked]
        rows = len(marked) // each if way == "several" else sum(taken)
        runs.append(runs_of(marked, [-each] * len(marked) if way == "several" else taken))
        ends = cut(rng, len(marked) if way in ("each", "counted") else rows, 5)
        if way in ("each", "counted"):  # no token takes rows of two units
            counts = iter(taken)
            ends = [sum(itertools.islice(counts, n)) for n in ends]
        units.append(ends if in_units else rows)
    return Drawn(rule, units, None if way == "none" else runs)
