"""hcp.tools.memory.fit_memory: what steps take is measured, and plans then keep to it."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.memory import Alone, allocated
from torch import Tensor, nn

import hcp
from hcp.tools.memory import fit_memory

WIDTH, VOCABULARY = 32, 400


class Counter:
    """An allocator that counts what steps say they take."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._taken = 0, 0

    def step(self, rows: int) -> None:
        self.calls.append(("step", rows))
        self._taken = 1000 + 50 * rows, 0

    def forward(self, rows: int) -> None:
        self.calls.append(("forward", rows))
        self._taken = 40 * rows, 30 * rows

    def allocated(self, call: Any) -> tuple[int, int]:
        call()
        return self._taken


def test_each_number_of_rows_runs_once_before_it_is_measured() -> None:
    counter = Counter()
    options: Any = {"limit": 100_000, "allocated": counter.allocated}
    model = fit_memory(counter.step, [8, 2, 4, 4], **options)
    assert counter.calls == [("step", n) for n in (2, 2, 4, 4, 8, 8)]
    assert model == hcp.MemoryModel(activation=50, limit=99_000)


def test_a_forward_tells_activations_from_logits() -> None:
    counter = Counter()
    options: Any = {"limit": 100_000, "allocated": counter.allocated, "gathered": 7}
    model = fit_memory(counter.step, range(1, 4), forward=counter.forward, **options)
    assert model == hcp.MemoryModel(activation=30, logit=20, gathered=7, limit=99_000)
    assert counter.calls[:3] == [("step", 1), ("forward", 1), ("step", 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": [1, 2]}, "rows is [1, 2], expected three different numbers or more"),
        ({"rows": [1, 2, 2]}, "rows is [1, 2, 2], expected three different numbers"),
        ({"rows": [1, 2, 0]}, "rows[2] is 0, expected an integer >= 1"),
        ({"rows": 5}, "rows is 5, expected a sequence of integers"),
        ({"share": 1.5}, "share is 1.5, expected a part of the memory, > 0 and <= 1"),
        ({"share": 0}, "share is 0, expected a part of the memory, > 0 and <= 1"),
        ({"limit": 1000}, "limit is 1,000 bytes, expected at least the 1,050 of a micro-batch"),
    ],
)
def test_what_cannot_be_fitted_is_refused(options: dict[str, Any], message: str) -> None:
    counter = Counter()
    given = {"rows": [1, 2, 3], "limit": 10**6, "allocated": counter.allocated, **options}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        fit_memory(counter.step, **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("options", [{}, {"limit": 5}, {"allocated": lambda call: (0, 0)}])
def test_without_a_gpu_nothing_is_measured(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^torch sees no GPU, whose allocator counts"):
        fit_memory(lambda rows: pytest.fail("a step was run"), [1, 2, 3], **options)


def test_a_step_that_keeps_all_scores_is_refused() -> None:
    counter = Counter()

    def bends(call: Any) -> tuple[int, int]:
        call()
        return counter.calls[-1][1] ** 2, 0

    with pytest.raises(ValueError, match="expected at most 10%"):
        fit_memory(counter.step, [64, 128, 256], limit=10**9, allocated=bends)


class Model(nn.Module):
    """One layer with attention, and logits of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, cp: hcp.ContextParallelHandler) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).view(len(tokens), 6, WIDTH // 2).split(2, dim=1)
        out = cp.attention(q, k, v, causal=True).reshape(x.shape)
        logits: Tensor = self.out(F.silu(x + out))
        return logits


def train(model: Model, cp: hcp.ContextParallelHandler) -> None:
    tokens = torch.zeros(cp.rows, dtype=torch.int64)
    losses = F.cross_entropy(model(tokens, cp), tokens, reduction="none")
    losses.sum().backward()  # type: ignore[no-untyped-call]


def plan_of(lengths: list[int], memory: hcp.MemoryModel | None = None) -> hcp.Plan:
    return hcp.plan(lengths, ranks=1, max_tokens_per_rank=10_000, memory=memory)


def handlers_of(plan: hcp.Plan) -> list[hcp.ContextParallelHandler]:
    alone = Alone(0, 1, "cpu")
    return [hcp.ContextParallelHandler(plan, k, alone) for k in range(len(plan.micro_batches))]


def most_of(model: Model, plan: hcp.Plan) -> int:
    return max(allocated(functools.partial(train, model, cp)).peak for cp in handlers_of(plan))


def test_planned_micro_batches_take_no_more_than_the_limit() -> None:
    """From the fit over the plan to the steps, by what the CPU's allocator counts."""
    model, limit = Model(), 4 * 2**20

    def step(rows: int) -> None:
        (cp,) = handlers_of(plan_of([rows]))
        train(model, cp)

    memory = fit_memory(step, [64, 128, 256, 384], limit=limit, allocated=allocated)
    rows = memory.limit // memory.activation
    lengths = [rows, rows // 2, rows // 3, rows // 7, rows // 7, 5, 1] + [rows // 9] * 10
    plan = plan_of(lengths, memory)
    assert len(plan.micro_batches) > 2
    assert 0.9 * limit < most_of(model, plan) <= limit < most_of(model, plan_of(lengths))
    with pytest.raises(ValueError, match=rf"lengths\[1\] is {rows + 1}: the fullest of 1 ranks"):
        plan_of([5, rows + 1], memory)
