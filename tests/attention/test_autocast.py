"""Attention under torch.autocast has the dtypes and results of PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.autocast import DTYPES, HALF, HEADS, SINGLE, Call, across, compare, module, own
from support.cases import NAMES
from torch import Tensor

import hcp
from hcp.megatron_style.core_attention import CoreAttention


def core(cp: hcp.ContextParallelHandler, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = cp.core_attn(attn_mod=CoreAttention(), query=q, key=k, value=v)
    return out.unflatten(1, (HEADS["query"], -1))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("call", [own, across, core, module], ids=lambda call: call.__name__)
def test_attention_under_autocast_is_that_of_pytorch(
    call: Call, dtypes: tuple[torch.dtype, ...]
) -> None:
    for degree, comm_type in ((1, "p2p"), (3, "p2p"), (2, "a2a")):
        hcp.loopback(degree, lambda groups, c=comm_type: compare(groups, call, dtypes, c))  # type: ignore[misc]


def test_what_autocast_narrows_is_rotated_before() -> None:
    """Rotate as a layer does by itself: in float32, rounded once."""

    def check(groups: Any) -> None:
        plan = hcp.plan([13], ranks=2, max_tokens_per_rank=32, min_degree=2)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        q, k, v = (torch.randn(cp.rows, HEADS[name], 8) for name in NAMES[:3])
        rotary = cp.rotary(torch.randn(13, 8))
        with torch.autocast("cpu", HALF):
            fused = cp.attention(q, k, v, rotary_pos_emb=rotary)
            turned = [cp.apply_rotary_pos_emb(x, rotary) for x in (q, k)]
            assert torch.equal(fused, cp.attention(*turned, v))

    hcp.loopback(2, check)


def test_without_autocast_dtypes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"value has dtype torch.bfloat16, expected torch.float32"):
        hcp.loopback(1, lambda g: call_with(g, SINGLE, SINGLE, HALF))


def call_with(groups: Any, *dtypes: torch.dtype) -> Tensor:
    plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
    cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
    return own(
        cp, *(torch.zeros(5, HEADS[n], 8, dtype=d) for n, d in zip(NAMES, dtypes, strict=False))
    )


def test_a_compiled_layer_casts_too() -> None:
    def check(groups: Any) -> None:
        plan = hcp.plan([13], ranks=1, max_tokens_per_rank=32)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        freqs = torch.randn(13, 8)

        def layer(q: Tensor, k: Tensor, v: Tensor, cp: hcp.ContextParallelHandler) -> Tensor:
            return cp.attention(q, k, v) + cp.attention(q, k, v, rotary_pos_emb=freqs)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        q, k, v = (torch.randn(13, HEADS[name], 8) for name in NAMES[:3])
        for value in (v, v.to(HALF)):
            with torch.autocast("cpu", HALF):
                out = compiled(q, k, value, cp)
                assert out.dtype == HALF
                assert (out - layer(q, k, value, cp)).abs().max() < 0.05
        assert compiled(q, k, v, cp).dtype == SINGLE

    hcp.loopback(1, check)
