"""Rows between GPUs that reach each other's memory (NVLink): staged once, read where they lie.

A rank stages its rows in memory that its peers have mapped, and signals each reader; a reader waits
on its device, not on its host, and one kernel brings all rows to where attention reads them, or
sums them. When it has read, it signals the owner, who then may use the memory again.

What is no layer's work (batches, agreement) travels by torch.distributed, see TorchTransport.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hcp.errors import HcpError
from hcp.exchange import TorchTransport

_SLOTS = 2
"""Exchanges that may be under way at once: the next is staged while the last is read."""
_PAGE = 4096
_WORD = 8

_STAGED, _READ = 0, 1
"""Kinds of signals."""
_LATE, _OTHER = 1, 2
"""Kinds of failures, as hcp_signal_failure has them."""

BUFFER_BYTES = 2**30


class PeerTransport(TorchTransport):
    """A transport whose ranks also read rows from each other's memory.

    ``buffer_bytes``: memory of each rank for staged rows, half of which one exchange may fill.
    Needs CUDA devices that all reach each other; every rank of the group makes it together.
    """

    name = "peer"

    def __init__(
        self, group: dist.ProcessGroup, *, buffer_bytes: int = BUFFER_BYTES, timeout: float = 600.0
    ) -> None:
        super().__init__(group)
        self.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._memory, handle = _symmetric(memory_bytes(self.size, buffer_bytes), self.device, group)
        self._slots = Slots(
            self.rank,
            list(handle.buffer_ptrs),
            handle.get_buffer,
            torch.zeros(4, dtype=torch.int64, device="cpu").pin_memory(),
            stream=self.stream.cuda_stream,
            buffer_bytes=buffer_bytes,
            timeout=timeout,
        )

    def check(self) -> None:
        """Raise HcpError when a rank was late, or called differently, in an exchange that has
        failed on the device since."""
        self._slots.check()

    def stage(
        self, exchange: int, rows: int, width: int, dtype: torch.dtype, readers: Iterable[int]
    ) -> PeerStaged:
        """See :class:`hcp.exchange.SharingTransport`. Work is queued on the current stream."""
        self._slots.check()
        if torch.cuda.is_current_stream_capturing():
            raise HcpError(
                "a CUDA graph captures an exchange through peers' memory, whose signals count on: "
                'build the process groups with transport="nccl" for layers in graphs'
            )
        return PeerStaged(self._slots, exchange % _SLOTS, (rows, width, dtype), readers)


class Slots:
    """One rank's end of memory that ranks have mapped: what is staged where, and the signals.

    A rank's memory begins with the words that its peers write: for each slot, what each peer has
    staged for it, then what each peer has read from it. The slots follow.
    """

    _MOST = 4096

    def __init__(
        self,
        rank: int,
        bases: Sequence[int],
        view: Callable[[int, tuple[int, int], torch.dtype, int], Tensor],
        failure: Tensor,
        *,
        stream: int,
        buffer_bytes: int,
        timeout: float,
    ) -> None:
        """``bases``: where each rank's memory lies here. ``view``: of a rank's memory, of some
        shape and dtype, from an element on. ``failure``: int64 (4,), see hcp_signal_failure.
        ``stream``: a cudaStream_t that reads."""
        self.rank, self._bases, self._view, self._stream = rank, bases, view, stream
        self._timeout_ns = int(timeout * 1e9)
        self._slot_bytes = _slot_bytes(buffer_bytes)
        self._failure = failure
        self._failed = (ctypes.c_int64 * 4).from_address(failure.data_ptr())
        # Exchanges with each peer through each slot: staged for it, and read from it.
        self._staged = [[0] * len(bases) for _ in range(_SLOTS)]
        self._read = [[0] * len(bases) for _ in range(_SLOTS)]
        self._columns: dict[tuple[object, ...], list[Tensor]] = {}
        self._signals: dict[tuple[object, ...], _Signals] = {}

    def check(self) -> None:
        """Raise HcpError when an exchange has failed since."""
        kind, peer, expected, found = self._failed
        if kind == _LATE:
            raise HcpError(
                f"rank {self.rank}: rank {peer} has not come to an exchange of keys and values "
                f"within {self._timeout_ns / 1e9:g} s; it has ended or is late, and its own "
                "message says why"
            )
        if kind == _OTHER:
            raise HcpError(
                f"rank {self.rank}: rank {peer} came to an exchange with a call that differs from "
                f"this rank's (signal {found:#x}, expected {expected:#x}); every rank of a group "
                "must call with the same dtypes, heads, sizes and options"
            )

    # ---- memory ----

    def columns(
        self,
        parts: tuple[tuple[int, int], ...],
        slot: int,
        widths: tuple[int, ...],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """What ranks have staged, (rank, its rows) each, (rows, sum of widths), where it lies, as
        columns side by side; made once for all layers."""
        key = (parts, slot, widths, dtype)
        columns = self._columns.get(key)
        if columns is None:
            if len(self._columns) == self._MOST:  # of micro-batches that are over
                self._columns.clear()
            columns = self._columns[key] = [
                column
                for rank, rows in parts
                for column in self._rows(rank, slot, rows, sum(widths), dtype).split_with_sizes(
                    list(widths), 1
                )
            ]
        return columns

    def _rows(self, rank: int, slot: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        used = rows * width * dtype.itemsize
        if used > self._slot_bytes:
            raise ValueError(
                f"an exchange stages {used} bytes ({rows} rows of {width} {dtype}), expected "
                f"<= {self._slot_bytes}: build the process groups with "
                f"peer_buffer_bytes={_SLOTS * used} or more"
            )
        start = (_words_bytes(len(self._bases)) + slot * self._slot_bytes) // dtype.itemsize
        return self._view(rank, (rows, width), dtype, start)

    # ---- signals ----

    def _signals_of(self, kind: int, slot: int, peers: tuple[int, ...], *, to: bool) -> _Signals:
        """Of a kind and slot, to these peers or from them."""
        key = (kind, slot, peers, to)
        signals = self._signals.get(key)
        if signals is None:
            if len(self._signals) == self._MOST:
                self._signals.clear()
            ends = [(peer, self.rank) if to else (self.rank, peer) for peer in peers]
            words = [self._word(owner, kind, slot, writer) for owner, writer in ends]
            signals = self._signals[key] = _Signals(words, peers)
        return signals

    def _word(self, owner: int, kind: int, slot: int, writer: int) -> int:
        place = (kind * _SLOTS + slot) * len(self._bases) + writer
        return int(self._bases[owner]) + _WORD * place

    def read_by(self, slot: int) -> Tensor:
        """Signals that everybody has read what this slot held."""
        counts = self._staged[slot]
        peers = tuple(peer for peer, count in enumerate(counts) if count > 0)
        return self._signals_of(_READ, slot, peers, to=False).at(counts)

    def staged_for(self, slot: int, readers: tuple[int, ...], tag: int) -> Tensor:
        """Signals to the readers that the slot is filled once more."""
        counts = self._staged[slot]
        for peer in readers:
            counts[peer] += 1
        return self._signals_of(_STAGED, slot, readers, to=True).at(counts, tag)

    def staged_by(self, slot: int, owners: tuple[int, ...], tag: int) -> Tensor:
        """Signals that these ranks have filled their slots once more."""
        counts = self._read[slot]
        for peer in owners:
            counts[peer] += 1
        return self._signals_of(_STAGED, slot, owners, to=False).at(counts, tag)

    def read_of(self, slot: int, owners: tuple[int, ...]) -> Tensor:
        """Signals to these ranks that their slots have been read."""
        return self._signals_of(_READ, slot, owners, to=True).at(self._read[slot])

    # ---- work ----

    def write(
        self,
        out: Tensor,
        parts: Sequence[Tensor],
        runs: Tensor,
        columns: int,
        before: Tensor,
        after: Tensor,
    ) -> None:
        """`ops.reduce` into ``out`` on the current stream, which waits for signals before and gives
        others after it."""
        given = out, parts, runs, columns, before, after, self._timeout_ns, self._failure
        try:
            torch.ops.hcp.reduce_signalled.default(*given)
        except RuntimeError:
            self.check()
            raise

    def read(
        self,
        parts: Sequence[Tensor],
        runs: Tensor,
        rows: int,
        columns: int,
        before: Tensor,
        after: Tensor,
    ) -> Tensor:
        """`ops.reduce` on the stream that reads, which follows the current one."""
        signals = before, after, self._timeout_ns, self._failure
        try:
            out: Tensor = torch.ops.hcp.read_signalled.default(
                parts, runs, rows, columns, *signals, self._stream
            )
        except RuntimeError:
            self.check()
            raise
        return out

    def join(self, rows: Tensor) -> None:
        """Let the current stream follow the one that reads."""
        torch.ops.hcp.join.default(rows, self._stream)


class _Signals:
    """Words of peers' memory with what they are to hold, as the operators take them: made once,
    since only the values change from exchange to exchange."""

    def __init__(self, words: Sequence[int], peers: Sequence[int]) -> None:
        self._peers = peers
        self._records = array("q")
        for word, peer in zip(words, peers, strict=True):
            self._records.extend((word, 0, peer))
        self._table = (
            torch.frombuffer(self._records, dtype=torch.int64).view(-1, 3)
            if peers
            else torch.empty(0, 3, dtype=torch.int64, device="cpu")
        )

    def at(self, counts: Sequence[int], tag: int = 0) -> Tensor:
        """int64 (peers, 3) of (word, value, peer), good until the next call: the operators copy
        it."""
        place = 1
        for peer in self._peers:
            self._records[place] = counts[peer] << 32 | tag
            place += 3
        return self._table


class PeerStaged:
    """See :class:`hcp.exchange.Staged`."""

    def __init__(
        self, slots: Slots, slot: int, own: tuple[int, int, torch.dtype], readers: Iterable[int]
    ) -> None:
        self._slots, self._slot, self._own = slots, slot, own
        self._readers = tuple(readers)
        self._awaited: set[int] = set()
        """Owners whose signal the reads have waited for: later reads follow on their stream."""

    def write(self, parts: Sequence[Tensor], runs: Tensor, columns: int, tag: int) -> None:
        slots, slot = self._slots, self._slot
        count, width, dtype = self._own
        (view,) = slots.columns(((slots.rank, count),), slot, (width,), dtype)
        before = slots.read_by(slot)
        after = slots.staged_for(slot, self._readers, tag)
        slots.write(view, parts, runs, columns, before, after)

    def read(
        self,
        parts: Sequence[tuple[int, int]],
        runs: Tensor,
        rows: int,
        tag: int,
        done: Sequence[int],
        own: Sequence[Sequence[Tensor]] = (),
    ) -> PeerReading:
        slots, slot, (_, width, dtype) = self._slots, self._slot, self._own
        widths = tuple(column.shape[1] for column in own[0]) if own else (width,)
        met = tuple(peer for peer, _ in parts if peer not in self._awaited)
        self._awaited.update(met)
        columns = [column for part in own for column in part]
        columns += slots.columns(tuple(parts), slot, widths, dtype)
        before = slots.staged_by(slot, met, tag)
        after = slots.read_of(slot, tuple(done))
        read = slots.read(columns, runs, rows, len(widths), before, after)
        return PeerReading(slots, read, columns)


class PeerReading:
    """See :class:`hcp.exchange.Reading`."""

    def __init__(self, slots: Slots, rows: Tensor, parts: Sequence[Tensor]) -> None:
        self._slots, self._rows = slots, rows
        self._parts = parts  # alive until the current stream has waited for them to be read

    def wait(self) -> Tensor:
        self._slots.join(self._rows)
        return self._rows


def _slot_bytes(buffer_bytes: int) -> int:
    return buffer_bytes // _SLOTS // _PAGE * _PAGE


def _words_bytes(size: int) -> int:
    return -(-2 * _SLOTS * size * _WORD // _PAGE) * _PAGE


def memory_bytes(size: int, buffer_bytes: int) -> int:
    """What each of ``size`` ranks needs in all."""
    return _words_bytes(size) + _SLOTS * _slot_bytes(buffer_bytes)


def _symmetric(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Zeroed bytes that every rank of the group has mapped, and where they lie."""
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric.rendezvous(memory, group)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody signals before all are zero
    return memory, handle
