"""Heads for sequence: neighbours of a group trade their rows, so that each has, of some heads, the
rows of all of them. When the whole group are neighbours, these are whole sequences.

As in DeepSpeed-Ulysses (Jacobs et al., https://arxiv.org/abs/2309.14509), under any layout and any
number of heads. Columns of several tensors and types travel together, as bytes.

T rows on this rank, S rows of all neighbours, in the order of their sequences and tokens, H heads
of which this rank has h.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hcp import ops
from hcp.attention.kernels import Call, Kernel, wide
from hcp.exchange.agreement import Stamp
from hcp.exchange.tables import Move, Schedule, Trade
from hcp.exchange.transport import Transport


def split(heads: int, ranks: int) -> list[slice]:
    """Consecutive heads for each rank, as even as they go: none where there are fewer than
    ranks."""
    return [slice(j * heads // ranks, (j + 1) * heads // ranks) for j in range(ranks)]


def key_heads(queries: slice, per_key: int) -> slice:
    """The key-value heads that these query heads attend to, ``per_key`` query heads having one."""
    if queries.start == queries.stop:
        return slice(0, 0)
    return slice(queries.start // per_key, -(-queries.stop // per_key))


def members(trade: Trade) -> list[int]:
    """The neighbours, in order, this rank among them."""
    return [move.peer for move in trade.receives]


def bring(
    transport: Transport, trade: Trade, columns: Sequence[Sequence[Tensor]], stamp: Stamp
) -> list[Tensor]:
    """Rows of all neighbours, of this rank's heads.

    columns[k]: what the k-th neighbour is given, (T, heads, size) or (T, heads) each. Returns this
    rank's own, (S, ...) each, contiguous.
    """
    own = columns[members(trade).index(transport.rank)]
    widths = [_row_bytes(column) for column in own]
    wires = [_side_by_side(given) for given in columns]
    received = wires[0].new_empty(trade.rows * sum(widths))
    sends = _in_bytes(trade.sends, [wire.shape[1] for wire in wires], end_to_end=True)
    receives = _in_bytes(trade.receives, [sum(widths)] * len(wires))
    sent = torch.cat([wire.flatten() for wire in wires])
    transport.start(sent, _some(sends), received, _some(receives), stamp=stamp).wait()
    rows = received.view(trade.rows, sum(widths))
    arranged = ops.unpack(rows, trade.gather, widths, trade.rows)
    return [
        _from_bytes(part, like.dtype, (trade.rows, *like.shape[1:]))
        for part, like in zip(arranged, own, strict=True)
    ]


def take_back(
    transport: Transport,
    trade: Trade,
    columns: Sequence[Tensor],
    shapes: Sequence[Sequence[Sequence[int]]],
    stamp: Stamp,
) -> list[list[Tensor]]:
    """The way back of :func:`bring`.

    columns: (S, ...) each. shapes[k]: the shapes of a row of what the k-th neighbour has, one for
    each of the columns. Returns the rows (T, ...) of each neighbour's columns.
    """
    parts = [_as_bytes(column) for column in columns]
    sent = ops.pack(parts, trade.scatter, trade.rows)
    widths = [
        [
            _elements(shape) * column.element_size()
            for shape, column in zip(row, columns, strict=True)
        ]
        for row in shapes
    ]
    totals = [sum(row) for row in widths]
    own_rows = trade.sends[0].rows
    received = sent.new_empty(own_rows * sum(totals))
    sends = _in_bytes(trade.receives, [sent.shape[1]] * len(totals))
    receives = _in_bytes(trade.sends, totals, end_to_end=True)
    transport.start(sent.flatten(), _some(sends), received, _some(receives), stamp=stamp).wait()
    back = []
    for move, row, shape in zip(receives, widths, shapes, strict=True):
        rows = received[move.row : move.row + move.rows].view(own_rows, sum(row))
        back.append(
            [
                _from_bytes(part, column.dtype, (own_rows, *part_shape))
                for part, column, part_shape in zip(
                    torch.split(rows, row, 1), columns, shape, strict=True
                )
            ]
        )
    return back


# ---- as many heads on every neighbour ------------------------------------------------------------
#
# Then the rows of all neighbours have one width, and travel as rows of elements.


def deal(
    transport: Transport, trade: Trade, columns: Sequence[Tensor], stamp: Stamp
) -> list[Tensor]:
    """As :func:`bring`, for columns (T, heads, ...) of which each neighbour gets an equal share."""
    count = len(trade.receives)
    dtype = _narrowest(columns)
    flat = [_elements_as(column.flatten(1), dtype) for column in columns]
    widths = [part.shape[1] // count for part in flat]
    shares = [
        part.view(part.shape[0], count, width).transpose(0, 1)
        for part, width in zip(flat, widths, strict=True)
    ]
    sent = torch.cat(shares, 2).flatten(0, 1)
    received = sent.new_empty(trade.rows, sent.shape[1])
    transport.start(sent, trade.dealt, received, trade.arriving, stamp=stamp).wait()
    arranged = ops.unpack(received, trade.gather, widths, trade.rows)
    return [
        _elements_as(part, like.dtype).view(trade.rows, like.shape[1] // count, *like.shape[2:])
        for part, like in zip(arranged, columns, strict=True)
    ]


def collect(
    transport: Transport, trade: Trade, columns: Sequence[Tensor], stamp: Stamp
) -> list[Tensor]:
    """The way back of :func:`deal`: (S, h, ...) to (T, heads, ...)."""
    count, own_rows = len(trade.receives), trade.sends[0].rows
    dtype = _narrowest(columns)
    flat = [_dense(_elements_as(column.flatten(1), dtype)) for column in columns]
    sent = ops.pack(flat, trade.scatter, trade.rows)
    received = sent.new_empty(count * own_rows, sent.shape[1])
    transport.start(sent, trade.arriving, received, trade.dealt, stamp=stamp).wait()
    shares = received.view(count, own_rows, sent.shape[1]).transpose(0, 1)
    return [
        _elements_as(part.flatten(1), like.dtype).view(
            own_rows, count * like.shape[1], *like.shape[2:]
        )
        for part, like in zip(
            shares.split_with_sizes([part.shape[1] for part in flat], 2), columns, strict=True
        )
    ]


def _narrowest(columns: Sequence[Tensor]) -> torch.dtype:
    return min((column.dtype for column in columns), key=lambda dtype: dtype.itemsize)


def _elements_as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, elements): the same bytes as elements of another type."""
    if rows.dtype == dtype:
        return rows
    width = rows.shape[1] * rows.element_size() // dtype.itemsize
    return _seen_as(rows, dtype).view(rows.shape[0], width)


