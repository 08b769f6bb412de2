"""torchtitan's experts under plans: losses, gradients, counts and biases in float64.

The reference is torchtitan's model with torchtitan's attention, one document at a time.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: make test-trainers", allow_module_level=True)

from support import titan
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

pytestmark = pytest.mark.timeout(600)

FAMILIES = ["qwen3", "deepseek_v3"]
"""Softmax and grouped-query attention; sigmoid, shared experts and latent attention."""
STEPS = 3
STATIC = dict(scheduler="static_cp", context_parallel_size=2)
CASES = [
    pytest.param(1, dict(limit=70), {}, id="several micro-batches"),
    pytest.param(4, dict(limit=40), {}, id="dynamic"),
    pytest.param(4, dict(limit=40, **STATIC), {}, id="static"),
    pytest.param(2, dict(limit=40), {"expert_parallel_degree": 2}, id="EP 2"),
    pytest.param(4, dict(limit=40), {"expert_parallel_degree": 4}, id="EP 4"),
    pytest.param(4, dict(limit=40, **STATIC), {"expert_parallel_degree": 4}, id="EP 4, static"),
    pytest.param(
        4,
        dict(limit=40),
        {"expert_parallel_degree": 4, "tensor_parallel_degree": 2},
        id="EP 4, TP 2 and sequence parallelism",
    ),
]


def spec(family: str) -> Any:
    return titan.experts_spec(family, fused_rope=False)  # the model's own, in its precision


def documents(rows: int) -> list[tuple[Any, Any]]:
    """(tokens, labels) of the documents in the first rows of the loader."""
    config = titan.Loader.Config()
    loader = titan.Loader(config, dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=1)
    found = []
    for i in range(rows):
        tokens, positions, labels = loader.row(i)
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        found += [(tokens[a:b], labels[a:b]) for a, b in itertools.pairwise(starts)]
    return found


@functools.cache
def alone(family: str, rows: int) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Gradients, the rows of each layer's experts and the biases that follow from them, of the
    first step."""
    with titan.in_float64():
        torch.set_default_dtype(torch.float64)
        try:
            return _alone(family, rows)
        finally:
            torch.set_default_dtype(torch.float32)


def _alone(family: str, first: int) -> tuple[dict[str, Any], list[Any], list[Any]]:
    config = spec(family).model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        assert type(layer.attention.rope) in (ComplexRoPE.Config, CosSinRoPE.Config)
    model = config.build()
    titan.draw_weights(model)
    chosen: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if name.endswith("moe.router"):
            keep = chosen.setdefault(name, [])
            module.register_forward_hook(lambda m, given, out, keep=keep: keep.append(out[1]))
    total, labelled = torch.zeros(()), 0
    for tokens, labels in documents(first):
        logits = model(tokens[None], positions=torch.arange(len(tokens))[None])[0]
        total = total + torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=titan.IGNORE, reduction="sum"
        )
        labelled += int((labels != titan.IGNORE).sum())
    (total / labelled).backward()
    counts = [
        torch.cat([x.flatten() for x in each]).bincount(minlength=4) for each in chosen.values()
    ]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return gradients, counts, [_bias(x.double()) for x in counts]


def _bias(counts: Any) -> Any:
    """Loss-free balancing as torchtitan has it: by 1e-3 towards the mean, and without mean."""
    towards = torch.sign(counts.mean() - counts)
    return 1e-3 * (towards - towards.mean())


def first_step(rank: int, size: int, family: str, planner: Any, options: Any) -> Any:
    """Gradients and counts of a first step, the biases after it, and how plans wait."""
    with titan.in_float64():
        run = titan.Run(titan.config_of(planner, spec=spec(family), **options))
        gradients, counts = run.first_gradients(), run.expert_counts()
        run.trainer.optimizers.step()
        found = gradients, counts, run.expert_biases(), run.trainer.planner.sync
        run.close()
    return found


def compared(
    family: str, size: int, planner: Any, options: Any, rows: int = 4, counted: int = 1
) -> None:
    gradients, counts, biases = alone(family, rows)
    results = run_ranks(size, first_step, family, planner, options, timeout=500)
    for by_rank, expected in zip(zip(*(r[1] for r in results), strict=True), counts, strict=True):
        assert torch.equal(sum(by_rank).long(), counted * expected)
    for own, _, moved, sync in results:
        assert own.keys() == gradients.keys()
        for name, gradient in own.items():
            assert (gradient - gradients[name]).abs().max() < 1e-10, name
        for bias, expected in zip(moved, biases, strict=True):
            assert (bias - expected).abs().max() < 1e-9  # torchtitan keeps them in float32
            assert expected.any()
        assert sync == ("micro_batch" if size > 1 else "step")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "planner", "parallelism"), CASES)
def test_gradients_counts_and_biases_are_those_of_each_document_alone(
    family, size, planner, parallelism
):
    plain = {"parallelism": parallelism, "activation_checkpoint": None}
    compared(family, size, titan.options(**planner), plain)


ONE_ROW = {"dataloader": titan.Loader.Config(rows=1)}
"""Of so few documents that some ranks have no rows."""
WHOLE = titan.options(64, "static_cp", context_parallel_size=1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("expert_ranks", [1, 2, 4])
def test_ranks_without_rows_add_nothing(family, expert_ranks):
    assert len(documents(1)) < 4
    parallelism = {"expert_parallel_degree": expert_ranks}
    options = {"parallelism": parallelism, "activation_checkpoint": None, **ONE_ROW}
    compared(family, 4, WHOLE, options, rows=1)


@pytest.mark.parametrize("kind", [FullAC, SelectiveAC])
def test_what_is_recomputed_is_counted_twice_and_so_are_rows_that_stand_in(kind):
    """torchtitan halves the counts."""
    options = {"activation_checkpoint": kind.Config(), **ONE_ROW}
    compared("deepseek_v3", 4, WHOLE, options, rows=1, counted=2)


def steps(rank: int, size: int, family: str, planner: Any, options: Any) -> Any:
    with titan.in_float64():
        run = titan.Run(titan.config_of(planner, spec=spec(family), steps=STEPS, **options))
        run.train()
        found = run.losses, run.expert_biases(), run.weights()
        run.close()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_those_of_one_rank_and_one_micro_batch(family):
    losses, biases, weights = run_ranks(1, steps, family, titan.options(256), {}, timeout=500)[0]
    options = {"parallelism": {"expert_parallel_degree": 2}}
    for found in run_ranks(4, steps, family, titan.options(40), options, timeout=500):
        assert len(losses) == STEPS
        assert found[0] == pytest.approx(losses, rel=0, abs=1e-10)
        for bias, expected in zip(found[1], biases, strict=True):
            assert torch.equal(bias, expected)
            assert expected.any()
        for name, weight in found[2].items():
            assert (weight - weights[name]).abs().max() < 1e-9, name  # by 1e-3, of Adam's ratios
