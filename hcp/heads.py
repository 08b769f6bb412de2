"""Heads for sequence: every rank of a group trades its rows for whole sequences of some heads.

As in DeepSpeed-Ulysses (Jacobs et al., https://arxiv.org/abs/2309.14509), under any layout and any
number of heads. Columns of several tensors and types travel together, as bytes.

T rows on this rank, S rows of the group's sequences, end to end in token order, H heads of which
this rank has h.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hcp import ops
from hcp.exchange import Transport
from hcp.layout import Move, Schedule

A2A = "a2a"


def split(heads: int, ranks: int) -> list[slice]:
    """Consecutive heads for each rank, as even as they go: none where there are fewer than
    ranks."""
    return [slice(j * heads // ranks, (j + 1) * heads // ranks) for j in range(ranks)]


def key_heads(queries: slice, per_key: int) -> slice:
    """The key-value heads that these query heads attend to, ``per_key`` query heads having one."""
    if queries.start == queries.stop:
        return slice(0, 0)
    return slice(queries.start // per_key, -(-queries.stop // per_key))


def members(schedule: Schedule) -> list[int]:
    """The ranks of the group, in order; empty where this rank has no group."""
    return [move.peer for move in schedule.receives]


def bring(
    transport: Transport, schedule: Schedule, columns: Sequence[Sequence[Tensor]], tag: int
) -> list[Tensor]:
    """Rows of all ranks as whole sequences.

    columns[k]: what the group's k-th rank is given, (T, heads, size) or (T, heads) each. Returns
    this rank's own, (S, ...) each, contiguous.
    """
    stage = schedule.stages[0]
    own = columns[members(schedule).index(transport.rank)]
    widths = [_row_bytes(column) for column in own]
    wires = [_side_by_side(given) for given in columns]
    received = wires[0].new_empty(stage.received_rows * sum(widths))
    sends = _in_bytes(stage.sends, [wire.shape[1] for wire in wires], end_to_end=True)
    receives = _in_bytes(stage.receives, [sum(widths)] * len(wires))
    sent = torch.cat([wire.flatten() for wire in wires])
    transport.start(sent, _some(sends), received, _some(receives), tag=tag).wait()
    rows = received.view(stage.received_rows, sum(widths))
    arranged = ops.unpack(rows, stage.arrange, widths, stage.key_rows)
    return [
        _from_bytes(part, like.dtype, (stage.key_rows, *like.shape[1:]))
        for part, like in zip(arranged, own, strict=True)
    ]


def take_back(
    transport: Transport,
    schedule: Schedule,
    columns: Sequence[Tensor],
    shapes: Sequence[Sequence[Sequence[int]]],
    tag: int,
) -> list[list[Tensor]]:
    """The way back of :func:`bring`.

    columns: (S, ...) each. shapes[k]: the shapes of a row of what the group's k-th rank has, one
    for each of the columns. Returns the rows (T, ...) of each rank's columns.
    """
    stage = schedule.stages[0]
    parts = [_as_bytes(column) for column in columns]
    sent = ops.pack(parts, stage.pack, stage.key_rows)
    widths = [
        [
            _elements(shape) * column.element_size()
            for shape, column in zip(row, columns, strict=True)
        ]
        for row in shapes
    ]
    totals = [sum(row) for row in widths]
    received = sent.new_empty(schedule.rows * sum(totals))
    sends = _in_bytes(stage.receives, [sent.shape[1]] * len(totals))
    receives = _in_bytes(stage.sends, totals, end_to_end=True)
    transport.start(sent.flatten(), _some(sends), received, _some(receives), tag=tag).wait()
    back = []
    for move, row, shape in zip(receives, widths, shapes, strict=True):
        rows = received[move.row : move.row + move.rows].view(schedule.rows, sum(row))
        back.append(
            [
                _from_bytes(part, column.dtype, (schedule.rows, *part_shape))
                for part, column, part_shape in zip(
                    torch.split(rows, row, 1), columns, shape, strict=True
                )
            ]
        )
    return back


def trade(
    transport: Transport, schedule: Schedule, x: Tensor, count: int, *, to_heads: bool, tag: int
) -> Tensor:
    """(T, count, ...) to (S, h, ...), or back."""
    slices = split(count, len(members(schedule)))
    if to_heads:
        (whole,) = bring(transport, schedule, [[x[:, own]] for own in slices], tag)
        return whole
    shapes = [[(own.stop - own.start, *x.shape[2:])] for own in slices]
    parts = take_back(transport, schedule, [x], shapes, tag)
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
    flat = column.reshape(-1)
    if flat.stride(0) != 1:  # one element may have any stride, and still be called contiguous
        flat = flat.clone()
    return flat.view(torch.uint8).view(column.shape[0], _row_bytes(column))


def _from_bytes(rows: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if rows.numel() == 0:
        return rows.new_empty(shape, dtype=dtype)
    return rows.reshape(-1).view(dtype).view(shape)


def _side_by_side(columns: Sequence[Tensor]) -> Tensor:
    return torch.cat([_as_bytes(column) for column in columns], 1)
