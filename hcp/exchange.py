"""Rows between ranks: one interface, whatever carries them."""

from __future__ import annotations

import itertools
import struct
import weakref
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from hcp import ops
from hcp.errors import HcpError
from hcp.layout import Move, Read, Route


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Return when the received rows may be read and the sent rows overwritten.

        Raises HcpError when a peer is gone or late.
        """


class Transport(Protocol):
    """What carries rows between the ranks of one domain."""

    rank: int
    size: int
    device: torch.device
    global_ranks: Sequence[int]
    """The job's number of each rank of the domain."""
    key: int
    """Its number in this process: tables name their transport by it."""

    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        tag: int = 0,
    ) -> Pending:
        """Begin to exchange rows of two contiguous buffers (rows, width) with other ranks.

        Ranks that exchange nothing need not call. Two ranks start their exchanges with each other
        in the same order. Rows of different tags never meet where the transport knows tags (gloo,
        loopback): ranks that call differently wait for each other, until the timeout at most,
        instead of reading rows that are not theirs.
        """

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank. All ranks of the domain call it."""


class Reading(Protocol):
    """Rows on their way to this rank."""

    def wait(self) -> Tensor:
        """The rows, which may be read from now on."""


class Share(NamedTuple):
    """A kind of exchange in which ranks read rows from each other's memory."""

    rows: int
    """That this rank stages."""
    widths: tuple[int, ...]
    """Of the columns of a row, side by side."""
    dtype: torch.dtype
    runs: Tensor
    """How staged rows are summed from this rank's parts: see `ops.reduce`."""
    readers: Sequence[int]
    """Ranks that read what this rank stages, ascending."""
    reads: Sequence[Read | None]
    """What this rank reads, in order; the parts of their runs are this rank's own, then the
    owners."""


class Staged(Protocol):
    """One exchange under way, this rank's rows being in the readers' reach."""

    def read(self, number: int) -> Reading:
        """Begin to read (rows, width), summed as in `ops.reduce`: the reads of the kind, in order.
        The first has begun with the staging."""


class Shared(Protocol):
    """A kind of exchange, made ready."""

    def stage(
        self, exchange: int, parts: Sequence[Tensor], tag: int, own: Sequence[Tensor] = ()
    ) -> Staged:
        """Stage this rank's rows, from parts (N, ...) as columns, and let the readers come.

        ``exchange``: its number, alike on all ranks of the group. All ranks name one tag.
        ``own``: this rank's parts of the first read, (N, ...), as columns.
        """


class SharingTransport(Transport, Protocol):
    """A transport whose ranks also read rows from each other's memory."""

    def share(self, share: Share) -> Shared:
        """Make ready for exchanges of a kind: once for all layers."""


def shares(transport: Transport) -> TypeGuard[SharingTransport]:
    """Whether ranks of this transport read from each other's memory."""
    return hasattr(transport, "share")


_transports: weakref.WeakValueDictionary[int, Transport] = weakref.WeakValueDictionary()
_keys = itertools.count(1)


def register(transport: Transport) -> int:
    """A new key for a transport, which lives as long as somebody holds it."""
    key = next(_keys)
    _transports[key] = transport
    return key


def transport_of(key: int) -> Transport:
    """The transport behind a key that a table names."""
    transport = _transports.get(key)
    if transport is None:
        raise HcpError(
            f"the process groups of this handler are gone (transport {key}): "
            "keep them until the last backward"
        )
    return transport


# ---- torch.distributed ---------------------------------------------------------------------------


class TorchTransport:
    """Grouped point-to-point calls of torch.distributed.

    ``group`` is hcp's own: nobody else may use it, so that its exchanges never queue behind a
    trainer's collectives.
    """

    name = "torch"
    _HEAD = 8
    _BLOCK = 4096

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.global_ranks: Sequence[int] = dist.get_process_group_ranks(group)
        nccl = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else _CPU
        self.key = register(self)

    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        tag: int = 0,
    ) -> Pending:
        copy_to_self(self.rank, sent, sends, received, receives)
        operations = [
            dist.P2POp(
                dist.irecv,
                received[row : row + rows],
                group=self.group,
                tag=tag,
                group_peer=peer,
            )
            for peer, row, rows in receives
            if peer != self.rank
        ] + [
            dist.P2POp(
                dist.isend, sent[row : row + rows], group=self.group, tag=tag, group_peer=peer
            )
            for peer, row, rows in sends
            if peer != self.rank
        ]
        peers = sorted({move.peer for move in (*sends, *receives)} - {self.rank})
        with _named(self.rank, peers):
            return _TorchPending(self.rank, peers, _start(operations), (sent, received))

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        gathered = self._all_gather(payload, self._BLOCK)
        longest = max(length for length, _ in gathered)
        if longest > self._BLOCK - self._HEAD:
            gathered = self._all_gather(payload, self._HEAD + longest)
        return [block[:length] for length, block in gathered]

    def _all_gather(self, payload: bytes, block: int) -> list[tuple[int, bytes]]:
        head = len(payload).to_bytes(self._HEAD, "little")
        data = bytearray((head + payload)[:block].ljust(block, b"\0"))
        own = torch.frombuffer(data, dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with _named(self.rank, [r for r in range(self.size) if r != self.rank]):
            dist.all_gather(parts, own, group=self.group)
        blocks = [bytes(part.cpu().tolist()) for part in parts]
        return [(int.from_bytes(b[: self._HEAD], "little"), b[self._HEAD :]) for b in blocks]


_CPU = torch.device("cpu")


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


class _TorchPending:
    def __init__(
        self, rank: int, peers: list[int], works: list[dist.Work], buffers: tuple[Tensor, ...]
    ) -> None:
        self._rank, self._peers, self._works = rank, peers, works
        self._buffers = buffers  # alive until the exchange is over

    def wait(self) -> None:
        with _named(self._rank, self._peers):
            for work in self._works:
                work.wait()


class _named:
    """Gives a failure of torch.distributed the ranks that it happened between."""

    def __init__(self, rank: int, peers: Sequence[int]) -> None:
        self._rank, self._peers = rank, peers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, HcpError):
            raise HcpError(
                f"rank {self._rank}: the exchange with ranks {list(self._peers)} failed; one of "
                f"them has ended or is late, and its own message says why: {error}"
            ) from error


