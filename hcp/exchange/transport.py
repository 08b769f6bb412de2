"""The interface of transports, which carry rows between the ranks of a domain."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from hcp.errors import HcpError
from hcp.exchange.agreement import Refusal, Stamp
from hcp.exchange.gather import Gathered
from hcp.exchange.tables import Move, PeerRead


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Return when the received rows may be read and the sent rows overwritten.

        Raises HcpError when a peer is gone or late.
        """


class Transport(Protocol):
    """The carrier of rows between the ranks of one domain."""

    rank: int
    size: int
    device: torch.device
    global_ranks: Sequence[int]
    """The job's number of each rank of the domain."""
    key: int
    """The transport's number in this process, by which tables name it."""
    steps: Iterator[int]
    """Numbers of the steps that are dispatched through it, the same on all ranks."""

    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        stamp: Stamp,
    ) -> Pending:
        """Begin to exchange rows of two contiguous buffers (rows, width) with other ranks.

        Ranks that exchange nothing need not call. Two ranks start their exchanges with each other
        in the same order. ``stamp``: the call that they belong to. A rank whose peer is in another
        call gets an HcpError, or its device stops, before it uses rows that are not its own.
        """

    def agree(self, stamp: Stamp, peers: Sequence[int]) -> None:
        """Compare a call with peers, who all do the same. Raises HcpError where they differ."""

    def refuse(self, refusal: Refusal, peers: Sequence[int]) -> None:
        """Tell peers that a call is refused here, without waiting for them.

        Peers that are in this call get an HcpError; those that refuse it too go on.
        """

    def all_gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Every rank's payload, by rank. All ranks of the domain call it, with the same ``what``,
        which says what it is: HcpError where they differ."""

    def all_gather_counted(self, payload: bytes, count: float, what: str) -> Gathered:
        """The same, with a count of each rank, NaN for none."""


class Reading(Protocol):
    """A read of rows that is under way."""

    def wait(self) -> Tensor:
        """Return the rows, which may be read from now on."""


class Share(NamedTuple):
    """A kind of exchange in which ranks read rows from each other's memory."""

    rows: int
    """Number of rows that this rank stages."""
    widths: tuple[int, ...]
    """Widths of the columns of a row, side by side."""
    dtype: torch.dtype
    runs: Tensor
    """The sums that make staged rows of this rank's parts: see `ops.reduce`."""
    readers: Sequence[int]
    """Ranks that read what this rank stages, ascending."""
    reads: Sequence[PeerRead | None]
    """The reads of this rank, in order. The parts of their runs are this rank's own, then the
    owners."""


class Staged(Protocol):
    """An exchange under way, whose readers may read this rank's rows."""

    def read(self, number: int) -> Reading:
        """Begin the read of a number, in order: (rows, width), summed as in `ops.reduce`. The first
        has begun with the staging."""


class Shared(Protocol):
    """A kind of exchange that is made ready."""

    def stage(
        self, exchange: int, parts: Sequence[Tensor], stamp: Stamp, own: Sequence[Tensor] = ()
    ) -> Staged:
        """Stage this rank's rows, from parts (N, ...) as columns, and let the readers read them.

        ``exchange``: its number, the same on all ranks of the group. ``stamp``: the call.
        ``own``: this rank's parts of the first read, (N, ...), as columns.
        """

    def blocks(self, blocks: Blocks) -> SharedBlocks:
        """The same where what is staged are blocks, and read at most once."""


class Blocks(NamedTuple):
    """Columns of heads that a rank gives as blocks, one for each reader and one for itself: see
    ``csrc/torch/blocks.h``."""

    heads: Tensor
    """int64 (2 blocks, 3) of (first, heads, most): the query heads of each block, and how many it
    has room for; then the key-value heads."""
    by_query: int
    """The number of columns that have query heads. They come first."""
    first: int
    """The vector of the blocks' rows that is staged first."""
    own: int
    """Which of the blocks is for this rank."""
    own_runs: Tensor
    """The rows that arrive <- this rank's own."""
    rows: int
    """That arrive."""


class SharedBlocks(Protocol):
    """A kind of exchange of blocks that is made ready."""

    def exchange(self, exchange: int, columns: Sequence[Tensor], stamp: Stamp) -> Reading | None:
        """Stage blocks of columns (N, heads, ...), and begin to read: (rows, elements) in the dtype
        of the first column, with the rows of this rank's own block among them. None if no rows
        come."""


class SharingTransport(Transport, Protocol):
    """A transport whose ranks, or those of a node, also read rows from each other's memory."""

    node: Sequence[int]
    """The ranks that read from each other's memory, this one among them."""
    buffer_bytes: int
    """Bytes of this rank's device that it holds for exchanges as long as it lives."""

    @property
    def half_bytes(self) -> int:
        """Bytes that a rank may stage in one exchange."""

    def share(self, share: Share) -> Shared:
        """Make a kind of exchange ready, once for all layers."""


def shares(transport: Transport) -> TypeGuard[SharingTransport]:
    """Whether ranks of this transport read from each other's memory."""
    return hasattr(transport, "share")


def read_in_place(transport: Transport, ranks: Iterable[int]) -> bool:
    """Whether all of these ranks read from each other's memory: the answer of each of them."""
    return shares(transport) and set(ranks) <= set(transport.node)


_transports: weakref.WeakValueDictionary[int, Transport] = weakref.WeakValueDictionary()
_keys = itertools.count(1)


def register(transport: Transport) -> int:
    """Give a transport a new key. It lives as long as something holds it."""
    key = next(_keys)
    _transports[key] = transport
    return key


def transport_of(key: int) -> Transport:
    """Find the transport of a key that a table names."""
    transport = _transports.get(key)
    if transport is None:
        raise HcpError(
            f"the process groups of this handler are gone (transport {key}): "
            "keep them until the last backward",
            code="groups-closed",
        )
    return transport


def flat_rows(x: Tensor) -> Tensor:
    """View (rows, ...) as (rows, width), the elements of a row side by side."""
    rows = x.unsqueeze(1) if x.dim() == 1 else x.flatten(1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def row_bytes_of(x: Tensor) -> int:
    """Bytes of a row of (rows, ...)."""
    return x.shape[1:].numel() * x.itemsize
