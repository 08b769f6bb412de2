"""hcp.Config: Megatron's names, checked with the whole equation."""

import argparse
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hcp
import hcp.step.backends
from hcp.exchange.layout import Layout
from hcp.planning.limits import bytes_up_to, divisors, rows_up_to
from hcp.step.config import Config
from hcp.tools.programs.options import add_arguments


def parsed(*argv):
    return Config.from_args(add_arguments(argparse.ArgumentParser()).parse_args(argv))


def test_without_options_only_the_limit_is_needed():
    assert parsed("--max-seqlen-per-dp-cp-rank", "512") == Config(max_seqlen_per_dp_cp_rank=512)


def test_a_missing_limit_is_named_by_its_option():
    with pytest.raises(ValueError, match="--max-seqlen-per-dp-cp-rank is missing"):
        parsed()


def test_every_option_arrives():
    config = parsed(
        *["--sequence-packing-scheduler", "static_cp", "--max-seqlen-per-dp-cp-rank", "7"],
        *["--min-dynamic-context-parallel-size", "2", "--context-parallel-size", "4"],
        *["--cp-comm-type", "p2p", "all_gather", "--eval-context-parallel-size", "8"],
        *["--sync", "micro_batch", "--attention-backend", "torch"],
    )
    other = {"sync": "micro_batch", "attention_backend": "torch"}
    expected = Config(7, "static_cp", 2, 4, ("p2p", "all_gather"), 8, **other)
    assert config == expected
    assert config.comm_types == ("p2p", "all_gather")


def test_evaluation_has_one_degree_and_room_for_its_share_of_the_longest_sequence():
    training = Config(
        16, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(4, 2), ranks_per_node=4
    )
    assert training.for_evaluation(2, 64) == Config(
        rows_up_to(64, 2),
        "static_cp",
        context_parallel_size=2,
        cp_comm_type="a2a+p2p",
        hierarchical_context_parallel_sizes=(2, 1),
        ranks_per_node=4,
    )
    assert training.for_evaluation(8, 64).max_seqlen_per_dp_cp_rank == 16
    assert {g.degree for g in training.for_evaluation(2, 64).plan([64, 3], 8).micro_batches[0]} == {
        2
    }


@pytest.mark.parametrize(
    ("option", "planned", "where_layers_wait"),
    [
        ("auto", "step", "micro_batch"),
        ("step", "step", "step"),
        ("micro_batch", "micro_batch", "micro_batch"),
    ],
)
def test_plans_know_when_ranks_wait_for_each_other(option, planned, where_layers_wait):
    config = parsed("--max-seqlen-per-dp-cp-rank", "16", "--sync", option)
    assert config.plan([20, 3], ranks=4).sync == planned
    assert config.plan([20, 3], ranks=4, sync="micro_batch").sync == "micro_batch"
    assert config.sync_where(waiting=True) == where_layers_wait
    assert config.sync_where(waiting=False) == planned
    assert config.for_evaluation(2, 20).sync == option


def test_the_eval_size_may_be_left_to_the_chooser(capsys):
    config = parsed("--max-seqlen-per-dp-cp-rank", "8", "--eval-context-parallel-size", "auto")
    config.validate(ranks=3)
    assert config.eval_context_parallel_size == "auto"
    with pytest.raises(SystemExit):
        parsed("--eval-context-parallel-size", "best")
    assert "'best', expected an integer >= 1 or auto" in capsys.readouterr().err


def test_an_option_that_the_parser_has_stays_as_it_is():
    parser = argparse.ArgumentParser()
    parser.add_argument("--context-parallel-size", type=int, default=2)
    args = add_arguments(parser).parse_args(["--max-seqlen-per-dp-cp-rank", "9"])
    assert Config.from_args(args).context_parallel_size == 2


def test_an_option_that_the_trainer_lacks_takes_its_default():
    assert Config.from_args(argparse.Namespace(max_seqlen_per_dp_cp_rank=5)) == Config(5)


LEVELS = ["--hierarchical-context-parallel-sizes", "2", "4"]


