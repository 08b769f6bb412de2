"""The comm type that a group of ranks uses for the one that a layer asks for, and the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import comm_prices
from support.cases import Case, GlooGroups, attention_errors, dispatched, loopback_error
from support.ranks import run_ranks

import hcp
from hcp.attention import comm_types as comm
from hcp.attention.comm_types import CommChoice
from hcp.exchange.layout import Layout
from hcp.exchange.tables import Schedule, ScheduleHeader, schedule_words
from hcp.planning.cost import PRICES


def plan_of(
    *degrees: int, length: int = 64, node: int = 0, cost: hcp.CostModel | None = None
) -> hcp.Plan:
    """Groups of these degrees side by side, one sequence each."""
    firsts = [sum(degrees[:i]) for i in range(len(degrees))]
    return hcp.Plan.from_dict(
        {
            "ranks": sum(degrees),
            "max_tokens_per_rank": 1 << 30,
            "ranks_per_node": node,
            "lengths": [length] * len(degrees),
            "cost": {name: getattr(cost, name) for name in PRICES} if cost else {},
            "micro_batches": [
                {
                    "groups": [
                        {"first_rank": first, "degree": degree, "sequences": [i]}
                        for i, (first, degree) in enumerate(zip(firsts, degrees, strict=True))
                    ]
                }
            ],
        }
    )


def pack_of(degree: int, lengths: list[int], cost: hcp.CostModel) -> hcp.Plan:
    """One group with all sequences."""
    group = {"first_rank": 0, "degree": degree, "sequences": list(range(len(lengths)))}
    return hcp.Plan.from_dict(
        {
            "ranks": degree,
            "max_tokens_per_rank": 1 << 30,
            "lengths": lengths,
            "cost": {name: getattr(cost, name) for name in PRICES},
            "micro_batches": [{"groups": [group]}],
        }
    )


def chosen(
    plan: hcp.Plan,
    comm_type: str = "a2a+p2p",
    *,
    sizes: tuple[int, ...] = (4, 2),
    window: tuple[int, int] = (-1, 0),
    heads: tuple[int, int] = (8, 2),
    rank: int = 0,
    packed: bool = False,
    in_place: bool = False,
) -> CommChoice:
    layout = Layout(plan, 0, rank)
    return comm.choose(plan, layout, comm_type, sizes, window, heads, packed, in_place)


# ---- a2a+p2p -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degree", "used", "inner"),
    [
        (1, "p2p", 1),
        (2, "a2a", 2),
        (3, "a2a", 3),
        (4, "a2a", 4),
        (5, "p2p", 1),
        (6, "a2a+p2p", 3),
        (8, "a2a+p2p", 4),
        (12, "a2a+p2p", 4),
    ],
)
def test_a_group_takes_the_largest_inner_level_that_divides_its_degree(
    degree: int, used: str, inner: int
) -> None:
    assert chosen(plan_of(degree, 1))[1:3] == (used, inner)


@pytest.mark.parametrize(("heads", "inner"), [(1, 1), (2, 2), (3, 2), (4, 4), (9, 4)])
def test_each_neighbour_has_a_head(heads: int, inner: int) -> None:
    assert chosen(plan_of(8, 1), heads=(heads, 1)).inner == inner


@pytest.mark.parametrize(("node", "inner"), [(2, 2), (4, 4), (3, 3), (6, 3), (0, 4)])
def test_neighbours_stand_in_one_node(node: int, inner: int) -> None:
    assert chosen(plan_of(12, node=node)).inner == inner


def test_several_inner_levels_are_one_exchange() -> None:
    assert chosen(plan_of(8, 1), sizes=(2, 2, 2))[1:3] == ("a2a+p2p", 4)


def test_the_choice_says_why() -> None:
    plan = plan_of(12, node=2)
    assert chosen(plan).why == (
        "2 neighbours of 4 asked for: degree 12, 8 query heads, 2 ranks a node"
    )


def test_a_handler_reports_what_its_groups_use() -> None:
    plan = plan_of(6, 2, 1)

    def report(groups: Any) -> set[tuple[str, str, int]]:
        cp = hcp.ContextParallelHandler(
            plan,
            0,
            groups.transport,
            comm_types=("a2a+p2p", "p2p"),
            hierarchical_context_parallel_sizes=(3, 2),
        )
        q, k = torch.randn(cp.rows, 4, 8), torch.randn(cp.rows, 2, 8)
        cp.attention(q, k, k)
        return {choice[:3] for choice in cp.comm.choices}

    asked = ("p2p", "p2p", 1)
    expected = [{asked, ("a2a+p2p", "a2a+p2p", 3)}] * 6
    expected += [{asked, ("a2a+p2p", "a2a", 2)}] * 2 + [{asked, ("a2a+p2p", "p2p", 1)}]
    assert hcp.loopback(9, report) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "hierarchical_context_parallel_sizes is missing, expected the sizes of the levels"),
        ({"sizes": (2, 4)}, r"is \[2, 4\], whose product is 8, expected 4: the degree of every"),
        ({"sizes": (4,)}, r"is \[4\], expected two or more integers >= 1"),
        ({"sizes": (4, 0)}, r"is \[4, 0\], expected two or more integers >= 1"),
        ({"sizes": (2, 2), "types": ("p2p",)}, r"is \[2, 2\], but comm_types has no 'a2a\+p2p'"),
        ({"types": ("p2p", "ring")}, "comm_type is 'ring', expected one of"),
    ],
    ids=["missing", "product", "one", "zero", "unused", "unknown"],
)
def test_levels_that_do_not_fit_are_an_error_at_construction(
    options: dict[str, Any], message: str
) -> None:
    plan = hcp.plan([64], ranks=4, max_tokens_per_rank=64, min_degree=4)

    def construct(groups: Any) -> None:
        hcp.ContextParallelHandler(
            plan,
            0,
            groups.transport,
            comm_types=options.get("types", ("a2a+p2p",)),
            hierarchical_context_parallel_sizes=options.get("sizes", ()),
        )

    with pytest.raises(ValueError, match=message):
        hcp.loopback(4, construct)


def test_ranks_with_different_levels_all_hear_it() -> None:
    def differ(groups: Any) -> str:
        rank = groups.transport.rank
        plan = hcp.plan([64], ranks=4, max_tokens_per_rank=64, min_degree=4)
        samples = [{"x": torch.zeros(64)}] if rank == 0 else []
        with pytest.raises(hcp.HcpError) as caught:
            hcp.dispatch(
                plan,
                samples,
                [0],
                groups,
                comm_types=("a2a+p2p",),
                hierarchical_context_parallel_sizes=(2, 2) if rank else (4, 1),
            )
        return str(caught.value)

    for message in hcp.loopback(4, differ):
        words = "hierarchical_context_parallel_sizes[0] differs: 4 on rank 0, 2 on ranks 1, 2 and 3"
        assert words in message


# ---- under eval_cp_context -----------------------------------------------------------------------


def attends_in_both_layouts(rank: int, size: int) -> list[float]:
    """Training's levels, and inside the context those of the evaluation layout."""
    train = hcp.build_process_groups(cp=4, hierarchical=[2, 2])
    evaluation = train.with_context_parallel(2, hierarchical=[2, 1])
    model = torch.nn.Module()
    model.pg_collection = train
    errors = []
    for inside in (False, True):
        with hcp.eval_cp_context(model, train, evaluation if inside else train):
            groups = model.pg_collection
            degree, sizes = groups.size("cp"), tuple(g.size() for g in groups.hierarchy)
            case = Case((50, 7, 30), size, min_degree=degree, max_degree=degree)
            case = replace(case, comm_type="a2a+p2p", sizes=sizes, sinks=True)
            errors.append(max(attention_errors(groups, case)))
    return errors


