"""Queries of one layout against keys of another equal those on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import GlooGroups
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from test_features import drawn, rows_here
from torch import Tensor

import hcp


def whole(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cap: float) -> tuple[Tensor, ...]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    scores = cap * (scores / cap).tanh() if cap else scores
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], 2)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1).t()


def handler(groups: Any, lengths: Any, degree: int) -> hcp.ContextParallelHandler:
    """One micro-batch."""
    plan = hcp.plan(
        lengths, ranks=groups.transport.size, max_tokens_per_rank=4096, min_degree=degree
    )
    assert len(plan.micro_batches) == 1
    return hcp.ContextParallelHandler(plan, 0, groups.transport)


def error(
    groups: Any, lengths: Any, key_lengths: Any, degrees: tuple[int, int], options: Any
) -> float:
    cap, with_sinks = options
    inputs = [drawn(lengths, 4, 6, seed=1), drawn(key_lengths, 2, 6, seed=2)]
    inputs += [drawn(key_lengths, 2, 5, seed=3)]
    grad, grad_lse = drawn(lengths, 4, 5, seed=4), drawn(lengths, 4, seed=5)
    whole_sinks = torch.randn(4, generator=torch.Generator().manual_seed(6)).double()
    whole_sinks.requires_grad_()
    answers: list[list[Tensor]] = []
    for s in range(len(lengths)):
        leaves = [x[s].clone().requires_grad_() for x in inputs]
        out, lse = whole(*leaves, whole_sinks if with_sinks else None, cap)
        torch.autograd.backward((out, lse), (grad[s], grad_lse[s]))
        answers.append([out.detach(), lse.detach(), *(x.grad for x in leaves)])

    cp, keys = handler(groups, lengths, degrees[0]), handler(groups, key_lengths, degrees[1])
    sides = (cp, keys, keys)
    leaves = [rows_here(c, x).requires_grad_() for c, x in zip(sides, inputs, strict=True)]
    sinks = whole_sinks.detach().clone().requires_grad_() if with_sinks else None
    out, lse = cp.cross_attention(*leaves, keys, sinks=sinks, softcap=cap, return_lse=True)
    torch.autograd.backward((out, lse), (rows_here(cp, grad), rows_here(cp, grad_lse)))
    results = [out.detach(), lse.detach(), *(x.grad for x in leaves)]
    worst = 0.0
    for n, (result, side) in enumerate(zip(results, (cp, cp, *sides), strict=True)):
        want = rows_here(side, [answer[n] for answer in answers])
        assert result.shape == want.shape
        if want.numel():
            worst = max(worst, float((result - want).abs().max()))
    if sinks is not None:
        shares = groups.transport.all_gather_bytes(str(sinks.grad.tolist()).encode())
        total = sum(torch.tensor(eval(share), dtype=torch.float64) for share in shares)
        worst = max(worst, float((total - whole_sinks.grad).abs().max()))
    return worst


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=4),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
    st.data(),
)
def test_cross_attention_of_two_layouts_equals_one_rank(
    ranks: int, pairs: list[tuple[int, int]], cap: float, sinks: bool, data: st.DataObject
) -> None:
    degrees = data.draw(st.tuples(st.integers(1, ranks), st.integers(1, ranks)))
    lengths, key_lengths = zip(*pairs, strict=True)
    errors = hcp.loopback(
        ranks, lambda groups: error(groups, lengths, key_lengths, degrees, (cap, sinks))
    )
    assert max(errors) < 1e-10


def gloo_error(rank: int, size: int) -> float:
    return error(GlooGroups(), (20, 3, 9), (5, 40, 1), (3, 2), (0.0, True))


def test_cross_attention_works_on_gloo_ranks() -> None:
    assert max(run_ranks(3, gloo_error)) < 1e-10


def test_keys_of_other_sequences_are_refused() -> None:
    def call(groups: Any) -> None:
        cp, keys = handler(groups, (5, 6), 1), handler(groups, (7,), 1)
        x, y = torch.zeros(11, 1, 4), torch.zeros(7, 1, 4)
        cp.cross_attention(x, y, y, keys)

    with pytest.raises(ValueError, match=r"queries' micro-batch has sequences \[0, 1\] on 1 ranks"):
        hcp.loopback(1, call)


def test_rows_of_the_wrong_side_are_refused() -> None:
    def call(groups: Any) -> None:
        cp, keys = handler(groups, (5,), 1), handler(groups, (7,), 1)
        x = torch.zeros(5, 1, 4)
        cp.cross_attention(x, x, x, keys)

    with pytest.raises(ValueError, match="key has 5 rows, expected 7: this rank's rows in keys="):
        hcp.loopback(1, call)
