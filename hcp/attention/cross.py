"""Cross-attention: queries of one layout against the keys of another, of the same sequences.

In one exchange each rank receives the keys and values that its queries see. It attends to them in
one pass. Masks are aligned bottom right, as FlashAttention's: in a sequence with N queries and M
keys, query i stands at key i + M - N. Where a sequence has several documents, each of its queries
sees the keys of its own; N and M are then those of documents.

T query rows on this rank, K key rows on this rank, S keys that its queries see, H query heads, G
key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp import _core, ops
from hcp.attention.checks import Inputs, check, check_options, scale_of, window_of
from hcp.attention.kernels import (
    Kernel,
    KernelChoice,
    LaunchTable,
    kernel_for,
    scores_of_sinks,
    wide,
)
from hcp.attention.layer import as_kernels_take
from hcp.exchange.agreement import (
    CallKind,
    Stamp,
    agree_once,
    refuse_transforms,
    rows_like,
)
from hcp.exchange.calls import Calls
from hcp.exchange.layout import Layout, buffer_of, tensor_of
from hcp.exchange.move import copy_rows
from hcp.exchange.tables import Entry, Origin, PathTable, places
from hcp.exchange.transport import Transport, flat_rows
from hcp.planning.plan import Plan


class KeyRoute(PathTable):
    """The route of keys to the ranks whose queries see them, between two layouts; and the entries
    that are computed there. ``csrc/include/hcp/hcp.h`` says what each section is."""

    SECTIONS = _core.CROSS_SECTIONS
    PLACES = places(SECTIONS)

    def __init__(self, queries: Layout, keys: Layout, window: tuple[int, int]) -> None:
        """``queries``, ``keys``: this rank's layouts in the two plans. ``window``: as
        FlashAttention has it, (-1, 0) being causal.

        Raises ValueError unless their micro-batches belong together."""
        place = queries.micro_batch, queries.rank, keys.plan.core, keys.micro_batch
        super().__init__(queries.plan.core.cross(*place, *window))
        self.window, self._query_rows = window, queries.rows
        self._blocks: dict[Kernel, Blocks] = {}

    @cached_property
    def entries(self) -> list[Entry]:
        return [Entry(*record) for record in self.records("ENTRIES")]

    def blocks_of(self, kernel: Kernel) -> Blocks:
        """The launches of a kernel; made once for all layers."""
        if kernel not in self._blocks:
            self._blocks[kernel] = Blocks(self, kernel, self._query_rows)
        return self._blocks[kernel]


# ---- blocks --------------------------------------------------------------------------------------


class Blocks(LaunchTable):
    """A kernel's launches, and runs that say where their rows belong: (row, rows, launch, row of
    the launch)."""

    def __init__(self, route: KeyRoute, kernel: Kernel, query_rows: int) -> None:
        given = (buffer_of(route.section(name)) for name in ("ENTRIES", "QUERY_RUNS", "KEY_RUNS"))
        entries, queries, keys = given
        words = _core.join_entries(entries, kernel.packs, queries, keys)
        super().__init__(tensor_of(words, torch.int64))
        self.launch_list = self.launches()
        self.query_runs, self.key_runs = self.section("OUTPUT_RUNS"), self.section("RETURN_RUNS")
        self.query_rows, self.key_rows = query_rows, route.output_rows


class _Attend(torch.autograd.Function):
    """(T, H, D), (S, G, D), (S, G, E) to (T, H, E) and the log-sum-exp (T, H)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        blocks: Blocks,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.kernel, ctx.blocks, ctx.scale = kernel, blocks, scale
        ctx.set_materialize_grads(False)
        parts = [
            kernel.forward(
                launch, query[launch.queries], key[launch.keys], value[launch.keys], scale
            )
            for launch in blocks.launch_list
        ]
        if parts:
            outs, lses = ([part[i] for part in parts] for i in range(2))
            out, lse = ops.merge(outs, lses, blocks.query_runs, blocks.query_rows)
        else:
            out = query.new_zeros(*query.shape[:2], value.shape[2])
            lse = query.new_full(query.shape[:2], -torch.inf, dtype=wide(query.dtype))
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        if not blocks.launch_list:
            return *(torch.zeros_like(x) for x in (query, key, value)), None, None, None
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
        parts = [
            ctx.kernel.backward(
                launch,
                (grad_out[q], None if grad_lse is None else grad_lse[q]),
                (query[q], key[k], value[k], out[q], lse[q]),
                ctx.scale,
            )
            for launch, q, k in ((x, x.queries, x.keys) for x in blocks.launch_list)
        ]
        placed = (
            (query, blocks.query_runs, blocks.query_rows),
            (key, blocks.key_runs, blocks.key_rows),
            (value, blocks.key_runs, blocks.key_rows),
        )
        grads = [
            ops.reduce([flat_rows(part[i]) for part in parts], runs, rows).view_as(whole)
            for i, (whole, runs, rows) in enumerate(placed)
        ]
        return *grads, None, None, None


# ---- the call ------------------------------------------------------------------------------------