def test_each_layout_has_its_own_levels_inside_and_outside_the_eval_context() -> None:
    for errors in run_ranks(4, attends_in_both_layouts, timeout=120):
        assert max(errors) <= 1e-10


# ---- auto ----------------------------------------------------------------------------------------

FREE_LINKS = hcp.CostModel(pair=1, token=0, exchange=0, launch=0)


def test_auto_overlaps_the_ring_where_attention_hides_it() -> None:
    cost = hcp.CostModel(pair=10, token=0, exchange=3000, launch=0, overlap=1)
    choice = chosen(plan_of(4, cost=cost, length=4096), "auto")
    assert choice[1:3] == ("p2p", 1)
    assert choice.why.startswith("least time of all_gather: ")
    assert "a2a+p2p 2: " in choice.why


def test_auto_exchanges_heads_where_keys_are_as_many_as_queries() -> None:
    # 3/4 of four rows of a quarter of the tokens, against 3/4 of all rows of keys and values.
    cost = hcp.CostModel(pair=1, token=0, exchange=1000, launch=0)
    assert chosen(plan_of(4, cost=cost), "auto", heads=(8, 8)).used == "a2a"
    assert chosen(plan_of(4, cost=cost), "auto", heads=(64, 1)).used == "all_gather"


def test_auto_gathers_under_a_narrow_window() -> None:
    cost = hcp.CostModel(pair=1, token=0, exchange=1000, launch=0)
    choice = chosen(plan_of(4, cost=cost, length=4096), "auto", heads=(8, 8), window=(16, 0))
    assert choice.used == "all_gather"


