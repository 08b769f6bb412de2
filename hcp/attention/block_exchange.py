"""Exchanges of fixed sizes within a block of ranks: all gather all rows, and return sums of partial
rows to their owners.

d ranks in the block, C rows of each, W width of a row.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import torch
from torch import Tensor

from hcp import _core, ops
from hcp.exchange.agreement import Stamp
from hcp.exchange.layout import tensor_of
from hcp.exchange.tables import Move, PeerRead, Sections, places
from hcp.exchange.transport import (
    Share,
    SharingTransport,
    Transport,
    read_in_place,
    shares,
)


class BlockExchange(Protocol):
    """Exchanges of rows of one width and dtype."""

    def gather(self, own: Tensor, stamp: Stamp) -> Tensor:
        """Return the rows of all ranks, (d C, W), from each rank's (C, W)."""

    def sum(self, partial: Tensor, stamp: Stamp) -> Tensor:
        """Return the sums of this rank's rows, (C, W), from each rank's part of all rows, (d C, W).
        Parts are summed once, in the ranks' order, in float32 (float64 for float64)."""


def block_exchange(
    transport: Transport, block: range, rows: int, width: int, dtype: torch.dtype
) -> BlockExchange:
    """Make the exchange of a block of ranks. Raises ValueError where only some of them read each
    other's memory."""
    if read_in_place(transport, block):
        assert shares(transport)
        return ReadBlock(transport, block, rows, width, dtype)
    if shares(transport):
        raise ValueError(
            f"ranks {block[0]} to {block[-1]} are a block that spans nodes, and the transport "
            f"reads memory inside a node ({len(transport.node)} ranks here), which no graph does "
            "across nodes: let ranks be at most those of a node, or build the groups with "
            'transport="nccl"'
        )
    return SentBlock(transport, block, rows)


class BlockTable(Sections):
    """The rows of a block that each rank has, sends and reads: see ``csrc/include/hcp/hcp.h``."""

    SECTIONS = _core.BLOCK_SECTIONS
    PLACES = places(SECTIONS)

    def __init__(self, transport: Transport, block: range, rows: int) -> None:
        words = _core.block(block.start, len(block), transport.rank, rows)
        super().__init__(tensor_of(words, torch.int64))
        self.others: list[int] = self.section("OTHERS").flatten().tolist()
        own = next(move for move in self.moves("ALL") if move.peer == transport.rank)
        self.own = slice(own.row, own.row + own.rows)
        """This rank's rows among all."""


class SentBlock:
    """Exchanges in which ranks send rows."""

    def __init__(self, transport: Transport, block: range, rows: int) -> None:
        table = BlockTable(transport, block, rows)
        self._transport, self._rows = transport, rows
        self._own, self._all = table.moves("OWN"), table.moves("ALL")
        self._sum = table.section("SUM")

    def gather(self, own: Tensor, stamp: Stamp) -> Tensor:
        return self._exchange(own, self._own, stamp)

    def sum(self, partial: Tensor, stamp: Stamp) -> Tensor:
        return ops.reduce([self._exchange(partial, self._all, stamp)], self._sum, self._rows)

    def _exchange(self, sent: Tensor, sends: list[Move], stamp: Stamp) -> Tensor:
        received = sent.new_empty(len(self._all) * self._rows, sent.shape[1])
        self._transport.start(sent, sends, received, self._all, stamp=stamp).wait()
        return received


class ReadBlock:
    """Exchanges in which ranks read each other's rows where they are staged."""

    def __init__(
        self,
        transport: SharingTransport,
        block: range,
        rows: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        table = BlockTable(transport, block, rows)
        others, self._own = table.others, table.own
        self._exchanges = itertools.count()

        def shared(name: str, staged: int, read_rows: int) -> Share:
            owners, runs = [(peer, staged) for peer in others], table.section(f"{name}_READ")
            read = PeerRead(owners, runs, read_rows, others)
            return Share(staged, (width,), dtype, table.section(f"{name}_STAGED"), others, [read])

        self._gather = transport.share(shared("GATHER", rows, len(block) * rows))
        self._sum = transport.share(shared("SUM", len(others) * rows, rows))

    def gather(self, own: Tensor, stamp: Stamp) -> Tensor:
        staged = self._gather.stage(next(self._exchanges), [own], stamp, [own])
        return staged.read(0).wait()

    def sum(self, partial: Tensor, stamp: Stamp) -> Tensor:
        own = partial[self._own]
        staged = self._sum.stage(next(self._exchanges), [partial], stamp, [own])
        return staged.read(0).wait()
