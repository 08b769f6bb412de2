"""Cost models: the conversion of seconds to integers, files, and errors."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hcp
from hcp.planning.cost import PRICES, TIMES, TimeTable
from hcp.tools.presets import PRESETS
from hcp.tools.rates import rates_of


@given(
    st.dictionaries(st.sampled_from(TIMES), st.floats(1e-13, 1e-3)),
    st.floats(1e-14, 1e-6),
)
def test_prices_in_seconds_are_kept_to_a_part_in_a_thousand(
    seconds: dict[str, float], pair: float
) -> None:
    given_seconds = seconds | {"pair": pair}
    cost = hcp.CostModel.from_seconds(**given_seconds)
    assert cost.unit is not None
    assert 1000 <= cost.pair <= 10_000
    for name in TIMES:
        value = given_seconds.get(name, 0.0)
        assert abs(getattr(cost, name) * cost.unit - value) <= 0.501 * cost.unit + 1e-12 * value


def test_without_pairs_tokens_set_the_unit() -> None:
    cost = hcp.CostModel.from_seconds(token=2.5e-5, launch=1.0)
    assert (cost.token, cost.pair, cost.unit) == (2500, 0, 1e-8)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ({"pair": -1.0}, "pair is -1.0, expected seconds >= 0"),
        ({"pair": 1.0, "launch": math.nan}, "launch is nan, expected seconds >= 0"),
        ({"launch": 1.0}, "pair and token are 0"),
        ({"pair": 1e-322}, "1e-322 seconds are too few for four digits"),
        ({"pair": 1.0, "lunch": 1.0}, "lunch is not a time, expected pair, token"),
    ],
)
def test_what_is_no_time_is_refused(seconds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        hcp.CostModel.from_seconds(**seconds)


def test_a_function_has_a_unit() -> None:
    with pytest.raises(ValueError, match=r"cost\.unit is None, expected seconds > 0 for a cost"):
        hcp.CostModel(function=lambda length, degree: 1.0)


@pytest.mark.parametrize("unit", [0.0, -1.0, math.inf])
def test_a_unit_is_of_some_seconds(unit: float) -> None:
    with pytest.raises(ValueError, match=f"unit is {unit!r}, expected seconds > 0"):
        hcp.CostModel.from_function(lambda length, degree: 1.0, unit=unit)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected an integer >= 1"),
        ({"num_attention_heads": 3}, "hidden_size (8) % num_attention_heads (3) == 2"),
    ],
)
def test_a_transformer_has_whole_heads(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        hcp.CostModel.for_transformer(**{"hidden_size": 8, "ffn_hidden_size": 8, **sizes})


def for_transformer(**rates: int) -> hcp.CostModel:
    return hcp.CostModel.for_transformer(
        hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2, **rates
    )


def test_a_transformer_exchanges_faster_inside_a_node() -> None:
    cost = for_transformer(flops_per_byte=10, flops_per_byte_far=30)
    assert (cost.exchange, cost.exchange_far) == (10 * 2 * 32 * 2, 30 * 2 * 32 * 2)
    assert for_transformer(flops_per_byte=30, flops_per_byte_far=30).exchange_far == 0


@pytest.mark.parametrize(
    ("local", "world", "ranks_per_node", "near"),
    [
        ("4", "4", None, True),
        ("4", "8", None, False),
        ("4", "8", 4, True),
        (None, None, None, False),
        (None, "8", 4, True),
    ],
)
def test_gpus_exchange_by_nvlink_on_one_host_or_in_known_nodes(
    monkeypatch: pytest.MonkeyPatch,
    local: str | None,
    world: str | None,
    ranks_per_node: int | None,
    near: bool,
) -> None:
    for name, value in (("LOCAL_WORLD_SIZE", local), ("WORLD_SIZE", world)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    cost = for_transformer(**rates_of("cuda", ranks_per_node))
    network = for_transformer(flops_per_byte=8_000)
    assert cost == (for_transformer() if near else network)
    assert for_transformer().exchange < network.exchange
    on_cpu = for_transformer(**rates_of("cpu", ranks_per_node))
    assert (on_cpu.exchange_far, on_cpu.host) == (0, 0)
    assert cost == for_transformer(**rates_of("cuda", ranks_per_node, (9, 0)))
    ampere, blackwell = (
        for_transformer(**rates_of("cuda", ranks_per_node, (major, 0))) for major in (8, 10)
    )
    assert ampere.launch < cost.launch < blackwell.launch
    assert ampere.host < cost.host < blackwell.host
    assert cost.host > cost.launch
    assert ampere.exchange < cost.exchange < blackwell.exchange or near


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_saved_model_is_loaded_as_it_was(name: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    hcp.CostModel.preset(name).save(path, {"source": name})
    assert hcp.CostModel.load(path) == hcp.CostModel.preset(name)
    kernels = {"kernels": ["torch"]} if name == "gpt-1b-h200" else {}
    assert json.loads(path.read_text())["provenance"] == {"source": name} | kernels


def test_the_measured_preset_is_what_was_measured() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    measured = hcp.CostModel.load(results / "calibrate_h200x4_2026-11-22.json")
    # The file is older than the entry that names its kernels.
    assert hcp.CostModel.preset("gpt-1b-h200") == replace(measured, kernels=("torch",))


def test_a_saved_table_makes_the_same_plan(tmp_path: Path) -> None:
    lengths, limits = [900, 30, 1200], {"ranks": 3, "max_tokens_per_rank": 700}
    cost = hcp.CostModel.from_function(lambda n, d: n * n / d * 1e-6 + 1e-5, launch=1e-3)
    with pytest.raises(ValueError, match="is a function: save what tabulated"):
        cost.save(tmp_path / "cost.json", {})
    table = cost.tabulated(lengths, range(1, 4))
    table.save(tmp_path / "cost.json", {})
    loaded = hcp.CostModel.load(tmp_path / "cost.json")
    assert loaded == table
    plans = [hcp.plan(lengths, cost=c, **limits) for c in (table, loaded)]
    assert plans[0].checksum == plans[1].checksum


def saved(path: Path, **changes: Any) -> Path:
    """A good file with entries changed by dotted name; None takes the entry out."""
    cost = hcp.CostModel(table=TimeTable((10, 20), (1, 2), (4, 3, 8, 5)), unit=1e-9)
    cost.save(path, {})
    data = json.loads(path.read_text())
    for name, value in changes.items():
        *parents, last = name.split("__")
        place = data
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "format is 'other', expected 'hcp cost model, version 1'"),
        ({"format": None}, "format is None, expected"),
        ({"prices__pair": None}, "prices.pair is missing, expected pair, token"),
        ({"prices__pears": 3}, "prices.pears is unknown, expected pair, token"),
        ({"prices": [1]}, "prices is [1], expected an object"),
        ({"prices__token": 1.5}, "cost.token is 1.5, expected an integer >= 0"),
        ({"prices__token": -1}, "cost.token is -1, expected an integer >= 0"),
        ({"prices__token": True}, "cost.token is True, expected an integer >= 0"),
        ({"unit_seconds": 0}, "cost.unit is 0, expected seconds > 0"),
        ({"unit_seconds": "ns"}, "unit_seconds is 'ns', expected a number > 0 or null"),
        ({"provenance": "me"}, "provenance is 'me', expected an object"),
        ({"provenance__kernels": "torch"}, "provenance.kernels is 'torch', expected names"),
        ({"provenance__kernels": [4]}, "cost.kernels is (4,), expected names of backends"),
        ({"speed": 3}, "speed is unknown, expected format, unit_seconds"),
        ({"table__times": [1, 2, 3]}, "table.times has 3 entries, expected lengths * degrees = 4"),
        ({"table__times": [1, 2, 3, -1]}, "table.times[3] is -1, expected an integer >= 0"),
        ({"table__times": 4}, "table.times is 4, expected a list of integers"),
        ({"table__degrees": [2, 1]}, "table.degrees is (2, 1), expected ascending integers"),
        ({"table__lengths": None}, "table.lengths is missing, expected lengths, degrees, times"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_entry(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "cost.json", **changes)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        hcp.CostModel.load(path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (5, "cost.table is 5, expected an hcp.planning.cost.TimeTable"),
        (
            ((5,), (1,), (2,)),
            "cost.table is ((5,), (1,), (2,)), expected an hcp.planning.cost.TimeTable",
        ),
        (TimeTable((5,), (1,), ()), "table.times has 0 entries, expected lengths * degrees = 1"),
        (TimeTable((5, 5), (1,), (2, 2)), "table.lengths is (5, 5), expected ascending integers"),
        (TimeTable((5,), (0,), (2,)), "table.degrees[0] is 0, expected an integer >= 1"),
        (TimeTable((5,), (1,), (2.5,)), "table.times[0] is 2.5, expected an integer >= 0"),
    ],
)
def test_a_wrong_table_is_refused_where_it_is_given(table: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        hcp.CostModel(table=table)


def test_a_file_without_any_price_of_work_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    hcp.CostModel().save(path, {})
    data = json.loads(path.read_text())
    data["prices"] = dict.fromkeys(PRICES, 0)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"prices\.pair and prices\.token are 0"):
        hcp.CostModel.load(path)


def test_a_file_from_before_there_was_a_price_of_the_host_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    cost = hcp.CostModel.from_seconds(token=2.5e-5, launch=1.0, host=2.0)
    cost.save(path, {})
    assert hcp.CostModel.load(path) == cost
    data = json.loads(path.read_text())
    del data["prices"]["host"]
    path.write_text(json.dumps(data))
    assert hcp.CostModel.load(path) == replace(cost, host=0)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", "[]"])
def test_what_is_no_json_object_is_refused_with_the_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: ")):
        hcp.CostModel.load(path)
