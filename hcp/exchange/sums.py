"""Small sums over the ranks that compute the same sequences: what losses and auxiliary losses need.

The group is the micro-batch's own, whatever group a module was built with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hcp.exchange.agreement import BACKWARD, Stamp, agree_once
from hcp.exchange.tables import Move
from hcp.exchange.transport import Transport


class Everyone:
    """Each rank of a group to each: one row."""

    def __init__(self, ranks: range, rank: int) -> None:
        self.ranks = ranks
        peers = [peer for peer in ranks if peer != rank]
        self.sends = [Move(peer, 0, 1) for peer in peers]
        self.receives = [Move(peer, peer - ranks.start, 1) for peer in peers]
        self.agreed: set[int] = set()


def sum_over(transport: Transport, everyone: Everyone, x: Tensor, stamp: Stamp) -> Tensor:
    """The sum of every rank's x, the same bits on all: in float32 or wider, in the ranks' order.
    Its gradient is the sum of theirs."""
    if len(everyone.ranks) <= 1:
        return x.clone()
    agree_once(transport, everyone, stamp)
    out: Tensor = _Sum.apply(x, transport, everyone, stamp)  # type: ignore[no-untyped-call]
    return out


def by_sequence(x: Tensor, bounds: Tensor) -> Tensor:
    """(T, ...) summed to (sequences, ...), bounds (sequences + 1,); in float32 or wider."""
    if len(bounds) == 1:
        return x[:0]  # of no sequence
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    flat = wide.flatten(1) if x.dim() > 1 else wide.unsqueeze(1)
    sizes = bounds.diff().to(torch.int64)
    sums = torch.segment_reduce(flat, "sum", lengths=sizes, axis=0, initial=0)
    return sums.to(x.dtype).view(len(sizes), *x.shape[1:])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, transport: Transport, everyone: Everyone, stamp: Stamp
    ) -> Tensor:
        ctx.given, ctx.stamp = (transport, everyone), stamp
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x
        sent = wide.reshape(1, -1).contiguous()
        parts = sent.repeat(len(everyone.ranks), 1)
        transport.start(sent, everyone.sends, parts, everyone.receives, stamp=stamp).wait()
        return parts.sum(0, dtype=parts.dtype).view_as(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        stamp = ctx.stamp.in_pass(BACKWARD)
        summed = _Sum.apply(grad, *ctx.given, stamp)  # type: ignore[no-untyped-call]
        return summed, None, None, None
