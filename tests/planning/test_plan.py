"""Plans keep every limit, are the same everywhere, and end close to the bound."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import pickle
import re
from array import array
from collections.abc import Callable
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.plan_prices import rows_of_ranks

import hcp
from hcp import _core
from hcp.exchange.layout import Layout
from hcp.planning.cost import TimeTable
from hcp.planning.limits import Limits
from hcp.planning.plan import Group
from hcp.step.stats import stats_of
from hcp.tools.check import check_plan

CAPACITY = 1024


def check(plan: hcp.Plan, capacity: int, min_degree: int, max_degree: int) -> None:
    """Every rule that a plan keeps, one by one."""
    seen: list[int] = []
    for groups in plan.micro_batches:
        assert groups, "an empty micro-batch"
        held = [0] * plan.ranks
        free = 0
        for first, degree, sequences in groups:
            assert min_degree <= degree <= max_degree
            assert free <= first <= plan.ranks - degree
            free = first + degree
            assert sequences, "a group without a sequence"
            seen += sequences
            rows = rows_of_ranks([plan.lengths[s] for s in sequences], degree)
            for j, own in enumerate(rows):
                held[first + j] += own
        assert max(held) <= capacity
    assert sorted(seen) == list(range(len(plan.lengths)))
    assert plan.bound <= plan.makespan
    assert 0 < plan.efficiency <= 1
    if plan.lengths:
        assert plan.makespan == makespan(plan)


def makespan(plan: hcp.Plan) -> int:
    """When the last rank ends, if every group starts as soon as its ranks are free, and a rank
    outside all groups launches its micro-batch."""
    cost = plan.to_dict()["cost"]
    free = [0] * plan.ranks
    for groups in plan.micro_batches:
        for first, degree, sequences in groups:
            time = cost["launch"]
            for s in sequences:
                tokens = plan.lengths[s]
                work = cost["pair"] * tokens * (tokens + 1) // 2 + cost["token"] * tokens
                time += -(-work // degree) + cost["exchange"] * (tokens - tokens // degree)
            end = max(free[first : first + degree]) + max(cost["host"], time)
            free[first : first + degree] = [end] * degree
        inside = {r for first, degree, _ in groups for r in range(first, first + degree)}
        idle = max(cost["host"], cost["launch"])
        free = [end + (r not in inside) * idle for r, end in enumerate(free)]
    return max(free)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(1, 13))
    capacity = draw(st.integers(1, 300))
    min_degree = draw(st.integers(1, ranks))
    max_degree = draw(st.integers(min_degree, ranks))
    longest = max(1, max_degree * (capacity - 2))
    price = st.integers(0, 10**6)
    lengths = draw(st.lists(st.integers(1, longest), max_size=40))
    if capacity < 3:
        lengths = [1] * len(lengths)
    return {
        "lengths": lengths,
        "ranks": ranks,
        "max_tokens_per_rank": capacity,
        "min_degree": min_degree,
        "max_degree": max_degree,
        "cost": hcp.CostModel(draw(st.integers(1, 100)), draw(price), draw(price), draw(price)),
    }


@given(requests())
def test_every_plan_keeps_every_rule(request: dict[str, Any]) -> None:
    plan = hcp.plan(**request)
    check(plan, request["max_tokens_per_rank"], request["min_degree"], request["max_degree"])
    assert list(plan.lengths) == request["lengths"]


@given(requests())
def test_the_same_request_gives_the_same_plan(request: dict[str, Any]) -> None:
    plan, again = hcp.plan(**request), hcp.plan(**request)
    assert plan == again
    assert plan.checksum == again.checksum
    other = hcp.plan(**(request | {"lengths": [*request["lengths"], 1]}))
    assert plan != other


@given(requests())
def test_plain_data_json_and_pickle_give_the_plan_back(request: dict[str, Any]) -> None:
    plan = hcp.plan(**request)
    for back in (
        hcp.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))),
        pickle.loads(pickle.dumps(plan)),
    ):
        assert back == plan
        assert (back.checksum, back.makespan, back.bound) == (
            plan.checksum,
            plan.makespan,
            plan.bound,
        )


def test_a_plan_shows_how_near_the_bound_it_is_beside_its_efficiency() -> None:
    """Exchange may leave the best plan far from an efficiency of 1."""
    plan = hcp.plan([4000, 30, 900], ranks=8, max_tokens_per_rank=1000)
    shown = re.fullmatch(
        r"Plan\(sequences=3, ranks=8, micro_batches=(\d+), efficiency=(\d\.\d{3}), "
        r"makespan=(\d\.\d{3}) \* bound\)",
        repr(plan),
    )
    assert shown, repr(plan)
    assert float(shown[3]) == pytest.approx(plan.makespan / plan.bound, abs=1e-3)
    assert float(shown[2]) < 0.9 < 1 <= float(shown[3])
    assert "makespan=1.000 * bound" in repr(hcp.plan([], ranks=2, max_tokens_per_rank=8))


def test_lengths_may_be_a_tensor() -> None:
    request = {"ranks": 2, "max_tokens_per_rank": 8}
    assert hcp.plan(torch.tensor([5, 7]), **request) == hcp.plan([5, 7], **request)


def test_chunks_that_round_up_may_not_fit_where_tokens_would() -> None:
    """11 tokens on 4 ranks are 3, 2, 4 and 2 rows."""
    with pytest.raises(ValueError, match="would hold 4 rows, expected <= 3"):
        hcp.plan([11], ranks=4, max_tokens_per_rank=3)


def test_static_plans_are_not_efficient_for_work_that_they_make() -> None:
    """Work is what the sequences need, not what a degree adds to it."""
    request = {"ranks": 8, "max_tokens_per_rank": 1000}
    dynamic = hcp.plan([1000] * 8, **request)
    static = hcp.plan([1000] * 8, **request, min_degree=8)
    assert static.work == dynamic.work
    assert static.efficiency < dynamic.efficiency


# ---- edges ---------------------------------------------------------------------------------------


def test_no_sequences_make_an_empty_plan() -> None:
    plan = hcp.plan([], ranks=4, max_tokens_per_rank=CAPACITY)
    assert plan.micro_batches == ()
    assert plan.efficiency == 1.0
    check_plan(plan, [])
    assert hcp.loopback(4, lambda groups: list(hcp.dispatch(plan, [], [], groups))) == [[]] * 4
    with pytest.raises(ValueError, match=r"micro_batch is 0, expected none: the plan of no seq"):
        Layout(plan, 0, 0)


def test_a_sequence_that_fits_stays_on_one_rank_when_sharing_costs_more() -> None:
    cost = hcp.CostModel(exchange=10**9)
    plan = hcp.plan([CAPACITY], ranks=8, max_tokens_per_rank=CAPACITY, cost=cost)
    assert plan.micro_batches == ((Group(0, 1, (0,)),),)


def test_one_token_over_needs_one_more_rank() -> None:
    cost = hcp.CostModel(exchange=10**9)
    plan = hcp.plan([CAPACITY + 1], ranks=8, max_tokens_per_rank=CAPACITY, cost=cost)
    assert [group.degree for group in plan.micro_batches[0]] == [2]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 31, 60])
def test_one_sequence_may_fill_every_rank_exactly(ranks: int) -> None:
    plan = hcp.plan([ranks * CAPACITY], ranks=ranks, max_tokens_per_rank=CAPACITY)
    assert plan.micro_batches == ((Group(0, ranks, (0,)),),)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_one_token_more_than_the_domain_holds_is_refused(ranks: int) -> None:
    length = ranks * CAPACITY + 1
    with pytest.raises(ValueError, match=rf"lengths\[1\] is {length}: the fullest of {ranks}"):
        hcp.plan([5, length], ranks=ranks, max_tokens_per_rank=CAPACITY)


def test_equal_lengths_spread_evenly() -> None:
    plan = hcp.plan([CAPACITY] * 16, ranks=8, max_tokens_per_rank=CAPACITY)
    assert plan.makespan <= 1.01 * plan.bound


def test_one_and_a_half_sequences_a_rank_leave_no_rank_idle_at_the_end() -> None:
    """Three half-width waves instead of two whole ones, one of them half empty."""
    cost = hcp.CostModel(exchange=0, launch=0)
    plan = hcp.plan([CAPACITY * 9 // 10] * 96, ranks=64, max_tokens_per_rank=CAPACITY, cost=cost)
    assert plan.makespan <= 1.01 * plan.bound


def test_short_sequences_share_a_micro_batch() -> None:
    plan = hcp.plan([8] * 64, ranks=2, max_tokens_per_rank=256)
    assert len(plan.micro_batches) == 1
    assert [group.degree for group in plan.micro_batches[0]] == [1, 1]


def test_a_giant_with_dust_ends_near_the_bound() -> None:
    lengths = [30_000] + [100] * 500
    plan = hcp.plan(lengths, ranks=8, max_tokens_per_rank=8192)
    assert plan.makespan <= 1.1 * plan.bound


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_equal_degrees_make_a_static_plan(degree: int) -> None:
    plan = hcp.plan(
        [700, 30, 512, 900] * 4,
        ranks=8,
        max_tokens_per_rank=CAPACITY,
        min_degree=degree,
        max_degree=degree,
    )
    groups = [group for batch in plan.micro_batches for group in batch]
    assert {group.degree for group in groups} == {degree}
    assert all(group.first_rank % degree == 0 for group in groups)


def test_dynamic_is_never_slower_than_static_on_heavy_tails() -> None:
    lengths = [int(200 * math.exp(1.3 * ((i * 37) % 41 - 20) / 10)) for i in range(64)]
    capacity = 2048
    dynamic = hcp.plan(lengths, ranks=8, max_tokens_per_rank=capacity)
    static = hcp.plan(lengths, ranks=8, max_tokens_per_rank=capacity, min_degree=4, max_degree=4)
    assert dynamic.makespan < static.makespan


@pytest.mark.parametrize(("seed", "most"), [(0, 1.024), (1, 1.028), (2, 1.028), (3, 1.023)])
def test_many_sequences_of_half_a_rank_take_no_longer_than_with_less_freedom(
    seed: int, most: float
) -> None:
    """512 sequences of 1K to 16K on 32 ranks of 4,096 rows, where a micro-batch costs much: as few
    micro-batches as static CP needs, and none higher. Without those that waves_level.c fills, each
    plan is 1% longer."""
    random = Random(seed)
    lengths = [int(1024 / (1 - random.random() * 15 / 16)) // 8 * 8 for _ in range(512)]
    price = hcp.CostModel(
        pair=1, token=8_600, exchange=150, launch=9_500_000, step=57_000, overlap=1
    )
    request: dict[str, Any] = {"ranks": 32, "max_tokens_per_rank": 4096, "cost": price}
    request |= {"sync": "micro_batch", "ranks_per_node": 8}
    dynamic = hcp.plan(lengths, **request)
    assert dynamic.makespan <= dynamic.bound * most
    for least, largest in ((4, 4), (2, 32), (4, 32)):
        strict = hcp.plan(lengths, **request, min_degree=least, max_degree=largest)
        assert dynamic.makespan <= strict.makespan * 1.001


# ---- checksum ------------------------------------------------------------------------------------


def test_the_checksum_tells_any_difference() -> None:
    base: dict[str, Any] = {"ranks": 4, "max_tokens_per_rank": 100, "min_degree": 1}
    variants = [
        hcp.plan([60, 70, 80], **base),
        hcp.plan([60, 70, 81], **base),
        hcp.plan([70, 60, 80], **base),
        hcp.plan([60, 70], **base),
        hcp.plan([60, 70, 80], **(base | {"ranks": 5})),
        hcp.plan([60, 70, 80], **(base | {"max_tokens_per_rank": 101})),
        hcp.plan([60, 70, 80], **(base | {"min_degree": 2})),
        hcp.plan([60, 70, 80], **base, cost=hcp.CostModel(launch=7)),
    ]
    assert len({plan.checksum for plan in variants}) == len(variants)
    assert all(a != b for a, b in itertools.combinations(variants, 2))
    assert variants[0] != variants[0].to_dict()


# ---- bad input -----------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"lengths": [5], "ranks": 2, "max_tokens_per_rank": 8}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ranks": 0}, ValueError, "ranks is 0, expected >= 1"),
        ({"max_tokens_per_rank": 0}, ValueError, "max_tokens_per_rank is 0, expected 1 to"),
        ({"min_degree": 0}, ValueError, "min_degree is 0, expected 1 to ranks"),
        ({"min_degree": 3}, ValueError, r"min_degree is 3, expected 1 to ranks \(2\)"),
        ({"max_degree": 3}, ValueError, "max_degree is 3, expected min_degree"),
        ({"min_degree": 2, "max_degree": 1}, ValueError, r"expected min_degree \(2\)"),
        ({"lengths": [5, 0]}, ValueError, r"lengths\[1\] is 0, expected 1 to"),
        ({"lengths": [-3]}, ValueError, r"lengths\[0\] is -3, expected 1 to"),
        ({"lengths": [1.5]}, ValueError, r"lengths\[0\] is 1.5, expected an integer"),
        (
            {"lengths": [2**70]},
            ValueError,
            rf"lengths\[0\] is {2**70}, expected -2\^63 to 2\^63 - 1",
        ),
        ({"lengths": 5}, ValueError, "lengths is 5, expected a sequence of integers"),
        ({"ranks": 4.0}, ValueError, "ranks is 4.0, expected an integer"),
        ({"ranks": 2**40}, ValueError, rf"^ranks is {2**40}, expected -2\^31 to 2\^31 - 1"),
        ({"min_degrees": [2**40]}, ValueError, rf"min_degrees\[0\] is {2**40}, expected -2\^31 to"),
        ({"max_tokens_per_rank": 2**70}, ValueError, rf"^max_tokens_per_rank is {2**70}, expected"),
        (
            {"pipeline_stages": -(2**31) - 1},
            ValueError,
            "^pipeline_stages is -2147483649, expected",
        ),
        ({"cost": hcp.CostModel(pair=2**70)}, ValueError, rf"^cost.pair is {2**70}, expected"),
        ({"max_tokens_per_rank": "5"}, ValueError, "^max_tokens_per_rank is '5', expected an int"),
        ({"ranks": True}, ValueError, "ranks is True, expected an integer"),
        ({"lengths": [3, True]}, ValueError, r"lengths\[1\] is True, expected an integer"),
        ({"effort": 2**40}, ValueError, rf"^effort is {2**40}, expected -2\^31 to 2\^31 - 1"),
        ({"effort": 1.0}, ValueError, r"^effort is 1\.0, expected an integer"),
        (
            {"cost": hcp.CostModel(table=TimeTable((5,), (1,), (2**63,)))},
            ValueError,
            r"table.times\[0\] is 9223372036854775808, expected",
        ),
        (
            {"lengths": [17]},
            ValueError,
            "the fullest of 2 ranks .* would hold 9 rows, expected <= 8",
        ),
    ],
)
def test_bad_input_is_refused_with_value_and_expectation(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hcp.plan(**(GOOD | change))


CALLS: dict[str, Callable[[_core.Plan, Any], object]] = {
    "micro_batch": lambda core, big: _core.create_layout(core, big, 0),
    "rank": lambda core, big: _core.create_layout(core, 0, big),
    "inner": lambda core, big: core.schedule(0, 0, "p2p", big, -1, 0, 1),
    "left": lambda core, big: core.schedule(0, 0, "p2p", 1, big, 0, 1),
    "right": lambda core, big: core.schedule(0, 0, "p2p", 1, -1, big, 1),
    "stage_tokens": lambda core, big: core.schedule(0, 0, "p2p", 1, -1, 0, big),
    "first": lambda core, big: core.route_dispatch([0, 1], 0, big, 1, False),
    "count": lambda core, big: core.route_dispatch([0, 1], 0, 0, big, False),
    "shift": lambda core, big: core.route_roll(0, 0, big),
    "before": lambda core, big: core.route_halo(0, 0, big),
    "stages": lambda core, big: _core.pipeline_time([1], big, 1, 1),
    "virtual_stages": lambda core, big: _core.pipeline_time([1], 1, big, 1),
    "group": lambda core, big: _core.pipeline_time([1], 1, 1, big),
    "length": lambda core, big: _core.cost_time(core.prices, None, big, 1, 0, -1),
    "degree": lambda core, big: _core.cost_time(core.prices, None, 1, big, 0, -1),
    "pairs": lambda core, big: _core.cost_time(core.prices, None, 1, 1, 0, big),
    "ranks_per_node": lambda core, big: _core.cost_time(core.prices, None, 1, 1, big, -1),
}
"""Integers of the core's functions, by name."""


