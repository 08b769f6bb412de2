"""Combine is the inverse of dispatch, row for row and bit for bit, and its adjoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import GlooGroups, sequences_of
from support.ranks import run_ranks

import hcp
import hcp.ops

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
        assert (there.shape, there.dtype) == ((cp.rows, 2, 3), dtype)
        back = cp.combine(there)
        assert (back.shape, back.dtype) == (x.shape, dtype)
        assert back.flatten().view(torch.uint8).equal(x.flatten().view(torch.uint8))


NARROW = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, *NARROW),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.complex128, torch.complex64, torch.complex32),
]


@given(domains(), st.sampled_from(DTYPES))
def test_combine_undoes_dispatch_bit_for_bit(domain: Draw, dtype: torch.dtype) -> None:
    ranks, lengths, sources = domain
    hcp.loopback(ranks, lambda g: check_round_trip(g, lengths, sources, dtype))


def gloo_round_trip(rank: int, size: int) -> None:
    groups = GlooGroups()
    for dtype in (torch.float32, torch.int16, torch.float8_e5m2, torch.complex64, torch.uint16):
        check_round_trip(groups, (40, 7, 1, 19, 3), (2, 0, 1, 1, 0), dtype)


def test_combine_undoes_dispatch_on_gloo_ranks() -> None:
    run_ranks(3, gloo_round_trip)


@given(domains(), st.sampled_from([torch.float32, torch.complex64]))
def test_the_gradient_of_dispatch_is_combine(domain: Draw, dtype: torch.dtype) -> None:
    ranks, lengths, sources = domain

    def check(groups: Any) -> None:
        rank = groups.transport.rank
        for cp in handlers(groups, lengths, sources):
            x = torch.randn(loaded_rows(cp, sources, rank), 3, dtype=dtype, requires_grad=True)
            there = cp.dispatch(x)
            weight = torch.randn_like(there)
            there.backward(weight)
            assert torch.equal(x.grad, cp.combine(weight))
            y = torch.randn(cp.rows, 3, dtype=dtype, requires_grad=True)
            cp.combine(y).backward(x.detach())
            assert torch.equal(y.grad, cp.dispatch(x.detach()))

    hcp.loopback(ranks, check)


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float16),
    (torch.float16, torch.bfloat16),
]


@given(domains(), st.sampled_from(CASTS))
def test_a_cast_on_the_way_is_one_before_or_after_it(
    domain: Draw, cast: tuple[torch.dtype, torch.dtype]
) -> None:
    ranks, lengths, sources = domain
    dtype, to = cast

    def check(groups: Any) -> None:
        for cp in handlers(groups, lengths, sources):
            rows = loaded_rows(cp, sources, groups.transport.rank)
            for travel, n in ((cp.dispatch, rows), (cp.combine, cp.rows)):
                x = torch.randn(n, 2, 3).to(dtype).requires_grad_()
                out = travel(x, dtype=to)
                plain = travel(x).to(to)
                assert out.dtype == to
                assert torch.equal(out, plain)
                grad = torch.randn_like(out)
                grads = [torch.autograd.grad(y, x, grad)[0] for y in (out, plain)]
                assert grads[0].dtype == dtype
                assert torch.equal(*grads)

    hcp.loopback(ranks, check)


@pytest.mark.parametrize(("dtype", "to"), CASTS[:2])
def test_rows_that_are_cast_travel_in_the_smaller_dtype(
    dtype: torch.dtype, to: torch.dtype
) -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [20], [0])
        travelled, start = [], groups.transport.start

        def watched(sent: torch.Tensor, *rest: Any, **options: Any) -> Any:
            travelled.append(sent.dtype)
            return start(sent, *rest, **options)

        groups.transport.start = watched
        x = torch.randn(20 * (groups.transport.rank == 0), 3).to(dtype).requires_grad_()
        cp.dispatch(x, dtype=to).sum().backward()
        assert travelled == [torch.bfloat16] * 2

    hcp.loopback(2, check)


def test_ranks_that_cast_to_different_dtypes_are_told_so() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [40], [0])
        rank = groups.transport.rank
        x = torch.zeros(40 * (rank == 0), 3)
        cp.dispatch(x, dtype=torch.bfloat16 if rank == 0 else None)

    with pytest.raises(hcp.HcpError, match="is in another call: "):
        hcp.loopback(2, call)


@pytest.mark.parametrize(
    ("dtype", "to", "words"),
    [
        (torch.int64, torch.float32, "x is torch.int64, expected one of .*float16"),
        (torch.float32, torch.int64, "dtype is torch.int64, expected one of .* use .to"),
    ],
)
def test_integers_are_not_cast_on_the_way(dtype: torch.dtype, to: torch.dtype, words: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [5], [0])
        cp.combine(torch.zeros(5, dtype=dtype), dtype=to)

    with pytest.raises(ValueError, match=words):
        hcp.loopback(1, call)


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


# ---- results of a step ---------------------------------------------------------------------------


def check_results_of_a_step(groups: Any, lengths: Any, sources: Any) -> None:
    rank = groups.transport.rank
    plan = hcp.plan(lengths, ranks=groups.transport.size, max_tokens_per_rank=24)
    own = [i for i, source in enumerate(sources) if source == rank]
    samples = [{"row": 1000.0 * i + torch.arange(lengths[i])} for i in own]
    step = hcp.dispatch(plan, samples, sources, groups)
    factor = torch.ones((), requires_grad=True)
    rows = step.combine(local.row * factor for _, local in step)
    assert [x.tolist() for x in rows] == [s["row"].tolist() for s in samples]
    sums = step.combine_by_sequence([cp.sequences.sum(local.row * factor) for cp, local in step])
    assert [x.item() for x in sums] == [s["row"].sum().item() for s in samples]
    torch.cat([*rows, *(x[None] for x in sums)]).sum().backward()
    assert factor.grad is not None


@settings(max_examples=40)
@given(domains())
def test_results_of_a_step_come_back_in_the_order_of_the_samples(domain: Draw) -> None:
    ranks, lengths, sources = domain
    lengths, sources = (*lengths, *[1] * ranks), (*sources, *range(ranks))
    hcp.loopback(ranks, lambda g: check_results_of_a_step(g, lengths, sources))


def gloo_results_of_a_step(rank: int, size: int) -> None:
    check_results_of_a_step(GlooGroups(), [50, 3, 1, 30], [2, 0, 2, 1])


def test_gloo_ranks_get_the_results_of_their_samples() -> None:
    run_ranks(3, gloo_results_of_a_step)


def test_gradients_of_results_by_sequence_come_from_the_rank_that_loaded_them() -> None:
    """Rank 1 loaded the sequence, so its 5 counts; rank 0 holds the value of the group."""

    def gradient(groups: Any) -> Any:
        plan = hcp.plan([40], ranks=2, max_tokens_per_rank=20)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport, sources=[1])
        x = torch.full((1, 2), 3.0 + groups.transport.rank, requires_grad=True)
        back = cp.sequences.combine(x)
        (back.sum() * (5.0 + groups.transport.rank)).backward()
        assert x.grad is not None
        return back.tolist(), x.grad.tolist()

    assert hcp.loopback(2, gradient) == [([], [[6.0, 6.0]]), ([[3.0, 3.0]], [[0.0, 0.0]])]


def test_results_of_too_few_micro_batches_are_refused() -> None:
    def call(groups: Any) -> None:
        plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
        step = hcp.dispatch(plan, [{"row": torch.arange(5)}], [0], groups)
        step.combine([])

    with pytest.raises(ValueError, match="results has 0 items, expected 1: one of each micro"):
        hcp.loopback(1, call)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_results_made_with_gradients_come_back_without_them(without: Any) -> None:
    """As the error below advises: rank 0 has no samples."""

    def call(groups: Any) -> list[Any]:
        plan = hcp.plan([5, 3], ranks=2, max_tokens_per_rank=5)
        samples = [{"row": torch.ones(5)}, {"row": torch.ones(3)}] if groups.transport.rank else []
        step = hcp.dispatch(plan, samples, [1, 1], groups)
        factor = torch.full((), 2.0, requires_grad=True)
        rows = [local.row * factor for _, local in step]
        sums = [cp.sequences.sum(x) for (cp, _), x in zip(step, rows, strict=True)]
        with without():
            back = [*step.combine(rows), *step.combine_by_sequence(sums)]
        assert not any(x.requires_grad for x in back)
        return [x.tolist() for x in back]

    assert hcp.loopback(2, call) == [[], [[2.0] * 5, [2.0] * 3, 10.0, 6.0]]


def test_gradients_of_results_are_refused_where_a_rank_has_no_samples() -> None:
    def call(groups: Any, grads: bool) -> None:
        plan = hcp.plan([5], ranks=2, max_tokens_per_rank=8)
        samples = [{"row": torch.ones(5)}] if groups.transport.rank == 1 else []
        step = hcp.dispatch(plan, samples, [1], groups)
        factor = torch.ones((), requires_grad=grads)
        assert len(step.combine(local.row * factor for _, local in step)) == len(samples)

    hcp.loopback(2, lambda groups: call(groups, False))
    with pytest.raises(ValueError, match=r"ranks \[0\] loaded no samples, expected some on every"):
        hcp.loopback(2, lambda groups: call(groups, True))