def test_levels_and_windows_arrive():
    config = parsed(
        *["--max-seqlen-per-dp-cp-rank", "7", "--cp-comm-type", "a2a+p2p", "auto", *LEVELS],
        *["--window-size", "full", "127,0"],
    )
    assert config.hierarchical_context_parallel_sizes == (2, 4)
    assert [config.window(layer) for layer in (0, 1)] == [(-1, -1), (127, 0)]
    assert config.dispatch_options() == {
        "comm_types": ("a2a+p2p", "auto"),
        "hierarchical_context_parallel_sizes": (2, 4),
        "window_sizes": ((-1, -1), (127, 0)),
        "handler_cls": hcp.get_cp_handler_cls("auto", ("a2a+p2p", "auto")),
        "scan_type": "auto",
    }
    narrow = parsed("--max-seqlen-per-dp-cp-rank", "7", "--window-size", "64,0")
    assert narrow == Config(7, window_size=[64, 0])
    assert [narrow.window(layer) for layer in (0, 5)] == [(64, 0)] * 2


@pytest.mark.parametrize(("degree", "levels"), [(1, (1, 1)), (2, (2, 1)), (6, (2, 3)), (8, (2, 4))])
def test_another_layout_has_the_levels_that_fit_it(degree, levels):
    config = Config(9, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 4))
    assert config.dispatch_options(degree)["hierarchical_context_parallel_sizes"] == levels


def test_plans_know_the_nodes_that_the_levels_stay_in():
    config = parsed("--max-seqlen-per-dp-cp-rank", "16", "--ranks-per-node", "4")
    plan = config.plan([90], ranks=8)
    assert plan.core.ranks_per_node == 4
    assert [group.degree for group in plan.micro_batches[0]] == [8]  # 6 ranks would be enough
    with pytest.raises(ValueError, match="ranks_per_node is 0, expected an integer >= 1"):
        Config(9, ranks_per_node=0)


def test_static_levels_must_make_the_degree():
    static = {"sequence_packing_scheduler": "static_cp", "cp_comm_type": "a2a+p2p"}
    levels = {"hierarchical_context_parallel_sizes": (2, 4)}
    Config(9, context_parallel_size=8, **static, **levels)
    message = r"sizes is \[2, 4\], whose product is 8, expected 4: the degree of every group"
    with pytest.raises(ValueError, match=message):
        Config(9, context_parallel_size=4, **static, **levels)
    with pytest.raises(ValueError, match=message):
        Config(32, **static, **levels).validate(ranks=8, longest=128)  # 4 ranks hold it
    with pytest.raises(
        ValueError, match="hierarchical_context_parallel_sizes is missing, expected"
    ):
        Config(9, **static)


@pytest.mark.parametrize("argv", [["p2p"], ["all_gather"]])
def test_one_comm_type_is_for_all_layers(argv):
    config = parsed("--max-seqlen-per-dp-cp-rank", "9", "--cp-comm-type", *argv)
    assert [config.comm_type(layer) for layer in (0, 7)] == argv * 2
    assert config.comm_types == tuple(argv)


