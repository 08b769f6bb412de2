"""More freedom gives no slower plan, and small requests end near the best of all plans."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning import CHEAP_LAUNCHES

import hcp
from hcp.planning.plan import Plan
from hcp.tools.check import check_plan

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from common.small import instances
from studies.exact_pipeline import best_makespan
from studies.freedom import compare, draw

H200 = hcp.CostModel.preset("gpt-1b-h200")
NODES: dict[str, Any] = {"ranks_per_node": 8, "sync": "micro_batch", "max_tokens_per_rank": 8192}
FEW = [30916, 2606, 2135, 1730, 1353, 9520, 362, 730, 763, 1102, 5154, 454]
SOME = [6740, 5100, 4261, 995, 12885, 434, 5281, 3912, 5549, 768, 494, 1295, 3132, 6120]


def by_the_clock_of(request: dict[str, Any], plan: Plan) -> int:
    return Plan.from_dict(plan.to_dict() | {"sync": request.get("sync", "step")}).makespan


# Plans took 1.06 to 1.22 of what those with less freedom do.
@pytest.mark.parametrize(
    ("lengths", "request_now", "stricter"),
    [
        ([4415] * 44 + [3778] * 22, {"ranks": 24} | NODES, {"max_tokens_per_rank": 4915}),
        ([4097] * 33 + [4096] * 36, {"ranks": 32} | NODES, {"max_tokens_per_rank": 4915}),
        ([4171] * 44 + [4022] * 58, {"ranks": 32} | NODES, {"max_tokens_per_rank": 5734}),
        ([5699] * 12 + [2494] * 16, {"ranks": 16, "max_tokens_per_rank": 8192,
                                     "sync": "micro_batch"}, {"max_tokens_per_rank": 5734}),
        ([4500] * 97 + [5501] * 89, {"ranks": 60, "max_tokens_per_rank": 10_000,
                                     "sync": "micro_batch"}, {"max_tokens_per_rank": 8000}),
        (SOME, {"ranks": 8, "max_tokens_per_rank": 8192, "cost": H200}, {"sync": "micro_batch"}),
        (FEW, {"ranks": 8, "max_tokens_per_rank": 8192, "cost": H200}, {"min_degree": 2}),
    ],
)  # fmt: skip
def test_less_freedom_gives_no_faster_plan(
    lengths: list[int], request_now: dict[str, Any], stricter: dict[str, Any]
) -> None:
    request_now = {"cost": CHEAP_LAUNCHES} | request_now
    made = hcp.plan(lengths, **request_now)
    check_plan(made, lengths)
    other = hcp.plan(lengths, **(request_now | stricter))
    assert made.makespan <= 1.005 * by_the_clock_of(request_now, other)


def test_ranks_are_shared_where_a_long_tail_would_leave_single_ones_part_empty() -> None:
    """With single ranks there were 61 micro-batches, where 48 hold all rows, and 1.038 of this."""
    lengths = [1024 * 2048 // (2048 - i * 15 // 16) for i in range(2048)]
    request: dict[str, Any] = {"ranks": 32, "max_tokens_per_rank": 4096, "sync": "micro_batch"}
    request["cost"] = hcp.CostModel(pair=8, token=67_456, exchange=1_180, launch=75_000_000)
    made = hcp.plan(lengths, **request)
    check_plan(made, lengths)
    shared = hcp.plan(lengths, **request, min_degree=2)
    assert made.makespan <= 1.005 * shared.makespan


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_three_groups_of_unlike_degrees_where_two_of_four_ranks_are_slower(sync: Any) -> None:
    """Two groups of four took 1.128 of this plan."""
    lengths = [1225, 1973, 16945, 501, 10747, 10027, 12064]
    made = hcp.plan(lengths, ranks=8, max_tokens_per_rank=8192, cost=H200, sync=sync)
    assert sorted(g.degree for batch in made.micro_batches for g in batch) == [2, 3, 3]
    assert made.makespan <= 1.005 * made.bound


def test_a_group_of_all_ranks_is_cut_in_two() -> None:
    request: dict[str, Any] = {"ranks": 5, "max_tokens_per_rank": 8192, "sync": "micro_batch"}
    made = hcp.plan([493] * 3, **request, cost=CHEAP_LAUNCHES)
    assert [(g.degree, len(g.sequences)) for g in made.micro_batches[0]] == [(3, 2), (2, 1)]


@given(st.integers(0, 491))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_a_drawn_request_is_at_most_a_little_slower_than_stricter_ones(seed: int) -> None:
    """Without candidates of stricter requests 1.27 was seen."""
    for name, ratio in compare(seed):
        assert ratio <= 1.05, name


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("family", ["P1", "P2", "P4", "X2"])
def test_a_small_pipeline_ends_near_the_best_of_all_plans(
    family: str, stages: int, chunks: int
) -> None:
    """With dear launches plans took 1.05 and 1.10 of the best one."""
    lengths = instances(4, 8192, 5)[family](Random(1))
    made = hcp.plan(
        lengths,
        ranks=4,
        max_tokens_per_rank=8192,
        sync="micro_batch",
        pipeline_stages=stages,
        virtual_stages=chunks,
        cost=H200,
    )
    check_plan(made, lengths)
    assert made.makespan <= 1.005 * best_makespan(made, stages, chunks)


# ---- static CP -----------------------------------------------------------------------------------


def static_plans(lengths: list[int], request_now: dict[str, Any]) -> list[Plan]:
    """The plans of one degree for all: every divisor of the ranks, and every power of two."""
    ranks, made = request_now["ranks"], []
    for degree in range(1, ranks + 1):
        if ranks % degree == 0 or degree & (degree - 1) == 0:
            one = {"min_degree": degree, "max_degree": degree}
            with contextlib.suppress(ValueError):  # no such degree, or the longest does not fit
                made.append(hcp.plan(lengths, **(request_now | one)))
    return made


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    """Requests of at most 512 sequences times ranks: equal, short, few long, any lengths."""
    ranks = draw(st.sampled_from([2, 3, 4, 6, 8, 12, 16, 24, 32]))
    rows = draw(st.sampled_from([1024, 8192]))
    most = ranks * (rows - 2) * 3 // 4
    count = draw(st.integers(1, 512 // ranks))
    short = draw(st.sampled_from([rows // 8, rows, most]))
    lengths = draw(st.lists(st.integers(1, min(short, most)), min_size=count, max_size=count))
    if draw(st.booleans()):
        lengths = [lengths[0]] * count
    lengths[: draw(st.integers(0, 3))] = [most]
    stages, chunks = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (4, 3)]))
    price = st.sampled_from
    return {
        "lengths": lengths,
        "ranks": ranks,
        "max_tokens_per_rank": rows,
        "sync": draw(st.sampled_from(["step", "micro_batch"])),
        "pipeline_stages": stages,
        "virtual_stages": chunks,
        "ranks_per_node": draw(st.sampled_from([None, None, ranks])),
        "cost": hcp.CostModel(
            pair=draw(price([1, 8, 138])),
            token=draw(price([0, 67_456, 1_000_000])),
            exchange=draw(price([0, 1180, 20_000])),
            launch=draw(price([0, 10**5, 10**7, 10**9])),
        ),
    }


@given(pipelines())
@settings(derandomize=True, max_examples=150, deadline=None)
def test_a_pipeline_is_no_slower_than_static_cp(request_now: dict[str, Any]) -> None:
    """Without every degree as a candidate 1.05 was seen."""
    lengths = request_now.pop("lengths")
    made = hcp.plan(lengths, **request_now)
    check_plan(made, lengths)
    for other in static_plans(lengths, request_now):
        assert made.makespan <= 1.005 * other.makespan, other.micro_batches[0][0].degree


def test_a_pipeline_of_one_degree_may_be_that_of_ranks_that_wait() -> None:
    """Static CP 2 is fastest as it is planned for ranks that wait. This plan took 1.032 of it."""
    lengths = [1713, 799, 4239, 2871, 2403, 4914, 482, 1658, 1688, 1872, 3069, 4889, 755]
    request: dict[str, Any] = {"ranks": 6, "max_tokens_per_rank": 8200, "min_degree": 2}
    request |= {"alignment": 4, "pipeline_stages": 4, "virtual_stages": 3, "micro_batch_group": 8}
    request["cost"] = hcp.CostModel(exchange=20_000, launch=1000)
    made = hcp.plan(lengths, **request)
    check_plan(made, lengths)
    assert made.makespan <= 1.005 * hcp.plan(lengths, **request, max_degree=2).makespan


DEAR_EXCHANGES = hcp.CostModel(pair=50, token=67_456, exchange=20_000, launch=0)
UNLIKE = [i * 37 % 512 + 1 for i in range(858)]
HALVES = [513 + i * 389 % 1023 for i in range(1442)]


# Plans took 1.03 to 1.28 of what static CP does.
@pytest.mark.parametrize(
    ("lengths", "request_now"),
    [
        (UNLIKE, {"ranks": 32, "pipeline_stages": 4, "cost": DEAR_EXCHANGES}),
        (UNLIKE, {"ranks": 32, "pipeline_stages": 4, "cost": DEAR_EXCHANGES,
                  "sync": "micro_batch"}),
        (HALVES, {"ranks": 3, "sync": "micro_batch"}),
    ],
)  # fmt: skip
def test_many_sequences_are_no_slower_than_static_cp(
    lengths: list[int], request_now: dict[str, Any]
) -> None:
    request_now = {"max_tokens_per_rank": 1024} | request_now
    made = hcp.plan(lengths, **request_now)
    check_plan(made, lengths)
    fastest = min(other.makespan for other in static_plans(lengths, request_now))
    assert made.makespan <= 1.005 * fastest


# ---- ranks that wait -----------------------------------------------------------------------------


def waiting_plan(seed: int) -> tuple[Plan, int] | None:
    """A drawn request's plan, and the time of that of ranks that wait, by the request's clock."""
    request_now = draw(seed)
    if request_now["sync"] != "step" or len(request_now["lengths"]) * request_now["ranks"] > 8192:
        return None
    try:
        made = hcp.plan(**request_now)
        waiting = hcp.plan(**(request_now | {"sync": "micro_batch"}))
    except ValueError:
        return None
    return made, by_the_clock_of(request_now, waiting)


@given(st.integers(0, 999))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_ranks_that_need_not_wait_are_no_slower_than_those_that_do(seed: int) -> None:
    """A pipeline's at all, others' where the plan is far from its bound: 1.07 was seen."""
    found = waiting_plan(seed)
    if found is None:
        return
    made, waiting = found
    near = 0 if "pipeline_stages" in draw(seed) else made.bound + made.bound // 64
    assert made.makespan <= max(waiting, near)


@pytest.mark.parametrize("seed", [765, 843])
def test_a_plan_far_from_its_bound_is_no_slower_than_that_of_ranks_that_wait(seed: int) -> None:
    """They took 1.06 and 1.07 of it."""
    found = waiting_plan(seed)
    assert found is not None
    assert found[0].makespan <= found[1]


def test_micro_batches_of_a_pipeline_may_be_on_ranks_of_their_own() -> None:
    """With at most 15 ranks for a sequence the plan ended sooner, by 1.109."""
    lengths = [3419, 2281, 1306, 1035]
    request: dict[str, Any] = {"ranks": 16, "max_tokens_per_rank": 8192, "pipeline_stages": 2}
    request |= {"virtual_stages": 2, "cost": hcp.CostModel.preset("flexsp-7b")}
    made = hcp.plan(lengths, **request)
    check_plan(made, lengths)
    assert made.makespan <= hcp.plan(lengths, **request, max_degree=15).makespan
