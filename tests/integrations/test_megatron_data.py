"""Planned micro-batches in Megatron's form, options, and errors, with the real Megatron-Core.

tests/integrations/test_integrations.py tests the versions that are refused.
"""

import argparse
import copy
import enum
import functools
import importlib.util
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks

import hcp
import hcp.step.backends
from hcp.attention.kernels import KernelFamily
from hcp.integrations.megatron import (
    add_megatron_arguments,
    attention_backend,
    config_from_args,
    versions,
)
from hcp.integrations.megatron.attention_backend import backend_of
from hcp.integrations.megatron.megatron_checks import check_experts, unfit_dispatcher
from hcp.integrations.megatron.program import program_arguments

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.core") is None,
    reason="Megatron-Core is not installed: python -m pip install megatron-core==0.16.1",
)
pytestmark = pytest.mark.filterwarnings("ignore")


# ---- evaluation ahead -------------------------------------------------------------------------


class Loader:
    """Megatron's data iterator: it counts what was drawn."""

    def __init__(self):
        self.drawn = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.drawn += 1
        tokens = torch.arange(8)[None] + 100 * self.drawn
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(1, 8)}


def evaluate_by_schedule(rank, size, steps, ahead):
    from hcp.integrations.megatron.lm.schedule import PlannedSchedule

    def schedule(*, data_iterator, num_microbatches, **options):
        assert options["forward_only"]
        rows = torch.cat([next(data_iterator)["tokens"][0] for _ in range(num_microbatches)])
        seen.append(sorted(rows[rows % 100 == 0].tolist()))

    args = add_megatron_arguments(argparse.ArgumentParser()).parse_args(
        ["--dynamic-context-parallel", "--max-seqlen-per-dp-cp-rank", "16"]
    )
    sizes = {"hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2}
    vars(args).update(sizes, num_query_groups=2, group_query_attention=True)
    vars(args).update(tensor_model_parallel_size=1, sequence_parallel=False, seq_length=8)
    vars(args).update(params_dtype=torch.float32, virtual_pipeline_model_parallel_size=None)
    vars(args).update(microbatch_group_size_per_vp_stage=None, plan_ahead=ahead)
    seen, drawn, loader = [], [], Loader()
    groups = hcp.build_process_groups(tp=1, cp=1, dp=1, pp=1)
    run = PlannedSchedule(schedule, args, config_from_args(args), groups, lambda: None, steps)
    for _ in range(4):
        run(
            forward_step_func=None,
            data_iterator=loader,
            model=None,
            num_microbatches=2,
            forward_only=True,
        )
        drawn.append(loader.drawn)
    del run
    groups.close()
    return seen, drawn


@needs_megatron
@pytest.mark.parametrize(
    ("steps", "ahead", "drawn"),
    [
        (4, 1, [4, 6, 8, 8]),
        (3, 1, [4, 6, 6, 8]),  # the fourth is of another evaluation
        (4, 0, [2, 4, 6, 8]),
        (None, 1, [2, 4, 6, 8]),
    ],
)
def test_an_evaluation_is_drawn_and_planned_ahead_and_no_further_than_it_goes(steps, ahead, drawn):
    ((seen, counted),) = run_ranks(1, evaluate_by_schedule, steps, ahead)
    assert seen == [[100, 200], [300, 400], [500, 600], [700, 800]]
    assert counted == drawn


# ---- Megatron-Bridge ---------------------------------------------------------------------------


@needs_megatron
@pytest.mark.parametrize(
    ("stages", "experts", "expected"),
    [(2, None, (True, "alltoall")), (1, None, (False, "allgather")), (2, 4, (True, "allgather"))],
)
def test_bridges_stages_of_a_dense_model_get_a_dispatcher_that_takes_any_rows(
    monkeypatch, stages, experts, expected
):
    """Megatron-Core refuses its default with rows that vary, experts or not."""
    from hcp.integrations.megatron.bridge import dynamic

    for name in ("_check", "check_batches", "_args_of"):
        monkeypatch.setattr(dynamic, name, lambda *given: None)
    groups = SimpleNamespace(size=lambda role: 1)
    monkeypatch.setattr(hcp.ProcessGroups, "from_existing", lambda collection: groups)
    model = SimpleNamespace(pipeline_model_parallel_size=stages, num_moe_experts=experts)
    vars(model).update(variable_seq_lengths=False, moe_token_dispatcher_type="allgather")
    state = SimpleNamespace(cfg=SimpleNamespace(model=model))
    dynamic.DynamicContextParallel().set_up(state, None)
    assert (model.variable_seq_lengths, model.moe_token_dispatcher_type) == expected


# ---- versions and options ------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_a_checkout_of_a_tested_megatron_is_taken(version, tmp_path, monkeypatch):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text(f"__version__ = '.'.join({version.split('.')})\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    assert versions.require_megatron.__wrapped__() == version


def test_the_flags_of_dynamic_cp_become_a_config():
    parser = add_megatron_arguments(argparse.ArgumentParser())
    args = parser.parse_args(
        [
            "--dynamic-context-parallel",
            "--max-seqlen-per-dp-cp-rank",
            "64",
            "--cp-comm-type",
            "a2a+p2p",
            "p2p",
            "--min-dynamic-context-parallel-size",
            "2",
            "--eval-context-parallel-size",
            "4",
            "--hierarchical-context-parallel-sizes",
            "2",
            "2",
        ]
    )
    config = config_from_args(args)
    assert config == hcp.Config(
        64,
        min_dynamic_context_parallel_size=2,
        cp_comm_type=("a2a+p2p", "p2p"),
        hierarchical_context_parallel_sizes=(2, 2),
        eval_context_parallel_size=4,
    )


def test_megatrons_own_flags_are_used_where_it_has_them():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequence-packing-scheduler", choices=["default_dynamic_cp"])
    parser.add_argument("--max-seqlen-per-dp-cp-rank", type=int, default=32)
    parser.add_argument("--cp-comm-type", nargs="+", default=["p2p"])
    parser.add_argument("--context-parallel-size", type=int, default=1)
    add_megatron_arguments(parser)
    args = parser.parse_args(["--sequence-packing-scheduler", "default_dynamic_cp"])
    config = config_from_args(args)
    assert (config.sequence_packing_scheduler, config.cp_comm_type) == ("dynamic_cp", "p2p")
    static = config_from_args(parser.parse_args(["--context-parallel-size", "2"]))
    assert (static.sequence_packing_scheduler, static.context_parallel_size) == ("static_cp", 2)
    args.dynamic_context_parallel, args.sequence_packing_scheduler = True, "dp_balanced"
    with pytest.raises(ValueError, match="dp_balanced contradict each other"):
        config_from_args(args)


def test_megatron_scripts_take_a_memory_model(tmp_path):
    memory = hcp.MemoryModel(activation=10, limit=640)
    memory.save(tmp_path / "memory.json", {})
    parser = add_megatron_arguments(argparse.ArgumentParser())
    argv = ["--max-seqlen-per-dp-cp-rank", "64", "--memory", str(tmp_path / "memory.json")]
    assert config_from_args(parser.parse_args(argv)).memory == memory


class AttnBackend(enum.Enum):
    """As Megatron-Core's."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5


def megatrons_parser():
    """With its own flags of attention."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--attention-backend",
        type=AttnBackend.__getitem__,
        choices=list(AttnBackend),
        default=AttnBackend.auto,
    )
    parser.add_argument("--flash-attention-version", type=int, choices=(2, 3, 4))
    return add_megatron_arguments(parser)


