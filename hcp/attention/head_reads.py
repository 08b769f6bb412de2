"""Rows exchanged for heads by neighbours that reach each other's memory: each stages its rows of
the heads that the others compute, and reads theirs of its own heads where they are staged.

The core says who stages and reads which rows (``csrc/core/heads.c``). Here rows become columns of
whole vectors of 16 bytes, whatever they are made of, and what a half of the peer buffer does not
hold goes in pieces, each some of the columns.

T rows on this rank, S rows of all neighbours, H heads, h heads of a rank, W words of its columns.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp import _core
from hcp.exchange.agreement import Stamp
from hcp.exchange.layout import buffer_of, tensor_of
from hcp.exchange.tables import PeerRead, Schedule, Sections, places
from hcp.exchange.transport import Reading, Share, Shared, SharingTransport

_log = logging.getLogger("hcp")
_told = itertools.count()

_WORD = torch.float64
_VECTOR_BYTES, _VECTOR_WORDS = 16, 2
"""Kernels copy vectors where all addresses and rows are whole ones."""


class HeadTable(Sections):
    """Who stages and reads which rows, before attention and, BACK_, after it."""

    SECTIONS = _core.HEADS_SECTIONS
    PLACES = places(SECTIONS)


class _Way(NamedTuple):
    """One of the two ways of rows between neighbours."""

    staged_rows: int
    most_rows: int
    """That any neighbour stages."""
    staged_runs: Tensor
    readers: list[int]
    rows: int
    """That arrive, and this rank's own among them."""
    read: PeerRead | None
    """None where this rank reads nothing from others."""
    own_runs: Tensor
    """The rows that arrive <- this rank's own."""


class _Slice(NamedTuple):
    """Words of one of the columns."""

    column: int
    begin: int
    end: int


