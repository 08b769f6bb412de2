"""The numbers that a step gives to loggers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import hcp
import hcp.step.dispatch as dispatch_file
from hcp.planning.ahead import PlanningTime
from hcp.step.stats import StepStats, stats_of
from hcp.tools.loggers import MeanMetrics, log_to

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
    means = MeanMetrics()
    means.add(one)
    means.add(other)
    mean = means.take()
    assert mean["hcp/tokens"] == one.tokens + 5
    assert mean["hcp/plan_hidden"] == 0.5
    assert means.take() == {}


def test_means_of_steps_that_nobody_logs_take_no_more_memory() -> None:
    one = hcp.loopback(4, dispatched)[0].stats()
    means = MeanMetrics()

    def held() -> int:
        for _ in range(50):
            means.add(one)
        return len(pickle.dumps(means))

    assert held() == held()


def test_means_of_steps_are_computed_when_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    step, computed = hcp.loopback(4, dispatched)[0], []

    def counted(*given: Any) -> StepStats:
        computed.append(given)
        return stats_of(*given)

    monkeypatch.setattr(dispatch_file, "stats_of", counted)
    means = MeanMetrics()
    for _ in range(3):
        means.add(step)
    assert computed == []
    assert means.take() == pytest.approx(step.stats().metrics())
    assert len(computed) == 3 + 1


def test_steps_that_nobody_logs_are_kept_up_to_a_number() -> None:
    step, means = hcp.loopback(4, dispatched)[0], MeanMetrics()
    for _ in range(MeanMetrics.MOST + 2):
        means.add(step)
    assert len(means._waiting) == 2
    assert means.take() == pytest.approx(step.stats().metrics())


def test_a_step_without_sequences_has_stats() -> None:
    def run(groups: Any) -> StepStats:
        plan = hcp.plan([], ranks=2, max_tokens_per_rank=8)
        return hcp.dispatch(plan, [], [], groups).stats()

    stats = hcp.loopback(2, run)[0]
    assert (stats.tokens, stats.largest_degree, stats.mean_degree) == (0, 0, 0.0)


class Board:
    """TensorBoard's writer."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))


class Run:
    """A run of W&B."""

    def __init__(self) -> None:
        self.written: list[tuple[dict[str, float], int]] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.written.append((metrics, step))


def test_the_callback_writes_to_every_kind_of_writer() -> None:
    board, run, seen = Board(), Run(), []
    log = log_to(board, run, lambda metrics, step: seen.append((metrics, step)))
    step = hcp.loopback(4, dispatched)[0]
    log(step, 7)
    metrics = step.stats().metrics()
    assert run.written == seen == [(metrics, 7)]
    assert board.written == [(name, value, 7) for name, value in metrics.items()]


def test_the_callback_writes_means_of_several_steps() -> None:
    run = Run()
    log = log_to(run, every=2)
    one = hcp.loopback(4, dispatched)[0].stats()
    for iteration, tokens in enumerate((100, 300, 500)):
        log(one._replace(tokens=tokens), iteration)
    ((metrics, iteration),) = run.written
    assert (metrics["hcp/tokens"], iteration) == (200.0, 1)


def test_the_callback_of_a_rank_without_writers_asks_for_nothing() -> None:
    log_to()(object(), 0)  # type: ignore[arg-type]


def test_the_callback_refuses_what_it_cannot_write_to() -> None:
    with pytest.raises(ValueError, match="the writer is a int, expected add_scalar"):
        log_to(3)
    with pytest.raises(ValueError, match="every is 0, expected"):
        log_to(every=0)
