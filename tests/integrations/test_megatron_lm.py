"""Megatron-LM's own `pretrain` and scripts by hcp's launcher: losses are Megatron-LM's own.

The script is `support/megatron_lm_script.py`; with MEGATRON_LM, a folder with Megatron-LM's
pretrain_gpt.py, that one runs too.
"""

import argparse
import functools
import importlib.util
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.tensorboard_writer import check

from hcp.integrations.megatron.lm import dev
from hcp.integrations.megatron.lm import flags as lm_flags

TRAINING = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.training")
needs_training = pytest.mark.skipif(
    not TRAINING, reason="megatron.training is not installed: make test-trainer-megatron_lm"
)
CHECKOUT = os.environ.get("MEGATRON_LM")

DYNAMIC = ("--dynamic-context-parallel", "--max-seqlen-per-dp-cp-rank", "20")
STATIC = (
    *("--sequence-packing-scheduler", "dp_balanced", "--context-parallel-size", "2"),
    *("--max-seqlen-per-dp-cp-rank", "64"),
)
PRINTED = dict(rel=0, abs=2e-6)
"""Megatron-LM prints seven digits."""


@functools.cache
def by_megatron(folder, *flags):
    from support.megatron_lm import run

    return run("alone", 1, *flags, folder=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("megatron-lm")


def agree(trained, expected, first=1):
    assert trained.evaluations == pytest.approx(
        expected.evaluations[-len(trained.evaluations) :], **PRINTED
    )
    losses = {i: loss for i, loss in expected.losses.items() if i >= first}
    assert trained.losses == pytest.approx(losses, **PRINTED)


@needs_training
def test_dynamic_cp_by_flags_trains_and_evaluates_as_megatron_lm_does(folder):
    from support.megatron_lm import run

    expected = by_megatron(folder)
    assert (len(expected.losses), len(expected.evaluations)) == (4, 4)
    assert expected.losses[4] < expected.losses[1] - 0.1
    board = ("--tensorboard-dir", "board", "--tensorboard-log-interval", "2")
    found = run("launch", 2, *DYNAMIC, "--linear-cross-entropy", *board, folder=folder)
    agree(found, expected)
    assert sorted(found.metrics) == [2, 4]
    for written in found.metrics.values():
        check(written, sequences=4, ranks=2)


@needs_training
def test_each_of_several_validation_sets_has_megatron_lms_own_loss(folder):
    from support.megatron_lm import run

    sets = ("--multiple-validation-sets", "--full-validation", "--eval-iters", "0")
    expected = by_megatron(folder, *sets)
    each = expected.evaluations[:2]
    assert len(expected.evaluations) == 2 * 3  # after two steps and four, and at the end
    assert each[0] != pytest.approx(each[1], abs=1e-3)
    flags = (*DYNAMIC, "--eval-context-parallel-size", "2", *sets)
    agree(run("launch", 2, *flags, folder=folder), expected)


@needs_training
def test_a_checkpoint_of_static_cp_goes_on_under_dynamic_cp_and_another_eval_layout(folder):
    from support.megatron_lm import run

    expected = by_megatron(folder)
    saved = run("launch", 2, *STATIC, "--save", "kept", "--save-interval", "2", folder=folder)
    agree(saved, expected)
    resumed = ("--load", "kept", "--ckpt-step", "2", "--eval-context-parallel-size", "2")
    # Its first line reports iteration 3, its second the mean of both: Megatron-LM's log.
    gone_on = run("launch", 2, *DYNAMIC, *resumed, folder=folder)
    assert gone_on.losses[3] == pytest.approx(expected.losses[3], **PRINTED)
    mean = (expected.losses[3] + expected.losses[4]) / 2
    assert gone_on.losses[4] == pytest.approx(mean, **PRINTED)
    assert gone_on.evaluations == pytest.approx(expected.evaluations[1:], **PRINTED)


@needs_training
def test_a_cross_entropy_that_megatron_lm_compiles_trains_without_a_gpu(folder):
    from support.megatron_lm import run

    once = ("--train-iters", "2", "--eval-iters", "0", "--cross-entropy-loss-fusion")
    found = run("launch", 1, *DYNAMIC[:2], "32", *once, folder=folder)
    agree(found, by_megatron(folder, *once))


@needs_training
def test_pipeline_stages_train_as_megatron_lm_does(folder):
    from support.megatron_lm import run

    stages = ("--pipeline-model-parallel-size", "2")
    agree(
        run("launch", 2, *DYNAMIC[:2], "32", *stages, folder=folder),
        run("alone", 2, *stages, folder=folder),
    )


@needs_training
def test_prediction_layers_train_and_log_means_over_tokens_whatever_the_plan(folder):
    """As Megatron-LM does with one micro-batch; of several it takes the means of each."""
    from support.megatron_lm import run

    steps = ("--train-iters", "3", "--eval-iters", "0", "--mtp-num-layers", "2")
    alone = run("alone", 1, *steps, "--micro-batch-size", "4", folder=folder)
    for ranks, limit in ((1, "32"), (1, "128"), (2, "20")):
        planned = run("launch", ranks, *DYNAMIC[:2], limit, *steps, folder=folder)
        for name in ("mtp_1 loss", "mtp_2 loss"):
            expected = [pytest.approx(loss, **PRINTED) for loss in alone.others[name]]
            assert len(expected) == 3
            assert planned.others[name] == expected, (name, ranks, limit)
        agree(planned, alone)


@needs_training
def test_logged_losses_of_experts_are_means_over_the_planned_micro_batches(folder):
    """To the rows that each has: the loader gives 4 micro-batches, the plan of the second run 1."""
    from support.megatron_lm import run

    once = ("--train-iters", "1", "--eval-iters", "0")
    experts = ("--num-experts", "4", "--moe-z-loss-coeff", "1e-3")
    (expected,) = run("alone", 1, *once, *experts, folder=folder).others["z_loss"]
    planned = run("launch", 1, *DYNAMIC[:2], "128", *once, *experts, folder=folder)
    assert planned.others["z_loss"] == [pytest.approx(expected, rel=0.05)]


@needs_training
@pytest.mark.parametrize("flags", [DYNAMIC, STATIC])
def test_the_flags_of_branch_dev_train_by_plans_and_not_by_its_own_packing(folder, flags):
    """On 3 ranks, for which dev has no groups. Its samples come as a list, and none of them says
    its bounds: dev itself would end with KeyError."""
    from support.megatron_lm import run

    ranks = 3 if flags is DYNAMIC else 2
    once = ("--train-iters", "2", "--global-batch-size", "6", "--eval-iters", "0")
    expected = by_megatron(folder, *once)
    found = run("dev", ranks, *flags, *once, "--sft", folder=folder)
    assert len(found.losses) == 2
    agree(found, expected)


needs_checkout = pytest.mark.skipif(
    not (TRAINING and CHECKOUT), reason="MEGATRON_LM names no checkout of Megatron-LM"
)
GPT_DATA = ("--split", "90,5,5", "--data-cache-path", "cache")


@needs_checkout
def test_pretrain_gpt_trains_and_evaluates_under_the_launcher(folder):
    from support.megatron_lm import run

    script = str(Path(CHECKOUT, "pretrain_gpt.py"))
    agree(
        run("launch", 2, *DYNAMIC, *GPT_DATA, folder=folder, script=script),
        run("alone", 1, *GPT_DATA, folder=folder, script=script),
    )


# ---- Flags ---------------------------------------------------------------------------------------


SPREAD = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2"),
    *("--moe-token-dispatcher-type", "flex"),
)


