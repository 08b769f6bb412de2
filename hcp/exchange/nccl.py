"""Rows by NCCL itself: one group of sends and receives, on the communicator that torch has made.

Less host time than a list of torch's point-to-point calls, and a CUDA graph can capture it. Torch's
watchdog does not see these exchanges, so a thread of the transport watches them.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp._ranges import ranged
from hcp.errors import HcpError
from hcp.exchange.agreement import CallKind, Recent, Stamp, header_of
from hcp.exchange.signals import OTHER_CALL, Watch, words_for
from hcp.exchange.tables import Move
from hcp.exchange.torch_p2p import TorchTransport, copy_to_self
from hcp.exchange.transport import Pending, flat_rows, row_bytes_of

_log = logging.getLogger("hcp")


def _refuse_expandable_segments(rank: int) -> None:
    """Refuse a captured exchange that would hang in the replay: NCCL registers the buffers that a
    graph captures, each as one piece of memory, and torch's expandable segments are several."""
    allocator = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    given = ["".join(os.environ.get(name, "").split()) for name in allocator]  # as torch reads it
    expands = any("expandable_segments:True" in options for options in given)
    if expands and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        raise HcpError(
            f"rank {rank}: a CUDA graph captures an exchange by NCCL, and torch's allocator has "
            "expandable_segments:True, under which the replay hangs: leave it out of "
            f"{' and '.join(allocator)}, start the ranks with NCCL_GRAPH_REGISTER=0, or build the "
            'process groups with transport="peer"',
            code="cuda-graph",
        )


