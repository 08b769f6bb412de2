"""Compare attention that rotates with rotating first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hcp
from hcp.attention import rotary as rope
from support.cases import grad_of

LENGTHS = (37, 5, 20, 1)


def inputs(cp: hcp.ContextParallelHandler, size: int = 8) -> list[Tensor]:
    """Draw queries, keys, values of another head size, and a gradient."""
    shapes = (4, size), (2, size), (2, 6), (4, 6)
    return [torch.randn(cp.rows, *s, dtype=torch.float64, device=cp.device) for s in shapes]


def handlers(groups: Any, comm_type: Any) -> list[hcp.ContextParallelHandler]:
    size = groups.transport.size
    plan = hcp.plan(LENGTHS, ranks=size, max_tokens_per_rank=max(22, -(-63 // size)))
    levels = (2, 2) if comm_type == "a2a+p2p" else ()
    return [
        hcp.ContextParallelHandler(
            plan,
            m,
            groups.transport,
            comm_types=[comm_type],
            hierarchical_context_parallel_sizes=levels,
        )
        for m in range(len(plan.micro_batches))
    ]


def gradients(call: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    out = call(*own)
    out.backward(grad)
    return [out.detach(), *map(grad_of, own)]


def difference(results: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(results, wanted, strict=True)
    return max(float((a - b).abs().max()) if b.numel() else 0.0 for a, b in pairs)


def error(
    groups: Any,
    comm_type: str,
    turned: int,
    interleaved: bool,
    options: Any,
    checkpointed: bool = True,
) -> float:
    """Return the error against PyTorch's own operators and attention without rotation, also under
    checkpointing."""
    worst = 0.0
    for cp in handlers(groups, comm_type):
        *leaves, grad = inputs(cp)
        freqs = torch.randn(64, turned, dtype=torch.float64, device=cp.device)
        rotary = cp.rotary(freqs, interleaved=interleaved, mscale=1.2)

        def apart(q: Tensor, k: Tensor, v: Tensor, cp: Any = cp, rotary: Any = rotary) -> Tensor:
            q, k = (rope.rotate_by_torch(x, rotary) for x in (q, k))
            return cp.attention(q, k, v, **options)

        def fused(q: Tensor, k: Tensor, v: Tensor, cp: Any = cp, rotary: Any = rotary) -> Tensor:
            return cp.attention(q, k, v, rotary_pos_emb=rotary, **options)

        def again(*qkv: Tensor, fused: Any = fused) -> Tensor:
            return checkpoint(fused, *qkv, use_reentrant=False)

        wanted = gradients(apart, leaves, grad)
        for call in (fused, again)[: 1 + checkpointed]:
            worst = max(worst, difference(gradients(call, leaves, grad), wanted))
    return worst
