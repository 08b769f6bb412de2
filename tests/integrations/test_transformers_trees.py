"""Models of Transformers over trees of texts compute what they compute of each text alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.trees import Tree
from torch import Tensor

import hcp
from hcp._words import ScanType

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

from support import architectures
from support.sweep import difference, gradients, summed

TREES = (
    Tree((9, 7, 5, 3, 1, 6, 2), (-1, 0, 0, 1, 1, 3, 0)),
    Tree((5,), (-1,)),
    Tree((2, 3, 4), (-1, 0, 0)),
)
"""Of depth 4, with a part of one token; a text; and a prompt shorter than a convolution."""
WINDOWS = ("gemma3_text", "gpt_oss")
RECURRENT = (
    "granitemoehybrid",
    "lfm2",
    "mamba2",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models compute in float64 where they ask for float32."""
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def model_of(kind: str) -> Any:
    model: Any = architectures.build(kind)
    assert model is not None
    model.set_experts_implementation("eager")  # the grouped one has no float64
    return model.double()


def drawn() -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of each tree, and what their logits are multiplied by in the loss."""
    r = torch.Generator().manual_seed(3)
    tokens = [torch.randint(1, 64, (tree.length,), generator=r) for tree in TREES]
    weights = [torch.randn(tree.length, 64, generator=r, dtype=torch.float64) for tree in TREES]
    return tokens, weights


def each_text(model: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits and gradients, each text by itself. A shared token counts once."""
    found = []
    for tree, tokens, weights in zip(TREES, *drawn(), strict=True):
        logits = torch.full_like(weights, torch.nan)
        for text, first in zip(tree.texts, tree.firsts, strict=True):
            out = model(tokens[None, text], use_cache=False).logits[0]
            (out[first] * weights[text][first]).sum().backward()
            logits[text] = out.detach()
        found.append(logits)
    return found, gradients(model)


def check(kind: str, plan: hcp.Plan, scan_type: ScanType) -> None:
    from hcp.integrations.transformers import model_inputs, register_hcp_attention

    model = model_of(kind)
    expected, grads = each_text(model)
    model.zero_grad()
    register_hcp_attention(model)
    samples = [
        {"input_ids": tokens, "weights": weights, "expected": logits}
        for tokens, weights, logits in zip(*drawn(), expected, strict=True)
    ]

    def work(groups: Any) -> tuple[float, dict[str, Tensor]]:
        own, apart = copy.deepcopy(model), 0.0
        loaded = samples if groups.transport.rank == 0 else []
        step = hcp.dispatch(plan, loaded, [0] * len(samples), groups, scan_type=scan_type)
        for cp, local in step:
            logits = own(**model_inputs(cp, local)).logits[0, : cp.rows]
            (logits * local.weights).sum().backward()
            if cp.rows:
                apart = max(apart, float((logits.detach() - local.expected).abs().max()))
        return apart, gradients(own)

    results = hcp.loopback(plan.ranks, work)
    largest = max(float(x.abs().max()) for x in expected)
    assert max(apart for apart, _ in results) < 1e-10 * largest
    assert difference(summed([own for _, own in results]), grads) < 1e-10


def plan_of(degree: int) -> hcp.Plan:
    return hcp.plan(
        [tree.length for tree in TREES],
        masks=[tree.mask for tree in TREES],
        ranks=degree,
        min_degree=degree,
        max_tokens_per_rank=64 // degree,
    )


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("kind", [*RECURRENT, *WINDOWS])
def test_texts_of_trees_are_what_each_is_alone(kind: str, degree: int, wide: None) -> None:
    check(kind, plan_of(degree), "auto")


@pytest.mark.parametrize("scan_type", ["pass_states", "sequence_to_head"])
@pytest.mark.parametrize("kind", ["granitemoehybrid", "qwen3_next"])
def test_either_way_between_ranks_follows_texts(kind: str, scan_type: ScanType, wide: None) -> None:
    check(kind, plan_of(2), scan_type)
