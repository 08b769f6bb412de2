"""Heads computed in chunks: results of one rank, in a fraction of the buffers, as far as the plan's
memory model says that it must be."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import Case, GlooGroups, dispatched, gloo_errors, grad_of, loopback_error
from support.ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hcp
from hcp import _core

TYPES = hcp.COMM_TYPES
LENGTHS = (50, 97, 1, 40)


def case_of(**options: Any) -> Case:
    return Case(LENGTHS, 4, **{"min_degree": 4, "heads": 12, "kv_heads": 6, **options})


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("chunks", [2, 4, 6, 9])  # of 6 heads: even, uneven, one each, too many
def test_heads_in_chunks_equal_one_rank(chunks: int, comm_type: str) -> None:
    case = case_of(comm_type=comm_type, head_chunks=chunks)
    assert loopback_error(case) <= 1e-10
    assert loopback_error(replace(case, causal=False, value_dim=5)) <= 1e-10
    assert loopback_error(replace(case, window=(9, 2), causal=False, sinks=True)) <= 1e-10
    assert loopback_error(replace(case, lse=True, sinks=True, alignment=8)) <= 1e-10
    assert loopback_error(replace(case, sharing=True, lse=True)) <= 1e-10
    assert loopback_error(replace(case, node=2, stage_tokens=30)) <= 1e-10


@pytest.mark.parametrize("comm_type", TYPES)
def test_gloo_ranks_compute_heads_in_chunks(comm_type: str) -> None:
    case = case_of(comm_type=comm_type, head_chunks=3, sinks=True, lse=True)
    assert max(map(max, run_ranks(4, gloo_errors, case))) <= 1e-10


@settings(max_examples=40)
@given(st.data())
def test_any_heads_in_any_chunks(data: st.DataObject) -> None:
    groups, ranks = data.draw(st.integers(1, 7)), data.draw(st.integers(2, 6))
    case = Case(
        tuple(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))),
        ranks,
        comm_type=data.draw(st.sampled_from(TYPES)),
        kv_heads=groups,
        heads=groups * data.draw(st.integers(1, 4)),
        capacity=data.draw(st.integers(60, 200)),
        min_degree=data.draw(st.sampled_from([1, ranks])),
        head_chunks=data.draw(st.integers(2, 5)),
        causal=data.draw(st.booleans()),
        sinks=data.draw(st.booleans()),
    )
    assert loopback_error(case) <= 1e-10


def test_a_plan_that_fits_computes_all_heads_at_once() -> None:
    """Of two groups only the long sequence's needs chunks, and as few as fit."""
    memory = hcp.MemoryModel(activation=2, attention=12, gathered=3, head_chunks=6, limit=1200)
    lengths, options = [400, 40, 30], {"ranks": 4, "max_tokens_per_rank": 100, "min_degree": 2}
    plan = hcp.plan(lengths, memory=memory, **options)  # type: ignore[arg-type]

    def chunks(groups: Any) -> list[tuple[int, int]]:
        found = []
        for m in range(len(plan.micro_batches)):
            cp = hcp.ContextParallelHandler(plan, m, groups.transport)
            found.append((sum(cp.layout.lengths), cp.head_chunks))
        return found

    needed = {400: _core.memory_chunks(memory.numbers(), 100, 400, 4), 0: 1, 40: 1, 30: 1, 70: 1}
    assert needed[400] == 3  # 200 + (1200 + 1200) / 3 = 1000; by two, 1400
    found = [pair for rank in hcp.loopback(4, chunks) for pair in rank]
    assert (400, 3) in found
    assert all(needed[tokens] == count for tokens, count in found), found


# ---- rotation, recomputation, compilers ----------------------------------------------------------


def differences(rank: int, size: int, comm_type: str) -> list[float]:
    """Output and gradients with rotation, against those of all heads at once."""
    groups = GlooGroups()
    case = Case((31, 12), size, min_degree=size, comm_type=comm_type, kv_heads=4, heads=8)
    freqs = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def results(case: Case, wrap: Any) -> list[Tensor]:
        ((cp, local),) = dispatched(groups, case)
        assert cp.head_chunks == case.head_chunks
        inputs = [local[name].clone().requires_grad_() for name in ("query", "key", "value")]
        rotary = cp.rotary(freqs)

        def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return cp.attention(query, key, value, rotary_pos_emb=rotary)

        layer(*inputs)  # makes its schedule, before a compiler sees it
        out = wrap(layer)(*inputs)
        out.backward(local["grad"])
        return [out.detach(), *map(grad_of, inputs)]

    wanted = results(case, lambda layer: layer)
    ways = {
        "eager": lambda layer: layer,
        "recomputed": lambda layer: functools.partial(checkpoint, layer, use_reentrant=False),
        "compiled": lambda layer: torch.compile(layer, backend="aot_eager"),
    }
    found = [results(replace(case, head_chunks=3), ways[way]) for way in ways]
    return [float((x - y).abs().max()) for way in found for x, y in zip(way, wanted, strict=True)]


@pytest.mark.parametrize("comm_type", TYPES)
def test_chunks_rotate_recompute_and_compile(comm_type: str) -> None:
    assert max(map(max, run_ranks(2, differences, comm_type))) <= 1e-10