def test_a_comm_type_for_each_layer():
    config = Config(9, cp_comm_type=["p2p", "all_gather", "p2p"])
    assert [config.comm_type(layer) for layer in range(3)] == ["p2p", "all_gather", "p2p"]
    with pytest.raises(ValueError, match="layer is 3, but cp_comm_type lists 3 layers"):
        config.comm_type(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_seqlen_per_dp_cp_rank": 0},
            "max_seqlen_per_dp_cp_rank is 0, expected an integer >= 1",
        ),
        (
            {"max_seqlen_per_dp_cp_rank": 2.5},
            "max_seqlen_per_dp_cp_rank is 2.5, expected an integer",
        ),
        (
            {"max_seqlen_per_dp_cp_rank": True},
            "max_seqlen_per_dp_cp_rank is True, expected an integer",
        ),
        ({"sequence_packing_scheduler": "fast"}, "'fast', expected one of dynamic_cp, static_cp"),
        ({"min_dynamic_context_parallel_size": 0}, "min_dynamic_context_parallel_size is 0"),
        ({"context_parallel_size": -1}, "context_parallel_size is -1"),
        ({"eval_context_parallel_size": 0}, "eval_context_parallel_size is 0"),
        (
            {"eval_context_parallel_size": "all"},
            "eval_context_parallel_size is 'all', expected an integer >= 1 or 'auto'",
        ),
        ({"cp_comm_type": "a2a+p2p"}, "hierarchical_context_parallel_sizes is missing, expected"),
        (
            {"cp_comm_type": ("p2p", "a2a+p2p"), "hierarchical_context_parallel_sizes": [4]},
            r"sizes is \[4\], expected two or more integers >= 1",
        ),
        (
            {"hierarchical_context_parallel_sizes": [2, 2]},
            r"is \[2, 2\], but cp_comm_type has no 'a2a\+p2p' that would use it",
        ),
        ({"window_size": (3, -2)}, r"window_size is \(3, -2\), expected \(left, right\) in tokens"),
        ({"window_size": [(3, 0), (1, 2, 3)]}, r"window_size\[1\] is \(1, 2, 3\), expected"),
        ({"window_size": 128}, "window_size is 128, expected"),
        ({"attention_backend": "magi"}, "attention_backend is 'magi', expected one of auto, torch"),
        ({"attention_backend": 4}, "attention_backend is 4, expected one of auto, torch, cudnn"),
        ({"cp_comm_type": "ring"}, "cp_comm_type is 'ring', expected one of p2p, all_gather, a2a"),
        ({"cp_comm_type": ["p2p", "ring"]}, r"cp_comm_type\[1\] is 'ring'"),
        ({"cp_comm_type": []}, "cp_comm_type is an empty list"),
        ({"cp_comm_type": 5}, "cp_comm_type is 5, expected one of p2p, all_gather, a2a"),
        ({"window_size": []}, "window_size is an empty list"),
        ({"sync": "layer"}, "sync is 'layer', expected one of auto, step, micro_batch"),
        ({"window_size": None}, r"window_size is None, expected \(left, right\) in tokens"),
        (
            {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": 2},
            "hierarchical_context_parallel_sizes is 2, expected a sequence of integers",
        ),
        ({"max_seqlen_per_dp_cp_rank": "5"}, "max_seqlen_per_dp_cp_rank is '5', expected an int"),
    ],
)
def test_a_wrong_value_is_refused_with_value_and_expectation(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**{"max_seqlen_per_dp_cp_rank": 8, **options})


@pytest.mark.parametrize(
    ("options", "where", "message"),
    [
        (
            {"context_parallel_size": 3},
            {},
            r"^context_parallel_size is 3, expected a divisor of the 4 ranks: .*\[1, 2, 4\]",
        ),
        (
            {"eval_context_parallel_size": 8},
            {},
            r"^eval_context_parallel_size is 8, expected a divisor of the 4 ranks: .*\[1, 2, 4\]",
        ),
        (
            {"min_dynamic_context_parallel_size": 5},
            {},
            r"min_dynamic_context_parallel_size is 5, expected at most 4, the ranks",
        ),
        (
            {"cp_comm_type": ["p2p"] * 2},
            {"num_layers": 3},
            "lists 2 values for 3 layers, expected 1 or 3",
        ),
        (
            {},
            {"longest": 33},
            r"rows of 33 tokens on a rank of 4 \(9\) > max_seqlen_per_dp_cp_rank \(8\)",
        ),
        (
            {"sequence_packing_scheduler": "static_cp", "context_parallel_size": 2},
            {"longest": 17},
            r"rows of 17 tokens on a rank of 2 \(9\) > max_seqlen_per_dp_cp_rank \(8\)",
        ),
    ],
)
def test_what_cannot_work_on_the_ranks_is_refused_with_the_equation(options, where, message):
    with pytest.raises(ValueError, match=message):
        Config(8, **options).validate(ranks=4, **where)


