"""Rows by NCCL itself: one group of sends and receives, on the communicator that torch has made.

Less host time than a list of torch's point-to-point calls, and a CUDA graph can capture it. Torch's
watchdog does not see these exchanges, so a thread of the transport watches them.
"""

from __future__ import annotations

import threading
import time
import weakref
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
        to, back = (
            [move for move in moves if move.peer != self.rank] for moves in (sends, receives)
        )
        if not to and not back:
            return _Nothing()
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            torch.ops.hcp.nccl_exchange(
                rows_of(sent), _table(to), rows_of(received), _table(back), self._communicator
            )
            peers = sorted({move.peer for move in (*to, *back)})
            if not torch.cuda.is_current_stream_capturing():
                self._watch.add(received, peers)
            event = self.stream.record_event()
        return _NcclPending(event, (sent, received))

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


def _table(moves: Sequence[Move]) -> Tensor:
    return torch.tensor(moves, dtype=torch.int64, device="cpu").view(-1, 3)


class _Nothing:
    def wait(self) -> None:
        pass


class _NcclPending:
    def __init__(self, event: torch.cuda.Event, buffers: tuple[Tensor, ...]) -> None:
        self._event = event
        self._buffers = buffers  # alive until the exchange is over

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _Exchange(NamedTuple):
    number: int
    deadline: float
    peers: list[int]


class _Watch:
    """Waits for exchanges without a call to CUDA, which a capture on another thread would not
    survive: the device writes the number of the last exchange that ended into host memory."""

    _PERIOD = 0.5

    def __init__(self, timeout: float, abort: weakref.WeakMethod[Any]) -> None:
        self._timeout, self._abort = timeout, abort
        self._ended = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        self._pending: deque[_Exchange] = deque()
        self._number = 0
        threading.Thread(target=self._run, name="hcp-nccl-watch", daemon=True).start()

    def add(self, memory: Tensor, peers: list[int]) -> None:
        """Watch what the current stream has just been given."""
        self._number += 1
        signal = torch.tensor([[self._ended.data_ptr(), self._number, -1]], device="cpu")
        torch.ops.hcp.signal_set(memory, signal)
        deadline = time.monotonic() + self._timeout
        self._pending.append(_Exchange(self._number, deadline, peers))

    def _run(self) -> None:
        while (abort := self._abort()) is not None:
            ended = int(self._ended)
            while self._pending and self._pending[0].number <= ended:
                self._pending.popleft()
            if self._pending and time.monotonic() > self._pending[0].deadline:
                abort(self._pending[0].peers, self._timeout)
                return
            del abort
            time.sleep(self._PERIOD)
