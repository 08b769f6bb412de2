"""Plans replayed on machines whose times are round numbers."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest

import hcp
from hcp.tools.replay import Machine, replay


def plan_of(
    lengths: list[int], *micro_batches: list[tuple[int, int, list[int]]], **more: Any
) -> hcp.Plan:
    """Make a plan of (first rank, degree, sequences)."""
    batches = [
        {"groups": [{"first_rank": f, "degree": d, "sequences": s} for f, d, s in groups]}
        for groups in micro_batches
    ]
    ranks = max(f + d for groups in micro_batches for f, d, _ in groups)
    return hcp.Plan.from_dict(
        {"ranks": ranks, "max_tokens_per_rank": 10_000, "lengths": lengths}
        | {"micro_batches": batches}
        | more
    )


def test_a_rank_alone_takes_the_sum_of_its_prices() -> None:
    found = replay(plan_of([4], [(0, 1, [0])]), Machine(pair=1, token=10, launch=100, near=1e9))
    assert found.seconds == 10 * 1 + 4 * 10 + 100
    assert found.exposed == (0.0,)
    assert found.idle_share == 0


def test_ranks_of_a_cost_model_alone_end_at_the_makespan() -> None:
    random = Random(3)
    lengths = [random.randint(1, 3000) for _ in range(40)]
    cost = hcp.CostModel.preset("gpt-1b-h200")
    plan = hcp.plan(lengths, ranks=8, max_tokens_per_rank=4096, max_degree=1, cost=cost)
    assert cost.unit is not None
    assert replay(plan, Machine.of(cost)).seconds == pytest.approx(plan.makespan * cost.unit)


@pytest.mark.parametrize(
    ("first", "degree", "near", "far"),
    [(0, 8, 7, 0), (0, 16, 7, 8), (4, 8, 3, 4), (6, 5, 2, 3), (8, 24, 7, 16)],
)
def test_rows_of_other_nodes_come_over_their_own_link(
    first: int, degree: int, near: int, far: int
) -> None:
    plan = plan_of([48 * degree], [(first, degree, [0])])
    slow_near = replay(plan, Machine(near=1, far=0, ranks_per_node=8))
    slow_far = replay(plan, Machine(near=0, far=1, ranks_per_node=8))
    both = replay(plan, Machine(near=1, far=1, ranks_per_node=8))
    # The rank with the fewest neighbours in its node has the most rows from other nodes.
    assert slow_near.seconds == 48 * near
    assert slow_far.seconds == 48 * (degree - fewest(first, degree) if far else 0)
    assert both.seconds == max(slow_near.seconds, slow_far.seconds)
    few = fewest(first, degree)
    once = replay(plan, Machine(near=1e-3, far=1, ranks_per_node=8, once=True))
    crossed = 48 * (degree - few) / few if far else 0
    assert once.seconds == pytest.approx(max(crossed, 48e-3 * (degree - 1)))


def fewest(first: int, degree: int) -> int:
    nodes = [rank // 8 for rank in range(first, first + degree)]
    return min(nodes.count(node) for node in set(nodes))


@pytest.mark.parametrize(
    ("overlap", "near", "exposed"),
    [
        (0, 30, 720 - 33),  # 24 rows, of which attention over own rows, 33, hides some
        (0, 1, 8),  # gradients, a third of the rows, are never hidden
        (1, 30, 720 - 99),
        (1, 1, 0),
    ],
)
def test_attention_hides_rows_that_arrive_meanwhile(
    overlap: int, near: int, exposed: float
) -> None:
    """32 tokens on 4 ranks: 132 pairs on each."""
    plan = plan_of([32], [(0, 4, [0])])
    found = replay(plan, Machine(pair=1, near=near, overlap=overlap))
    assert found.exposed == (exposed,) * 4
    assert found.seconds == 132 + exposed


def test_hosts_queue_ahead_of_their_gpus() -> None:
    """Micro-batches of 100, 1 and 1 seconds, each queued in 30."""
    machine = Machine(token=1, host=30, host_shared=40)
    long_first = replay(plan_of([100, 1, 1], [(0, 1, [0])], [(0, 1, [1])], [(0, 1, [2])]), machine)
    assert long_first.seconds == 102
    short_first = replay(plan_of([100, 1, 1], [(0, 1, [1])], [(0, 1, [2])], [(0, 1, [0])]), machine)
    assert short_first.seconds == 30 + 30 + 100
    assert short_first.host == (58.0,)
    together = replay(plan_of([2], [(0, 2, [0])]), machine)
    assert together.seconds == 40


@pytest.mark.parametrize("behind", [0, 1])
def test_a_group_waits_for_the_host_that_is_behind(behind: int) -> None:
    """The middle rank's host queued a shared micro-batch before, that of the other none."""
    plan = plan_of([2, 2], [(behind, 2, [0])], [(1 - behind, 2, [1])])
    found = replay(plan, Machine(token=1, host=30, host_shared=40))
    assert found.seconds == 40 + 40
    assert found.host[2 if behind == 0 else 0] == 30 + 39


