"""A trainer is told once that its steps take another time than their plans say."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import hcp
from hcp.step import pace
from hcp.step.config import Config
from hcp.step.pace import FIRST, FITTED, IN_A_ROW, Pace
from hcp.step.planner import StepPlanner
from hcp.tools.loopback import loopback

SECONDS = hcp.CostModel.from_seconds(token=1e-3)
UNIT = SECONDS.unit


class Clock:
    """A host's clock, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def plan_of(tokens: int) -> hcp.Plan:
    return hcp.plan([tokens], ranks=1, max_tokens_per_rank=tokens, cost=SECONDS)


def run(clock: Clock, own: Pace, ratios: list[float], rank: int = 0) -> None:
    """Steps of different lengths, each so many times as long as its tokens by 1 ms."""
    for i, ratio in enumerate(ratios):
        tokens = 100 + 37 * i % 60
        own.hand_out(plan_of(tokens), rank)
        clock.now += tokens * 1e-3 * ratio
    own.hand_out(plan_of(100), rank)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "in a row" in r.getMessage()]


@pytest.mark.parametrize("ratio", [1.3, 0.7])
def test_steps_that_take_longer_or_less_than_their_plans_are_told_of_once(
    clock: Clock, caplog: pytest.LogCaptureFixture, ratio: float
) -> None:
    run(clock, Pace(UNIT), [1.0] * FIRST + [ratio] * (3 * IN_A_ROW))
    (said,) = warnings_in(caplog)
    assert f"20 steps in a row took {ratio:.2f} to {ratio:.2f} times what their plans said" in said
    assert "`python -m hcp calibrate --out cost.json`" in said


@pytest.mark.parametrize("ratio", [1.19, 0.81])
def test_a_fifth_off_is_near_enough(
    clock: Clock, caplog: pytest.LogCaptureFixture, ratio: float
) -> None:
    run(clock, Pace(UNIT), [ratio] * (3 * IN_A_ROW))
    assert warnings_in(caplog) == []


def test_19_steps_are_none_of_20_and_a_right_one_starts_anew(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    off = [2.0] * (IN_A_ROW - 1)
    run(clock, own := Pace(UNIT), [1.0] * FIRST + [*off, 1.0] * 4 + off)
    assert warnings_in(caplog) == []
    own.pause()  # an evaluation, say, is no step
    clock.now += 1000
    run(clock, own, [2.0] * IN_A_ROW)
    assert len(warnings_in(caplog)) == 1


def test_the_first_steps_may_take_any_time(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    run(clock, Pace(UNIT), [50.0] * FIRST + [2.0] * (IN_A_ROW - 1))
    assert warnings_in(caplog) == []


def test_prices_without_seconds_are_compared_by_the_ratio_of_steps(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    first = [50.0] * FIRST + [7.0] * FITTED  # whatever a unit takes
    run(clock, Pace(None), first + [7.0] * 60)
    assert warnings_in(caplog) == []
    run(clock, Pace(None), first + [10.0] * IN_A_ROW)
    (said,) = warnings_in(caplog)
    assert "took 1.43 to 1.43 times what their plans said, by the median of 20 steps before" in said


def test_plans_that_misjudge_long_sequences_are_found_without_seconds(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A third of the steps fits the scale; those that follow are long, and attention is dear."""
    own = Pace(None)
    run(clock, own, [1.0] * (FIRST + FITTED))
    for _ in range(IN_A_ROW + 1):
        own.hand_out(plan_of(1000), 0)
        clock.now += 1000 * 1e-3 * 1.5
    assert len(warnings_in(caplog)) == 1


def test_other_ranks_and_evaluations_say_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    run(clock, Pace(UNIT), [3.0] * 60, rank=1)
    with torch.no_grad():
        run(clock, Pace(UNIT), [3.0] * 60)
    assert warnings_in(caplog) == []


def test_the_planner_of_every_trainer_compares(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def steps(groups: Any) -> int:
        planner = StepPlanner.of(Config(32, plan_ahead=0), groups.size("dp_cp"), cost=SECONDS)
        share = [{"tokens": torch.arange(9)}]
        return sum(1 for _ in planner.steps([share] * (FIRST + IN_A_ROW + 1), groups))

    monkeypatch.setattr(pace, "OFF", -1.0)  # every step is off
    with caplog.at_level(logging.WARNING, logger="hcp"):
        assert loopback(2, steps) == [FIRST + IN_A_ROW + 1] * 2
    assert len(warnings_in(caplog)) == 1


def test_a_trainer_that_also_generates_between_steps_is_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def steps(groups: Any) -> None:
        planner = StepPlanner.of(Config(32), 1, cost=SECONDS, compares=False)
        for _ in range(FIRST + IN_A_ROW + 1):
            planner.step([{"tokens": torch.arange(9)}], groups)

    monkeypatch.setattr(pace, "OFF", -1.0)
    loopback(1, steps)
    assert warnings_in(caplog) == []
