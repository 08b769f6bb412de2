"""Layers that name nothing are told apart by the module that calls: on ranks that swap, skip or
repeat one, all get an error that names the layers, and no result of other rows.

The ranks use Gloo. Every layer makes calls of one kind, so that nothing but its module differs.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.growing import Growing
from support.ranks import run_ranks, try_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hcp
from hcp.exchange import calls
from hcp.exchange.calls import calling_module

LENGTH, LAYERS, WIDTH = 24, 4, 8


class Attention(nn.Module):
    def __init__(self, operation: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.operation = operation

    def forward(self, cp: Any, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(-1, 3, 2, WIDTH // 2).unbind(1)
        if self.operation == "attention":
            out = cp.attention(query, key, value)
        elif self.operation == "cross_attention":
            out = cp.cross_attention(query, key, value, cp)
        elif self.operation == "sequence_to_head":
            out = cp.whole.head_to_sequence(cp.whole.sequence_to_head(query), 2)
        elif self.operation == "pass_states":
            spans = len(cp.scan.span_cu_seqlens) - 1
            state = self.qkv.weight.sum().expand(spans, 2)
            out = query + cp.scan.pass_states(state, torch.ones_like(state)).sum()
        elif self.operation == "sparse_attention":
            chosen = cp.position_ids[:, None]
            out, *_ = cp.sparse.attention(query, key, value, indices=chosen)
        else:
            out = cp.scan.halo(query, 1)[cp.scan.halo_rows(1)]
        return x + out.flatten(1)


class Layer(nn.Module):
    def __init__(self, operation: str) -> None:
        super().__init__()
        self.attention = Attention(operation)

    def forward(self, cp: Any, x: Tensor) -> Tensor:
        out: Tensor = self.attention(cp, x)
        return out


class Model(nn.Module):
    """Its layers in some order, under checkpoints or not."""

    def __init__(self, operation: str = "attention") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(operation) for _ in range(LAYERS))

    def forward(
        self, cp: Any, x: Tensor, order: Sequence[int] = range(LAYERS), again: bool = False
    ) -> Tensor:
        for i in order:
            layer = self.layers[i]
            x = checkpoint(layer, cp, x, use_reentrant=False) if again else layer(cp, x)
        return x


def handlers(size: int, count: int = 1) -> list[Any]:
    groups = hcp.build_process_groups(cp=1)
    limits = {"max_tokens_per_rank": LENGTH // size, "min_degree": size}
    plan = hcp.plan([LENGTH] * count, ranks=size, **limits)
    return [hcp.ContextParallelHandler(plan, i, groups.transport) for i in range(count)]


def rows(cp: Any) -> Tensor:
    x = torch.linspace(-1, 1, LENGTH * WIDTH).view(LENGTH, WIDTH)[cp.position_ids]
    return x.requires_grad_()


ORDERS = {"swapped": (0, 2, 1, 3), "skipped": (0, 2, 3), "repeated": (0, 1, 1, 2, 3)}
DIFFER = {"swapped": "1 2", "skipped": "1 2", "repeated": "2 1"}


def in_a_model(rank: int, size: int, order: Sequence[int], operation: str) -> None:
    (cp,) = handlers(size)
    Model(operation)(cp, rows(cp), order if rank else range(LAYERS))


def in_a_loop(rank: int, size: int, order: Sequence[int], operation: str) -> None:
    (cp,) = handlers(size)
    layers, x = nn.ModuleList(Attention(operation) for _ in range(LAYERS)), rows(cp)
    for i in order if rank else range(LAYERS):
        x = layers[i](cp, x)


def by_functional_call(rank: int, size: int, order: Sequence[int], operation: str) -> None:
    (cp,) = handlers(size)
    model = Model(operation)
    weights = {name: 2 * weight for name, weight in model.named_parameters()}
    torch.func.functional_call(model, weights, (cp, rows(cp), order if rank else range(LAYERS)))


def under_no_grad(rank: int, size: int, order: Sequence[int], operation: str) -> None:
    with torch.no_grad():
        in_a_model(rank, size, order, operation)


def from_threads(rank: int, size: int, order: Sequence[int], operation: str) -> None:
    """Each layer's call from a thread of its own."""
    (cp,) = handlers(size)
    model, x, failures = Model(operation), rows(cp), []

    def call(layer: nn.Module) -> None:
        try:
            layer(cp, x)
        except BaseException as error:
            failures.append(error)

    for i in order if rank else range(LAYERS):
        thread = threading.Thread(target=call, args=(model.layers[i],))
        thread.start()
        thread.join()
        if failures:
            raise failures[0]


