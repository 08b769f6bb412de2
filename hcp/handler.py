"""The handler that layers receive in place of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from hcp import _core, attention, heads, loss
from hcp.exchange import Transport, agree_once, carry, rows_of, signature
from hcp.layout import Layout, Route, Schedule, rows_may_vary, schedule_of, schedule_words
from hcp.plan import Plan

COMM_TYPES: tuple[str, ...] = _core.COMM_TYPES
"""Ways in which keys and values travel: see docs/concepts/attention.md."""


class ContextParallelHandler:
    """Everything that a layer needs of context parallelism, for one rank and micro-batch.

    Immutable, made by :func:`hcp.dispatch`, and passed to layers explicitly: the backward of one
    micro-batch may run while a later one is in its forward. T below is ``rows``.
    """

    def __init__(
        self,
        plan: Plan,
        micro_batch: int,
        transport: Transport,
        *,
        comm_types: Sequence[str] = ("p2p",),
        window_sizes: Sequence[tuple[int, int]] = (),
        sources: Sequence[int] | None = None,
        loss_tokens: float | None = None,
    ) -> None:
        """``comm_types``: those that layers will name, the first being the default.
        ``window_sizes``: sliding windows that compiled layers will name; others are prepared when
        they are first used. ``sources``: the rank that loaded each sequence, for dispatch and
        combine. ``loss_tokens``: of the whole batch, for the loss."""
        layout = Layout(plan, micro_batch, transport.rank)
        self.plan = plan
        self.layout = layout
        self.micro_batch = micro_batch
        self.rows = layout.rows
        """Rows of this rank, T. May be 0."""
        self.degree = layout.degree
        """Ranks that compute these sequences; 0 where this rank has none."""
        self.cu_seqlens = layout.cu_seqlens.to(transport.device)
        """int32 (sequences + 1,): local rows of each sequence, summed."""
        self.position_ids = rows_may_vary(layout.positions.to(transport.device, non_blocking=True))
        """int64 (T,): each row's place in its sequence."""
        lengths = torch.tensor([0, *layout.lengths], dtype=torch.int32)
        self.whole_cu_seqlens = lengths.cumsum(0, dtype=torch.int32).to(transport.device)
        """int32 (sequences + 1,): tokens of each sequence, summed: the rows of sequence_to_head."""
        self.loss_tokens = loss_tokens
        """Loss tokens of the whole batch, None if nobody counted them."""
        self._loss_tokens = None if loss_tokens is None else torch.tensor(loss_tokens, dtype=_F64)
        self._transport = transport
        self._sources = sources
        self._comm_type = comm_types[0]
        self._longest = max(layout.lengths, default=0)
        self._comm_types = tuple(dict.fromkeys(comm_types))
        self._schedules: dict[tuple[str, int, int], Tensor] = {}
        self._read: list[Schedule] = []  # once, and kept for all layers
        for name in self._comm_types:
            for left, right in (_CAUSAL, _FULL, *window_sizes):
                for limit in (right, 0):
                    self._prepare(name, *_window(left, limit))
        self._routes: dict[object, Route] = {}

    def _prepare(self, comm_type: str, left: int, right: int) -> None:
        if comm_type not in COMM_TYPES:
            raise ValueError(f"comm_type is {comm_type!r}, expected one of {COMM_TYPES}")
        if (comm_type, left, right) in self._schedules:
            return
        words = schedule_words(
            self.plan,
            self.micro_batch,
            self._transport.rank,
            comm_type,
            window_size=(left, right),
            transport_key=self._transport.key,
        )
        self._schedules[comm_type, left, right] = words
        self._read.append(schedule_of(words))

    def _words_of(self, comm_type: str, left: int, right: int) -> Tensor:
        """The schedule of a layer."""
        if comm_type not in self._comm_types:
            raise ValueError(
                f"comm_type is {comm_type!r}, expected one of {sorted(self._comm_types)}: "
                "name every type in comm_types= of hcp.dispatch"
            )
        if (comm_type, left, right) not in self._schedules:
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"window_size is {(left, right)} in a compiled layer, expected one that was "
                    "prepared: name it in window_sizes= of hcp.dispatch"
                )
            self._prepare(comm_type, left, right)
        return self._schedules[comm_type, left, right]

    # ---- attention ----

    @overload
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = ...,
        window_size: tuple[int, int] = ...,
        softmax_scale: float | None = ...,
        sinks: Tensor | None = ...,
        softcap: float = ...,
        dropout_p: float = ...,
        return_lse: Literal[False] = ...,
        comm_type: str | None = ...,
    ) -> Tensor: ...

    @overload
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = ...,
        window_size: tuple[int, int] = ...,
        softmax_scale: float | None = ...,
        sinks: Tensor | None = ...,
        softcap: float = ...,
        dropout_p: float = ...,
        return_lse: Literal[True],
        comm_type: str | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        return_lse: bool = False,
        comm_type: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's rows over their whole sequences, forward and backward.

        query (T, H, D), key (T, G, D) and value (T, G, E) with H a multiple of G; float64, float32,
        bfloat16 or float16; returns (T, H, E). ``softmax_scale``: default 1 / sqrt(D).

        ``window_size``: (left, right), FlashAttention's sliding window: the token at i sees those
        from i - left to i + right, -1 being no limit; with ``causal``, none behind i.

        ``sinks`` (H,): a learned logit of each head, one more score in every row's softmax, with no
        value. Its gradient is this rank's share: sum over the domain, as for any parameter.

        ``return_lse``: also the log-sum-exp of each row's scores and sink, (T, H), natural log,
        float32 (float64 for float64), with its gradient.

        ``comm_type``: one of those that the handler was made for (default: the first). Every rank
        of the group calls it with the same arguments. Differentiable once. ``softcap`` and
        ``dropout_p`` other than 0 are refused.

        Raises ValueError for a wrong tensor, HcpError when ranks differ or a peer is gone.
        """
        _refuse_options(softcap, dropout_p)
        left, right = window_size
        window = _window(left, 0 if causal else right)
        words = self._words_of(comm_type or self._comm_type, *window)
        scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = attention.attention(
            _dense_heads(query), _dense_heads(key), _dense_heads(value), sinks, words, scale
        )
        return (out, lse) if return_lse else out

    # ---- rotary embedding ----

    def get_rotary_seq_len(self) -> int:
        """How many positions a table of rotary frequencies must have: the longest sequence's
        tokens, 0 on a rank without rows."""
        return self._longest

    def get_emb_on_this_cp_rank(self, emb: Tensor) -> Tensor:
        """Rows of a table of positions, (positions, ...), for this rank's rows: (T, ...)."""
        self._check_positions("emb", emb)
        return emb[self.position_ids]

    def apply_rotary_pos_emb(self, t: Tensor, freqs: Tensor) -> Tensor:
        """Rotate rows by the angles of their own positions (RoPE, https://arxiv.org/abs/2104.09864).

        t (T, heads, D); freqs (positions, R) or Megatron's (positions, 1, 1, R), the angles of each
        position, both halves, R <= D even: the first R elements of a head are rotated as two
        halves, the rest pass. Returns t's shape and dtype; computed in float32 or wider.
        """
        self._check_positions("freqs", freqs)
        angles = freqs.flatten(1)[self.position_ids].unsqueeze(1)
        rotated = angles.shape[-1]
        wide = t.to(torch.promote_types(t.dtype, angles.dtype))
        turned, passed = wide[..., :rotated], wide[..., rotated:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
        return torch.cat((turned, passed), dim=-1).to(t.dtype)

    def _check_positions(self, name: str, table: Tensor) -> None:
        if not torch.compiler.is_compiling() and table.shape[0] < self._longest:
            raise ValueError(
                f"{name} has {table.shape[0]} positions, expected >= {self._longest} "
                "(get_rotary_seq_len())"
            )

    # ---- rows between ranks ----

    def dispatch(self, x: Tensor) -> Tensor:
        """Rows from the ranks that loaded them to the ranks that compute them, with gradients.

        x (S, ...): the sequences of this micro-batch that this rank loaded, whole, end to end by
        ascending index. Returns (T, ...). Every rank of the domain calls it.
        """
        return self._travel(
            x, self._dispatch_route(reverse=False), self._dispatch_route(reverse=True)
        )

    def combine(self, x: Tensor) -> Tensor:
        """The way back: (T, ...) to (S, ...), so that combine(dispatch(x)) is x."""
        return self._travel(
            x, self._dispatch_route(reverse=True), self._dispatch_route(reverse=False)
        )

    def roll_tensor(self, x: Tensor, shifts: int = -1) -> Tensor:
        """Shift rows along their sequences, across the borders of ranks: (T, ...) to (T, ...).

        As torch.roll within each sequence, but what enters at an end is zeros. The default -1 gives
        every row its successor's value, as labels want. Every rank of the group calls it.
        """
        return self._travel(x, self._roll_route(shifts), self._roll_route(-shifts))

    # ---- whole sequences ----

    def head_slice(self, count: int) -> slice:
        """Which of ``count`` heads this rank has in sequence_to_head: consecutive ones, as even as
        they go, perhaps none; all of them on a rank without rows."""
        if self.degree == 0:
            return slice(0, count)
        return heads.split(count, self.degree)[self._transport.rank - self.layout.first_rank]

    def sequence_to_head(self, x: Tensor) -> Tensor:
        """Rows of some tokens as whole sequences of some heads, for layers that scan sequences
        (Mamba, gated delta nets, convolutions); with gradients.

        x (T, H, ...). Returns (S, h, ...): all tokens of the group's sequences in order, end to end
        (``whole_cu_seqlens``), and the heads ``head_slice(H)``. Every rank of the group calls it.
        """
        if x.dim() < 2 or x.shape[0] != self.rows:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected ({self.rows}, heads, ...)")
        return self._trade(x, x.shape[1], to_heads=True)

    def head_to_sequence(self, x: Tensor, count: int) -> Tensor:
        """The way back: (S, h, ...), of ``count`` heads in all, to (T, H, ...)."""
        own = self.head_slice(count)
        rows, mine = int(self.whole_cu_seqlens[-1]), own.stop - own.start
        if x.dim() < 2 or tuple(x.shape[:2]) != (rows, mine):
            raise ValueError(f"x has shape {tuple(x.shape)}, expected ({rows}, {mine}, ...)")
        return self._trade(x, count, to_heads=False)

    def _trade(self, x: Tensor, count: int, *, to_heads: bool) -> Tensor:
        if x.device.type != self._transport.device.type:
            raise ValueError(f"x is on {x.device}, expected {self._transport.device}")
        if self.degree == 0:
            return x
        self._prepare(heads.A2A, *_FULL)
        schedule = schedule_of(self._schedules[heads.A2A, *_FULL])
        traits = (*signature(x.new_empty(0, count, *x.shape[2:])), *schedule.kind, int(to_heads))
        tag = agree_once(self._transport, schedule, traits)
        out: Tensor = _Trade.apply(x, schedule, self._transport, count, to_heads, tag)  # type: ignore[no-untyped-call]
        return out

    def _dispatch_route(self, *, reverse: bool) -> Route:
        if self._sources is None:
            raise ValueError("the handler has no sources, expected them: who loaded which sequence")
        key = "combine" if reverse else "dispatch"
        if key not in self._routes:
            self._routes[key] = Route.dispatch(
                self.plan, self._sources, self._transport.rank, self.micro_batch, 1, reverse=reverse
            )
        return self._routes[key]

    def _roll_route(self, shift: int) -> Route:
        if shift not in self._routes:
            self._routes[shift] = Route.roll(
                self.plan, self.micro_batch, self._transport.rank, shift
            )
        return self._routes[shift]

    def _travel(self, x: Tensor, route: Route, back: Route) -> Tensor:
        if x.dim() == 0 or x.shape[0] != route.source_rows:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected {route.source_rows} rows")
        if x.device.type != self._transport.device.type:
            raise ValueError(f"x is on {x.device}, expected {self._transport.device}")
        tag = agree_once(self._transport, route, signature(x))
        out: Tensor = _Travel.apply(rows_of(x), route, back, self._transport, tag)  # type: ignore[no-untyped-call]
        return out.reshape(route.output_rows, *x.shape[1:])

    # ---- loss ----

    def loss(self, losses: Tensor, loss_mask: Tensor, *, grad_reduce: str = "sum") -> Tensor:
        """This micro-batch's share of the mean loss over the whole batch.

        losses, loss_mask (T,). The gradients of all shares, summed over the domain and the
        micro-batches, are those of sum(losses * loss_mask) / loss_tokens of the batch, whatever the
        plan. ``grad_reduce="mean"`` is for trainers that average gradients over the domain (DDP,
        FSDP): it multiplies by the domain's size.
        """
        if grad_reduce not in loss.GRAD_REDUCE:
            raise ValueError(f"grad_reduce is {grad_reduce!r}, expected one of {loss.GRAD_REDUCE}")
        self._check_losses(losses, loss_mask)
        if self._loss_tokens is None:
            raise ValueError(
                "the batch's loss tokens are not known, expected samples with a 'loss_mask' in "
                "hcp.dispatch, or use loss_sum"
            )
        scale = float(self._transport.size) if grad_reduce == "mean" else 1.0
        return loss.mean_loss(losses, loss_mask, self._loss_tokens, scale)

    def loss_sum(self, losses: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of losses, number of loss tokens) of this rank's rows, float64, for those who divide
        themselves."""
        self._check_losses(losses, loss_mask)
        return loss.masked_sum(losses.to(_F64), loss_mask), loss_mask.sum(dtype=_F64)

    def _check_losses(self, losses: Tensor, loss_mask: Tensor) -> None:
        if losses.dim() != 1 or losses.shape != loss_mask.shape:
            raise ValueError(
                f"losses has shape {tuple(losses.shape)} and loss_mask {tuple(loss_mask.shape)}, "
                "expected both (rows,)"
            )
        if not torch.compiler.is_compiling() and losses.shape[0] != self.rows:
            raise ValueError(f"losses has {losses.shape[0]} rows, expected {self.rows}")

    def __repr__(self) -> str:
        return (
            f"ContextParallelHandler(micro_batch={self.micro_batch}, degree={self.degree}, "
            f"rows={self.rows})"
        )


_F64 = torch.float64


_CAUSAL, _FULL = (-1, 0), (-1, -1)


def _window(left: int, right: int) -> tuple[int, int]:
    """No limit is -1, however it was said."""
    return max(left, -1), max(right, -1)


def _refuse_options(softcap: float, dropout_p: float) -> None:
    if softcap != 0.0:
        raise ValueError(
            f"softcap is {softcap}, expected 0.0: none of the attention kernels in use caps scores"
        )
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p is {dropout_p}, expected 0.0: no kernel gives the same dropout under every "
            "layout; drop out after the attention instead"
        )


def _dense_heads(rows: Tensor) -> Tensor:
    # Kernels take any stride of rows and heads, but read the elements of a head side by side.
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, route: Route, back: Route, transport: Transport, tag: int
    ) -> Tensor:
        ctx.back, ctx.transport, ctx.tag = back, transport, tag
        return carry(transport, route, rows, tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows = carry(ctx.transport, ctx.back, grad.contiguous(), ctx.tag)
        return rows, None, None, None, None


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        schedule: Schedule,
        transport: Transport,
        count: int,
        to_heads: bool,
        tag: int,
    ) -> Tensor:
        ctx.schedule, ctx.transport, ctx.count = schedule, transport, count
        ctx.to_heads, ctx.tag = to_heads, tag
        return heads.trade(transport, schedule, x, count, to_heads=to_heads, tag=tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        given = ctx.transport, ctx.schedule, grad, ctx.count
        back = heads.trade(*given, to_heads=not ctx.to_heads, tag=ctx.tag)
        return back, None, None, None, None, None
