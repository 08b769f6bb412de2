"""Rows between GPUs that reach each other's memory (NVLink): staged once, read where they lie.

A rank stages its rows in memory that its peers have mapped, and signals each reader; a reader waits
on its device, not on its host, and one kernel brings all rows to where attention reads them, or
sums them. When it has read, it signals the owner, who then may use the memory again.

What is no layer's work (batches, agreement) travels by torch.distributed, see TorchTransport.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        self._timeout_ns = int(timeout * 1e9)
        self._slot_bytes = buffer_bytes // _SLOTS // _PAGE * _PAGE
        self._heads = -(-2 * _SLOTS * self.size * _WORD // _PAGE) * _PAGE
        self._memory, self._handle = _symmetric(
            self._heads + _SLOTS * self._slot_bytes, self.device, group
        )
        self._bases = list(self._handle.buffer_ptrs)
        self._failure = torch.zeros(4, dtype=torch.int64, device="cpu").pin_memory()
        # Exchanges with each peer through each slot: staged for it, and read from it.
        self._staged = [[0] * self.size for _ in range(_SLOTS)]
        self._read = [[0] * self.size for _ in range(_SLOTS)]
        self._columns: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}

    def check(self) -> None:
        """Raise HcpError when a rank was late, or called differently, in an exchange that has
        failed on the device since."""
        kind, peer, expected, found = self._failure.tolist()
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

    def stage(
        self, exchange: int, rows: int, width: int, dtype: torch.dtype, readers: Iterable[int]
    ) -> PeerStaged:
        """See :class:`hcp.exchange.SharingTransport`. Work is queued on the current stream."""
        self.check()
        if torch.cuda.is_current_stream_capturing():
            raise HcpError(
                "a CUDA graph captures an exchange through peers' memory, whose signals count on: "
                'build the process groups with transport="nccl" for layers in graphs'
            )
        return PeerStaged(self, exchange % _SLOTS, (rows, width, dtype), sorted(readers))

    # ---- memory ----

    def columns(
        self, rank: int, slot: int, rows: int, widths: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """What a rank has staged, (rows, sum of widths), where it lies, as columns side by side;
        made once for all layers."""
        key = (rank, slot, rows, widths, dtype)
        columns = self._columns.get(key)
        if columns is None:
            view = self._view(rank, slot, rows, sum(widths), dtype)
            whole = len(widths) == 1
            columns = (view,) if whole else view.split_with_sizes(list(widths), 1)
            self._columns[key] = columns
        return columns

    def _view(self, rank: int, slot: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        used = rows * width * dtype.itemsize
        if used > self._slot_bytes:
            raise ValueError(
                f"an exchange stages {used} bytes ({rows} rows of {width} {dtype}), expected "
                f"<= {self._slot_bytes}: build the process groups with "
                f"peer_buffer_bytes={_SLOTS * used} or more"
            )
        start = (self._heads + slot * self._slot_bytes) // dtype.itemsize
        view: Tensor = self._handle.get_buffer(rank, (rows, width), dtype, start)
        return view

    # ---- signals ----
    #
    # A rank's memory begins with the words that its peers write: for each slot, what each peer has
    # staged for it, then what each peer has read from it.

    def _word(self, owner: int, kind: int, slot: int, writer: int) -> int:
        return int(self._bases[owner]) + _WORD * ((kind * _SLOTS + slot) * self.size + writer)

    def read_by(self, slot: int) -> Tensor:
        """Signals that everybody has read what this slot held."""
        return _table(
            (self._word(self.rank, _READ, slot, peer), count << 32, peer)
            for peer, count in enumerate(self._staged[slot])
            if count > 0
        )

    def staged_for(self, slot: int, readers: Sequence[int], tag: int) -> Tensor:
        """Signals to the readers that the slot is filled once more."""
        counts = self._staged[slot]
        for peer in readers:
            counts[peer] += 1
        return _table(
            (self._word(peer, _STAGED, slot, self.rank), counts[peer] << 32 | tag, peer)
            for peer in readers
        )

    def staged_by(self, slot: int, owners: Sequence[int], tag: int) -> Tensor:
        """Signals that these ranks have filled their slots once more."""
        counts = self._read[slot]
        for peer in owners:
            counts[peer] += 1
        return _table(
            (self._word(self.rank, _STAGED, slot, peer), counts[peer] << 32 | tag, peer)
            for peer in owners
        )

    def read_of(self, slot: int, owners: Sequence[int]) -> Tensor:
        """Signals to these ranks that their slots have been read."""
        counts = self._read[slot]
        return _table(
            (self._word(peer, _READ, slot, self.rank), counts[peer] << 32, peer) for peer in owners
        )

    def reduce(
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
        torch.ops.hcp.reduce_signalled(
            out, list(parts), runs, columns, before, after, self._timeout_ns, self._failure
        )


def _table(signals: Iterable[tuple[int, int, int]]) -> Tensor:
    return torch.tensor(list(signals), dtype=torch.int64, device="cpu").view(-1, 3)


class PeerStaged:
    """See :class:`hcp.exchange.Staged`."""

    def __init__(
        self,
        transport: PeerTransport,
        slot: int,
        own: tuple[int, int, torch.dtype],
        readers: Sequence[int],
    ) -> None:
        self._transport, self._slot, self._own, self._readers = transport, slot, own, readers
        self._awaited: set[int] = set()
        """Owners whose signal the reads have waited for: later reads follow on their stream."""

    def write(self, parts: Sequence[Tensor], runs: Tensor, columns: int, tag: int) -> None:
        transport, slot = self._transport, self._slot
        before = transport.read_by(slot)
        after = transport.staged_for(slot, self._readers, tag)
        count, width, dtype = self._own
        (view,) = transport.columns(transport.rank, slot, count, (width,), dtype)
        transport.reduce(view, parts, runs, columns, before, after)

    def read(
        self,
        parts: Sequence[tuple[int, int]],
        runs: Tensor,
        rows: int,
        tag: int,
        done: Sequence[int],
        own: Sequence[Sequence[Tensor]] = (),
    ) -> PeerReading:
        transport, (_, width, dtype) = self._transport, self._own
        widths = tuple(column.shape[1] for column in own[0]) if own else (width,)
        met = [peer for peer, _ in parts if peer not in self._awaited]
        self._awaited.update(met)
        columns = [column for part in own for column in part]
        for peer, count in parts:
            columns += transport.columns(peer, self._slot, count, widths, dtype)
        out = torch.empty(rows, width, dtype=dtype, device=transport.device)
        transport.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(transport.stream):
            before = transport.staged_by(self._slot, met, tag)
            after = transport.read_of(self._slot, done)
            transport.reduce(out, columns, runs, len(widths), before, after)
            return PeerReading(out, transport.stream.record_event())


class PeerReading:
    """See :class:`hcp.exchange.Reading`."""

    def __init__(self, rows: Tensor, event: torch.cuda.Event) -> None:
        self._rows, self._event = rows, event

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self._event)
        return self._rows


def _symmetric(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Zeroed bytes that every rank of the group has mapped, and where they lie."""
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric.rendezvous(memory, group)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody signals before all are zero
    return memory, handle