def test_every_value_of_megatrons_has_a_backend_or_a_refusal():
    assert {of.name for of in AttnBackend} == {*attention_backend.BACKENDS} | {
        *attention_backend.REFUSED
    }
    assert {*map(backend_of, attention_backend.BACKENDS)} <= {*hcp.step.backends.BACKENDS}


@needs_megatron
def test_the_values_are_megatrons():
    from megatron.core.transformer.enums import AttnBackend as OfMegatron

    assert [(of.name, of.value) for of in OfMegatron] == [(of.name, of.value) for of in AttnBackend]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "auto"),
        (["--attention-backend", "auto"], "auto"),
        (["--attention-backend", "flash"], "torch"),
        (["--attention-backend", "fused"], "cudnn"),
        (["--attention-backend", "flash", "--flash-attention-version", "4"], "flash_attn_4"),
        (["--flash-attention-version", "2"], "torch"),
        (["--attention-backend", "fused", "--flash-attention-version", "2"], "cudnn"),
    ],
)
def test_megatrons_attention_backends_are_understood(flags, expected):
    limit = ["--max-seqlen-per-dp-cp-rank", "160"]
    args = megatrons_parser().parse_args([*flags, *limit])
    assert config_from_args(args).attention_backend == expected


def test_flash_is_the_newest_flash_attention_that_is_installed(monkeypatch):
    """On CPUs it is PyTorch's."""
    there = {"flash-attn-4": "4.0.0b36", "flash-attn-3": "3.0"}
    monkeypatch.setattr(KernelFamily, "version", property(lambda of: there.get(of.package)))
    assert backend_of("flash") == "torch"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    for expected in ("flash_attn_4", "flash_attn_3", "torch"):
        assert backend_of("flash") == expected
        there.pop(expected.replace("_", "-"), None)


def test_a_version_of_flash_attention_that_is_absent_is_refused_when_a_rank_reads_options(
    monkeypatch,
):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed")
    flags = ["--flash-attention-version", "4", "--max-seqlen-per-dp-cp-rank", "160"]
    args = megatrons_parser().parse_args(flags)
    assert config_from_args(args).attention_backend == "flash_attn_4"  # as a login node reads it
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(hcp.HcpError, match=r"'flash_attn_4' needs the package flash-attn-4, which"):
        config_from_args(args)


@pytest.mark.parametrize("name", ["unfused", "local"])
def test_attention_backends_of_megatrons_without_a_counterpart_are_refused(name):
    flags = ["--attention-backend", name, "--max-seqlen-per-dp-cp-rank", "8"]
    for parser in (megatrons_parser(), add_megatron_arguments(argparse.ArgumentParser())):
        with pytest.raises(ValueError, match=f"attention_backend is '{name}', expected one of aut"):
            config_from_args(parser.parse_args(flags))


def test_a_backend_of_hcps_is_its_own_name_in_megatrons_program():
    flags = ["--max-seqlen-per-dp-cp-rank", "160", "--max-length", "160", "--attention-backend"]
    assert program_arguments.parse_args([*flags, "torch"]).config.attention_backend == "torch"
    with pytest.raises(ValueError, match="attention_backend is 'magi', expected one of auto"):
        program_arguments.parse_args([*flags, "magi"])


@pytest.mark.parametrize(
    ("name", "expected"), [("default_dynamic_cp", "dynamic_cp"), ("dp_balanced", "static_cp")]
)
def test_megatrons_names_of_schedulers_are_taken_by_every_parser(name, expected):
    flags = ["--sequence-packing-scheduler", name, "--max-seqlen-per-dp-cp-rank", "160"]
    plain = hcp.add_arguments(argparse.ArgumentParser()).parse_args(flags)
    assert hcp.Config.from_args(plain).sequence_packing_scheduler == expected
    added = add_megatron_arguments(argparse.ArgumentParser()).parse_args(flags)
    assert config_from_args(added).sequence_packing_scheduler == expected
    own = program_arguments.parse_args([*flags, "--max-length", "160"])
    assert own.config.sequence_packing_scheduler == expected
    assert hcp.Config(8, sequence_packing_scheduler=name).sequence_packing_scheduler == expected
    both = ["--dynamic-context-parallel", *flags]
    added = add_megatron_arguments(argparse.ArgumentParser()).parse_args(both)
    if expected == "dynamic_cp":
        assert config_from_args(added).sequence_packing_scheduler == expected
    else:
        with pytest.raises(ValueError, match="--sequence-packing-scheduler dp_balanced contradict"):
            config_from_args(added)


# ---- samples -------------------------------------------------------------------------------------


def sequences(sample):
    from hcp.integrations.megatron.data import sequences_of

    return [{name: rows.tolist() for name, rows in each.items()} for each in sequences_of(sample)]


@needs_megatron
def test_labels_and_mask_follow_from_tokens():
    assert sequences({"tokens": torch.tensor([5, 6, 7])}) == [
        {"tokens": [5, 6, 7], "labels": [6, 7, 5], "loss_mask": [1.0, 1.0, 0.0]}
    ]


@needs_megatron
def test_megatrons_padded_and_packed_samples_are_the_sequences_they_hold():
    rows = torch.arange(1, 6)[None]
    sample = {"tokens": rows, "labels": rows + 1, "loss_mask": torch.ones(1, 5)}
    padded = sequences({**sample, "original_seq_len": torch.tensor([3]), "position_ids": rows - 1})
    assert padded == [{"tokens": [1, 2, 3], "labels": [2, 3, 4], "loss_mask": [1.0] * 3}]
    packed = sequences({**sample, "cu_seqlens": torch.tensor([[0, 2, 2, 5]])})
    assert [each["tokens"] for each in packed] == [[1, 2], [3, 4, 5]]
    for bounds in ([0, 2, 5], [0, 2, 5, -1, -1]):
        for positions in ([0, 1, 0, 1, 2], [0, 1, 2, 3, 4]):
            several = {"cu_seqlens": torch.tensor(bounds), "position_ids": torch.tensor(positions)}
            assert sequences({**sample, **several}) == packed
    rest = {"cu_seqlens": torch.tensor([0, 2]), "loss_mask": torch.tensor([1, 1, 0, 0, 0])}
    assert [each["tokens"] for each in sequences({**sample, **rest})] == [[1, 2]]