class NcclTransport(TorchTransport):
    """Exchanges on a side stream, through torch's communicator of a group.

    An exchange that takes longer than ``timeout`` seconds aborts the communicator: what hangs on
    the device ends, the process's work there stops before it uses rows that have not come, and the
    next call raises. So it does where rows come with another stamp than the call's. If the device
    has not stopped after ``timeout`` seconds more, the process ends.
    """

    name = "nccl"
    grace = 0.0
    """Seconds that an exchange may be late before the communicator is aborted."""
    bytes_sent = 0
    """Bytes of rows that NCCL has been given for other ranks so far."""

    def __init__(self, group: dist.ProcessGroup, *, timeout: float = 600.0) -> None:
        super().__init__(group)
        self.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self.streams = [self.stream]
        """On which it waits for other ranks."""
        backend: Any = group._get_backend(self.device)
        self._backend = backend
        self.all_gather_bytes(b"", "connect")  # makes the communicator
        self._communicator = int(backend._comm_ptr())
        self._failure: str | None = None
        self._watch = _Watch(timeout, weakref.ref(self))
        self._recent = Recent(self.rank)
        self._stamps = torch.zeros(1 + self.size, dtype=torch.int64, device=self.device)
        self._tables: dict[tuple[Move, ...], _Table] = {}
        self._connect()

    @ranged("hcp: exchange")
    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        stamp: Stamp,
    ) -> Pending:
        self.check()
        copy_to_self(self.rank, sent, sends, received, receives)
        self._recent.add(stamp)
        stamped = self.stamps.meet(stamp, sends, receives)
        return self._queue(sent, sends, received, receives, stamped, stamp.tag)

    def agree(self, stamp: Stamp, peers: Sequence[int]) -> None:
        self.check()
        moves = [Move(peer, 0, 1) for peer in self.meet_to_agree(stamp, peers)]
        own = header_of(stamp).unsqueeze(0).to(self.device)
        headers = own.new_empty(len(moves), own.shape[1])
        places = [Move(move.peer, i, 1) for i, move in enumerate(moves)]
        self._queue(own, moves, headers, places, ([], []), 0).wait()
        for move, header in zip(moves, headers.cpu(), strict=True):
            self.compare(stamp, move.peer, header)

    def _queue(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        stamped: tuple[list[int], list[int]],
        tag: int,
    ) -> Pending:
        """``stamped``: the ranks that the tag is sent to, and that it comes from."""
        to, back = self._table(sends), self._table(receives)
        if not to.peers and not back.peers:
            return _Nothing()
        watched = not torch.cuda.is_current_stream_capturing()
        if not watched:
            _refuse_expandable_segments(self.rank)
        number = self._watch.begin() if watched else _UNWATCHED
        try:
            torch.ops.hcp.nccl_exchange.default(
                flat_rows(sent),
                to.words,
                flat_rows(received),
                back.words,
                self._communicator,
                self._watch.memory,
                number,
                self._watch.timeout_ns,
                self.stream.cuda_stream,
                self._stamps,
                *stamped,
                tag,
            )
        except RuntimeError as error:
            self.check()
            raise HcpError(
                f"rank {self.rank}: the exchange with ranks {sorted(to.peers | back.peers)} could "
                f"not be queued: {error}; one of them may have ended, and its own message says "
                "why; NCCL_DEBUG=WARN lets NCCL say more",
                code="rank-late",
            ) from error
        if watched:
            self._watch.add(to.peers | back.peers)
        self.bytes_sent += to.rows * row_bytes_of(sent)
        return _NcclPending(self, sent, received)

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
            peers = frozenset(move.peer for move in others)
            table = self._tables[key] = _Table(words, peers, sum(move.rows for move in others))
        return table

    def check(self) -> None:
        """Raise HcpError when an exchange has taken too long, or none may follow."""
        if self._failure is not None:
            raise HcpError(self._failure, code="rank-late")
        other = self.other()
        if other is not None:
            raise other
        if not self.is_open:
            raise HcpError(
                f"rank {self.rank}: the process groups of this exchange have been closed, expected "
                "them open: close them after the last backward",
                code="groups-closed",
            )

    @property
    def is_open(self) -> bool:
        """Whether the group, and so its communicator, has not been destroyed."""
        return self.group in dist.distributed_c10d._world.pg_map

    def other(self) -> HcpError | None:
        """The error of an exchange whose rows came with another stamp than the call's."""
        other = self._watch.words.other
        if other.kind != OTHER_CALL:
            return None
        return self.failure_messages.differing(
            self._recent, other.peer, other.expected, other.found
        )

    def failed_elsewhere(self) -> HcpError | None:
        """The error for which another part of the transport has stopped the device."""
        return None

    def abort(self, peers: Sequence[int], timeout: float) -> None:
        """Begin to end what hangs on the device."""
        said = _patiently(lambda: self.failure_messages.said(peers), "")
        self._failure = (
            f"rank {self.rank}: the exchange with ranks {list(peers)} did not end within "
            f"{timeout:g} s; one of them has ended or is late, and its own message says why{said}"
        )
        _say(self._failure)  # a CUDA error may end the process before hcp is called again
        self._watch.stop_device()
        # NCCL tells its kernels to end, and then waits for the other ranks of this host: until each
        # has aborted or ended, which a late one may never do.
        threading.Thread(
            target=_abort, args=(self._backend,), name="hcp-nccl-abort", daemon=True
        ).start()

    def has_stopped(self) -> bool:
        """Whether nothing is under way on its streams: all has ended, or an error has ended it."""
        try:
            return all(bool(stream.query()) for stream in self.streams)
        except RuntimeError:
            return True

    def _connect(self) -> None:
        """Every pair of ranks, once: later on, ranks that exchange nothing call nothing."""
        moves = [Move(peer, peer, 1) for peer in range(self.size)]
        sent = torch.zeros(self.size, 1, device=self.device)
        stamp = Stamp(CallKind("connect"))
        received = torch.empty_like(sent)
        NcclTransport.start(self, sent, moves, received, moves, stamp=stamp).wait()
        torch.cuda.synchronize(self.device)


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):  # the device has stopped by then
        backend.abort()


T = TypeVar("T")


