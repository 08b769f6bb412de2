"""Messages between the ranks of a node, whose GPUs reach each other's memory.

A rank keeps two mailboxes for each of the others. It copies the rows of a message into the next
mailbox of its reader, who reads them from there. A longer message goes in rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp._ranges import ranged
from hcp.exchange.agreement import Stamp
from hcp.exchange.peer import HALVES, PeerMemory
from hcp.exchange.tables import Move
from hcp.exchange.transport import row_bytes_of, rows_of

_TABLES = 4096
_ALIGNMENT = 4096
_WORDS = torch.float64, torch.float32
"""What rows are copied as. A sum of one part keeps their bits, whatever they are."""


def takes(buffer: Tensor) -> bool:
    """Whether rows of a buffer can go through mailboxes: the same on both ranks of a message."""
    return row_bytes_of(buffer) > 0 and _word_of(buffer) is not None


def _word_of(buffer: Tensor) -> torch.dtype | None:
    return next((word for word in _WORDS if row_bytes_of(buffer) % word.itemsize == 0), None)


def _words(rows: Tensor) -> Tensor:
    """The same bytes. A buffer that is not used may have rows of any size."""
    word = _word_of(rows) if rows.shape[1] else None
    return rows.new_empty(0, 0) if word is None else rows.view(word)


def _aligned(rows: Tensor) -> Tensor:
    """Rows that may be viewed as words, copied if a caller's view of a tensor begins inside one: in
    memory, or from where the tensor begins, which may be inside one if it is another library's."""
    begins = rows.data_ptr(), rows.storage_offset() * rows.itemsize
    return rows.clone() if any(begin % _WORDS[0].itemsize for begin in begins) else rows


class _Stage(NamedTuple):
    """Rows of one round for one reader."""

    reader: int
    rows: int
    runs: Tensor
    """Rows of the mailbox <- rows that are sent."""


class _Stretch(NamedTuple):
    """Rows of one round that follow each other where they are received."""

    first: int
    rows: int
    owners: tuple[tuple[int, int], ...]
    """(rank, rows in its mailbox), in the order of the parts."""
    runs: Tensor
    met: frozenset[int]
    """Owners of whom an earlier stretch of the round has read."""
    done: tuple[int, ...]
    """Owners of whom no later stretch of the round reads."""


class _Round(NamedTuple):
    stages: list[_Stage]
    stretches: list[_Stretch]