def packed_with_padding(names, generator, multiple=4):
    """A packed sample whose documents end before the next ones begin, and its documents. `names`:
    those of the bounds with padding, and without it."""
    lengths = torch.randint(1, 30, (4,), generator=generator).tolist()
    rooms = [-(-n // multiple) * multiple for n in lengths]
    parts = {name: [] for name in ("tokens", "labels", "loss_mask", "position_ids")}
    for i, (length, room) in enumerate(zip(lengths, rooms, strict=True)):
        learned = torch.arange(room) < length - 1
        learned[: int(torch.randint(length, (1,), generator=generator))] = False  # a prompt
        document = 100 * (i + 1) + torch.arange(length)
        parts["tokens"].append(F.pad(document, (0, room - length)))
        parts["labels"].append(F.pad(document + 1, (0, room - length)))
        parts["loss_mask"].append(learned.float())
        parts["position_ids"].append(torch.arange(room))
    sample = {name: torch.cat(rows)[None] for name, rows in parts.items()}
    for name, each in zip(names, (rooms, lengths), strict=True):
        sample[name] = F.pad(torch.tensor(each).cumsum(0), (1, 0)).int()
    return sample, [
        {name: rows[i][:n].tolist() for name, rows in parts.items() if name != "position_ids"}
        for i, n in enumerate(lengths)
    ]


@needs_megatron
@pytest.mark.parametrize(
    "names",
    [
        ("cu_seqlens_padded", "cu_seqlens"),
        ("cu_seqlens", "cu_seqlens_unpadded"),
        ("cu_seqlens_q_padded", "cu_seqlens_q"),
    ],
)
@pytest.mark.parametrize("positions", [True, False])
def test_documents_with_padding_between_them_are_taken_from_their_places(names, positions):
    generator = torch.Generator().manual_seed(5)
    for case in range(50):
        sample, documents = packed_with_padding(names, generator)
        if not positions:
            del sample["position_ids"]
        assert sequences(sample) == documents, (case, sample)
        # As loaders fill them up: by the end, or by numbers below 0, whose place they may tell.
        for fill in (-1, -1000):
            filled = {name: F.pad(sample[name], (0, 3), value=fill) for name in names}
            filled[f"{names[1]}_argmin"] = torch.tensor([[5]])
            assert sequences({**sample, **filled}) == documents, (case, sample)
        filled = {name: F.pad(sample[name], (0, 3), value=int(sample[name][-1])) for name in names}
        assert sequences({**sample, **filled}) == documents, (case, sample)


@needs_megatron
def test_positions_of_three_axes_belong_to_the_rows_of_their_sequences():
    text, image = [[0, 0, 0], [1, 1, 1]], [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
    positions = torch.tensor([*text, *image]).T
    sample = {"tokens": torch.arange(6), "cu_seqlens": torch.tensor([0, 2, 6])}
    for given in (positions, positions[:, None], positions.tolist()):
        found = [each["rope_positions"] for each in sequences({**sample, "position_ids": given})]
        assert found == [text, image]
    for given, bounds, message in (
        (positions, [0, 6], "rows 0 to 5 are 0 on every axis at the row 2 too"),
        (positions, [0, 1, 6], r"has \[1, 1, 1\] on the axes of the first"),
        (positions[:, 1:], [0, 2, 6], "position_ids has 5 rows in a sample of 6 tokens"),
        (positions[:2], [0, 2, 6], r"\(2, 6\), expected \(length,\), or \(3, length\)"),
        (positions[None], [0, 2, 6], r"\(1, 3, 6\), expected \(length,\), or \(3, length\)"),
        (1.5 * positions, [0, 2, 6], r"has 1.5 on one of its axes, expected whole numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            sequences({**sample, "position_ids": given, "cu_seqlens": torch.tensor(bounds)})


@needs_megatron
def test_labels_that_do_not_count_are_left_out_of_the_loss():
    sample = {"tokens": [5, 6, 7], "labels": torch.tensor([6, -100, 7])}
    assert [each["loss_mask"] for each in sequences(sample)] == [[1.0, 0.0, 1.0]]
    masked = {**sample, "loss_mask": torch.tensor([0, 0, 1])}
    assert [each["loss_mask"] for each in sequences(masked)] == [[0.0, 0.0, 1.0]]


@needs_megatron
def test_samples_may_be_arrays_and_lists():
    tokens = torch.tensor([5, 6, 7, 8])
    expected = sequences({"tokens": tokens, "cu_seqlens": torch.tensor([0, 3, 4])})
    for form in (torch.Tensor.numpy, torch.Tensor.tolist):
        sample = {"tokens": form(tokens), "cu_seqlens": [0, 3, 4], "position_ids": [0, 1, 2, 0]}
        assert sequences(sample) == expected


@needs_megatron
def test_bounds_of_queries_and_keys_are_read_where_they_are_equal():
    bounds = torch.tensor([0, 2, 5])
    sample = {"tokens": torch.arange(5), "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds.clone()}
    assert [each["tokens"] for each in sequences(sample)] == [[0, 1], [2, 3, 4]]
    with pytest.raises(
        ValueError, match=r"cu_seqlens_kv is \[0, 5\], expected \[0, 2, 5\], cu_seq"
    ):
        sequences({**sample, "cu_seqlens_kv": torch.tensor([0, 5])})


@needs_megatron
def test_what_megatrons_dataset_says_of_documents_in_a_sample_is_not_left_out():
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    tokens = torch.tensor([5, 6, 0, 7, 8])

    def sample(reset_positions, reset_mask, **more):
        mask, loss_mask, positions = _get_ltor_masks_and_position_ids(
            tokens, 0, reset_positions, reset_mask, False, True
        )
        made = {"tokens": tokens, "labels": tokens, "loss_mask": loss_mask}
        return {**made, "attention_mask": mask, "position_ids": positions, **more}

    assert len(sequences(sample(False, False))) == 1
    with pytest.raises(ValueError, match=r"position_ids .* are \[0, 1, 2, 0, 1\], .*cu_seqlens"):
        sequences(sample(True, False))
    with pytest.raises(ValueError, match=r"attention_mask of the rows 0 to 4 is not .* causal"):
        sequences(sample(False, True))
    documents = sequences(sample(True, True, cu_seqlens=torch.tensor([0, 3, 5])))
    assert [each["tokens"] for each in documents] == [[5, 6, 0], [7, 8]]


def both(padded, real):
    return {"cu_seqlens_padded": torch.tensor(padded), "cu_seqlens": torch.tensor(real)}


@needs_megatron
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"cu_seqlens": torch.tensor([2, 5])}, "go up from 0 to at most 5"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 5])}, "go up from 0 to at most 5"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "go up from 0 to at most 5"),
        ({"cu_seqlens": torch.tensor([0, 2])}, "cu_seqlens ends at 2, expected 5"),
        ({"original_seq_len": 6}, "original_seq_len is 6, expected at most 5"),
        ({"cu_seqlens": torch.tensor([0])}, "cu_seqlens ends at 0, expected 5"),
        (both([0, 3, 5], [0, 3]), "cu_seqlens has 2 bounds and cu_seqlens_padded 3, expected as"),
        (both([0, 3, 5], [0, 2, 5]), "sequence 1 has 3 tokens by cu_seqlens and 2 by cu_seqlens_p"),
        (
            both([0, 3, 5], [1, 3, 5]),
            r"cu_seqlens is \[1, 3, 5\], expected bounds that go up from 0",
        ),
        (
            {**both([0, 3, 5], [0, 2, 4]), "loss_mask": torch.ones(5)},
            "loss_mask is not 0 in the rows 2 to 2, which cu_seqlens_padded says are padding",
        ),
        ({"cu_seqlens_padded": torch.tensor([0, 5])}, "a sample has cu_seqlens_padded, expected"),
        (
            {"cu_seqlens": torch.tensor([0, 5]), "cu_seqlens_argmin": torch.tensor([1])},
            r"cu_seqlens_argmin is \[1\], expected \[2\], the number of cu_seqlens",
        ),
        (
            {**both([0, 5], [0, 4]), "cu_seqlens_original": torch.tensor([0, 5])},
            "a sample has cu_seqlens, cu_seqlens_original, cu_seqlens_padded, expected cu_seqlens",
        ),
        *[
            ({name: torch.tensor([2, 3])}, f"a sample has {name}, expected cu_seqlens")
            for name in ("seq_lens", "seq_lengths", "seqlens", "document_lens", "seq_idx")
        ],
        ({"segment_ids": torch.tensor([0, 0, 0, 1, 1])}, "a sample has segment_ids, expected"),
        ({"original_seq_len": -1}, "original_seq_len is -1, expected at most 5 tokens, and at"),
        ({"original_seq_len": torch.tensor([2, 3])}, r"original_seq_len is \[2, 3\], expected at"),
        ({"original_seq_len": 2.5}, "original_seq_len is torch.float32, expected integers"),
        ({"cu_seqlens": [0.0, 5.0]}, "cu_seqlens is torch.float32, expected integers"),
        ({"cu_seqlens": "05"}, "cu_seqlens is '05', expected integers"),
    ],
)
def test_bounds_that_leave_tokens_out_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        sequences({"tokens": torch.arange(5), **bounds})


