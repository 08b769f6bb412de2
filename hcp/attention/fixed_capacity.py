"""Attention over tables of fixed sizes on the device, so that a CUDA graph serves many plans.

A schedule's tables lie in host memory and travel with each launch, which a graph would keep. Here
everything that depends on the plan is read from device memory when the kernels run: where sequences
begin, and which of the gathered keys each span of tokens sees. Every rank of a block gathers the
keys and values of all ranks of it, C rows each, whatever the plan.

C rows of a rank, d ranks of a block, S spans, K rows of arranged keys, H query heads, G key-value
heads, D head size, E head size of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp import _core
from hcp.attention.block_exchange import block_exchange
from hcp.attention.kernels import (
    Attended,
    Kernel,
    KernelChoice,
    Launch,
    ResultGrads,
    kernel_for,
    wide,
)
from hcp.errors import HcpError
from hcp.exchange.agreement import BACKWARD, FORWARD, CallKind, Stamp, agree_once, rows_like
from hcp.exchange.layout import tensor_of
from hcp.exchange.tables import Entry, Move
from hcp.exchange.transport import Transport
from hcp.planning.plan import Plan

SECTIONS = tuple(name for name, _ in _core.FIXED_SECTIONS)
"""The tables, by the names that ``csrc/include/hcp/hcp.h`` describes."""


class Capacity(NamedTuple):
    """The most that tables have room for."""

    rows: int
    """Rows of a rank, C."""
    sequences: int
    """Sequences that a rank has rows of."""
    max_seqlen: int
    """Tokens of the longest sequence."""
    ranks: int
    """Ranks of a block, d. A sequence is computed within one."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of each table."""
        return _core.fixed_sizes(*self)


