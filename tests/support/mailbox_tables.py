"""The rounds of messages through mailboxes: the core's, and those of slow and obvious Python."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hcp import _core
from hcp.exchange.layout import tensor_of
from hcp.exchange.tables import Move, Sections, places

RANKS = 9
"""Ranks that moves may be for. The next one is the rank whose moves they are."""
PAGE = _core.SIGNALS["PAGE_BYTES"]


class _ReaderRows(NamedTuple):
    """Rows of one round for one reader."""

    reader: int
    rows: int
    runs: Tensor
    """Rows of the mailbox <- rows that are sent."""


class _ReadRange(NamedTuple):
    """Rows of one round that follow each other where they are received."""

    first: int
    rows: int
    owners: tuple[tuple[int, int], ...]
    """(rank, rows in its mailbox), in the order of the parts."""
    runs: Tensor
    met: frozenset[int]
    """Owners of whom an earlier range of the round has read."""
    done: tuple[int, ...]
    """Owners of whom no later range of the round reads."""


class _Round(NamedTuple):
    stages: list[_ReaderRows]
    read_ranges: list[_ReadRange]


class _Rounds(Sections):
    SECTIONS = _core.MAILBOX_SECTIONS
    PLACES = places(SECTIONS)

    def stages(self) -> list[_ReaderRows]:
        runs, begin, made = self.section("WRITE_RUNS"), 0, []
        for reader, rows, end in self.records("WRITES"):
            made.append(_ReaderRows(reader, rows, runs[begin:end]))
            begin = end
        return made

    def read_ranges(self) -> list[_ReadRange]:
        runs, owners = self.section("READ_RUNS"), self.records("OWNERS")
        begin, made = (0, 0), []
        for first, rows, *end in self.records("READS"):
            own = owners[begin[0] : end[0]]
            parts = tuple((peer, held) for peer, held, *_ in own)
            met = frozenset(peer for peer, _, met, _ in own if met)
            done = tuple(peer for peer, *_, done in own if done)
            made.append(_ReadRange(first, rows, parts, runs[begin[1] : end[1]], met, done))
            begin = (end[0], end[1])
        return made


def core_rounds(
    sends: Sequence[Move], receives: Sequence[Move], mailbox_rows: int, row_bytes: int | None = None
) -> list[_Round]:
    """Those of the core, in mailboxes of a page, which have room for so many rows."""
    link = _core.Link(RANKS, [8] * (RANKS + 1), 2 * RANKS * PAGE)
    row_bytes = PAGE // mailbox_rows if row_bytes is None else row_bytes
    sent, received = (list(itertools.chain(*moves)) for moves in (sends, receives))
    table = _Rounds(tensor_of(link.rounds(sent, received, row_bytes), torch.int64))
    stages, read_ranges = table.stages(), table.read_ranges()
    ends = [[0, 0], *table.records("ROUNDS")]
    return [_Round(stages[a:b], read_ranges[c:d]) for (a, c), (b, d) in itertools.pairwise(ends)]


def rounds_of(sends: Sequence[Move], receives: Sequence[Move], mailbox_rows: int) -> list[_Round]:
    """Cut messages into rounds of at most ``mailbox_rows`` rows for each pair of ranks."""
    rounds: list[_Round] = []
    while True:
        out = _window(sends, len(rounds) * mailbox_rows, mailbox_rows)
        back = _window(receives, len(rounds) * mailbox_rows, mailbox_rows)
        if not out and not back:
            return rounds
        stages = [
            _ReaderRows(
                peer,
                sum(rows for _, rows, _ in pieces),
                _runs((mailbox_row, rows, 0, row) for row, rows, mailbox_row in pieces),
            )
            for peer, pieces in out.items()
        ]
        rounds.append(_Round(stages, _stretches(back)))


def _window(moves: Iterable[Move], first: int, most: int) -> dict[int, list[tuple[int, int, int]]]:
    """Rows [first, first + most) of each peer's message: (row of the buffer, rows, row of the
    mailbox)."""
    found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    before: dict[int, int] = defaultdict(int)
    for peer, row, rows in moves:
        start = before[peer]
        before[peer] += rows
        begin, end = max(start, first), min(start + rows, first + most)
        if begin < end:
            found[peer].append((row + begin - start, end - begin, begin - first))
    return found


def _stretches(back: dict[int, list[tuple[int, int, int]]]) -> list[_ReadRange]:
    pieces = sorted(
        (row, rows, peer, mailbox_row)
        for peer, own in back.items()
        for row, rows, mailbox_row in own
    )
    groups: list[list[tuple[int, int, int, int]]] = []
    for piece in pieces:
        if groups and sum(groups[-1][-1][:2]) == piece[0]:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    held = {peer: sum(rows for _, rows, _ in own) for peer, own in back.items()}
    last = {piece[2]: number for number, group in enumerate(groups) for piece in group}
    stretches, met = [], set[int]()
    for number, group in enumerate(groups):
        owners = list(dict.fromkeys(piece[2] for piece in group))
        first = group[0][0]
        stretches.append(
            _ReadRange(
                first,
                sum(piece[1] for piece in group),
                tuple((peer, held[peer]) for peer in owners),
                _runs(
                    (row - first, rows, owners.index(peer), mailbox_row)
                    for row, rows, peer, mailbox_row in group
                ),
                frozenset(met.intersection(owners)),
                tuple(peer for peer in owners if last[peer] == number),
            )
        )
        met.update(owners)
    return stretches


def _runs(records: Iterable[tuple[int, ...]]) -> Tensor:
    return torch.tensor(list(records), dtype=torch.int64, device="cpu").view(-1, 4)