@needs_megatron
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": torch.ones(3)}, r"a sample has \['text'\], expected 'tokens'"),
        ({"tokens": torch.ones(2, 3)}, r"tokens has shape \(2, 3\), expected \(length,\)"),
        (
            {"tokens": torch.ones(2), "loss_mask": torch.tensor([0.5, 1])},
            "loss_mask has values other than 0 and 1",
        ),
        ({"tokens": "text"}, r"tokens is 'text', expected \(length,\)"),
        ([5, 6], "a sample has list, expected 'tokens'"),
        (
            {"tokens": torch.ones(3), "labels": torch.ones(4)},
            "labels has 4 rows in a sample of 3 tokens, expected as many",
        ),
        (
            {"tokens": torch.ones(3), "loss_mask": torch.ones(2)},
            "loss_mask has 2 rows in a sample of 3 tokens, expected as many",
        ),
        (
            {
                "tokens": torch.ones(3),
                "labels": torch.tensor([1, -100, 2]),
                "loss_mask": torch.ones(3),
            },
            "labels has -100 where loss_mask is 1, expected ids >= 0",
        ),
        ({"tokens": torch.tensor([1, -1, 1])}, "tokens has -1 where loss_mask is 1"),
        (
            {"tokens": torch.ones(3), "attention_mask": torch.ones(3)},
            "attention_mask of the rows 0 to 2 is not Megatron's causal one",
        ),
        (
            {"tokens": torch.ones(3), "position_ids": torch.arange(3).expand(2, 3)},
            r"position_ids has shape \(2, 3\), expected \(length,\)",
        ),
    ],
)
def test_a_sample_that_cannot_be_taken_is_refused(sample, message):
    with pytest.raises(ValueError, match=message):
        sequences(sample)


def plan_uneven_batches(rank, size):
    """Rank 0 has three steps, the others two, one, ... samples."""
    from hcp.integrations.megatron import plan_batches

    groups = hcp.build_process_groups()
    batches = [[{"tokens": torch.full((n,), n)} for n in (50, 3)], [], [{"tokens": torch.ones(1)}]]
    own = batches[: 3 if rank == 0 else 1]
    config = hcp.Config(max_seqlen_per_dp_cp_rank=23)  # not a multiple
    seen = []
    for step in plan_batches(own, config, groups, alignment=4):
        for batch in step:
            cp = batch["packed_seq_params"].cp_handler
            rows = batch["tokens"].shape[1]
            assert rows % 4 == 0
            assert 23 >= rows >= cp.rows
            assert all(batch[name].shape == (1, rows) for name in ("labels", "loss_mask"))
            held = cp.rows - cp.layout.padding
            assert not batch["loss_mask"][0, held:].any()
            seen += batch["tokens"][0, :held].tolist()
    return seen


@needs_megatron
def test_uneven_batches_a_batch_of_one_and_ranks_without_samples_are_planned():
    seen = sorted(token for rows in run_ranks(3, plan_uneven_batches) for token in rows)
    # The second batch is empty on every rank: the samples end there.
    assert seen == [3] * 9 + [50] * 150


def take_groups_from_a_pool(rank, size):
    from hcp.integrations.megatron.pool import CPGroupPool

    groups, pool = hcp.build_process_groups(tp=2), CPGroupPool(limit=3)
    config = hcp.Config(max_seqlen_per_dp_cp_rank=20)
    seen, steps = [], []
    for given in ((30,), (18, 17)) * 2:
        own = [{"tokens": torch.ones(n)} for n in given] if groups.rank("dp_cp") == 0 else []
        lengths, sources, samples = hcp.gather_lengths(own, groups)
        step = hcp.dispatch(config.plan(lengths, 2), samples, sources, groups)
        steps.append(pool.of_step(step, groups))
        for (cp, _), group in zip(step, steps[-1], strict=True):
            assert torch.distributed.get_process_group_ranks(group) == cp.group.global_ranks
            together = torch.tensor([float(cp.rows)])
            torch.distributed.all_reduce(together, group=group)
            seen.append((cp.degree, together.item()))
    assert steps[:2] == steps[2:]
    assert len(pool) == 3  # of both ranks of a domain, and of each
    pool.limit = 2
    pool.close()
    for given, error in (
        ((30,), None),
        ((18, 17), "plans have 3 intervals of ranks, expected <= 2"),
    ):
        lengths = list(given)
        own = [{"tokens": torch.ones(n)} for n in given] if groups.rank("dp_cp") == 0 else []
        step = hcp.dispatch(config.plan(lengths, 2), own, [0] * len(given), groups)
        if error is None:
            pool.of_step(step, groups)
            continue
        with pytest.raises(hcp.HcpError, match=error):
            pool.of_step(step, groups)
    return seen


def test_groups_of_the_ranks_of_a_micro_batch_come_from_a_small_pool():
    seen = [each for rows in run_ranks(4, take_groups_from_a_pool) for each in rows]
    assert {degree for degree, _ in seen} == {1, 2}
    assert sum(rows / degree for degree, rows in seen) == 2 * 2 * (30 + 18 + 17)


def plan_with_a_pool(rank, size):
    from hcp.integrations.megatron import CPGroupPool, plan_batches

    groups = hcp.build_process_groups()
    own, config = [[{"tokens": torch.ones(7)}]], hcp.Config(max_seqlen_per_dp_cp_rank=8)
    for pool, sizes in ((None, [None]), (CPGroupPool(), [1])):
        (step,) = plan_batches(own, config, groups, cp_groups=pool)
        given = [batch["packed_seq_params"].cp_group for batch in step]
        assert [group if group is None else group.size() for group in given] == sizes


@needs_megatron
def test_layers_that_insist_on_a_group_find_it_in_packed_seq_params():
    run_ranks(1, plan_with_a_pool, timeout=110)


