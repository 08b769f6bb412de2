"""Losses and counts of Transformers' experts: those of each document alone, whatever the plan.

The reference is the model without hcp, one document at a time, with its own function for the loss
of its routers.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from support.finetuning import as_torchrun, documents
from support.ranks import run_ranks
from support.trees import Tree

import hcp

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

from support import architectures
from support.sweep import difference, gradients, summed

LENGTHS = (1, 33, 21, 34, 2, 9)
COEF = 0.05
POOLED = ["mixtral", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss"]
BY_LAYER = ["deepseek_v3", "glm4_moe"]
PLANS = {
    "one rank": dict(ranks=1, max_tokens_per_rank=128),
    "one rank, several micro-batches": dict(ranks=1, max_tokens_per_rank=36),
    "dynamic": dict(ranks=4, max_tokens_per_rank=12),
    "degree 3 of 3": dict(ranks=3, max_tokens_per_rank=40, min_degree=3),
    "padding": dict(ranks=4, max_tokens_per_rank=16, alignment=8),
    "ranks without rows": dict(ranks=8, max_tokens_per_rank=64, max_degree=1),
}


def built(kind: str) -> Any:
    """Build a small model in float64, whose routers have biases where they have room for them."""
    model: Any = architectures.build(kind).double().train()
    model.set_experts_implementation("eager")  # the other has no float64
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            bias.copy_(torch.linspace(-0.3, 0.3, len(bias)))
    return model


class _Wide:
    """Stands in for torch in a module of Transformers, which rounds to float32 in many places."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def wide(monkeypatch):
    """Make what models compute in float32 float64."""

    def widen(model: Any) -> None:
        for name in {type(module).__module__ for module in model.modules()}:
            if name.startswith("transformers.models."):
                monkeypatch.setattr(sys.modules[name], "torch", _Wide())

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return widen


