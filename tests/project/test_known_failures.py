"""Faults of other implementations of context parallelism, named after their reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import Case, gloo_errors, loopback_error
from support.features import drawn, handlers, rows_here
from support.ranks import run_ranks
from torch import Tensor

import hcp
from hcp.exchange.layout import Layout

TYPES = ("p2p", "all_gather", "a2a")


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_lengths_not_divisible_by_twice_the_degree(degree: int, comm_type: str) -> None:
    """Transformer Engine #3331: rows at chunk borders were taken for others; real keys were dropped
    and real rows came out as zeros, differently in every run."""
    lengths = tuple(n for n in range(1, 4 * degree + 2) if n % (2 * degree))
    case = Case(lengths, degree, comm_type=comm_type, min_degree=degree, lse=True)
    assert loopback_error(case) < 1e-10


def bits(groups: Any, case: Case) -> list[Tensor]:
    (cp,) = handlers(groups, case.lengths, min_degree=case.min_degree)
    x = rows_here(cp, drawn(case.lengths, 2, 8, dtype=torch.float32)).requires_grad_()
    out = cp.attention(x, x, x, comm_type=case.comm_type)
    out.square().sum().backward()
    assert (out.detach().abs().sum((1, 2)) > 0).all()  # no real row is zeros
    return [out.detach(), x.grad]


@pytest.mark.parametrize("comm_type", TYPES)
def test_such_lengths_give_the_same_bits_in_every_run(comm_type: str) -> None:
    case = Case((37, 11, 5), 3, comm_type=comm_type, min_degree=3)
    runs = [hcp.loopback(3, lambda groups: bits(groups, case)) for _ in range(3)]
    for run in runs[1:]:
        for own, first in zip(run, runs[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own, first, strict=True))


def masked_loss(groups: Any, ranks: int, masked: int | None) -> tuple[float, Tensor, int]:
    """The loss, the weight's gradient, and how many loss tokens this rank has. Of the sequences,
    what rank ``masked`` holds, or all, counts for nothing."""
    lengths = (24, 10)
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=40, min_degree=ranks)
    held: set[tuple[int, int]] = set()
    if masked is not None:
        spans = Layout(plan, 0, masked % ranks).spans if masked >= 0 else []
        held = {(s, t) for s, start, rows in spans for t in range(start, start + rows)}
    everything = masked == -1
    samples = [
        {
            "x": x,
            "loss_mask": torch.tensor(
                [float(not everything and (s, t) not in held) for t in range(len(x))]
            ),
        }
        for s, x in enumerate(drawn(lengths, 2, 4))
    ]
    own = samples if groups.transport.rank == 0 else []
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    total, tokens = 0.0, 0
    for cp, local in hcp.dispatch(plan, own, [0, 0], groups):
        x = local.x * weight
        losses = cp.attention(x, x, x).square().sum((1, 2))
        loss = cp.loss(losses, local.loss_mask, grad_reduce="sum")
        loss.backward()
        total += float(loss.detach())
        tokens += int(local.loss_mask.sum())
    assert weight.grad is not None
    return total, weight.grad, tokens


def test_all_rows_of_a_rank_masked() -> None:
    """Megatron #1764: NaN from a rank without a single loss token."""
    results = hcp.loopback(3, lambda groups: masked_loss(groups, 3, 1))
    assert [tokens > 0 for _, _, tokens in results] == [True, False, True]
    assert results[1][0] == 0.0
    total, grad = sum(r[0] for r in results), sum(r[1] for r in results)

    def on_one_rank(groups: Any) -> tuple[float, Tensor]:
        spans = Layout(
            hcp.plan((24, 10), ranks=3, max_tokens_per_rank=40, min_degree=3), 0, 1
        ).spans
        held = {(s, t) for s, start, rows in spans for t in range(start, start + rows)}
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        kept: list[Tensor] = []
        for s, x in enumerate(drawn((24, 10), 2, 4)):
            plan = hcp.plan([len(x)], ranks=1, max_tokens_per_rank=40)
            cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
            y = x * weight
            losses = cp.attention(y, y, y).square().sum((1, 2))
            kept += [losses[t] for t in range(len(x)) if (s, t) not in held]
        mean = torch.stack(kept).mean()
        mean.backward()
        return float(mean.detach()), weight.grad

    ((want, want_grad),) = hcp.loopback(1, on_one_rank)
    assert total == pytest.approx(want, abs=1e-10)
    assert float(grad) == pytest.approx(float(want_grad), abs=1e-10)


