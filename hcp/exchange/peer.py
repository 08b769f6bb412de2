"""Rows between GPUs that reach each other's memory (NVLink): staged once, read where they lie.

A rank stages its rows in memory that its peers have mapped, and signals each reader; a reader waits
on its device, not on its host, and a kernel, or the copy engine for long runs, brings all rows to
where attention reads them; a kernel sums them. When it has read, it signals the owner, who then may
use the memory again.

What is no layer's work (batches, agreement) travels by torch.distributed, see TorchTransport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp import _core
from hcp._ranges import ranged
from hcp.errors import HcpError
from hcp.exchange import agreement
from hcp.exchange.agreement import Recent, Stamp
from hcp.exchange.layout import tensor_of
from hcp.exchange.signals import HALVES, LATE, OTHER_CALL, PIECES, SignalFailure, words_for
from hcp.exchange.tables import Move, Sections, places
from hcp.exchange.torch_p2p import FailureMessages, TorchTransport
from hcp.exchange.transport import Blocks, Pending, Share, flat_rows

BUFFER_BYTES = 2**30
"""Memory of each rank for staged rows, unless ``buffer_bytes`` says otherwise."""


def refuse_in_graphs(rank: int, stamp: Stamp) -> None:
    """Refuse rows that ranks send each other while a CUDA graph captures: their halves of memory
    change from call to call."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise HcpError(
            f"rank {rank}: a CUDA graph captures rows that ranks send each other "
            f"({agreement.name(stamp.fields)}), expected rows that they read from each other's "
            "memory (cp.attention and hcp.GraphHandler): build the process groups with "
            'transport="nccl" for others',
            code="cuda-graph",
        )


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
        self.node, self.buffer_bytes = range(self.size), buffer_bytes
        self.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._memory, self._peers_memory = symmetric_memory(
            self, group, self.stream, buffer_bytes=buffer_bytes, timeout=timeout
        )

    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        stamp: Stamp,
    ) -> Pending:
        refuse_in_graphs(self.rank, stamp)
        return super().start(sent, sends, received, receives, stamp=stamp)

    def check(self) -> None:
        """Raise HcpError when a rank was late, or called differently, in an exchange that has
        failed on the device since."""
        self._peers_memory.check()

    @property
    def half_bytes(self) -> int:
        """See :class:`hcp.exchange.transport.SharingTransport`."""
        return self._peers_memory.link.half_bytes

    def share(self, share: Share) -> PeerShared:
        """See :class:`hcp.exchange.transport.SharingTransport`."""
        return PeerShared(self._peers_memory, share)


