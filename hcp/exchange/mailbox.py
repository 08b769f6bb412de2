"""Messages between the ranks of a node, whose GPUs reach each other's memory.

A rank keeps two mailboxes for each of the others. It copies the rows of a message into the next
mailbox of its reader, who reads them from there. A longer message goes in rounds.
"""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp import _core
from hcp._ranges import ranged
from hcp.exchange.agreement import Stamp
from hcp.exchange.layout import tensor_of
from hcp.exchange.peer import PeerMemory
from hcp.exchange.signals import HALVES
from hcp.exchange.tables import Move, Sections, places
from hcp.exchange.transport import flat_rows, row_bytes_of

_TABLES = 4096
_ALIGNMENT = 4096
_WORDS = torch.float64, torch.float32
"""The dtypes as which rows are copied. A sum of one part keeps their bits, whatever they are."""


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
        source, target = _words(_aligned(flat_rows(sent))), _words(flat_rows(received))
        row_bytes = row_bytes_of(sent if sends else received)
        with self._on_stream():
            for one in self._rounds_of(sends, receives, row_bytes):
                for stage in one.stages:
                    self._stage(stage, source, stamp.tag)
                halves = {
                    peer: self._next(self._received, peer)
                    for peer in dict.fromkeys(p for part in one.read_ranges for p, _ in part.owners)
                }
                for piece_range in one.read_ranges:
                    self._read(piece_range, halves, target, stamp.tag)
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

    def _stage(self, stage: _ReaderRows, source: Tensor, tag: int) -> None:
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

    def _read(
        self, piece_range: _ReadRange, halves: dict[int, int], target: Tensor, tag: int
    ) -> None:
        memory = self._memory
        placed = tuple((peer, halves[peer]) for peer, _ in piece_range.owners)
        memory.queue(
            torch.ops.hcp.read_into.default,
            target[piece_range.first : piece_range.first + piece_range.rows],
            [
                self._mailbox(peer, memory.rank, halves[peer], rows, target)
                for peer, rows in piece_range.owners
            ],
            *(piece_range.runs, 1, sum(peer < memory.rank for peer, _ in piece_range.owners)),
            memory.staged_by(placed, piece_range.met),
            memory.read_of(tuple((peer, halves[peer]) for peer in piece_range.done)),
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


def rounds_of(sends: Sequence[Move], receives: Sequence[Move], mailbox_rows: int) -> list[_Round]:
    """Cut messages into rounds of at most ``mailbox_rows`` rows for each pair of ranks."""
    sent, received = (
        array("q", itertools.chain.from_iterable(moves)) for moves in (sends, receives)
    )
    table = _Rounds(tensor_of(_core.mailbox_rounds(sent, received, mailbox_rows), torch.int64))
    stages, read_ranges = table.stages(), table.read_ranges()
    ends = [[0, 0], *table.records("ROUNDS")]
    return [_Round(stages[a:b], read_ranges[c:d]) for (a, c), (b, d) in itertools.pairwise(ends)]


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
