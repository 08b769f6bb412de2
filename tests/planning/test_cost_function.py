"""Cost functions: the search asks for what it looks at, and plans as by a table of all times."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hcp
from hcp.planning.cost import TimeTable
from hcp.planning.plan import lower_bound
from hcp.tools.check import check_plan

Seconds = Callable[[int, int], float]
UNIT = 2.0**-30
"""A power of two: whole units are as many again when they were seconds."""


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    ranks, capacity = draw(st.integers(1, 80)), draw(st.integers(20, 2000))
    widest = min(4, 1 << ranks.bit_length() - 1)  # a power of two
    most = max(1, widest * (capacity - 2))
    request: dict[str, Any] = {
        "lengths": draw(st.lists(st.integers(1, most), min_size=1, max_size=24)),
        "ranks": ranks,
        "max_tokens_per_rank": capacity,
        "sync": draw(st.sampled_from(["step", "micro_batch"])),
        "degrees": draw(st.sampled_from(["any", "any", "pow2"])),
    }
    if draw(st.booleans()):
        request["pipeline_stages"] = draw(st.integers(1, 4))
    return request


@st.composite
def fair_seconds(draw: st.DrawFn) -> Seconds:
    """Seconds whose rank-time does not fall as the degree grows, to the unit."""
    pair, token, move, step = (draw(st.sampled_from([0, 1, 40, 900])) for _ in range(4))

    def seconds(length: int, degree: int) -> float:
        share = pair * length * length + (token + 1) * length
        for d in range(2, degree + 1):
            share = -(-share * (d - 1) // d)
        moved = move * length * (degree - 1) // degree + step * (degree - 1)
        return UNIT * (share + moved)

    return seconds


def eager(cost: hcp.CostModel, request: dict[str, Any]) -> hcp.CostModel:
    """The model with every time that it might be asked for."""
    degrees = range(1, request["ranks"] + 1)
    columns = hcp.plan(**request, cost=cost).cost.table
    assert columns is not None
    return cost.tabulated(request["lengths"], [d for d in degrees if d in columns.degrees])


def groups_of(plan: hcp.Plan) -> list[dict[str, Any]]:
    return list(plan.to_dict()["micro_batches"])


@settings(max_examples=60, deadline=None)
@given(requests(), fair_seconds(), st.sampled_from([0.0, 1e-6, 1e-4]))
def test_the_plan_is_that_of_a_table_of_all_times(
    request: dict[str, Any], seconds: Seconds, launch: float
) -> None:
    cost = hcp.CostModel.from_function(seconds, launch=launch, unit=UNIT)
    plan, by_table = hcp.plan(**request, cost=cost), hcp.plan(**request, cost=eager(cost, request))
    assert groups_of(plan) == groups_of(by_table)
    assert (plan.makespan, plan.bound, plan.work) == (
        by_table.makespan,
        by_table.bound,
        by_table.work,
    )
    assert lower_bound(**request, cost=cost) == plan.bound


@settings(max_examples=60, deadline=None)
@given(requests(), st.randoms(use_true_random=False))
def test_any_function_gives_a_plan_that_its_own_times_make_again(
    request: dict[str, Any], random: Any
) -> None:
    times: dict[tuple[int, int], float] = {}

    def seconds(length: int, degree: int) -> float:
        assert (length, degree) not in times  # is asked once
        times[length, degree] = random.randint(0, 10**6) * UNIT
        return times[length, degree]

    plan = hcp.plan(**request, cost=hcp.CostModel.from_function(seconds, launch=1e-5, unit=UNIT))
    check_plan(plan, request["lengths"])
    assert plan.bound <= plan.makespan
    again = hcp.Plan.from_dict(plan.to_dict())
    assert (again.checksum, again.bound) == (plan.checksum, plan.bound)
    assert plan.cost.table is not None
    assert sum(time > 0 for time in plan.cost.table.times) == len(times)


def test_few_of_many_times_are_asked_for() -> None:
    asked = []

    def seconds(length: int, degree: int) -> float:
        asked.append((length, degree))
        return 1e-9 * length * (length + 12_288) / degree + 1e-6 * (degree - 1)

    lengths = [100 + 37 * i for i in range(300)]
    cost = hcp.CostModel.from_function(seconds)
    hcp.plan(lengths, ranks=64, max_tokens_per_rank=8192, cost=cost)
    assert 300 <= len(asked) == len(set(asked)) < 1500


def test_what_the_function_raises_comes_out_and_ends_the_search() -> None:
    calls = 0

    def seconds(length: int, degree: int) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError("the third call")
        return 1e-6 * length / degree

    cost = hcp.CostModel.from_function(seconds)
    for search in (hcp.plan, lower_bound):
        calls = 0
        with pytest.raises(ZeroDivisionError, match="the third call"):
            search([10, 20, 30, 40, 50], ranks=8, max_tokens_per_rank=64, cost=cost)
        assert calls == 3


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.floats(0, 4000), st.integers(0, 4000), st.floats(0, 1e-6)),
    st.sampled_from([1e-9, 3e-9, 1e-6, 0.1]),
)
def test_seconds_become_units_rounded_up(seconds: float, unit: float) -> None:
    cost = hcp.CostModel.from_function(lambda length, degree: seconds, unit=unit)
    units = max(1, math.ceil(seconds / unit))
    assert cost.time(7, 1) == units
    table = hcp.plan([7], ranks=1, max_tokens_per_rank=8, cost=cost).cost.table
    assert table == TimeTable((7,), (1,), (units,))


@pytest.mark.parametrize("given", [-1e-9, math.nan, math.inf])
def test_what_is_no_time_is_refused_in_a_search(given: float) -> None:
    cost = hcp.CostModel.from_function(lambda length, degree: given)
    message = rf"the cost function gave {given!r} for 7 tokens on 1 ranks, expected seconds >= 0"
    with pytest.raises(ValueError, match=message):
        hcp.plan([7], ranks=2, max_tokens_per_rank=8, cost=cost)
    with pytest.raises(ValueError, match=message):
        cost.time(7, 1)


def test_what_is_no_number_is_refused() -> None:
    cost = hcp.CostModel.from_function(lambda length, degree: cast(Any, "soon"))
    with pytest.raises(TypeError, match="must be real number, not str"):
        hcp.plan([7], ranks=2, max_tokens_per_rank=8, cost=cost)


def test_a_time_that_is_too_long_is_refused() -> None:
    cost = hcp.CostModel.from_function(lambda length, degree: 5000.0)
    message = (
        "gave 5000000000000 units for 7 tokens on 1 ranks, expected 1 to 2.42: choose a larger"
    )
    with pytest.raises(ValueError, match=message):
        hcp.plan([7], ranks=2, max_tokens_per_rank=8, cost=cost)


def test_a_function_may_plan_itself() -> None:
    def seconds(length: int, degree: int) -> float:
        return 1e-9 * hcp.plan([length], ranks=degree, max_tokens_per_rank=length).makespan

    plan = hcp.plan(
        [9, 70], ranks=4, max_tokens_per_rank=40, cost=hcp.CostModel.from_function(seconds)
    )
    check_plan(plan, [9, 70])


def test_degrees_without_a_time_are_used_by_no_plan() -> None:
    times = {1: 80, 2: 0, 3: 30, 4: 0}
    table = TimeTable((60,), tuple(times), tuple(times.values()))
    cost = hcp.CostModel(pair=0, token=0, exchange=0, launch=1, table=table)
    plan = hcp.plan([60], ranks=4, max_tokens_per_rank=60, cost=cost)
    assert [group.degree for group in plan.micro_batches[0]] == [3]
    data = plan.to_dict()
    data["micro_batches"][0]["groups"][0]["degree"] = 2
    with pytest.raises(
        ValueError, match=r"degree is 2, at which the cost table has no time for 60"
    ):
        hcp.Plan.from_dict(data)
    nothing = replace(cost, table=TimeTable((60,), (1, 2), (0, 0)))
    with pytest.raises(ValueError, match="at no degree that holds it does the cost table have a"):
        hcp.plan([60], ranks=4, max_tokens_per_rank=60, cost=nothing)


def test_other_threads_run_while_a_function_is_asked_and_while_the_search_goes_on() -> None:
    turns, ended = 0, threading.Event()

    def others() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            time.sleep(0)

    seen = []

    def seconds(length: int, degree: int) -> float:
        seen.append(turns)
        return 1e-9 * length * (length + 9000) / degree + 1e-6 * degree

    cost = hcp.CostModel.from_function(seconds)
    thread = threading.Thread(target=others)
    interval = sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1e6)  # Python code keeps the GIL: only the core gives it up
    try:
        for _ in range(200):
            hcp.plan([900 + 7 * i for i in range(64)], ranks=16, max_tokens_per_rank=512, cost=cost)
            if turns > seen[0]:
                break
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
    assert turns > seen[0]


PROGRAM = """
import hcp
def seconds(length, degree):
    if length == 2000:
        print("asked", flush=True)
    total = 0
    for i in range(10**6 * (length == 2000) * 1000):
        total += i
    return 1e-9 * length
hcp.plan([1000, 2000], ranks=2, max_tokens_per_rank=4096, cost=hcp.CostModel.from_function(seconds))
print("ended by itself", flush=True)
"""


def test_ctrl_c_ends_a_function_that_is_asked() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=-1, stderr=-1, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "asked\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert out == ""
    assert err.rstrip().endswith("KeyboardInterrupt")