def load_by_dp_rank(rank, size):
    from hcp.integrations.megatron import plan_batches

    groups = hcp.build_process_groups(cp=2)
    own = [[{"tokens": torch.full((4,), 10 * groups.rank("dp") + i)} for i in range(3)]]
    config = hcp.Config(max_seqlen_per_dp_cp_rank=8)
    (step,) = plan_batches(own, config, groups, samples_of="dp")
    with pytest.raises(ValueError, match="samples_of is 'tp', expected 'dp_cp' or 'dp'"):
        next(plan_batches(own, config, groups, samples_of="tp"))
    return [
        token
        for batch in step
        for token in batch["tokens"][0, : batch["packed_seq_params"].cp_handler.rows].tolist()
    ]


@needs_megatron
def test_what_cp_siblings_load_alike_counts_once():
    seen = sorted(token for rows in run_ranks(4, load_by_dp_rank) for token in rows)
    assert seen == sorted(token for token in (0, 1, 2, 10, 11, 12) for _ in range(4))


def plan_for_stages(rank, size):
    from hcp.integrations.megatron import plan_batches

    groups = hcp.build_process_groups(pp=2)
    own = [[{"tokens": torch.ones(n)} for n in (9, 4)]] if rank % 2 == 0 else []
    config = hcp.Config(max_seqlen_per_dp_cp_rank=12)
    asked = dict(virtual_stages=2, micro_batch_group=4, sync="micro_batch")
    (step,) = plan_batches(own, config, groups, **asked)
    assert len(step) == 4  # fewer sequences than micro-batches
    given = step.plan.to_dict()
    assert given["pipeline_stages"] == 2
    assert {name: given[name] for name in asked} == asked
    (step,) = plan_batches(own, config, groups)
    assert (step.plan.sync, step.plan.to_dict()["pipeline_stages"]) == ("step", 2)


@needs_megatron
def test_plans_are_for_the_stages_and_rounds_of_the_schedule():
    run_ranks(4, plan_for_stages)


# ---- masks ---------------------------------------------------------------------------------------


def sample_of_a_tree(**changes):
    trees = hcp.prefix_trees([[5, 6, 7, 1], [5, 6, 7, 2]])
    fields = {"tokens": trees.tokens[0], "labels": trees.labels[0], "mask": trees.masks[0]}
    return {**fields, "loss_mask": trees.summed([[1, 1, 1, 0.0]] * 2)[0], **changes}


def plan_trees(rank, size):
    """Three ranks, two of one domain; the first loads a tree and a text, the second a text."""
    from hcp.integrations.megatron import plan_batches

    groups = hcp.build_process_groups(pp=3)
    own = [sample_of_a_tree(), {"tokens": torch.ones(5)}], [{"tokens": torch.ones(2)}]
    config = hcp.Config(8, plan_ahead=1)
    place = groups.rank("dp_cp")
    steps = list(plan_batches([own[place], own[1]], config, groups, masks=True))
    masks = [None if not step.plan.masks else step.plan.masks["mask"] for step in steps]
    causal = hcp.Mask.causal
    assert masks == [(sample_of_a_tree()["mask"], causal(5), causal(2)), None]
    seen = [0, 0]
    for batch in steps[0]:
        cp = batch["packed_seq_params"].cp_handler
        assert torch.equal(batch["position_ids"][0, : cp.rows], cp.position_ids)
        if groups.rank("pp") == 1:
            assert batch["loss_mask"] is None
            continue
        seen[0] += batch["loss_mask"].sum().item()
        seen[1] += (batch["loss_mask"] == 2).sum().item()
    return seen


@needs_megatron
def test_rows_of_trees_count_for_each_text_and_a_step_without_trees_has_no_masks():
    seen = torch.tensor(run_ranks(6, plan_trees))
    assert seen.sum(0).tolist() == [2 * (6 + 4 + 1), 2 * 2]  # of two stages that need rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": hcp.Mask.tree([3, 1], [-1, 0])}, r"mask is Mask\(length=4, .* of 6 tokens"),
        ({"mask": torch.ones(6, 6)}, r"(?s)mask is tensor.* expected an hcp.Mask of as many"),
        ({"labels": None}, "a sample has a mask and no labels, expected them"),
        ({"labels": None, "loss_mask": None}, "a mask and no labels and no loss_mask, expected"),
        ({"position_ids": torch.arange(6)}, r"a mask and \['position_ids'\], expected the mask"),
        ({"cu_seqlens": torch.tensor([0, 6])}, r"a mask and \['cu_seqlens'\], expected the mask"),
        ({"loss_mask": torch.full((6,), 0.5)}, "other than 0 and 1, expected whole numbers"),
        ({"loss_mask": torch.full((6,), torch.inf)}, "other than 0 and 1, expected whole numbers"),
        ({"loss_mask": torch.full((6,), -1.0)}, "other than 0 and 1, expected whole numbers"),
        ({"loss_mask": torch.ones(6)}, "labels has -100 where loss_mask is 1"),
    ],
)
@needs_megatron
def test_a_masked_sample_that_cannot_be_taken_is_refused(changes, message):
    from hcp.integrations.megatron.data import sequences_of

    with pytest.raises(ValueError, match=message):
        list(sequences_of(sample_of_a_tree(**changes), masks=True))


def refuse_masks(rank, size):
    from hcp.integrations.megatron import forward_step, plan_batches

    groups, config = hcp.build_process_groups(), hcp.Config(8)
    batches = [[sample_of_a_tree()] if rank == 1 else []]
    error = ValueError if rank == 1 else hcp.HcpError
    with pytest.raises(error, match=r"a sample has a mask.*, expected none: plan_batches\(masks=T"):
        next(plan_batches(batches, config, groups))
    for too_long in ("drop", "cut"):
        other = hcp.Config(8, too_long=too_long)
        with pytest.raises(ValueError, match=f"too_long is '{too_long}' and masks is True"):
            next(plan_batches(batches, other, groups, masks=True))
    (step,) = plan_batches(batches, config, groups, masks=True)

    class Predicting(torch.nn.Module):
        rolls_along_sequences = True
        config = SimpleNamespace(mtp_num_layers=1, calculate_per_token_loss=True)

    with pytest.raises(ValueError, match="mtp_num_layers is 1 and samples have masks"):
        forward_step(step.data_iterator(), Predicting())


@needs_megatron
def test_masks_that_were_not_asked_for_or_cannot_be_are_refused_on_every_rank():
    run_ranks(2, refuse_masks)


# ---- stages and peers ----------------------------------------------------------------------------


def plan_for_a_middle_stage(rank, size):
    from hcp.integrations.megatron import plan_batches

    groups, seen = hcp.build_process_groups(pp=3), []
    positions = torch.arange(6) * torch.tensor([[1], [2], [3]])
    for axes in ({}, {"position_ids": positions}):
        samples = [{"tokens": torch.ones(6), **axes}]
        (step,) = plan_batches([samples], hcp.Config(6), groups)
        for batch in step:
            middle = groups.rank("pp") == 1
            assert [batch[name] is None for name in ("tokens", "labels", "loss_mask")] == [
                middle
            ] * 3
            seen.append(batch["position_ids"].tolist())
    assert seen == [[[0, 1, 2, 3, 4, 5]], positions[:, None].tolist()]


