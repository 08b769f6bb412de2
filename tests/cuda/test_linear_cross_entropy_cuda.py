"""The linear cross-entropy on a GPU: that of Liger if it is installed, and otherwise torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hcp.integrations.linear_cross_entropy import _library, linear_cross_entropy

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROWS, HIDDEN, WORDS = 2048, 256, 50_000


def of_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none")


def test_losses_and_gradients_are_those_of_the_logits_without_their_memory() -> None:
    try:
        print(_library("cuda").__name__)
    except ImportError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16) * scale
        for n, scale in ((ROWS, 1.0), (WORDS, 0.05))
    )
    labels, grad = torch.randint(0, WORDS, (ROWS,), device="cuda"), torch.rand(ROWS, device="cuda")
    labels[::5] = -100
    found, peaks = [], []
    for loss_of in (of_logits, linear_cross_entropy):
        inputs = x, w = [x.clone().requires_grad_() for x in (hidden, weight)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses = loss_of(x, w, labels)
        found.append((losses, *torch.autograd.grad(losses, inputs, grad)))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    for expected, got in zip(*found, strict=True):
        assert (got - expected).abs().max() < 0.02 * expected.abs().max()
    assert found[1][0].dtype == torch.float32
    assert peaks[0] > 4 * ROWS * WORDS > 4 * peaks[1]


def test_a_sum_and_its_gradients_are_those_of_the_rows() -> None:
    try:
        _library("cuda")
    except ImportError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(WORDS, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.05
    labels = torch.randint(0, WORDS, (ROWS,), device="cuda")
    labels[::5] = -100
    found = []
    for summed in (False, True):
        inputs = x, w = [x.clone().requires_grad_() for x in (hidden, weight)]
        total = linear_cross_entropy(x, w, labels, summed=summed).sum()
        found.append((total, *torch.autograd.grad(total * 1e-3, inputs)))
    for expected, got in zip(*found, strict=True):
        assert (got - expected).abs().max() < 0.02 * expected.abs().max()
