"""Models of Transformers on ranks of which some have no rows equal themselves on one rank."""

from __future__ import annotations

import copy
from importlib import metadata
from typing import Any

import pytest
import torch

import hcp

pytest.importorskip("transformers")

from support import architectures
from support.sweep import difference, summed
from support.zero_rows import PLANS, on_one_rank

from hcp._words import ScanType
from hcp.integrations.transformers import (
    causal_lm_loss,
    register_hcp_attention,
)

OLD = tuple(map(int, metadata.version("transformers").split(".")[:2])) < (5, 23)
KINDS = {
    "attention": "gpt_oss",
    "latent attention": "deepseek_v3",
    "chosen keys": "deepseek_v32",
    "short convolutions": "lfm2",
    "Mamba-2": "bamba",
    "the gated delta rule": "qwen3_next",
    "a delta rule of each key": "kimi_linear",
}
STEPS = ("one rank outside", "all but one of a group", "some of a group, and ranks outside")


def on_ranks(model: Any, plan: dict[str, Any], scan: ScanType) -> list[dict[str, torch.Tensor]]:
    """The gradients that each rank has of its share of the mean loss."""
    made = hcp.Plan.from_dict(plan)

    def work(groups: Any) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model)
        rows = [torch.arange(n) for n in made.lengths]
        samples = [{"input_ids": x, "labels": x + 9, "loss_mask": torch.ones(len(x))} for x in rows]
        mine = samples if groups.transport.rank == 0 else []
        ((cp, local),) = hcp.dispatch(made, mine, [0] * len(samples), groups, scan_type=scan)
        causal_lm_loss(own, cp, local, grad_reduce="sum").backward()
        return {n: p.grad for n, p in own.named_parameters() if p.grad is not None}

    return hcp.loopback(made.ranks, work)


@pytest.mark.parametrize("scan", ["pass_states", "sequence_to_head"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_every_parameter_its_gradient_on_every_rank(
    kind: str, scan: ScanType
) -> None:
    model = architectures.build(KINDS[kind])
    if model is None or (OLD and KINDS[kind] in ("deepseek_v32", "kimi_linear")):
        pytest.skip("the installed Transformers has no such model, or computes it otherwise")
    torch.manual_seed(3)
    model.set_experts_implementation("eager")
    register_hcp_attention(model)
    for step in STEPS:
        (want,) = on_ranks(model, on_one_rank(PLANS[step]), scan)
        shares = on_ranks(model, PLANS[step], scan)
        experts = {name for name in want if ".experts." in name}  # of the tokens of a rank
        for rank, share in enumerate(shares):
            assert want.keys() - experts <= share.keys(), f"rank {rank} of {step}"
        whole = [
            {n: share.get(n, torch.zeros_like(g)) for n, g in want.items()} for share in shares
        ]
        assert difference(summed(whole), want) < 1e-5, step