def test_what_works_on_the_ranks_is_not_refused():
    Config(8, context_parallel_size=4, eval_context_parallel_size=2).validate(
        ranks=4, num_layers=3, longest=32
    )


@pytest.mark.parametrize(("longest", "degree"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4)])
def test_static_cp_takes_the_least_divisor_that_holds_the_longest(longest, degree):
    assert Config(8).static_degree(longest, ranks=4) == degree


def test_a_static_plan_has_one_degree_and_a_dynamic_plan_need_not():
    lengths = [32, 3, 3, 3, 3, 3]
    static = Config(8, "static_cp").plan(lengths, ranks=4)
    dynamic = Config(8).plan(lengths, ranks=4)
    assert {group.degree for groups in static.micro_batches for group in groups} == {4}
    assert {group.degree for groups in dynamic.micro_batches for group in groups} > {4}


def test_a_dynamic_plan_keeps_the_least_degree():
    plan = Config(8, min_dynamic_context_parallel_size=3).plan([5, 5, 5], ranks=4)
    assert min(group.degree for groups in plan.micro_batches for group in groups) >= 3


def test_no_lengths_give_an_empty_plan():
    for scheduler in ("static_cp", "dynamic_cp"):
        assert Config(8, scheduler).plan([], ranks=4).micro_batches == ()


def test_the_backend_of_attention_is_the_class_of_handlers():
    assert Config(8).dispatch_options()["handler_cls"] is hcp.ContextParallelHandler
    config = Config(8, attention_backend="torch", cp_comm_type=["a2a", "p2p", "a2a"])
    for options in (config.dispatch_options(), config.for_evaluation(2, 9).dispatch_options(2)):
        assert options["handler_cls"] is hcp.get_cp_handler_cls("torch", ["a2a", "p2p"])


def test_a_backend_that_a_third_party_registers_is_an_option():
    class Own(hcp.ContextParallelHandler):
        pass

    with pytest.raises(ValueError, match="attention_backend is 'own', expected one of auto"):
        Config(8, attention_backend="own")
    hcp.register_backend("own", lambda: Own)
    try:
        made = parsed("--max-seqlen-per-dp-cp-rank", "7", "--attention-backend", "own")
        assert issubclass(made.dispatch_options()["handler_cls"], Own)
    finally:
        del hcp.step.backends.BACKENDS["own"]
        hcp.step.backends._made.cache_clear()


def test_config_is_public():
    assert hcp.Config is Config
    assert hcp.add_arguments is add_arguments