def parsed(*flags):
    """Megatron-LM's arguments, as far as hcp reads them."""
    parser = argparse.ArgumentParser()
    for name in ("tensor-model", "pipeline-model", "context", "expert-model"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--moe-token-dispatcher-type", default="allgather")
    parser.add_argument("--moe-flex-dispatcher-backend", default="deepep")
    parser.add_argument("--cuda-graph-impl", default="none")
    parser.add_argument("--max-seqlen-per-dp-cp-rank", type=int)
    parser.add_argument("--sequence-packing-scheduler", choices=("dp_balanced",))
    parser.add_argument("--pad-packed-seq-alignment")
    for name in ("hybrid-context-parallel", "use-megatron-fsdp", "check-for-spiky-loss", "sft"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--no-per-token", dest="calculate_per_token_loss", action="store_false")
    parser.set_defaults(world_size=2, variable_seq_lengths=False, micro_batch_size=2)
    return lm_flags.add_flags(parser).parse_args(flags)


def validated(args, validate=lambda args: None):
    """hcp's options, after Megatron-LM's own function has checked what it sees of them."""
    from hcp.integrations.megatron.lm import seams

    run = seams._Run()
    seams._with_options(validate, run)(args)
    return run.config


@pytest.mark.parametrize("name", ["default_dynamic_cp", "dp_balanced", "hcp"])
def test_every_name_of_a_scheduler_is_taken(name):
    args = parsed("--sequence-packing-scheduler", name, *DYNAMIC[1:2], "32")
    scheduler = validated(args).sequence_packing_scheduler
    assert scheduler == ("static_cp" if name == "dp_balanced" else "dynamic_cp")
    assert not args.variable_seq_lengths


def as_branch_dev(args):
    """What Megatron-LM checks and sets of dynamic CP, as far as it is between it and hcp."""
    if args.hierarchical_context_parallel_sizes:
        assert args.context_parallel_size == math.prod(args.hierarchical_context_parallel_sizes)
    assert "a2a+p2p" not in args.cp_comm_type or args.hierarchical_context_parallel_sizes
    assert not args.dynamic_context_parallel
    assert args.sequence_packing_scheduler is None
    limit = args.max_seqlen_per_dp_cp_rank or args.seq_length
    assert args.context_parallel_size * limit >= args.seq_length
    args.sequence_packing_scheduler = "dp_balanced"  # for a dataset of samples of several lengths


LEVELS = ("--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", "2", "1")


def test_megatron_lm_does_not_see_the_options_of_hcp():
    args = parsed(*DYNAMIC, "--min-dynamic-context-parallel-size", "2", *LEVELS, "--sft")
    config = validated(args, as_branch_dev)
    assert (config.sequence_packing_scheduler, config.cp_comm_type) == ("dynamic_cp", "a2a+p2p")
    assert config.min_dynamic_context_parallel_size == 2
    assert config.hierarchical_context_parallel_sizes == (2, 1)
    assert (args.dynamic_context_parallel, args.sequence_packing_scheduler) == (False, None)
    assert args.hierarchical_context_parallel_sizes is None
    assert args.max_seqlen_per_dp_cp_rank == config.max_seqlen_per_dp_cp_rank == 20
    assert args.cp_comm_type == ["a2a+p2p"]  # layers take it from the model's config
    assert args.use_vanilla_collate_fn  # samples have lengths of their own


def test_a_scheduler_that_the_command_line_does_not_name_is_refused():
    from hcp.integrations.megatron.lm import seams

    config = SimpleNamespace(sequence_packing_scheduler="dp_balanced")
    with pytest.raises(ValueError, match=r"config.sequence_packing_scheduler is 'dp_balanced'"):
        seams._refuse_scheduler(iter(()), config, 4)


def test_a_comm_type_that_branch_dev_takes_for_its_own_attention_is_refused():
    args = parsed(*STATIC[:5], "64")
    vars(args).update(fallback_to_eager_attn=False, transformer_impl="local")
    with pytest.raises(ValueError, match=r"--cp-comm-type p2p does not go .*all_gather alone"):
        validated(args)
    args = parsed(*STATIC[:5], "64", "--cp-comm-type", "all_gather")
    vars(args).update(fallback_to_eager_attn=False, transformer_impl="local")
    assert validated(args).cp_comm_type == "all_gather"


def test_pipeline_stages_send_as_many_rows_as_the_plan_has():
    args = parsed(*DYNAMIC[:2], "32", "--pipeline-model-parallel-size", "2")
    validated(args)
    assert (args.variable_seq_lengths, args.moe_token_dispatcher_type) == (True, "alltoall")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "neither --dynamic-context-parallel nor --sequence-packing-scheduler is given"),
        (DYNAMIC[:1], "--max-seqlen-per-dp-cp-rank is missing"),
        ((*DYNAMIC, "--no-per-token"), "--calculate-per-token-loss does not go with hcp"),
        ((*DYNAMIC, "--hybrid-context-parallel"), "--hybrid-context-parallel does not go"),
        ((*DYNAMIC, "--use-megatron-fsdp"), "--use-megatron-fsdp does not go"),
        ((*DYNAMIC, "--pad-packed-seq-alignment", "8"), "--pad-packed-seq-alignment does not go"),
        ((*DYNAMIC, "--check-for-spiky-loss"), "--check-for-spiky-loss does not go"),
        ((*DYNAMIC, "--cuda-graph-impl", "local"), "--cuda-graph-impl local does not go"),
        ((*DYNAMIC, "--eval-context-parallel-size", "auto"), "is auto, expected a number"),
        ((*DYNAMIC, "--eval-context-parallel-size", "3"), "eval_context_parallel_size is 3, exp"),
        ((*DYNAMIC[:2], "8"), r"> max_seqlen_per_dp_cp_rank \(8\)"),
        (
            (*DYNAMIC, "--num-experts", "4", "--expert-model-parallel-size", "2"),
            "give --moe-token-dispatcher-type alltoall",
        ),
        (
            (*DYNAMIC, *SPREAD, "--moe-flex-dispatcher-backend", "hybridep"),
            "--moe-flex-dispatcher-backend hybridep does not go with hcp: without moe_hybridep",
        ),
    ],
)
def test_what_does_not_go_is_refused_before_groups_are_made(flags, message):
    with pytest.raises(ValueError, match=message):
        validated(parsed(*flags))


