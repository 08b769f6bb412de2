"""A compiled model runs any plan without a new compilation.

Graphs are counted under "aot_eager", which traces forward and backward as inductor does and then
runs the operators: it needs no C++ compiler. Two tests compile with inductor: that of a layer here,
and that of every operator in test_ops.py.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import hcp


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 3 * 2 * 8)
        self.freqs = torch.nn.Buffer(torch.randn(64, 8))

    def forward(self, x: torch.Tensor, cp: hcp.ContextParallelHandler) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(1, (3, 2, 8)).unbind(1)
        near = cp.attention(
            cp.apply_rotary_pos_emb(query, self.freqs),
            cp.apply_rotary_pos_emb(key, self.freqs),
            value,
            window_size=(3, 0),
            comm_type="auto",
        )
        rotary = cp.rotary(self.freqs)
        return (near + cp.attention(query, key, value, rotary_pos_emb=rotary)).flatten(1)


def losses_and_graphs(groups: Any, plans: int) -> list[int]:
    """Graphs compiled after each plan; every gradient equals the eager one."""
    torch.manual_seed(0)
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    counters.clear()
    graphs = []
    for seed in range(plans):
        draw = random.Random(seed)
        lengths = [draw.randint(2, 30) for _ in range(draw.randint(1, 6))]
        samples = [{"x": torch.randn(n, 8), "loss_mask": torch.ones(n)} for n in lengths]
        plan = hcp.plan(lengths, ranks=1, max_tokens_per_rank=64)
        for cp, local in hcp.dispatch(
            plan,
            samples,
            [0] * len(lengths),
            groups,
            comm_types=("p2p", "auto"),
            window_sizes=[(3, 0)],
            heads=[(2, 2)],
        ):
            grads = []
            for model in (layer, compiled):
                layer.zero_grad()
                losses = model(local.x, cp).square().sum(1)
                cp.loss(losses, local.loss_mask, grad_reduce="sum").backward()
                grads.append(layer.qkv.weight.grad.clone())
            assert torch.allclose(*grads, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def test_twenty_plans_need_no_compilation_after_the_first_two() -> None:
    torch.compiler.reset()
    (graphs,) = hcp.loopback(1, lambda groups: losses_and_graphs(groups, 20), timeout=300)
    assert graphs[1] <= 2
    assert graphs[1:] == [graphs[1]] * 19


@pytest.mark.slow
def test_a_layer_that_inductor_compiled_gives_the_eager_gradients() -> None:
    """The smallest case: inductor starts a C++ compiler for forward and for backward."""

    def check(groups: Any) -> None:
        plan = hcp.plan([9, 4], ranks=1, max_tokens_per_rank=16)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)

        def layer(x: torch.Tensor) -> torch.Tensor:
            return cp.attention(x.sin(), x, x * 2).square().sum()

        grads = []
        for function in (layer, torch.compile(layer, fullgraph=True)):
            x = torch.linspace(-1, 1, 13 * 2 * 8).view(13, 2, 8).requires_grad_()
            grads += torch.autograd.grad(function(x), x)
        torch.testing.assert_close(*grads)

    torch.compiler.reset()
    hcp.loopback(1, check, timeout=300)


class Seen(TorchDispatchMode):
    """The names of hcp's operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hcp":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sinks", [False, True])
def test_who_watches_operators_sees_them_and_the_bits_of_a_layer_without(sinks: bool) -> None:
    def layer(groups: Any, mode: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(groups.transport.rank)
        plan = hcp.plan([30, 11], ranks=2, max_tokens_per_rank=40, min_degree=2)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        inputs = [
            torch.randn(*shape, generator=generator, requires_grad=True)
            for shape in ((cp.rows, 4, 8), (cp.rows, 2, 8), (cp.rows, 2, 8), (4,))
        ]
        with mode:
            out = cp.attention(*inputs[:3], sinks=inputs[3] if sinks else None)
            grads = torch.autograd.grad(out.square().sum(), inputs[: 3 + sinks])
        return [out, *grads]

    modes = Seen(), Seen()
    watched = hcp.loopback(2, lambda groups: layer(groups, modes[groups.transport.rank]))
    alone = hcp.loopback(2, lambda groups: layer(groups, nullcontext()))
    for mode in modes:
        assert mode.names[0] == "hcp::attention"
        assert "hcp::attention_backward" in mode.names
    for one, other in zip(watched, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_operator_passes_opcheck() -> None:
    def check(groups: Any) -> None:
        plan = hcp.plan([9, 4], ranks=1, max_tokens_per_rank=16)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        inputs = [torch.randn(13, h, 8, requires_grad=True) for h in (4, 2, 2)]
        numbered = {"number": 1}  # else each run of the operator is another call
        torch.library.opcheck(
            torch.ops.hcp.attention,
            (*inputs, None, cp._schedules.words_of("p2p", -1, 0, (1, 1)), 0.3),
            numbered,
        )
        sinks = torch.randn(4, requires_grad=True)
        torch.library.opcheck(
            torch.ops.hcp.attention,
            (*inputs, sinks, cp._schedules.words_of("p2p", -1, 0, (1, 1)), 0.3),
            numbered,
        )

        turn = torch.rand(13, 6), torch.rand(13, 6), True
        torch.library.opcheck(
            torch.ops.hcp.attention,
            (*inputs, sinks, cp._schedules.words_of("p2p", -1, 0, (1, 1)), 0.3, *turn),
            numbered,
        )

    hcp.loopback(1, check, timeout=300)


@pytest.mark.parametrize(("softcap", "value_dim"), [(5.0, 8), (0.0, 6)])
def test_results_have_the_strides_that_a_compiler_is_told(softcap: float, value_dim: int) -> None:
    """Results of one sequence on one rank: those of one call, with strides of its own."""

    def check(groups: Any) -> None:
        plan = hcp.plan([9], ranks=1, max_tokens_per_rank=16)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        inputs = [torch.randn(9, h, d) for h, d in ((4, 8), (2, 8), (2, value_dim))]

        def layer(*qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = cp.attention(*qkv, softcap=softcap, return_lse=True)
            return out.view(-1), lse.view(-1)

        compiled = torch.compile(layer, backend="aot_eager")(*inputs)
        for one, other in zip(
            compiled, cp.attention(*inputs, softcap=softcap, return_lse=True), strict=True
        ):
            assert torch.equal(one, other.reshape(-1))

    hcp.loopback(1, check, timeout=300)
