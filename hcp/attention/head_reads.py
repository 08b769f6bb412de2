"""Rows exchanged for heads by neighbours that reach each other's memory: each stages its rows of
the heads that the others compute, and reads theirs of its own heads where they are staged.

The core says who stages and reads which rows (``csrc/core/heads.c``). One operator makes blocks of
the columns, whatever they are made of, stages and reads them (``csrc/torch/blocks.h``). What a half
of the peer buffer does not hold goes in pieces, each some vectors of the blocks. All that depends
on shapes and dtypes is made once for all layers.

T rows on this rank, S rows of all neighbours, H heads, h heads of a rank.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp import _core
from hcp.exchange.agreement import Stamp
from hcp.exchange.layout import buffer_of, tensor_of
from hcp.exchange.tables import PeerRead, Schedule, Sections, places
from hcp.exchange.transport import Blocks, Share, SharedBlocks, SharingTransport

_log = logging.getLogger("hcp")
_told = itertools.count()

_WORD = torch.float64
_VECTOR_BYTES, _VECTOR_WORDS = 16, 2
"""Kernels copy vectors, and rows of a block are whole ones."""


class HeadTable(Sections):
    """Who stages and reads which rows, before attention and, BACK_, after it."""

    SECTIONS = _core.HEADS_SECTIONS
    PLACES = places(SECTIONS)


class _Way(NamedTuple):
    """One of the two ways of rows between neighbours."""

    staged_rows: int
    most_rows: int
    """That any neighbour stages."""
    blocks: Tensor
    """The heads of each block that this rank gives."""
    own: int
    """Which of them is for itself."""
    staged_runs: Tensor
    readers: list[int]
    rows: int
    """That arrive, and this rank's own among them."""
    read: PeerRead | None
    """None where this rank reads nothing from others."""
    own_runs: Tensor
    """The rows that arrive <- this rank's own."""
    kinds: dict[tuple[object, ...], _Kind]
    """By all that distinguishes one kind of columns from another."""


class _Kind(NamedTuple):
    """Columns of some shapes and dtypes."""

    pieces: list[SharedBlocks]
    """Exchanges of some vectors each."""
    columns: list[_Column]


class _Column(NamedTuple):
    """A column among those that arrive, side by side."""

    begin: int
    """The element of a row that it begins with."""
    dtype: torch.dtype | None
    """None: that of the first column."""
    shape: tuple[int, ...]
    """Heads and what they are made of."""
    strides: tuple[int, ...]

    def of(self, rows: Tensor) -> Tensor:
        """View (rows, elements) as its (rows, heads, ...)."""
        if self.dtype is not None:
            rows = rows.view(self.dtype)
        count, width = rows.shape
        return rows.as_strided((count, *self.shape), (width, *self.strides), self.begin)


