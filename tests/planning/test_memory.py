"""Memory models: files, and errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hcp
from hcp import _core
from hcp.tools.check import check_plan

BYTES = st.integers(0, 2**50)


@given(st.integers(1, 2**50), BYTES, BYTES, st.integers(1, 2**50))
def test_a_saved_model_is_loaded_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    activation: int,
    logit: int,
    gathered: int,
    limit: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "memory.json"
    memory = hcp.MemoryModel(activation, logit, gathered, limit)
    memory.save(path, {"device": "a GPU"})
    assert hcp.MemoryModel.load(path) == memory
    assert json.loads(path.read_text())["provenance"] == {"device": "a GPU"}


def saved(path: Path, **changes: Any) -> Path:
    """A good file with entries changed by dotted name; None takes the entry out."""
    hcp.MemoryModel(activation=3, logit=2, gathered=1, limit=100).save(path, {})
    data = json.loads(path.read_text())
    for name, value in changes.items():
        *parents, last = name.split("__")
        place = data[parents[0]] if parents else data
        if value is None:
            del place[last]
        else:
            place[last] = value
    path.write_text(json.dumps(data))
    return path


def test_a_file_without_a_buffer_has_none(tmp_path: Path) -> None:
    path = saved(tmp_path / "memory.json", memory__buffer=None)
    assert hcp.MemoryModel.load(path).buffer == 0


# ---- the buffer of exchanges ---------------------------------------------------------------------


def test_plans_leave_the_buffer_free() -> None:
    plans = [
        hcp.plan([8] * 8, ranks=2, max_tokens_per_rank=64, memory=memory)
        for memory in (
            hcp.MemoryModel(activation=10, limit=160, buffer=0),
            hcp.MemoryModel(activation=10, limit=160 + 1000, buffer=1000),
            hcp.MemoryModel(activation=10, limit=160 + 1000, buffer=1080),
        )
    ]
    without, equal, less = (len(plan.micro_batches) for plan in plans)
    assert (without, equal, less) == (2, 2, 4)
    assert max(plans[0].report().rank_bytes) + 1000 == max(plans[1].report().rank_bytes) == 1160
    for plan in plans:
        check_plan(plan.to_dict())
    wrong = plans[1].to_dict()
    wrong["memory"]["buffer"] += 1
    with pytest.raises(hcp.HcpError, match="needs 1161 bytes on a rank, expected <= 1160"):
        check_plan(wrong)


def test_a_rank_without_rows_holds_the_buffer() -> None:
    memory = hcp.MemoryModel(activation=10, limit=160, buffer=70)
    plan = hcp.plan([4], ranks=3, max_tokens_per_rank=64, max_degree=1, memory=memory)
    assert sorted(plan.report().rank_bytes) == [70, 70, 110]
    empty = hcp.plan([], ranks=2, max_tokens_per_rank=64, memory=memory)
    assert empty.report().rank_bytes == (70, 70)


def test_a_buffer_takes_more_chunks_of_heads() -> None:
    memory = hcp.MemoryModel(activation=1, attention=60, head_chunks=6, limit=1000, buffer=360)
    assert _core.memory_chunks(memory.numbers(), 20, 40, 2) == 2
    assert _core.memory_chunks(replace(memory, buffer=400).numbers(), 20, 40, 2) == 3


def test_a_refusal_names_the_buffer() -> None:
    memory = hcp.MemoryModel(activation=10, limit=160, buffer=70)
    with pytest.raises(ValueError, match=r"need 170 bytes with memory.buffer, .*peer_buffer_bytes"):
        hcp.plan([20], ranks=2, max_tokens_per_rank=64, memory=memory)
    with pytest.raises(ValueError, match=r"takes 170 bytes .* peer_buffer_bytes \(.* is 70\)"):
        hcp.Config(64, memory=memory).validate(ranks=2, longest=20)
    with pytest.raises(ValueError, match=r"more than the 160 that exchanges hold"):
        hcp.plan([1], ranks=2, max_tokens_per_rank=64, memory=replace(memory, buffer=160))


@pytest.mark.parametrize("buffer", [0, 99, 100])
def test_groups_that_hold_more_than_their_plan_counts_are_refused(
    buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = hcp.MemoryModel(activation=10, limit=1000, buffer=buffer)
    plan = hcp.plan([4], ranks=2, max_tokens_per_rank=64, memory=memory)

    def step(groups: Any) -> None:
        monkeypatch.setattr(groups.transport, "buffer_bytes", 100)
        samples = [{"tokens": torch.arange(4)}] if groups.transport.rank == 0 else []
        hcp.dispatch(plan, samples, [0], groups)

    if buffer != 99:  # 0: the limit leaves buffers out
        hcp.loopback(2, step, sharing=True)
        return
    with pytest.raises(ValueError, match="buffer is 99 bytes, and the process groups hold 100 "):
        hcp.loopback(2, step, sharing=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "hcp cost model, version 1"}, "format is 'hcp cost model, version 1', exp"),
        ({"format": None}, "format is None, expected 'hcp memory model, version 1'"),
        ({"memory": 5}, "memory is 5, expected an object"),
        ({"memory__logit": None}, "memory.logit is missing, expected activation, logit"),
        ({"memory__lodgit": 3}, "memory.lodgit is unknown, expected activation, logit"),
        ({"memory__gathered": -1}, "memory.gathered is -1, expected an integer >= 0 bytes"),
        ({"memory__gathered": 1.5}, "memory.gathered is 1.5, expected an integer >= 0 bytes"),
        ({"memory__limit": 0}, "memory.limit is 0, expected the bytes that a micro-batch may take"),
        (
            {"memory__activation": 0, "memory__logit": 0},
            "memory.activation and memory.logit are 0, expected one of them > 0",
        ),
        ({"provenance": "me"}, "provenance is 'me', expected an object"),
        ({"unit": 3}, "unit is unknown, expected format, memory, provenance"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_entry(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "memory.json", **changes)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        hcp.MemoryModel.load(path)


def test_a_cost_model_is_no_memory_model(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    hcp.CostModel().save(path, {})
    with pytest.raises(ValueError, match="expected 'hcp memory model, version 1'"):
        hcp.MemoryModel.load(path)


@pytest.mark.parametrize("model", [hcp.MemoryModel(activation=5), hcp.MemoryModel(limit=5)])
def test_a_model_that_limits_nothing_is_not_saved(model: hcp.MemoryModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^memory\..* 0, expected"):
        model.save(tmp_path / "memory.json", {})
    assert not (tmp_path / "memory.json").exists()
