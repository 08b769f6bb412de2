"""Rotation in hcp's attention for the models of trainers, on one GPU: equal to their own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import hcp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS = (210, 5, 120, 1, 33)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": SMALL,
    "cohere2": SMALL | {"head_dim": 32, "sliding_window": 64},
    "glm": SMALL | {"head_dim": 32, "partial_rotary_factor": 0.5},
    "youtu": SMALL
    | {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
    },
}
KERNEL = {"youtu"}
"""Models of latent attention, rotated before it."""


# ---- Transformers --------------------------------------------------------------------------------


def fused_and_unfused(kind: str, dtype: torch.dtype) -> list[Any]:
    transformers = pytest.importorskip("transformers")
    from hcp.integrations.transformers import register_hcp_attention
    from hcp.integrations.transformers.transformers_rotary import rotator_of

    torch.manual_seed(7)
    config = transformers.CONFIG_MAPPING[kind](**MODELS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    models = [copy.deepcopy(model).to("cuda", dtype).eval() for _ in range(2)]
    for made, fused_rope in zip(models, (True, False), strict=True):
        register_hcp_attention(made, fused_rope=fused_rope)
        by_hcp = "kernel" if kind in KERNEL else "attention"
        assert rotator_of(made) == (by_hcp if fused_rope else "model")
    return models


def computed(model: Any, ranks: int) -> list[Tensor]:
    """Logits of each micro-batch on each rank, then all gradients."""
    from hcp.integrations.transformers import causal_lm_loss, causal_lm_sample, model_inputs

    drawn = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, 64, (n,), generator=drawn) for n in LENGTHS]
    samples = [causal_lm_sample({"input_ids": each}) for each in tokens]
    plan = hcp.plan(LENGTHS, ranks=ranks, max_tokens_per_rank=400, min_degree=ranks)
    sources = [i % ranks for i in range(len(samples))]

    def work(groups: Any) -> tuple[list[Tensor], list[Tensor]]:
        own, logits = copy.deepcopy(model), []
        moved = [
            {name: column.cuda() for name, column in sample.items()}
            for sample in samples[groups.transport.rank :: ranks]
        ]
        for cp, local in hcp.dispatch(plan, moved, sources, groups):
            with torch.no_grad():
                logits.append(own(**model_inputs(cp, local)).logits[0, : cp.rows])
            causal_lm_loss(own, cp, local, grad_reduce="sum").backward()
        return logits, [p.grad for p in own.parameters()]

    results = hcp.loopback(ranks, work, device="cuda")
    grads = [torch.stack(each).sum(0) for each in zip(*(g for _, g in results), strict=True)]
    return [*(rows for logits, _ in results for rows in logits), *grads]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers_compute_the_same_fused_and_unfused(kind: str, ranks: int) -> None:
    bound = 1e-5 if kind == "cohere2" else 1e-10  # it rotates in float32 whatever it is given
    found, expected = (computed(m, ranks) for m in fused_and_unfused(kind, torch.float64))
    for one, other in zip(found, expected, strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=bound * scale)


@pytest.mark.parametrize("kind", MODELS)
def test_fused_models_in_bfloat16_are_as_near_to_float64_as_unfused_ones(kind: str) -> None:
    exact = computed(fused_and_unfused(kind, torch.float64)[1], 2)
    fused, unfused = (computed(m, 2) for m in fused_and_unfused(kind, torch.bfloat16))

    def off(found: list[Tensor]) -> float:
        pairs = zip(found, exact, strict=True)
        return math.sqrt(sum(float((a.double() - b).square().sum()) for a, b in pairs))

    assert off(fused) < 1.2 * off(unfused)


# ---- latent attention of Megatron's --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(128, 64, 128), (8, 4, 12), (6, 10, 7)])
def test_scores_of_latent_attention_are_megatrons(
    dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.models.common.embeddings import rope_utils

    from hcp.attention.rotary import Rotary, rotary_of
    from hcp.integrations.megatron.megatron_rotary import LatentRotary, _fused_functions

    passed, rotated, value = sizes
    rows, heads, generator = 50, 3, torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to("cuda", dtype)

    query, key_value = draw(rows, heads, passed + rotated), draw(rows, heads, passed + value)
    shared = draw(rows, 5 + rotated)[:, 5:][:, None]  # cut out of wider rows
    angles = torch.outer(torch.arange(rows), torch.rand(rotated // 2, generator=generator)).cuda()
    own = rotary_of(angles.repeat_interleave(2, 1), interleaved=True, mscale=1.3)
    still = own.cos.new_ones(rows, passed)
    whole = Rotary(torch.cat([still, own.cos], 1), torch.cat([0 * still, own.sin], 1), True)
    functions = _fused_functions(LatentRotary(whole, own))
    found_query = functions["fused_apply_mla_rope_for_q"](query, None, None, *sizes)
    found_key, found_value = functions["fused_apply_mla_rope_for_kv"](
        key_value, shared, None, None, rotated, passed, value
    )

    def theirs(t: Tensor) -> Tensor:
        table = torch.cat([angles, angles], 1)[:, None, None]
        options: dict[str, Any] = {"multi_latent_attention": True, "mscale": 1.3}
        turned: Tensor = rope_utils._apply_rotary_pos_emb_bshd(t[:, None], table, **options)
        return turned[:, 0]

    query, key_value, shared = query.double(), key_value.double(), shared.double()
    own_query = torch.cat([query[..., :passed], theirs(query[..., passed:])], -1)
    own_key = torch.cat([key_value[..., :passed], theirs(shared).expand(-1, heads, -1)], -1)
    scores, expected = (
        torch.einsum("qhd,khd->hqk", q.double(), k.double())
        for q, k in ((found_query, found_key), (own_query, own_key))
    )
    bound = 1e-10 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(scores, expected, rtol=0, atol=bound * float(expected.abs().max()))
    assert torch.equal(found_value, key_value[..., passed:].to(dtype))