class SignalTable(Sections):
    """The signals of an exchange through one half."""

    SECTIONS = _core.LINK_SECTIONS
    PLACES = places(SECTIONS)

    def reads(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Of each read: those of owners whose halves are full, those to owners of whom all has been
        read, and which of the owners is the first after this rank."""
        full, done, begin = self.section("FULL"), self.section("DONE"), (0, 0)
        for full_end, done_end, after in self.records("READS"):
            yield full[begin[0] : full_end], done[begin[1] : done_end], after
            begin = (full_end, done_end)


class PeerMemory:
    """One rank's end of memory that ranks have mapped: what is staged where, and the signals.

    ``csrc/include/hcp/link.h`` says where words and halves lie.
    """

    _MOST = 4096
    """Most entries of columns that are kept for later exchanges."""

    def __init__(
        self,
        rank: int,
        bases: Sequence[int],
        view: Callable[[int, tuple[int, int], torch.dtype, int], Tensor],
        failure: Tensor,
        *,
        device: torch.device,
        stream: int,
        buffer_bytes: int,
        timeout: float,
        failure_messages: FailureMessages | None = None,
    ) -> None:
        """``bases``: where each rank's memory lies here; 0: it is not mapped. ``view``: of a rank's
        memory, of some shape and dtype, from an element on. ``failure``: the words of a
        SignalFailure. ``stream``: a cudaStream_t of the device, which reads.
        ``failure_messages``: where ranks say in words what has stopped their devices."""
        self.rank, self._view, self._stream = rank, view, stream
        self._timeout_ns = int(timeout * 1e9)
        self.link = _core.Link(rank, bases, buffer_bytes)
        self._failure = failure
        self._failed = SignalFailure.from_address(failure.data_ptr())
        # Blocks that have ended, of launches that stage into a half, and last of those that read.
        self.progress = torch.zeros(HALVES + 1, PIECES, dtype=torch.int32, device=device).unbind()
        # Exchanges with each peer through each half: staged for it, then read from it. Kernels
        # count, in the order in which they run: those that a graph replays count on.
        self._counts = torch.zeros(self.link.counts, dtype=torch.int64, device=device)
        self._columns: dict[tuple[object, ...], list[Tensor]] = {}
        self._recent, self._failure_messages = Recent(rank), failure_messages

    def begin(self, stamp: Stamp) -> bool:
        """Whether a CUDA graph captures this exchange. Raises HcpError when one has failed."""
        self.check()
        captured = self.is_captured
        self._recent.add(stamp, kept=captured)
        return captured

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph captures what is queued now."""
        return bool(self._stream) and torch.cuda.is_current_stream_capturing()

    def check(self) -> None:
        """Raise HcpError when an exchange has failed since."""
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> HcpError | None:
        """The error of an exchange that has failed. It calls nothing of the device."""
        failed = self._failed
        if failed.kind == LATE:
            return HcpError(
                f"rank {self.rank}: rank {failed.peer} has not come to an exchange of rows "
                f"within {self._timeout_ns / 1e9:g} s; it has ended or is late, and its own "
                f"message says why{self._said(failed.peer)}",
                code="rank-late",
            )
        if failed.kind == OTHER_CALL:
            expected, found = map(_core.signal_tag, (failed.expected, failed.found))
            return self._differing(failed.peer, expected, found)
        return None

    def _said(self, peer: int) -> str:
        return "" if self._failure_messages is None else self._failure_messages.said([peer])

    def _differing(self, peer: int, expected: int, found: int) -> HcpError:
        if self._failure_messages is None:
            return self._recent.differing(peer, expected, found)
        return self._failure_messages.differing(self._recent, peer, expected, found)

    # ---- memory ----

    def columns(
        self,
        parts: tuple[tuple[int, int], ...],
        half: int,
        widths: tuple[int, ...],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """View the rows that ranks have staged, where they lie, as columns side by side. Made once
        for all layers. ``parts``: (rank, its rows) each."""
        key = (parts, half, widths, dtype)
        columns = self._columns.get(key)
        if columns is None:
            if len(self._columns) == self._MOST:  # of micro-batches that are over
                self._columns.clear()
            columns = self._columns[key] = [
                column
                for rank, rows in parts
                for column in self._rows(rank, half, rows, sum(widths), dtype).split_with_sizes(
                    list(widths), 1
                )
            ]
        return columns

    def _rows(self, rank: int, half: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        begin = self.link.rows(half, rows, width * dtype.itemsize)
        return self._view(rank, (rows, width), dtype, begin // dtype.itemsize)

    # ---- signals ----

    def signals(self, half: int, share: Share) -> SignalTable:
        """The signals of a kind of exchange through a half."""
        reads = [
            ((), ()) if read is None else ([peer for peer, _ in read.owners], read.done)
            for read in share.reads
        ]
        words = self.link.exchange(half, share.readers, reads)
        return SignalTable(tensor_of(words, torch.int64))

    # ---- work ----

    def queue(self, operator: Any, *arguments: Any, tag: int, reads: bool) -> Any:
        """Queue `stage`, `read`, `mail` or more than one with what all exchanges have."""
        stream = (self._stream,) if reads else ()
        common = self._counts, tag, self._timeout_ns, self._failure, *stream
        try:
            return operator(*arguments, *common)
        except RuntimeError:
            self.check()
            raise

    def join(self, rows: Tensor) -> None:
        """Let the current stream follow the one that reads."""
        torch.ops.hcp.join.default(rows, self._stream)


class _Reading(NamedTuple):
    """A read of a kind of exchange through one half."""

    columns: list[Tensor]
    runs: Tensor
    rows: int
    next: int
    """Which of the owners is the first after this rank."""
    staged: Tensor
    done: Tensor


class _Half(NamedTuple):
    """A kind of exchange through one half."""

    out: Tensor
    free: Tensor
    staged: Tensor
    progress: Tensor
    reads: list[_Reading | None]
    first: int | None
    """Which read is the first."""


class PeerShared:
    """See :class:`hcp.exchange.transport.Shared`."""

    def __init__(self, memory: PeerMemory, share: Share) -> None:
        self._peers_memory, self._share = memory, share
        self._made: list[_Half | None] = [None] * HALVES

    @ranged("hcp: exchange")
    def stage(
        self, exchange: int, parts: Sequence[Tensor], stamp: Stamp, own: Sequence[Tensor] = ()
    ) -> PeerStaged:
        memory, share = self._peers_memory, self._share
        captured = memory.begin(stamp)
        staged = PeerStaged(memory, self.made(exchange % HALVES), len(share.widths), stamp.tag)
        if share.readers:
            staged.stage(parts, share.runs, own, captured)
        else:
            staged.begin(own)
        return staged

    def blocks(self, blocks: Blocks) -> PeerBlocks:
        """See :class:`hcp.exchange.transport.Shared`."""
        return PeerBlocks(self._peers_memory, self, self._share, blocks)

    def made(self, half: int) -> _Half:
        """The exchange through a half, made once."""
        made = self._made[half]
        if made is None:
            made = self._made[half] = self._make(half)
        return made

    def _make(self, half: int) -> _Half:
        memory, share = self._peers_memory, self._share
        whole = (sum(share.widths),)
        (out,) = memory.columns(((memory.rank, share.rows),), half, whole, share.dtype)
        signals = memory.signals(half, share)
        reads = [
            None
            if read is None
            else _Reading(
                memory.columns(tuple(read.owners), half, share.widths, share.dtype),
                *(read.runs, read.rows, after, full, done),
            )
            for read, (full, done, after) in zip(share.reads, signals.reads(), strict=True)
        ]
        free, filled = signals.section("FREE"), signals.section("FILLED")
        first = next((i for i, read in enumerate(reads) if read is not None), None)
        return _Half(out, free, filled, memory.progress[half], reads, first)


class PeerBlocks:
    """See :class:`hcp.exchange.transport.SharedBlocks`."""

    def __init__(
        self, memory: PeerMemory, shared: PeerShared, share: Share, blocks: Blocks
    ) -> None:
        self._peers_memory, self._shared, self._share = memory, shared, share
        self._blocks = blocks
        self._reads, self._arrives = share.reads[0] is not None, bool(len(blocks.own_runs))
        self._given: list[tuple[Any, ...] | None] = [None] * HALVES

    @ranged("hcp: exchange")
    def exchange(
        self, exchange: int, columns: Sequence[Tensor], stamp: Stamp
    ) -> PeerReading | _Placed | None:
        memory, half = self._peers_memory, exchange % HALVES
        captured = memory.begin(stamp)
        given = self._given[half]
        if given is None:
            given = self._given[half] = self._arguments(half)
        operator = torch.ops.hcp.exchange_blocks.default
        rows = memory.queue(operator, columns, *given, not captured, tag=stamp.tag, reads=True)
        if self._reads:
            return PeerReading(memory, rows, ())
        return _Placed(rows) if self._arrives else None

    def _arguments(self, half: int) -> tuple[Any, ...]:
        """What the operator is told each time."""
        share, blocks, made = self._share, self._blocks, self._shared.made(half)
        nothing = share.runs[:0]
        read = made.reads[0] or _Reading([], nothing, 0, 0, nothing, nothing)
        arrives = self._reads or self._arrives
        return (
            *blocks[:-1],
            *(blocks.rows if arrives else 0, made.out, share.runs),
            *(made.free, made.staged, made.progress, bool(share.readers)),
            *(read.columns, read.runs, read.next, read.staged, read.done),
            self._peers_memory.progress[HALVES],
        )


class _Placed(NamedTuple):
    """Rows that all were here."""

    rows: Tensor

    def wait(self) -> Tensor:
        return self.rows


class PeerStaged:
    """See :class:`hcp.exchange.transport.Staged`."""

    def __init__(self, memory: PeerMemory, made: _Half, columns: int, tag: int) -> None:
        self._peers_memory, self._made, self._columns, self._tag = memory, made, columns, tag
        self._begun: PeerReading | None = None

    def stage(
        self, parts: Sequence[Tensor], runs: Tensor, own: Sequence[Tensor], captured: bool
    ) -> None:
        """Stage, and begin the first read, which follows what the current stream did before.

        In a CUDA graph it follows the staging, too. A graph may run its branches one after the
        other, in any order: a rank that read first would wait for peers that wait for its rows.
        """
        memory, made = self._peers_memory, self._made
        signals = made.free, made.staged, made.progress
        if made.first is None or captured:
            operator = torch.ops.hcp.stage.default
            given = made.out, parts, runs, self._columns, *signals
            memory.queue(operator, *given, tag=self._tag, reads=False)
            self.begin(own)
            return
        read, read_parts = self._read(made.first, own)
        rows = memory.queue(
            torch.ops.hcp.stage_and_read.default,
            *(made.out, parts, runs, *signals),
            *(read_parts, read.runs, read.rows, read.next),
            *(read.staged, read.done, memory.progress[HALVES]),
            self._columns,
            tag=self._tag,
            reads=True,
        )
        self._begun = PeerReading(memory, rows, read_parts)

    def begin(self, own: Sequence[Tensor]) -> None:
        """Begin the first read alone."""
        if self._made.first is not None:
            self._begun = self._queue(self._made.first, own)

    def read(self, number: int) -> PeerReading:
        if number != self._made.first:
            return self._queue(number, ())
        begun, self._begun = self._begun, None
        assert begun is not None
        return begun

    def _queue(self, number: int, own: Sequence[Tensor]) -> PeerReading:
        memory = self._peers_memory
        read, parts = self._read(number, own)
        rows = memory.queue(
            torch.ops.hcp.read.default,
            *(parts, read.runs, read.rows, self._columns, read.next),
            *(read.staged, read.done, memory.progress[HALVES]),
            tag=self._tag,
            reads=True,
        )
        return PeerReading(memory, rows, parts)

    def _read(self, number: int, own: Sequence[Tensor]) -> tuple[_Reading, list[Tensor]]:
        """The read, and its parts."""
        read = self._made.reads[number]
        assert read is not None
        return read, [*map(_kept, own), *read.columns]


def _kept(rows: Tensor) -> Tensor:
    """Rows (N, ...) as an operator reads them where they lie: a copy that it made would be gone
    before the other stream has read it."""
    return rows if rows.dim() > 1 and rows.is_contiguous() else flat_rows(rows)


class PeerReading:
    """See :class:`hcp.exchange.transport.Reading`."""

    def __init__(self, memory: PeerMemory, rows: Tensor, parts: Sequence[Tensor]) -> None:
        self._peers_memory, self._rows = memory, rows
        self._parts = parts  # alive until the current stream has waited for them to be read
        self._joined = False

    def wait(self) -> Tensor:
        self._peers_memory.join(self._rows)
        self._joined = True
        return self._rows

    def __del__(self) -> None:
        if not self._joined:  # an error came between: their memory is not free before that
            self._peers_memory.join(self._rows)


def symmetric_memory(
    transport: TorchTransport,
    group: dist.ProcessGroup,
    stream: torch.cuda.Stream,
    *,
    buffer_bytes: int,
    timeout: float,
) -> tuple[Tensor, PeerMemory]:
    """Allocate memory that the ranks of a group map: the tensor, which lives as long as it is used,
    and this rank's end. ``group``: the transport's, or some ranks of it, which all call this.
    Ranks are named as the transport does."""
    tensor, handle = _symmetric(
        _core.link_bytes(transport.size, buffer_bytes), transport.device, group
    )
    members = [transport.global_ranks.index(rank) for rank in dist.get_process_group_ranks(group)]
    bases = [0] * transport.size
    for rank, base in zip(members, handle.buffer_ptrs, strict=True):
        bases[rank] = base

    def view(rank: int, shape: tuple[int, int], dtype: torch.dtype, start: int) -> Tensor:
        buffer: Tensor = handle.get_buffer(members.index(rank), shape, dtype, start)
        return buffer

    memory = PeerMemory(
        transport.rank,
        bases,
        view,
        words_for(SignalFailure).pin_memory(),
        device=transport.device,
        stream=stream.cuda_stream,
        buffer_bytes=buffer_bytes,
        timeout=timeout,
        failure_messages=transport.failure_messages,
    )
    return tensor, memory


def _symmetric(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Allocate zeroed bytes that every rank of the group maps: the tensor, and its handle."""
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric.rendezvous(memory, group)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody signals before all are zero
    return memory, handle
