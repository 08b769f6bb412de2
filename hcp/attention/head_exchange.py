"""An all-to-all of neighbours: each gives its rows of all heads, and gets all rows of some heads.

If all ranks of a group are neighbours, these rows are whole sequences. As in DeepSpeed-Ulysses
(Jacobs et al., https://arxiv.org/abs/2309.14509), under any layout and any number of heads.

What a neighbour gets is one block: its heads of several tensors, side by side. The blocks stand end
to end in one buffer. Heads that divide evenly make blocks of one width, which one copy packs for
all neighbours; others take one copy for each neighbour.

T rows on this rank, S rows of all neighbours, in the order of their sequences and tokens, H query
heads, G key-value heads, h of either on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hcp import ops
from hcp.attention.head_reads import HeadReads
from hcp.attention.head_shares import key_heads, split
from hcp.attention.kernels import Attended, Kernel, Launch, ResultGrads, wide
from hcp.exchange.agreement import Stamp
from hcp.exchange.layout import copied
from hcp.exchange.tables import Move, Schedule
from hcp.exchange.transport import Transport, read_in_place, shares


class HeadExchange:
    """Moves rows between neighbours, and says who of them computes which heads.

    A key-value head is on every rank whose query heads attend to it.
    """

    def __init__(
        self,
        transport: Transport,
        schedule: Schedule,
        queries: int,
        keys: int,
        exchanges: Iterator[int],
    ) -> None:
        """``queries``, ``keys``: the numbers of all heads. ``exchanges``: numbers of exchanges of
        heads through shared memory, alike on all neighbours."""
        moves = schedule.head_moves
        assert moves is not None
        self._transport, self._moves = transport, moves
        neighbours = [move.peer for move in moves.receives]  # in order, this rank among them
        per_key = queries // max(1, keys)
        self._even = keys > 0 and all(x % len(neighbours) == 0 for x in (queries, keys))
        self._queries = split(queries, len(neighbours))
        self._keys = [key_heads(own, per_key) for own in self._queries]
        self._place = neighbours.index(transport.rank)
        self.own = self._queries[self._place]
        """This rank's query heads."""
        own_keys = self._keys[self._place]
        self.query_count, self.key_count = _count(self.own), _count(own_keys)
        """The numbers of this rank's query heads and key-value heads."""
        self._key_of = [i // per_key - own_keys.start for i in range(self.own.start, self.own.stop)]
        self._rows = schedule.rows
        self._own_rows = torch.tensor([[0, schedule.rows]], device="cpu")
        self._reads: HeadReads | None = None
        if len(neighbours) > 1 and read_in_place(transport, neighbours):
            assert shares(transport)
            self._reads = HeadReads(transport, schedule, self._queries, self._keys, exchanges)

    def kernel(self, kernel: Kernel) -> Kernel:
        """A kernel that computes this rank's heads."""
        key_of, count = self._key_of, self.key_count
        even = [i * count // len(key_of) for i in range(len(key_of))]
        fits = not key_of or (len(key_of) % count == 0 and key_of == even)
        return kernel if fits else _Repeated(kernel, key_of, count)

    def to_heads(
        self, by_query: Sequence[Tensor], by_key: Sequence[Tensor], stamp: Stamp
    ) -> list[Tensor]:
        """(T, H, ...) and (T, G, ...) to (S, h, ...), with the elements of a head side by side."""
        if self._reads is not None:
            return self._reads.to_heads(by_query, by_key, stamp)
        columns = [*by_query, *by_key]
        unit = _unit(columns)
        flat = [_elements(column.flatten(1), unit) for column in columns]
        counts = [self.query_count] * len(by_query) + [self.key_count] * len(by_key)
        widths = [
            part.shape[1] * count // max(1, column.shape[1])
            for part, column, count in zip(flat, columns, counts, strict=True)
        ]
        width, rows = sum(widths), self._moves.rows
        if self._even:
            sent = _equal_blocks(flat, len(self._queries))
            received = sent.new_empty(rows, width)
            sends, receives = self._moves.even_sends, self._moves.even_receives
        else:
            shares = self._shares(by_query, by_key, unit)
            sent = _blocks(flat, shares)
            received = sent.new_empty(rows * width)
            lengths = [self._moves.sends[0].rows * sum(map(_count, share)) for share in shares]
            sends = _end_to_end(self._moves.sends, lengths)
            receives = _scaled(self._moves.receives, width)
        self._transport.start(sent, sends, received, receives, stamp=stamp).wait()
        del sent
        parts = ops.unpack(received.view(rows, width), self._moves.gather, widths, rows)
        return [_as_given(*part) for part in zip(parts, columns, counts, strict=True)]

    def to_rows(
        self, by_query: Sequence[Tensor], by_key: Sequence[Tensor], key_count: int, stamp: Stamp
    ) -> list[Tensor]:
        """The way back: (S, h, ...) to (T, H, ...) and (T, G, ...).

        A key-value head of several ranks becomes their sum. ``key_count``: G.
        """
        if self._reads is not None:
            return self._read_rows(self._reads, by_query, by_key, key_count, stamp)
        columns = [*by_query, *by_key]
        unit = _unit(columns)
        flat = [_dense(_elements(column.flatten(1), unit)) for column in columns]
        sent = ops.pack(flat, self._moves.scatter, self._moves.rows)
        if self._even:
            blocks = self._equal_blocks_back(sent, stamp)
            count = blocks.shape[1]
            parts = blocks.split_with_sizes([part.shape[1] for part in flat], 2)
            return [
                _as_given(part.flatten(1), like, count * like.shape[1])
                for part, like in zip(parts, columns, strict=True)
            ]
        shares = self._shares(by_query, by_key, unit)
        # Of each tensor, the parts of all neighbours.
        found = list(zip(*self._blocks_back(sent, shares, stamp), strict=True))
        heads, n = self._queries[-1].stop, len(by_query)
        joined = zip(found[:n], by_query, strict=True)
        summed = zip(found[n:], by_key, strict=True)
        return [
            *(self._joined(parts, like, heads) for parts, like in joined),
            *(self._sum_keys(parts, like, key_count) for parts, like in summed),
        ]

    def _read_rows(
        self,
        reads: HeadReads,
        by_query: Sequence[Tensor],
        by_key: Sequence[Tensor],
        key_count: int,
        stamp: Stamp,
    ) -> list[Tensor]:
        joins = len(by_query) + (len(by_key) if self._even else 0)
        joined, parts = reads.to_rows(by_query, by_key, joins, stamp)
        if not joined and not parts:
            heads = self._queries[-1].stop
            return [
                *(x.new_empty(self._rows, heads, *x.shape[2:]) for x in by_query),
                *(x.new_empty(self._rows, key_count, *x.shape[2:]) for x in by_key),
            ]
        sums = zip(parts, by_key[len(by_key) - len(parts) :], strict=True)
        return joined + [self._sum_keys(own, like, key_count) for own, like in sums]

    def _joined(self, parts: Sequence[Tensor], like: Tensor, heads: int) -> Tensor:
        return _as_given(ops.pack(parts, self._own_rows, parts[0].shape[0]), like, heads)

    def _shares(
        self, by_query: Sequence[Tensor], by_key: Sequence[Tensor], unit: torch.dtype
    ) -> list[list[slice]]:
        """The columns that each neighbour gets of each tensor, in elements."""
        sizes = [_size(x, unit) for x in by_query], [_size(x, unit) for x in by_key]
        return [
            [
                slice(heads.start * size, heads.stop * size)
                for heads, own in zip((queries, keys), sizes, strict=True)
                for size in own
            ]
            for queries, keys in zip(self._queries, self._keys, strict=True)
        ]

    def _equal_blocks_back(self, sent: Tensor, stamp: Stamp) -> Tensor:
        """This rank's rows from all neighbours: (T, neighbours, elements)."""
        count, rows = len(self._queries), self._moves.sends[0].rows
        received = sent.new_empty(count * rows, sent.shape[1])
        sends, receives = self._moves.even_receives, self._moves.even_sends
        self._transport.start(sent, sends, received, receives, stamp=stamp).wait()
        return received.view(count, rows, sent.shape[1]).transpose(0, 1)

    def _blocks_back(
        self, sent: Tensor, shares: Sequence[Sequence[slice]], stamp: Stamp
    ) -> list[Sequence[Tensor]]:
        """This rank's rows from each neighbour, (T, elements) of each tensor."""
        rows = self._moves.sends[0].rows
        widths = [[_count(part) for part in share] for share in shares]
        lengths = [rows * sum(own) for own in widths]
        received = sent.new_empty(sum(lengths))
        sends = _scaled(self._moves.receives, sent.shape[1])
        receives = _end_to_end(self._moves.sends, lengths)
        self._transport.start(sent.flatten(), sends, received, receives, stamp=stamp).wait()
        blocks = received.split_with_sizes(lengths)
        return [
            block.view(rows, sum(own)).split_with_sizes(own, 1)
            for block, own in zip(blocks, widths, strict=True)
        ]

    def _sum_keys(self, parts: Sequence[Tensor], like: Tensor, count: int) -> Tensor:
        """The sum of every rank's part in float32 (float64 for float64), rounded once."""
        rows = parts[0].shape[0]
        total = like.new_zeros(rows, count, *like.shape[2:], dtype=wide(like.dtype))
        for own, part in zip(self._keys, parts, strict=True):
            total[:, own] += _as_given(part, like, _count(own))
        return total.to(like.dtype)


# ---- blocks --------------------------------------------------------------------------------------


def _count(columns: slice) -> int:
    return len(range(columns.start, columns.stop))


def _equal_blocks(flat: Sequence[Tensor], count: int) -> Tensor:
    """Blocks of equal shares of the columns of tensors (T, elements): (count * T, elements)."""
    shares = [
        part.view(part.shape[0], count, part.shape[1] // count).transpose(0, 1) for part in flat
    ]
    return torch.cat(shares, 2).flatten(0, 1)


def _blocks(flat: Sequence[Tensor], shares: Sequence[Sequence[slice]]) -> Tensor:
    """Blocks of these columns of tensors (T, elements), end to end."""
    rows = flat[0].shape[0]
    widths = [sum(map(_count, share)) for share in shares]
    sent = flat[0].new_empty(rows * sum(widths))
    blocks = sent.split_with_sizes([rows * width for width in widths])
    for share, block, width in zip(shares, blocks, widths, strict=True):
        parts = [part[:, columns] for part, columns in zip(flat, share, strict=True)]
        torch.cat(parts, 1, out=block.view(rows, width))
    return sent


def _end_to_end(moves: Sequence[Move], lengths: Sequence[int]) -> list[Move]:
    """Moves of blocks that stand end to end, in elements."""
    made, at = [], 0
    for move, length in zip(moves, lengths, strict=True):
        made += [Move(move.peer, at, length)] if length else []
        at += length
    return made


def _scaled(moves: Sequence[Move], width: int) -> list[Move]:
    """Moves of rows of a width, in elements."""
    return [Move(peer, row * width, rows * width) for peer, row, rows in moves if rows * width]


def _unit(columns: Sequence[Tensor]) -> torch.dtype:
    """The dtype of all that travels: the narrowest, or bytes where a transport may not know it."""
    narrowest = min((column.dtype for column in columns), key=lambda dtype: dtype.itemsize)
    return narrowest if narrowest in ops.FLOATS else torch.uint8


def _size(column: Tensor, unit: torch.dtype) -> int:
    """The number of elements of a unit that a head has."""
    return column.shape[2:].numel() * column.element_size() // unit.itemsize


def _elements(rows: Tensor, unit: torch.dtype) -> Tensor:
    """(rows, elements): the same bytes as elements of another dtype."""
    if rows.dtype == unit:
        return rows
    width = rows.shape[1] * rows.element_size() // unit.itemsize
    flat = rows.reshape(-1)
    # One element may have any stride, and one row begin anywhere, and still be called contiguous.
    if flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % unit.itemsize:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(unit).view(rows.shape[0], width)


def _as_given(elements: Tensor, like: Tensor, heads: int) -> Tensor:
    """(rows, elements) as (rows, heads, ...), of the dtype and the head size of ``like``."""
    shape = elements.shape[0], heads, *like.shape[2:]
    if elements.dtype == like.dtype:
        return elements.view(shape)
    if elements.numel() == 0:
        return elements.new_empty(shape, dtype=like.dtype)
    return _elements(elements, like.dtype).view(shape)


def _dense(rows: Tensor) -> Tensor:
    """Rows as packing takes them. A kernel may give a log-sum-exp by heads."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


# ---- kernels -------------------------------------------------------------------------------------


class _Repeated:
    """A kernel for query heads that do not divide evenly over their key-value heads: each query
    head gets a copy of its key-value head."""

    def __init__(self, kernel: Kernel, key_of: list[int], count: int) -> None:
        self._kernel, self._key_of, self._count = kernel, key_of, count
        self._index = torch.tensor(key_of, device="cpu")
        self.packs = kernel.packs
        self.dtypes = kernel.dtypes

    def capped(self, softcap: float) -> Kernel | None:
        kernel = self._kernel.capped(softcap)
        return None if kernel is None else _Repeated(kernel, self._key_of, self._count)

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._repeat(key), self._repeat(value)
        return self._kernel.forward(launch, query, keys, values, scale)

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, lse = attended
        repeated = query, self._repeat(key), self._repeat(value), out, lse
        grad_query, grad_keys, grad_values = self._kernel.backward(launch, grads, repeated, scale)
        return grad_query, self._collapse(grad_keys), self._collapse(grad_values)

    def _index_on(self, device: torch.device) -> Tensor:
        """The index on a device, where it stays for the next layer."""
        if self._index.device != device:
            self._index = copied(self._index, device)
        return self._index

    def _repeat(self, rows: Tensor) -> Tensor:
        return rows.index_select(1, self._index_on(rows.device))

    def _collapse(self, grad: Tensor) -> Tensor:
        """The adjoint of the repetition: the sum, in float32 (float64 for float64)."""
        wider = wide(grad.dtype)
        total = grad.new_zeros(grad.shape[0], self._count, grad.shape[2], dtype=wider)
        return total.index_add_(1, self._index_on(grad.device), grad.to(wider)).to(grad.dtype)
