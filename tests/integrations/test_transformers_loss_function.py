"""`compute_loss_func` of Transformers' Trainer over ranks: the steps are those of the function on
each document alone, by the model without hcp."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.finetuning import as_torchrun, documents, fsdp_on_cpus
from support.ranks import run_ranks
from torch.nn import functional as F

import hcp

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

from support import architectures

from hcp.integrations.transformers.loss_function import LossFunction

LENGTHS = (13, 1, 40, 7, 30, 3, 9, 71)
VALIDATION = (50, 3, 1, 22, 9)
LIMIT, STEPS, RATE = 24, 3, 0.1


def items(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[dict[str, Any]]:
    """Documents, of which some have prompts without a label, and one no label at all."""
    made = []
    for i, document in enumerate(documents(lengths, seed)):
        labels = document["input_ids"].clone()
        labels[: (0, len(labels) // 2, len(labels))[i % 3]] = -100
        made.append({"input_ids": document["input_ids"], "labels": labels})
    return made


def build() -> Any:
    """In float64, which GPT-2 computes in throughout."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    config = transformers.GPT2Config(**sizes, **none, initializer_range=0.2, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config).double()


# ---- functions as people write them --------------------------------------------------------------


def focal(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """With both cut, as in Transformers' guides. Writes to the labels that it is given."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    has_label = targets != -100
    targets[~has_label] = 0
    losses = F.cross_entropy(logits, targets, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses * has_label).sum() / num_items_in_batch


def fine(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """With labels filled up, and a constant where there is no label, as in LLaMA-Factory."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    logits = outputs.get("logits").view(-1, outputs.logits.size(-1))
    has_label = labels != -100
    if not has_label.any():
        return torch.tensor(0.0)
    chosen = logits[has_label].log_softmax(-1).gather(1, labels[has_label, None])[:, 0]
    return -(chosen.exp().detach() * chosen).sum() / num_items_in_batch


FUNCTIONS = {"focal": focal, "fine": fine}


def alone(
    name: str, lengths: tuple[int, ...] = LENGTHS
) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Losses of steps over all documents, each alone in the model's own attention; and the loss of
    the others, and the weights, after them."""
    model, function, data = build().train(), FUNCTIONS[name], items(lengths)

    def loss_of(documents: list[dict[str, Any]]) -> Any:
        count = torch.stack([(d["labels"][1:] != -100).sum() for d in documents]).sum()
        return sum(
            function(
                model(d["input_ids"][None]), d["labels"][None].clone(), num_items_in_batch=count
            )
            for d in documents
        )

    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(data)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        evaluated = loss_of(items(VALIDATION, 1)).item()
    return losses, evaluated, {n: p.detach().clone() for n, p in model.named_parameters()}


# ---- the Trainer ---------------------------------------------------------------------------------


def make(size: int, folder: Any, function: Any, **more: Any) -> Any:
    from transformers import TrainingArguments

    from hcp.integrations.transformers import Trainer

    as_torchrun(size)
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **more.pop("args", {}),
    }
    args = TrainingArguments(**options)
    more.pop("prepare", lambda: None)()
    limit, lengths = more.pop("limit", LIMIT), more.pop("lengths", LENGTHS)
    given: dict[str, Any] = {
        "model": build(),
        "train_dataset": items(lengths),
        "eval_dataset": items(VALIDATION, 1),
        "cp": hcp.Config(max_seqlen_per_dp_cp_rank=limit),
        "global_batch_size": len(lengths),
        **more,
    }
    return Trainer(args=args, compute_loss_func=function, **given)


def whole(x: Any) -> torch.Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def train(rank: int, size: int, folder: Any, name: str, more: dict[str, Any]) -> Any:
    """Losses of the steps, the loss of the others after them, the weights, and the rows of this
    rank in each micro-batch of the first step."""
    with contextlib.ExitStack() as stack:
        if more.get("args", {}).get("fsdp"):
            more = more | {"prepare": partial(stack.enter_context, fsdp_on_cpus())}
        trainer = make(size, folder, FUNCTIONS[name], **more)
        losses, rows, step = [], [], trainer.training_step

        def training_step(model: Any, inputs: Any, *others: Any) -> Any:
            losses.append(step(model, inputs, *others))
            rows.append([cp.rows for cp, _ in inputs])
            return losses[-1]

        trainer.training_step = training_step
        trainer.train()
        logged = [e["loss"] for e in trainer.state.log_history if "loss" in e]
        evaluated = trainer.evaluate()["eval_loss"]
        weights = {n.removeprefix("module."): whole(p) for n, p in trainer.model.named_parameters()}
    found = [x.item() for x in losses]
    assert logged == pytest.approx(found, abs=1e-4)
    return found, evaluated, weights, rows[0]


def check(results: list[Any], expected: Any) -> None:
    for losses, evaluated, weights, _ in results:
        assert losses == pytest.approx(expected[0], abs=1e-10, rel=0)
        assert evaluated == pytest.approx(expected[1], abs=1e-10, rel=0)
        assert weights.keys() == expected[2].keys()
        assert max(float((weights[n] - w).abs().max()) for n, w in expected[2].items()) < 1e-10


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("size", "more"),
    [
        (1, {"limit": 256}),
        (1, {"limit": 72}),
        (3, {}),
        (3, {"cp": hcp.Config(max_seqlen_per_dp_cp_rank=32, eval_context_parallel_size=3)}),
        (3, {"lengths": (40, 13), "limit": 200}),
        (2, {"limit": 40, "args": {"gradient_checkpointing": True}}),
    ],
    ids=["one rank", "micro-batches", "dynamic", "evaluation", "without rows", "checkpoints"],
)
def test_steps_are_those_of_each_document_alone(name, size, more, tmp_path):
    results = run_ranks(size, train, tmp_path, name, more)
    check(results, alone(name, more.get("lengths", LENGTHS)))
    rows = [counts for *_, counts in results]
    if "lengths" in more:
        assert [0] in rows, "no rank was without rows"
    elif more.get("limit") != 256:
        assert len(rows[0]) > 1, "no step had several micro-batches"


def test_steps_under_fsdp2_are_those_of_each_document_alone(tmp_path):
    """Accelerate takes it on accelerators only; see fsdp_on_cpus."""
    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    more = {"args": {"fsdp": True, "fsdp_config": wrapped}}
    check(run_ranks(3, train, tmp_path, "fine", more), alone("fine"))


def some_tokens(given: Any) -> dict[str, float]:
    return {"tokens": float((given.label_ids != -100).sum())}


def predict(rank: int, size: int, folder: Any) -> Any:
    found = []
    for metrics in (None, some_tokens):
        trainer = make(size, folder, focal, limit=40, compute_metrics=metrics)
        found.append(trainer.evaluate())
    return found, trainer.predict(trainer.eval_dataset).predictions


def test_predictions_are_those_of_the_model_beside_the_functions_loss(tmp_path):
    model, dataset = build().eval(), items(VALIDATION, 1)
    for (plain, both), predictions in run_ranks(2, predict, tmp_path):
        assert both["eval_loss"] == pytest.approx(plain["eval_loss"], abs=1e-12)
        assert both["eval_tokens"] == sum(int((d["labels"][1:] != -100).sum()) for d in dataset)
        for i, sample in enumerate(dataset):
            logits = model(sample["input_ids"][None]).logits[0].detach()
            assert predictions[i, : len(logits)] == pytest.approx(logits.numpy(), abs=1e-10)


def cross_entropy(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def balance(rank: int, size: int, folder: Any) -> list[list[float]]:
    """Losses with a coefficient of routers, of hcp's cross entropy and of the same function."""
    found = []
    for function, coefficient in ((None, 0.5), (cross_entropy, 0.5), (cross_entropy, 0.0)):
        model = architectures.build("qwen3_moe")
        trainer = make(
            size, folder, function, model=model, limit=40, router_aux_loss_coef=coefficient
        )
        trainer.train()
        found.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
    return found


def test_the_loss_of_routers_is_added(tmp_path):
    for plain, own, without in run_ranks(2, balance, tmp_path):
        assert own == pytest.approx(plain, abs=1e-5)
        assert min(a - b for a, b in zip(own, without, strict=True)) > 0.1


# ---- refused -------------------------------------------------------------------------------------


def a_mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def mean_and_sum(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    share = cross_entropy(outputs, labels, num_items_in_batch)
    return share + 1e-2 * a_mean(outputs, labels)


def of_all_rows(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    z = outputs.logits.logsumexp(-1).square().sum() / num_items_in_batch
    return cross_entropy(outputs, labels, num_items_in_batch) + 1e-2 * z


def weighted_by_the_others(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses.square() / losses.max()).sum() / num_items_in_batch


def without_the_shift(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    losses = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return losses / num_items_in_batch


def weighted_by_place(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * torch.linspace(0.5, 1.5, len(losses))).sum() / num_items_in_batch


def weighted_by_the_row_before(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    losses = F.cross_entropy(logits, targets, reduction="none")
    weights = logits.detach().logsumexp(-1).roll(1).sigmoid()
    return (losses * weights).sum() / num_items_in_batch


def times_rows(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return cross_entropy(outputs, labels, num_items_in_batch) * labels.numel()


def without_the_first_row(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs.logits[:, 1:-1].flatten(0, 1), labels[:, 2:].flatten()
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def detached(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return cross_entropy(outputs, labels, num_items_in_batch).detach()


def one_of_each_row(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets, reduction="none")


HALVES = r"with num_items_in_batch=\d+ and .* with \d+, expected .*: a rank has a part of the"
ADDS = r"for labels of this rank, and .* for two parts of them, .* expected parts that add up"
MOVED = r"for some labels of this rank, and .* for their rows alone in the reverse order, expected"
REFUSED = [
    (a_mean, HALVES),
    (mean_and_sum, HALVES),
    (of_all_rows, ADDS),
    (weighted_by_the_others, ADDS),
    (without_the_shift, r"if labels\[0, 0\] is one, too, expected the same: pair outputs\.logits"),
    (weighted_by_place, MOVED),
    (weighted_by_the_row_before, MOVED),
    (times_rows, MOVED),
    (without_the_first_row, MOVED),
    (detached, "returns a loss without a gradient, expected one that is computed of outputs"),
    (one_of_each_row, r"compute_loss_func returns \(\d+,\), expected a tensor of one floating"),
    (lambda *_, num_items_in_batch: 0.0, "compute_loss_func returns float, expected a tensor of"),
]


def weigh(item: Any) -> Any:
    tokens = item["input_ids"]
    return {"input_ids": tokens, "labels": tokens, "loss_mask": torch.full((len(tokens),), 0.5)}


def refuse(rank: int, size: int, folder: Any) -> None:
    for function, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make(size, folder, function, limit=128).train()
    for function, message in REFUSED[:9]:
        with pytest.raises(ValueError, match=message):
            make(size, folder, function, limit=128).evaluate()
    trainer = make(size, folder, detached, limit=128)
    trainer.evaluate()  # without gradients, so that it is not refused
    with pytest.raises(ValueError, match="returns a loss without a gradient"):
        trainer.train()
    linear = r"linear_cross_entropy is True with compute_loss_func, expected False: a loss func"
    with pytest.raises(ValueError, match=linear):
        make(size, folder, focal, linear_cross_entropy=True)
    trainer = make(size, folder, None, limit=128, linear_cross_entropy=True)
    trainer.compute_loss_func = focal  # as trainers do that derive from this one
    for use in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=linear):
            use()
    for use in ("train", "evaluate"):
        trainer = make(size, folder, focal, limit=128, to_sample=weigh)
        with pytest.raises(ValueError, match=r"loss_mask has 0\.5 with compute_loss_func"):
            getattr(trainer, use)()


def test_a_function_whose_loss_depends_on_the_plan_is_refused(tmp_path):
    run_ranks(1, refuse, tmp_path)


# ---- the rows that a function sees ---------------------------------------------------------------


def seen_by_rank(lengths: tuple[int, ...], ranks: int, items: int) -> list[Any]:
    """What a function gets on each rank of the first micro-batch: (logits, labels, count)."""
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=8, max_degree=1)
    rows = [torch.arange(n) for n in lengths]
    samples = [{"input_ids": x, "labels": x + 1, "loss_mask": x != 2} for x in rows]
    seen: dict[int, Any] = {}

    def work(groups: Any) -> None:
        rank = groups.transport.rank

        def function(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
            seen.setdefault(rank, (outputs.logits, labels, num_items_in_batch))
            return cross_entropy(outputs, labels, num_items_in_batch)

        mine = samples if rank == 0 else []
        ((cp, local),) = hcp.dispatch(plan, mine, [0] * len(lengths), groups)
        logits = F.one_hot(cp.at_least_one_row(local.input_ids), 16).double()[None]
        LossFunction(function)(cp, local, SimpleNamespace(logits=logits.requires_grad_()), items)

    hcp.loopback(ranks, work)
    return [seen[rank] for rank in range(ranks)]


def test_the_usual_shift_pairs_each_row_with_its_target():
    ((logits, labels, count),) = seen_by_rank((5,), 1, 7)
    assert logits.shape == (1, 6, 16)
    assert labels.tolist() == [[-100, 1, 2, -100, 4, 5]]
    assert logits[0, :-1].argmax(-1).tolist() == [0, 1, 2, 3, 4]
    assert logits[0, -1].abs().max() == 0
    assert (count.item(), count.dtype) == (7, torch.int64)


def test_a_rank_without_rows_gets_one_without_a_label():
    _, (logits, labels, _) = seen_by_rank((5,), 2, 7)
    assert logits.shape == (1, 2, 16)
    assert labels.tolist() == [[-100, -100]]
