"""Compare layers of drawn rows, and attention with capped scores, with whole sequences."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import hcp
from hcp._words import CommType
from support.cases import grad_of

TYPES = ("p2p", "all_gather", "a2a")


def drawn(lengths: Any, *shape: int, seed: int = 0, dtype: Any = torch.float64) -> list[Tensor]:
    """Draw one tensor for each sequence, equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, *shape, generator=generator, dtype=torch.float64).to(dtype) for n in lengths
    ]


def handlers(
    groups: Any, lengths: Any, cls: Any = hcp.ContextParallelHandler, **options: Any
) -> list[hcp.ContextParallelHandler]:
    plan_options = {"max_tokens_per_rank": 4096, **options}
    plan = hcp.plan(lengths, ranks=groups.transport.size, **plan_options)
    return [
        cls(plan, m, groups.transport, comm_types=TYPES) for m in range(len(plan.micro_batches))
    ]


def rows_here(cp: hcp.ContextParallelHandler, wholes: list[Tensor]) -> Tensor:
    parts = [wholes[s][start : start + rows] for s, start, rows in cp.layout.spans]
    return torch.cat([wholes[0][:0], *parts])


def scores_of(q: Tensor, k: Tensor, scale: float, softcap: float, hidden: Tensor) -> Tensor:
    """Return the scores, (H, queries, keys)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    return scores.masked_fill(hidden, -math.inf)


def whole_attention(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    tokens = len(q)
    left, right = (n if n >= 0 else tokens for n in window)
    ahead = torch.arange(tokens) - torch.arange(tokens)[:, None]
    scores = scores_of(q, k, q.shape[2] ** -0.5, softcap, (ahead < -left) | (ahead > right))
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).t()


def check_softcap(
    groups: Any, cls: Any, lengths: Any, comm_type: CommType, window: tuple[int, int], degree: int
) -> float:
    """Return the largest error of output, log-sum-exp and gradients."""
    inputs = [drawn(lengths, h, 8, seed=h + i) for i, h in enumerate((4, 2, 2, 4))]
    grad_lse = drawn(lengths, 4, seed=9)
    answers: list[list[Tensor]] = []
    for s in range(len(lengths)):
        leaves = [3 * x[s].clone() for x in inputs[:3]]  # scores well beyond the cap
        leaves = [x.requires_grad_() for x in leaves]
        q, k, v = leaves
        out, lse = whole_attention(q, k, v, window, 2.0)
        torch.autograd.backward((out, lse), (inputs[3][s], grad_lse[s]))
        answers.append([out.detach(), lse.detach(), *map(grad_of, leaves)])
    worst = 0.0
    for cp in handlers(groups, lengths, cls, min_degree=degree):
        leaves = [3 * rows_here(cp, x) for x in inputs[:3]]
        leaves = [x.requires_grad_() for x in leaves]
        out, lse = cp.attention(
            *leaves,
            causal=window[1] == 0,
            window_size=window,
            softcap=2.0,
            return_lse=True,
            comm_type=comm_type,
        )
        torch.autograd.backward((out, lse), (rows_here(cp, inputs[3]), rows_here(cp, grad_lse)))
        results = [out.detach(), lse.detach(), *map(grad_of, leaves)]
        for n, result in enumerate(results):
            want = rows_here(cp, [answer[n] for answer in answers])
            if want.numel():
                worst = max(worst, float((result - want).abs().max()))
    return worst
