"""A profiler's trace names the parts of a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hcp

PARTS = {
    "hcp: gather_lengths",
    "hcp: plan",
    "hcp: dispatch",
    "hcp: attention",
    "hcp: attention backward",
    "hcp: exchange",
    "hcp: combine",
}


def run_step(groups: Any) -> Counter[str]:
    """Two micro-batches on two ranks, in turn; the first rank is profiled."""

    def make(share: Any, passage: hcp.Passage) -> hcp.Step:
        lengths, sources, samples = hcp.gather_lengths(share, passage)
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=8, min_degree=2)
        return hcp.dispatch(plan, samples, sources, groups, passage=passage)

    def train() -> None:
        config = hcp.Config(max_seqlen_per_dp_cp_rank=8, plan_ahead=0)
        shares = [[{"x": torch.randn(10, 2, 4)}]]
        for step in hcp.planned_steps(shares, make, groups, config):
            for cp, local in step:
                x = local["x"].requires_grad_()
                out = cp.attention(x, x, x)
                cp.combine(out).sum().backward()

    if groups.rank("dp_cp") != 0:
        train()
        return Counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train()
    return Counter(event.name for event in profiler.events())


def test_a_trace_has_the_parts_of_a_step() -> None:
    seen = hcp.loopback(2, run_step)[0]
    assert {name for name in seen if name.startswith("hcp: ")} == PARTS
    assert seen["hcp: attention"] == seen["hcp: attention backward"] == 2
    assert seen["hcp: dispatch"] == 1


def test_nothing_is_named_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.profiler, "record_function", lambda name: pytest.fail(f"{name} was named")
    )

    def run(groups: Any) -> int:
        plan = hcp.plan([10], ranks=2, max_tokens_per_rank=8)
        samples = [{"x": torch.zeros(10)}] if groups.rank("dp_cp") == 0 else []
        return len(hcp.dispatch(plan, samples, [0], groups))

    assert hcp.loopback(2, run) == [1, 1]
