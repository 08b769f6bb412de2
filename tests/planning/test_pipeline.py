"""Pipelines, bytes, bounds of single sequences and slow ranks, against slow answers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning import CHEAP_LAUNCHES

import hcp
from hcp import _core
from hcp.planning.plan import lower_bound
from hcp.tools.check import check_plan

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from common.small import instances
from studies.exact_pipeline import best_makespan

# ---- the simulation ------------------------------------------------------------------------------


def passes(stage: int, stages: int, chunks: int, group: int, n: int) -> list[tuple[bool, int, int]]:
    """(forward, micro-batch, chunk) in the order of a stage, as Megatron's schedules have it."""
    turns = [range(first, min(n, first + group)) for first in range(0, n, group)]
    forward = [(True, m, c) for turn in turns for c in range(chunks) for m in turn]
    backward = [(False, m, chunks - 1 - c) for _, m, c in forward]
    ahead = stages - 1 - stage
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * group
    ahead = min(ahead, len(forward))
    steady = [p for pair in zip(forward[ahead:], backward, strict=False) for p in pair]
    return forward[:ahead] + steady + backward[len(forward) - ahead :]


def slow_pipeline(
    batches: list[list[tuple[int, int, int]]], ranks: int, stages: int, chunks: int, group: int
) -> int:
    """When the last pass ends. batches: (first rank, degree, time) of their groups. Each pass ends
    after the one before it on its ranks, and after the same micro-batch on the link before."""
    n = -(-len(batches) // group) * group
    batches = batches + [[]] * (n - len(batches))
    queues = {
        (s, r): [
            (forward, m, c, g)
            for forward, m, c in passes(s, stages, chunks, group, n)
            for g, (first, degree, _) in enumerate(batches[m])
            if first <= r < first + degree
        ]
        for s in range(stages)
        for r in range(ranks)
    }
    before = {
        (s, *p): [(s, *queue[i - 1])] if i else []
        for (s, _), queue in queues.items()
        for i, p in enumerate(queue)
    }
    for (s, _), queue in queues.items():
        for i, p in enumerate(queue):
            if i:
                before[(s, *p)].append((s, *queue[i - 1]))

    def previous_link(s: int, forward: bool, m: int, c: int, g: int) -> tuple[Any, ...] | None:
        link = c * stages + s
        if not forward and link == stages * chunks - 1:
            return (s, True, m, c, g)
        link += -1 if forward else 1
        return None if link < 0 else (link % stages, forward, m, link // stages, g)

    @functools.cache
    def end(node: tuple[Any, ...]) -> int:
        s, forward, m, c, g = node
        needed = list(before[node])
        last = previous_link(s, forward, m, c, g)
        if last is not None:
            needed.append(last)
        return max(map(end, needed), default=0) + batches[m][g][2] * (1 if forward else 2)

    whole = max(map(end, before), default=0)
    return -(-whole // (3 * chunks))


pipelines = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2)).map(
    lambda p: (p[0], p[1] if p[0] > 1 else 1, p[2])
)


@settings(max_examples=150, deadline=None)
@given(pipelines, st.lists(st.integers(0, 40), max_size=9))
def test_micro_batches_take_what_their_passes_take(
    pipeline: tuple[int, int, int], times: list[int]
) -> None:
    stages, chunks, more = pipeline
    group = stages + more if chunks > 1 else 1
    times += [0] * (-len(times) % group)
    taken = _core.pipeline_time(times, stages, chunks, group if chunks > 1 else 0)
    assert taken == slow_pipeline([[(0, 1, t)] for t in times], 1, stages, chunks, group)


# ---- plans ---------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    ranks, capacity = draw(st.integers(1, 8)), draw(st.integers(4, 60))
    alignment = draw(st.integers(1, max(1, capacity // 4)))
    usable = capacity // alignment * alignment - 2
    lengths = draw(st.lists(st.integers(1, max(1, usable * ranks)), max_size=12))
    request: dict[str, Any] = {
        "lengths": lengths if usable > 0 else [],
        "ranks": ranks,
        "max_tokens_per_rank": capacity,
        "alignment": alignment,
        "sync": draw(st.sampled_from(["step", "micro_batch"])),
        "cost": hcp.CostModel(
            pair=draw(st.integers(1, 9)),
            token=draw(st.integers(0, 99)),
            exchange=draw(st.integers(0, 99)),
            launch=draw(st.integers(0, 3000)),
            host=draw(st.sampled_from([0, 0, 500, 9000])),
        ),
    }
    if draw(st.booleans()):
        stages, chunks, more = draw(pipelines)
        request |= {"pipeline_stages": stages, "virtual_stages": chunks}
        request |= {"micro_batch_group": stages + more} if chunks > 1 else {}
    if draw(st.booleans()):
        speeds = st.floats(0.5, 2.0, allow_nan=False)
        request["speeds"] = draw(st.lists(speeds, min_size=ranks, max_size=ranks))
    return request


def slow_makespan(plan: hcp.Plan) -> int:
    """Groups as slow as their slowest rank, in a pipeline or without."""
    slowness = plan.core.slowness or [65536] * plan.ranks
    batches = []
    for groups in plan.micro_batches:
        timed = []
        for first, degree, sequences in groups:
            time = plan.cost.launch + sum(
                plan.cost.time(plan.lengths[s], degree) for s in sequences
            )
            time = max(plan.cost.host, time)
            time = -(-time * max(slowness[first : first + degree]) // 65536)
            timed.append((first, degree, time))
        if plan.sync == "micro_batch":
            timed = [(0, plan.ranks, max((t for _, _, t in timed), default=0))]
        elif plan.core.pipeline_stages < 2:  # ranks without rows run their model, too
            busy = {r for first, degree, _ in timed for r in range(first, first + degree)}
            idle = max(plan.cost.host, plan.cost.launch)
            launches = [-(-idle * slow // 65536) for slow in slowness]
            timed += [(r, 1, launches[r]) for r in range(plan.ranks) if r not in busy]
        batches.append(timed)
    stages, chunks = max(1, plan.core.pipeline_stages), max(1, plan.core.virtual_stages)
    group = (plan.core.micro_batch_group or stages) if chunks > 1 else 1
    return slow_pipeline(batches, plan.ranks, stages, chunks, group)


@settings(max_examples=300, deadline=None)
@given(requests())
def test_a_plan_takes_what_its_passes_take_and_passes_the_check(request: dict[str, Any]) -> None:
    plan = hcp.plan(**request)
    check_plan(plan, request["lengths"])
    assert plan.bound <= plan.makespan == slow_makespan(plan)
    assert lower_bound(**request) == plan.bound
    assert hcp.plan(**request) == plan
    assert 0 <= plan.report().bubble < 1


@settings(max_examples=100, deadline=None)
@given(requests())
def test_a_plan_with_every_option_survives_json_and_pickle(request: dict[str, Any]) -> None:
    plan = hcp.plan(**request)
    for again in (
        hcp.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))),
        pickle.loads(pickle.dumps(plan)),
    ):
        assert (again.checksum, again.makespan, again.bound) == (
            plan.checksum,
            plan.makespan,
            plan.bound,
        )


def drawn_groups(request: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """A plan that nobody thought about: each sequence alone, anywhere it fits, in any order."""
    chosen = random.Random(seed)
    order = list(range(len(request["lengths"])))
    chosen.shuffle(order)
    capacity = request["max_tokens_per_rank"] // request["alignment"] * request["alignment"]
    batches = []
    for s in order:
        length, ranks = request["lengths"][s], request["ranks"]
        fitting = [d for d in range(1, ranks + 1) if -(-length // d) + 2 <= capacity] or [
            d for d in range(1, ranks + 1) if -(-length // d) <= capacity
        ]
        degree = chosen.choice(fitting)
        first = chosen.randint(0, ranks - degree)
        batches.append({"groups": [{"first_rank": first, "degree": degree, "sequences": [s]}]})
    return batches


@settings(max_examples=300, deadline=None)
@given(requests(), st.integers(0, 1000))
def test_no_careless_plan_beats_the_bound(request: dict[str, Any], seed: int) -> None:
    plan = hcp.plan(**request)
    data = plan.to_dict()
    batches = drawn_groups(request, seed)
    stages, chunks = request.get("pipeline_stages", 1), request.get("virtual_stages", 1)
    multiple = request.get("micro_batch_group", stages) if chunks > 1 else 1
    data["micro_batches"] = batches + [{"groups": []}] * (-len(batches) % multiple)
    careless = hcp.Plan.from_dict(data)
    assert plan.bound <= careless.makespan == slow_makespan(careless)


def all_plans(made: hcp.Plan) -> Iterator[hcp.Plan]:
    """Every choice of micro-batch and ranks, on two ranks, that is a plan."""
    data, count = made.to_dict(), len(made.lengths)
    multiple = made.core.pipeline_stages if made.core.virtual_stages > 1 else 1
    places = list(itertools.product(range(count), ((0, 1), (1, 1), (0, 2))))
    for chosen in itertools.product(places, repeat=count):
        groups: dict[tuple[int, tuple[int, int]], list[int]] = {}
        for s, place in enumerate(chosen):
            groups.setdefault(place, []).append(s)
        batches = [
            [
                {"first_rank": first, "degree": degree, "sequences": members}
                for (at, (first, degree)), members in sorted(groups.items())
                if at == m
            ]
            for m in range(count)
        ]
        filled = [{"groups": batch} for batch in batches if batch]
        data["micro_batches"] = filled + [{"groups": []}] * (-len(filled) % multiple)
        with contextlib.suppress(ValueError):  # ranks overlap, or hold too much
            yield hcp.Plan.from_dict(data)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("lengths", [[700, 90, 60], [400, 390, 30], [300, 300, 300], [900, 20]])
def test_no_plan_at_all_beats_the_bound(
    lengths: list[int], stages: int, chunks: int, sync: str
) -> None:
    cost = hcp.CostModel(launch=10_000, exchange=2_000)
    plan = hcp.plan(
        lengths,
        ranks=2,
        max_tokens_per_rank=1000,
        cost=cost,
        pipeline_stages=stages,
        virtual_stages=chunks,
        sync=sync,
    )
    best = min(other.makespan for other in all_plans(plan))
    assert plan.bound <= best <= plan.makespan
    assert plan.makespan <= 1.05 * best


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("name", ["P2", "P3", "X2", "X3"])
def test_small_pipelines_come_near_the_best_of_all_plans(
    name: str, stages: int, chunks: int
) -> None:
    """Plans without small steps were up to 1.09 of the best."""
    for seed in range(4):
        lengths = instances(4, 8192, 6)[name](random.Random(seed))
        plan = hcp.plan(
            lengths,
            ranks=4,
            max_tokens_per_rank=8192,
            sync="micro_batch",
            pipeline_stages=stages,
            virtual_stages=chunks,
            cost=CHEAP_LAUNCHES,
        )
        best = best_makespan(plan, stages, chunks)
        assert plan.bound <= best <= plan.makespan
        assert plan.makespan <= 1.03 * best, (seed, lengths)


@settings(max_examples=60, deadline=None)
@given(requests(), pipelines)
def test_effort_never_makes_a_pipeline_worse(
    request: dict[str, Any], pipeline: tuple[int, int, int]
) -> None:
    stages, chunks, more = pipeline
    request |= {"pipeline_stages": stages, "virtual_stages": chunks}
    request["micro_batch_group"] = stages + more if chunks > 1 else 0
    assert hcp.plan(**request, effort=3).makespan <= hcp.plan(**request).makespan


def test_a_long_sequence_is_a_ramp_that_the_bound_knows() -> None:
    """One rank: (4 T + (5 p - 3) t) / 6, from paths through the long one's micro-batch."""
    cost = hcp.CostModel(launch=0)
    lengths = [4000] + [250] * 36
    times = [cost.time(length, 1) for length in lengths]
    plan = hcp.plan(lengths, ranks=1, max_tokens_per_rank=4000, cost=cost, pipeline_stages=4)
    assert plan.bound >= 0.999 * (4 * sum(times) + 17 * times[0]) / 6 > 1.1 * sum(times)
    assert plan.makespan <= 1.05 * plan.bound


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 4), (8, 2)])
def test_equal_sequences_of_one_group_fill_and_empty_an_interleaved_pipeline(
    stages: int, chunks: int
) -> None:
    """As many as stages, on one rank: the ramp has the time of one, and no plan has less."""
    cost = hcp.CostModel(launch=0, token=0)
    plan = hcp.plan(
        [1000] * stages,
        ranks=1,
        max_tokens_per_rank=1000,
        cost=cost,
        pipeline_stages=stages,
        virtual_stages=chunks,
        sync="micro_batch",
    )
    one = cost.time(1000, 1)
    assert plan.makespan == one * stages + -(-one * (stages - 1) // chunks)
    assert 0.999 * plan.makespan <= plan.bound <= plan.makespan


def test_an_interleaved_pipeline_gets_a_multiple_of_its_group() -> None:
    for n in range(1, 9):
        plan = hcp.plan(
            [900] * n, ranks=2, max_tokens_per_rank=1000, pipeline_stages=3, virtual_stages=2
        )
        assert len(plan.micro_batches) % 3 == 0
        assert sum(len(groups) for groups in plan.micro_batches) <= n
        check_plan(plan)


def test_empty_micro_batches_come_after_as_many_as_sequences() -> None:
    """They cost their host's time, which a pipeline's clock does not know."""
    data = hcp.plan(
        [900, 900], ranks=2, max_tokens_per_rank=1000, pipeline_stages=4, virtual_stages=2
    ).to_dict()
    groups = [{"first_rank": r, "degree": 1, "sequences": [r]} for r in range(2)]
    alone = [{"groups": [group]} for group in groups]
    hcp.Plan.from_dict(data | {"micro_batches": [*alone, {"groups": []}, {"groups": []}]})
    together = [{"groups": groups}, *({"groups": []} for _ in range(3))]
    with pytest.raises(ValueError, match=r"micro_batches\[1\] has 0 groups from 2, expected >= 1"):
        hcp.Plan.from_dict(data | {"micro_batches": together})


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
@pytest.mark.parametrize("seed", [2, 3])
def test_heights_that_grow_from_both_ends_bring_a_deep_pipeline_near_its_bound(
    seed: int, sync: Any
) -> None:
    """Where all heights of pipeline_shapes.c are full ones, these plans end at 1.080."""
    lengths = random.Random(seed).choices([4000, 2000, 500, 250], k=384)
    plan = hcp.plan(lengths, ranks=16, max_tokens_per_rank=8192, sync=sync, pipeline_stages=8)
    assert plan.makespan <= 1.07 * plan.bound


def test_small_micro_batches_stand_at_both_ends() -> None:
    lengths = [4000] * 24 + [500] * 48
    plan = hcp.plan(
        lengths, ranks=4, max_tokens_per_rank=4096, sync="micro_batch", pipeline_stages=4
    )
    times = [max(plan.group_time(g) for g in groups) for groups in plan.micro_batches]
    assert max(times[0], times[-1]) < max(times)
    backwards = plan.to_dict()
    backwards["micro_batches"] = sorted(
        backwards["micro_batches"], key=lambda batch: -len(batch["groups"][0]["sequences"])
    )
    assert plan.makespan <= hcp.Plan.from_dict(backwards).makespan


def test_the_report_shows_the_bubble() -> None:
    plan = hcp.plan([100] * 4, ranks=1, max_tokens_per_rank=100, pipeline_stages=4)
    report = plan.report()
    assert report.pipeline_stages == 4
    assert report.bubble == pytest.approx(3 / 7, rel=1e-3)  # (stages - 1) / (4 + stages - 1)
    assert report.bubble == pytest.approx(report.idle_share, rel=1e-3)
    assert "4 stages, bubble 42.9%" in str(report)


# ---- speeds --------------------------------------------------------------------------------------


def test_a_slow_rank_gets_less() -> None:
    plan = hcp.plan(
        [100] * 400,
        ranks=4,
        max_tokens_per_rank=1000,
        speeds=[1, 1, 0.5, 1],
        cost=hcp.CostModel(launch=0),
    )
    tokens = plan.report().rank_tokens
    assert tokens[2] < 0.6 * min(tokens[0], tokens[1], tokens[3])
    # The slow rank launches each of the 12 micro-batches, and has rows in half of them.
    assert plan.makespan <= 1.02 * plan.bound + 12 * plan.cost.launch


def test_speeds_have_no_unit() -> None:
    lengths = [300, 200, 100, 50] * 9
    request: dict[str, Any] = {"lengths": lengths, "ranks": 3, "max_tokens_per_rank": 400}
    plan = hcp.plan(**request, speeds=[2.0, 1.0, 1.5])
    assert hcp.plan(**request, speeds=[400, 200, 300]) == plan
    assert plan.speeds == pytest.approx((1.0, 0.5, 0.75), rel=1e-4)


def test_speeds_are_part_of_the_checksum() -> None:
    request: dict[str, Any] = {"lengths": [5], "ranks": 2, "max_tokens_per_rank": 8}
    sums = {
        hcp.plan(**request, speeds=speeds).checksum
        for speeds in (None, [1.0, 1.0], [1.0, 0.9], [0.9, 1.0])
    }
    assert len(sums) == 4


# ---- bounds of single sequences ------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 8), st.sampled_from(["step", "micro_batch"]))
def test_every_sequence_keeps_its_own_bounds(data: st.DataObject, ranks: int, sync: str) -> None:
    n = data.draw(st.integers(1, 20))
    least = data.draw(st.lists(st.integers(1, ranks), min_size=n, max_size=n))
    most = [data.draw(st.integers(low, ranks)) for low in least]
    lengths = [data.draw(st.integers(1, 30 * high)) for high in most]
    plan = hcp.plan(
        lengths,
        ranks=ranks,
        max_tokens_per_rank=32,
        min_degrees=least,
        max_degrees=most,
        sync=sync,
    )
    check_plan(plan, lengths)
    for groups in plan.micro_batches:
        for _, degree, sequences in groups:
            assert all(least[s] <= degree <= most[s] for s in sequences)


# ---- bytes ---------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 3),
    st.sampled_from(["step", "micro_batch"]),
)
def test_no_rank_needs_more_bytes_than_it_has(
    lengths: list[int], activation: int, logit: int, gathered: int, sync: str
) -> None:
    limit = 30 * (activation + logit) + 200 * gathered + 1
    memory = hcp.MemoryModel(activation, logit, gathered, limit)
    plan = hcp.plan(
        lengths, ranks=8, max_tokens_per_rank=256, memory=memory, sync=sync, alignment=2
    )
    check_plan(plan, lengths)
    assert max(plan.report().rank_bytes) <= limit
    assert plan.memory == memory


def test_bytes_raise_the_degree_where_rows_would_not() -> None:
    request: dict[str, Any] = {"lengths": [4000], "ranks": 8, "max_tokens_per_rank": 8192}
    cost = hcp.CostModel(exchange=1_000_000_000)  # so that no degree is chosen for speed
    memory = hcp.MemoryModel(activation=1000, limit=1_000_000)
    degrees = [
        plan.micro_batches[0][0].degree
        for plan in (hcp.plan(**request, cost=cost), hcp.plan(**request, cost=cost, memory=memory))
    ]
    assert degrees == [1, 4]


def test_bytes_that_fill_a_rank_exactly_fit_and_one_more_does_not() -> None:
    memory = hcp.MemoryModel(activation=10**9, limit=10**15)
    request: dict[str, Any] = {"ranks": 1, "max_tokens_per_rank": 2_000_000, "memory": memory}
    plan = hcp.plan([1_000_000, 1_000_000], **request)
    assert [len(groups) for groups in plan.micro_batches] == [1, 1]
    check_plan(plan)
    with pytest.raises(ValueError, match="would need 1000001000000000 bytes, expected <= 10"):
        hcp.plan([1_000_001], **request)


def test_bytes_over_nodes_are_in_the_report() -> None:
    memory = hcp.MemoryModel(gathered=4096)
    plan = hcp.plan(
        [4000], ranks=8, max_tokens_per_rank=1000, ranks_per_node=2, memory=memory, min_degree=8
    )
    report = plan.report()
    assert report.node_bytes == report.node_crossings * 4096 == 4000 * 3 * 4096


# ---- what makes no sense -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pipeline_stages": -1}, "pipeline_stages is -1, expected 0"),
        ({"virtual_stages": 2}, "virtual_stages is 2, expected 0 or 1"),
        ({"pipeline_stages": 4, "virtual_stages": 2, "micro_batch_group": 3},
         r"micro_batch_group is 3, expected pipeline_stages \(4\) to 4096"),
        ({"pipeline_stages": 4, "virtual_stages": 2, "micro_batch_group": 2**31 - 1},
         r"micro_batch_group is 2147483647, expected pipeline_stages \(4\) to 4096"),
        ({"pipeline_stages": 4, "micro_batch_group": 4}, "micro_batch_group is 4"),
        ({"min_degrees": [3, 1]}, "min_degrees has 2 items, expected 1"),
        ({"min_degrees": [9]}, r"min_degrees\[0\] is 9, expected 1 to ranks \(4\)"),
        ({"min_degrees": [3], "max_degrees": [2]}, r"max_degrees\[0\] is 2, expected"),
        ({"max_degree": 2, "min_degrees": [3]}, r"no degree that min_degrees\[0\]"),
        ({"speeds": [1.0]}, "speeds has 1 items, expected 4, one per rank"),
        ({"speeds": [1.0, 0.0, 1.0, 1.0]}, r"speeds\[1\] is 0.0, expected a finite number > 0"),
        ({"memory": hcp.MemoryModel(activation=10, limit=5)}, "would need 20 bytes, expected <= 5"),
        ({"memory": hcp.MemoryModel(activation=10, limit=5), "alignment": 4},
         "memory.limit is 5 bytes, expected more than the 30 bytes of the 3 rows"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"lengths": [5], "ranks": 4, "max_tokens_per_rank": 8}
    with pytest.raises(ValueError, match=message):
        hcp.plan(**(good | change))


def changed(change: Any, **options: Any) -> dict[str, Any]:
    data = hcp.plan([900, 900, 900], ranks=2, max_tokens_per_rank=1000, **options).to_dict()
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(memory={"activation": 10, "limit": 8000}), "bytes on a rank"),
        (lambda d: d.update(min_degrees=[1, 2, 2]), "expected 2 to 2"),
        (lambda d: d.update(virtual_stages=2), "micro-batches, expected a multiple of 4"),
        (lambda d: d["micro_batches"].insert(0, {"groups": []}), "has no groups"),
    ],
)
def test_the_check_finds_what_is_wrong(change: Any, message: str) -> None:
    with pytest.raises(hcp.HcpError, match=message):
        check_plan(changed(change, pipeline_stages=4, max_degree=1))


@pytest.mark.parametrize("name", ["activation", "limit"])
def test_bytes_are_integers(name: str) -> None:
    with pytest.raises(ValueError, match=f"memory.{name} is -1, expected an integer >= 0 bytes"):
        hcp.MemoryModel(**{name: -1})