@needs_training
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--check-for-spiky-loss",), "--check-for-spiky-loss does not go with hcp"),
        (("--attention-dropout", "0.1"), "config.attention_dropout is 0.1, expected 0.0"),
    ],
)
def test_a_refusal_before_training_is_one_line(folder, flags, message):
    """The second one comes from a layer, while the model is built."""
    from support.megatron_lm import FLAGS, SCRIPT
    from support.ranks import run_module

    given = ("launch", SCRIPT, *FLAGS, *DYNAMIC[:2], "32", *flags)
    done = run_module("support.megatron_lm", *given, folder=folder, ranks=1)
    name = "hcp.integrations.megatron.launch: error: "
    (line,) = [line for line in done.err.splitlines() if message in line]
    assert (done.code, line.startswith(name + message)) == (2, True)
    assert "Traceback" not in done.err


def test_the_launcher_says_what_it_expects(capsys):
    from hcp.integrations.megatron.launch import main

    with pytest.raises(SystemExit):
        main(["no_such_script.py"])
    assert "the script is no_such_script.py, expected a file" in capsys.readouterr().err


# ---- Places and samples --------------------------------------------------------------------------


@needs_training
def test_samples_of_a_micro_batch_lose_the_rows_that_no_loss_sees():
    from hcp.integrations.megatron.lm import reading

    batch = {
        "tokens": torch.arange(8).reshape(2, 4),
        "labels": torch.arange(8).reshape(2, 4) + 1,
        "loss_mask": torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 0]]),
        "dataset_id": ["not", "rows"],
    }
    kept = reading.drawn_now(iter([batch]), 1)
    assert [each["tokens"].tolist() for each in kept] == [[0, 1, 2], [4]]


