"""Compare sparse attention under any plan with the published formula over whole sequences.

A layer of DeepSeek-V3.2's kind: latent rows, an indexer that chooses keys, attention to these, and
the indexer's loss, which is the divergence of its scores from the attention's mean weights.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hcp
from support.cases import GlooGroups, grad_of
from support.features import drawn, rows_here
from support.latent import NOPE, RANK, SHARED, VALUE, Up

INDEX_HEADS, INDEX_SIZE, HEADS = 3, 4, 4


@dataclass(frozen=True)
class SparseCase:
    lengths: tuple[int, ...]
    ranks: int
    min_degree: int = 1
    top_k: int = 5
    relu: bool = True
    latent: bool = True
    groups: int = 4
    alignment: int = 1
    checkpointed: bool = False


NAMES = ("query", "rows", "index_query", "index_key", "index_weights", "grad", "grad_lse")


def inputs_of(case: SparseCase) -> dict[str, list[Tensor]]:
    """Inputs of every sequence, equal on every rank. Many keys have an equal score, 0: that of keys
    on which no head of the indexer has a positive product."""
    shapes: tuple[tuple[int, ...], ...] = (
        (HEADS, NOPE + SHARED),
        (RANK + SHARED,),
        (INDEX_HEADS, INDEX_SIZE),
        (INDEX_SIZE,),
        (INDEX_HEADS,),
        (HEADS, VALUE),
        (HEADS,),
    )
    return {
        n: drawn(case.lengths, *s, seed=i)
        for i, (n, s) in enumerate(zip(NAMES, shapes, strict=True))
    }


def loss_of(scores: Tensor, weights: Tensor) -> Tensor:
    """The divergence of the indexer from the attention, summed over rows; -inf: no key."""
    own = scores.log_softmax(-1).masked_fill(scores == -torch.inf, 0)
    wanted = weights.clamp_min(1e-12)
    return (weights * (wanted.log() - own)).sum()


def formula(case: SparseCase, leaves: list[Tensor], up: Up) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and loss of one sequence: all scores, and what is not chosen hidden."""
    query, rows, index_query, index_key, index_weights = leaves
    tokens = len(query)
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    dots = torch.einsum("thd,sd->ths", index_query, index_key)
    dots = dots.relu() if case.relu else dots
    index = torch.einsum("ths,th->ts", dots, index_weights).masked_fill(hidden, -torch.inf)
    order = index.detach().sort(dim=-1, descending=True, stable=True).indices[:, : case.top_k]
    chosen = torch.zeros_like(hidden).scatter(1, order, True) & ~hidden
    key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in up(rows))
    scores = torch.einsum("thd,shd->ths", query, key) * query.shape[2] ** -0.5
    scores = scores.masked_fill(~chosen.unsqueeze(1), -torch.inf)
    weights = scores.softmax(-1)
    out = torch.einsum("ths,shd->thd", weights, value)
    loss = loss_of(index.masked_fill(~chosen, -torch.inf), weights.detach().mean(1))
    return out, scores.logsumexp(-1), loss


def expected(case: SparseCase) -> list[list[Tensor]]:
    """Output, log-sum-exp, loss and gradients of all inputs of every sequence; last the gradients
    of the parameters."""
    up, inputs = Up(case.groups), inputs_of(case)
    answers = []
    for s in range(len(case.lengths)):
        leaves = [inputs[name][s].clone().requires_grad_() for name in NAMES[:5]]
        out, lse, loss = formula(case, leaves, up)
        grads = inputs["grad"][s], inputs["grad_lse"][s], torch.ones_like(loss)
        torch.autograd.backward((out, lse, loss), grads)
        answers.append([out.detach(), lse.detach(), *map(grad_of, leaves)])
    return [*answers, [*map(grad_of, up.parameters())]]


def error(
    groups: Any, case: SparseCase, plan: hcp.Plan | None = None, device: str = "cpu"
) -> float:
    """Return the largest error of this rank's rows, and of the sums of parameters' gradients."""
    plan = plan or hcp.plan(
        case.lengths,
        ranks=case.ranks,
        max_tokens_per_rank=4096,
        min_degree=case.min_degree,
        alignment=case.alignment,
    )
    *answers, shared = expected(case)
    up, inputs, worst = Up(case.groups).to(device), inputs_of(case), 0.0
    for micro_batch in range(len(plan.micro_batches)):
        cp = hcp.ContextParallelHandler(plan, micro_batch, groups.transport)
        padding = cp.layout.padding

        def here(wholes: list[Tensor], cp: Any = cp, padding: int = padding) -> Tensor:
            rows = rows_here(cp, wholes).to(device)
            return torch.cat([rows, rows.new_ones(padding, *rows.shape[1:])])

        leaves = [here(inputs[name]).requires_grad_() for name in NAMES[:5]]

        def layer(*leaves: Tensor, cp: Any = cp) -> tuple[Tensor, ...]:
            query, rows, *indexer = leaves
            indices, scores = cp.sparse.top_k(*indexer, case.top_k, relu=case.relu)
            if case.latent:
                found = cp.sparse.attention(query, rows, indices=indices, expand=up)
            else:
                found = cp.sparse.attention(query, *up(rows), indices=indices)
            out, lse, weights = found
            own = slice(0, cp.rows - cp.layout.padding)
            return out, lse, loss_of(scores[own], weights[own])

        compute = (
            (lambda *x, layer=layer: checkpoint(layer, *x, use_reentrant=False))
            if case.checkpointed
            else layer
        )
        out, lse, loss = compute(*leaves)
        grads = [here(inputs[name]) for name in NAMES[5:]]
        if padding:
            grads[1][-padding:] = 0
            assert not out[-padding:].any()
        torch.autograd.backward((out, lse, loss), [*grads, torch.ones_like(loss)])
        own = slice(0, cp.rows - padding)
        found = [out.detach(), lse.detach(), *map(grad_of, leaves)]
        for i, x in enumerate(found):
            want = rows_here(cp, [answer[i] for answer in answers]).to(device)
            assert x[own].shape == want.shape, (i, x.shape, want.shape)
            worst = max(worst, float((x[own] - want).abs().max()) if want.numel() else 0.0)
    mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in up.parameters()]
    shares = groups.transport.all_gather_bytes(pickle.dumps([x.cpu() for x in mine]), "test")
    totals = [sum(parts) for parts in zip(*map(pickle.loads, shares), strict=True)]
    for total, want in zip(totals, shared, strict=True):
        worst = max(worst, float((total - want).abs().max() / want.abs().max()))
    return worst


def loopback_error(case: SparseCase, plan: hcp.Plan | None = None) -> float:
    return max(hcp.loopback(case.ranks, lambda groups: error(groups, case, plan)))


def gloo_errors(rank: int, size: int, cases: list[SparseCase]) -> list[float]:
    groups = GlooGroups()
    return [error(groups, case) for case in cases]