@given(st.integers(1, 300), st.integers(1, 40))
def test_rows_up_to_is_what_the_worst_length_puts_on_a_rank(longest, degree):
    def rows_of_fullest_rank(length):
        edges = [k * length // (2 * degree) for k in range(2 * degree + 1)]
        sizes = [end - start for start, end in itertools.pairwise(edges)]
        return max(sizes[j] + sizes[-1 - j] for j in range(degree))

    assert rows_up_to(longest, degree) == max(map(rows_of_fullest_rank, range(1, longest + 1)))


def test_a_shorter_sequence_may_need_a_row_more():
    with pytest.raises(ValueError, match=r"rows of 12 tokens on a rank of 4 \(4\) > "):
        Config(3, "static_cp").static_degree(12, ranks=4)


@given(st.integers(1, 200))
def test_divisors_divide(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_the_static_degree_leaves_room_for_alignment():
    config = hcp.Config(10, sequence_packing_scheduler="static_cp")
    assert config.static_degree(40, ranks=8) == 4
    assert config.static_degree(40, ranks=8, alignment=4) == 8  # 8 rows are the most
    assert config.static_degree(40, ranks=8, alignment=0) == 4
    plan = config.plan([40, 3], ranks=8, alignment=0)
    assert plan.micro_batches == config.plan([40, 3], ranks=8).micro_batches
    with pytest.raises(ValueError, match="ranks is 0, expected an integer >= 1"):
        config.static_degree(40, ranks=0)
    plan = config.plan([40, 3], ranks=8, alignment=4)
    assert {g.degree for batch in plan.micro_batches for g in batch} == {8}


def test_the_static_degree_keeps_to_nodes() -> None:
    config = Config(100, "static_cp", ranks_per_node=4)
    config.validate(ranks=12, longest=600)
    assert config.static_degree(600, ranks=12) == 12  # 6 would cut a node in two
    (groups,) = config.plan([600], ranks=12).micro_batches
    assert [group.degree for group in groups] == [12]
    with pytest.raises(ValueError, match="rows of 600 tokens on a rank of 4"):
        Config(100, ranks_per_node=4).validate(ranks=6, longest=600)


# ---- bytes ---------------------------------------------------------------------------------------

TEN_A_ROW = hcp.MemoryModel(activation=8, logit=2, limit=60)


def test_every_plan_keeps_to_the_memory():
    lengths = [20, 6, 6, 5, 3, 1]
    for scheduler in ("dynamic_cp", "static_cp"):
        free, tight = (Config(20, scheduler, memory=m) for m in (None, TEN_A_ROW))
        assert free.plan(lengths, ranks=4).memory == hcp.MemoryModel()
        assert max(free.plan(lengths, ranks=4).report().rank_tokens) > 6
        plan = tight.plan(lengths, ranks=4)
        assert plan.memory == TEN_A_ROW
        rows = [
            Layout(plan, k, rank).rows for k in range(len(plan.micro_batches)) for rank in range(4)
        ]
        assert 0 < max(rows) <= 6


def test_memory_comes_from_a_file(tmp_path):
    path = tmp_path / "memory.json"
    TEN_A_ROW.save(path, {})
    expected = Config(20, memory=TEN_A_ROW)
    assert Config(20, memory=path) == Config(20, memory=str(path)) == expected
    assert parsed("--max-seqlen-per-dp-cp-rank", "20", "--memory", str(path)) == expected
    assert expected.memory_model == TEN_A_ROW
    assert Config(20).memory_model is None


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("no/such.json", "memory is 'no/such.json', expected a file of `hcp calibrate"),
        (60, "memory is 60, expected a MemoryModel, or a path of its file"),
        (hcp.MemoryModel(activation=3), "memory.limit is 0, expected the bytes that"),
        (hcp.MemoryModel(limit=3), "memory.activation and memory.logit are 0, expected one of"),
    ],
)
def test_what_limits_no_bytes_is_refused(memory, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Config(20, memory=memory)


def test_a_wrong_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "memory.json").write_text("{}")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'memory.json'}: format is None")):
        Config(20, memory=tmp_path / "memory.json")


ALL_GATHER = hcp.MemoryModel(activation=10, gathered=1, limit=60)


@pytest.mark.parametrize(
    ("options", "alignment", "message"),
    [
        (
            {"memory": TEN_A_ROW},
            1,
            "a sequence of 40 tokens takes 100 bytes on each of 4 ranks > memory.limit (60): use "
            "more ranks, recompute activations in the backward and calibrate again, or shorten",
        ),
        ({"memory": TEN_A_ROW}, 4, "takes 130 bytes on each of 4 ranks > memory.limit (60): use "
         "more ranks, a smaller alignment than 4, recompute"),
        ({"memory": ALL_GATHER}, 1, "takes 140 bytes on each of 4 ranks > memory.limit (60): use "
         "more ranks, a comm type that holds fewer keys, such as a2a, more head_chunks, recompute"),
        ({"memory": TEN_A_ROW, "context_parallel_size": 2}, 1, "200 bytes on each of 2 ranks"),
    ],
)  # fmt: skip
def test_a_run_whose_longest_sequence_takes_too_many_bytes_is_refused(options, alignment, message):
    for scheduler in ("dynamic_cp", "static_cp"):
        if scheduler == "dynamic_cp" and "context_parallel_size" in options:
            continue
        config = Config(40, scheduler, **options)
        with pytest.raises(ValueError, match=re.escape(message)):
            config.validate(ranks=4, longest=40, alignment=alignment)


