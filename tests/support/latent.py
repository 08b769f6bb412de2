"""Compare attention over latent rows, under any plan, with one rank and whole sequences.

The model is DeepSeek's: a latent row is a part that is expanded to keys and values, and a rotated
key that all heads share.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hcp
from support.cases import GlooGroups, grad_of, staged_by, whole_attention
from support.features import drawn, rows_here

RANK, SHARED, NOPE, VALUE = 6, 2, 3, 4
"""Elements of a latent row that are expanded, and of the key that heads share; of each head, those
of a key that come out of the former, and those of a value."""


class Up(nn.Module):
    """Expands latent rows to keys and values of ``groups`` heads."""

    def __init__(self, groups: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.groups = groups
        generator = torch.Generator().manual_seed(seed)
        shape = groups * (NOPE + VALUE), RANK
        weight = torch.randn(*shape, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(weight.to(dtype))
        self.bias = nn.Parameter(weight[:, 0].to(dtype))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        latent, shared = rows.split([RANK, SHARED], -1)
        up = nn.functional.linear(latent, self.weight, self.bias)
        key, value = up.view(len(rows), self.groups, NOPE + VALUE).split([NOPE, VALUE], -1)
        shared = shared.unsqueeze(1).expand(-1, self.groups, -1)
        return torch.cat([key, shared], -1), value


@dataclass(frozen=True)
class LatentCase:
    lengths: tuple[int, ...]
    ranks: int
    min_degree: int = 1
    comm_type: Any = "p2p"
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    heads: int = 4
    groups: int = 4
    sinks: bool = False
    sharing: bool = False
    stage_tokens: int = 8192
    checkpointed: bool = False


def inputs_of(case: LatentCase) -> tuple[list[list[Tensor]], Tensor | None]:
    """Queries, latent rows and gradients of every sequence, equal on every rank, and the sinks."""
    shapes = (case.heads, NOPE + SHARED), (RANK + SHARED,), (case.heads, VALUE), (case.heads,)
    drawn_ = [drawn(case.lengths, *shape, seed=i) for i, shape in enumerate(shapes)]
    return drawn_, drawn([1], case.heads, seed=9)[0][0] if case.sinks else None


def expected(case: LatentCase) -> list[list[Tensor]]:
    """Output, log-sum-exp and gradients of queries and latent rows of every sequence; and last the
    gradients of the parameters and the sinks."""
    up, (inputs, sinks) = Up(case.groups), inputs_of(case)
    sinks = None if sinks is None else sinks.requires_grad_()
    answers = []
    for s in range(len(case.lengths)):
        query, rows = (inputs[i][s].clone().requires_grad_() for i in range(2))
        key, value = up(rows)
        out, lse = whole_attention(query, key, value, sinks, case.causal, case.window)
        torch.autograd.backward((out, lse), (inputs[2][s], inputs[3][s]))
        answers.append([out.detach(), lse.detach(), grad_of(query), grad_of(rows)])
    shared = [*up.parameters()] + ([] if sinks is None else [sinks])
    return [*answers, [*map(grad_of, shared)]]


def error(groups: Any, case: LatentCase, plan: hcp.Plan | None = None) -> float:
    """Return the largest error of this rank's rows, and of the sums of parameters' gradients."""
    plan = plan or hcp.plan(
        case.lengths,
        ranks=case.ranks,
        max_tokens_per_rank=4096,
        min_degree=case.min_degree,
    )
    *answers, shared = expected(case)
    up, (inputs, sinks) = Up(case.groups), inputs_of(case)
    sinks = None if sinks is None else sinks.requires_grad_()
    worst = 0.0
    for micro_batch in range(len(plan.micro_batches)):
        cp = hcp.ContextParallelHandler(
            plan, micro_batch, groups.transport, comm_types=(case.comm_type,)
        )
        query, rows = (rows_here(cp, inputs[i]).requires_grad_() for i in range(2))

        def attend(query: Tensor, rows: Tensor, cp: Any = cp) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = cp.attention(
                query,
                rows,
                expand=up,
                causal=case.causal,
                window_size=case.window,
                sinks=sinks,
                return_lse=True,
            )
            return result

        again = (
            (lambda *x: checkpoint(attend, *x, use_reentrant=False))
            if case.checkpointed
            else attend
        )
        out, lse = again(query, rows)
        torch.autograd.backward((out, lse), [rows_here(cp, inputs[i]) for i in (2, 3)])
        found = out.detach(), lse.detach(), grad_of(query), grad_of(rows)
        for i, x in enumerate(found):
            want = rows_here(cp, [answer[i] for answer in answers])
            assert x.shape == want.shape, (i, x.shape, want.shape)
            worst = max(worst, float((x - want).abs().max()) if x.numel() else 0.0)
    own = [grad_of(x) for x in (*up.parameters(), *([] if sinks is None else [sinks]))]
    for total, want in zip(_summed(groups, own), shared, strict=True):
        worst = max(worst, float((total - want).abs().max() / want.abs().max()))
    return worst


def _summed(groups: Any, own: list[Tensor]) -> list[Tensor]:
    """The sums over all ranks, as a trainer would reduce gradients."""
    shares = groups.transport.all_gather_bytes(pickle.dumps(own), "test")
    return [torch.stack(parts).sum(0) for parts in zip(*map(pickle.loads, shares), strict=True)]


def loopback_error(case: LatentCase, plan: hcp.Plan | None = None) -> float:
    with staged_by(case.stage_tokens):
        return max(
            hcp.loopback(case.ranks, lambda groups: error(groups, case, plan), sharing=case.sharing)
        )


def gloo_errors(rank: int, size: int, cases: list[LatentCase]) -> list[float]:
    groups = GlooGroups()
    return [error(groups, replace(case, ranks=size)) for case in cases]
