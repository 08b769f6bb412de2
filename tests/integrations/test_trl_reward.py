"""TRL's RewardTrainer under hcp, beside TRL's own on one rank: the real package on gloo ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.finetuning import as_torchrun
from support.ranks import run_ranks
from torch import Tensor

import hcp

pytest.importorskip("trl", reason="pip install '.[trl]'")

PAIRS = [(13, 9), (2, 1), (40, 25), (7, 12), (30, 4), (3, 50), (9, 9), (17, 6)]
"""Tokens of what was chosen and of what was rejected."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """TRL's arguments warn of names that Transformers is to give up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def build() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        num_labels=1,
        pad_token_id=0,
    )
    return transformers.LlamaForSequenceClassification(config).double()


def preferences(margin: bool) -> Any:
    import datasets

    datasets.disable_progress_bars()
    draw = torch.Generator().manual_seed(5)
    rows = []
    for i, sizes in enumerate(PAIRS):
        chosen, rejected = (torch.randint(4, 64, (n,), generator=draw).tolist() for n in sizes)
        more = {"margin": 0.1 * i} if margin else {}
        rows.append({"chosen_ids": chosen, "rejected_ids": rejected} | more)
    return datasets.Dataset.from_list(rows)


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "margin and centre": {"center_rewards_coefficient": 0.1},
    "lora": {"gradient_checkpointing": False},
}

LOGGED = ("mean_reward", "min_reward", "max_reward", "margin", "accuracy")


def train(rank: int, size: int, folder: Path, hcps: bool, case: str) -> dict[str, Any]:
    import transformers
    import trl

    from hcp.integrations.trl import RewardTrainer

    as_torchrun(size)
    first: dict[str, Tensor] = {}

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            own = given["model"].named_parameters()
            found = {name: p.grad.clone() for name, p in own if p.grad is not None}
            first.update({} if first else found)

    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4 // size,
        "per_device_eval_batch_size": 4 // size,
        "train_sampling_strategy": "sequential",
        "max_steps": 2,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    data = preferences("margin" in case)
    more: dict[str, Any] = {"peft_config": lora()} if case == "lora" else {}
    chosen: Any = trl.RewardTrainer
    if hcps:
        chosen, more["cp"] = RewardTrainer, hcp.Config(max_seqlen_per_dp_cp_rank=32)
    trainer = chosen(
        model=build(),
        args=trl.RewardConfig(**options | CASES[case]),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer(),
        **more,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(Watch())
    trainer.train()
    history = trainer.state.log_history
    return {
        "first": {name.removeprefix("module."): grad for name, grad in first.items()},
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "logged": [
            entry[prefix + name]
            for entry in history
            for prefix in ("", "eval_")
            for name in LOGGED
            if prefix + name in entry
        ],
        "hcp": [{n for n in entry if n.startswith("hcp/")} for entry in history if "loss" in entry],
    }


@pytest.mark.parametrize("case", CASES)
def test_rewards_train_as_trls_on_one_rank(case: str, tmp_path: Path) -> None:
    (expected,) = run_ranks(1, train, tmp_path / "1", False, case)
    assert len(expected["logged"]) == 3 * len(LOGGED)  # two steps and an evaluation
    for found in run_ranks(2, train, tmp_path / "2", True, case):
        assert all(found["hcp"])
        assert found["first"].keys() == expected["first"].keys()
        for name, want in expected["first"].items():
            assert float((found["first"][name] - want).abs().max()) < LIMIT, name
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)  # logged, rounded
        assert found["evaluations"] == pytest.approx(expected["evaluations"], abs=LIMIT)
        assert found["logged"] == pytest.approx(expected["logged"], abs=1e-6)  # float32 means


LIMIT = 1e-10
