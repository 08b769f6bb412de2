"""One mean over the batch, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hcp

WEIGHT = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)


def samples_of(lengths: list[int], kept: float) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [
        {
            "x": torch.randn(n, 3, generator=generator, dtype=torch.float64),
            "loss_mask": (torch.rand(n, generator=generator) < kept).float(),
        }
        for n in lengths
    ]


def whole_batch(samples: list[dict[str, torch.Tensor]]) -> tuple[float, torch.Tensor]:
    weight = WEIGHT.clone().requires_grad_()
    x = torch.cat([s["x"] for s in samples])
    mask = torch.cat([s["loss_mask"] for s in samples])
    loss = (torch.tanh(x @ weight) * mask).sum() / max(float(mask.sum()), 1.0)
    loss.backward()
    return float(loss.detach()), weight.grad


def planned(
    groups: Any, samples: Any, degree: int, grad_reduce: str
) -> tuple[float, torch.Tensor, list[float]]:
    lengths = [len(s["x"]) for s in samples]
    size, rank = groups.transport.size, groups.transport.rank
    plan = hcp.plan(lengths, ranks=size, max_tokens_per_rank=24, min_degree=degree)
    sources = [i % size for i in range(len(lengths))]
    own = [s for i, s in enumerate(samples) if sources[i] == rank]
    weight = WEIGHT.clone().requires_grad_()
    total, sums = 0.0, torch.zeros(2, dtype=torch.float64)
    for cp, local in hcp.dispatch(plan, own, sources, groups):
        losses = torch.tanh(local.x @ weight)
        loss = cp.loss(losses, local.loss_mask, grad_reduce=grad_reduce)
        loss.backward()
        total += float(loss.detach())
        sums += torch.stack(cp.loss_sum(losses.detach(), local.loss_mask))
    return total, weight.grad, sums.tolist()


@given(st.integers(1, 5), st.data())
def test_loss_and_gradients_do_not_depend_on_the_plan(ranks: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20 * ranks), min_size=1, max_size=6))
    kept = data.draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    degree = data.draw(st.integers(1, ranks))
    samples = samples_of(lengths, kept)
    loss, grad = whole_batch(samples)
    for grad_reduce, scale in (("sum", 1), ("mean", ranks)):
        results = hcp.loopback(ranks, lambda g, r=grad_reduce: planned(g, samples, degree, r))
        assert sum(r[0] for r in results) / scale == pytest.approx(loss, abs=1e-12)
        assert torch.allclose(sum(r[1] for r in results) / scale, grad, atol=1e-12)
        count = sum(float(s["loss_mask"].sum()) for s in samples)
        assert sum(r[2][1] for r in results) == count
        assert sum(r[2][0] for r in results) == pytest.approx(loss * count, abs=1e-10)


def one_handler(groups: Any, loss_tokens: float | None = 3.0) -> hcp.ContextParallelHandler:
    plan = hcp.plan([4], ranks=1, max_tokens_per_rank=8)
    return hcp.ContextParallelHandler(plan, 0, groups.transport, loss_tokens=loss_tokens)


def test_masked_rows_do_not_count_whatever_they_hold() -> None:
    def loss(groups: Any) -> float:
        losses = torch.tensor([1.0, float("nan"), 2.0, float("inf")])
        mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
        return float(one_handler(groups).loss(losses, mask, grad_reduce="sum"))

    assert hcp.loopback(1, loss) == [1.0]


def test_a_batch_without_loss_tokens_has_loss_0_and_gradient_0() -> None:
    def check(groups: Any) -> tuple[float, float]:
        losses = torch.ones(4, requires_grad=True)
        loss = one_handler(groups, 0.0).loss(losses, torch.zeros(4), grad_reduce="sum")
        loss.backward()
        return float(loss.detach()), float(losses.grad.abs().max())

    assert hcp.loopback(1, check) == [(0.0, 0.0)]


@pytest.mark.parametrize(
    ("losses", "mask", "options", "message"),
    [
        (torch.ones(3), torch.ones(3), {}, "losses has 3 rows, expected 4"),
        (torch.ones(4), torch.ones(3), {}, r"loss_mask \(3,\), expected both \(rows,\)"),
        (torch.ones(4, 1), torch.ones(4, 1), {}, r"expected both \(rows,\)"),
        (torch.ones(4), torch.ones(4), {"grad_reduce": "max"}, "grad_reduce is 'max', expected"),
        (
            *(torch.ones(4), torch.ones(4), {"grad_reduce": None}),
            r"grad_reduce is None, .* 'sum' where gradients are summed over .* 'mean' where",
        ),
    ],
)
def test_bad_losses_are_refused(losses: Any, mask: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hcp.loopback(
            1, lambda g: one_handler(g).loss(losses, mask, **{"grad_reduce": "sum", **options})
        )


def test_an_unknown_number_of_loss_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="loss tokens are not known"):
        hcp.loopback(
            1, lambda g: one_handler(g, None).loss(*2 * [torch.ones(4)], grad_reduce="sum")
        )
