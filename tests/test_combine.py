"""Combine is dispatch's way back: row for row, bit for bit, and its adjoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import GlooGroups, sequences_of
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

import hcp

Draw = tuple[int, tuple[int, ...], tuple[int, ...]]


@st.composite
def domains(draw: st.DrawFn) -> Draw:
    ranks = draw(st.integers(1, 6))
    lengths = tuple(draw(st.lists(st.integers(1, 20 * ranks), min_size=1, max_size=8)))
    return ranks, lengths, tuple(draw(st.integers(0, ranks - 1)) for _ in lengths)


def handlers(groups: Any, lengths: Any, sources: Any) -> list[hcp.ContextParallelHandler]:
    plan = hcp.plan(lengths, ranks=groups.transport.size, max_tokens_per_rank=24)
    return [
        hcp.ContextParallelHandler(plan, m, groups.transport, sources=sources)
        for m in range(len(plan.micro_batches))
    ]


def loaded_rows(cp: hcp.ContextParallelHandler, sources: Any, rank: int) -> int:
    return sum(
        cp.plan.lengths[s] for s in sequences_of(cp.plan, cp.micro_batch) if sources[s] == rank
    )


def check_round_trip(groups: Any, lengths: Any, sources: Any, dtype: torch.dtype) -> None:
    rank = groups.transport.rank
    generator = torch.Generator().manual_seed(rank)
    for cp in handlers(groups, lengths, sources):
        rows = loaded_rows(cp, sources, rank)
        x = torch.randint(-1000, 1000, (rows, 2, 3), generator=generator).to(dtype)
        there = cp.dispatch(x)
        assert there.shape == (cp.rows, 2, 3)
        assert torch.equal(cp.combine(there), x)


@given(domains(), st.sampled_from([torch.float64, torch.bfloat16, torch.int64, torch.bool]))
def test_combine_undoes_dispatch_bit_for_bit(domain: Draw, dtype: torch.dtype) -> None:
    ranks, lengths, sources = domain
    hcp.loopback(ranks, lambda g: check_round_trip(g, lengths, sources, dtype))


def gloo_round_trip(rank: int, size: int) -> None:
    check_round_trip(GlooGroups(), (40, 7, 1, 19, 3), (2, 0, 1, 1, 0), torch.float32)


def test_combine_undoes_dispatch_on_gloo_ranks() -> None:
    run_ranks(3, gloo_round_trip)


@given(domains())
def test_the_gradient_of_dispatch_is_combine(domain: Draw) -> None:
    ranks, lengths, sources = domain

    def check(groups: Any) -> None:
        rank = groups.transport.rank
        for cp in handlers(groups, lengths, sources):
            x = torch.randn(loaded_rows(cp, sources, rank), 3, requires_grad=True)
            there = cp.dispatch(x)
            weight = torch.randn_like(there)
            (there * weight).sum().backward()
            assert torch.equal(x.grad, cp.combine(weight))
            y = torch.randn(cp.rows, 3, requires_grad=True)
            cp.combine(y).backward(x.detach())
            assert torch.equal(y.grad, cp.dispatch(x.detach()))

    hcp.loopback(ranks, check)


def test_rows_of_the_wrong_number_are_refused() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [5], [0])
        cp.dispatch(torch.zeros(4, 2))

    with pytest.raises(ValueError, match=r"x has shape \(4, 2\), expected 5 rows"):
        hcp.loopback(1, call)


def test_a_handler_without_sources_says_what_it_needs() -> None:
    def call(groups: Any) -> None:
        plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
        hcp.ContextParallelHandler(plan, 0, groups.transport).combine(torch.zeros(5))

    with pytest.raises(ValueError, match="no sources, expected them"):
        hcp.loopback(1, call)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_one_merge_is_never_less_exact_than_a_chain_of_bfloat16_adds(parts: int) -> None:
    """The chain is what a ring does that adds each block's share to its output as it arrives."""
    generator = torch.Generator().manual_seed(parts)
    outs = [torch.randn(500, 2, 8, generator=generator).bfloat16() for _ in range(parts)]
    lses = [torch.randn(500, 2, generator=generator) for _ in range(parts)]
    runs = torch.tensor([[0, 500, part, 0] for part in range(parts)])
    merged, lse = hcp.ops.merge(outs, lses, runs, 500)
    shares = [(part - lse).exp().unsqueeze(-1) for part in lses]
    exact = sum(out.double() * share.double() for out, share in zip(outs, shares, strict=True))
    chain = torch.zeros_like(merged)
    for out, share in zip(outs, shares, strict=True):
        chain += (out * share).bfloat16()
    once, chained = ((x.double() - exact).square().mean().sqrt() for x in (merged, chain))
    print(f"{parts} parts: error {once:.2e} merged once, {chained:.2e} in a chain")
    assert once <= chained