@needs_training
def test_documents_in_a_sample_are_sequences_of_their_own():
    """As --dataloader-inter-document-masking and --sft give them: bounds, filled up by the end."""
    from hcp.integrations.megatron.lm import reading

    batch = {
        "tokens": torch.arange(6)[None],
        "labels": torch.arange(6)[None] + 1,
        "loss_mask": torch.ones(1, 6),
        "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]),
        "cu_seqlens": torch.tensor([[0, 2, 6, 6, 6, 6, 6]]),
        "max_seqlen": torch.tensor([4]),
    }
    found = [each["tokens"].tolist() for each in reading.sequences_of(batch)]
    assert found == [[0, 1], [2, 3, 4, 5]]


@needs_training
def test_bounds_of_a_micro_batch_are_read_with_and_without_a_dimension_for_samples():
    from hcp.integrations.megatron.lm import reading

    rows = torch.arange(6)[None]
    batch = {"tokens": rows, "labels": rows + 1, "loss_mask": torch.ones(1, 6)}
    for bounds in (torch.tensor([0, 2, 6]), torch.tensor([[0, 2, 6]]), [0, 2, 6]):
        given = {**batch, "cu_seqlens": bounds, "max_seqlen": torch.tensor(4)}
        found = [each["tokens"].tolist() for each in reading.sequences_of(given)]
        assert found == [[0, 1], [2, 3, 4, 5]]
    two = {name: value.repeat(2, 1) for name, value in batch.items()}
    stacked = torch.tensor([[0, 2, 6], [0, 5, 6]])
    found = [
        each["tokens"].tolist() for each in reading.sequences_of({**two, "cu_seqlens": stacked})
    ]
    assert found == [[0, 1], [2, 3, 4, 5], [0, 1, 2, 3, 4], [5]]
    for bounds in (torch.tensor([0, 2, 6]), [0, 2, 6]):
        with pytest.raises(ValueError, match=r"cu_seqlens is a .* in a micro-batch of 2 samples"):
            list(reading.sequences_of({**two, "cu_seqlens": bounds}))


