"""The sharper bound of benchmarks/studies/slack.py against all plans of tiny batches."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.optimum import optimum, tiny
from support.planning import CHEAP_LAUNCHES

import hcp

np = pytest.importorskip("numpy")
pytest.importorskip("ortools")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from studies import slack  # noqa: E402

pytestmark = pytest.mark.slow  # a solver, which make test does without


def planned(case: dict[str, Any], **more: Any) -> hcp.Plan:
    request = {key: case[key] for key in ("lengths", "ranks", "cost")}
    return hcp.plan(**request, max_tokens_per_rank=case["capacity"], sync="micro_batch", **more)


@settings(max_examples=80, deadline=None)
@given(tiny(), st.data())
def test_no_prices_at_all_prove_more_than_the_best_plan(
    case: dict[str, Any], data: st.DataObject
) -> None:
    plan = planned(case)
    batch = slack.Batch(plan)
    price = st.integers(1, slack.WHOLE // len(case["lengths"]))
    drawn = data.draw(st.lists(price, min_size=len(batch.lengths), max_size=len(batch.lengths)))
    best = optimum(**case, sync="micro_batch")
    prices = np.array(drawn, dtype=np.int64)
    assert slack.proven(batch, prices, 4 * plan.makespan)[0] <= best


@settings(max_examples=12, deadline=None)
@given(tiny())
def test_the_sharper_bound_lies_between_the_bound_and_the_best_plan(case: dict[str, Any]) -> None:
    plan = planned(case)
    assert plan.bound <= slack.sharper(plan, 3) <= optimum(**case, sync="micro_batch")


def test_what_a_micro_batch_is_worth_is_no_less_than_any_is() -> None:
    """Groups drawn at random, some of several sequences."""
    random = Random(3)
    lengths = [random.randint(200, 6000) for _ in range(40)]
    plan = hcp.plan(lengths, ranks=16, max_tokens_per_rank=1000, sync="micro_batch")
    batch = slack.Batch(plan)
    prices = np.array([random.randint(1, slack.WHOLE // 40) for _ in lengths], dtype=np.int64)
    worth, price = slack.Worth(batch, prices), dict(zip(batch.order, prices, strict=True))
    for groups in plan.micro_batches:
        height = max(plan.group_time(group) for group in groups)
        value = sum(int(price[s]) for group in groups for s in group.sequences)
        room = slack.Room.of(batch, height)
        assert worth.most(room, 0) >= value
        assert worth.most(room, value - 1) == worth.most(room, 0)


def test_as_many_groups_count_as_there_are_ranks_for() -> None:
    """Six sequences that need two ranks each, on four ranks."""
    plan = hcp.plan([1900] * 6, ranks=4, max_tokens_per_rank=1000, sync="micro_batch")
    batch = slack.Batch(plan)
    room = slack.Room.of(batch, plan.cost.time(1900, 2) + plan.cost.launch)
    prices = np.array([10, 20, 30, 40, 50, 60], dtype=np.int64)
    assert slack.Worth(batch, prices).most(room, 0) == 60 + 50


def test_idle_ranks_beside_unlike_sequences_are_proven() -> None:
    """1.1 to 8 times what a rank holds, no two alike: none fills the time of another."""
    random = Random(1)
    lengths = [round(1000 * 1.1 * 1.2 ** random.uniform(0, 11)) for _ in range(24)]
    request = {"ranks": 8, "max_tokens_per_rank": 1000, "sync": "micro_batch"}
    plan = hcp.plan(lengths, **request, cost=CHEAP_LAUNCHES)
    assert 1.02 * plan.bound <= slack.sharper(plan, 6) <= plan.makespan


@pytest.mark.parametrize(("lengths", "ranks"), [([900], 1), ([400, 300, 200], 1), ([900] * 4, 4)])
def test_what_fits_in_one_micro_batch_is_one(lengths: list[int], ranks: int) -> None:
    request = {"ranks": ranks, "max_tokens_per_rank": 1000, "sync": "micro_batch"}
    plan = hcp.plan(lengths, **request, cost=CHEAP_LAUNCHES)
    assert len(plan.micro_batches) == 1
    assert slack.sharper(plan, 1) == plan.bound == plan.makespan
    batch = slack.Batch(plan)
    prices = slack.rounded(slack.Prices(batch).area)
    assert 0.99 * plan.makespan <= slack.proven(batch, prices, 4 * plan.makespan)[0]
    assert slack.proven(batch, prices, 4 * plan.makespan)[0] <= plan.makespan


def test_plans_that_it_does_not_bound_are_refused() -> None:
    plan = hcp.plan([900], ranks=1, max_tokens_per_rank=1000, sync="step")
    with pytest.raises(ValueError, match="sync='step' and 1 stages, expected 'micro_batch' and 1"):
        slack.sharper(plan, 1)