@pytest.mark.parametrize(
    "sequence",
    [
        [3, -1, 2**31 - 1],
        (3, -1, 2**31 - 1),
        array("i", [3, -1, 2**31 - 1]),
        array("q", [3, -1, 2**31 - 1]),
        memoryview(array("l", [3, -1, 2**31 - 1])),
        memoryview(array("i", [3, 0, -1, 0, 2**31 - 1, 0]))[::2],
    ],
    ids=["list", "tuple", "int32", "int64", "long", "strided"],
)
def test_the_core_reads_integers_from_lists_and_from_memory(sequence: Any) -> None:
    assert array("i", _core.int32s(sequence, "x")).tolist() == [3, -1, 2**31 - 1]
    assert array("i", _core.int32s(sequence[:0], "x")).tolist() == []


def test_the_core_names_an_integer_in_memory_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^x\[1\] is -2147483649, expected -2\^31 to 2\^31 - 1$"):
        _core.int32s(array("q", [0, -(2**31) - 1]), "x")
    for other in (array("d", [0.0, 1.5]), array("B", [1]), array("I", [7])):
        if other.typecode == "d":
            with pytest.raises(ValueError, match=r"^x\[0\] is 0.0, expected an integer$"):
                _core.int32s(cast(Any, other), "x")
        else:
            assert array("i", _core.int32s(cast(Any, other), "x")).tolist() == list(other)


