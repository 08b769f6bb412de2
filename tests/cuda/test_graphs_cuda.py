"""A layer of fixed capacity, captured once and replayed for several plans.
Its tables and its results on the CPU: tests/attention/test_fixed_capacity.py. With several GPUs:
tests/cuda/check_graphs.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.graphs import FixedLayer, difference, layer_of_plan, plans_of_rows

import hcp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROWS, SEQUENCES = 512, 24


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_one_gpu() -> hcp.ProcessGroups:
    groups: hcp.ProcessGroups = hcp.loopback(1, lambda groups: groups, device="cuda")[0]
    return groups


@pytest.mark.parametrize("backend", ["torch", "flash"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_graph_gives_the_bits_of_the_same_layer_without_it(
    deterministic: None, backend: Any, head_dim: int
) -> None:
    groups = on_one_gpu()
    plans = plans_of_rows(1, ROWS)
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=SEQUENCES, backend=backend)
    layer = FixedLayer(fixed, head_dim, torch.bfloat16)
    layer.capture(hcp.ContextParallelHandler(plans[0], 0, groups.transport))
    for seed, plan in enumerate([*plans, plans[0]]):
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        layer.draw(cp, seed)
        replayed = layer.replay()
        assert all(map(torch.equal, replayed, layer.run()))
        assert all(x.isfinite().all() for x in replayed)
        tokens = int(cp.cu_seqlens[-1])
        assert not any(x[tokens:].any() for x in replayed)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)]
)
def test_one_graph_equals_the_micro_batchs_own_layer(dtype: torch.dtype, limit: float) -> None:
    groups = on_one_gpu()
    plans = plans_of_rows(1, ROWS)
    layer = FixedLayer(hcp.GraphHandler(groups, rows=ROWS, sequences=SEQUENCES), 64, dtype)
    layer.capture(hcp.ContextParallelHandler(plans[0], 0, groups.transport))
    for seed, plan in enumerate(plans):
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        layer.draw(cp, seed)
        assert difference(layer.replay(), layer_of_plan(cp, layer.rows)) <= limit


def test_forward_has_the_bits_of_the_same_kernel_in_the_micro_batchs_own_layer() -> None:
    """Padding and empty sequences change no order of sums in a forward."""
    groups = on_one_gpu()
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=SEQUENCES, backend="torch")
    layer = FixedLayer(fixed, 64, torch.bfloat16)
    handler = hcp.get_cp_handler_cls(backend="torch")
    plans = plans_of_rows(1, ROWS)
    layer.capture(handler(plans[0], 0, groups.transport))
    for seed, plan in enumerate(plans):
        cp = handler(plan, 0, groups.transport)
        layer.draw(cp, seed)
        out, *_ = layer.replay()
        expected, *_ = layer_of_plan(cp, layer.rows)
        tokens = int(cp.cu_seqlens[-1])
        assert torch.equal(out[:tokens], expected[:tokens])


def test_graphed_callables_of_torch_take_the_handler() -> None:
    groups = on_one_gpu()
    plans = plans_of_rows(1, ROWS)
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=SEQUENCES)
    layer = FixedLayer(fixed, 64, torch.bfloat16)
    layer.draw(hcp.ContextParallelHandler(plans[0], 0, groups.transport), 0)
    given = tuple(x.detach().clone().requires_grad_() for x in layer.rows[:3])
    graphed: Any = torch.cuda.make_graphed_callables(fixed.attention, given)
    for seed, plan in enumerate(plans):
        layer.draw(hcp.ContextParallelHandler(plan, 0, groups.transport), seed)
        *leaves, grad = (x.detach().clone() for x in layer.rows)
        for leaf in leaves:
            leaf.requires_grad_()
        out = graphed(*leaves)
        found = [out.detach().clone(), *torch.autograd.grad(out, leaves, grad)]
        assert difference(found, layer.run()) <= 2e-2