def expect_names(results: list[Any], fault: str, start: str = "layers.") -> None:
    right, wrong = DIFFER[fault].split()
    for result in results:
        assert result.kind == "HcpError", str(result)
    said = "\n".join(result.message for result in results)
    one = rf"{re.escape(start)}({right}|{wrong})(\.attention)?"
    assert re.search(rf"layer differs: {one} on rank \d, {one} on rank \d", said), said


@pytest.mark.parametrize("fault", ORDERS)
@pytest.mark.parametrize("way", [in_a_model, by_functional_call, under_no_grad, from_threads])
def test_a_layer_of_a_model_is_named(way: Callable[..., None], fault: str) -> None:
    results = try_ranks(2, way, ORDERS[fault], "attention", group_timeout=20)
    expect_names(results, fault)


@pytest.mark.parametrize("fault", ORDERS)
def test_a_layer_in_a_loop_over_a_list_is_named(fault: str) -> None:
    expect_names(try_ranks(2, in_a_loop, ORDERS[fault], "attention", group_timeout=20), fault, "")


OPERATIONS = ("cross_attention", "sequence_to_head", "pass_states", "sparse_attention", "halo")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_other_calls_of_layers_are_named_too(operation: str) -> None:
    given = ORDERS["swapped"], operation
    expect_names(try_ranks(2, in_a_model, *given, group_timeout=20), "swapped")


def backwards(rank: int, size: int) -> None:
    """Layers side by side, recomputed in another order."""
    (cp,) = handlers(size)
    model = Model()
    outs = [model(cp, rows(cp), [i], True) for i in (0, 1)]
    for out in outs[:: 1 - 2 * rank]:
        out.sum().backward()


def test_layers_that_are_recomputed_in_another_order_are_named() -> None:
    results = try_ranks(2, backwards, group_timeout=20)
    said = "\n".join(result.message for result in results)
    assert re.search(r"layer differs: layers\.[01]\.attention on rank \d, layers\.[01]\.a", said), (
        said
    )


# ---- what must stay quiet ------------------------------------------------------------------------


class Holder(nn.Module):
    """As one rank alone may have, to export or to watch a model."""

    def __init__(self, *held: nn.Module) -> None:
        super().__init__()
        self.chain = nn.Sequential(*held)
        self.more = nn.ModuleList(held)


def train(model: Any, given: list[Any], **options: Any) -> None:
    outs = [model(cp, rows(cp), **options) for cp in given]
    for out in reversed(outs):
        out.sum().backward()


def quiet(rank: int, size: int) -> None:
    """Models that are the same, and are held, wrapped and called as ranks may do differently."""
    given = handlers(size, 3)
    model = Model()
    if rank:  # other identities, and other orders of what is made
        kept = [Model() for _ in range(3)]
        model = copy.deepcopy(kept[1])
        gc.collect()
    train(model, given)
    wrapped = DistributedDataParallel(model)
    train(wrapped, given)
    train(model if rank else wrapped.module, given, again=True)
    watched = Holder(model) if rank else None
    late = Model()  # which rank 0 meets first in another search
    train(late, given)
    watched = Holder(late, model) if rank else watched
    train(Model(), given)
    train(
        model, given, order=(0, 1, 1, 0, 3)
    )  # a layer is called again, as if its weights were tied
    model.layers[1] = model.layers[2]
    train(model, given, again=True)
    lone = nn.ModuleList([Attention("attention")])
    train(lone[0], given)
    model.layers.append(Layer("attention"))  # after the search
    train(model, given, order=range(LAYERS + 1))
    assert watched is None or rank


