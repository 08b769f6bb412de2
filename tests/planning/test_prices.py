"""The core's rows, bytes and times of groups equal those that slow and obvious Python finds."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import comm_prices, plan_prices, planning

import hcp
from hcp import _core
from hcp.exchange.layout import Layout
from hcp.exchange.sizes import STAGE_TOKENS
from hcp.planning.cost import TimeTable
from hcp.planning.limits import allowed_degrees, rows_held, rows_up_to
from hcp.planning.plan import Group
from hcp.tools.replay import Machine, replay
from hcp.tools.timeline import timeline

SEEDS = st.integers(0, 2**32)
HEADS = [(1, 1), (8, 2), (6, 3), (5, 5), (32, 8), (24, 2), (3, 1)]


def drawn_plan(seed: int) -> hcp.Plan | None:
    """A plan of drawn limits, None for a request that has none."""
    request = planning.draw(Random(seed))
    try:
        return hcp.plan(**request)
    except (ValueError, OverflowError, TypeError):
        return None


def groups_of(plan: hcp.Plan) -> list[Group]:
    return [group for batch in plan.micro_batches for group in batch]


# ---- rows, nodes, bytes --------------------------------------------------------------------------


@given(st.integers(0, 400), st.integers(1, 40))
def test_rows_are_those_of_the_chunks(length: int, degree: int) -> None:
    own = [rows_held(length, degree, j) for j in range(degree)]
    assert own == [plan_prices.rows_held(length, degree, j) for j in range(degree)]
    assert sum(own) == length
    assert rows_up_to(length, degree) == plan_prices.rows_up_to(length, degree)


@given(st.integers(1, 40), st.integers(0, 12))
def test_nodes_allow_what_one_holds_or_whole_ones(ranks: int, node: int) -> None:
    expected = [d for d in range(1, ranks + 1) if not node or d <= node or d % node == 0]
    assert allowed_degrees(range(1, ranks + 1), node) == expected
    for first in range(ranks):
        group = Group(first, ranks, ())
        assert _core.nodes_of(first, ranks, node) == plan_prices.nodes_of(group, node)


@settings(max_examples=200)
@given(
    st.builds(
        hcp.MemoryModel,
        activation=st.integers(0, 99),
        logit=st.integers(0, 9),
        gathered=st.integers(0, 99),
        attention=st.integers(0, 99),
        head_chunks=st.integers(1, 40),
        limit=st.integers(0, 40_000),
        buffer=st.integers(0, 900),
    ),
    st.integers(0, 200),
    st.integers(0, 500),
    st.integers(1, 5),
)
def test_bytes_and_chunks_of_heads(
    memory: hcp.MemoryModel, rows: int, tokens: int, degree: int
) -> None:
    place = rows, tokens, degree
    assert memory.bytes(*place) == plan_prices.bytes_of(memory, *place, memory.head_chunks)
    assert memory.bytes(*place, 3) == plan_prices.bytes_of(memory, *place, 3)
    assert _core.memory_chunks(memory.numbers(), *place) == plan_prices.chunks_for(memory, *place)


def test_bytes_that_do_not_fit_are_the_largest_integer() -> None:
    assert hcp.MemoryModel(activation=2**50).bytes(2**31, 0, 1) == 2**63 - 1
    assert hcp.MemoryModel(activation=2**62, logit=2**62).bytes(1, 0, 1) == 2**63 - 1


# ---- plans ---------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_what_a_plan_gives_its_ranks(seed: int) -> None:
    plan = drawn_plan(seed)
    if plan is None:
        return
    for group in groups_of(plan):
        assert plan.group_times(group) == plan_prices.group_times(plan, group)
    rows, needed, busy, ends, sums = _core.measure_plan(plan.core)
    assert (rows, needed, busy, max(ends), sums) == plan_prices.measured(plan)
    if plan.core.pipeline_stages < 2:
        assert max(ends) == plan.makespan


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_a_replay_is_the_slow_one(seed: int) -> None:
    plan, random = drawn_plan(seed), Random(seed)
    if plan is None or plan.core.pipeline_stages > 1:
        return
    times = {name: random.choice([0, random.random()]) for name in _core.MACHINE_TIMES}
    node = random.choice([0, 1, 2, 3, 8])
    machine = Machine(
        **times, overlap=random.randrange(2), ranks_per_node=node, once=node > 0 and seed % 2 == 0
    )
    assert replay(plan, machine) == plan_prices.replayed(plan, machine)


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_a_replay_refuses_one_byte_less_than_the_fullest_rank_needs(seed: int) -> None:
    plan, random = drawn_plan(seed), Random(seed)
    if plan is None or plan.core.pipeline_stages > 1 or not plan.micro_batches:
        return
    memory = hcp.MemoryModel(
        activation=random.randint(1, 9), gathered=random.randrange(9), attention=random.randrange(9)
    )
    needed = max(
        plan_prices.bytes_held(memory, held, group.degree)
        for group in groups_of(plan)
        for held in plan_prices.held_by(plan, group)
    )
    replay(plan, Machine(memory=replace(memory, limit=needed)))
    if needed > 1:
        with pytest.raises(ValueError, match=f"needs {needed} bytes on a rank"):
            replay(plan, Machine(memory=replace(memory, limit=needed - 1)))


def test_the_core_takes_the_times_of_a_machine_in_its_order() -> None:
    floats = tuple(each.name for each in fields(Machine) if each.type == "float")
    assert floats == _core.MACHINE_TIMES


def test_a_group_that_the_plan_has_not_is_refused() -> None:
    plan = hcp.plan([8, 9], ranks=2, max_tokens_per_rank=16)
    with pytest.raises(ValueError, match=r"sequences\[1\] is 2, expected 0 to 1"):
        plan.group_times(Group(0, 1, (0, 2)))
    with pytest.raises(ValueError, match="a group has 2 ranks from rank 1 on, expected some of"):
        plan.group_times(Group(1, 2, (0,)))


# ---- comm types ----------------------------------------------------------------------------------


def drawn_cost(random: Random) -> hcp.CostModel:
    def price(most: int) -> int:
        return random.choice([0, random.randint(0, most)])

    return hcp.CostModel(
        pair=random.randint(1, 50),
        token=price(5000),
        exchange=price(5000),
        launch=price(100_000),
        exchange_far=price(9000),
        all_to_all=price(5000),
        all_to_all_far=price(9000),
        step=price(5000),
        tile=random.choice([0, 0, 16, 128]),
        overlap=random.randrange(2),
    )


def drawn_group(random: Random) -> hcp.Plan:
    """One group of any place and degree, in nodes or not."""
    degree, node = random.randint(2, 24), random.choice([0, 0, 2, 3, 4, 8])
    if node and degree > node:
        degree = -(-degree // node) * node
    room = degree % node == 0 if node else True
    first = random.randrange(4) * (node if node and room else degree)
    if node and degree < node:
        first = random.randrange(4) * node + random.randrange(node - degree + 1)
    lengths = [int(2 ** random.uniform(0, 17)) for _ in range(random.randint(1, 8))]
    group = {"first_rank": first, "degree": degree, "sequences": list(range(len(lengths)))}
    request: dict[str, Any] = {
        "ranks": first + degree,
        "max_tokens_per_rank": 1 << 30,
        "ranks_per_node": node,
        "lengths": lengths,
        "cost": dict(zip(_core.PRICES, drawn_cost(random).prices, strict=True)),
        "micro_batches": [{"groups": [group]}],
    }
    return hcp.Plan.from_dict(request)


@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_times_of_comm_types_are_exact(seed: int) -> None:
    random = Random(seed)
    plan, heads = drawn_group(random), random.choice(HEADS)
    layout = Layout(plan, 0, plan.ranks - 1)
    window = random.choice([(-1, 0), (-1, -1), (random.randrange(5000), random.randrange(99))])
    if random.random() < 0.3:  # shorter than chunks, so that most attention is over own rows
        window = random.randrange(32), random.randrange(4)
    packed, rows_only = random.random() < 0.5, heads[1] == 1 and random.random() < 0.5
    given = window, heads, packed, rows_only, random.random() < 0.5
    found = _core.comm_times(plan.core, 0, layout.rank, *window, *heads, *given[2:], STAGE_TOKENS)
    assert found == comm_prices.listed(comm_prices.times(plan, layout, *given))
    inner = comm_prices.inner_sizes(plan, layout, heads[0])
    for most in (1, 3, 8, 100):
        expected = max(m for m in inner if m <= most)
        assert _core.comm_inner(plan.core, 0, layout.rank, heads[0], most) == expected


def test_times_that_do_not_fit_are_refused() -> None:
    table = TimeTable((2**30,), (4,), (1,))
    cost = hcp.CostModel(pair=2**62, token=0, exchange=0, launch=0, table=table)
    plan = hcp.plan([2**30], ranks=4, max_tokens_per_rank=2**30, min_degree=4, cost=cost)
    with pytest.raises(OverflowError, match="for 1073741824 tokens on 4 ranks does not fit"):
        _core.comm_times(plan.core, 0, 0, -1, 0, 8, 2, True, False, False, STAGE_TOKENS)


@pytest.mark.parametrize("heads", [(0, 1), (3, 2), (4, 0)])
def test_heads_that_are_no_multiple_are_refused(heads: tuple[int, int]) -> None:
    plan = hcp.plan([64], ranks=2, max_tokens_per_rank=64, min_degree=2)
    with pytest.raises(ValueError, match="expected a multiple of the"):
        _core.comm_times(plan.core, 0, 0, -1, 0, *heads, True, False, False, STAGE_TOKENS)


def test_a_rank_alone_has_no_comm_type() -> None:
    plan = hcp.plan([64], ranks=2, max_tokens_per_rank=64, max_degree=1)
    with pytest.raises(ValueError, match=r"is in a group of [01] ranks, expected >= 2"):
        _core.comm_times(plan.core, 0, 0, -1, 0, 8, 2, True, False, False, STAGE_TOKENS)


# ---- the host ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("work", "takes"), [(1, 100), (89, 100), (90, 100), (91, 101), (500, 510)])
def test_a_micro_batch_takes_the_larger_of_the_hosts_time_and_its_own(
    work: int, takes: int
) -> None:
    cost = hcp.CostModel(pair=0, token=1, exchange=0, launch=10, host=100)
    assert cost.launched(work) == takes
    for sync in ("step", "micro_batch"):
        plan = hcp.plan([work], ranks=1, max_tokens_per_rank=1000, cost=cost, sync=sync)
        assert plan.makespan == plan.bound == takes
        assert plan.group_time(plan.micro_batches[0][0]) == takes
        assert max(box.end for box in timeline(plan)) == takes
        assert plan.cost.host == 100
        assert hcp.Plan.from_dict(plan.to_dict()).checksum == plan.checksum


def test_a_host_below_launch_changes_no_plan_but_its_checksum() -> None:
    lengths = [1 + 37 * i % 900 for i in range(60)]
    request: dict[str, Any] = {"ranks": 8, "max_tokens_per_rank": 1024}
    without = hcp.plan(lengths, **request, cost=hcp.CostModel())
    below = hcp.plan(lengths, **request, cost=hcp.CostModel(host=hcp.CostModel().launch))
    assert below.micro_batches == without.micro_batches
    assert (below.makespan, below.bound) == (without.makespan, without.bound)
    assert below.checksum != without.checksum


def test_ranks_without_rows_take_their_hosts_time_each_micro_batch() -> None:
    cost = hcp.CostModel(pair=0, token=1, exchange=0, launch=10, host=100)
    data = {
        "lengths": [500, 7, 7],
        "ranks": 2,
        "max_tokens_per_rank": 1000,
        "cost": dict(zip(_core.PRICES, cost.prices, strict=True)),
        "micro_batches": [
            {"groups": [{"first_rank": 0, "degree": 1, "sequences": [0]}]},
            {"groups": [{"first_rank": 1, "degree": 1, "sequences": [1]}]},
            {"groups": [{"first_rank": 1, "degree": 1, "sequences": [2]}]},
        ],
    }
    plan = hcp.Plan.from_dict(data)
    assert plan.makespan == 510 + 100 + 100


def test_a_bound_counts_the_hosts_time_of_as_many_micro_batches_as_hold_all_rows() -> None:
    cost = hcp.CostModel(pair=0, token=1, exchange=0, launch=0, host=100)
    for sync in ("step", "micro_batch"):
        plan = hcp.plan([10] * 8, ranks=2, max_tokens_per_rank=10, cost=cost, sync=sync)
        assert plan.bound == plan.makespan == 4 * 100


def test_a_host_that_needs_long_means_few_micro_batches() -> None:
    random = Random(0)
    lengths = [30_000] * 3 + [random.randint(100, 900) for _ in range(300)]
    request: dict[str, Any] = {"ranks": 8, "max_tokens_per_rank": 16_384}
    cost = replace(hcp.CostModel(launch=10**6), host=10**9)
    plan = hcp.plan(lengths, **request, cost=cost)
    without = hcp.plan(lengths, **request, cost=replace(cost, host=0)).to_dict()
    again = hcp.Plan.from_dict({**without, "cost": plan.to_dict()["cost"]})
    assert plan.micro_batch_count < again.micro_batch_count
    assert plan.makespan < again.makespan