class CrossOptions(NamedTuple):
    """The options of a call, as its caller gave them."""

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float


def _expect_branches(queries: Plan, keys: Plan, window: tuple[int, int]) -> None:
    """Raise ValueError for trees of keys, and for those of queries that see some of the keys."""
    keys.core.expect_no_branches("cp.cross_attention")
    core = queries.core
    (core.expect_trees if window == (-1, -1) else core.expect_no_branches)("cp.cross_attention")


class CrossAttention:
    """Makes the calls of cross-attention of a handler. Each route is made once, for all layers."""

    def __init__(
        self, layout: Layout, transport: Transport, calls: Calls, origin: Origin, kernel_family: str
    ) -> None:
        """``layout``, ``origin``: of the queries. ``kernel_family``: whose kernels compute it."""
        self._layout, self._transport, self._calls = layout, transport, calls
        self._origin, self._kernel_family = origin, kernel_family
        self._routes: dict[tuple[object, ...], KeyRoute] = {}

    def attend(
        self, inputs: Inputs, keys: tuple[Layout, Origin], asked: CrossOptions
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`hcp.ContextParallelHandler.cross_attention`."""

        def attended(number: int) -> tuple[Tensor, Tensor]:
            query, key, value, sinks = inputs
            refuse_transforms("cross_attention", query, key, value)
            check_options(asked.softcap, 0.0)
            if query.shape[0] != self._layout.rows:
                raise ValueError(f"query has {query.shape[0]} rows, expected {self._layout.rows}")
            window = window_of(asked.window_size, asked.causal)
            _expect_branches(self._layout.plan, keys[0].plan, window)
            route = self._route(keys[0], window)
            taken = (*as_kernels_take(query, key, value), sinks)
            scale = scale_of(taken[0], asked.softmax_scale)
            _check_inputs(taken, route.source_rows, self._transport.device)
            choice = KernelChoice(self._kernel_family, asked.softcap)
            kernel = kernel_for(taken[0].device, taken[0].dtype, choice)
            kind = self._kind(taken, keys[1], route.window, asked._replace(softmax_scale=scale))
            stamp = Stamp(kind, number, layer=self._calls.layer())
            agree_once(self._transport, route, stamp)
            return self._attended(route, taken, scale, kernel, stamp)

        return self._calls.make("cross_attention", attended, everywhere=True)

    def _kind(
        self, inputs: Inputs, keys: Origin, window: tuple[int, int], asked: CrossOptions
    ) -> CallKind:
        return CallKind(
            "cross_attention",
            self._origin,
            keys_of=[f"{keys.plan:016x}", keys.step, keys.micro_batch],
            query=rows_like(inputs[0]),
            key=rows_like(inputs[1]),
            value=rows_like(inputs[2]),
            window_size=window,
            softmax_scale=asked.softmax_scale,
            softcap=asked.softcap,
            sinks=inputs[3] is not None,
        )

    def _attended(
        self, route: KeyRoute, inputs: Inputs, scale: float, kernel: Kernel, stamp: Stamp
    ) -> tuple[Tensor, Tensor]:
        query, key, value, sinks = inputs
        whole = copy_rows(self._transport, route, [flat_rows(key), flat_rows(value)], stamp)
        sizes = [key.shape[1:].numel(), value.shape[1:].numel()]
        whole_key, whole_value = torch.split(whole, sizes, 1)
        out: Tensor
        lse: Tensor
        out, lse = _Attend.apply(  # type: ignore[no-untyped-call]
            query,
            whole_key.view(-1, *key.shape[1:]),
            whole_value.view(-1, *value.shape[1:]),
            kernel,
            route.blocks_of(kernel),
            scale,
        )
        return (out, lse) if sinks is None else _with_sinks(out, lse, sinks)

    def _route(self, keys: Layout, window: tuple[int, int]) -> KeyRoute:
        place = keys.plan.checksum, keys.micro_batch, window
        if place not in self._routes:
            self._routes[place] = KeyRoute(self._layout, keys, window)
        return self._routes[place]


def _check_inputs(inputs: Inputs, key_rows: int, device: torch.device) -> None:
    """Raise ValueError unless the tensors are this rank's, the keys those of the keys' layout."""
    query, key, value, sinks = inputs
    check((query[:0], key[:0], value[:0], sinks), 0, device)
    for name, x in (("key", key), ("value", value)):
        if x.shape[0] != key_rows:
            raise ValueError(
                f"{name} has {x.shape[0]} rows, expected {key_rows}: this rank's rows in keys="
            )


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A sink is one more score, whose value is 0. A sink of -inf is none."""
    scores = scores_of_sinks(sinks, lse.dtype).expand_as(lse)
    blind = (lse == -torch.inf) & (scores == -torch.inf)  # their difference would be NaN
    own, scores = lse.masked_fill(blind, 0), scores.masked_fill(blind, 0)
    both = torch.logaddexp(own, scores)
    seen = (out * (own - both).exp().unsqueeze(-1)).to(out.dtype)
    return seen, both.masked_fill(blind, -torch.inf)