@needs_megatron
def test_a_middle_stage_gets_positions_and_no_tokens():
    run_ranks(3, plan_for_a_middle_stage)


def load_other_samples(rank, size):
    from hcp.integrations.megatron import plan_batches

    groups = hcp.build_process_groups(tp=2)
    with pytest.raises(hcp.HcpError, match="plans of step 0 differ between rank 0 and rank 1"):
        next(plan_batches([[{"tokens": torch.ones(3 + rank)}]], hcp.Config(16), groups))


@needs_megatron
def test_tensor_parallel_peers_with_other_samples_are_an_error_on_both():
    run_ranks(2, load_other_samples)


# ---- PackedSeqParams that Megatron made ----------------------------------------------------------


def attend_alone(query, key, value):
    """Attention of one sequence (T, heads, size), by PyTorch."""
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def attend_with_megatrons_own_params(rank, size):
    from megatron.core.packed_seq_params import PackedSeqParams

    from hcp.integrations.megatron import handler_of

    groups = hcp.build_process_groups(cp=2)
    bounds = torch.tensor([0, 8, 12], dtype=torch.int32)

    def params(**fields):
        return PackedSeqParams("thd", bounds, bounds, max_seqlen_q=8, max_seqlen_kv=8, **fields)

    drawn = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 12, 2, 4, generator=drawn, dtype=torch.float64)
    alone = handler_of(params(local_cp_size=1), groups.cp)
    assert alone.kernel_family == "auto"
    asked = SimpleNamespace(attention_backend=AttnBackend.flash)
    assert handler_of(params(), groups.cp, asked).kernel_family == "torch"
    assert (alone.degree, alone.rows) == (1, 12)
    whole = torch.cat([attend_alone(*(x[a:b] for x in (q, k, v))) for a, b in ((0, 8), (8, 12))])
    assert float((alone.attention(q, k, v) - whole).abs().max()) < 1e-12
    for given in (params(), params(cp_group=groups.cp), params(local_cp_size=2)):
        cp = handler_of(given, groups.cp)
        assert handler_of(given, groups.cp) is cp  # made once for all layers
        first = torch.tensor([0, 1, 6, 7, 8, 11]), torch.tensor([2, 3, 4, 5, 9, 10])
        own = first[rank]
        out = cp.attention(q[own], k[own], v[own])
        assert float((out - whole[own]).abs().max()) < 1e-12
    with pytest.raises(ValueError, match="local_cp_size is 3, expected 2: the size of its cp_gr"):
        handler_of(params(local_cp_size=3), groups.cp)
    odd = PackedSeqParams("thd", torch.tensor([0, 6], dtype=torch.int32), local_cp_size=2)
    with pytest.raises(
        ValueError, match=r"sequences of \[6\] tokens, expected multiples of 2 \* 2"
    ):
        handler_of(odd, groups.cp)
    with pytest.raises(ValueError, match="got no packed_seq_params in the format 'thd'"):
        handler_of(None, groups.cp)


@needs_megatron
@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("cu_seqlens_q", None),
        ("cu_seqlens_q", [[0, 4, 12]]),
        ("cu_seqlens_q", [0, 4, 12, -1]),
        ("cu_seqlens_q", [0, 8, 4, 12]),
        ("cu_seqlens_q", [1, 4, 12]),
        ("cu_seqlens_q", [0.0, 4.0, 12.0]),
        ("cu_seqlens_q", []),
        ("cu_seqlens_q_padded", [1, 4, 12]),
        ("cu_seqlens_kv_padded", [[0, 4, 12]]),
    ],
)
def test_packed_params_whose_bounds_cannot_be_read_are_refused_by_name(name, bounds):
    from megatron.core.packed_seq_params import PackedSeqParams

    from hcp.integrations.megatron import handler_of

    fields = {"cu_seqlens_q": torch.tensor([0, 4, 12])}
    fields[name] = None if bounds is None else torch.tensor(bounds)
    with pytest.raises(ValueError, match=f"packed_seq_params.{name} is .*, expected "):
        handler_of(PackedSeqParams("thd", local_cp_size=1, **fields), None)


def attend_between_padding(rank, size):
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from hcp.integrations.megatron import handler_of
    from hcp.integrations.megatron.layers import CoreAttention

    parallel_state.initialize_model_parallel(context_parallel_size=size)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        context_parallel_size=size,
    )
    real, rooms = [5, 13, 0, 1, 7], [8, 16, 4, 4, 8]
    starts = torch.tensor([0, *rooms[:-1]]).cumsum(0).tolist()

    def params(**other):
        named = {}
        for name, lengths in (("", real), ("_padded", rooms)):
            bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
            named.update({f"cu_seqlens_q{name}": bounds, f"cu_seqlens_kv{name}": bounds})
        return PackedSeqParams("thd", **{**named, **other})

    drawn = torch.Generator().manual_seed(3)
    own = torch.tensor(
        [
            start + row
            for start, room in zip(starts, rooms, strict=True)
            for place in (rank, 2 * size - 1 - rank)
            for row in range(place * room // 2 // size, (place + 1) * room // 2 // size)
        ]
        if size > 1
        else range(sum(rooms))
    )
    whole = [
        torch.randn(sum(rooms), heads, 8, generator=drawn, dtype=torch.float64)
        for heads in (4, 2, 2)
    ]
    weights = torch.randn(sum(rooms), 4, 8, generator=drawn, dtype=torch.float64)
    for kind in AttnMaskType:
        layer = CoreAttention(config, 1, kind, "self", pg_collection=groups)
        mine = [rows[own].clone().requires_grad_() for rows in whole]
        causal = "causal" in kind.name
        if kind == AttnMaskType.arbitrary or (size > 1 and not causal):
            message = "arbitrary" if kind == AttnMaskType.arbitrary else r"padding \(cu_seqlens_q"
            with pytest.raises(ValueError, match=message):
                layer(*mine, None, packed_seq_params=params())
            continue
        out = layer(*mine, None, packed_seq_params=params()).view(-1, 4, 8)
        alone = [rows.clone().requires_grad_() for rows in whole]
        expected = torch.zeros_like(weights)
        for start, n in zip(starts, real, strict=True):
            q, k, v = (rows[start : start + n].transpose(0, 1) for rows in alone)
            k, v = (rows.repeat_interleave(2, 0) for rows in (k, v))
            there = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1)
            expected[start : start + n] = there
        kept = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, real, strict=True)])
        learned = torch.zeros(sum(rooms), 1, 1, dtype=torch.float64)
        learned[kept] = 1
        torch.testing.assert_close((out * learned[own]), expected[own], rtol=0, atol=1e-10)
        (out * (weights * learned)[own]).sum().backward()
        (expected * weights).sum().backward()
        for here, there in zip(mine, alone, strict=True):
            grads = torch.zeros_like(there)
            grads[own] = here.grad
            torch.distributed.all_reduce(grads)
            torch.testing.assert_close(grads, there.grad, rtol=0, atol=1e-10)
    bounds = torch.tensor([0, 40], dtype=torch.int32)
    for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
        with pytest.raises(ValueError, match=f"{name} is .* as of the queries"):
            handler_of(params(**{name: bounds}), groups.cp)
    other = params()
    other.cp_partition_mode = "contiguous"
    if size > 1:
        with pytest.raises(
            ValueError, match="cp_partition_mode is 'contiguous', expected 'zigzag'"
        ):
            handler_of(other, groups.cp)
    parallel_state.destroy_model_parallel()