def test_auto_exchanges_heads_within_nodes_when_links_between_them_are_slow() -> None:
    cost = hcp.CostModel(pair=1, token=0, exchange=10, exchange_far=10_000, launch=0)
    near = chosen(plan_of(8, cost=cost, node=8), "auto", heads=(8, 8))
    far = chosen(plan_of(8, cost=cost, node=4), "auto", heads=(8, 8))
    assert near[1:3] == ("a2a", 8)
    assert far[1:3] == ("a2a+p2p", 4)


def test_auto_with_free_links_sends_least() -> None:
    assert chosen(plan_of(4, cost=FREE_LINKS), "auto").used == "all_gather"


def test_auto_at_degree_one_sends_nothing() -> None:
    assert chosen(plan_of(1, 2), "auto") == ("auto", "p2p", 1, "degree 1: nothing travels")


def seconds(length: int, degree: int) -> float:
    return 1e-6 * length / degree + 1e-7 * degree


def test_auto_without_prices_is_refused_before_anything_is_made_of_the_plan() -> None:
    """At construction, and by Config before there is a plan."""
    cost = hcp.CostModel.from_function(seconds)
    message = "comm_type is 'auto', but the plan's cost is a table of whole times.* prices="
    with pytest.raises(ValueError, match=message):
        hcp.Config(64, cp_comm_type=("p2p", "auto")).plan([64], 2, cost)
    plan = hcp.plan([64], ranks=2, max_tokens_per_rank=64, min_degree=2, cost=cost)

    def construct(groups: Any) -> None:
        hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=["p2p", "auto"])

    def dispatch(groups: Any) -> None:
        samples = [{"x": torch.zeros(64)}] if groups.transport.rank == 0 else []
        hcp.dispatch(plan, samples, [0], groups, comm_types=["auto"])

    for refused in (construct, dispatch):
        with pytest.raises(ValueError, match=message):
            hcp.loopback(2, refused)


def test_a_cost_function_with_prices_plans_by_the_one_and_lets_auto_go_by_the_other() -> None:
    prices = hcp.CostModel.from_seconds(pair=1e-12, exchange=1e-6, token=1e-9)
    limits: Any = {"ranks": 4, "max_tokens_per_rank": 64}
    lengths = [64, 200, 17, 90]
    plain = hcp.CostModel.from_function(seconds, unit=prices.unit)
    plans = [
        hcp.plan(lengths, cost=cost, **limits)
        for cost in (plain, hcp.CostModel.from_function(seconds, prices=prices))
    ]
    assert plans[0].micro_batches == plans[1].micro_batches
    assert (plans[0].makespan, plans[0].bound) == (plans[1].makespan, plans[1].bound)
    cost = plans[1].cost
    assert cost.table is not None
    assert cost.exchange == prices.exchange

    functional = hcp.CostModel.from_function(seconds, prices=prices)
    alone = {"ranks": 4, "max_tokens_per_rank": 1024, "min_degree": 4}
    picks = [
        [
            chosen(hcp.plan([4096], cost=cost, **alone), "auto", heads=heads)
            for heads in ((8, 8), (64, 1))
        ]
        for cost in (prices, functional)
    ]
    assert picks[0] == picks[1]
    assert [choice.used for choice in picks[0]] == ["a2a", "all_gather"]


