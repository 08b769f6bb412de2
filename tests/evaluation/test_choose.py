"""evaluate: the choice of the context-parallel size, and its reason."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hcp import CostModel, EvalPlan, MemoryModel
from hcp.planning.limits import divisors, rows_up_to
from hcp.tools.choose import choose_eval_context_parallel

FREE = CostModel(pair=2, token=1000, exchange=0, launch=0)


def times(choice):
    return {c.cp: c.time for c in choice.candidates}


def test_without_a_pipeline_and_with_enough_samples_context_parallelism_gains_nothing():
    choice = choose_eval_context_parallel(64, 1024, ranks=8, train_cp=1, cost=FREE)
    assert choice.cp == 1
    assert "no admissible size is predicted faster" in choice.why
    assert len(set(times(choice).values())) == 1


def test_fewer_samples_than_data_parallel_ranks_want_context_parallelism():
    choice = choose_eval_context_parallel(2, 1024, ranks=8, train_cp=1, cost=FREE)
    assert choice.cp == 4
    assert choice.why.startswith("cp 4, predicted 4.00 times as fast")
    assert [c.fillers for c in choice.candidates] == [6, 2, 0, 0]


def test_a_bubble_shrinks_with_the_micro_batch():
    choice = choose_eval_context_parallel(
        8, 1024, ranks=8, train_cp=1, cost=FREE, pipeline_stages=4
    )
    # (M + P - 1) / (P * cp), in units of a sample's work: 4/4, 5/8, 7/16, 11/32.
    ratio = {cp: time / times(choice)[1] for cp, time in times(choice).items()}
    assert ratio == pytest.approx({1: 1, 2: 5 / 8, 4: 7 / 16, 8: 11 / 32}, rel=1e-5)
    assert choice.cp == 8


def test_exchange_and_launches_are_paid_for():
    dear = CostModel(pair=2, token=1000, exchange=100_000, launch=0)
    assert choose_eval_context_parallel(2, 1024, ranks=8, train_cp=1, cost=dear).cp == 1
    slow = CostModel(pair=0, token=1, exchange=0, launch=10**9)
    assert choose_eval_context_parallel(8, 64, ranks=8, train_cp=1, cost=slow).cp == 1


def test_all_to_all_and_steps_are_exchange():
    prices = CostModel(pair=2, token=1000, exchange=0, all_to_all=400, step=70, launch=0)
    choice = choose_eval_context_parallel(2, 1000, ranks=4, train_cp=1, cost=prices)
    assert [c.exchange for c in choice.candidates] == [0, 400 * 500 + 70, (400 * 250 + 210) * 2]
    assert choice.cp == 2
    assert "exchange 200,070 instead of 0" in choice.why
    by_plan = choose_eval_context_parallel(
        2, 1000, ranks=4, train_cp=1, cost=prices, max_tokens_per_rank=1000, global_batch_size=1
    )
    assert [c.exchange for c in by_plan.candidates] == [0, 2 * 200_070, 2 * 100_210]


def test_what_hides_behind_attention_is_no_exchange():
    hidden = CostModel(pair=1000, token=1, exchange=10, launch=0, overlap=1)
    choice = choose_eval_context_parallel(1, 4096, ranks=4, train_cp=1, cost=hidden)
    assert [c.exchange for c in choice.candidates] == [0, 0, 0]


@pytest.mark.parametrize("limit", [None, 1000])
def test_groups_that_span_nodes_pay_the_far_prices(limit):
    """12 ranks, 4 a node: a group of 2 lies in one, one of 3 may span two, one of 4 fills one."""
    prices = CostModel(pair=0, token=1000, exchange=4, exchange_far=400, launch=0)
    options = {"train_cp": 1, "cost": prices, "max_tokens_per_rank": limit, "ranks_per_node": 4}
    choice = choose_eval_context_parallel(12, 1200, ranks=12, **options, global_batch_size=12)
    per_sample = {c.cp: c.exchange / max(1, c.cp) for c in choice.candidates}
    assert per_sample[1] == 0
    assert (per_sample[2], per_sample[4]) == (4 * 600, 4 * 900)
    assert per_sample[12] == 400 * 1100
    if limit is None:
        assert per_sample[3] == 400 * 800  # ranks 3 to 5
        assert per_sample[6] == 400 * 1000
    else:
        assert per_sample[3] == pytest.approx(4 * 800 * 4 / 3)  # one group a node, a rank is idle
        refused = next(c for c in choice.candidates if c.cp == 6)
        assert refused.refusal == "its 6 ranks are neither in one node of 4 nor whole nodes"
    near = choose_eval_context_parallel(2, 1200, ranks=12, **{**options, "ranks_per_node": None})
    assert (near.cp, choose_eval_context_parallel(2, 1200, ranks=12, **options).cp) == (6, 4)


def test_a_table_has_no_price_of_exchange():
    table = CostModel.from_function(lambda n, d: 1e-6 * n / d).tabulated([100], [1, 2, 4])
    choice = choose_eval_context_parallel(4, 100, ranks=4, train_cp=1, cost=table)
    assert [c.exchange for c in choice.candidates] == [0, 0, 0]


def test_memory_forces_a_larger_size_and_the_reason_says_so():
    choice = choose_eval_context_parallel(
        64, 4096, ranks=8, train_cp=1, cost=CostModel(exchange=10**6), memory=1024
    )
    assert choice.cp == 4
    assert "does not fit: a rank would hold 4,096 rows > memory (1,024)" in choice.why
    with pytest.raises(ValueError, match=r"no context-parallel size fits: cp 1: .*cp 8: a rank"):
        choose_eval_context_parallel(64, 4096, ranks=8, train_cp=1, memory=511)


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_rank": 64}])
def test_bytes_force_a_larger_size_too(options):
    memory = MemoryModel(activation=8, logit=2, limit=10_240)
    request = {"ranks": 8, "train_cp": 1, "cost": CostModel(exchange=10**6), **options}
    choice = choose_eval_context_parallel(8, 4096, memory=memory, **request)
    assert choice.cp == 4
    assert "does not fit: a rank would hold 40,960 bytes > memory (10,240)" in choice.why
    gathered = MemoryModel(activation=10, gathered=2, limit=10_240)
    with pytest.raises(ValueError, match=r"no .* fits: .*cp 8: a rank would hold 13,312 bytes"):
        choose_eval_context_parallel(8, 4096, memory=gathered, **request)


def test_with_a_limit_plans_keep_to_the_bytes():
    memory = MemoryModel(activation=10, limit=1000)
    request = {"ranks": 2, "train_cp": 1, "max_tokens_per_rank": 400, "sizes": [1]}
    (free,) = choose_eval_context_parallel(8, 100, **request).candidates
    (tight,) = choose_eval_context_parallel(8, 100, memory=memory, **request).candidates
    assert (free.micro_batches, free.rows) == (1, 400)
    assert (tight.micro_batches, tight.rows) == (4, 100)


@given(
    st.lists(st.integers(1, 5000), max_size=40),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.data(),
)
def test_it_never_picks_what_it_predicts_slower_than_training(lengths, ranks, stages, size, data):
    train_cp = data.draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
    choice = choose_eval_context_parallel(
        len(lengths),
        lengths,
        ranks=ranks,
        train_cp=train_cp,
        pipeline_stages=stages,
        micro_batch_size=size,
    )
    assert times(choice)[choice.cp] <= times(choice)[train_cp]
    assert str(choice).count("\n") == len(choice.candidates)


class Groups:
    """The part of process groups that a plan of an evaluation reads."""

    def __init__(self, ranks):
        self.ranks = ranks

    def size(self, role):
        assert role == "dp_cp"
        return self.ranks


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    st.sampled_from([1, 2, 4, 6]),
    st.integers(1, 2000),
    st.integers(1, 12),
    st.sampled_from(["step", "micro_batch"]),
)
def test_with_a_limit_the_prediction_is_the_makespans_of_the_plans_that_dispatch_runs(
    lengths, ranks, limit, batch, sync
):
    choice = choose_eval_context_parallel(
        len(lengths),
        lengths,
        ranks=ranks,
        train_cp=ranks,
        max_tokens_per_rank=limit,
        global_batch_size=batch,
        sync=sync,
    )
    for candidate in choice.candidates:
        evaluation = EvalPlan(
            lengths,
            Groups(ranks),
            max_tokens_per_rank=max(limit, rows_up_to(max(lengths), candidate.cp)),
            global_batch_size=batch,
            degree=candidate.cp,
            sync=sync,
        )
        plans = [evaluation.plan(k) for k in range(-(-len(lengths) // batch))]
        assert candidate.time == sum(p.makespan for p in plans)
        assert candidate.micro_batches == sum(len(p.micro_batches) for p in plans)
        assert candidate.rows == max(p.report().peak_tokens for p in plans)
        assert 0 <= candidate.exchange <= candidate.time
        assert (candidate.exchange == 0) == (candidate.cp == 1)
    assert [c.cp for c in choice.candidates] == divisors(ranks)
    assert choice.cp == min(choice.candidates, key=lambda c: (c.time, c.cp != ranks, c.cp)).cp


def test_ranks_that_wait_in_every_layer_take_the_time_of_the_slowest_in_each_micro_batch():
    """Two ranks, one sample each: 3 and 1 tokens, then 1 and 3."""
    cost = CostModel(pair=0, token=1000, exchange=0, launch=0)
    by_sync = {
        sync: choose_eval_context_parallel(
            4, [3, 1, 1, 3], ranks=2, train_cp=1, cost=cost, sync=sync, sizes=[1]
        )
        for sync in ("step", "micro_batch")
    }
    assert times(by_sync["step"])[1] == 4000
    assert times(by_sync["micro_batch"])[1] == 6000


def test_the_choice_follows_where_ranks_wait():
    """Unequal samples: cp 1 keeps ranks busy until the end of the step, and idle in every layer."""
    lengths = [64, 4, 4, 64, 64, 4, 4, 64]
    cost = CostModel(pair=0, token=1000, exchange=100, launch=0)
    chosen = {
        sync: choose_eval_context_parallel(8, lengths, ranks=2, train_cp=1, cost=cost, sync=sync).cp
        for sync in ("step", "micro_batch")
    }
    assert chosen == {"step": 1, "micro_batch": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": 4, "sync": "auto"}, "sync is 'auto', expected"),
        ({"lengths": [1, 2]}, "there are 2 lengths, expected num_samples = 3"),
        ({"lengths": 4, "train_cp": 3}, "train_cp is 3, expected a divisor of the 8 ranks"),
        ({"lengths": 4, "train_cp": 0}, "train_cp is 0, expected an integer >= 1"),
        ({"lengths": 4, "ranks": 0}, "ranks is 0, expected an integer >= 1"),
        ({"lengths": 4, "micro_batch_size": 0}, "micro_batch_size is 0, expected an integer >= 1"),
        ({"lengths": 4, "pipeline_stages": 0}, "pipeline_stages is 0, expected an integer >= 1"),
        ({"lengths": 4, "global_batch_size": -1}, "global_batch_size is -1, expected"),
        ({"lengths": 4, "sizes": [5]}, "sizes has 5, expected divisors of the 8 ranks"),
        (
            {"lengths": 4, "max_tokens_per_rank": 8, "pipeline_stages": 2},
            "pipeline_stages is 2, expected 1 with max_tokens_per_rank",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_eval_context_parallel(3, **{"ranks": 8, "train_cp": 1, **arguments})


def test_lengths_may_be_a_tensor():
    lengths = torch.tensor([5, 9, 30])
    choice = choose_eval_context_parallel(3, lengths, ranks=4, train_cp=2)
    assert choice == choose_eval_context_parallel(3, lengths.tolist(), ranks=4, train_cp=2)