class FixedTables:
    """Tables on a device, replaced for each micro-batch in the same memory."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.capacity = capacity
        self._words = torch.zeros(sum(capacity.sizes), dtype=torch.int64, device=device)
        parts = dict(zip(SECTIONS, torch.split(self._words, list(capacity.sizes)), strict=True))
        self.positions = parts["POSITIONS"]
        """int64 (C,)"""
        self.empty = torch.ones_like(parts["EMPTY"], dtype=torch.bool)
        """bool (C,): rows that hold no token."""
        # Each in memory of its own: FlashAttention-4 wants it at 16 bytes.
        self.query_bounds = torch.zeros_like(parts["QUERY_BOUNDS"], dtype=torch.int32)
        self.key_bounds = torch.zeros_like(parts["KEY_BOUNDS"], dtype=torch.int32)
        self._sources = parts["EMPTY"], parts["QUERY_BOUNDS"], parts["KEY_BOUNDS"]
        self.keys = parts["KEYS"] if capacity.ranks > 1 else None
        """int64 (K,): the gathered row of each key."""
        self.places = parts["PLACES"].view(2, -1) if capacity.ranks > 1 else None
        """int64 (2, d C): where each gathered row lies among the keys; K - 1 if nowhere."""
        self.loaded = "no plan"
        """Whose tables they are, in words."""

    def load(self, words: Tensor, name: str) -> None:
        """Copy the tables of a micro-batch, named in words: one copy to the device and three
        launches."""
        self.loaded = name
        on_gpu = self._words.device.type == "cuda"
        self._words.copy_(words.pin_memory() if on_gpu else words, non_blocking=on_gpu)
        for table, source in zip(
            (self.empty, self.query_bounds, self.key_bounds), self._sources, strict=True
        ):
            table.copy_(source)


def words_of(capacity: Capacity, plan: Plan, micro_batch: int, rank: int) -> Tensor:
    """Make the tables of a rank in one tensor on the host.

    Raises ValueError for a micro-batch that any rank of the block has no room for, alike on all of
    them.
    """
    words = tensor_of(plan.core.fixed(micro_batch, rank, *capacity), torch.int64)
    return words[-sum(capacity.sizes) :]  # the tables lie end to end


class FixedLaunch(Launch):
    """One launch of all spans, whose bounds are on the device alone."""

    bounds_change = True

    def __init__(self, tables: FixedTables, window: tuple[int, int]) -> None:
        capacity = tables.capacity
        queries, keys = min(capacity.rows, capacity.max_seqlen), capacity.max_seqlen
        super().__init__([Entry(0, queries, 0, keys, 1 - queries, keys - queries)])
        self.window = window
        self._bounds = tables.query_bounds, tables.key_bounds


class Dense:
    """The formula over tables on the device, for float32 and float64: it computes all pairs of the
    capacity, and is meant for tests."""

    dtypes = (torch.float64, torch.float32)

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = self._scores(launch, query, key, scale)
        lse = scores.logsumexp(-1)
        out = self._weights(scores, lse) @ _for_heads(value, query)
        return out.transpose(0, 1).contiguous(), lse.t()

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (grad_out, _), (query, key, value, out, lse) = grads, attended
        scores = self._scores(launch, query, key, scale)
        weights = self._weights(scores, lse.t())
        grad = grad_out.transpose(0, 1)
        delta = (grad * out.transpose(0, 1)).sum(-1, keepdim=True)
        by_score = weights * (grad @ _for_heads(value, query).mT - delta) * scale
        by_score = by_score.masked_fill(scores == -torch.inf, 0)
        grad_query = by_score @ _for_heads(key, query)
        grad_key = by_score.mT @ query.transpose(0, 1)
        grad_value = (weights.mT @ grad).transpose(0, 1)
        heads = key.shape[1], query.shape[1] // key.shape[1]
        return (
            grad_query.transpose(0, 1),
            torch.unflatten(grad_key.transpose(0, 1), 1, heads).sum(2),
            torch.unflatten(grad_value, 1, heads).sum(2),
        )

    @staticmethod
    def _scores(launch: Launch, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """(H, C, K), -inf where a query does not see a key."""
        bounds, key_bounds = launch.bounds(query.device)
        rows, keys = (torch.arange(len(x), device=x.device) for x in (query, key))
        span = torch.searchsorted(bounds[1:], rows, right=True)
        key_span = torch.searchsorted(key_bounds[1:], keys, right=True)
        last = len(bounds) - 2
        clamped = span.clamp(max=last)
        # The last query of a span sees its last key.
        own = rows - bounds[clamped + 1] + key_bounds[clamped + 1]
        behind = own[:, None] - keys
        seen = (span[:, None] == key_span) & (span[:, None] <= last) & (behind >= 0)
        if launch.window[0] >= 0:
            seen &= behind <= launch.window[0]
        scores = query.transpose(0, 1) @ _for_heads(key, query).mT * scale
        return scores.masked_fill(~seen, -torch.inf)

    @staticmethod
    def _weights(scores: Tensor, lse: Tensor) -> Tensor:
        return (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()


def _for_heads(rows: Tensor, query: Tensor) -> Tensor:
    """(n, G, D) as (H, n, D)."""
    shared = query.shape[1] // rows.shape[1]
    return rows.unsqueeze(2).expand(-1, -1, shared, -1).flatten(1, 2).transpose(0, 1)


def fixed_kernel(device: torch.device, dtype: torch.dtype, family: str) -> Kernel | Dense:
    """The kernel of a dtype whose sequences are data on the device.

    Raises ValueError where there is none.
    """
    if dtype in Dense.dtypes:
        return Dense()
    if device.type != "cuda":
        raise ValueError(
            f"dtype is {dtype} on {device.type}, expected float32 or float64 there: attention of "
            "fixed capacity computes other dtypes on CUDA"
        )
    return kernel_for(device, dtype, KernelChoice(family))


class FixedAttention:
    """Attention of one kind of calls over fixed tables."""

    def __init__(
        self,
        tables: FixedTables,
        transport: Transport,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: tuple[int, int],
        family: str,
    ) -> None:
        capacity = tables.capacity
        self.tables, self.scale = tables, scale
        self.launch = FixedLaunch(tables, window)
        self.kernel = fixed_kernel(query.device, query.dtype, family)
        self._transport = transport
        first = transport.rank - transport.rank % capacity.ranks
        block = range(first, first + capacity.ranks)
        width = key[0].numel() + value[0].numel()
        if capacity.ranks > 1:
            self._block = block_exchange(transport, block, capacity.rows, width, key.dtype)
        self.sends = self.receives = [Move(peer, 0, capacity.rows) for peer in block]
        self.agreed: set[int] = set()
        self.kind = CallKind(
            "attention of fixed capacity",
            query=rows_like(query),
            key=rows_like(key),
            value=rows_like(value),
            window_size=window,
            softmax_scale=scale,
            capacity=list(capacity),
        )

    def stamp(self, number: int, passed: int = FORWARD) -> Stamp:
        """Stamp a call, so that ranks of a block with tables of different micro-batches hear it. A
        graph keeps the stamp of its capture: there they do not."""
        return Stamp(self.kind, number, passed, self.tables.loaded)

    def agree(self, number: int) -> None:
        """Compare the first call with the block's other ranks."""
        if self.tables.capacity.ranks > 1:
            agree_once(self._transport, self, self.stamp(number))

    def expect_loaded(self, name: str) -> None:
        """Raise HcpError for a backward under other tables than its forward's."""
        if self.tables.loaded != name:
            raise HcpError(
                f"rank {self._transport.rank}: the backward of a call of GraphHandler.attention "
                f"finds the tables of {self.tables.loaded}, expected those of its forward, {name}: "
                "load the next micro-batch after the backward, or have a GraphHandler for each "
                "micro-batch under way",
                code="calls-differ",
            )

    def seen_keys(self, key: Tensor, value: Tensor, stamp: Stamp) -> tuple[Tensor, Tensor]:
        """Keys (K, G, D) and values (K, G, E), span after span."""
        tables = self.tables
        if tables.keys is None:
            return key, value
        own = torch.cat([key.flatten(1), value.flatten(1)], 1)
        arranged = self._block.gather(own, stamp).index_select(0, tables.keys)
        keys, values = torch.split(arranged, [key[0].numel(), value[0].numel()], 1)
        return keys.reshape(-1, *key.shape[1:]), values.reshape(-1, *value.shape[1:])

    def return_gradients(self, grad_key: Tensor, grad_value: Tensor, stamp: Stamp) -> list[Tensor]:
        """Gradients of the seen keys and values as those of this rank's rows, summed over the
        block. A rank's own sum of a row is rounded before it is sent, the block's once more."""
        tables, rows = self.tables, self.tables.capacity.rows
        if tables.places is None:
            return [_cleared(grad, tables.empty) for grad in (grad_key, grad_value)]
        grads = torch.cat([grad_key.flatten(1), grad_value.flatten(1)], 1)
        grads[-1].zero_()  # where places point for rows that no span sees
        summed_in = wide(grads.dtype)
        first, second = (grads.index_select(0, places).to(summed_in) for places in tables.places)
        summed = self._block.sum((first + second).to(grads.dtype), stamp)
        parts = torch.split(summed, [grad_key[0].numel(), grad_value[0].numel()], 1)
        shapes = grad_key.shape[1:], grad_value.shape[1:]
        return [part.reshape(rows, *shape) for part, shape in zip(parts, shapes, strict=True)]


def _cleared(rows: Tensor, empty: Tensor) -> Tensor:
    """Rows with 0 where no token is, which kernels leave as memory was."""
    return rows.masked_fill(empty[:, None, None], 0)


class FixedCall(torch.autograd.Function):
    """A call of a FixedAttention, with its number."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, of: FixedAttention, number: int
    ) -> Tensor:
        keys, values = of.seen_keys(key, value, of.stamp(number))
        out, lse = of.kernel.forward(of.launch, query, keys, values, of.scale)
        out = _cleared(out, of.tables.empty)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.of, ctx.number, ctx.loaded = of, number, of.tables.loaded
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        of: FixedAttention = ctx.of
        of.expect_loaded(ctx.loaded)
        stamp = of.stamp(ctx.number, BACKWARD)
        keys, values = of.seen_keys(key, value, stamp)
        attended = query, keys, values, out, lse
        grad_query, grad_key, grad_value = of.kernel.backward(
            of.launch, (grad_out.contiguous(), None), attended, of.scale
        )
        own = of.return_gradients(grad_key, grad_value, stamp)
        return _cleared(grad_query, of.tables.empty), *own, None, None
