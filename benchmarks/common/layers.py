"""A pack of sequences, its attention layers on the ranks, and the yardsticks for them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import hcp
from hcp.attention.kernels import KernelChoice, Launch, join, kernel_for
from hcp.attention.prepared import PreparedLayer, prepared_of
from hcp.exchange.layout import Layout
from hcp.exchange.tables import Entry
from hcp.step.handler import ContextParallelHandler

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
"""The largest allowed error of a tensor, over its largest element."""
CHECKED_ROWS = 64
"""The number of the first sequence's rows by which the pack's output is checked."""

PACKS: dict[str, Callable[[int], list[int]]] = {
    "one": lambda tokens: [tokens],
    "eight": lambda tokens: [tokens // 8] * 8,
    "halves": lambda tokens: [*(tokens >> i for i in range(1, 10)), tokens >> 9],
    "many": lambda tokens: [tokens // 64] * 64,
}
"""Packs of so many tokens."""


def rows_for(lengths: Sequence[int], tokens: int, degree: int) -> int:
    """Return the most rows that a rank may hold in a micro-batch: a quarter of so many tokens, or
    what the longest sequence needs at this degree."""
    return max(tokens // 4, -(-max(lengths) // degree) + 2)


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, args: argparse.Namespace, device: torch.device) -> Sizes:
        """Those of the flags --heads, --head-dim and --dtype."""
        heads, kv_heads = args.heads
        return cls(heads, kv_heads, args.head_dim, getattr(torch, args.dtype), device)

    def randn(self, rows: int, heads: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(
            *(rows, heads, self.head_dim),
            dtype=self.dtype,
            device=self.device,
            generator=generator,
        )


def prices_of(sizes: Sizes, flops: float, rate: float) -> hcp.CostModel:
    """Return the prices of such layers on ranks that compute so many operations of floating point
    and receive so many bytes a second."""
    return hcp.CostModel.for_transformer(
        hidden_size=sizes.heads * sizes.head_dim,
        ffn_hidden_size=4 * sizes.heads * sizes.head_dim,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        bytes_per_element=sizes.dtype.itemsize,
        flops_per_byte=max(1, round(flops / rate)),
        launch_flops=10_000_000_000,  # as the pages of results were planned
    )


class Whole:
    """A pack of whole sequences on one rank: the inputs and expected results of all contestants.

    Every rank draws equal inputs. The kernel computes the pack on one rank, in one launch if it
    takes packs. Its output is checked by the formula in float32 (for float64 in float64).
    """

    def __init__(self, lengths: Sequence[int], sizes: Sizes, choice: KernelChoice) -> None:
        self.lengths, self.sizes = list(lengths), sizes
        generator = torch.Generator(sizes.device).manual_seed(1)
        counts = sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads
        self.inputs = [sizes.randn(sum(lengths), count, generator) for count in counts]
        self._kernel = kernel_for(sizes.device, sizes.dtype, choice)
        starts = self.starts().tolist()
        entries = [Entry(at, n, at, n, 1 - n, 0) for at, n in zip(starts, lengths, strict=True)]
        self._launches = join(entries, packs=self._kernel.packs)
        self.wanted = self._results()
        """Output, and the gradients of queries, keys and values."""
        self.largest = [float(x.abs().max()) for x in self.wanted]
        self._check_formula()

    def starts(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)[:-1]

    def forward(self) -> None:
        for launch in self._launches:
            self._forward(launch)

    def both(self) -> None:
        for launch in self._launches:
            self._backward(launch, *self._forward(launch))

    def local(self, layout: Layout, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a rank's rows of each tensor."""
        starts = self.starts()[list(layout.sequences)].repeat_interleave(layout.cu_seqlens.diff())
        rows = (starts + layout.positions).to(self.sizes.device)
        return [x[rows] for x in tensors]

    def _forward(self, launch: Launch) -> tuple[Tensor, Tensor]:
        query, key, value, _ = self.inputs
        q, k = launch.queries, launch.keys
        scale = self.sizes.head_dim**-0.5
        return self._kernel.forward(launch, query[q], key[k], value[k], scale)

    def _backward(self, launch: Launch, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        query, key, value, grad = self.inputs
        q, k = launch.queries, launch.keys
        rows = query[q], key[k], value[k], out, lse
        return self._kernel.backward(launch, (grad[q], None), rows, self.sizes.head_dim**-0.5)

    def _results(self) -> list[Tensor]:
        query, key, value, _ = self.inputs
        results = [torch.empty_like(x) for x in (query, query, key, value)]
        for launch in self._launches:
            out, lse = self._forward(launch)
            rows = launch.queries, launch.queries, launch.keys, launch.keys
            parts = out, *self._backward(launch, out, lse)
            for result, where, part in zip(results, rows, parts, strict=True):
                result[where] = part
        return results

    def _check_formula(self) -> None:
        length = self.lengths[0]
        rows = slice(max(0, length - CHECKED_ROWS), length)
        wide = torch.float64 if self.sizes.dtype == torch.float64 else torch.float32
        query, key, value = (
            x[where].to(wide)
            for x, where in zip(self.inputs, (rows, slice(length), slice(length)), strict=False)
        )
        groups = self.sizes.heads // self.sizes.kv_heads
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(self.sizes.head_dim)
        places = torch.arange(length, device=query.device)
        weights = scores.masked_fill(places > places[rows].unsqueeze(1), -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, value)
        found, largest = [self.wanted[0][rows]], [float(expected.abs().max())]
        check("one rank's kernel", ["output"], found, [expected], largest, self.sizes.dtype)


def check(
    what: str,
    names: Sequence[str],
    found: Sequence[Tensor],
    wanted: Sequence[Tensor],
    largest: Sequence[float],
    dtype: torch.dtype,
) -> None:
    """End the run unless each tensor equals the wanted one, to rounding. ``largest``: the largest
    element of each on all ranks."""
    for name, one, other, most in zip(names, found, wanted, largest, strict=True):
        error = float((one - other).abs().max()) / most if other.numel() else 0.0
        if not error <= TOLERANCE[dtype]:
            raise SystemExit(
                f"rank {dist.get_rank()}: {what}: the {name} is off by {error:.2g} of its largest, "
                f"expected <= {TOLERANCE[dtype]}"
            )


@dataclass
class Layer:
    """One micro-batch of a plan on this rank, with its rows of the inputs."""

    attention: Attention
    inputs: list[Tensor]
    grad: Tensor

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.attention(*self.inputs)

    def both(self) -> tuple[Tensor, ...]:
        """Return the output and the gradients of queries, keys and values."""
        out = self.attention(*self.inputs)
        return out.detach(), *torch.autograd.grad(out, self.inputs, self.grad)


def layer_of(
    what: str,
    whole: Whole,
    cp: ContextParallelHandler,
    attention: Attention,
    own: slice | None = None,
) -> Layer:
    """Return a layer after a check of its output and gradients. ``own``: the rank's rows of the
    pack; None: those of the handler's layout."""

    def local(tensors: Sequence[Tensor]) -> list[Tensor]:
        return whole.local(cp.layout, tensors) if own is None else [x[own] for x in tensors]

    given = local(whole.inputs), local(whole.wanted), whole.largest
    return checked_layer(what, attention, *given, whole.sizes.dtype)


def checked_layer(
    what: str,
    attention: Attention,
    given: Sequence[Tensor],
    wanted: Sequence[Tensor],
    largest: Sequence[float],
    dtype: torch.dtype,
) -> Layer:
    """Return a layer after a check of its output and gradients. ``given``: a rank's rows of
    queries, keys, values and the output's gradient."""
    *inputs, grad = (x.clone() for x in given)
    layer = Layer(attention, [x.requires_grad_() for x in inputs], grad)
    names = ("output", "queries' gradient", "keys' gradient", "values' gradient")
    check(what, names, layer.both(), wanted, largest, dtype)
    return layer


# ---- yardsticks ----------------------------------------------------------------------------------


class OwnCalls:
    """A rank's kernel calls of one layer, alone, on buffers that exist."""

    def __init__(self, run: PreparedLayer, sizes: Sizes) -> None:
        heads, kv_heads = heads_of(run, sizes)
        self._kernel, self._scale = run.kernel, run.scale
        self._query, self._grad = (sizes.randn(run.schedule.query_rows, heads) for _ in range(2))
        self._calls: list[tuple[Launch, Tensor, Tensor]] = []
        stages = zip(run.schedule.stages, run.launches.stages, strict=True)
        for stage, launches in stages if heads else ():
            key, value = (sizes.randn(stage.key_rows, kv_heads) for _ in range(2))
            self._calls += [(launch, key[launch.keys], value[launch.keys]) for launch in launches]

    def forward(self) -> None:
        for call in self._calls:
            self._forward(*call)

    def both(self) -> None:
        for launch, key, value in self._calls:
            out, lse = self._forward(launch, key, value)
            rows = self._query[launch.queries], key, value, out, lse
            grads = self._grad[launch.queries], None
            self._kernel.backward(launch, grads, rows, self._scale)

    def _forward(self, launch: Launch, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernel.forward(launch, self._query[launch.queries], key, value, self._scale)


def run_of(cp: ContextParallelHandler, comm_type: str, sizes: Sizes) -> PreparedLayer:
    """Return the preparation of a causal layer that has run."""
    words = cp._schedules.words_of(comm_type, -1, 0, (sizes.heads, sizes.kv_heads))
    (run,) = prepared_of(words).layers.values()
    return run


def heads_of(run: PreparedLayer, sizes: Sizes) -> tuple[int, int]:
    """Return the numbers of query and key-value heads that this rank computes."""
    if run.heads is None:
        return sizes.heads, sizes.kv_heads
    own = run.heads.own
    return own.stop - own.start, run.heads.key_count


def bytes_received(run: PreparedLayer, sizes: Sizes) -> tuple[int, int]:
    """Return the bytes that this rank receives in a layer's forward, and in both passes.

    Keys and values arrive once forward and once backward, and their gradients once. If rows are
    exchanged for heads, rows of the output and, backward, of the three gradients are exchanged too.
    """
    schedule = run.schedule
    heads, kv_heads = heads_of(run, sizes)
    keys = sum(move.rows for stage in schedule.stages for move in stage.receives) * 2 * kv_heads
    elements = keys, 3 * keys
    if schedule.head_moves is not None:
        others = schedule.head_moves.rows - schedule.rows
        lost, kv_lost = sizes.heads - heads, max(0, sizes.kv_heads - kv_heads)
        forward = others * (heads + 2 * kv_heads) + schedule.rows * lost
        back = others * heads + schedule.rows * (lost + 2 * kv_lost)
        elements = elements[0] + forward, elements[1] + forward + back
    size = sizes.head_dim * sizes.dtype.itemsize
    return elements[0] * size, elements[1] * size