def test_all_rows_of_all_ranks_masked() -> None:
    for total, grad, tokens in hcp.loopback(2, lambda groups: masked_loss(groups, 2, -1)):
        assert (total, float(grad), tokens) == (0.0, 0.0, 0)


@pytest.mark.parametrize("comm_type", TYPES)
def test_gradients_of_queries_keys_and_values(comm_type: str) -> None:
    """Transformer Engine #1557: the output was right under context parallelism, the gradients were
    not."""
    case = Case((64, 16), 4, comm_type=comm_type, min_degree=4, kv_heads=2)
    for errors in run_ranks(4, gloo_errors, case):
        assert max(errors) < 1e-10


def static_rope(groups: Any) -> bool:
    """Whether a sequence's rotated rows are those of one rank, when its degree is not that of the
    group which the model was built with."""
    freqs = torch.arange(48)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
    same = True
    lengths = (40, 9, 3)
    whole = drawn(lengths, 1, 4)
    for cp in handlers(groups, lengths, max_tokens_per_rank=16):
        rotated = cp.apply_rotary_pos_emb(rows_here(cp, whole), freqs.double())
        alone = [rope_of(x, freqs.double()) for x in whole]
        same = same and torch.allclose(rotated, rows_here(cp, alone), atol=1e-12)
    return same


def rope_of(x: Tensor, freqs: Tensor) -> Tensor:
    """One sequence on one rank: pairs as complex numbers."""
    pairs = torch.complex(x[..., :2], x[..., 2:])
    angles = freqs[: len(x), None, :2]
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def test_rotary_embedding_follows_the_micro_batchs_group() -> None:
    """Megatron-Core 0.16 rotates packed rows by their place under the group that a model was built
    with, not under the one that computes them."""
    degrees = hcp.loopback(
        4, lambda g: [cp.degree for cp in handlers(g, (40, 9, 3), max_tokens_per_rank=16)]
    )
    assert len({degree for own in degrees for degree in own}) > 1
    assert all(hcp.loopback(4, static_rope))


@pytest.mark.parametrize("window", [(0, 0), (1, 0), (7, 0), (5, 3), (30, -1)])
def test_windows_in_the_ring(window: tuple[int, int]) -> None:
    """Transformer Engine refuses sliding windows in its ring; a row that sees nothing of a block
    has a log-sum-exp of infinity there, which turned a merged row to zeros."""
    causal = window[1] == 0
    case = Case(
        (50, 9, 2), 4, comm_type="p2p", min_degree=4, window=window, causal=causal, lse=True
    )
    assert loopback_error(case) < 1e-10


def test_a_window_in_the_ring_on_gloo_ranks() -> None:
    case = Case((50, 9, 2), 3, comm_type="p2p", min_degree=3, window=(7, 0), sinks=True)
    for errors in run_ranks(3, gloo_errors, case):
        assert max(errors) < 1e-10


def test_boundaries_are_not_cut_like_rows() -> None:
    """Megatron-Bridge #1964: cu_seqlens went through the function that cuts tokens."""

    def check(groups: Any) -> None:
        (cp,) = handlers(groups, (12, 4), min_degree=2)
        bounds = cp.whole.cu_seqlens
        batch = {
            "tokens": torch.arange(16)[None],
            "cu_seqlens": bounds,
            "cu_seqlens_padded": bounds,
        }
        own = hcp.get_batch_on_this_cp_rank(batch, cp_handler=cp)
        assert own["cu_seqlens"] is own["cu_seqlens_padded"] is bounds

    hcp.loopback(2, check)


def communicates(groups: Any) -> float:
    """The distance of this rank's rows from those computed over its own rows only."""
    (cp,) = handlers(groups, [32], min_degree=4)
    x = rows_here(cp, drawn([32], 2, 4))
    q, k, v = (y.transpose(0, 1) for y in (x, x, x))
    local = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return float((cp.attention(x, x, x) - local.transpose(0, 1)).abs().max())


def test_ranks_do_not_attend_to_their_own_rows_only() -> None:
    """Megatron-Bridge #2667: with sizes missing, context parallelism was off without a word; losses
    were smooth, and wrong."""
    assert min(hcp.loopback(4, communicates)) > 0.05
