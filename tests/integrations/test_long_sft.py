"""The example of long sequences: two ranks with a choice of memory, beside Transformers alone."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shutil
import sysconfig
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.examples import example
from support.finetuning import as_torchrun, fsdp_on_cpus
from support.ranks import run_ranks

from hcp import _versions as versions

pytest.importorskip("trl", reason="pip install '.[trl]'")

SHARDED_OPTIMIZERS_RESUME = versions.numbers(versions.installed("transformers")) >= (5, 12)
"""Transformers 5.6 with Accelerate 1.11 forgets AdamW's state of FSDP2, also without hcp."""
READS_TO_META = versions.numbers(versions.installed("transformers")) >= (5, 24)
"""Transformers 5.6 reads weights to the host, whatever device_map says of meta."""
LENGTH = 384
SMALL = ["--layers", "3", "--max-length", str(LENGTH), "--join", "--steps", "3", "--lr", "0.05"]
SMALL += ["--sequences", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A configuration with a tokenizer, without weights, and texts."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = tmp_path_factory.mktemp("model")
    letters = {letter: i + 1 for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab={"<end>": 0, **letters}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    ).save_pretrained(made)
    transformers.Qwen3Config(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    ).save_pretrained(made)
    (made / "texts").mkdir()
    for name in ("this.py", "bisect.py"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / name, made / "texts")
    return made


def prices_in(folder, **changes):
    from hcp.integrations.transformers import memory

    same = {"row_forward": 1e-6, "row_backward": 2e-6, "pair_forward": 1e-8, "pair_backward": 3e-8}
    same |= {"head_row": 1e-6, "parameter": 1e-9, "host_parameter": 1e-8, "host_rate": 1e12}
    memory.Prices(**same).save(folder / "prices.json", {})
    return str(folder / "prices.json")


def options(folder, output, *more):
    return [
        *SMALL,
        *("--model", str(folder), "--data", str(folder / "texts"), "--output", str(output)),
        *("--prices", prices_in(folder), "--host-gib", "1", *more),
    ]


def run(rank, size, argv, world=2):
    """Losses, those of evaluations, the words of the layers, and what was printed."""
    as_torchrun(size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_default_dtype(torch.float64)
    printed = io.StringIO()
    warnings.simplefilter("ignore", FutureWarning)
    try:
        module = example("long_sft")
        args = module.parse_args(argv)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(
                mock.patch("hcp.integrations.transformers.memory.host.LEAST_BYTES", 1)
            )
            enter = partial(stack.enter_context, fsdp_on_cpus()) if args.fsdp else (lambda: None)
            trainer = module.train(args, enter)
    finally:
        torch.set_default_dtype(torch.float32)
    history = trainer.state.log_history
    return (
        [entry["loss"] for entry in history if "loss" in entry],
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        trainer.memory_choice.choice.layers,
        printed.getvalue(),
    )


def plain_losses(folder, steps, *more):
    """Of Transformers' model alone, without hcp, on whole sequences of a global batch of two."""
    module = example("long_sft")
    args = module.parse_args(options(folder, "unused", *more))
    torch.set_default_dtype(torch.float64)
    try:
        config = module.config_of(args)
        model = module.model_of(args, config)
        tokenizer = module.AutoTokenizer.from_pretrained(folder)
        rows = module.joined(module.texts_of(args.data), tokenizer, LENGTH)["input_ids"]
        optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.0)
        losses = []
        for step in range(steps):
            tokens = torch.tensor(rows[2 * step : 2 * step + 2])
            logits = model(tokens).logits[:, :-1]  # the model's own loss is of float32
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    finally:
        torch.set_default_dtype(torch.float32)
    return losses


def test_losses_are_those_of_a_plain_run_whatever_is_kept(folder, tmp_path):
    expected = plain_losses(folder, 3)
    found = {}
    for gib in ("1", "0.0024"):
        argv = options(folder, tmp_path / gib, "--device-gib", gib)
        found[gib] = run_ranks(2, run, argv)
        for losses, *_ in found[gib]:
            assert losses == pytest.approx(expected, abs=1e-6)
    assert found["1"][0][2] == ("keep",) * 3
    assert found["0.0024"][0][2] != ("keep",) * 3
    told = found["0.0024"][0][3]
    assert re.search(rf"^{LENGTH} tokens, {LENGTH // 2} rows a rank: predicted", told, re.MULTILINE)
    assert found["1"][1][3] == ""  # rank 1 prints nothing


def test_under_fsdp2_with_evaluation_and_resume(folder, tmp_path):
    expected = plain_losses(folder, 3)
    more = ("--fsdp", "--device-gib", "0.0024", "--save-steps", "2", "--held-out", "2")
    more += ("--eval-cp", "2")
    whole = run_ranks(2, run, options(folder, tmp_path / "run", *more))
    resumed = options(folder, tmp_path / "run", *more, "--resume")
    again = run_ranks(2, run, [*resumed, str(tmp_path / "run" / "checkpoint-2")])
    for (losses, evaluated, *_), (losses2, evaluated2, *_) in zip(whole, again, strict=True):
        assert len(losses) == len(expected)
        assert losses2[:2] == losses[:2]  # of the log that the checkpoint has
        assert losses2[2] == pytest.approx(losses[2], abs=1e-5)
        if SHARDED_OPTIMIZERS_RESUME:
            assert evaluated2 == pytest.approx(evaluated, abs=1e-5)
        assert len(evaluated) == 1


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The same with weights."""
    import transformers

    made = tmp_path_factory.mktemp("trained")
    shutil.copytree(folder, made, dirs_exist_ok=True)
    torch.manual_seed(11)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made)
    return made


def run_reading(rank, size, argv):
    """The losses, and whether this rank has read weights."""
    import transformers

    read, from_pretrained = [], transformers.AutoModelForCausalLM.from_pretrained

    def watched(*given, **named):
        model = from_pretrained(*given, **named)
        read.extend(not parameter.is_meta for parameter in model.parameters())
        return model

    with mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", watched):
        losses, *_ = run(rank, size, argv)
    return losses, set(read)


def test_rank_0_alone_reads_weights_and_all_train_on_them(trained, tmp_path):
    whole = ["--layers", "0"]
    expected = plain_losses(trained, 3, *whole)
    argv = options(trained, tmp_path, "--fsdp", "--device-gib", "0.01", *whole)
    (first, read_first), (second, read_second) = run_ranks(2, run_reading, argv)
    assert first == pytest.approx(expected, abs=1e-6)
    assert second == pytest.approx(expected, abs=1e-6)
    assert read_first == {True}
    if READS_TO_META:
        assert read_second == {False}


@pytest.mark.parametrize("offload", [False, True])
def test_fsdp2_wraps_each_layer_and_offloads_what_is_asked_for(folder, tmp_path, offload):
    module = example("long_sft")
    argv = options(folder, tmp_path, "--fsdp", *["--offload-state"] * offload)
    as_torchrun(1)
    given = module.sft_config(module.parse_args(argv), "Qwen3DecoderLayer").fsdp_plugin_args
    assert given["fsdp_version"] == 2
    assert given["transformer_cls_names_to_wrap"] == "Qwen3DecoderLayer"
    assert given.get("cpu_offload", False) is offload


def test_rotary_embedding_is_scaled_as_is_asked_for(folder, tmp_path):
    module = example("long_sft")
    given = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}'
    args = module.parse_args(options(folder, tmp_path, "--rope-parameters", given))
    config = module.config_of(args)
    assert config.rope_parameters["rope_theta"] == 10_000.0
    rotary = module.model_of(args, config).model.rotary_emb
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)


def test_a_length_that_cannot_fit_is_refused_before_training(folder, tmp_path):
    argv = options(folder, tmp_path, "--device-gib", "0.001", "--max-length", "1000000")
    module = example("long_sft")
    with pytest.raises(ValueError, match=r"length is 1,000,000 tokens on 1 ranks, expected [\d,]+"):
        module.trainer_of(module.parse_args(argv))


def test_data_without_texts_is_refused(folder, tmp_path):
    module = example("long_sft")
    with pytest.raises(SystemExit, match=r"--data: .* has no .txt, .md or .py file"):
        module.texts_of(str(tmp_path))
    talks = module.Dataset.from_list([{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(SystemExit, match="--join takes rows of text, not messages"):
        module.joined(talks, None, 8)


@pytest.mark.parametrize(("sequences", "accumulates"), [("1", False), ("2", True)])
def test_several_sequences_leave_room_for_gradients_of_several_micro_batches(
    folder, tmp_path, sequences, accumulates
):
    module = example("long_sft")
    args = module.parse_args(options(folder, tmp_path, "--sequences", sequences))
    assert module.machine_of(args).accumulates is accumulates