class HeadReads:
    """An exchange of heads, by reading."""

    def __init__(
        self,
        transport: SharingTransport,
        schedule: Schedule,
        queries: Sequence[slice],
        keys: Sequence[slice],
        exchanges: Iterator[int],
    ) -> None:
        """``queries``, ``keys``: the heads of each neighbour. ``exchanges``: numbers of exchanges,
        alike on all neighbours."""
        moves = schedule.head_moves
        assert moves is not None
        self._transport, self._exchanges, self._rows = transport, exchanges, schedule.rows
        self._queries, self._keys = queries, keys
        self._place = [move.peer for move in moves.receives].index(transport.rank)
        pairs = zip(queries, keys, strict=True)
        shares = array("q", [end for pair in pairs for s in pair for end in (s.start, s.stop)])
        table = HeadTable(tensor_of(_core.heads(buffer_of(schedule.words), shares), torch.int64))
        self._blocks = table.section("BLOCKS")
        staged, most, staged_back, most_back = table.section("SIZES").flatten().tolist()
        back_rows = len(queries) * schedule.rows
        self._there = _way_of(table, "", (staged, most), self._place, moves.rows)
        self._back = _way_of(table, "BACK_", (staged_back, most_back), 0, back_rows)

    def to_heads(
        self, by_query: Sequence[Tensor], by_key: Sequence[Tensor], stamp: Stamp
    ) -> list[Tensor]:
        """(T, H, ...) and (T, G, ...) to (S, h, ...), perhaps not contiguous."""
        columns = [*by_query, *by_key]
        kind = self._kind(self._there, columns, len(by_query))
        rows = self._exchange(kind, columns, stamp)
        if rows is not None:
            return [column.of(rows) for column in kind.columns]
        count = self._there.rows
        return [
            like.new_empty(count, *column.shape)
            for like, column in zip(columns, kind.columns, strict=True)
        ]

    def to_rows(
        self, by_query: Sequence[Tensor], by_key: Sequence[Tensor], joins: int, stamp: Stamp
    ) -> tuple[list[Tensor], list[Sequence[Tensor]]]:
        """The way back, (S, h, ...) to (T, H, ...) and (T, G, ...): of so many columns joined, and
        of each other one the heads of each neighbour. Neither, where nothing comes."""
        columns = [*by_query, *by_key]
        kind = self._kind(self._back, columns, len(by_query))
        rows = self._exchange(kind, columns, stamp)
        if rows is None:
            return [], []
        joined: list[Tensor] = torch.ops.hcp.join_blocks.default(
            rows, columns[:joins], self._blocks, len(by_query)
        )
        return joined, [self._parts(column.of(rows)) for column in kind.columns[joins:]]

    def _parts(self, blocks: Tensor) -> list[Tensor]:
        """Key-value heads (T, h, ...) of each neighbour."""
        parts = blocks.split_with_sizes([self._rows] * len(self._keys))
        return [part[:, : _count(own)] for part, own in zip(parts, self._keys, strict=True)]

    def _exchange(self, kind: _Kind, columns: list[Tensor], stamp: Stamp) -> Tensor | None:
        """The columns that come, side by side: (rows, elements). None if nothing does."""
        readings = [piece.exchange(next(self._exchanges), columns, stamp) for piece in kind.pieces]
        found = [reading.wait() for reading in readings if reading is not None]
        if len(found) > 1:
            return torch.cat(found, 1)
        return found[0] if found else None

    def _kind(self, way: _Way, columns: Sequence[Tensor], by_query: int) -> _Kind:
        key = by_query, *[(column.dtype, column.shape[1:]) for column in columns]
        kind = way.kinds.get(key)
        if kind is None:
            kind = way.kinds[key] = self._make(way, columns, by_query)
        return kind

    def _make(self, way: _Way, columns: Sequence[Tensor], by_query: int) -> _Kind:
        most = [int(self._blocks[place, 2]) for place in (0, -1)]
        own = _count(self._queries[self._place]), _count(self._keys[self._place])
        made: list[_Column] = []
        vectors = 0
        for number, column in enumerate(columns):
            by_key = number >= by_query
            heads = own[by_key] if way is self._there else most[by_key]
            like = column.new_empty(0, heads, *column.shape[2:])
            dtype, begin = None, vectors * _VECTOR_BYTES // column.itemsize
            if column.dtype != columns[0].dtype:
                dtype = column.dtype
            made.append(_Column(begin, dtype, tuple(like.shape[1:]), like.stride()[1:]))
            row_bytes = most[by_key] * column.shape[2:].numel() * column.itemsize
            vectors += -(-row_bytes // _VECTOR_BYTES)
        return _Kind(self._pieces(way, vectors, by_query), made)

    def _pieces(self, way: _Way, vectors: int, by_query: int) -> list[SharedBlocks]:
        """Exchanges of which each fits into a half of any neighbour's peer buffer: alike on all of
        them."""
        half = self._transport.half_bytes
        fit = max(1, half // _VECTOR_BYTES // max(1, way.most_rows))
        count = -(-vectors // fit)
        if count > 1:
            _tell_of_pieces(count, half, way.most_rows * vectors * _VECTOR_BYTES)
        step = -(-vectors // max(1, count))
        return [
            self._share(way, begin, min(begin + step, vectors), by_query)
            for begin in range(0, vectors, max(1, step))
        ]

    def _share(self, way: _Way, begin: int, end: int, by_query: int) -> SharedBlocks:
        widths = (_VECTOR_WORDS * (end - begin),)
        given = way.staged_rows, widths, _WORD, way.staged_runs, way.readers, [way.read]
        blocks = Blocks(way.blocks, by_query, begin, way.own, way.own_runs, way.rows)
        return self._transport.share(Share(*given)).blocks(blocks)


def _way_of(table: HeadTable, prefix: str, sizes: tuple[int, int], own: int, rows: int) -> _Way:
    owners = [(peer, held) for peer, held in table.records(f"{prefix}OWNERS")]
    runs, peers = table.section(f"{prefix}READ_RUNS"), [peer for peer, _ in owners]
    return _Way(
        *sizes,
        table.section(f"{prefix}BLOCKS"),
        own,
        table.section(f"{prefix}STAGED_RUNS"),
        table.section(f"{prefix}READERS").flatten().tolist(),
        rows,
        PeerRead(owners, runs, rows, peers) if owners else None,
        table.section(f"{prefix}OWN_RUNS"),
        {},
    )


def _count(heads: slice) -> int:
    return int(heads.stop - heads.start)


def _tell_of_pieces(count: int, half_bytes: int, staged_bytes: int) -> None:
    """Log it once in a process."""
    if next(_told) == 0:
        _log.warning(
            "an exchange of rows for heads stages up to %d bytes, and half of the peer buffer has "
            "%d: it goes in %d pieces, one after the other; build the process groups with "
            "peer_buffer_bytes=%d or more to exchange all at once",
            *(staged_bytes, half_bytes, count, _core.link_buffer_bytes(staged_bytes)),
        )
