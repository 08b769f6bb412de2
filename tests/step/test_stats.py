"""The numbers that a step gives to loggers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hcp
from hcp.planning.ahead import PlanningTime
from hcp.step.stats import StepStats, mean_metrics

LENGTHS = [100, 37, 61, 8, 8, 5]


def dispatched(groups: Any, **options: Any) -> hcp.Step:
    plan = hcp.plan(LENGTHS, ranks=4, max_tokens_per_rank=40, min_degrees=[4, 2, 2, 1, 1, 1])
    samples = [{"x": torch.zeros(n)} for n in LENGTHS] if groups.rank("dp_cp") == 0 else []
    return hcp.dispatch(plan, samples, [0] * len(LENGTHS), groups, **options)


@pytest.mark.parametrize(
    ("comm_type", "options"),
    [
        ("p2p", {}),
        ("all_gather", {}),
        ("a2a", {}),
        ("a2a+p2p", {"hierarchical_context_parallel_sizes": [2, 2]}),
    ],
)
def test_layer_bytes_are_those_that_a_layer_receives(comm_type: str, options: Any) -> None:
    def run(groups: Any) -> tuple[int, int]:
        step = dispatched(groups, comm_types=[comm_type], **options)
        assert step.stats().layer_bytes == 0
        before = groups.transport.bytes_received
        for cp, _ in step:
            q, k, v = (
                torch.randn(cp.rows, 4, 8),
                torch.randn(cp.rows, 4, 8),
                torch.randn(cp.rows, 4, 6),
            )
            cp.attention(q, k, v)
        return step.stats().layer_bytes, groups.transport.bytes_received - before

    each = hcp.loopback(4, run)
    assert [told for told, _ in each] == [received for _, received in each]
    assert sum(told for told, _ in each) > 0


def test_stats_are_those_of_the_plan() -> None:
    step = hcp.loopback(4, dispatched)[0]
    plan, report = step.plan, step.plan.report()
    step.planning = PlanningTime(2.0, 0.5)
    stats = step.stats()
    degree = {s: g.degree for b in plan.micro_batches for g in b for s in g.sequences}
    assert stats == StepStats(
        sequences=6,
        tokens=sum(LENGTHS),
        micro_batches=len(plan.micro_batches),
        efficiency=plan.efficiency,
        idle_share=report.idle_share,
        bound_ratio=report.ratio,
        largest_degree=4,
        mean_degree=sum(degree[s] * n for s, n in enumerate(LENGTHS)) / sum(LENGTHS),
        layer_bytes=0,
        plan_seconds=2.0,
        plan_waited=0.5,
    )
    metrics = stats.metrics()
    assert metrics["hcp/plan_hidden"] == 0.75
    assert set(metrics) == {f"hcp/{name}" for name in (*StepStats._fields, "plan_hidden")}


def test_logs_have_means_over_steps() -> None:
    one = hcp.loopback(4, dispatched)[0].stats()
    other = one._replace(tokens=one.tokens + 10, plan_seconds=1.0)
    mean = mean_metrics([one, other])
    assert mean["hcp/tokens"] == one.tokens + 5
    assert mean["hcp/plan_hidden"] == 0.5


def test_a_step_without_sequences_has_stats() -> None:
    def run(groups: Any) -> StepStats:
        plan = hcp.plan([], ranks=2, max_tokens_per_rank=8)
        return hcp.dispatch(plan, [], [], groups).stats()

    stats = hcp.loopback(2, run)[0]
    assert (stats.tokens, stats.largest_degree, stats.mean_degree) == (0, 0, 0.0)
