"""Models of Transformers whose indexer chooses keys (DSA) equal themselves on one rank."""

from __future__ import annotations

import copy
from importlib import metadata
from typing import Any

import pytest
import torch

import hcp

pytest.importorskip("transformers")

from support import architectures
from support.sweep import difference, gradients, summed

from hcp.integrations.transformers import (
    causal_lm_loss,
    causal_lm_sample,
    register_hcp_attention,
)
from hcp.integrations.transformers.transformers_rotary import rotator_of

LENGTHS = (21, 5, 40)
pytestmark = pytest.mark.skipif(
    tuple(map(int, metadata.version("transformers").split(".")[:2])) < (5, 23),
    reason="its indexers compute otherwise",
)


def texts() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(4)
    return [torch.randint(16, 64, (n,), generator=drawn) for n in LENGTHS]


def built(kind: str) -> Any:
    """A layer chooses 6 of up to 40 keys."""
    torch.manual_seed(2)
    model = architectures.build(kind).double()
    model.set_experts_implementation("eager")  # the others have no float64
    assert model.config.index_topk == 6
    return model


def on_ranks(model: Any, ranks: int) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of the mean loss, summed over ranks, and the bytes that ranks sent."""
    plan = hcp.plan(LENGTHS, ranks=ranks, max_tokens_per_rank=80, min_degree=ranks)

    def work(groups: Any) -> tuple[dict[str, torch.Tensor], int]:
        own, rank = copy.deepcopy(model), groups.transport.rank
        samples = [causal_lm_sample({"input_ids": ids}) for ids in texts()]
        sources = [i % ranks for i in range(len(samples))]
        step = hcp.dispatch(plan, samples[rank::ranks], sources, groups)
        before = groups.transport.bytes_sent
        for cp, local in step:
            causal_lm_loss(own, cp, local, grad_reduce="sum").backward()
        return gradients(own), groups.transport.bytes_sent - before

    found = hcp.loopback(ranks, work)
    return summed([grads for grads, _ in found]), sum(sent for _, sent in found)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_chosen_keys_and_gradients_are_those_of_the_model_alone(kind: str) -> None:
    model, total = built(kind), sum(n - 1 for n in LENGTHS)
    for ids in texts():
        loss = model(input_ids=ids[None], labels=ids[None], use_cache=False).loss
        (loss * (len(ids) - 1) / total).backward()
    expected = gradients(model)
    model.zero_grad()
    expanded = copy.deepcopy(model)
    register_hcp_attention(model)
    register_hcp_attention(expanded, send_latents=False)
    assert rotator_of(model) == rotator_of(expanded) == "kernel"  # their indexers, too
    alone, _ = on_ranks(model, 1)
    assert difference(alone, expected) < 1e-5  # its norms, softmax and routers are float32
    spread, sent = on_ranks(model, 3)
    assert difference(spread, alone) < 1e-7
    wide, more = on_ranks(expanded, 3)
    assert difference(wide, alone) < 1e-7
    assert sent < more / 2


def test_masks_are_refused() -> None:
    model = built("deepseek_v32")
    register_hcp_attention(model)
    plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8, masks=[hcp.Mask.full(5)])

    def work(groups: Any) -> None:
        sample = causal_lm_sample({"input_ids": torch.arange(16, 21)})
        ((cp, local),) = hcp.dispatch(plan, [sample], [0], groups)
        causal_lm_loss(model, cp, local, grad_reduce="sum")

    with pytest.raises(ValueError, match=r"sparse\.top_k is called in a plan with the masks"):
        hcp.loopback(1, work)
