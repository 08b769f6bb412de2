"""Memory models: files, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hcp

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
