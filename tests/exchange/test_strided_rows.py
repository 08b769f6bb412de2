"""Rows that lie in memory in any way give what they give where they are contiguous."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import hcp

LENGTHS = (9, 1, 2)
TYPES = ("p2p", "all_gather", "a2a")


def stepped(x: Tensor, r: Random) -> Tensor:
    """Every other element."""
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1] + 1)[..., 1::2]


def permuted(x: Tensor, r: Random) -> Tensor:
    """Dimensions in another order."""
    order = r.sample(range(x.dim()), x.dim())
    made = x.new_empty([x.shape[i] for i in order])
    return made.permute([order.index(i) for i in range(x.dim())])


def beside(x: Tensor, r: Random) -> Tensor:
    """Columns of wider rows, from no aligned place on."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 5)[..., 2:-3]


def among_heads(x: Tensor, r: Random) -> Tensor:
    """Some heads of more."""
    return x.new_empty(x.shape[0], x.shape[1] + 3, *x.shape[2:])[:, 1:-2]


def odd(x: Tensor, r: Random) -> Tensor:
    """Dimensions of one element, whose strides may be anything."""
    strides = [
        r.choice([0, 3, 8]) if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)
    ]
    return x.new_empty(x.numel() + 1).as_strided(x.shape, strides, 1)


MEMORY = (stepped, permuted, beside, among_heads, odd)


def relaid(x: Tensor, r: Random) -> Tensor:
    return r.choice(MEMORY)(x, r).copy_(x)


class _Relaid(torch.autograd.Function):
    """The same values; their gradient comes in other memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Random) -> Tensor:
        ctx.r = r
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return relaid(grad, ctx.r), None


Cp = hcp.ContextParallelHandler
Call = Callable[..., Tensor]


def rotary_of(cp: Cp, rotated: int) -> Tensor:
    return torch.outer(torch.arange(20), torch.ones(rotated)).double()


def with_keys(call: Call) -> tuple[Callable[[Cp, int], list[tuple[int, ...]]], Call]:
    def shapes(cp: Cp, size: int) -> list[tuple[int, ...]]:
        return [(cp.rows, 4, size), (cp.rows, 2, size), (cp.rows, 2, 1), (cp.rows, 2, 3)]

    def both(cp: Cp, q: Tensor, k: Tensor, one: Tensor, v: Tensor) -> Tensor:
        """With values of one element, and of several."""
        return torch.cat([call(cp, q, k, one), call(cp, q, k, v)], -1)

    return shapes, both


def of_rows(call: Call) -> tuple[Callable[[Cp, int], list[tuple[int, ...]]], Call]:
    return lambda cp, size: [(cp.rows, 4, size)], call


OPERATIONS: dict[str, tuple[Callable[[Cp, int], list[tuple[int, ...]]], Call]] = {
    **{
        f"attention, {name}": with_keys(lambda cp, *x, n=name: cp.attention(*x, comm_type=n))
        for name in TYPES
    },
    "attention that rotates": with_keys(
        lambda cp, q, k, v: cp.attention(q, k, v, rotary_pos_emb=rotary_of(cp, q.shape[2] // 2 * 2))
    ),
    "cross-attention": with_keys(lambda cp, q, k, v: cp.cross_attention(q, k, v, cp)),
    "latent attention": with_keys(
        lambda cp, q, k, v: (
            cp.attention(q, k[:, 0], expand=lambda x: (x[:, None], x[:, None, :1]), comm_type="p2p")
            + v.mean(2, keepdim=True).repeat(1, 2, 1)
        )
    ),
    "combine": of_rows(lambda cp, x: cp.combine(x, dtype=torch.float64)),
    "combine as float32": of_rows(lambda cp, x: cp.combine(x, dtype=torch.float32)),
    "roll": of_rows(lambda cp, x: cp.roll_tensor(x)),
    "halo": of_rows(lambda cp, x: cp.scan.halo(x, 2)),
    "whole sequences": of_rows(lambda cp, x: cp.whole.sequence_to_head(x)),
    "sums by sequence": of_rows(lambda cp, x: cp.sequences.sum(x)),
    "sums over a group": of_rows(lambda cp, x: cp.group.sum(x[:1])),
    "rotary": of_rows(lambda cp, x: cp.apply_rotary_pos_emb(x, rotary_of(cp, x.shape[2] // 2 * 2))),
}


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_may_lie_in_any_memory(name: str, ranks: int, size: int) -> None:
    shapes, call = OPERATIONS[name]

    def check(groups: Any) -> None:
        rank, sources = groups.transport.rank, [i % ranks for i in range(len(LENGTHS))]
        plan = hcp.plan(LENGTHS, ranks=ranks, min_degree=ranks, max_tokens_per_rank=99)
        (cp,) = (
            Cp(plan, m, groups.transport, sources=sources, comm_types=TYPES)
            for m in range(len(plan.micro_batches))
        )
        generator = torch.Generator().manual_seed(rank)
        given = [
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in shapes(cp, size)
        ]
        want: list[Tensor] = []
        for trial in range(6):
            r = Random(100 * trial + rank)
            rows = [(relaid(x, r) if trial else x).detach().requires_grad_() for x in given]
            out = call(cp, *rows)
            weights = torch.arange(out.numel()).cos().view(out.shape)
            ((_Relaid.apply(out, r) if trial else out) * weights).sum().backward()
            found = [out.detach(), *(x.grad for x in rows if x.grad is not None)]
            want = want or found
            for mine, theirs in zip(found, want, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)

    hcp.loopback(ranks, check)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_rows_keep_their_dtype_where_it_is_named(dtype: torch.dtype) -> None:
    def check(groups: Any) -> None:
        plan = hcp.plan([9], ranks=2, min_degree=2, max_tokens_per_rank=99)
        cp = Cp(plan, 0, groups.transport, sources=[1])
        own = (torch.arange(9) % 2).to(dtype)[: 9 * groups.transport.rank]
        there = cp.dispatch(own, dtype=dtype)
        assert there.dtype == dtype
        wide = torch.complex64 if dtype.is_complex else torch.float32  # float8 has no torch.equal
        assert torch.equal(cp.combine(there, dtype=dtype).to(wide), own.to(wide))

    hcp.loopback(2, check)