def test_a_vector_that_lies_about_its_length_is_read_as_far_as_it_says() -> None:
    class Short(array):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 10**6

    with pytest.raises(IndexError):
        _core.int32s(Short("i", [1, 2]), "x")


def test_plans_from_memory_are_those_from_lists() -> None:
    lengths = [5, 9, 2, 16]
    request = {"ranks": 3, "max_tokens_per_rank": 16}
    made = hcp.plan(lengths, **cast(Any, request))
    for kind in (array("q", lengths), array("i", lengths), torch.tensor(lengths)):
        assert hcp.plan(cast(Any, kind), **cast(Any, request)).checksum == made.checksum


def test_counting_micro_batches_makes_no_groups() -> None:
    plan = hcp.plan([8] * 5, ranks=1, max_tokens_per_rank=8)
    assert plan.micro_batch_count == 5
    assert "micro_batches" not in vars(plan)
    assert len(plan.micro_batches) == 5


@pytest.mark.parametrize("name", CALLS)
def test_an_integer_too_large_for_the_core_is_named_as_any_other(name: str) -> None:
    core = hcp.plan(**GOOD).core
    with pytest.raises(ValueError, match=rf"^{name} is {2**70}, expected -2\^(31|63) to "):
        CALLS[name](core, 2**70)
    with pytest.raises(ValueError, match=f"^{name} is True, expected an integer$"):
        CALLS[name](core, True)