@needs_megatron
@pytest.mark.parametrize("size", [1, 2])
def test_no_layer_attends_to_padding_between_megatrons_sequences(size):
    run_ranks(size, attend_between_padding)


@needs_megatron
def test_megatrons_own_packed_params_say_group_and_size():
    run_ranks(2, attend_with_megatrons_own_params)


def rotate_by_a_config(rank, size):
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    lengths, drawn = [19, 4, 7], torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 2, 8, generator=drawn, dtype=torch.float64) for n in lengths]
    half = torch.randn(19, 1, 1, 3, generator=drawn, dtype=torch.float64)

    def check(groups, config, freqs, expected):
        own = [{"rows": each} for each in rows[groups.rank("dp_cp") :: 2]]
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=16)
        for cp, local in hcp.dispatch(plan, own, [0, 1, 0], groups):
            given = [cp.apply_rotary_pos_emb(local.rows, freqs, config)]
            rotary = cp.rotary(freqs, interleaved=config.rotary_interleaved)
            given.append(cp.apply_rotary_pos_emb(local.rows, rotary, config=config))
            want = [expected[s][t] for s, a, n in cp.layout.spans for t in range(a, a + n)]
            for out in given if want else ():
                assert float((out - torch.stack(want)).abs().max()) < 1e-12
            rotary = cp.rotary(freqs, interleaved=not config.rotary_interleaved)
            with pytest.raises(ValueError, match="expected the same"):
                cp.apply_rotary_pos_emb(local.rows, rotary, config)

    for interleaved, latent in ((False, False), (True, False), (False, True)):
        names = dict(rotary_interleaved=interleaved, multi_latent_attention=latent)
        config = SimpleNamespace(apply_rope_fusion=False, **names)
        pair = torch.stack((half, half), -1).flatten(-2)
        freqs = pair if interleaved else torch.cat((half, half), -1)
        group = torch.distributed.group.WORLD
        expected = [
            apply_rotary_pos_emb(each[:, None], freqs[: len(each)], config, cp_group=group)[:, 0]
            for each in rows
        ]
        hcp.loopback(2, functools.partial(check, config=config, freqs=freqs, expected=expected))


@needs_megatron
def test_rotary_embedding_by_megatrons_config_is_megatrons_own():
    run_ranks(1, rotate_by_a_config, timeout=110)


# ---- what is refused -----------------------------------------------------------------------------


def refuse(rank, size):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import CrossAttention
    from megatron.core.transformer.spec_utils import ModuleSpec

    from hcp.integrations import megatron as hcp_megatron

    with hcp_megatron.megatron_on_cpu():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()

        def model(**options):
            given = dict(num_layers=1, hidden_size=16, num_attention_heads=2)
            given |= dict(use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0)
            config = TransformerConfig(**{**given, **options})
            spec = hcp_megatron.hcp_layer_spec(get_gpt_layer_local_spec())
            return GPTModel(config, spec, 64, 64, position_embedding_type="rope")

        refused = dict(attention_dropout=0.1, flash_decode=True)
        for option, value in {**refused, "log_max_attention_logit": True}.items():
            with pytest.raises(ValueError, match=f"config.{option} is {value}, expected"):
                model(**{option: value})
        core = model().decoder.layers[0].self_attention.core_attention

        def core_attention(backend):
            config = copy.copy(core.config)
            config.attention_backend = backend
            return type(core)(config, 1, None, "self", pg_collection=core.pg_collection)

        for backend in (AttnBackend.unfused, AttnBackend.local):
            with pytest.raises(ValueError, match=f"attention_backend is '{backend.name}', expect"):
                core_attention(backend)
        flash = core_attention(AttnBackend.flash)
        flash._check_backend(SimpleNamespace(kernel_family="torch"))
        with pytest.raises(ValueError, match=r"'torch', but the handler .* has 'auto': give hcp.C"):
            flash._check_backend(SimpleNamespace(kernel_family="auto"))
        core._check_backend(SimpleNamespace(kernel_family="torch"))
        with pytest.raises(ValueError, match="calculate_per_token_loss is False, expected True"):
            hcp_megatron.forward_step(iter([]), model())
        of_axes = iter([{"position_ids": torch.zeros(3, 1, 5)}])
        with pytest.raises(ValueError, match=r"shape \(3, 1, 5\) and config.mrope_section is None"):
            hcp_megatron.forward_step(of_axes, model(calculate_per_token_loss=True))
        grown = model(calculate_per_token_loss=True)
        grown.config.mtp_num_layers = 1
        with pytest.raises(ValueError, match=r"the model is a GPTModel with mtp_num_layers"):
            hcp_megatron.forward_step(iter([]), grown)
        grown.rolls_along_sequences = True
        with pytest.raises(ValueError, match="losses is given and mtp_num_layers is not 0"):
            hcp_megatron.forward_step(iter([]), grown, losses=torch.nn.functional.cross_entropy)
        with pytest.raises(ValueError, match="return_schedule_plan is True, expected False"):
            hcp_megatron.forward_step(iter([]), None, return_schedule_plan=True)
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        with pytest.raises(ValueError, match="the layer got no packed_seq_params"):
            model()(tokens, tokens, None)
    crossing = get_gpt_layer_local_spec()
    crossing.submodules.cross_attention = ModuleSpec(module=CrossAttention)
    with pytest.raises(ValueError, match=r"spec\.submodules\.cross_attention is CrossAttention,"):
        hcp_megatron.hcp_layer_spec(crossing)
    derived = get_gpt_layer_local_spec()
    inner = derived.submodules.self_attention.submodules
    capped = type("Gemma2DotProductAttention", (), {"__module__": "megatron.bridge.models.gemma"})
    inner.core_attention = capped
    with pytest.raises(ValueError, match="core_attention is Megatron-Bridge's Gemma2DotProduct"):
        hcp_megatron.hcp_layer_spec(derived)
    with pytest.raises(ValueError, match="has no self-attention, Mamba mixer, gated delta"):
        hcp_megatron.hcp_layer_spec(get_gpt_layer_local_spec().submodules.mlp)
    with pytest.raises(ValueError, match="spec is the class GPTModel, expected a ModuleSpec"):
        hcp_megatron.hcp_layer_spec(GPTModel)


