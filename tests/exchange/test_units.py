"""A module that is sharded as a unit of its own is refused where ranks call it unequally often.

Rank 0 has more launches than rank 1, so that the gatherings of a unit would not meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

import hcp

LENGTHS = (20, 1, 1, 1)


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 8, dtype=torch.float64)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        both = self.lin(rows).view(-1, 2, 4)
        return both, both


class Root(nn.Module):
    def __init__(self, expand: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.scale = Up(), nn.Parameter(torch.ones(4, dtype=torch.float64))
        self._expand = expand

    def forward(self, cp: Any, query: Tensor, rows: Tensor) -> Tensor:
        own = {"parameters": [*self.up.parameters()]}
        expand = self._expand(self)
        more = {} if isinstance(expand, nn.Module) else own
        return cp.attention(query * self.scale, rows, expand=expand, **more)


def of_module(root: Root) -> Any:
    return root.up


def of_function(root: Root) -> Any:
    return lambda rows: root.up(rows)


def handler_of(size: int) -> Any:
    groups = hcp.build_process_groups(cp=1)
    plan = hcp.plan(LENGTHS, ranks=size, max_tokens_per_rank=40, min_degree=2)
    return hcp.ContextParallelHandler(plan, 0, groups.transport)


def inputs_of(cp: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(cp.group.rank)
    shapes = (cp.rows, 2, 4), (cp.rows, 6)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def shard(root: Root, units: str, size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if units == "ZeRO-3":
        root.up.lin.weight.ds_id = 0  # type: ignore[assignment]  # as DeepSpeed marks it
        return root
    mesh = init_device_mesh("cpu", (size,))
    for module in {"own": [root.up, root], "inner": [root.up.lin, root], "root": [root]}[units]:
        fully_shard(module, mesh=mesh)
    return root


def refused(rank: int, size: int, expand: Any, units: str) -> str:
    torch.manual_seed(0)
    cp, root = handler_of(size), shard(Root(expand), units, size)
    with pytest.raises(ValueError, match="as a unit of its own") as caught:
        root(cp, *inputs_of(cp))
    return str(caught.value)


NAMED = {
    "own": "FSDPUp, which fully_shard",
    "inner": "FSDPLinear, which fully_shard",
    "ZeRO-3": "Linear, which ZeRO-3",
}


@pytest.mark.parametrize("units", NAMED)
@pytest.mark.parametrize("expand", [of_module, of_function])
def test_a_unit_that_expands_is_refused_by_name_on_all_ranks(expand: Any, units: str) -> None:
    for said in run_ranks(2, refused, expand, units, group_timeout=20):
        assert said.startswith(f"expand calls {NAMED[units]} shards as a unit"), said


def test_a_refused_module_leaves_the_handler_as_it_was() -> None:
    run_ranks(2, refused_and_again, group_timeout=20)


def refused_and_again(rank: int, size: int) -> None:
    cp = handler_of(size)
    query, rows = inputs_of(cp)
    with pytest.raises(ValueError, match="expand calls"):
        shard(Root(of_module), "ZeRO-3", size)(cp, query, rows)
    assert Root(of_module)(cp, query, rows).shape == query.shape


def trained(rank: int, size: int, expand: Any, units: str) -> list[Tensor]:
    torch.manual_seed(0)
    cp, root = handler_of(size), Root(expand)
    if units:
        root = shard(root, units, size)  # type: ignore[assignment]
    out = root(cp, *inputs_of(cp))
    out.square().sum().backward()
    grads = [parameter.grad for parameter in root.parameters()]
    whole = [g.full_tensor() * size if units else cp.group.sum(g) for g in grads]  # type: ignore
    return [out.detach(), *whole]


@pytest.mark.parametrize("expand", [of_module, of_function])
def test_a_part_of_its_layers_unit_trains_as_if_nothing_were_sharded(expand: Any) -> None:
    plain = run_ranks(2, trained, of_module, "", group_timeout=20)
    for rank, results in enumerate(run_ranks(2, trained, expand, "root", group_timeout=20)):
        for found, wanted in zip(results, plain[rank], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_functions_of_maps_may_call_no_unit_either() -> None:
    unit = Up().lin
    unit.weight.ds_id = 0  # type: ignore[assignment]

    def rank(groups: Any) -> str:
        plan = hcp.plan([32], ranks=2, max_tokens_per_rank=16, min_degree=2)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        spans = len(cp.scan.span_cu_seqlens) - 1

        def apply(maps: Any, states: Any) -> Any:
            return (unit(states[0]),)

        maps, initial = [torch.zeros(spans, 6)], [torch.zeros(6)]
        given: Any = {"combine": lambda a, b: b, "apply": apply, "initial": initial}
        with pytest.raises((ValueError, hcp.HcpError), match="apply calls Linear, which ZeRO-3"):
            cp.scan.pass_maps(maps, **given)
        return "refused"

    assert hcp.loopback(2, rank) == ["refused"] * 2


def test_other_threads_may_call_their_units_meanwhile() -> None:
    import threading

    from hcp.exchange.units import without_units

    unit, seen = nn.Linear(2, 2), []
    unit.weight.ds_id = 0  # type: ignore[assignment]
    with without_units("expand"):
        thread = threading.Thread(target=lambda: seen.append(unit(torch.zeros(1, 2))))
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="expand calls Linear"):
            unit(torch.zeros(1, 2))
    unit(torch.zeros(1, 2))
    assert len(seen) == 1


def test_a_wrapper_that_shards_is_refused_too() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from hcp.exchange.units import expect_no_unit

    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # it wants a GPU
    nn.Module.__init__(wrapper)
    with pytest.raises(ValueError, match="expand calls FullyShardedDataParallel, which Fully"):
        expect_no_unit("expand", nn.Sequential(wrapper))
