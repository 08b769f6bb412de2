"""Slow, obvious versions of the kernels, one row at a time, in float64. They implement the
definitions of csrc/include/hcp/kernels.h.

They are differentiable, so PyTorch's own autograd gives the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

Records = Sequence[Sequence[int]]


def gather(source: Tensor, segments: Records) -> Tensor:
    """Return the rows named by (row, rows), end to end. Row -1 stands for zeros."""
    pieces = [source[:0]]
    for row, rows in segments:
        pieces.append(
            source.new_zeros(rows, source.shape[1]) if row < 0 else source[row : row + rows]
        )
    return torch.cat(pieces)


def pack(sources: Sequence[Tensor], segments: Records) -> Tensor:
    return torch.cat([gather(source, segments) for source in sources], dim=1)


def contributors(row: int, runs: Records) -> list[tuple[int, int]]:
    """Return (part, row of the part) for each record that names the row."""
    return [
        (part, part_row + row - first)
        for first, rows, part, part_row in runs
        if first <= row < first + rows
    ]


def reduce(parts: Sequence[Tensor], runs: Records, rows: int) -> Tensor:
    zeros = parts[0].new_zeros(parts[0].shape[1], dtype=torch.float64)
    sums = [
        sum((parts[p][i].double() for p, i in contributors(row, runs)), zeros)
        for row in range(rows)
    ]
    return torch.stack(sums) if sums else zeros.new_zeros(0, len(zeros))


def merge_head(
    outs: Sequence[Tensor], lses: Sequence[Tensor], head_dim: int
) -> tuple[Tensor, Tensor]:
    """Merge one row and head. `outs` are (D,), `lses` scalars."""
    present = [
        (out.double(), lse.double()) for out, lse in zip(outs, lses, strict=True) if lse != -inf
    ]
    if not present:
        return torch.zeros(head_dim, dtype=torch.float64), torch.tensor(-inf, dtype=torch.float64)
    infinite = [out for out, lse in present if lse == inf]
    if infinite:
        return torch.stack(infinite).mean(0), torch.tensor(inf, dtype=torch.float64)
    stacked_lse = torch.stack([lse for _, lse in present])
    weights = torch.softmax(stacked_lse, 0)
    return weights @ torch.stack([out for out, _ in present]), torch.logsumexp(stacked_lse, 0)


def merge(
    outs: Sequence[Tensor], lses: Sequence[Tensor], runs: Records, rows: int
) -> tuple[Tensor, Tensor]:
    _, heads, head_dim = outs[0].shape
    out = [torch.zeros(0, head_dim, dtype=torch.float64)]
    lse = [torch.zeros(0, dtype=torch.float64)]
    for row in range(rows):
        named = contributors(row, runs)
        for head in range(heads):
            merged = merge_head(
                [outs[p][i, head] for p, i in named], [lses[p][i, head] for p, i in named], head_dim
            )
            out.append(merged[0][None])
            lse.append(merged[1][None])
    return torch.cat(out).reshape(rows, heads, head_dim), torch.cat(lse).reshape(rows, heads)
