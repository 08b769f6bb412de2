"""Rows between ranks: one interface, whatever carries them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hcp import ops
from hcp.errors import HcpError
from hcp.layout import Move, Route


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
    key: int
    """Its number in this process: tables name their transport by it."""

    def start(
        self, sent: Tensor, sends: Sequence[Move], received: Tensor, receives: Sequence[Move]
    ) -> Pending:
        """Begin to exchange rows of two contiguous buffers (rows, width) with other ranks.

        Ranks that exchange nothing need not call. Two ranks start their exchanges with each other
        in the same order.
        """

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank. All ranks of the domain call it."""


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

    _HEAD = 8
    _BLOCK = 4096

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        nccl = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else _CPU
        self.key = register(self)

    def start(
        self, sent: Tensor, sends: Sequence[Move], received: Tensor, receives: Sequence[Move]
    ) -> Pending:
        copy_to_self(self.rank, sent, sends, received, receives)
        operations = [
            dist.P2POp(dist.irecv, received[row : row + rows], group=self.group, group_peer=peer)
            for peer, row, rows in receives
            if peer != self.rank
        ] + [
            dist.P2POp(dist.isend, sent[row : row + rows], group=self.group, group_peer=peer)
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


def agree(
    transport: Transport,
    own: tuple[int, ...],
    sends: Sequence[Move],
    receives: Sequence[Move],
) -> None:
    """Refuse peers whose rows have another dtype or shape, before any row is on its way.

    A receive buffer of the wrong size would abort the process, or be filled in part.
    """
    width = 16
    if len(own) > width:
        raise ValueError(f"rows have {len(own)} traits, expected at most {width}")
    sources = sorted({move.peer for move in receives} - {transport.rank})
    targets = sorted({move.peer for move in sends} - {transport.rank})
    sent = torch.full((1, width), -1, dtype=torch.int64)
    sent[0, : len(own)] = torch.tensor(own)
    sent = sent.to(transport.device)
    received = torch.empty(len(sources), width, dtype=torch.int64, device=transport.device)
    transport.start(
        sent,
        [Move(peer, 0, 1) for peer in targets],
        received,
        [Move(peer, i, 1) for i, peer in enumerate(sources)],
    ).wait()
    for peer, theirs in zip(sources, received.tolist(), strict=True):
        if theirs != sent.tolist()[0]:
            raise HcpError(
                f"rank {transport.rank}: tensors differ between ranks: here (dtype, dimensions, "
                f"sizes of each) are {list(own)}, on rank {peer} {theirs[: len(own)]}; every rank "
                "of a group must call with the same dtypes, heads and sizes"
            )


# ---- a whole route -------------------------------------------------------------------------------


def rows_of(x: Tensor) -> Tensor:
    """(rows, ...) as (rows, width)."""
    return x.unsqueeze(1) if x.dim() == 1 else x.flatten(1)


def carry(transport: Transport, route: Route, rows: Tensor) -> Tensor:
    """Carry rows (source_rows, width) along a route to (output_rows, width)."""
    wire = ops.pack([rows], route.pack, route.sent_rows)
    received = rows.new_empty(route.received_rows, rows.shape[1])
    transport.start(wire, route.sends, received, route.receives).wait()
    return ops.pack([received], route.arrange, route.output_rows)