@pytest.mark.parametrize("table", [5, [[5], [1], [2]]])
def test_the_core_says_what_a_table_is(table: Any) -> None:
    message = rf"^cost.table is {re.escape(repr(table))}, expected a tuple of 3: lengths, degrees"
    with pytest.raises(TypeError, match=message):
        _core.cost_time(hcp.CostModel().prices, table, 1, 1, 0, -1)


def test_a_cost_function_is_asked_for_every_degree_to_64_then_for_16_an_octave() -> None:
    asked: set[int] = set()

    def seconds(length: int, degree: int) -> float:
        asked.add(degree)
        return 1.0

    cost = hcp.CostModel.from_function(seconds)
    plan = hcp.plan(
        [5], ranks=300, max_tokens_per_rank=8, min_degree=2, max_degree=np.int64(299), cost=cost
    )
    large = [*range(68, 128, 4), *range(128, 256, 8), *range(256, 299, 16), 299]
    assert plan.cost.table is not None
    assert list(plan.cost.table.degrees) == [*range(2, 65), *large]
    assert asked <= set(plan.cost.table.degrees)


@pytest.mark.parametrize("price", ["pair", "token", "exchange", "launch"])
def test_a_negative_price_is_refused(price: str) -> None:
    with pytest.raises(ValueError, match=rf"cost\.{price} is -1, expected an integer >= 0"):
        hcp.CostModel(**{price: -1})