@needs_training
def test_a_micro_batch_may_be_a_list_of_samples():
    """As loaders of samples of several lengths give it, on branch dev of Megatron-LM."""
    from hcp.integrations.megatron.lm import reading

    def sample(length, real):
        row = torch.arange(length)
        lengths = {
            "padded_seq_len": torch.tensor([length]),
            "original_seq_len": torch.tensor([real]),
        }
        return {"tokens": row, "labels": row + 1, "loss_mask": torch.ones(length), **lengths}

    found = reading.drawn_now(iter([[sample(4, 3), sample(8, 5)]]), 1)
    assert [each["tokens"].tolist() for each in found] == [[0, 1, 2], [0, 1, 2, 3, 4]]


@needs_training
def test_steps_that_are_read_ahead_leave_megatrons_iterator_as_if_they_were_not():
    """A step can be run again, and steps may change their size."""
    from megatron.core.rerun_state_machine import RerunDataIterator, initialize_rerun_state_machine

    from hcp.integrations.megatron.lm import reading

    def batch(i):
        row = torch.full((1, 2), i)
        return {"tokens": row, "labels": row, "loss_mask": torch.ones(1, 2)}

    initialize_rerun_state_machine(mode="validate_results")
    iterator = RerunDataIterator(iter([batch(i) for i in range(9)]))
    reader = reading.StepReader(iterator, 2)
    ahead = iter(reader)

    def first_tokens(sequences):
        return [int(each["tokens"][0]) for each in sequences]

    assert [first_tokens(next(ahead)) for _ in range(2)] == [[0, 1], [2, 3]]
    iterator.advance()
    assert first_tokens(reader.take()) == [0, 1]
    assert not reading.is_replaying(iterator)
    iterator.rewind()
    assert reading.is_replaying(iterator)
    assert first_tokens(reading.drawn_now(iterator, 2)) == [0, 1]
    iterator.advance()
    reader = reader.resized(3)
    assert [first_tokens(step) for step, _ in zip(reader, range(2), strict=False)] == [
        [2, 3, 4],
        [5, 6, 7],
    ]
    assert first_tokens(reader.take()) == [2, 3, 4]
    assert [int(each["tokens"][0, 0]) for each in iterator.saved_microbatches] == [2, 3, 4]


