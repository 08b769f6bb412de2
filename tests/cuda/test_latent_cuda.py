"""Latent rows and chosen keys on one GPU, whose ranks are threads: equal to expanded keys; chosen
keys over NCCL, and over peer memory where two GPUs are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.features import drawn, rows_here
from support.gpu_ranks import on_gpus
from support.ranks import run_ranks
from support.sparse import SparseCase, error
from torch import Tensor

import hcp
from hcp._words import CommType, TransportName

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS = (700, 5, 300, 1, 130)
HEADS, LATENT, SHARED, SIZE = 4, 128, 64, 128
"""Heads have DeepSeek-V3's sizes, 128 + 64 and 128."""
ROUNDING = {torch.float64: 1e-10, torch.bfloat16: 0.03}


class Up(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        (weight,) = drawn([2 * HEADS * SIZE], LATENT, seed=3)
        self.weight = torch.nn.Parameter((weight / LATENT**0.5).to("cuda", dtype))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        own, shared = rows.split([LATENT, SHARED], -1)
        up = torch.nn.functional.linear(own, self.weight).view(-1, HEADS, 2 * SIZE)
        key, value = up.split([SIZE, SIZE], -1)
        return torch.cat([key, shared.unsqueeze(1).expand(-1, HEADS, -1)], -1), value


def layer(
    groups: Any, dtype: torch.dtype, comm_type: CommType, lengths: tuple[int, ...] = LENGTHS
) -> tuple[Any, list[Tensor], Tensor]:
    plan = hcp.plan(lengths, ranks=4, max_tokens_per_rank=2000, min_degree=4)
    cp = hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=[comm_type])
    shapes = (HEADS, SIZE + SHARED), (LATENT + SHARED,), (HEADS, SIZE)
    *leaves, grad = (
        rows_here(cp, drawn(lengths, *shape, seed=i, dtype=dtype)).cuda()
        for i, shape in enumerate(shapes)
    )
    return cp, [x.requires_grad_() for x in leaves], grad


def off(found: Tensor, want: Tensor) -> float:
    found, want = found.detach(), want.detach()
    return float((found - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("sharing", [False, True], ids=["sent", "read"])
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_latent_rows_are_expanded_where_they_are_received(
    dtype: torch.dtype, comm_type: CommType, sharing: bool
) -> None:
    def check(groups: Any) -> None:
        cp, (query, rows), grad = layer(groups, dtype, comm_type)
        up, results = Up(dtype), []
        for keys, options in (((rows,), {"expand": up}), (up(rows), {})):
            out = cp.attention(query, *keys, window_size=(400, 0), **options)
            grads = torch.autograd.grad(out, (query, rows, up.weight), grad)
            results.append([out, *grads[:2], cp.group.sum(grads[2])])
        for found, want in zip(*results, strict=True):
            assert off(found, want) <= ROUNDING[dtype]

    hcp.loopback(4, check, device="cuda", sharing=sharing)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_all_keys_chosen_are_dense_attention(dtype: torch.dtype) -> None:
    def check(groups: Any) -> None:
        cp, (query, rows), grad = layer(groups, dtype, "all_gather", (150, 5, 61, 1))
        up, longest = Up(dtype), 150
        places = torch.arange(longest, device="cuda").expand(cp.rows, -1)
        indices = places.masked_fill(places > cp.position_ids[:, None], -1)
        chosen, *_ = cp.sparse.top_k(
            query[..., :8], rows[:, :8].contiguous(), query[..., 0].contiguous(), longest
        )
        assert torch.equal(chosen, indices)
        results = []
        for out in (
            cp.sparse.attention(query, rows, indices=indices, expand=up)[0],
            cp.attention(query, *up(rows)),
        ):
            grads = torch.autograd.grad(out, (query, rows), grad, retain_graph=True)
            results.append([out, *grads])
        for found, want in zip(*results, strict=True):
            assert off(found, want) <= ROUNDING[dtype]

    hcp.loopback(4, check, device="cuda")


def chosen_over(rank: int, size: int, transport: TransportName) -> None:
    groups = on_gpus(rank, transport)
    for latent in (True, False):
        case = SparseCase((40, 7, 90, 1), size, min_degree=size, latent=latent)
        assert error(groups, case, device="cuda") <= 1e-10
    groups.close()


@pytest.mark.parametrize("transport", ["nccl", "peer"])
def test_chosen_keys_travel_between_gpus(transport: str) -> None:
    if transport == "peer" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_ranks(2, chosen_over, transport, timeout=110)