def refuse_experts(rank, size):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from hcp.integrations import megatron as hcp_megatron

    def config(**options):
        given = dict(num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=2)
        given |= dict(use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0)
        given |= dict(moe_router_load_balancing_type="none", calculate_per_token_loss=True)
        given |= dict(add_bias_linear=False)
        return TransformerConfig(**{**given, **options})

    def model(config):
        layer = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False)
        spec = hcp_megatron.hcp_layer_spec(layer)
        return GPTModel(config, spec, 64, 64, position_embedding_type="rope")

    with hcp_megatron.megatron_on_cpu():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()
        whole = model(config())
        refused = {
            "moe_expert_capacity_factor": 1.25,
            "moe_input_jitter_eps": 0.1,
            "moe_router_load_balancing_type": "sinkhorn",
            "moe_router_force_load_balancing": True,
            "moe_token_dispatcher_type": "allgather",
        }
        for option, value in refused.items():
            given = {option: value}
            if option == "moe_token_dispatcher_type":
                given["expert_model_parallel_size"] = 2
            else:
                given["moe_token_dispatcher_type"] = "alltoall"
            with pytest.raises(ValueError, match=rf"config\.{option} is '?{value}'?.*, expected"):
                model(config(**given))
            whole.config = config(**given)  # of layers that were built some other way
            with pytest.raises(ValueError, match=rf"config\.{option} is '?{value}'?.*, expected"):
                hcp_megatron.forward_step(iter([]), whole)
        given = dict(tensor_model_parallel_size=2, expert_model_parallel_size=2)
        given |= dict(sequence_parallel=True, moe_token_dispatcher_type="alltoall")
        groups = ProcessGroupCollection.use_mpu_process_groups()
        with pytest.raises(ValueError, match=r"expert_tensor_parallel_size is 2 with .* on CPUs"):
            check_experts(config(**given), groups)
        check_experts(config(**given, expert_tensor_parallel_size=1), groups)
        given["moe_token_dispatcher_type"] = "flex"
        with pytest.raises(ValueError, match=r"type is 'flex' on CPUs, expected 'alltoall': the"):
            check_experts(config(**given, expert_tensor_parallel_size=1), groups)

    said = []
    logger, handler = logging.getLogger("hcp"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    for losses in (
        dict(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.01),
        dict(moe_router_load_balancing_type=["aux_loss", "none"], moe_aux_loss_coeff=[0.01, 0.0]),
        dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01),  # of each
        dict(moe_z_loss_coeff=0.001),
        dict(moe_router_load_balancing_type="aux_loss"),  # of no weight
    ):
        for _ in range(2):
            check_experts(config(**losses))
    logger.removeHandler(handler)
    return said


def dispatcher(**options):
    """The options that a check of dispatchers reads, of experts over two ranks."""
    plain = dict(expert_model_parallel_size=2, moe_token_dispatcher_type="flex")
    return SimpleNamespace(**{**plain, "moe_flex_dispatcher_backend": "deepep", **options})


@pytest.mark.parametrize(
    ("options", "stages", "expected"),
    [
        (dict(moe_token_dispatcher_type="alltoall"), 2, None),
        (dict(moe_token_dispatcher_type="allgather"), 1, "as many rows from each rank"),
        (dict(moe_token_dispatcher_type="allgather", expert_model_parallel_size=1), 1, None),
        (dict(moe_token_dispatcher_type="allgather", expert_model_parallel_size=1), 2, "as many"),
        (dict(), 2, None),
        (dict(moe_flex_dispatcher_backend="hybridep"), 1, "without moe_hybridep_pad_uneven"),
        (
            dict(
                moe_flex_dispatcher_backend="hybridep", moe_hybridep_pad_uneven_dispatch_inputs=True
            ),
            1,
            None,
        ),
        (dict(moe_flex_dispatcher_backend="ncclep"), 1, "rows of the first micro-batch"),
    ],
)
def test_dispatchers_that_cannot_take_the_rows_of_a_plan_are_named(options, stages, expected):
    reasons = [why for _, why in unfit_dispatcher(dispatcher(**options), stages)]
    assert len(reasons) == (expected is not None)
    assert all(expected in why for why in reasons)


@needs_megatron
def test_experts_that_depend_on_the_plan_are_refused_and_their_losses_warned_of_once():
    (said,) = run_ranks(1, refuse_experts, timeout=110)
    named = [text.split(": this loss is of all rows")[0] for text in said]
    assert named == [
        "config.moe_router_load_balancing_type is 'global_aux_loss'",
        "config.moe_router_load_balancing_type is ['aux_loss', 'none']",
    ]


@needs_megatron
def test_options_and_layers_that_hcp_does_not_compute_are_refused_by_name():
    run_ranks(1, refuse, timeout=110)


TENSOR = ["--tensor-model-parallel-size", "2"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
EXPERTS = ["--expert-model-parallel-size", "2"]


@needs_megatron
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "3", "--tensor-model-parallel-size", "2"], "ranks (3) % (tensor * pipeline"),
        (["--ranks", "2", "--max-seqlen-per-dp-cp-rank", "8"], "> max_seqlen_per_dp_cp_rank (8)"),
        (["--data", "nowhere"], "--data nowhere: no such file"),
        (["--train-iters", "0"], "train_iters is 0, expected an integer >= 1"),
        (
            ["--num-layers", "3", "--pipeline-model-parallel-size", "2"],
            "num_layers (3) % (pipeline * virtual stages) (2) == 1, expected 0",
        ),
        (
            [*PIPELINE, "--num-layers", "6", "--num-virtual-stages-per-pipeline-rank", "2"],
            "num_layers (6) % (pipeline * virtual stages) (4) == 2, expected 0",
        ),
        (["--num-virtual-stages-per-pipeline-rank", "2"], "pipeline_model_parallel_size 1, exp"),
        (
            ["--tensor-model-parallel-size", "4"],
            "num_query_groups (2) % tensor_model_parallel_size (4) == 2, expected 0",
        ),
        (["--sequence-parallel"], "sequence_parallel is set with tensor_model_parallel_size 1"),
        (
            [*TENSOR, "--sequence-parallel", "--mtp-num-layers", "1"],
            "mtp_num_layers is 1 with sequence_parallel, expected one of them",
        ),
        (["--expert-model-parallel-size", "2"], "is 2 without num_experts, expected 1"),
        (
            ["--num-experts", "3", "--expert-model-parallel-size", "2"],
            "num_experts (3) % expert_model_parallel_size (2) == 1, expected 0",
        ),
        (
            ["--ranks", "2", *PIPELINE, "--num-experts", "4", "--expert-model-parallel-size", "2"],
            "ranks of a pipeline stage (1) % (expert tensor * expert model sizes) (2) == 1",
        ),
        (
            [*TENSOR, "--sequence-parallel", "--num-experts", "4", *EXPERTS],
            "expert_tensor_parallel_size is 2 with expert_model_parallel_size 2 on CPUs, expected",
        ),
        (
            [*TENSOR, *EXPERTS, "--num-experts", "4", "--expert-tensor-parallel-size", "3"],
            "tensor_model_parallel_size (2) % expert_tensor_parallel_size (3) == 2, expected 0",
        ),
        (["--num-experts", "4", "--moe-router-topk", "5"], "moe_router_topk is 5, expected 1 to"),
        ([*TENSOR, "--num-experts", "4"], "without sequence_parallel, expected it, as Megatron's"),
        (["--window-size", "9,0", "full"], "expected one for all layers, as Megatron's models"),
        (["--eval-context-parallel-size", "auto"], "is 'auto', expected a number: ask"),
    ],
)
def test_the_program_says_in_one_line_what_is_wrong(flags, message, capsys, monkeypatch):
    from hcp.integrations.megatron.program import main

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(
        "hcp.tools.programs.launch.start_ranks", lambda *_: pytest.fail("ranks started")
    )
    assert main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hcp.integrations.megatron: error: ")
    assert message in line