@needs_training
def test_a_checkout_that_is_not_compiled_is_refused_with_what_to_do(monkeypatch):
    from hcp.integrations.megatron.lm import on_cpu

    on_cpu.require_helpers()
    monkeypatch.setattr(on_cpu, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"has no helpers_cpp\.\S+ in .*, expected it: .* make -C"
    ):
        on_cpu.require_helpers()


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("argparse", "no_such_function", "has no argparse.no_such_function"),
        ("no_such_module", "evaluate", "has no no_such_module.evaluate"),
        ("functools", "wraps", "takes no model"),
    ],
)
def test_a_release_without_a_place_is_refused_by_name(module, name, message):
    from hcp.integrations.megatron.lm import seams

    with pytest.raises(ImportError, match=message):
        seams._probe("0.99", module, name, ("model",))


# ---- Branch dev ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_megatrons_dynamic_cp_gets_groups_that_it_has_and_work_for_every_rank(ranks):
    generator = torch.Generator().manual_seed(3)
    for case in range(40):
        count = int(torch.randint(1, 30, (1,), generator=generator))
        lengths = torch.randint(1, 100 * ranks, (count,), generator=generator).tolist()
        samples = [(f"sample {i}", length) for i, length in enumerate(lengths)]
        made = dev.sample_id_groups(samples, ranks, 100)
        assert sorted(names_of(made)) == sorted(name for name, _ in samples), (case, lengths)
        for batch in made:
            assert [bool(ids) for ids in batch] == [True] * ranks, (case, lengths)
            place = 0
            for ids, degree in runs(batch):
                assert degree in (1, 2, 4, 8), (case, lengths)
                assert place % degree == 0, (case, lengths)
                packed = sum(length for name, length in samples if name in ids)
                assert packed <= 100 * degree + len(ids) * degree, (case, lengths)
                place += degree


def runs(batch):
    """Each group of ranks: its ids, and how many ranks have them."""
    found = []
    for ids in batch:
        if found and found[-1][0] == ids:
            found[-1][1] += 1
        else:
            found.append([ids, 1])
    return found


def names_of(made):
    return [name for batch in made for ids, _ in runs(batch) for name in ids]


def test_a_sample_that_no_ranks_hold_is_refused_by_the_name_of_megatrons_option():
    with pytest.raises(ValueError, match=r"of 2 \(101\) > max_seqlen_per_dp_cp_rank \(100"):
        dev.sample_id_groups([("short", 10), ("long", 201)], 2, 100)


def test_interleaved_stages_get_a_multiple_of_their_group():
    samples = [(i, length) for i, length in enumerate((90, 60, 50, 40, 30, 10))]
    assert len(dev.sample_id_groups(samples, 2, 100, micro_batch_group=2)) % 2 == 0


@pytest.mark.parametrize(
    ("ranks", "limits", "message"),
    [
        (6, {}, "has 6 ranks, expected a power of two"),
        (2, {"max_sequences": 1}, "expected at most 1"),
    ],
)
def test_what_megatrons_groups_cannot_do_is_refused(ranks, limits, message):
    with pytest.raises(ValueError, match=message):
        dev.sample_id_groups([(i, 10) for i in range(9)], ranks, 100, **limits)