def _dense(rows: Tensor) -> Tensor:
    """As packing takes rows; a kernel may give a log-sum-exp by heads."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def trade(
    transport: Transport, schedule: Schedule, x: Tensor, count: int, *, to_heads: bool, stamp: Stamp
) -> Tensor:
    """(T, count, ...) to (S, h, ...), or back, under the schedule of a group's "a2a"."""
    assert schedule.trade is not None
    slices = split(count, len(members(schedule.trade)))
    if to_heads:
        (whole,) = bring(transport, schedule.trade, [[x[:, own]] for own in slices], stamp)
        return whole
    shapes = [[(own.stop - own.start, *x.shape[2:])] for own in slices]
    parts = take_back(transport, schedule.trade, [x], shapes, stamp)
    return torch.cat([part for (part,) in parts], 1)


def _in_bytes(moves: Sequence[Move], widths: Sequence[int], end_to_end: bool = False) -> list[Move]:
    """Moves of rows of these widths as moves of bytes, one behind the other where each has a buffer
    of its own."""
    made, at = [], 0
    for move, width in zip(moves, widths, strict=True):
        made.append(Move(move.peer, at if end_to_end else move.row * width, move.rows * width))
        at += move.rows * width
    return made


def _some(moves: Sequence[Move]) -> list[Move]:
    return [move for move in moves if move.rows > 0]


