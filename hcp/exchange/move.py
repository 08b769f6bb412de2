"""Rows moved between ranks, and sums over ranks, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hcp import ops
from hcp.exchange.agreement import BACKWARD, Stamp, agree_once
from hcp.exchange.tables import Move, Route
from hcp.exchange.transport import Transport, flat_rows

# ---- a row to one place --------------------------------------------------------------------------


def move_rows(
    transport: Transport,
    x: Tensor,
    route: Route,
    back: Route,
    stamp: Stamp,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Move rows x (source_rows, ...), of any dtype, along a route, and their gradients back along
    another. ``dtype``: of the result; None: that of x."""
    dtype = None if dtype == x.dtype else dtype
    rows: Tensor = _MoveRows.apply(_as_carried(x), route, back, transport, stamp, dtype)  # type: ignore[no-untyped-call]
    return _as_given(rows, x, dtype)


def check_rows(
    x: Tensor, rows: int, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Raise ValueError unless x (rows, ...) can be moved, and cast to ``dtype`` on the way."""
    if x.dim() == 0 or x.shape[0] != rows:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected {rows} rows")
    if x.device.type != device.type:
        raise ValueError(f"x is on {x.device}, expected {device}")
    if dtype in (None, x.dtype):
        return
    for what, given in (("x", x.dtype), ("dtype", dtype)):
        if given not in ops.FLOATS:
            raise ValueError(
                f"{what} is {given}, expected one of {ops.FLOATS} where {x.dtype} is cast "
                f"to {dtype} on the way: use .to() instead of dtype="
            )


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        route: Route,
        back: Route,
        transport: Transport,
        stamp: Stamp,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.route, ctx.back, ctx.transport, ctx.stamp = route, back, transport, stamp
        ctx.dtype = rows.dtype
        return _carry(transport, route, rows, stamp, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        given = ctx.back, ctx.route, ctx.transport, ctx.stamp.in_pass(BACKWARD), ctx.dtype
        rows = _MoveRows.apply(grad.contiguous(), *given)  # type: ignore[no-untyped-call]
        return rows, None, None, None, None, None


def _carry(
    transport: Transport, route: Route, rows: Tensor, stamp: Stamp, dtype: torch.dtype | None
) -> Tensor:
    """Carry rows (source_rows, width) along a route to (output_rows, width). They are cast where
    they are packed: before they travel if that makes them smaller, else when they are there."""
    dtype = dtype or rows.dtype
    sent = dtype if dtype.itemsize < rows.dtype.itemsize else rows.dtype
    wire = ops.pack([rows], route.pack, route.sent_rows, dtype=sent)
    received = wire.new_empty(route.received_rows, rows.shape[1])
    transport.start(wire, route.sends, received, route.receives, stamp=stamp).wait()
    return ops.pack([received], route.arrange, route.output_rows, dtype=dtype)


# ---- a row to several places ---------------------------------------------------------------------


class Path(Protocol):
    """The tables of rows on their way from sources to an output: see
    :class:`hcp.exchange.tables.Route`."""

    pack: Tensor
    sends: list[Move]
    receives: list[Move]
    arrange: Tensor
    sent_rows: int
    received_rows: int
    output_rows: int


def copy_rows(transport: Transport, path: Path, sources: Sequence[Tensor], stamp: Stamp) -> Tensor:
    """Copy rows of sources (N, width) each along a path, which may lead a row to several places.

    Returns (output_rows, sum of widths), the sources side by side. The gradient of a row is the sum
    of its copies' gradients.
    """
    wire = _packed(sources, path.pack, path.sent_rows)
    moves = path.sends, path.receives
    received = exchange_rows(transport, wire, *moves, path.received_rows, stamp)
    return _packed([received], path.arrange, path.output_rows)


def _packed(sources: Sequence[Tensor], segments: Tensor, rows: int) -> Tensor:
    """Rows as ``ops.pack`` gathers them: the source itself where it has them in their order, as
    aligned as memory of their own."""
    source, *others = sources
    in_order = rows == len(source) and len(segments) == 1 and segments.tolist() == [[0, rows]]
    if in_order and not others and source.is_contiguous() and source.storage_offset() == 0:
        return source
    return ops.pack(sources, segments, rows)


def exchange_rows(
    transport: Transport,
    sent: Tensor,
    sends: list[Move],
    receives: list[Move],
    rows: int,
    stamp: Stamp,
) -> Tensor:
    """Exchange rows (N, width) that are packed: (rows, width), and gradients back the same way."""
    received: Tensor = _Exchange.apply(sent, transport, sends, receives, rows, stamp)  # type: ignore[no-untyped-call]
    return received


def copy_rows_of(transport: Transport, path: Path, x: Tensor, stamp: Stamp) -> Tensor:
    """Copy rows x (N, ...), of any dtype, along a path: (output_rows, ...)."""
    return _as_given(copy_rows(transport, path, [_as_carried(x)], stamp), x)


class _Exchange(torch.autograd.Function):
    """Send packed rows to their readers, and gradients back the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        sent: Tensor,
        transport: Transport,
        sends: list[Move],
        receives: list[Move],
        rows: int,
        stamp: Stamp,
    ) -> Tensor:
        ctx.given, ctx.stamp = (transport, receives, sends, len(sent)), stamp
        received = sent.new_empty(rows, sent.shape[1])
        transport.start(sent, sends, received, receives, stamp=stamp).wait()
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        stamp = ctx.stamp.in_pass(BACKWARD)
        back = _Exchange.apply(grad.contiguous(), *ctx.given, stamp)  # type: ignore[no-untyped-call]
        return back, None, None, None, None, None