def _patiently(call: Callable[[], T], otherwise: T) -> T:
    """Let another thread call, and go on without it if that takes long: a thread that waits for the
    device may hold the lock of the job's store, or of a handler of logs."""
    found = [otherwise]

    def run() -> None:
        found[0] = call()

    thread = threading.Thread(target=run, name="hcp-nccl-say", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return found[0]


def _say(error: object) -> None:
    _patiently(lambda: _log.error(error), None)


class _Table(NamedTuple):
    words: Tensor
    """int64 (moves, 3) of (peer, row, rows)."""
    peers: frozenset[int]
    rows: int


_TABLES = 4096
_UNWATCHED = 0
_STDERR = 2
_PATIENCE = 5.0
"""Seconds in which an error is logged. More than ``FailureMessages`` waits for a peer's message."""


class _Nothing:
    def wait(self) -> None:
        pass


class _NcclPending:
    def __init__(self, transport: NcclTransport, sent: Tensor, received: Tensor) -> None:
        self._transport, self._received = transport, received
        self._sent = sent  # alive until the exchange is over
        self._joined = False

    def wait(self) -> None:
        try:
            self._join()
        finally:  # says more than CUDA does
            self._transport.check()

    def _join(self) -> None:
        torch.ops.hcp.join.default(self._received, self._transport.stream.cuda_stream)
        self._joined = True

    def __del__(self) -> None:
        if not self._joined:  # an error came between: their memory is not free before that
            with suppress(RuntimeError):  # a device that has failed uses it no more
                self._join()


class _Exchange(NamedTuple):
    number: int
    deadline: float
    peers: frozenset[int]


class _Watched(Protocol):
    """The part of a transport that a watch needs."""

    grace: float

    @property
    def is_open(self) -> bool: ...

    def other(self) -> HcpError | None: ...

    def failed_elsewhere(self) -> HcpError | None: ...

    def abort(self, peers: Sequence[int], timeout: float) -> None: ...

    def has_stopped(self) -> bool: ...


class _Watch:
    """Waits for exchanges without a call to CUDA, which a capture on another thread would not
    survive.

    The device writes the number of the last exchange that ended into host memory, and reads there
    whether that exchange was aborted.
    """

    _PERIOD = 0.1
    _SLACK = 5.0
    """Seconds that a device may take to stop, once it has been told to."""

    def __init__(self, timeout: float, transport: weakref.ref[_Watched]) -> None:
        self._timeout, self._transport = timeout, transport
        self.timeout_ns = int(timeout * 1e9)
        self.memory = words_for(Watch).pin_memory()
        # Without torch: a thread that waits for the GIL in C++ ends the process when Python ends.
        self.words = Watch.from_address(self.memory.data_ptr())
        self._pending: deque[_Exchange] = deque()
        self._number = _UNWATCHED
        threading.Thread(target=self._run, name="hcp-nccl-watch", daemon=True).start()

    def begin(self) -> int:
        """Number the next exchange."""
        self._number += 1
        return self._number

    def add(self, peers: frozenset[int]) -> None:
        """Watch the exchange that was queued last."""
        deadline = time.monotonic() + self._timeout
        self._pending.append(_Exchange(self._number, deadline, peers))

    def stop_device(self) -> None:
        """Let the end of an exchange stop the device from now on: its rows may be missing."""
        self.words.aborted = 1

    def _run(self) -> None:
        while (transport := self._transport()) is not None and transport.is_open:
            if self.words.other.kind == OTHER_CALL:  # as where one is late
                _say(_patiently(transport.other, None))
                self._end_unless_stopped(transport)
                return
            elsewhere = transport.failed_elsewhere()
            if elsewhere is not None:  # at once: a CUDA error may end the process, as in abort
                _say(elsewhere)
                self._end_unless_stopped(transport)
                return
            ended = self.words.ended
            while self._pending and self._pending[0].number <= ended:
                self._pending.popleft()
            if self._pending and time.monotonic() > self._pending[0].deadline + transport.grace:
                transport.abort(sorted(self._pending[0].peers), self._timeout)
                self._end_unless_stopped(transport)
                return
            del transport
            time.sleep(self._PERIOD)

    def _end_unless_stopped(self, transport: _Watched) -> None:
        """End the process if its device does not stop: whoever waits for it would wait forever. As
        long as an exchange may take, something else on the device may wait for a peer."""
        due = time.monotonic() + self._timeout + self._SLACK
        _end.at(due, self)
        while not transport.has_stopped():
            time.sleep(self._PERIOD)
            _end.at(due, self)  # the program may have taken or cancelled the timer
        _end.no_more(self)


class _End:
    """The end of a process at the first of several times.

    It is faulthandler's timer, of which a process has one. The timer is in C: whoever hangs may
    hold the GIL. It says where every thread is.
    """

    def __init__(self) -> None:
        self._due: dict[object, float] = {}
        self._lock = threading.Lock()

    def at(self, due: float, who: object) -> None:
        with self._lock:
            self._due[who] = due
            self._start()

    def no_more(self, who: object) -> None:
        with self._lock:
            del self._due[who]
            if self._due:
                self._start()
            else:
                faulthandler.cancel_dump_traceback_later()

    def _start(self) -> None:
        seconds = max(min(self._due.values()) - time.monotonic(), 1e-3)
        faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


_end = _End()