class Mailboxes:
    """One rank's end of the messages of a node."""

    def __init__(
        self, memory: PeerMemory, node: Sequence[int], stream: torch.cuda.Stream | None
    ) -> None:
        """``memory``: for nothing but these messages. ``node``: its ranks. ``stream``: the one on
        which ``memory`` reads; None on the CPU."""
        self._memory, self._node, self._stream = memory, list(node), stream
        self._mailbox_bytes = memory.half_bytes // (len(node) - 1) // _ALIGNMENT * _ALIGNMENT
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)
        self._rounds: dict[tuple[object, ...], list[_Round]] = {}

    @ranged("hcp: exchange")
    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        stamp: Stamp,
    ) -> MailPending:
        """Begin to exchange rows with other ranks of the node: see ``Transport.start``."""
        self._memory.begin(stamp)
        source, target = _words(_aligned(rows_of(sent))), _words(rows_of(received))
        row_bytes = row_bytes_of(sent if sends else received)
        with self._on_stream():
            for one in self._rounds_of(sends, receives, row_bytes):
                for stage in one.stages:
                    self._stage(stage, source, stamp.tag)
                halves = {
                    peer: self._next(self._received, peer)
                    for peer in dict.fromkeys(p for part in one.stretches for p, _ in part.owners)
                }
                for stretch in one.stretches:
                    self._read(stretch, halves, target, stamp.tag)
        return MailPending(self._memory, source, received)

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _next(self, messages: dict[int, int], peer: int) -> int:
        """The half of the next message of a pair."""
        messages[peer] += 1
        return messages[peer] % HALVES

    def _stage(self, stage: _Stage, source: Tensor, tag: int) -> None:
        memory, reader = self._memory, stage.reader
        half = self._next(self._sent, reader)
        self._memory.queue(
            torch.ops.hcp.stage.default,
            self._mailbox(memory.rank, reader, half, stage.rows, source),
            *([source], stage.runs, 1),
            memory.read_by(half, (reader,)),
            memory.staged_for(half, (reader,)),
            memory.progress[0],
            tag=tag,
            reads=False,
        )

    def _read(self, stretch: _Stretch, halves: dict[int, int], target: Tensor, tag: int) -> None:
        memory = self._memory
        placed = tuple((peer, halves[peer]) for peer, _ in stretch.owners)
        memory.queue(
            torch.ops.hcp.read_into.default,
            target[stretch.first : stretch.first + stretch.rows],
            [
                self._mailbox(peer, memory.rank, halves[peer], rows, target)
                for peer, rows in stretch.owners
            ],
            *(stretch.runs, 1, sum(peer < memory.rank for peer, _ in stretch.owners)),
            memory.staged_by(placed, stretch.met),
            memory.read_of(tuple((peer, halves[peer]) for peer in stretch.done)),
            memory.progress[-1],
            tag=tag,
            reads=True,
        )

    def _mailbox(self, owner: int, reader: int, half: int, rows: int, like: Tensor) -> Tensor:
        """The first rows of the mailbox that an owner has for a reader."""
        place, own = self._node.index(reader), self._node.index(owner)
        start = (place - (place > own)) * self._mailbox_bytes
        return self._memory.rows_at(owner, half, start, rows, like.shape[1], like.dtype)

    def _rounds_of(
        self, sends: Sequence[Move], receives: Sequence[Move], row_bytes: int
    ) -> list[_Round]:
        """Made once for the layers of a micro-batch."""
        key = (tuple(sends), tuple(receives), row_bytes)
        rounds = self._rounds.get(key)
        if rounds is None:
            mailbox_rows = self._mailbox_bytes // row_bytes
            if mailbox_rows < 1:
                enough = HALVES * len(self._node) * (row_bytes + _ALIGNMENT)
                raise ValueError(
                    f"a row has {row_bytes} bytes, expected <= {self._mailbox_bytes}, the size of "
                    f"a mailbox in a node of {len(self._node)} ranks: build the process groups "
                    f"with peer_buffer_bytes={enough} or more"
                )
            if len(self._rounds) == _TABLES:  # of micro-batches that are over
                self._rounds.clear()
            rounds = self._rounds[key] = rounds_of(sends, receives, mailbox_rows)
        return rounds


def rounds_of(sends: Sequence[Move], receives: Sequence[Move], mailbox_rows: int) -> list[_Round]:
    """Cut messages into rounds of at most ``mailbox_rows`` rows for each pair of ranks."""
    rounds: list[_Round] = []
    while True:
        out = _window(sends, len(rounds) * mailbox_rows, mailbox_rows)
        back = _window(receives, len(rounds) * mailbox_rows, mailbox_rows)
        if not out and not back:
            return rounds
        stages = [
            _Stage(
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


def _stretches(back: dict[int, list[tuple[int, int, int]]]) -> list[_Stretch]:
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
            _Stretch(
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


class MailPending:
    """See :class:`hcp.exchange.transport.Pending`."""

    def __init__(self, memory: PeerMemory, sent: Tensor, received: Tensor) -> None:
        self._memory, self._received = memory, received
        self._sent = sent  # alive until the exchange is over
        self._joined = False

    def wait(self) -> None:
        self._join()
        self._memory.check()

    def _join(self) -> None:
        self._memory.join(self._received)
        self._joined = True

    def __del__(self) -> None:
        if not self._joined:  # an error came between: their memory is not free before that
            self._join()