# ---- rows of any dtype ---------------------------------------------------------------------------


def _as_carried(x: Tensor) -> Tensor:
    """View (rows, ...) of any dtype as rows (rows, width) of one that kernels and transports know.

    Complex numbers become pairs, with their gradients. What has no gradients (integers, 8-bit
    floats) becomes bytes.
    """
    if x.is_complex():
        return flat_rows(torch.view_as_real(x.resolve_conj()))
    rows = flat_rows(x)
    if rows.dtype in ops.FLOATS or rows.requires_grad:
        return rows
    flat = rows.reshape(-1)
    if flat.stride(0) != 1:  # of one element it may be any
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).view(rows.shape[0], rows.shape[1] * rows.element_size())


def _as_given(rows: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Undo ``_as_carried``: (rows, ...) with the row shape of ``like``, in its dtype or the one
    that the rows were cast to on the way."""
    shape = rows.shape[0], *like.shape[1:]
    if like.is_complex():
        return torch.view_as_complex(rows.reshape(*shape, 2))
    if rows.dtype in (dtype, like.dtype):
        return rows.reshape(shape)
    return rows.view(like.dtype).view(shape) if rows.numel() else like.new_empty(shape)


# ---- sums ----------------------------------------------------------------------------------------


class AllPairs:
    """One row from each rank of a group to each other rank."""

    def __init__(self, ranks: range, rank: int) -> None:
        self.ranks = ranks
        self._rank = rank
        self.agreed: set[int] = set()

    @cached_property
    def sends(self) -> list[Move]:
        return [Move(peer, 0, 1) for peer in self.ranks if peer != self._rank]

    @cached_property
    def receives(self) -> list[Move]:
        return [Move(peer, row, 1) for row, peer in enumerate(self.ranks) if peer != self._rank]


def sum_over(transport: Transport, pairs: AllPairs, x: Tensor, stamp: Stamp) -> Tensor:
    """Sum every rank's x, in float32 or wider and in the ranks' order: the same bits on all ranks.
    The gradient is the sum of their gradients.

    Losses and auxiliary losses need it over the ranks that compute the same sequences: the
    micro-batch's own group, whatever group a module was built with.
    """
    if len(pairs.ranks) <= 1:
        return x.clone()
    agree_once(transport, pairs, stamp)
    out: Tensor = _Sum.apply(x, transport, pairs, stamp)  # type: ignore[no-untyped-call]
    return out


def sum_by_sequence(x: Tensor, bounds: Tensor) -> Tensor:
    """Sum (T, ...) to (sequences, ...), bounds (sequences + 1,), in float32 or wider."""
    if len(bounds) == 1:
        return x[:0]  # of no sequence
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    flat = wide.flatten(1) if x.dim() > 1 else wide.unsqueeze(1)
    sizes = bounds.diff().to(torch.int64)
    sums = torch.segment_reduce(flat, "sum", lengths=sizes, axis=0, initial=0)
    return sums.to(x.dtype).view(len(sizes), *x.shape[1:])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transport: Transport, pairs: AllPairs, stamp: Stamp) -> Tensor:
        ctx.given, ctx.stamp = (transport, pairs), stamp
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x
        sent = wide.reshape(1, -1).contiguous()
        parts = sent.repeat(len(pairs.ranks), 1)
        transport.start(sent, pairs.sends, parts, pairs.receives, stamp=stamp).wait()
        return parts.sum(0, dtype=parts.dtype).view_as(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        stamp = ctx.stamp.in_pass(BACKWARD)
        summed = _Sum.apply(grad, *ctx.given, stamp)  # type: ignore[no-untyped-call]
        return summed, None, None, None
