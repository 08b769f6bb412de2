"""Attention under torch.autocast, compared with PyTorch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import hcp
from hcp._words import CommType
from support.cases import NAMES, grad_of, sequences_of

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


def module(cp: hcp.ContextParallelHandler, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call cp.core_attn with a module that sees whole sequences and checks their dtypes."""
    given = q.dtype, k.dtype, v.dtype

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        assert (q.dtype, k.dtype, v.dtype) == given
        sizes = cp.whole.cu_seqlens.diff().tolist()
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


def compare(groups: Any, call: Call, dtypes: tuple[torch.dtype, ...], comm_type: CommType) -> None:
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
        parts = [whole[s] for s in sorted(order)]
        wanted = [sdpa(x["query"], x["key"], x["value"]) for x in parts]
    assert out.dtype == (DOUBLE if DOUBLE in dtypes else HALF)
    out.sum().backward()
    back = cp.combine(out.detach())
    given_back = [grad_of(x) for x in leaves]
    grads = [cp.combine(x) for x in given_back]
    assert [x.dtype for x in given_back] == list(dtypes)
    if rank == 0:
        assert wanted[0].dtype == out.dtype
        torch.cat(wanted).sum().backward()
        assert (back - torch.cat(wanted)).abs().max() < 0.02
        for name, grad in zip(NAMES, grads, strict=False):
            assert (grad - torch.cat([grad_of(sample[name]) for sample in whole])).abs().max() < 0.1
