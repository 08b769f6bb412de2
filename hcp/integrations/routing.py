"""Losses that balance experts, over sequences or over a whole batch, whatever the plan.

Both are sums over experts of (how often a row chooses it) times (its score), each a mean over rows.
The first factor has no gradient, so that only counts travel, and the backward exchanges nothing.

T rows on this rank, S sequences of its group, K experts of a row, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcp.step.handler import ContextParallelHandler


def sequence_of_rows(cp: ContextParallelHandler, rows: int) -> Tensor:
    """Number the sequence of each of a model's rows on this rank, int64 (rows,): S for padding and
    for rows that stand in, which come last."""
    own = cp.rows - cp.layout.padding
    padding = torch.tensor([rows - own], device=cp.cu_seqlens.device)
    each = torch.cat([cp.cu_seqlens.diff().long(), padding])
    return torch.arange(len(each), device=each.device).repeat_interleave(each, output_size=rows)


def sequence_sums(cp: ContextParallelHandler, x: Tensor, places: Tensor | None = None) -> Tensor:
    """Sum rows of x (rows, W) on this rank over each sequence, with gradients: (S, W).
    `places`: the sequence of each row (default: `sequence_of_rows` of all)."""
    places = sequence_of_rows(cp, len(x)) if places is None else places
    sequences = len(cp.layout.sequences)
    return x.new_zeros(sequences + 1, x.shape[1]).index_add(0, places, x)[:sequences]


def sequence_counts(cp: ContextParallelHandler, chosen: Tensor, experts: int) -> Tensor:
    """Count this rank's rows of each sequence that choose each expert: float64 (S, E).
    `chosen`: int64 (rows, K)."""
    ones = chosen.new_ones(chosen.shape, dtype=torch.float64)
    rows = ones.new_zeros(len(chosen), experts).scatter_add_(1, chosen, ones)
    return sequence_sums(cp, rows)


def expert_counts(cp: ContextParallelHandler, chosen: Tensor, experts: int) -> Tensor:
    """Count this rank's rows that choose each expert: int64 (E,). `chosen`: int64 (rows, K).

    Padding does not count. The sum over the micro-batches and ranks of a step is that of the batch.
    """
    return sequence_counts(cp, chosen, experts).sum(0).long()


def sequence_balance(cp: ContextParallelHandler, counts: Tensor, sums: Tensor) -> Tensor:
    """Return this rank's share of the mean, over all sequences of the batch, of sums over W of
    mean(chosen) * mean(score), which are means over the rows of a sequence.

    `counts` (S, W): of `sequence_counts`. `sums` (S, W), with gradients: of `sequence_sums`. Every
    rank of the group calls it. The shares of all micro-batches and ranks add up to the mean.
    """
    lengths = torch.tensor(cp.layout.lengths, dtype=torch.float64, device=counts.device)
    weights = cp.group.sum(counts) / lengths.square().unsqueeze(1)
    return (weights.to(sums.dtype) * sums).sum() / len(cp.plan.lengths)


def batch_balance(cp: ContextParallelHandler, counts: Tensor, sums: Tensor) -> Tensor:
    """Return this rank's share of the sum over W of mean(chosen) * mean(score), which are means
    over the rows of the whole batch. Nothing is exchanged.

    `counts` (W,): those of `expert_counts`, summed over the whole batch. `sums` (S, W), with
    gradients: of `sequence_sums`.
    """
    weights = counts.double() / batch_tokens(cp) ** 2
    return (weights.to(sums.dtype) * sums.sum(0)).sum()


def batch_tokens(cp: ContextParallelHandler) -> int:
    """The tokens of all sequences of the batch."""
    return sum(cp.plan.lengths)