@pytest.mark.parametrize("size", [2, 3])
def test_models_that_ranks_hold_and_wrap_in_ways_of_their_own_are_the_same(size: int) -> None:
    run_ranks(size, quiet, group_timeout=30)


def compiled_on_one_rank_too_often(rank: int, size: int) -> None:
    """A compiled model runs as it is on the rank that has reached the limit."""
    (cp,) = handlers(size)
    model = Model()
    compiled = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        if rank:
            alone = hcp.plan([LENGTH] * size, ranks=size, max_tokens_per_rank=LENGTH)
            own = hcp.ContextParallelHandler(alone, 0, cp._transport)
            for order in ((0, 1), (1,), (2,)):
                compiled(own, torch.ones(LENGTH, WIDTH), order)
        compiled(cp, rows(cp))


def test_a_compiled_model_that_one_rank_runs_as_it_is_is_the_same() -> None:
    run_ranks(2, compiled_on_one_rank_too_often, group_timeout=30)


class Towers(nn.Module):
    """Lists within a list, which are called together or one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Model() for _ in range(2))

    def forward(self, cp: Any, x: Tensor) -> Tensor:
        for tower in self.towers:
            x = tower(cp, x)
        return x


def grouped(*degrees: int) -> hcp.Plan:
    """A plan of one sequence for each group."""
    firsts = itertools.accumulate(degrees, initial=0)
    groups = [
        {"first_rank": first, "degree": degree, "sequences": [i]}
        for i, (first, degree) in enumerate(zip(firsts, degrees, strict=False))
    ]
    return hcp.Plan.from_dict(
        {
            "ranks": sum(degrees),
            "max_tokens_per_rank": LENGTH,
            "lengths": [LENGTH] * len(degrees),
            "micro_batches": [{"groups": groups}],
        }
    )


def test_ranks_whose_first_group_had_one_rank_name_layers_as_the_others() -> None:
    def called(groups: Any) -> None:
        model = Towers()
        for plan, part in ((grouped(2, 1), model), (grouped(3), model.towers[0])):
            cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
            train(part, [cp])

    hcp.loopback(3, called, timeout=20)


# ---- names ---------------------------------------------------------------------------------------


class Says(nn.Module):
    def forward(self) -> str | None:
        return calling_module()


class Within(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = [inner]  # which no module holds

    def forward(self) -> str | None:
        said: str | None = self.inner[0]()()
        return said


class Runs(nn.Module):
    """Its forward is that of what it holds, at any depth."""

    def forward(self) -> str | None:
        (child,) = self.children()
        said: str | None = child()
        return said


def held_by(module: nn.Module, names: list[str]) -> nn.Module:
    for name in reversed(names):
        holder = Runs()
        holder.add_module(name, module)
        module = holder
    return module


PATHS = {
    "layers 3 attention": "layers.3.attention",
    "module model _orig_mod layers 3 attn": "layers.3.attn",
    "stages 1 blocks 0": "stages.1.blocks.0",
    "1 attention": "1.attention",
    "encoder attention": "encoder.attention",
    "module": "",
    "": "",
}


@pytest.mark.parametrize("names", PATHS)
def test_a_name_is_the_path_from_the_first_list_on(names: str) -> None:
    assert held_by(Says(), names.split())() == PATHS[names]


INNER = {
    "layers 3 attention": "layers.3.attention",
    "module model layers 3 _orig_mod attn": "layers.3.attn",
    "stages 1 blocks 0": "blocks.0",
    "1 attention": "1.attention",
    "encoder attention": "",
    "": "",
}


@pytest.mark.parametrize("names", INNER)
def test_what_is_called_alone_is_named_from_the_list_on_that_holds_it(names: str) -> None:
    says = Says()
    held = held_by(says, names.split())
    assert says() == INNER[names]
    assert held is not None


def test_a_module_that_nothing_holds_has_the_name_of_the_one_around_it() -> None:
    within = Within(Says)
    held = held_by(within, ["layers", "2"])
    assert [within() for _ in range(2)] == ["layers.2"] * 2
    assert held is not None
    assert calling_module() == ""


def test_a_module_with_an_equality_of_its_own_and_no_hash_is_named() -> None:
    class Odd(Says):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not ready")

    odd, other = Odd(), Odd()
    held = nn.Module()
    held.__dict__["_modules"] = {"0": odd, "1": other}
    assert (odd(), other()) == ("0", "1")


def test_a_dead_module_gives_no_name_to_the_next_one() -> None:
    seen = set()
    for i in range(20):
        says = Says()
        held = held_by(says, ["layers", str(i)])
        seen.add(says())
        del says, held
    assert seen == {f"layers.{i}" for i in range(20)}


def test_threads_that_learn_names_at_the_same_time_keep_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = [held_by(Says(), ["layers", str(i), "attention"]) for i in range(2)]
    said = []
    text = calls._text

    def interrupted(path: Any) -> str:
        monkeypatch.setattr(calls, "_text", text)
        thread = threading.Thread(target=lambda: said.append(models[1]()))
        thread.start()
        thread.join()
        return text(path)

    monkeypatch.setattr(calls, "_text", interrupted)
    said.append(models[0]())
    assert said == ["layers.1.attention", "layers.0.attention"]
    assert {*said} <= {name for _, name in calls._names.values()}


def test_a_name_is_found_while_another_thread_makes_a_tuple(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    growing, children, says = Growing(), calls._children, Says()
    held = held_by(says, ["layers", "3"])

    def interrupted(module: nn.Module) -> Any:
        if module is held:  # nothing but the search through all objects comes to it
            growing.finish()
        return children(module)

    monkeypatch.setattr(calls, "_children", interrupted)
    assert says() == "layers.3"
    assert growing.is_whole
    assert held is not None


def test_a_name_is_found_while_another_thread_builds_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children, says, building = calls._children, Says(), nn.Sequential(nn.Identity())
    held = held_by(says, ["layers", "3"])

    def interrupted(module: nn.Module) -> Any:
        for child in children(module):
            if module is building:
                building.append(nn.Identity())
            yield child

    monkeypatch.setattr(calls, "_children", interrupted)
    assert says() == "layers.3"
    assert len(building) == 2
    assert held is not None


def test_names_of_modules_that_are_gone_are_forgotten() -> None:
    gc.collect()
    before = len(calls._names)
    model = held_by(Says(), ["layers", "0"])
    assert model() == "layers.0"
    assert len(calls._names) > before
    del model
    gc.collect()
    assert len(calls._names) == before


# ---- a word to those who hold layers elsewhere ---------------------------------------------------


def nameless(groups: Any, name: str | None) -> None:
    plan = hcp.plan([LENGTH], ranks=2, max_tokens_per_rank=LENGTH // 2, min_degree=2)
    cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
    x = torch.ones(cp.rows, 2, 4)
    for _ in range(3):
        cp.attention(x, x, x, layer=name)


def test_layers_in_no_module_are_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_warnings", itertools.count())
    with caplog.at_level(logging.WARNING, "hcp"):
        hcp.loopback(2, lambda groups: nameless(groups, "layer"))
        assert not caplog.records
        hcp.loopback(2, lambda groups: nameless(groups, None))
        hcp.loopback(2, lambda groups: nameless(groups, None))
    (record,) = caplog.records
    assert "test_callers.py" in record.getMessage()
    assert "layer=" in record.getMessage()
