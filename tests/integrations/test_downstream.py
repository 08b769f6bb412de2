"""axolotl, LLaMA-Factory and ms-swift: their trainers over hcp take the steps that they take
without it. The three are stand-ins with the interfaces of the originals; Transformers is real."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from support.finetuning import as_torchrun
from support.ranks import run_ranks

import hcp

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

from support import downstream

from hcp.integrations.downstream import row_samples

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTHS = (13, 2, 40, 7, 30, 3, 9, 55)
LIMIT = 32
"""Rows of a rank: the longest needs two."""


def build():
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def rows():
    """Prompts without labels, then answers."""
    made = torch.Generator().manual_seed(2)
    drawn = [torch.randint(3, 64, (n,), generator=made).tolist() for n in LENGTHS]
    return [
        {
            "input_ids": tokens,
            "labels": [-100] * (len(tokens) // 3) + tokens[len(tokens) // 3 :],
            "attention_mask": [1] * len(tokens),
        }
        for tokens in drawn
    ]


def options(size, folder, **more):
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4 // size,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        **more,
    }


def in_axolotl(given, planned, cp=None, data=None, **cfg):
    from hcp.integrations.axolotl import ContextParallelPlugin

    limits = {"max_seqlen_per_dp_cp_rank": LIMIT} if cp is None else cp
    chosen = downstream.Cfg(max_steps=given["max_steps"], hcp=limits, **cfg)
    plugin = ContextParallelPlugin() if planned else None
    return downstream.build_in_axolotl(chosen, plugin, build(), data or rows(), **given)


def in_llama_factory(given, planned, data=None, **finetuning):
    from hcp.integrations.llama_factory import plan_llama_factory

    if planned:
        plan_llama_factory(hcp.Config(max_seqlen_per_dp_cp_rank=LIMIT))
    return downstream.run_in_llama_factory(build(), data or rows(), given, **finetuning)


def in_ms_swift(given, planned, data=None, **template):
    from hcp.integrations.ms_swift import plan_ms_swift

    if planned:
        plan_ms_swift(hcp.Config(max_seqlen_per_dp_cp_rank=LIMIT))
    return downstream.run_in_ms_swift(build(), data or rows(), given, **template)


MADE = {"axolotl": in_axolotl, "LLaMA-Factory": in_llama_factory, "ms-swift": in_ms_swift}


def train(rank, size, folder, project, planned, **more):
    """Losses, and the weights after the last step."""
    as_torchrun(size)
    with downstream.installed():
        trainer = MADE[project](options(size, folder), planned, **more)
        trainer.train()
    history = trainer.state.log_history
    assert any("hcp/tokens" in entry for entry in history) == planned
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return [entry["loss"] for entry in history if "loss" in entry], weights


def train_by_dft(*given):
    """With the loss function that LLaMA-Factory's trainer sets."""
    return train(*given, use_dft_loss=True)


@pytest.mark.parametrize(
    ("project", "case"), [*((project, train) for project in MADE), ("LLaMA-Factory", train_by_dft)]
)
def test_a_project_takes_its_own_steps_over_hcp(project, case, tmp_path):
    ((expected, weights),) = run_ranks(1, case, tmp_path / "1", project, False)
    assert len(expected) == 2
    for losses, found in run_ranks(2, case, tmp_path / "2", project, True):
        assert losses == pytest.approx(expected, abs=1e-4)
        assert max(float((found[n] - w).abs().max()) for n, w in weights.items()) < 2e-3


# ---- rows ----------------------------------------------------------------------------------------


def lengths(item):
    return [len(sample["input_ids"]) for sample in row_samples(item)]


