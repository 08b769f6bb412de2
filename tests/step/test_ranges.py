"""A profiler's trace names the parts of a step, and of an evaluation.
NVTX has the same names: tests/cuda/test_ranges_cuda.py."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support import trainer
from support.ranges import EVALUATION, TRAINING, evaluate, run_step
from support.ranks import run_alone, run_ranks
from torch.profiler import ProfilerActivity, profile

import hcp
from hcp._core import Rebinding


def named(profiler: profile) -> Counter[str]:
    return Counter(event.name for event in profiler.events() if event.name.startswith("hcp: "))


def test_a_trace_has_the_parts_of_a_step() -> None:
    profiler = profile(activities=[ProfilerActivity.CPU])
    hcp.loopback(2, lambda groups: run_step(groups, profiler))
    seen = named(profiler)
    assert set(seen) == TRAINING
    assert seen["hcp: attention"] == seen["hcp: attention backward"] == seen["hcp: loss"] == 2
    assert seen["hcp: dispatch"] == 1


def trace_an_evaluation(rank: int, size: int, fails: bool) -> list[tuple[str, float, float]]:
    """Return the ranges with their starts and ends."""
    train = hcp.build_process_groups()
    evaluation = train.with_context_parallel(2)
    model, _ = trainer.build(train)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        try:
            with hcp.eval_cp_context(model, train, evaluation):
                for _ in hcp.EvalPlan(3, evaluation).batches(range(3)):
                    if fails:
                        raise KeyError("text")
        except KeyError:
            assert fails
    with hcp.eval_cp_context(model, train, evaluation):  # without a profiler
        pass
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.name in EVALUATION
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_has_the_parts_of_an_evaluation_in_order(fails: bool) -> None:
    for found in run_ranks(2, trace_an_evaluation, fails):
        count = 1 if fails else 3
        names = ["hcp: rebind", *["hcp: evaluate"] * count, "hcp: restore"]
        ordered = sorted(found, key=lambda each: each[1])
        assert [name for name, _, _ in ordered] == names
        assert all(end <= start for (_, _, end), (_, start, _) in pairwise(ordered))


def trace_one_rank() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        evaluate()
    seen = named(profiler)
    assert set(seen) == EVALUATION
    assert seen["hcp: evaluate"] == 2


def test_a_switch_by_a_mapping_has_the_same_names(tmp_path: Path) -> None:
    done = run_alone(trace_one_rank, folder=tmp_path)
    assert done.code == 0, done.err


def test_nothing_is_named_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.profiler, "record_function", lambda name: pytest.fail(f"{name} was named")
    )

    def run(groups: Any) -> int:
        plan = hcp.plan([10], ranks=2, max_tokens_per_rank=8)
        samples = [{"x": torch.zeros(10)}] if groups.rank("dp_cp") == 0 else []
        return len(hcp.dispatch(plan, samples, [0], groups))

    assert hcp.loopback(2, run) == [1, 1]


@pytest.mark.parametrize("place", ["__enter__", "__exit__"])
def test_ctrl_c_in_the_range_of_restoring_keeps_no_slot_from_it(place: str) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    methods = {"__enter__": lambda self: None, "__exit__": lambda *given: None, place: interrupted}
    held = {"a": 1, "b": 2}
    slots = [("item", held, name, f"held.{name}") for name in held]
    switch = Rebinding(slots, [3, 4])
    switch.range = type("Range", (), methods)()
    assert held == {"a": 3, "b": 4}
    with pytest.raises(KeyboardInterrupt), switch:
        pass
    assert held == {"a": 1, "b": 2}
    assert (switch.pending, switch.range) == (0, None)


def test_a_range_is_entered_once_and_dropped_with_what_is_kept() -> None:
    entered: list[str] = []
    methods = {
        "__enter__": lambda self: entered.append("in"),
        "__exit__": lambda *given: entered.append("out"),
    }
    held = {"a": 1}
    switch = Rebinding([("item", held, "a", "held.a")], [3])
    switch.range = type("Range", (), methods)()
    switch.restore()
    switch.restore()
    assert entered == ["in", "out"]
    kept = Rebinding([("item", held, "a", "held.a")], [3])
    kept.range = type("Range", (), methods)()
    kept.keep()
    assert (held, kept.range, entered) == ({"a": 3}, None, ["in", "out"])


@pytest.mark.parametrize("place", ["__enter__", "__exit__"])
def test_ctrl_c_in_the_range_of_rebinding_leaves_no_slot_switched(place: str) -> None:
    run_ranks(1, interrupted_switches, place)


def interrupted_switches(rank: int, size: int, place: str) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    methods = {"__enter__": lambda self: None, "__exit__": lambda *given: None, place: interrupted}
    train = hcp.build_process_groups(cp=1)
    evaluation = train.with_context_parallel(1)
    model, _ = trainer.build(train)
    before = str(hcp.audit(model, train, evaluation))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hcp.rebinding.rebind.range_of", lambda name: type("Range", (), methods)())
        for switch in (enter, hcp.rebind):
            with pytest.raises(KeyboardInterrupt):
                switch(model, train, evaluation)
            assert str(hcp.audit(model, train, evaluation)) == before
    with hcp.eval_cp_context(model, train, evaluation):
        pass


def enter(*given: Any) -> Any:
    return hcp.eval_cp_context(*given).__enter__()