def test_a_rank_without_rows_launches_and_queues_all_the_same() -> None:
    plan = plan_of([1, 1, 1], [(0, 1, [0])], [(0, 1, [1])], [(1, 1, [2])])
    assert replay(plan, Machine(token=1, launch=100)).seconds == 302
    assert replay(plan, Machine(token=1, launch=100)).busy == (302, 301)
    assert replay(plan, Machine(token=1, host=30)).seconds == 90


def test_micro_batches_in_lockstep_wait_for_the_slowest_rank() -> None:
    batches = [(0, 1, [0]), (1, 1, [1])], [(0, 1, [2]), (1, 1, [3])]
    machine = Machine(token=1)
    free = plan_of([10, 1, 1, 10], *map(list, batches))
    lockstep = plan_of([10, 1, 1, 10], *map(list, batches), sync="micro_batch")
    assert replay(free, machine).seconds == 11
    assert replay(lockstep, machine).seconds == 20
    assert replay(lockstep, machine).idle_share == pytest.approx(1 - 22 / 40)


def test_a_micro_batch_over_the_memory_is_refused_before_anything_is_replayed() -> None:
    plan = plan_of([10, 8], [(0, 1, [0])], [(0, 2, [1])])
    memory = hcp.MemoryModel(activation=3, gathered=1, limit=30)
    assert replay(plan, Machine(token=1, memory=memory)).seconds == 14
    with pytest.raises(ValueError, match=r"micro-batch 0 needs 30 bytes .* from rank 0 on"):
        replay(plan, Machine(memory=hcp.MemoryModel(activation=3, gathered=1, limit=29)))
    with pytest.raises(ValueError, match="micro-batch 1 needs 60 bytes"):
        replay(plan, Machine(memory=hcp.MemoryModel(activation=3, gathered=6, limit=59)))


def test_rows_of_alignment_take_bytes_in_a_replay() -> None:
    memory = hcp.MemoryModel(activation=1, attention=100, limit=1000)
    request: dict[str, Any] = {"ranks": 2, "max_tokens_per_rank": 64, "min_degree": 2}
    plan = hcp.plan([8], **request, alignment=8)
    with pytest.raises(ValueError, match="needs 808 bytes"):  # 4 rows of the sequence, and 4 more
        replay(plan, Machine(memory=replace(memory, limit=807)))
    assert replay(plan, Machine(memory=memory)).seconds == 0


def test_what_a_machine_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"machine.near is -1, expected seconds >= 0"):
        Machine(near=-1)
    with pytest.raises(ValueError, match="ranks_per_node is 0, expected >= 1 with once"):
        Machine(once=True)
    with pytest.raises(ValueError, match="no unit"):
        Machine.of(hcp.CostModel())
    with pytest.raises(ValueError, match="has a all_to_all_far"):
        Machine.of(hcp.CostModel.preset("flexsp-7b"))
    staged = hcp.plan([8, 8], ranks=1, max_tokens_per_rank=8, pipeline_stages=2)
    with pytest.raises(ValueError, match="2 pipeline stages, expected 1"):
        replay(staged, Machine())


def test_prices_of_a_machine_make_the_same_machine() -> None:
    machine = Machine(
        pair=2e-9, token=1e-5, launch=1e-2, shared=1e-6, step=1e-4, near=1e-6, far=4e-6
    )
    again = Machine.of(machine.prices())
    assert all(
        getattr(again, each.name) == pytest.approx(getattr(machine, each.name))
        for each in fields(Machine)
        if each.type == "float"
    )


def test_rows_that_cross_once_have_a_lower_price_between_nodes() -> None:
    machine = Machine(pair=1e-9, near=1e-6, far=4e-6, ranks_per_node=2)
    each, once = machine.prices(), replace(machine, once=True).prices()
    assert (each.exchange, each.exchange_far) == (10**6, 4 * 10**6)
    assert (once.exchange, once.exchange_far) == (10**6, 2 * 10**6)


def test_a_group_is_as_slow_as_its_slowest_rank() -> None:
    plan = hcp.plan([8], ranks=2, max_tokens_per_rank=4, speeds=[1.0, 0.5])
    assert replay(plan, Machine(token=1, near=1)).seconds == 4 / 0.5 + 4
