"""Transformers' Trainer on sequence classification under hcp, beside Transformers' own on one rank:
losses, gradients, evaluations and predictions, of rewards and of classes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.finetuning import as_torchrun
from support.ranks import run_ranks
from torch import Tensor

import hcp

transformers = pytest.importorskip("transformers", reason="pip install '.[transformers]'")

TRAINING = (13, 1, 40, 7, 30, 3, 9, 50)
VALIDATION = (20, 3, 1, 22, 9, 14, 2, 5)
SIZES = {"vocab_size": 64, "initializer_range": 0.2, "pad_token_id": 0}


def build(kind: str = "llama", labels: int = 1) -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(3)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_positions=64, n_embd=32, n_layer=2, n_head=4, num_labels=labels, **SIZES
        )
        for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
            setattr(config, name, 0.0)
        return transformers.GPT2ForSequenceClassification(config).double()
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=labels,
        **SIZES,
    )
    return transformers.LlamaForSequenceClassification(config).double()


def items(lengths: Sequence[int], labels: int, seed: int) -> list[dict[str, Any]]:
    """Sequences, of which every third ends in the padding token: its score is that before."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for i, n in enumerate(lengths):
        tokens = torch.randint(3, 64, (n,), generator=draw)
        if i % 3 == 0 and n > 1:
            tokens[-1] = 0
        wanted = torch.randn((), generator=draw, dtype=torch.float64)
        classes = torch.randint(labels, (), generator=draw)
        found.append({"input_ids": tokens, "labels": wanted if labels == 1 else classes})
    return found