class HeadReads:
    """An exchange of heads, by reading."""

    def __init__(
        self,
        transport: SharingTransport,
        schedule: Schedule,
        queries: Sequence[slice],
        exchanges: Iterator[int],
    ) -> None:
        """``queries``: the query heads of each neighbour. ``exchanges``: numbers of exchanges,
        alike on all neighbours."""
        moves = schedule.head_moves
        assert moves is not None
        self._transport, self._exchanges = transport, exchanges
        self._place = [move.peer for move in moves.receives].index(transport.rank)
        self._count, self._rows, self._whole_rows = len(queries), schedule.rows, moves.rows
        flags = bytes(_count(heads) > 0 for heads in queries)
        table = HeadTable(tensor_of(_core.heads(buffer_of(schedule.words), flags), torch.int64))
        staged, most, staged_back, most_back = table.section("SIZES").flatten().tolist()
        self._there = _way_of(table, "", (staged, most), self._whole_rows)
        self._back = _way_of(table, "BACK_", (staged_back, most_back), self._count * self._rows)
        self._shared: dict[tuple[object, ...], Shared] = {}

    def to_heads(
        self, columns: Sequence[Tensor], heads: Sequence[Sequence[slice]], stamp: Stamp
    ) -> list[Tensor]:
        """(T, H, ...) to (S, h, ...), perhaps not contiguous. ``heads``: of each column, those of
        each neighbour."""
        blocks = [_blocks(*given) for given in zip(columns, heads, strict=True)]
        own = [parts[self._place] for parts in blocks]
        found = self._exchange(self._there, list(zip(*blocks, strict=True)), own, stamp)
        mine = [shares[self._place] for shares in heads]
        return [
            _heads_of(rows, self._whole_rows, like, _count(share))
            for rows, like, share in zip(found, columns, mine, strict=True)
        ]

    def to_rows(
        self, columns: Sequence[Tensor], heads: Sequence[Sequence[slice]], stamp: Stamp
    ) -> list[list[Tensor]]:
        """The way back: of each column (S, h, ...), the heads of each neighbour, (T, elements)."""
        own = [
            _padded(column.flatten(1), _most_bytes(column, shares))
            for column, shares in zip(columns, heads, strict=True)
        ]
        found = self._exchange(self._back, [own], own, stamp)
        return [
            self._parts(rows, like, shares)
            for rows, like, shares in zip(found, columns, heads, strict=True)
        ]

    def _parts(self, rows: Tensor | None, like: Tensor, shares: Sequence[slice]) -> list[Tensor]:
        size = like.shape[2:].numel()
        widths = [_count(share) * size for share in shares]
        if rows is None:
            return [like.new_empty(self._rows, width) for width in widths]
        blocks = rows.view(like.dtype).split_with_sizes([self._rows] * self._count)
        return [block[:, :width] for block, width in zip(blocks, widths, strict=True)]

    def _exchange(
        self, way: _Way, parts: Sequence[Sequence[Tensor]], own: Sequence[Tensor], stamp: Stamp
    ) -> list[Tensor | None]:
        """Stage parts, each as columns (rows, words), and read: (rows, words) of each column, with
        this rank's own rows. None for a column without words, and where nothing is read."""
        pieces = self._pieces(way, [column.shape[1] for column in own])
        arriving = [self._begin(way, piece, parts, own, stamp) for piece in pieces]
        found: list[list[Tensor]] = [[] for _ in own]
        for piece, (rows, reading) in zip(pieces, arriving, strict=True):
            if reading is not None:
                reading.wait()
            if rows is not None:
                for of, column in zip(piece, rows.split_with_sizes(_widths(piece), 1), strict=True):
                    found[of.column].append(column)
        return [_joined(rows) if rows else None for rows in found]

    def _begin(
        self,
        way: _Way,
        piece: Sequence[_Slice],
        parts: Sequence[Sequence[Tensor]],
        own: Sequence[Tensor],
        stamp: Stamp,
    ) -> tuple[Tensor | None, Reading | None]:
        """Stage and begin to read a piece of the columns: what it is read into, if anything."""
        rows = None
        if way.read is not None or len(way.own_runs):
            rows = own[0].new_empty(way.rows, sum(_widths(piece)))
        given = [_cut(part, of) for part in parts for of in piece]
        staged = self._share(way, piece).stage(next(self._exchanges), given, stamp, into=rows)
        if rows is not None and len(way.own_runs):  # meanwhile
            given = [_cut(own, of) for of in piece]
            torch.ops.hcp.place.default(rows, given, way.own_runs, len(piece))
        return rows, None if way.read is None else staged.read(0)

    def _share(self, way: _Way, piece: Sequence[_Slice]) -> Shared:
        """The piece's kind of exchange, made once for all layers."""
        widths = tuple(_widths(piece))
        shared = self._shared.get((way is self._back, widths))
        if shared is None:
            given = way.staged_rows, widths, _WORD, way.staged_runs, way.readers, [way.read]
            shared = self._shared[way is self._back, widths] = self._transport.share(Share(*given))
        return shared

    def _pieces(self, way: _Way, widths: Sequence[int]) -> list[list[_Slice]]:
        """Columns cut so that each piece of any neighbour fits into a half of the peer buffer:
        alike on all of them."""
        vectors, half = sum(widths) // _VECTOR_WORDS, self._transport.half_bytes
        fit = max(1, half // _VECTOR_BYTES // max(1, way.most_rows))
        count = -(-vectors // fit)
        if count > 1:
            _tell_of_pieces(count, half, way.most_rows * vectors * _VECTOR_BYTES)
        return _cut_columns(widths, -(-vectors // max(1, count)) * _VECTOR_WORDS)


def _way_of(table: HeadTable, prefix: str, sizes: tuple[int, int], rows: int) -> _Way:
    owners = [(peer, held) for peer, held in table.records(f"{prefix}OWNERS")]
    runs, peers = table.section(f"{prefix}READ_RUNS"), [peer for peer, _ in owners]
    return _Way(
        *sizes,
        table.section(f"{prefix}STAGED_RUNS"),
        table.section(f"{prefix}READERS").flatten().tolist(),
        rows,
        PeerRead(owners, runs, rows, peers) if owners else None,
        table.section(f"{prefix}OWN_RUNS"),
    )


def _tell_of_pieces(count: int, half_bytes: int, staged_bytes: int) -> None:
    """Log it once in a process."""
    if next(_told) == 0:
        _log.warning(
            "an exchange of rows for heads stages up to %d bytes, and half of the peer buffer has "
            "%d: it goes in %d pieces, one after the other; build the process groups with "
            "peer_buffer_bytes=%d or more to exchange all at once",
            *(staged_bytes, half_bytes, count, _core.link_buffer_bytes(staged_bytes)),
        )


# ---- columns -------------------------------------------------------------------------------------


def _count(heads: slice) -> int:
    return int(heads.stop - heads.start)


def _most_bytes(column: Tensor, shares: Sequence[slice]) -> int:
    """Bytes of the columns of the rank with the most heads, in whole vectors."""
    heads = max(map(_count, shares)) * column.shape[2:].numel() * column.element_size()
    return -(-heads // _VECTOR_BYTES) * _VECTOR_BYTES


def _blocks(column: Tensor, shares: Sequence[slice]) -> Sequence[Tensor]:
    """The heads of each neighbour, (T, W): views where all have as many, in whole vectors."""
    size, total = column.shape[2:].numel(), _most_bytes(column, shares)
    flat = column.flatten(1)
    width = _count(shares[0]) * size
    if width * len(shares) == flat.shape[1]:
        return _padded(flat.view(len(flat), len(shares), width), total).unbind(1)
    blocks = flat.new_zeros(len(shares), len(flat), total // _WORD.itemsize, dtype=_WORD)
    for block, share in zip(blocks.view(flat.dtype), shares, strict=True):
        heads = flat[:, share.start * size : share.stop * size]
        block[:, : heads.shape[1]] = heads
    return blocks.unbind(0)


def _padded(rows: Tensor, row_bytes: int) -> Tensor:
    """(..., elements) as words, zeros up to so many bytes: a view where there are as many."""
    width = rows.shape[-1]
    more = row_bytes // rows.element_size() - width
    words = None if more else _as_words(rows)
    if words is not None:
        return words
    wider = rows.new_zeros(*rows.shape[:-1], row_bytes // _WORD.itemsize, dtype=_WORD)
    wider.view(rows.dtype)[..., :width] = rows
    return wider


def _as_words(rows: Tensor) -> Tensor | None:
    """View (..., elements) as words. None where they are not whole vectors in memory."""
    item = rows.element_size()
    begins = rows.data_ptr() | int(rows.storage_offset()) * item | rows.shape[-1] * item
    for dim in range(rows.dim() - 1):
        begins = begins | int(rows.stride(dim)) * item
    return None if rows.stride(-1) != 1 or begins % _VECTOR_BYTES else rows.view(_WORD)


def _heads_of(rows: Tensor | None, count: int, like: Tensor, heads: int) -> Tensor:
    """Words of so many rows as (count, heads, ...)."""
    shape = count, heads, *like.shape[2:]
    if rows is None:
        return like.new_empty(shape)
    width = heads * like.shape[2:].numel()
    return rows.view(like.dtype)[:, :width].view(shape)


def _cut_columns(widths: Sequence[int], most: int) -> list[list[_Slice]]:
    """Columns side by side as pieces of so many words, the last perhaps of fewer."""
    pieces: list[list[_Slice]] = []
    room = 0
    for column, width in enumerate(widths):
        begin = 0
        while begin < width:
            if room == 0:
                pieces.append([])
                room = most
            end = min(begin + room, width)
            pieces[-1].append(_Slice(column, begin, end))
            room -= end - begin
            begin = end
    return pieces


def _cut(columns: Sequence[Tensor], of: _Slice) -> Tensor:
    column = columns[of.column]
    return column if of.end - of.begin == column.shape[1] else column[:, of.begin : of.end]


def _widths(piece: Sequence[_Slice]) -> list[int]:
    return [of.end - of.begin for of in piece]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