def test_rows_are_refused_before_bytes():
    with pytest.raises(ValueError, match="rows of 40 tokens on a rank of 4"):
        Config(8, memory=TEN_A_ROW).validate(ranks=4, longest=40)


def test_a_plan_that_takes_too_many_bytes_is_refused_with_the_sequence():
    config = Config(40, memory=ALL_GATHER)
    message = (
        "lengths[1] is 40: the fullest of 4 ranks would need 173 bytes with what alignment may "
        "add, expected <= 60 (memory.limit); use more ranks, a smaller alignment, a comm type that "
        "holds fewer keys, more head_chunks, recompute activations and calibrate again"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        config.plan([3, 40], ranks=4, alignment=4)


@pytest.mark.parametrize(
    ("config", "aligned", "widest"),
    [
        (Config(8), 0, 4),
        (Config(11), 8, 4),
        (Config(8, "static_cp", context_parallel_size=2), 0, 2),
    ],
)
def test_a_plan_of_too_long_a_sequence_is_refused_by_the_name_of_this_option(
    config, aligned, widest
):
    message = (
        rf"lengths\[1\] is 36: the fullest of {widest} ranks .*would hold {36 // widest} rows, "
        r"expected <= 8 \(max_seqlen_per_dp_cp_rank.*\); raise it, use more ranks, or shorten"
    )
    with pytest.raises(ValueError, match=message):
        config.plan([3, 36], ranks=4, alignment=aligned)


def test_an_error_of_a_cost_function_is_its_own():
    failed = ValueError("no price")

    def price(length: int, degree: int) -> float:
        raise failed

    with pytest.raises(ValueError, match="no price") as caught:
        Config(8).plan([3, 6], ranks=2, cost=hcp.CostModel.from_function(price))
    assert caught.value is failed


def test_a_refusal_names_the_degree_that_needs_least():
    """Gathered keys may be more than the rows that more ranks save."""
    memory = hcp.MemoryModel(activation=1, gathered=100, limit=39)
    with pytest.raises(ValueError, match="the fullest of 1 ranks would need 40 bytes, expected"):
        Config(40, memory=memory).plan([40], ranks=4)
    with pytest.raises(ValueError, match="takes 40 bytes on each of 1 ranks"):
        Config(40, memory=memory).validate(ranks=4, longest=40)


def test_the_static_degree_leaves_room_in_memory():
    config = Config(40, "static_cp", memory=TEN_A_ROW)
    assert Config(40, "static_cp").static_degree(20, ranks=8) == 1
    assert config.static_degree(20, ranks=8) == 4
    assert config.static_degree(20, ranks=8, alignment=2) == 8  # 6 rows, and 1 of alignment


@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 8), st.integers(0, 3))
def test_bytes_up_to_hold_every_shorter_sequence(longest, degree, alignment, gathered):
    memory = hcp.MemoryModel(activation=7, gathered=gathered, limit=1)
    enough = bytes_up_to(longest, degree, memory, alignment)
    limits = {"ranks": degree, "max_tokens_per_rank": 10**6, "min_degree": degree}
    held = hcp.MemoryModel(activation=7, gathered=gathered, limit=enough)
    for length in range(max(1, longest - 20), longest + 1):
        hcp.plan([length], memory=held, alignment=alignment, **limits)


def test_an_evaluation_keeps_to_the_memory_where_one_sequence_does():
    config = Config(20, memory=TEN_A_ROW)
    roomy = config.for_evaluation(4, 16, alignment=2)
    assert roomy.memory == TEN_A_ROW
    assert max(roomy.plan([16, 4, 4], 4, alignment=2).report().rank_bytes) <= 60
    tight = config.for_evaluation(1, 33, alignment=2)
    assert (tight.max_seqlen_per_dp_cp_rank, tight.memory_model.limit) == (34, 340)
    plan = tight.plan([33, 33, 33], ranks=1, alignment=2)
    assert len(plan.micro_batches) == 3
    assert Config(20).memory_in_evaluation(1, 33) is None
