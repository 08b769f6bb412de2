"""Recurrent layers on GPUs: ranks that are threads of one GPU, kernels against the recurrence, and
states over NCCL, and over peer memory where two GPUs are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.features import drawn, rows_here
from support.gpu_ranks import on_gpus
from support.megatron_delta import slow_rule
from support.ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

import hcp
from hcp._words import ScanType, TransportName
from hcp.integrations.recurrent import delta_rule

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS = (300, 1, 130, 2, 3, 70)
SCAN_TYPES: tuple[ScanType, ...] = ("pass_states", "sequence_to_head")
HEADS, KEYS, VALUES = 4, 32, 64
ROUNDING = {torch.float64: 1e-10, torch.bfloat16: 0.03}


def wide_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **state: Any
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule token by token, in float32 or wider: (1, T, H, size)."""
    dtype, wide = value.dtype, torch.promote_types(value.dtype, torch.float32)
    query, key, value, g, beta = (x.to(wide) for x in (query, key, value, g, beta))
    out, end = slow_rule(query, key, value, g, beta, **state)
    return out.to(dtype), end


def inputs(cp: Any, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, gates, betas and the output's gradient, of a handler's rows."""
    shapes = [(HEADS, KEYS), (HEADS, KEYS), (HEADS, VALUES), (HEADS,), (HEADS,), (HEADS, VALUES)]
    query, key, value, g, beta, grad = (
        rows_here(cp, drawn(LENGTHS, *shape, seed=i, dtype=torch.float64)).cuda()
        for i, shape in enumerate(shapes)
    )
    wide = torch.promote_types(dtype, torch.float32)
    given = F.normalize(query, dim=-1), F.normalize(key, dim=-1), value
    gates = -g.sigmoid().to(wide) / 8, beta.sigmoid().to(wide)
    return [*(x.to(dtype) for x in given), *gates, grad.to(dtype)]


def computed(cp: Any, rule: Any, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    *leaves, grad = inputs(cp, dtype)
    query, key, value, g, beta = (x.requires_grad_() for x in leaves)
    out = delta_rule(cp, rule, query, key, value, {"g": g, "beta": beta}, **options)
    grads = torch.autograd.grad(out, [query, key, value, g, beta], grad)
    return [out.detach(), *grads]


def on_one_rank(dtype: torch.dtype) -> list[list[Tensor]]:
    """The recurrence of whole sequences: each result by sequence."""

    def alone(groups: Any) -> list[list[Tensor]]:
        plan = hcp.plan(LENGTHS, ranks=1, max_tokens_per_rank=1000)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        sizes = cp.cu_seqlens.diff().tolist()
        results = [x.split(sizes) for x in computed(cp, wide_rule, dtype)]
        order = [list(cp.layout.sequences).index(i) for i in range(len(LENGTHS))]
        return [[parts[i] for i in order] for parts in results]

    return hcp.loopback(1, alone, device="cuda")[0]


def handler(groups: Any, ranks: int, scan_type: ScanType) -> Any:
    plan = hcp.plan(LENGTHS, ranks=ranks, max_tokens_per_rank=1000, min_degree=ranks)
    return hcp.ContextParallelHandler(plan, 0, groups.transport, scan_type=scan_type)


def check(cp: Any, found: list[Tensor], wanted: list[list[Tensor]], bound: float) -> None:
    for mine, sequences in zip(found, wanted, strict=True):
        theirs = rows_here(cp, sequences).to(mine.device)
        largest = max(float(x.abs().max()) for x in sequences)
        assert float((mine - theirs).abs().max()) <= bound * largest


@pytest.mark.parametrize("scan_type", SCAN_TYPES)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_ranks_on_one_gpu_compute_the_recurrence(dtype: torch.dtype, scan_type: ScanType) -> None:
    wanted = on_one_rank(dtype)

    def work(groups: Any) -> None:
        cp = handler(groups, 4, scan_type)
        check(cp, computed(cp, wide_rule, dtype), wanted, ROUNDING[dtype])

    hcp.loopback(4, work, device="cuda")


def compute_with_fla(rank: int, size: int, gradients: bool) -> str:
    """Why the package refuses its backward, or nothing. Each rank is a process: Triton's autotuner
    is not for several threads."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    groups = on_gpus(rank, "nccl")
    wanted = on_one_rank(torch.bfloat16)
    for scan_type in SCAN_TYPES:
        cp = handler(groups, size, scan_type)
        if gradients:
            try:
                found = computed(cp, chunk_gated_delta_rule, torch.bfloat16)
            except RuntimeError as error:
                if "Please upgrade Triton" in str(error):
                    return str(error)
                raise
            check(cp, found, wanted, ROUNDING[torch.bfloat16])
        else:
            *leaves, _ = inputs(cp, torch.bfloat16)
            query, key, value, g, beta = leaves
            out = delta_rule(cp, chunk_gated_delta_rule, query, key, value, {"g": g, "beta": beta})
            check(cp, [out], wanted[:1], ROUNDING[torch.bfloat16])
    groups.close()
    return ""


@pytest.mark.parametrize("gradients", [False, True])
def test_the_kernel_of_fla_computes_the_recurrence(gradients: bool) -> None:
    pytest.importorskip("fla.ops.gated_delta_rule")
    refused = run_ranks(2, compute_with_fla, gradients, timeout=110)[0]
    if refused:
        pytest.skip(refused)


def over(rank: int, size: int, transport: TransportName) -> None:
    groups = on_gpus(rank, transport)
    wanted = on_one_rank(torch.float64)
    for scan_type in SCAN_TYPES:
        cp = handler(groups, size, scan_type)
        check(cp, computed(cp, wide_rule, torch.float64), wanted, 1e-10)
    groups.close()


@pytest.mark.parametrize("transport", ["nccl", "peer"])
def test_states_travel_between_gpus(transport: str) -> None:
    if transport == "peer" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_ranks(2, over, transport, timeout=110)
