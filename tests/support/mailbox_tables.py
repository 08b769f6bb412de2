"""The rounds of ``hcp.exchange.mailbox`` in slow and obvious Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hcp.exchange.mailbox import _ReaderRows, _ReadRange, _Round
from hcp.exchange.tables import Move


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