def copy_to_self(
    rank: int, sent: Tensor, sends: Sequence[Move], received: Tensor, receives: Sequence[Move]
) -> None:
    """Do what a rank sends to itself."""
    for move in sends:
        if move.peer == rank:
            target = next(own for own in receives if own.peer == rank)
            received[target.row : target.row + target.rows].copy_(
                sent[move.row : move.row + move.rows]
            )


# ---- agreement -----------------------------------------------------------------------------------

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def signature(*tensors: Tensor) -> tuple[int, ...]:
    """dtype and row shape of tensors, as numbers that ranks can compare."""
    numbers: list[int] = []
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"dtype is {tensor.dtype}, expected one of {_DTYPES}")
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim() - 1, *tensor.shape[1:]]
    return tuple(numbers)


OPERATIONS = {"sum_over_group": 1, "dispatch": 2, "combine": 3, "roll_tensor": 4, "halo": 5}
"""The traits by which operations with rows of the same kind are told apart."""


class Moves(Protocol):
    """A route or a schedule: who sends rows to whom."""

    agreed: set[tuple[int, ...]]

    @property
    def sends(self) -> list[Move]: ...

    @property
    def receives(self) -> list[Move]: ...


def tag_of(traits: tuple[int, ...]) -> int:
    """The tag of rows that belong to a call with these traits."""
    return _FIRST_TAG + zlib.crc32(struct.pack(f"<{len(traits)}q", *traits)) % 2**30


_AGREEMENT_TAG, _FIRST_TAG = 1, 2


def agree_once(transport: Transport, moves: Moves, traits: tuple[int, ...]) -> int:
    """Compare traits with the peers at the first call that has them; the tag of its rows.

    A receive buffer of the wrong size would abort the process, or be filled in part: peers that
    call with other traits are refused before any row is on its way. Raises HcpError.
    """
    if traits not in moves.agreed:
        _agree(transport, traits, {move.peer for move in (*moves.sends, *moves.receives)})
        moves.agreed.add(traits)
    return tag_of(traits)


def _agree(transport: Transport, own: tuple[int, ...], ranks: set[int]) -> None:
    """Both ways, whoever has rows for whom, so that all who differ hear it."""
    width = 24
    if len(own) > width:
        raise ValueError(f"the call has {len(own)} traits, expected at most {width}")
    peers = sorted(ranks - {transport.rank})
    sent = torch.full((1, width), -1, dtype=torch.int64, device="cpu")
    sent[0, : len(own)] = torch.tensor(own, device="cpu")
    sent = sent.to(transport.device)
    received = torch.empty(len(peers), width, dtype=torch.int64, device=transport.device)
    transport.start(
        sent,
        [Move(peer, 0, 1) for peer in peers],
        received,
        [Move(peer, i, 1) for i, peer in enumerate(peers)],
        tag=_AGREEMENT_TAG,
    ).wait()
    for peer, theirs in zip(peers, received.tolist(), strict=True):
        if theirs != sent.tolist()[0]:
            raise HcpError(
                f"rank {transport.rank}: the call differs between ranks: its traits (dtype, "
                "dimensions and sizes of each tensor, then operation and options) are "
                f"{list(own)} here and {theirs[: len(own)]} on rank {peer}; every rank of a group "
                "must make the same calls, with the same dtypes, heads, sizes and options"
            )


# ---- a whole route -------------------------------------------------------------------------------


def rows_of(x: Tensor) -> Tensor:
    """(rows, ...) as (rows, width), the elements of a row side by side."""
    rows = x.unsqueeze(1) if x.dim() == 1 else x.flatten(1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def carry(
    transport: Transport,
    route: Route,
    rows: Tensor,
    tag: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Carry rows (source_rows, width) along a route to (output_rows, width), cast where they are
    packed: before they travel if that makes them smaller, else when they are there."""
    dtype = dtype or rows.dtype
    sent = dtype if dtype.itemsize < rows.dtype.itemsize else rows.dtype
    wire = ops.pack([rows], route.pack, route.sent_rows, dtype=sent)
    received = wire.new_empty(route.received_rows, rows.shape[1])
    transport.start(wire, route.sends, received, route.receives, tag=tag).wait()
    return ops.pack([received], route.arrange, route.output_rows, dtype=dtype)
