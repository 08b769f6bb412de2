"""The formula of attention, slow and obvious. It serves where no library has a kernel.

n rows of a call, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hcp.attention.kernels import Attended, Launch, ResultGrads, nan_for_infinity


@dataclass(frozen=True)
class Formula:
    """Computes one entry a launch: dtypes that FlashAttention does not have, and soft-capping."""

    softcap: float = 0.0

    dtypes = (torch.float64, torch.float32)

    packs = False

    def capped(self, softcap: float) -> Formula:
        return Formula(softcap)

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = _masked(launch, self._scores(query, key, scale))
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        out = weights @ _per_query_head(value, query)
        return out.transpose(0, 1).contiguous(), nan_for_infinity(lse).transpose(0, 1)

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (grad_out, grad_lse), (query, key, value, out, lse) = grads, attended
        scores = self._scores(query, key, scale)
        weights = (_masked(launch, scores) - lse.transpose(0, 1).unsqueeze(-1)).exp()
        grad = grad_out.transpose(0, 1)
        delta = (grad_out * out).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse
        delta = delta.transpose(0, 1).unsqueeze(-1)
        grad_scores = weights * (grad @ _per_query_head(value, query).transpose(1, 2) - delta)
        if self.softcap:
            grad_scores = grad_scores * (1 - (scores / self.softcap).square())
        grad_query = grad_scores @ _per_query_head(key, query) * scale
        grad_key = grad_scores.transpose(1, 2) @ query.transpose(0, 1) * scale
        grad_value = weights.transpose(1, 2) @ grad
        return (
            grad_query.transpose(0, 1),
            _per_key_head(grad_key, key),
            _per_key_head(grad_value, value),
        )

    def _scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """Capped scores, (H, queries, keys)."""
        scores = query.transpose(0, 1) @ _per_query_head(key, query).transpose(1, 2) * scale
        return self.softcap * (scores / self.softcap).tanh() if self.softcap else scores


def _masked(launch: Launch, scores: Tensor) -> Tensor:
    """Scores with -inf for the keys that are hidden."""
    (entry,) = launch.entries
    if entry.window == (-1, -1):
        return scores
    keys = torch.arange(entry.key_rows, device=scores.device)
    ahead = keys - torch.arange(entry.query_rows, device=scores.device).unsqueeze(1)
    return scores.masked_fill((ahead < entry.low) | (ahead > entry.high), -torch.inf)


def _per_query_head(rows: Tensor, query: Tensor) -> Tensor:
    """(n, G, D) as (H, n, D)."""
    return rows.transpose(0, 1).repeat_interleave(query.shape[1] // rows.shape[1], 0)


def _per_key_head(grad: Tensor, rows: Tensor) -> Tensor:
    """(H, n, D) summed to (n, G, D)."""
    groups = rows.shape[1]
    by_group = grad.view(groups, grad.shape[0] // groups, *grad.shape[1:])
    return by_group.sum(1).transpose(0, 1)


KERNEL = Formula()
