"""Rows by NCCL itself: one group of sends and receives, on the communicator that torch has made.

Less host time than a list of torch's point-to-point calls, and a CUDA graph can capture it. Torch's
watchdog does not see these exchanges, so a thread of the transport watches them.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hcp.errors import HcpError
from hcp.exchange import Pending, TorchTransport, copy_to_self, rows_of
from hcp.layout import Move


class NcclTransport(TorchTransport):
    """Exchanges on a side stream, through torch's communicator of a group.

    An exchange that takes longer than ``timeout`` seconds aborts the communicator: what hangs on
    the device ends, and the next call raises.
    """

    name = "nccl"

    def __init__(self, group: dist.ProcessGroup, *, timeout: float = 600.0) -> None:
        super().__init__(group)
        self.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        backend: Any = group._get_backend(self.device)
        self._backend = backend
        self.all_gather_bytes(b"")  # makes the communicator
        self._communicator = int(backend._comm_ptr())
        self._watch = _Watch(timeout, weakref.WeakMethod(self._abort))
        self._failure: str | None = None
        self._tables: dict[tuple[Move, ...], _Table] = {}
        self._connect()

    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        tag: int = 0,
    ) -> Pending:
        self.check()
        copy_to_self(self.rank, sent, sends, received, receives)
        to, back = self._table(sends), self._table(receives)
        if not to.peers and not back.peers:
            return _Nothing()
        watched = not torch.cuda.is_current_stream_capturing()
        ended = self._watch.begin() if watched else _NO_SIGNAL
        try:
            torch.ops.hcp.nccl_exchange.default(
                rows_of(sent),
                to.words,
                rows_of(received),
                back.words,
                self._communicator,
                ended,
                self.stream.cuda_stream,
            )
        except RuntimeError as error:
            self.check()
            raise HcpError(
                f"rank {self.rank}: the exchange with ranks {sorted(to.peers | back.peers)} could "
                f"not be queued: {error}; one of them may have ended, and its own message says "
                "why; NCCL_DEBUG=WARN lets NCCL say more"
            ) from error
        if watched:
            self._watch.add(to.peers | back.peers)
        return _NcclPending(self.stream.cuda_stream, sent, received)

    def _table(self, moves: Sequence[Move]) -> _Table:
        """Moves between ranks as the operator takes them; made once for the layers of a
        micro-batch."""
        key = tuple(moves)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) == _TABLES:  # of micro-batches that are over
                self._tables.clear()
            others = [move for move in moves if move.peer != self.rank]
            words = torch.tensor(others, dtype=torch.int64, device="cpu").view(-1, 3)
            table = self._tables[key] = _Table(words, frozenset(move.peer for move in others))
        return table

    def check(self) -> None:
        """Raise HcpError when an exchange has taken too long."""
        if self._failure is not None:
            raise HcpError(self._failure)

    def _abort(self, peers: list[int], timeout: float) -> None:
        self._failure = (
            f"rank {self.rank}: the exchange with ranks {peers} did not end within {timeout:g} s; "
            "one of them has ended or is late, and its own message says why"
        )
        self._backend.abort()

    def _connect(self) -> None:
        """Every pair of ranks, once: later on, ranks that exchange nothing call nothing."""
        moves = [Move(peer, peer, 1) for peer in range(self.size)]
        sent = torch.zeros(self.size, 1, device=self.device)
        self.start(sent, moves, torch.empty_like(sent), moves).wait()
        torch.cuda.synchronize(self.device)


class _Table(NamedTuple):
    words: Tensor
    """int64 (moves, 3) of (peer, row, rows)."""
    peers: frozenset[int]


_TABLES = 4096
_NO_SIGNAL = torch.empty(0, 3, dtype=torch.int64, device="cpu")


class _Nothing:
    def wait(self) -> None:
        pass


class _NcclPending:
    def __init__(self, stream: int, sent: Tensor, received: Tensor) -> None:
        self._stream, self._received = stream, received
        self._sent = sent  # alive until the exchange is over

    def wait(self) -> None:
        torch.ops.hcp.join.default(self._received, self._stream)


class _Exchange(NamedTuple):
    number: int
    deadline: float
    peers: frozenset[int]


class _Watch:
    """Waits for exchanges without a call to CUDA, which a capture on another thread would not
    survive: the device writes the number of the last exchange that ended into host memory."""

    _PERIOD = 0.5

    def __init__(self, timeout: float, abort: weakref.WeakMethod[Any]) -> None:
        self._timeout, self._abort = timeout, abort
        self._memory = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        # Without torch: a thread that waits for the GIL in C++ ends the process when Python ends.
        self._ended = ctypes.c_int64.from_address(self._memory.data_ptr())
        self._pending: deque[_Exchange] = deque()
        self._number = 0
        self._signal = array("q", (self._memory.data_ptr(), 0, -1))
        self._table = torch.frombuffer(self._signal, dtype=torch.int64).view(1, 3)
        threading.Thread(target=self._run, name="hcp-nccl-watch", daemon=True).start()

    def begin(self) -> Tensor:
        """The signal, int64 (1, 3), that ends the next exchange; good until the next call."""
        self._number += 1
        self._signal[1] = self._number
        return self._table

    def add(self, peers: frozenset[int]) -> None:
        """Watch what has just been queued."""
        deadline = time.monotonic() + self._timeout
        self._pending.append(_Exchange(self._number, deadline, peers))

    def _run(self) -> None:
        while (abort := self._abort()) is not None:
            ended = self._ended.value
            while self._pending and self._pending[0].number <= ended:
                self._pending.popleft()
            if self._pending and time.monotonic() > self._pending[0].deadline:
                abort(sorted(self._pending[0].peers), self._timeout)
                return
            del abort
            time.sleep(self._PERIOD)
