"""Exchanges of fixed sizes within a block of ranks: all gather all rows, and return sums of partial
rows to their owners.

d ranks in the block, C rows of each, W width of a row.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import torch
from torch import Tensor

from hcp import ops
from hcp.exchange.agreement import Stamp
from hcp.exchange.tables import Move, PeerRead
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


class SentBlock:
    """Exchanges in which ranks send rows."""

    def __init__(self, transport: Transport, block: range, rows: int) -> None:
        self._transport, self._rows = transport, rows
        self._own = [Move(peer, 0, rows) for peer in block]
        self._all = [Move(peer, i * rows, rows) for i, peer in enumerate(block)]
        self._sum = torch.tensor([(0, rows, 0, move.row) for move in self._all], device="cpu")

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
        others = [peer for peer in block if peer != transport.rank]
        place = block.index(transport.rank)
        parts = {peer: part for part, peer in enumerate([transport.rank, *others])}
        self._own = slice(place * rows, (place + 1) * rows)
        self._exchanges = itertools.count()
        # A rank stages all that it has for others: its own rows are left out.
        before, after = place * rows, (len(others) - place) * rows
        kept = [(0, before, 0, 0), (before, after, 0, before + rows)]
        rows_of_peers = {peer: (place - (place > i)) * rows for i, peer in enumerate(block)}

        def shared(
            staged: int, staged_runs: list[tuple[int, ...]], runs: list[tuple[int, ...]], total: int
        ) -> Share:
            read = PeerRead([(peer, staged) for peer in others], _table(runs), total, others)
            return Share(staged, (width,), dtype, _table(staged_runs), others, [read])

        self._gather = transport.share(
            shared(
                rows,
                [(0, rows, 0, 0)],
                [(i * rows, rows, parts[peer], 0) for i, peer in enumerate(block)],
                len(block) * rows,
            )
        )
        self._sum = transport.share(
            shared(
                len(others) * rows,
                [run for run in kept if run[1]],
                [
                    (0, rows, part, 0 if part == 0 else rows_of_peers[peer])
                    for peer, part in sorted(parts.items())
                ],
                rows,
            )
        )

    def gather(self, own: Tensor, stamp: Stamp) -> Tensor:
        staged = self._gather.stage(next(self._exchanges), [own], stamp, [own])
        return staged.read(0).wait()

    def sum(self, partial: Tensor, stamp: Stamp) -> Tensor:
        own = partial[self._own]
        staged = self._sum.stage(next(self._exchanges), [partial], stamp, [own])
        return staged.read(0).wait()


def _table(runs: list[tuple[int, ...]]) -> Tensor:
    return torch.tensor(runs, dtype=torch.int64, device="cpu").view(-1, 4)