def _elements(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _row_bytes(column: Tensor) -> int:
    return _elements(column.shape[1:]) * column.element_size()


def _as_bytes(column: Tensor) -> Tensor:
    """(rows, ...) as (rows, row_bytes)."""
    return _seen_as(column, torch.uint8).view(column.shape[0], _row_bytes(column))


def _from_bytes(rows: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if rows.numel() == 0:
        return rows.new_empty(shape, dtype=dtype)
    return _seen_as(rows, dtype).view(shape)


def _seen_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of x, end to end, as elements of a type."""
    flat = x.reshape(-1)
    # One element may have any stride, and one row begin anywhere, and still be called contiguous.
    if flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % dtype.itemsize:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(dtype)


def _side_by_side(columns: Sequence[Tensor]) -> Tensor:
    return torch.cat([_as_bytes(column) for column in columns], 1)


# ---- attention -----------------------------------------------------------------------------------


class Heads:
    """Who of the neighbours computes which heads. A key-value head is on every rank whose query
    heads attend to it."""

    def __init__(self, transport: Transport, trade: Trade, queries: int, keys: int) -> None:
        """``queries``, ``keys``: how many heads there are of each."""
        self._transport, self._trade = transport, trade
        neighbours = members(trade)
        per_key = queries // keys
        self._even = queries % len(neighbours) == keys % len(neighbours) == 0
        self._queries = split(queries, len(neighbours))
        self._keys = [key_heads(own, per_key) for own in self._queries]
        j = neighbours.index(transport.rank)
        self.own = self._queries[j]
        """This rank's query heads."""
        own_keys = self._keys[j]
        self.key_count = len(_numbers(own_keys))
        self._key_of = [i // per_key - own_keys.start for i in _numbers(self.own)]

    def kernel(self, kernel: Kernel) -> Kernel:
        """That computes this rank's heads."""
        key_of, count = self._key_of, self.key_count
        even = [i * count // len(key_of) for i in range(len(key_of))]
        fits = not key_of or (len(key_of) % count == 0 and key_of == even)
        return kernel if fits else _Repeated(kernel, key_of, count)

    def bring(self, by_query: list[Tensor], by_key: list[Tensor], stamp: Stamp) -> list[Tensor]:
        if self._even:
            return deal(self._transport, self._trade, [*by_query, *by_key], stamp)
        columns = [
            [x[:, q] for x in by_query] + [x[:, k] for x in by_key]
            for q, k in zip(self._queries, self._keys, strict=True)
        ]
        return bring(self._transport, self._trade, columns, stamp)

    def take_back(
        self, by_query: list[Tensor], by_key: list[Tensor], key_count: int, stamp: Stamp
    ) -> list[Tensor]:
        if self._even:
            return collect(self._transport, self._trade, [*by_query, *by_key], stamp)
        shapes = [
            [(len(_numbers(q)), *x.shape[2:]) for x in by_query]
            + [(len(_numbers(k)), *x.shape[2:]) for x in by_key]
            for q, k in zip(self._queries, self._keys, strict=True)
        ]
        columns = [*by_query, *by_key]
        back = take_back(self._transport, self._trade, columns, shapes, stamp)
        parts = list(zip(*back, strict=True))
        queries, keys = parts[: len(by_query)], parts[len(by_query) :]
        return [torch.cat(part, 1) for part in queries] + [
            self._sum_keys(part, key_count) for part in keys
        ]

    def _sum_keys(self, parts: Sequence[Tensor], count: int) -> Tensor:
        """Gradients of key-value heads from every rank that had them, summed once."""
        total = parts[0].new_zeros(
            parts[0].shape[0], count, *parts[0].shape[2:], dtype=wide(parts[0].dtype)
        )
        for own, part in zip(self._keys, parts, strict=True):
            total[:, own] += part
        return total.to(parts[0].dtype)


def _numbers(chosen: slice) -> range:
    return range(chosen.start, chosen.stop)


class _Repeated:
    """A kernel for query heads that do not divide evenly over their key-value heads: each gets one
    of its own."""

    def __init__(self, kernel: Kernel, key_of: list[int], count: int) -> None:
        self._kernel, self._key_of, self._count = kernel, key_of, count
        self._index = torch.tensor(key_of, device="cpu")
        self.calls = kernel.calls
        self.dtypes = kernel.dtypes

    def capped(self, softcap: float) -> Kernel | None:
        kernel = self._kernel.capped(softcap)
        return None if kernel is None else _Repeated(kernel, self._key_of, self._count)

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._repeat(key), self._repeat(value)
        return self._kernel.forward(call, query, keys, values, scale)

    def backward(
        self,
        call: Call,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = self._repeat(key), self._repeat(value)
        grad_query, grad_keys, grad_values = self._kernel.backward(
            call, grad_out, grad_lse, query, keys, values, out, lse, scale
        )
        return grad_query, self._collapse(grad_keys), self._collapse(grad_values)

    def _index_on(self, device: torch.device) -> Tensor:
        """Kept there for the next layer: the host waits for the copy."""
        if self._index.device != device:
            self._index = self._index.to(device)
        return self._index

    def _repeat(self, rows: Tensor) -> Tensor:
        return rows.index_select(1, self._index_on(rows.device))

    def _collapse(self, grad: Tensor) -> Tensor:
        """The adjoint of the repetition, summed in float32 (float64 for float64)."""
        wider = wide(grad.dtype)
        total = grad.new_zeros(grad.shape[0], self._count, grad.shape[2], dtype=wider)
        return total.index_add_(1, self._index_on(grad.device), grad.to(wider)).to(grad.dtype)