def test_the_core_names_what_it_was_given_in_place_of_a_plan_or_a_comm_type() -> None:
    with pytest.raises(TypeError, match="plan is 7, expected a Plan"):
        _core.create_layout(cast(Any, 7), 0, 0)
    plan = hcp.plan(**GOOD)
    with pytest.raises(
        ValueError, match=r"is 'ring', expected one of 'p2p', 'all_gather', 'a2a', 'a2a\+p2p'$"
    ):
        plan.core.schedule(0, 0, "ring", 1, -1, -1, 0)


def test_costs_that_exceed_62_bits_are_refused() -> None:
    cost = hcp.CostModel(pair=2**62)
    with pytest.raises(OverflowError, match="exceeds 62 bits"):
        hcp.plan([8], ranks=1, max_tokens_per_rank=8, cost=cost)


def data(*groups: tuple[int, int, list[int]], **extra: Any) -> dict[str, Any]:
    named = [{"first_rank": f, "degree": d, "sequences": s} for f, d, s in groups]
    return {
        "ranks": 4,
        "max_tokens_per_rank": 8,
        "lengths": [4, 16],
        "micro_batches": [{"groups": named}],
    } | extra


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (data((0, 1, [0]), (1, 3, [0])), r"groups\[1\] has sequence 0, which is there already"),
        (data((0, 4, [1])), "the plan has 1 sequences, expected 2"),
        (data((0, 1, [0]), (3, 2, [1])), r"groups\[1\] has ranks 3 to 4, expected them within 0"),
        (data((0, 2, [0]), (1, 2, [1])), r"groups\[1\] starts at rank 1 of micro-batch 0"),
        (data((0, 1, [1]), (1, 1, [0])), r"groups\[0\] puts up to 16 rows on a rank"),
        (data((0, 1, [0]), (1, 3, [2])), r"groups\[1\] has sequence 2, expected 0 to 1"),
        (data((0, 1, [0]), (1, 3, [1]), max_degree=2), r"groups\[1\].degree is 3, expected 1 to 2"),
        (data((0, 1, []), (1, 3, [0, 1])), r"groups\[0\] has 0 members, expected >= 1"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hcp.Plan.from_dict(plan)


def test_limits_are_the_arguments_of_a_plan_and_what_the_core_takes() -> None:
    asked = inspect.signature(hcp.plan).parameters
    own = inspect.signature(Limits).parameters
    assert {name: asked[name] for name in own if name in asked} == {
        name: p for name, p in own.items() if name != "slowness"
    }
    assert asked.keys() - own.keys() == {"lengths", "cost", "effort", "pairs", "masks"}
    limits = Limits(ranks=4, max_tokens_per_rank=9)
    assert len(limits.numbers()) == len(_core.LIMITS)
    assert len(limits.lists()) == len(_core.LIMIT_LISTS)


def test_rows_of_groups_and_sequences_of_micro_batches_are_those_of_its_objects() -> None:
    lengths = [7, 900, 30, 500, 500, 2, 1]
    plan = hcp.plan(lengths, ranks=4, max_tokens_per_rank=512, sync="micro_batch")
    groups = [group for batch in plan.micro_batches for group in batch]
    assert [row[:2] for row in plan.group_rows()] == [[g.first_rank, g.degree] for g in groups]
    for m, batch in enumerate(plan.micro_batches):
        assert plan.sequences_of(m) == [s for group in batch for s in group.sequences]


def test_no_objects_of_groups_are_made_for_numbers_of_a_plan() -> None:
    plan = hcp.plan([7, 900, 30], ranks=4, max_tokens_per_rank=512)
    plan.report()
    plan.to_dict()
    repr(plan)
    stats_of(plan, 0, None, 0)
    assert "micro_batches" not in vars(plan)


def test_a_plan_keeps_the_seconds_of_a_unit() -> None:
    cost = hcp.CostModel.from_seconds(token=2.5e-5, launch=1e-3, host=2e-3)
    plan = hcp.plan([9, 70], ranks=2, max_tokens_per_rank=64, cost=cost)
    assert plan.cost == cost
    assert plan.makespan * plan.cost.unit == pytest.approx(2e-3, rel=1e-3)
    data = json.loads(json.dumps(plan.to_dict()))
    for copy in (hcp.Plan.from_dict(data), pickle.loads(pickle.dumps(plan))):
        assert (copy.cost, copy.checksum) == (cost, plan.checksum)
    assert plan.with_masks([None] * 2).cost == cost
    assert hcp.plan([9], ranks=1, max_tokens_per_rank=64).cost.unit is None
    data = plan.to_dict()
    data["cost"]["unit"] = 0
    with pytest.raises(ValueError, match=r"cost\.unit is 0, expected seconds > 0"):
        hcp.Plan.from_dict(data)