def own_loss(model: Any, logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The model's own loss of its routers for all rows of `logits`."""
    module = sys.modules[type(model).__module__]
    config = model.config
    if hasattr(module, "load_balancing_loss_func"):
        return module.load_balancing_loss_func(
            logits, logits[0].shape[-1], config.num_experts_per_tok
        )
    return sum(paper(x, config.num_experts_per_tok) for x in logits)  # type: ignore[return-value]


def paper(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Equations 17 to 20 of DeepSeek-V3's paper, expert by expert."""
    s = logits.sigmoid()
    total = logits.new_zeros(())
    for i in range(s.shape[1]):
        frequency = sum(i in row.topk(k).indices for row in s) * s.shape[1] / (k * len(s))
        total = total + frequency * (s[:, i] / s.sum(1)).mean()
    return total


def alone(model: Any, over: str) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """Loss, gradients, and the rows of each layer's experts, without hcp."""
    chosen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("router"):
            keep = chosen.setdefault(name, [])
            module.register_forward_hook(lambda m, given, out, keep=keep: keep.append(out[2]))
    total, each = torch.zeros((), dtype=torch.float64), []
    for document in documents(LENGTHS):
        ids = document["input_ids"][None]
        out = model(ids, use_cache=False, output_router_logits=True)
        total = total + torch.nn.functional.cross_entropy(
            out.logits[0, :-1], ids[0, 1:], reduction="sum"
        )
        each.append(tuple(x.flatten(0, -2) for x in out.router_logits))
    total = total / sum(n - 1 for n in LENGTHS)
    if over == "sequence":
        balance = sum(own_loss(model, x) for x in each) / len(LENGTHS)
    else:
        balance = own_loss(model, tuple(torch.cat(x) for x in zip(*each, strict=True)))
    loss = total + COEF * balance
    loss.backward()
    experts = each[0][0].shape[1]
    counts = [torch.cat(x).flatten().bincount(minlength=experts) for x in chosen.values()]
    return loss.item(), gradients(model), torch.stack(counts)


def planned(
    model: Any, options: dict[str, Any], over: str
) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """The same of a plan."""
    from hcp.integrations.transformers import (
        aux_counts,
        causal_lm_loss,
        causal_lm_sample,
        model_inputs,
        record_routers,
        register_hcp_attention,
        router_aux_loss,
        tokens_per_expert,
    )

    register_hcp_attention(model, fused_rope=False)  # the model's own, in its precision
    plan = hcp.plan(LENGTHS, **options)
    ranks, dataset = plan.ranks, [causal_lm_sample(d) for d in documents(LENGTHS)]
    sources = [i % ranks for i in range(len(dataset))]

    def steps(groups: Any) -> Any:
        return hcp.dispatch(plan, dataset[groups.transport.rank :: ranks], sources, groups)

    def count(groups: Any) -> Any:
        own, total = copy.deepcopy(model), 0
        for cp, local in steps(groups):
            with torch.no_grad(), record_routers(own) as routed:
                own(**model_inputs(cp, local))
            total = total + torch.stack([aux_counts(cp, routed), tokens_per_expert(cp, routed)])
        return total

    by_loss, by_router = sum(hcp.loopback(ranks, count))

    def work(groups: Any) -> Any:
        own, total = copy.deepcopy(model), 0.0
        for cp, local in steps(groups):
            if over == "sequence":
                loss = causal_lm_loss(own, cp, local, grad_reduce="sum", router_aux_loss_coef=COEF)
            else:
                with record_routers(own) as routed:
                    loss = causal_lm_loss(own, cp, local, grad_reduce="sum")
                loss = loss + COEF * router_aux_loss(
                    cp, routed, grad_reduce="sum", batch_counts=by_loss
                )
            loss.backward()
            total += loss.item()
        return total, gradients(own)

    results = hcp.loopback(ranks, work)
    return sum(x for x, _ in results), summed([x for _, x in results]), by_router


@pytest.mark.parametrize("over", ["sequence", "batch"])
@pytest.mark.parametrize("kind", POOLED + BY_LAYER)
def test_the_loss_of_routers_is_that_of_each_document_alone_or_of_the_batch(wide, kind, over):
    model = built(kind)
    wide(model)
    loss, grads, counts = alone(copy.deepcopy(model), over)
    for name, options in PLANS.items():
        found, own, rows = planned(copy.deepcopy(model), options, over)
        assert found == pytest.approx(loss, rel=0, abs=1e-10), name
        assert difference(own, grads) < 1e-10, name
        assert torch.equal(rows.long(), counts), name


# ---- trees of texts ------------------------------------------------------------------------------

TREES = (Tree((9, 7, 5, 3, 1, 6, 2), (-1, 0, 0, 1, 1, 3, 0)), Tree((2, 3, 4), (-1, 0, 0)))
"""Of depth 4 and of depth 2."""
PARTS = [4, 3, 5]
"""Of one sequence without branches, whose documents do not see each other."""
TREE_PLANS = {
    "one rank": dict(ranks=1, max_tokens_per_rank=128),
    "several micro-batches": dict(ranks=1, max_tokens_per_rank=34),
    "degree 3 of 4": dict(ranks=4, max_tokens_per_rank=40, min_degree=3, max_degree=3),
    "padding": dict(ranks=2, max_tokens_per_rank=40, min_degree=2, alignment=8),
}


def unshared(model: Any, over: str) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """Loss of routers, gradients, and rows that the loss counts, of each text by itself."""
    forest, plain = drawn_rows()
    sequences = [
        [tokens[text]] for tree, tokens in zip(TREES, forest, strict=True) for text in tree.texts
    ]
    sequences += [list(plain.split(PARTS))]
    each = []
    for documents_of in sequences:
        outs = [model(x[None], use_cache=False, output_router_logits=True) for x in documents_of]
        logits = zip(*(out.router_logits for out in outs), strict=True)
        each.append(tuple(torch.cat([x.flatten(0, -2) for x in layer]) for layer in logits))
    whole = tuple(torch.cat(x) for x in zip(*each, strict=True))
    if over == "sequence":
        loss = sum(own_loss(model, x) for x in each) / len(each)
    else:
        loss = own_loss(model, whole)
    loss.backward()
    experts, k = whole[0].shape[1], model.config.num_experts_per_tok
    counts = [x.topk(k).indices.flatten().bincount(minlength=experts) for x in whole]
    return loss.item(), gradients(model), torch.stack(counts)


def drawn_rows() -> tuple[list[torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    lengths = [tree.length for tree in TREES]
    forest = [torch.randint(1, 60, (n,), generator=draw) for n in lengths]
    return forest, torch.randint(1, 60, (sum(PARTS),), generator=draw)


@pytest.mark.parametrize("over", ["sequence", "batch"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_texts_of_trees_are_to_routers_what_each_is_alone(wide, kind, over):
    from hcp.integrations.transformers import (
        aux_counts,
        model_inputs,
        record_routers,
        register_hcp_attention,
        router_aux_loss,
        tokens_per_expert,
    )

    model = built(kind)
    wide(model)
    loss, grads, counts = unshared(copy.deepcopy(model), over)
    register_hcp_attention(model, fused_rope=False)
    forest, plain = drawn_rows()
    samples = [{"input_ids": x} for x in (*forest, plain)]
    masks = [*(tree.mask for tree in TREES), hcp.Mask.documents(PARTS)]
    lengths = [mask.length for mask in masks]

    def work(groups: Any) -> Any:
        own, total = copy.deepcopy(model), 0.0
        loaded = samples if groups.transport.rank == 0 else []
        rows, computed = 0, 0
        for cp, local in hcp.dispatch(plan, loaded, [0] * len(samples), groups):
            given = counts if over == "batch" else None
            with record_routers(own) as routed:
                own(**model_inputs(cp, local))
            share = router_aux_loss(cp, routed, grad_reduce="sum", batch_counts=given)
            share.backward()
            total += share.item()
            rows, computed = (
                rows + aux_counts(cp, routed),
                computed + tokens_per_expert(cp, routed),
            )
        return total, gradients(own), rows, computed

    for name, options in TREE_PLANS.items():
        plan = hcp.plan(lengths, masks=masks, **options)
        results = hcp.loopback(plan.ranks, work)
        totals, found, rows, computed = zip(*results, strict=True)
        assert sum(totals) == pytest.approx(loss, rel=0, abs=1e-10), name
        assert difference(summed(list(found)), grads) < 1e-10, name
        assert torch.equal(sum(rows).long(), counts), name
        assert int(sum(computed).sum()) == int(counts.sum()), name


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("llama", "LlamaForCausalLM has no routers that return .* router_aux_loss_coef=0.0"),
        ("deepseek_v2", "neither load_balancing_loss_func nor e_score_correction_bias"),
    ],
)
def test_models_whose_routers_loss_is_not_known_are_refused(kind, message):
    from hcp.integrations.transformers import record_routers

    with pytest.raises(ValueError, match=message), record_routers(architectures.build(kind)):
        pass


def shares(groups: Any, model: Any, grad_reduce: str) -> Any:
    """This rank's share of the loss of the routers, and its gradients."""
    from hcp.integrations.transformers import (
        causal_lm_loss,
        causal_lm_sample,
        record_routers,
        register_hcp_attention,
        router_aux_loss,
    )

    own, total = copy.deepcopy(model), 0.0
    register_hcp_attention(own)
    plan = hcp.plan(LENGTHS, ranks=2, max_tokens_per_rank=60, min_degree=2)
    samples = [causal_lm_sample(d) for d in documents(LENGTHS)][groups.transport.rank :: 2]
    for cp, local in hcp.dispatch(plan, samples, [0, 1] * 3, groups):
        with record_routers(own) as routed:
            causal_lm_loss(own, cp, local, grad_reduce="sum")
        with pytest.raises(ValueError, match=r"batch_counts has shape \(4,\), expected \(2, 4\)"):
            router_aux_loss(cp, routed, grad_reduce="sum", batch_counts=torch.ones(4))
        loss = router_aux_loss(cp, routed, grad_reduce=grad_reduce)
        loss.backward()
        total += loss.item()
    return total, gradients(own)


def computed(model: Any, grad_reduce: str) -> Any:
    return hcp.loopback(2, lambda groups: shares(groups, model, grad_reduce))


def test_gradients_that_are_averaged_are_those_that_are_summed():
    model = architectures.build("qwen3_moe")
    sums, means = (computed(model, kind) for kind in ("sum", "mean"))
    assert sum(x for x, _ in means) == pytest.approx(2 * sum(x for x, _ in sums))
    doubled = {name: 2 * x for name, x in summed([x for _, x in sums]).items()}
    assert difference(summed([x for _, x in means]), doubled) < 1e-6


def test_checkpointed_layers_have_the_same_gradients_unless_they_hide_them():
    plain = architectures.build("qwen3_moe").train()
    expected = computed(plain, "sum")[0][1]
    kept = copy.deepcopy(plain)
    kept.gradient_checkpointing_enable({"use_reentrant": False})
    assert difference(computed(kept, "sum")[0][1], expected) < 1e-6
    kept.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r"MoeTopKRouter runs without .* use_reentrant=False"):
        computed(kept, "sum")


def train_with(rank: int, size: int, folder: Any, coefficient: float) -> float:
    import transformers

    from hcp.integrations.transformers import Trainer

    as_torchrun(size)
    options = dict(use_cpu=True, max_steps=1, logging_steps=1, report_to=[], save_strategy="no")
    trainer = Trainer(
        architectures.build("qwen3_moe"),
        transformers.TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=3, disable_tqdm=True, **options
        ),
        train_dataset=[{"input_ids": d["input_ids"].tolist()} for d in documents(LENGTHS)],
        cp=hcp.Config(max_seqlen_per_dp_cp_rank=24),
        router_aux_loss_coef=coefficient,
    )
    return float(trainer.train().training_loss)


def test_the_trainer_adds_the_loss_of_routers_to_that_which_it_logs(tmp_path):
    without, once, twice = (
        run_ranks(2, train_with, tmp_path, coefficient)[0] for coefficient in (0.0, 0.5, 1.0)
    )
    assert once - without > 0.5  # a model of equal loads has its experts per token, 2
    assert twice - without == pytest.approx(2 * (once - without), rel=1e-3)
