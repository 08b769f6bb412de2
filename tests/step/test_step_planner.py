"""One planner makes the steps of every trainer: it gathers, plans and dispatches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

import hcp
from hcp.integrations.barrier import waits_in_layers
from hcp.step.ahead import ReadItems
from hcp.step.config import Config
from hcp.step.planner import StepPlanner
from hcp.tools.loopback import loopback

LENGTHS = [[9, 4], [30, 2, 2], []]
"""Tokens of the samples of each of three ranks."""


def samples_of(rank: int) -> list[dict[str, Any]]:
    return [{"tokens": torch.full((length,), rank)} for length in LENGTHS[rank]]


def flat() -> list[int]:
    return [length for lengths in LENGTHS for length in lengths]


def content(step: hcp.Step) -> tuple[Any, ...]:
    rows = [(local.tokens.tolist(), cp.position_ids.tolist()) for cp, local in step]
    return step.plan.to_dict(), step.sources, rows


def equal_to_its_parts(rank: int, size: int) -> None:
    groups = hcp.build_process_groups()
    config = Config(16, cp_comm_type="all_gather", plan_ahead=1)
    lengths, sources, samples = hcp.gather_lengths(samples_of(rank), groups)
    plan = config.plan(lengths, size, alignment=2)
    by_hand = hcp.dispatch(plan, samples, sources, groups, **config.dispatch_options())
    planner = StepPlanner.of(config, size, alignment=2)
    step = planner.step((sample for sample in samples_of(rank)), groups)
    assert content(step) == content(by_hand)
    assert step.planning is not None
    assert step.planning.seconds == step.planning.waited > 0
    (ahead,) = planner.steps([ReadItems(samples_of(rank))], groups)
    assert content(ahead) == content(by_hand)
    assert [cp.comm.default_type for cp, _ in ahead] == ["all_gather"] * len(ahead)


def test_a_planners_step_is_the_one_that_its_parts_make_by_hand() -> None:
    run_ranks(3, equal_to_its_parts)


def end_with_an_empty_batch(rank: int, size: int) -> None:
    groups = hcp.build_process_groups()
    for ahead in (0, 2):
        planner = StepPlanner.of(Config(32, plan_ahead=ahead), size)
        shares = [samples_of(rank), [], samples_of(rank)]
        found = [len(step.plan.lengths) for step in planner.steps(shares, groups, until_empty=True)]
        assert found == [5], (ahead, found)


def test_steps_end_with_the_first_batch_of_which_no_rank_has_samples() -> None:
    run_ranks(3, end_with_an_empty_batch)


def test_all_steps_are_made_unless_the_end_is_asked_for() -> None:
    def steps(groups: Any) -> list[int]:
        planner = StepPlanner.of(Config(32, plan_ahead=0), groups.size("dp_cp"))
        shares = [samples_of(2), samples_of(0)]
        return [len(step.plan.lengths) for step in planner.steps(shares, groups)]

    assert loopback(1, steps) == [[0, 2]]


def test_whether_ranks_wait_is_asked_once_and_with_the_first_plan() -> None:
    asked: list[bool] = []

    def waits() -> bool:
        asked.append(True)
        return True

    planner = StepPlanner.of(Config(32), 2, waits=waits)
    assert asked == []
    assert [planner.plan(flat()).sync for _ in range(2)] == ["micro_batch"] * 2
    assert asked == [True]


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [("auto", None, "micro_batch"), ("step", None, "step"), ("auto", "step", "step")],
)
def test_a_sync_that_is_named_takes_the_place_of_what_a_model_says(
    option: Any, given: Any, expected: str
) -> None:
    planner = StepPlanner.of(Config(32, sync=option), 2, waits=lambda: True, sync=given)
    assert planner.plan(flat()).sync == expected


def test_masks_are_made_of_the_lengths_of_the_whole_batch() -> None:
    seen: list[Any] = []

    def masks(lengths: Any) -> list[hcp.Mask | None]:
        seen.append(list(lengths))
        return [hcp.Mask.documents([4, n - 4]) if n > 4 else None for n in lengths]

    plan = StepPlanner.of(Config(32), 2, masks=masks).plan(flat())
    assert seen == [flat()]
    assert plan.masks


def test_plans_are_made_where_the_library_of_attention_is_absent() -> None:
    """A driver plans for workers, and need not have their kernels."""

    def refuse() -> dict[str, Any]:
        raise AssertionError("the options of dispatch were asked for")

    planner = StepPlanner(
        lambda lengths: hcp.plan(lengths, ranks=2, max_tokens_per_rank=32), refuse
    )
    assert sum(planner.plan(flat()).lengths) == sum(flat())


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [16, 9], ids=["one micro-batch", "two"])
def test_gradients_are_reduced_in_the_last_micro_batch_only(limit: int) -> None:
    """Each micro-batch but the last is used inside the trainer's context, which is left again."""
    inside = [0]

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def seen(groups: Any) -> list[int]:
        step = StepPlanner.of(Config(limit), 1).step(samples_of(0), groups)
        return [inside[0] for _ in step.reducing_last(no_sync)]

    (found,) = loopback(1, seen)
    assert found == [1] * (len(found) - 1) + [0]
    assert len(found) == (1 if limit > 9 else 2)
    assert inside == [0]


def test_a_loop_that_is_left_early_leaves_the_context_of_its_micro_batch() -> None:
    left: list[bool] = []

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        try:
            yield
        finally:
            left.append(True)

    def leave(groups: Any) -> None:
        steps = StepPlanner.of(Config(9), 1).step(samples_of(0), groups).reducing_last(no_sync)
        for _ in steps:
            break
        del steps

    loopback(1, leave)
    assert left == [True]


# ---- whether ranks wait --------------------------------------------------------------------------


class Options:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@pytest.mark.parametrize(
    ("holder", "waits"),
    [
        (None, False),
        (nn.Linear(2, 2), False),
        (Options(expert_model_parallel_size=1), False),
        (Options(expert_model_parallel_size=2), True),
        (Options(config=Options(ep_size=4)), True),
        (Options(distributed_type="DistributedType.MULTI_GPU"), False),
        (Options(distributed_type="DistributedType.FSDP"), True),
        (Options(fsdp_enabled=False, ep_enabled=False), False),
        (Options(fsdp_enabled=True, ep_enabled=False), True),
        (Options(fsdp_enabled=False, ep_enabled=True), True),
    ],
)
def test_what_holds_the_layout_says_whether_ranks_wait_in_layers(holder: Any, waits: bool) -> None:
    assert waits_in_layers(holder) is waits


def test_a_model_whose_parameters_zero_3_has_marked_waits() -> None:
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0  # type: ignore[attr-defined]
    assert waits_in_layers(model)