def packs(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same sequences, two in a row: one row says where they end by lengths, the next by the
    number of each token's document."""
    found: list[dict[str, Any]] = []
    for i in range(0, len(given), 2):
        pair = given[i : i + 2]
        sizes = [len(item["input_ids"]) for item in pair]
        row = {
            "input_ids": torch.cat([item["input_ids"] for item in pair]),
            "labels": torch.stack([item["labels"] for item in pair]),
        }
        numbers = torch.arange(1, 3).repeat_interleave(torch.tensor(sizes))
        found.append(row | ({"seq_lengths": sizes} if i % 4 else {"attention_mask": numbers}))
    return found


def padded(given: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A collator of the user's: padding on the left."""
    longest = max(len(item["input_ids"]) for item in given)
    rows = [longest - len(item["input_ids"]) for item in given]
    return {
        "input_ids": torch.stack(
            [
                torch.cat((torch.zeros(n).long(), item["input_ids"]))
                for n, item in zip(rows, given, strict=True)
            ]
        ),
        "attention_mask": torch.stack([(torch.arange(longest) >= n).long() for n in rows]),
        "labels": torch.stack([item["labels"] for item in given]),
    }


def right_padded(given: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The reference's: padding on the right, as positions that count from 0 need it."""
    flipped = padded([item | {"input_ids": item["input_ids"].flip(0)} for item in given])
    return flipped | {name: flipped[name].flip(1) for name in ("input_ids", "attention_mask")}


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """A loss that no model has, a sum over sequences divided by their number in all."""
    return (outputs.logits[:, 0] - labels).abs().pow(1.5).sum() / num_items_in_batch


def metrics(given: Any) -> dict[str, float]:
    scores, labels = (torch.as_tensor(x) for x in (given.predictions, given.label_ids))
    return {"apart": float((scores[:, 0] - labels).square().mean()), "count": float(len(labels))}


CASES: dict[str, dict[str, Any]] = {
    "reward": {},
    "reward of gpt2": {"kind": "gpt2"},
    "classes": {"labels": 3},
    "packed": {"packed": True},
    "padded": {"data_collator": padded},
    "own loss": {"compute_loss_func": own_loss},
    "accumulated": {"gradient_accumulation_steps": 2},
}


def made(
    size: int, folder: Path, hcps: bool, *, kind: str = "llama", labels: int = 1, **more: Any
) -> Any:
    from hcp.integrations.transformers import SequenceClassificationTrainer

    as_torchrun(size)
    steps = more.pop("gradient_accumulation_steps", 1) if hcps else 1
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4 // size // steps,
        per_device_eval_batch_size=4 // size,
        gradient_accumulation_steps=steps,
        train_sampling_strategy="sequential",
        max_steps=2,
        learning_rate=1e-2,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        disable_tqdm=True,
    )
    data = {
        "train_dataset": items(TRAINING, labels, 1),
        "eval_dataset": items(VALIDATION, labels, 2),
    }
    if hcps:
        if more.get("packed"):
            data = {name: packs(each) for name, each in data.items()}
        chosen: Any = SequenceClassificationTrainer
        more = {"cp": hcp.Config(max_seqlen_per_dp_cp_rank=32)} | more
    else:
        # One batch, not accumulated: Transformers adds up means over batches as they are.
        more = {"compute_loss_func": more.get("compute_loss_func")}
        chosen, more["data_collator"] = transformers.Trainer, right_padded
    trainer = chosen(build(kind, labels), args, compute_metrics=metrics, **data, **more)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def record(rank: int, size: int, folder: Path, hcps: bool, case: str) -> dict[str, Any]:
    """Gradients of the first update, weights after the last, evaluations, and predictions."""
    first: dict[str, Tensor] = {}

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            own = given["model"].named_parameters()
            first.update({} if first else {name: copy.deepcopy(p.grad) for name, p in own})

    trainer = made(size, folder, hcps, **CASES[case])
    trainer.add_callback(Watch())
    trainer.train()
    held_out = items(VALIDATION, CASES[case].get("labels", 1), 5)
    given = trainer.predict(held_out)
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "hcp": [{n for n in entry if n.startswith("hcp/")} for entry in history if "loss" in entry],
        "first": first,
        "weights": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "evaluations": [
            entry[name]
            for entry in history
            for name in ("eval_loss", "eval_apart", "eval_count")
            if name in entry
        ],
        "predictions": given.predictions.tolist(),
        "labels": given.label_ids.tolist(),
        "metrics": [given.metrics[name] for name in ("test_loss", "test_apart")],
    }


def names(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names of the model without DDP."""
    return {name.removeprefix("module."): value for name, value in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_scores_train_and_evaluate_as_on_one_rank(case: str, tmp_path: Path) -> None:
    (expected,) = run_ranks(1, record, tmp_path / "1", False, case)
    assert len(expected["evaluations"]) == 3
    for found in run_ranks(2, record, tmp_path / "2", True, case):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)  # logged, rounded
        assert all(found["hcp"])
        for which in ("first", "weights"):
            ours, theirs = names(found[which]), names(expected[which])
            assert ours.keys() == theirs.keys()
            worst = max(float((ours[name] - want).abs().max()) for name, want in theirs.items())
            assert worst < 1e-10, which
        assert found["evaluations"] == pytest.approx(expected["evaluations"], abs=1e-10)
        assert found["labels"] == expected["labels"]
        assert torch.allclose(
            torch.tensor(found["predictions"]), torch.tensor(expected["predictions"]), atol=1e-10
        )
        assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-10)


# ---- a loop of one's own, at any degree ----------------------------------------------------------


def planned(groups: Any, model: Any, given: list[dict[str, Any]], least: int) -> Any:
    """Scores of this rank's samples, and its share of the gradients of the sum of their squares."""
    from hcp.integrations.transformers import sequence_scores

    model = copy.deepcopy(model)
    rank, ranks = groups.transport.rank, groups.transport.size
    own = [
        {"input_ids": x["input_ids"], "is_last": torch.arange(len(x["input_ids"])) == last_of(x)}
        for x in given[rank::ranks]
    ]
    lengths, sources, samples = hcp.gather_lengths(own, groups)
    plan = hcp.plan(
        lengths, ranks=ranks, max_tokens_per_rank=64, min_degree=least, max_degree=least
    )
    step = hcp.dispatch(plan, samples, sources, groups)
    rows = [cp.rows for cp, _ in step]
    scores = torch.stack(
        step.combine_by_sequence(sequence_scores(model, cp, local) for cp, local in step)
    )
    scores.square().sum().backward()
    return scores.detach(), [p.grad for p in model.parameters()], rows


def last_of(item: dict[str, Any]) -> int:
    """The last token that is not 0, the padding."""
    return int(item["input_ids"].nonzero().max())


@pytest.mark.parametrize("least", [1, 2, 3])
def test_scores_and_gradients_are_those_of_each_sequence_at_any_degree(least: int) -> None:
    from hcp.integrations.transformers import register_for_scores

    model, given = build(labels=3).eval(), items(TRAINING, 3, 1)
    alone = copy.deepcopy(model)
    expected = torch.cat([alone(input_ids=x["input_ids"][None]).logits for x in given])
    expected.square().sum().backward()
    register_for_scores(model)
    found = hcp.loopback(3, lambda groups: planned(groups, model, given, least))
    for rank, (scores, _, _) in enumerate(found):
        assert float((scores - expected[rank::3].detach()).abs().max()) < 1e-10
    for i, parameter in enumerate(alone.parameters()):
        got = sum((grads[i] for _, grads, _ in found), torch.zeros(()).double())
        assert float((got - parameter.grad).abs().max()) < 1e-10
    if least == 2:
        assert any(0 in rows for _, _, rows in found), "of 3 ranks one has no rows at degree 2"


# ---- what is refused -----------------------------------------------------------------------------


def test_a_model_whose_head_does_not_score_the_last_token_is_refused() -> None:
    from hcp.integrations.transformers import register_for_scores

    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(ValueError, match="BertForSequenceClassification has no head 'score'"):
        register_for_scores(transformers.BertForSequenceClassification(config))

    class First(transformers.LlamaForSequenceClassification):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **given: Any) -> Any:
            return super().forward(input_ids[:, :1], **given)

    first = First(build().config)
    with pytest.raises(ValueError, match="First computes other scores than its head 'score' does"):
        register_for_scores(first)
    assert first.config._attn_implementation == "sdpa"


def refusal(**given: Any) -> str:
    """What a batch of two sequences is refused with."""
    from hcp.integrations.transformers import register_for_scores
    from hcp.integrations.transformers.scores import spread_scores
    from hcp.tools.loggers import MeanMetrics

    model = build()
    register_for_scores(model)

    def call(groups: Any) -> None:
        config = hcp.Config(max_seqlen_per_dp_cp_rank=32)
        spread_scores(model, config, groups, None, MeanMetrics())
        model(**{"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]])} | given)

    with pytest.raises(ValueError, match="expected") as error:
        hcp.loopback(1, call)
    return str(error.value)


def test_a_batch_that_is_no_padded_one_is_refused() -> None:
    numbers = torch.tensor([[1, 1, 2], [1, 1, 0]])
    assert "packed=True" in refusal(attention_mask=numbers)
    assert "called with position_ids" in refusal(position_ids=torch.zeros(2, 3).long())
    none = torch.tensor([[1, 1, 1], [0, 0, 0]])
    assert "sequence 1 of the batch has no token" in refusal(attention_mask=none)


def test_a_pack_that_nobody_announced_is_refused() -> None:
    from hcp.integrations.transformers import sequence_samples
    from hcp.integrations.transformers.score_trainer import pad_sequences

    pack = {"input_ids": [5, 6, 7], "seq_lengths": [2, 1], "labels": [0, 1]}
    assert [x["input_ids"].tolist() for x in sequence_samples(pack)] == [[5, 6], [7]]
    assert [int(x["labels"]) for x in sequence_samples(pack)] == [0, 1]
    with pytest.raises(ValueError, match="item 1 of a batch is a pack of 2 documents"):
        pad_sequences([{"input_ids": [5]}, pack])
    with pytest.raises(ValueError, match=r"labels has shape \(3,\) in an item of 2 documents"):
        sequence_samples(pack | {"labels": [0, 1, 2]})


def test_labels_of_one_sequence_may_have_several_values() -> None:
    """Of several labels, each 0 or 1, or of a regression of several values."""
    from hcp.integrations.transformers import sequence_samples

    (sample,) = sequence_samples({"input_ids": [5, 6], "label": [1.0, 0.0, 1.0]})
    assert sample["labels"].tolist() == [1.0, 0.0, 1.0]
    (sample,) = sequence_samples({"input_ids": [5, 6], "label": 2})
    assert sample["labels"].shape == ()