def test_a_pack_of_llama_factory_is_its_documents_without_its_padding():
    """Its packs are filled up with tokens whose positions are all 0."""
    pack = {
        "input_ids": [5, 6, 7, 8, 9, 0, 0, 0],
        "position_ids": [0, 1, 2, 0, 1, 0, 0, 0],
        "labels": [5, 6, 7, 8, 9, -100, -100, -100],
        "images": None,
    }
    neat = {"attention_mask": [1, 1, 1, 2, 2, 0, 0, 0], "packing_params": {"right": 3}}
    assert lengths(pack | {"attention_mask": [1] * 8}) == [3, 2]
    assert lengths(pack | neat) == [3, 2]


def test_a_pack_of_ms_swift_is_a_list_of_rows():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "length": 3}, {"input_ids": [8, 9]}]
    assert lengths(rows) == [3, 2]


def test_a_row_without_labels_stays():
    assert lengths({"input_ids": [5, 6], "labels": [-100, -100]}) == [2]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"images": ["a.png"]}, "a row has images, expected text"),
        ({"loss_scale": [1.0, 0.5]}, "loss_scale has 0.5, expected 1: hcp computes the plain mean"),
    ],
)
def test_rows_that_hcp_does_not_train_are_refused(more, message):
    with pytest.raises(ValueError, match=message):
        row_samples({"input_ids": [5, 6], "labels": [5, 6]} | more)
    fine = {"images": [], "loss_scale": [0.0, 1.0], "labels": [-100, 6]}
    assert lengths({"input_ids": [5, 6]} | fine) == [2]


# ---- options -------------------------------------------------------------------------------------

REFUSED = {
    "axolotl: rl": ("axolotl", {"rl": "dpo"}, "rl is 'dpo', expected '': hcp plans supervised"),
    "axolotl: cp": ("axolotl", {"context_parallel_size": 2}, "context_parallel_size is 2, expect"),
    "axolotl: none": ("axolotl", {"cp": {}}, r"hcp is {}, expected the options of hcp\.Config"),
    "axolotl: orpo": ("axolotl", {"orpo_alpha": 0.1}, r"orpo_alpha is 0\.1, expected 0: hcp plans"),
    "factory: asft": ("LLaMA-Factory", {"use_asft_loss": True}, "use_asft_loss is True, expected"),
    "swift: loss": (
        "ms-swift",
        {"loss_type": "dft"},
        "compute_loss_func is .*, expected None: ms-",
    ),
    "swift: sp": ("ms-swift", {"sequence_parallel_size": 2}, "sequence_parallel_size is 2, expect"),
}


def refuse(rank, size, folder):
    as_torchrun(size)
    with downstream.installed():
        refused(size, folder)


def refused(size, folder):
    for project, more, message in REFUSED.values():
        with pytest.raises(ValueError, match=message):
            MADE[project](options(size, folder), True, **more)
    given = options(size, folder, train_sampling_strategy="random")
    with pytest.raises(ValueError, match="disable_shuffling is True, expected False: hcp's loader"):
        in_llama_factory(given, True, disable_shuffling=True)
    given = options(size, folder, predict_with_generate=True)
    for made in (in_llama_factory, in_ms_swift):
        with pytest.raises(ValueError, match="predict_with_generate is True, expected False"):
            made(given, True)


def test_options_that_hcp_does_not_have_are_refused(tmp_path):
    run_ranks(1, refuse, tmp_path)


def absent(rank, size):
    from hcp.integrations.llama_factory import plan_llama_factory
    from hcp.integrations.ms_swift import plan_ms_swift

    config = hcp.Config(max_seqlen_per_dp_cp_rank=LIMIT)
    without = dict.fromkeys(("llamafactory", "swift"))  # even where they are there
    with mock.patch.dict(sys.modules, without):
        said = r"LLaMA-Factory has no .*CustomTrainer, which hcp replaces"
        with pytest.raises(ImportError, match=said):
            plan_llama_factory(config)
        said = r"ms-swift has no .*Seq2SeqTrainer, which hcp uses: expected"
        with pytest.raises(ImportError, match=said):
            plan_ms_swift(config)


def test_a_project_without_the_names_that_hcp_replaces_is_refused():
    run_ranks(1, absent)
