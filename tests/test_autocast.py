"""Under torch.autocast attention takes and gives what PyTorch's own takes and gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import NAMES, sequences_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import hcp
from hcp.megatron_style.core_attention import CoreAttention

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
LENGTHS = 13, 6
HEADS = {"query": 4, "key": 2, "value": 2}
DTYPES = {
    "all float32": (SINGLE, SINGLE, SINGLE),
    "rotated in float32": (SINGLE, SINGLE, HALF),
    "all bfloat16": (HALF, HALF, HALF),
    "all float64": (DOUBLE, DOUBLE, DOUBLE),
}
Call = Any


def sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool = True) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out[0].transpose(0, 1)


def own(cp: hcp.ContextParallelHandler, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cp.attention(q, k, v)


def across(cp: hcp.ContextParallelHandler, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cp.cross_attention(q, k, v, cp, causal=True)  # type: ignore[return-value]


def core(cp: hcp.ContextParallelHandler, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = cp.core_attn(attn_mod=CoreAttention(), query=q, key=k, value=v)
    return out.unflatten(1, (HEADS["query"], -1))


def module(cp: hcp.ContextParallelHandler, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A module that sees whole sequences, in the dtypes that were given."""
    given = q.dtype, k.dtype, v.dtype

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        assert (q.dtype, k.dtype, v.dtype) == given
        sizes = cp.whole_cu_seqlens.diff().tolist()
        parts = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
        return torch.cat([sdpa(*part) for part in parts]).flatten(1)

    out = cp.core_attn(attn_mod=attend, query=q, key=k, value=v)
    return out.unflatten(1, (HEADS["query"], -1))


def samples_of(dtypes: tuple[torch.dtype, ...]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            name: torch.randn(n, HEADS[name], 8, generator=generator).to(dtype)
            for name, dtype in zip(NAMES, dtypes, strict=False)
        }
        for n in LENGTHS
    ]


def compare(groups: Any, call: Call, dtypes: tuple[torch.dtype, ...], comm_type: str) -> None:
    device = groups.transport.device
    samples, rank = samples_of(dtypes), groups.transport.rank
    samples = [{name: x.to(device) for name, x in sample.items()} for sample in samples]
    degree = groups.transport.size
    plan = hcp.plan(LENGTHS, ranks=degree, max_tokens_per_rank=32, min_degree=degree)
    given = samples if rank == 0 else []
    ((cp, local),) = hcp.dispatch(plan, given, [0] * 2, groups, comm_types=[comm_type])
    leaves = [local[name].clone().requires_grad_() for name in NAMES[:3]]
    whole = [{name: x.requires_grad_() for name, x in sample.items()} for sample in samples]
    with torch.autocast(device.type, HALF):
        out = call(cp, *leaves)
        order = sequences_of(plan, 0) if rank == 0 else []
        wanted = [sdpa(*whole[s].values()) for s in sorted(order)]
    assert out.dtype == (DOUBLE if DOUBLE in dtypes else HALF)
    out.sum().backward()
    back = cp.combine(out.detach())
    grads = [cp.combine(x.grad) for x in leaves]
    assert [x.grad.dtype for x in leaves] == list(dtypes)
    if rank == 0:
        assert wanted[0].dtype == out.dtype
        torch.cat(wanted).sum().backward()
        assert (back - torch.cat(wanted)).abs().max() < 0.02
        for name, grad in zip(NAMES, grads, strict=False):
            assert (grad - torch.cat([sample[name].grad for sample in whole])).abs().max() < 0.1


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("call", [own, across, core, module], ids=lambda call: call.__name__)
def test_attention_under_autocast_is_that_of_pytorch(
    call: Call, dtypes: tuple[torch.dtype, ...]
) -> None:
    for degree, comm_type in ((1, "p2p"), (3, "p2p"), (2, "a2a")):
        hcp.loopback(degree, lambda groups, c=comm_type: compare(groups, call, dtypes, c))  # type: ignore[misc]


def test_what_autocast_narrows_is_rotated_before() -> None:
    """As a layer does that rotates by itself: in float32, rounded once."""

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
