"""What has to cross the borders of nodes, found slowly from who holds which tokens."""

from __future__ import annotations

import torch
from torch import Tensor

import hcp
from hcp.exchange.layout import Layout


def rows_needed_elsewhere(plan: hcp.Plan, node: int, window: tuple[int, int]) -> int:
    """Count, over all micro-batches, each row of keys once for each node that sees it and does not
    hold it. ``node``: ranks of a node. ``window``: FlashAttention's (left, right)."""
    return sum(
        _seen_elsewhere(plan.lengths[sequence], held, window)
        for batch in range(len(plan.micro_batches))
        for sequence, held in _held_by_nodes(plan, batch, node).items()
    )


def _held_by_nodes(plan: hcp.Plan, batch: int, node: int) -> dict[int, dict[int, Tensor]]:
    """The tokens of each sequence that each node holds."""
    held: dict[int, dict[int, Tensor]] = {}
    for rank in range(plan.ranks):
        for sequence, start, rows in Layout(plan, batch, rank).spans:
            nowhere = torch.zeros(plan.lengths[sequence], dtype=torch.bool)
            tokens = held.setdefault(sequence, {}).setdefault(rank // node, nowhere)
            tokens[start : start + rows] = True
    return held


def _seen_elsewhere(length: int, held: dict[int, Tensor], window: tuple[int, int]) -> int:
    left, right = (length if size < 0 else size for size in window)
    total = 0
    for own in held.values():
        edges = torch.zeros(length + 1, dtype=torch.int64)
        for query in own.nonzero().flatten().tolist():
            edges[max(0, query - left)] += 1
            edges[min(length, query + right + 1)] -= 1
        total += int(((edges.cumsum(0)[:length] > 0) & ~own).sum())
    return total
