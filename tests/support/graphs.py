"""A layer of fixed capacity, run and captured, beside the layer of a micro-batch's own handler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hcp

HEADS = 4, 2, 2, 4


def plans_of_rows(ranks: int, rows: int) -> list[hcp.Plan]:
    """Plans of one micro-batch each, of `ranks` ranks that hold at most so many rows."""
    total = ranks * rows
    packs = [
        (total,),
        (total // 2, total // 4, 3, 1),
        (total // 3, total // 3, total // 4 - 8),
        (rows - 7, *[5] * 9, 1),
        tuple(range(1, 21)),
    ]
    plans = [
        hcp.plan(pack, ranks=ranks, max_tokens_per_rank=rows, min_degree=degree)
        for pack in packs
        for degree in sorted({1, ranks})
        if degree == ranks or max(pack) <= rows
    ]
    return [plan for plan in plans if len(plan.micro_batches) == 1]


class FixedLayer:
    """cp.attention and its backward under a GraphHandler, in fixed memory."""

    def __init__(self, fixed: hcp.GraphHandler, head_dim: int, dtype: torch.dtype) -> None:
        self.fixed, self.device = fixed, fixed.position_ids.device
        self.rows = [
            torch.zeros(fixed.rows, heads, head_dim, device=self.device, dtype=dtype)
            for heads in HEADS
        ]
        for leaf in self.rows[:3]:
            leaf.requires_grad_()
        self.results: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def draw(self, cp: hcp.ContextParallelHandler, seed: int) -> None:
        """Load a micro-batch and draw its rows; the others are 0."""
        self.fixed.load(cp)
        generator = torch.Generator(self.device).manual_seed(1000 * cp.layout.rank + seed)
        with torch.no_grad():
            for x in self.rows:
                x.normal_(generator=generator)
                x[int(cp.cu_seqlens[-1]) :] = 0

    def run(self) -> list[Tensor]:
        """Output and gradients without a graph."""
        *leaves, grad = self.rows
        out = self.fixed.attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def capture(self, cp: hcp.ContextParallelHandler) -> torch.cuda.CUDAGraph:
        """Run once on a side stream, then capture. Returns the graph."""
        self.draw(cp, 0)
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self.run()
        current.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = self.run()
        return self.graph

    def replay(self) -> list[Tensor]:
        assert self.graph is not None
        self.graph.replay()
        return [x.clone() for x in self.results]


def layer_of_plan(cp: hcp.ContextParallelHandler, rows: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients by the micro-batch's own handler, of the first rows."""
    *leaves, grad = (x.detach()[: cp.rows].clone() for x in rows)
    for leaf in leaves:
        leaf.requires_grad_()
    out = cp.attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of one result, over the largest value that is expected there."""
    return max(
        float((a[: len(b)].double() - b.double()).abs().max()) / max(float(b.abs().max()), 1e-30)
        if len(b)
        else 0.0
        for a, b in zip(found, expected, strict=True)
    )
