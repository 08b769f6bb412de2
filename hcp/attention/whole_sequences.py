"""Rows of some tokens exchanged for whole sequences of some heads, and back, with gradients: for
layers that scan sequences.

T rows on this rank, S rows of its group, H heads, h heads of this rank.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hcp.attention.head_exchange import HeadExchange
from hcp.attention.head_shares import split
from hcp.attention.prepared import Prepared
from hcp.attention.schedules import Schedules
from hcp.exchange.agreement import BACKWARD, Stamp, refuse_transforms
from hcp.exchange.calls import Calls, HandlerPart
from hcp.exchange.layout import Layout, rows_in_whole, whole_stretches
from hcp.exchange.transport import Transport


class WholeSequences(HandlerPart):
    """Rows of some tokens exchanged for whole sequences of some heads, and back: ``cp.whole``.

    The whole sequences are all those of the group, end to end, then each rank's padding.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        calls: Calls,
        schedules: Schedules,
        cu_seqlens: Tensor,
    ) -> None:
        self._layout, self._transport = layout, transport
        self._calls, self._schedules = calls, schedules
        self.cu_seqlens = cu_seqlens
        """int32 (documents + 1,): tokens of each document, summed: the rows of sequence_to_head. A
        sequence is one document, unless its mask begins others. Under ``alignment``, each rank's
        padding follows, as documents of their own."""
        self._rows = int(cu_seqlens[-1])
        self._likes: dict[tuple[object, ...], Tensor] = {}
        """No rows of all heads, for the stamps of calls of one kind."""

    @cached_property
    def stretch_cu_seqlens(self) -> Tensor:
        """int32 (stretches + 1,): tokens of each stretch, summed, then of each rank's padding.
        Without branches, ``cu_seqlens``. A tree of texts is cut at each token that several others
        continue, or one elsewhere, and at the beginning of each branch."""
        with torch.inference_mode(False):
            return whole_stretches(self._layout).to(self._transport.device)

    @property
    def parents(self) -> tuple[int, ...]:
        """The number of the stretch at whose end each stretch goes on, -1: none. It comes before.
        Padding is not counted."""
        return self._layout.parents

    @cached_property
    def row_indices(self) -> Tensor:
        """int64 (T,): each row's place in what ``sequence_to_head`` gives: the whole sequences, end
        to end, then each rank's padding."""
        with torch.inference_mode(False):
            return rows_in_whole(self._layout).to(self._transport.device)

    def head_slice(self, count: int) -> slice:
        """The heads, of ``count``, that ``sequence_to_head`` gives this rank: consecutive ones,
        split as evenly as possible, perhaps none. All of them on a rank without rows."""
        layout = self._layout
        if layout.degree == 0:
            return slice(0, count)
        return split(count, layout.degree)[self._transport.rank - layout.first_rank]

    def sequence_to_head(self, x: Tensor, *, branches: bool = False) -> Tensor:
        """Exchange rows of some tokens for whole sequences of some heads, with gradients.

        Layers that scan sequences need it: Mamba, gated delta nets, convolutions. Every rank of the
        group calls it.

        Args:
            x: (T, H, ...).
            branches: the caller scans trees of texts stretch by stretch, each from the state at the
                end of its parent (``stretch_cu_seqlens``, ``parents``). If not, they are refused.

        Returns:
            (S, h, ...): all tokens of the group's sequences in order, end to end
            (``cu_seqlens`` has the bounds of their documents), and the heads
            ``head_slice(H)``.
        """

        def exchanged(number: int) -> Tensor:
            rows = self._layout.rows
            if x.dim() < 2 or x.shape[0] != rows:
                raise ValueError(f"x has shape {tuple(x.shape)}, expected ({rows}, heads, ...)")
            core = self._layout.plan.core
            said = "cp.whole.sequence_to_head"
            (core.expect_trees if branches else core.expect_no_branches)(said)
            return self._exchange(x, x.shape[1], number, to_heads=True)

        return self._calls.make("whole.sequence_to_head", exchanged)

    def head_to_sequence(self, x: Tensor, count: int) -> Tensor:
        """Undo ``sequence_to_head``.

        Args:
            x: (S, h, ...).
            count: heads in all.

        Returns:
            (T, H, ...).
        """

        def exchanged(number: int) -> Tensor:
            own = self.head_slice(count)
            rows, mine = self._rows, own.stop - own.start
            if x.dim() < 2 or tuple(x.shape[:2]) != (rows, mine):
                raise ValueError(f"x has shape {tuple(x.shape)}, expected ({rows}, {mine}, ...)")
            return self._exchange(x, count, number, to_heads=False)

        return self._calls.make("whole.head_to_sequence", exchanged)

    @cached_property
    def _prepared(self) -> Prepared:
        return self._schedules.of_heads()

    def _exchange(self, x: Tensor, count: int, number: int, *, to_heads: bool) -> Tensor:
        if x.device.type != self._transport.device.type:
            raise ValueError(f"x is on {x.device}, expected {self._transport.device}")
        operation = "whole.sequence_to_head" if to_heads else "whole.head_to_sequence"
        refuse_transforms(operation, x)
        if self._layout.degree == 0:
            return x
        prepared = self._prepared
        kind = count, x.shape[2:], x.dtype
        like = self._likes.get(kind)
        if like is None:
            like = self._likes[kind] = x.new_empty(0, count, *x.shape[2:])
        stamp = self._calls.stamp(operation, number, like, x.dtype)
        if not prepared.schedule.header.in_place:  # signals between GPUs carry the stamp themselves
            self._calls.agree(prepared, stamp)
        given = prepared.heads_of(self._transport, count, count), count, to_heads, stamp
        out: Tensor = _Exchange.apply(x, *given)  # type: ignore[no-untyped-call]
        return out


class _Exchange(torch.autograd.Function):
    """(T, count, ...) to (S, h, ...), or back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: HeadExchange, count: int, to_heads: bool, stamp: Stamp
    ) -> Tensor:
        ctx.given = exchange, count, not to_heads, stamp.in_pass(BACKWARD)
        # Autocast refuses to concatenate some dtypes, which rows may have.
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            if to_heads:
                (out,) = exchange.to_heads([x], [], stamp)
            else:
                (out,) = exchange.to_rows([x], [], 0, stamp)
            return out.contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = _Exchange.apply(grad, *ctx.given)  # type: ignore[no-untyped-call]
        return back, None, None, None, None
