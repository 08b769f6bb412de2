"""Attention under a plan, on any kind of domain, against one rank with whole sequences.

A case is data, so that the same one runs in loopback (hypothesis draws it) and on gloo ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hcp
from hcp.exchange import TorchTransport


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    ranks: int
    capacity: int = 4096
    min_degree: int = 1
    max_degree: int | None = None
    comm_type: str = "p2p"
    causal: bool = True
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    dtype: str = "float64"
    seed: int = 0

    def plan(self) -> hcp.Plan:
        return hcp.plan(
            self.lengths,
            ranks=self.ranks,
            max_tokens_per_rank=self.capacity,
            min_degree=self.min_degree,
            max_degree=self.max_degree,
        )


NAMES = ("query", "key", "value", "grad")


def whole_sequences(case: Case) -> list[dict[str, Tensor]]:
    """Inputs of every sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    heads = {"query": case.heads, "key": case.kv_heads, "value": case.kv_heads, "grad": case.heads}
    return [
        {
            name: torch.randn(
                length, heads[name], case.head_dim, generator=generator, dtype=torch.float64
            ).to(getattr(torch, case.dtype))
            for name in NAMES
        }
        | {"loss_mask": torch.ones(length)}
        for length in case.lengths
    ]


def whole_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """One sequence on one rank: softmax(q k^T / sqrt(D)) v, nothing clever."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(query.shape[2])
    if causal:
        tokens = query.shape[0]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def expected(case: Case) -> list[tuple[Tensor, ...]]:
    """Output and gradients of every sequence, in float64 whatever the case's dtype."""
    answers = []
    for sample in whole_sequences(case):
        inputs = [sample[name].double().requires_grad_() for name in NAMES[:3]]
        out = whole_attention(*inputs, case.causal)
        out.backward(sample["grad"].double())
        answers.append((out.detach(), *(x.grad for x in inputs)))
    return answers


def attention_errors(groups: Any, case: Case, plan: hcp.Plan | None = None) -> list[float]:
    """Largest errors of output, dq, dk and dv over the sequences that this rank loaded."""
    plan = plan or case.plan()
    rank = groups.transport.rank
    sources = [(i * 7 + 3) % plan.ranks for i in range(len(case.lengths))]
    samples = [s for s, r in zip(whole_sequences(case), sources, strict=True) if r == rank]
    step = hcp.dispatch(plan, samples, sources, groups, comm_types=(case.comm_type,))
    answers = expected(case)
    worst = [0.0] * 4
    for cp, local in step:
        inputs = [local[name].clone().requires_grad_() for name in NAMES[:3]]
        out = cp.attention(*inputs, causal=case.causal)
        out.backward(local.grad)
        loaded = [i for i in sorted(sequences_of(plan, cp.micro_batch)) if sources[i] == rank]
        for n, computed in enumerate((out.detach(), *(x.grad for x in inputs))):
            back = cp.combine(computed)
            whole = [answers[i][n] for i in loaded]
            back = back.double().cpu()
            want = torch.cat(whole) if whole else back
            assert back.shape == want.shape, (n, back.shape, want.shape)
            assert torch.isfinite(back).all(), (n, case)
            if back.numel():
                worst[n] = max(worst[n], float((back - want).abs().max()))
    return worst


def sequences_of(plan: hcp.Plan, micro_batch: int) -> list[int]:
    return [s for group in plan.micro_batches[micro_batch] for s in group.sequences]


def loopback_error(case: Case, plan: hcp.Plan | None = None, device: str = "cpu") -> float:
    """The largest error of all ranks."""
    results = hcp.loopback(
        case.ranks, lambda groups: attention_errors(groups, case, plan), device=device
    )
    return max(max(errors) for errors in results)


# ---- gloo ranks ----------------------------------------------------------------------------------


class GlooGroups:
    """The whole world as a domain."""

    def __init__(self) -> None:
        self.transport = TorchTransport(dist.new_group(timeout=timedelta(seconds=5)))


def gloo_errors(rank: int, size: int, case: Case) -> list[float]:
    return attention_errors(GlooGroups(), case)