@pytest.mark.parametrize(
    "prices", [hcp.CostModel(), hcp.CostModel.from_function(seconds)], ids=["unitless", "times"]
)
def test_prices_beside_a_function_have_a_unit_and_no_times(prices: hcp.CostModel) -> None:
    with pytest.raises(ValueError, match="prices is a model without a unit or with times of its"):
        hcp.CostModel.from_function(seconds, prices=prices)


def test_auto_counts_exchanges_and_calls() -> None:
    """With short sequences most of a type's time is fixed: an exchange per step of the ring and, on
    the CPU, a call for each sequence."""
    cost = hcp.CostModel(pair=0, token=1, exchange=0, launch=0, step=20)

    def times(sequences: int, packed: bool, cost: hcp.CostModel = cost) -> dict[str, int]:
        plan = pack_of(4, [8] * sequences, cost)
        why = chosen(plan, "auto", packed=packed).why.removeprefix("least time of ")
        return {name: int(time) for name, time in (x.rsplit(": ", 1) for x in why.split(", "))}

    one = {"all_gather": 20, "p2p": 60, "a2a": 20, "a2a+p2p 2": 40}
    assert times(1, packed=False) == times(1, packed=True) == times(10, packed=True) == one
    assert times(10, packed=False) == {
        "all_gather": 10 + 100,
        "p2p": 3 * (10 + 100),
        "a2a": 20,
        "a2a+p2p 2": 20 + 10 + 100,
    }
    # A step that nobody measured is two of about sixteen launches of a layer.
    unmeasured = hcp.CostModel(pair=0, token=1, exchange=0, launch=160)
    assert times(10, packed=False, cost=unmeasured) == times(10, packed=False)


def test_auto_takes_heads_for_short_sequences_and_keys_for_long_ones() -> None:
    cost = hcp.CostModel(pair=1, token=0, exchange=100, launch=0, step=10_000)
    picks = {}
    for length, count in ((16, 64), (16_384, 1)):
        plan = pack_of(4, [length] * count, cost)
        picks[length] = chosen(plan, "auto", heads=(8, 1)).used
    assert picks == {16: "a2a", 16_384: "all_gather"}


@pytest.mark.parametrize("priced", [{"exchange": 400}, {"all_to_all": 1200}])
def test_auto_reads_either_price_of_the_same_links(priced: dict[str, int]) -> None:
    cost = hcp.CostModel(pair=0, token=1, launch=0, step=7, **{"exchange": 0, **priced})
    # 64 tokens on 4 ranks, 4 query and 2 key-value heads: 400 a token's keys and values, 200 for
    # D + E elements. The exchange of 4 has a copy of each key-value head, that of 2 none.
    times = {
        "all_gather": 400 * 48 + 7,
        "p2p": 400 * 48 + 3 * 7,
        "a2a": 200 * (4 + 4) * 16 * 3 // 4 + 7,
        "a2a+p2p 2": 200 * (4 + 2) * 16 // 2 + 7 + 400 // 2 * 32 + 7,
    }
    choice = chosen(plan_of(4, cost=cost), "auto", heads=(4, 2))
    listed = ", ".join(f"{name}: {time}" for name, time in times.items())
    assert choice == ("auto", "a2a+p2p", 2, f"least time of {listed}")


def time_of_p2p(plan: hcp.Plan, window: tuple[int, int], in_place: bool) -> int:
    why = chosen(plan, "auto", window=window, packed=True, in_place=in_place).why
    return int(why.partition("p2p: ")[2].partition(",")[0])


@settings(max_examples=40)
@given(
    st.integers(3, 8),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([(-1, 0), (-1, -1), (0, 0), (1, 0), (0, 3), (7, 2), (40, 0)]),
)
def test_a_ring_that_reads_in_place_is_priced_by_what_its_busiest_rank_reads(
    degree: int, chunks: list[int], window: tuple[int, int]
) -> None:
    lengths = [2 * degree * chunk for chunk in chunks]
    rows_cost = hcp.CostModel(pair=0, token=1, exchange=1, launch=0)
    stages_cost = hcp.CostModel(pair=0, token=1, exchange=0, launch=0, step=1)
    rows_plan, stages_plan = (pack_of(degree, lengths, cost) for cost in (rows_cost, stages_cost))

    read = [
        [stage.key_rows for stage in Schedule(words).stages[1:]]
        for words in (
            schedule_words(
                rows_plan, ScheduleHeader(rank=rank, in_place=True), "p2p", window_size=window
            )
            for rank in range(degree)
        )
    ]
    rows = time_of_p2p(rows_plan, window, in_place=True)
    stages = time_of_p2p(stages_plan, window, in_place=True)
    most_rows, most_stages = max(map(sum, read)), max(sum(map(bool, each)) for each in read)
    assert most_rows <= rows <= time_of_p2p(rows_plan, window, in_place=False)
    assert most_stages <= stages <= degree - 1
    if min(window) < 0 or max(window) <= min(chunks):
        assert (most_rows, most_stages) == (rows, stages)


