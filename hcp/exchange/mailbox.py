"""Messages between the ranks of a node, whose GPUs reach each other's memory.

A rank keeps two mailboxes for each of the others. It copies the rows of a message into the next
mailbox of its reader, who reads them from there. A longer message goes in rounds. The core says
where mailboxes lie, cuts messages, and counts them: ``csrc/include/hcp/link.h``.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp._ranges import ranged
from hcp.exchange.agreement import Stamp
from hcp.exchange.layout import tensor_of
from hcp.exchange.peer import PeerMemory
from hcp.exchange.tables import Move
from hcp.exchange.transport import flat_rows, row_bytes_of

_TABLES = 4096
_LEAST_BYTES, _WORD_BYTES = 4, 8
"""Rows are copied as elements of so many bytes: the larger where they are a multiple of it."""


def _aligned(rows: Tensor) -> Tensor:
    """Rows that begin at an element, copied if a caller's view of a tensor begins inside one."""
    return rows.clone() if rows.data_ptr() % _WORD_BYTES else rows


class Mailboxes:
    """One rank's end of the messages of a node."""

    def __init__(self, memory: PeerMemory) -> None:
        """``memory``: that the ranks of the node have mapped, for nothing but these messages."""
        self._memory = memory
        self._link = tensor_of(memory.link.words, torch.int64)
        self._rounds: dict[tuple[object, ...], Tensor] = {}

    def take(self, buffer: Tensor) -> bool:
        """Whether rows of a buffer go through mailboxes: the same on both ranks of a message."""
        row_bytes = row_bytes_of(buffer)
        return 0 < row_bytes <= self._memory.link.mailbox_bytes and row_bytes % _LEAST_BYTES == 0

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
        memory = self._memory
        memory.begin(stamp)
        source = _aligned(flat_rows(sent))
        rounds = self._rounds_of(sends, receives, row_bytes_of(sent if sends else received))
        memory.queue(
            torch.ops.hcp.mail.default,
            *(source, flat_rows(received), rounds, self._link),
            *(memory.progress[0], memory.progress[-1]),
            tag=stamp.tag,
            reads=True,
        )
        return MailPending(memory, source, received)

    def _rounds_of(self, sends: Sequence[Move], receives: Sequence[Move], row_bytes: int) -> Tensor:
        """The words of a table, made once for the layers of a micro-batch."""
        key = (tuple(sends), tuple(receives), row_bytes)
        rounds = self._rounds.get(key)
        if rounds is None:
            if len(self._rounds) == _TABLES:  # of micro-batches that are over
                self._rounds.clear()
            sent, back = (array("q", itertools.chain(*moves)) for moves in (sends, receives))
            words = self._memory.link.rounds(sent, back, row_bytes)
            rounds = self._rounds[key] = tensor_of(words, torch.int64)
        return rounds


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