def test_auto_prices_a_ring_by_whether_ranks_read_in_place() -> None:
    cost = hcp.CostModel(pair=0, token=1, exchange=1, launch=0)
    plan, window = pack_of(4, [64], cost), (3, 0)

    def reasons(groups: Any) -> set[str]:
        cp = hcp.ContextParallelHandler(
            plan, 0, groups.transport, comm_types=["auto"], window_sizes=[window], heads=[(8, 2)]
        )
        return {choice.why for choice in cp.comm.choices}

    read, sent = (
        chosen(plan, "auto", window=window, in_place=in_place).why for in_place in (True, False)
    )
    assert "p2p: 6," in read
    assert "p2p: 48," in sent
    for found in hcp.loopback(4, reasons, sharing=True):
        assert read in found
        assert sent not in found


DRAWN_PRICES = st.integers(0, 3000)


@settings(max_examples=60)
@given(
    st.integers(2, 12),
    st.integers(1, 4000),
    st.builds(
        hcp.CostModel,
        pair=st.integers(1, 50),
        exchange=DRAWN_PRICES,
        exchange_far=DRAWN_PRICES,
        all_to_all=DRAWN_PRICES,
        step=DRAWN_PRICES,
        tile=st.sampled_from([0, 64]),
        overlap=st.integers(0, 1),
    ),
    st.sampled_from([(1, 1), (8, 2), (6, 3), (5, 5)]),
    st.tuples(st.integers(-1, 200), st.integers(-1, 200)),
)
def test_auto_is_the_same_on_every_rank_and_never_slower_than_what_it_lists(
    degree: int,
    length: int,
    cost: hcp.CostModel,
    heads: tuple[int, int],
    window: tuple[int, int],
) -> None:
    plan = plan_of(degree, length=length, cost=cost)
    choices = {
        chosen(plan, "auto", heads=heads, window=window, rank=rank) for rank in range(degree)
    }
    assert len(choices) == 1
    (choice,) = choices
    listed = dict(
        item.rsplit(": ", 1) for item in choice.why.removeprefix("least time of ").split(", ")
    )
    used = f"{choice.used} {choice.inner}" if choice.used == "a2a+p2p" else choice.used
    assert int(listed[used]) == min(map(int, listed.values()))


def test_auto_pairs_are_those_that_the_window_leaves() -> None:
    for length in (1, 2, 7):
        for window in ((-1, -1), (-1, 0), (0, 0), (2, 1), (9, 3)):
            left, right = (limit if limit >= 0 else length for limit in window)
            pairs = sum(-left <= k - q <= right for q in range(length) for k in range(length))
            assert comm_prices.pairs_of(length, window) == pairs


def auto_on_gloo(rank: int, size: int) -> tuple[float, set[tuple[str, str, int]]]:
    case = Case((97, 40, 13), size, min_degree=size, comm_type="auto", sinks=True, lse=True)
    groups = GlooGroups()
    error = max(attention_errors(groups, case))
    cp, local = next(iter(dispatched(groups, case)))
    cp.attention(local.query, local.key, local.value)
    return error, {choice[:3] for choice in cp.comm.choices}


def test_auto_is_exact_on_gloo_ranks_which_pick_the_same() -> None:
    results = run_ranks(4, auto_on_gloo)
    assert max(error for error, _ in results) <= 1e-10
    assert len({tuple(sorted(choices)) for _, choices in results}) == 1


def test_several_inner_levels_compose_with_a_ring() -> None:
    case = Case((61, 16, 3), 8, min_degree=8, comm_type="a2a+p2p", sizes=(2, 2, 2), heads=8)
    assert loopback_error(replace(case, kv_heads=2, window=(20, 0), sinks=True, lse=True)) <= 1e-10
