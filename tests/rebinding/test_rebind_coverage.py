"""rebind: all values that depend on the layout, in the forms that real models have.

Each case is found, switched and restored. The models are written here;
tests/integrations/test_megatron.py tests Megatron-Core's own.
"""

import contextlib
import copy
import functools
import gc
import itertools
import operator
import pickle
import queue
import re
import sys
import threading
import weakref
from collections import ChainMap, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, MethodType, ModuleType, SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from support.te_attention import TEAttention
from torch import nn

import hcp
import hcp.rebinding.derived
import hcp.rebinding.walk
from hcp.groups.build import build_process_groups
from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding import packages, rules
from hcp.rebinding.derived import register_derived
from hcp.rebinding.not_entered import is_open_function
from hcp.rebinding.places import places
from hcp.rebinding.rebind import find_slots
from hcp.rebinding.records import _contents
from hcp.rebinding.safe_access import own_attributes


class Sized:
    """A layout whose groups claim other sizes than this test's one rank can form."""

    def __init__(self, monkeypatch):
        self.sizes, self.rank_of = {}, {}
        size, rank = ProcessGroups.size, ProcessGroups.rank

        def size_of(groups, role):
            return self.sizes.get((id(groups), role)) or size(groups, role)

        def place_of(groups, role):
            return self.rank_of.get((id(groups), role), rank(groups, role))

        def ranks_of(groups, role):
            return list(range(size_of(groups, role)))

        monkeypatch.setattr(ProcessGroups, "size", size_of)
        monkeypatch.setattr(ProcessGroups, "rank", place_of)
        monkeypatch.setattr(ProcessGroups, "ranks", ranks_of)


@pytest.fixture(scope="module")
def built():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train, other = build_process_groups(), build_process_groups()
    shared = {role: getattr(train, role) for role in ("tp", "pp", "mp", "dp_cp", "tp_dp_cp")}
    mixed = {role: shared.get(role, getattr(other, role)) for role in other.roles}
    yield train, ProcessGroups.from_existing(mixed)
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def search_only_what_a_test_makes():
    """An audit asks every object of the process: seconds, of those that torch and pytest made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def layouts(built, monkeypatch):
    """Training with cp 1 and dp 4; evaluation with cp 4 and dp 1, seen from rank 3."""
    train, evaluation = built
    world = Sized(monkeypatch)
    world.sizes.update({(id(train), "dp"): 4, (id(evaluation), "cp"): 4})
    world.sizes.update({(id(evaluation), "tp_cp"): 4})
    world.rank_of.update({(id(train), "dp"): 3, (id(evaluation), "cp"): 3})
    return train, evaluation


class Model(nn.Module):
    """Holds the collection, so that a row adds its values next to a group."""

    def __init__(self, groups, **attributes):
        super().__init__()
        self.pg_collection = groups
        for name, value in attributes.items():
            setattr(self, name, value)


def check(model, layouts, read, inside, **options):
    """read() gives `inside` within the context, and the very same objects as before after it."""
    before = read()
    with hcp.eval_cp_context(model, *layouts, **options):
        assert read() == inside
    after = read()
    assert after == before
    return after


# ---- what holds a group --------------------------------------------------------------------------


def test_a_partial_has_its_groups_switched_in_place(layouts):
    train, evaluation = layouts
    reduce = functools.partial(dict, [train.cp], group=train.cp, size=3)
    model = Model(train, reduce=functools.partial(print, train.cp, group=train.dp), other=reduce)
    held = model.reduce
    check(
        model,
        layouts,
        lambda: (model.reduce.args, model.reduce.keywords["group"], model.other.args[0][0]),
        ((evaluation.cp,), evaluation.dp, evaluation.cp),
    )
    assert model.reduce is held
    assert model.reduce.args == (train.cp,)


def test_a_closure_and_the_defaults_of_a_function_are_switched(layouts):
    train, evaluation = layouts
    cp_group, cp_size = train.cp, 1

    def slice_batch(group=train.cp, *, other=train.dp):
        return group, other, cp_group, cp_size

    model = Model(train, get_batch=slice_batch)
    check(model, layouts, model.get_batch, (evaluation.cp, evaluation.dp, evaluation.cp, 4))
    assert model.get_batch() == (train.cp, train.dp, train.cp, 1)


def function_of(group):
    return lambda *args: group


class Called:
    """An object that is called as the function that it has."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


WRAPS_TORCH = functools.wraps(nn.functional.softmax)
DECORATORS = {
    "wraps of torch": [WRAPS_TORCH],
    "wraps of torch's C": [functools.wraps(nn.functional.scaled_dot_product_attention)],
    "wraps of the standard library": [functools.wraps(copy.deepcopy)],
    "a decorator of torch": [torch.no_grad()],
    "a decorator of the standard library": [contextlib.contextmanager],
    "a decorator of torch around wraps of torch": [WRAPS_TORCH, torch.no_grad()],
    "a cache around wraps of torch": [WRAPS_TORCH, functools.cache],
    "an object that is called": [Called],
}


@pytest.mark.parametrize("name", DECORATORS)
def test_functions_and_hooks_are_entered_whatever_decorates_them(layouts, name):
    train, evaluation = layouts
    function = function_of(train.cp)
    decorated = functools.reduce(lambda f, decorate: decorate(f), DECORATORS[name], function)
    check(Model(train, held=decorated), layouts, function, evaluation.cp)
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(decorated)
    check(Model(train, layer=layer), layouts, function, evaluation.cp)


def test_functions_of_torch_are_not_entered():
    for function in (nn.functional.softmax, nn.Module().add_module, copy.deepcopy):
        assert not is_open_function(function)
        assert not is_open_function(torch.no_grad()(function))
        assert not is_open_function(WRAPS_TORCH(torch.no_grad()(function)))


def test_a_bound_method_leads_to_its_object(layouts):
    train, evaluation = layouts
    helper = SimpleNamespace(group=train.cp)
    model = Model(train, forward_hook=MethodType(lambda self: self.group, helper))
    check(model, layouts, model.forward_hook, evaluation.cp)


def test_class_attributes_of_the_models_classes_are_switched(layouts):
    train, evaluation = layouts

    class Base(nn.Module):
        cp_group = train.cp
        by_name = {"cp": train.cp}  # noqa: RUF012
        cp_size = 1

    class Layer(Base):
        @staticmethod
        def helper(group=train.cp):
            return group

    model = Model(train, layer=Layer())
    check(
        model,
        layouts,
        lambda: (Layer.cp_group, Layer.by_name["cp"], Layer.cp_size, Layer.helper()),
        (evaluation.cp, evaluation.cp, 4, evaluation.cp),
    )
    assert "cp_group" not in vars(Layer)


def test_sets_are_switched_whole(layouts):
    train, evaluation = layouts
    model = Model(train, members={train.cp, train.tp}, frozen=frozenset([train.dp, 1]))
    held = model.members
    check(
        model,
        layouts,
        lambda: (set(model.members), model.frozen),
        ({evaluation.cp, train.tp}, frozenset([evaluation.dp, 1])),
    )
    assert model.members is held


def test_lists_and_tuples_of_groups_are_switched(layouts):
    train, evaluation = layouts
    model = Model(train, levels=[train.cp, train.dp], pair=(train.cp, "p2p"))
    check(
        model,
        layouts,
        lambda: (list(model.levels), model.pair),
        ([evaluation.cp, evaluation.dp], (evaluation.cp, "p2p")),
    )


class Noted(nn.Module):
    """Hooks and tensors that know a group, as real models have them."""

    def __init__(self, groups):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.weight.cp_group, self.weight.cp_size = groups.cp, 1
        self.register_buffer("bias", torch.zeros(1))
        self.bias.cp_group = groups.cp
        self.others = [torch.zeros(1)]
        self.others[0].cp_group = groups.cp
        self.seen = []
        group = groups.cp
        self.register_forward_pre_hook(lambda module, args: module.seen.append(group))
        self.register_forward_hook(functools.partial(self.note, group=group))
        self.weight.register_hook(lambda grad: self.seen.append(group))

    @staticmethod
    def note(module, args, output, group):
        module.seen.append(group)

    def forward(self, x):
        return x * self.weight

    def groups(self):
        self.seen.clear()
        self(torch.ones(1)).sum().backward()
        tensors = (self.weight, self.bias, *self.others)
        return [*self.seen, *(tensor.cp_group for tensor in tensors), self.weight.cp_size]


def test_hooks_and_attributes_of_tensors_are_switched(layouts):
    model = Model(layouts[0], layer=Noted(layouts[0]))
    for _ in range(2):
        check(model, layouts, model.layer.groups, [layouts[1].cp] * 6 + [4], strict=True)
    assert model.layer.groups() == [layouts[0].cp] * 6 + [1]
    assert "model.layer._forward_pre_hooks[0].<group>" in {
        slot.path for slot in find_slots(model, *layouts)
    }


class Holder:
    """One object that holds a group."""

    def __init__(self, held):
        self.held = held


def in_thread(local, group):
    """Another thread's value, which lives as long as the thread: give the function to end it."""
    ready, done = threading.Event(), threading.Event()

    def run():
        local.group = group
        ready.set()
        done.wait(60)
        seen.append(local.group)

    seen, thread = [], threading.Thread(target=run)
    thread.start()
    ready.wait(60)
    return lambda: (done.set(), thread.join(), seen[0])[2]


def array_of(*items):
    array = numpy.empty(len(items), dtype=object)
    array[:] = items
    return array


HOLDERS = {
    "a read-only view": (lambda g: MappingProxyType({"g": g}), lambda o: o["g"]),
    "a chain of mappings": (lambda g: ChainMap({}, {"g": g}), lambda o: o["g"]),
    "an array of objects": (lambda g: array_of(None, g), lambda o: o[1]),
    "an array without dimensions": (lambda g: array_of(g).reshape(()), lambda o: o[()]),
    "a list in an array": (lambda g: array_of([g], 1), lambda o: o[0][0]),
    "an exception": (lambda g: RuntimeError("text", g), lambda o: o.args[1]),
    "the cause of an exception": (
        lambda g: setattr(error := KeyError(1), "__cause__", ValueError(g)) or error,
        lambda o: o.__cause__.args[0],
    ),
    "a weak reference": (weakref.ref, lambda o: o()),
    "a weak proxy": (weakref.proxy, lambda o: o.__init__.__self__),
    "a named tuple": (lambda g: Parallel(g, 1, g.group_name), lambda o: o.cp_group),
}
Parallel = namedtuple("Parallel", "cp_group cp_size group_name")


@pytest.mark.parametrize("name", HOLDERS)
def test_a_group_is_switched_in(layouts, name):
    make, read = HOLDERS[name]
    model = Model(layouts[0], held=make(layouts[0].cp))
    held = model.held
    check(model, layouts, lambda: read(model.held), layouts[1].cp)
    assert model.held is held


def test_what_every_thread_has_of_its_own_is_switched(layouts):
    train, evaluation = layouts
    for local in (threading.local(), type("Own", (threading.local,), {})()):
        local.group = train.cp
        end = in_thread(local, train.cp)
        model = Model(train, local=local)
        check(model, layouts, lambda local=local: local.group, evaluation.cp)
        with hcp.eval_cp_context(model, *layouts):
            assert end() is evaluation.cp


def test_a_named_tuple_is_switched_whole_with_sizes_and_names(layouts):
    train, evaluation = layouts
    first = Parallel(train.cp, 1, train.cp.group_name)
    alone = Parallel(None, 1, "other")
    model = Model(train, first=first, pair=(first, 7), alone=alone)
    inside = Parallel(evaluation.cp, 4, evaluation.cp.group_name)
    check(
        model,
        layouts,
        lambda: (model.first, model.pair, model.alone),
        (inside, (inside, 7), Parallel(None, 4, "other")),
    )
    assert model.first is first
    assert model.alone is alone
    (finding,) = hcp.audit(model, *layouts).uncovered
    assert finding.path == "model.alone.cp_group"


def test_an_excluded_item_of_a_tuple_stays(layouts):
    tower = Model(layouts[0])
    model = Model(layouts[0], parts=(tower, 1))
    with hcp.eval_cp_context(model, *layouts, exclude=[tower]):
        assert model.pg_collection is layouts[1]
        assert tower.pg_collection is layouts[0]


# ---- what was derived from one -------------------------------------------------------------------


class MambaContext:
    """Mamba's plain object: a group, its size, and what its constructor makes of them."""

    def __init__(self, cp_group, nheads_local_tp):
        self.cp_group = cp_group
        self.nheads_local_tp = nheads_local_tp
        self.cp_size = SIZES[id(cp_group)]
        assert nheads_local_tp % self.cp_size == 0, "heads must be divisible by cp_size"
        self.nheads_local_tpcp = nheads_local_tp // self.cp_size
        if self.cp_size > 1:
            self.cp_rank = 3


SIZES = {}


@pytest.fixture
def mamba(layouts):
    SIZES.update({id(layouts[0].cp): 1, id(layouts[1].cp): 4})
    rules.register_rebind(MambaContext, rebuild=True)
    yield lambda heads: Model(
        layouts[0], mixer=Model(layouts[0], cp=MambaContext(layouts[0].cp, heads))
    )
    rules.REGISTERED.pop(MambaContext, None)
    SIZES.clear()


def test_a_plain_object_is_rebuilt_by_its_own_constructor(layouts, mamba):
    model = mamba(8)
    inner = model.mixer.cp
    before = dict(vars(inner))
    with hcp.eval_cp_context(model, *layouts):
        assert model.mixer.cp is inner
        assert (inner.cp_size, inner.cp_rank, inner.nheads_local_tpcp) == (4, 3, 2)
        assert inner.cp_group is layouts[1].cp
    assert vars(inner) == before
    assert not hasattr(inner, "cp_rank")


def test_a_constructors_own_check_runs_again_and_its_refusal_names_the_object(layouts, mamba):
    model = mamba(6)
    with (
        pytest.raises(ValueError, match="heads must be divisible") as caught,
        hcp.eval_cp_context(model, *layouts),
    ):
        pytest.fail("the context was entered")
    assert str(caught.value).startswith("model.mixer.cp (MambaContext) cannot be rebound: it ass")
    assert model.mixer.cp.cp_size == 1


@dataclass
class TransformerConfig:
    context_parallel_size: int = 1
    data_parallel_size: int = 4
    cp_comm_type: str = "p2p"
    layers: list = field(default_factory=list)


def test_configs_and_their_copies_are_switched_though_they_hold_no_group(layouts):
    config = TransformerConfig()
    model = Model(layouts[0], config=config)
    model.layer = Model(layouts[0], config=copy.copy(config))
    config.layers.append(copy.copy(config))
    check(
        model,
        layouts,
        lambda: [
            (c.context_parallel_size, c.data_parallel_size)
            for c in (model.config, model.layer.config, config.layers[0])
        ],
        [(4, 1)] * 3,
    )
    assert TransformerConfig.context_parallel_size == 1


def test_sizes_ranks_and_flags_are_switched_by_name_and_value(layouts):
    model = Model(
        layouts[0],
        cp_size=1,
        cp_rank=0,
        _cp_size=1,
        use_cp=False,
        cp_global_ranks=[0],
        dp_rank=3,
        context_parallel_lm=1,
        settings={"cp_size": 1},
        other_size=1,
    )

    def read():
        return (
            model.cp_size,
            model.cp_rank,
            model._cp_size,
            model.use_cp,
            list(model.cp_global_ranks),
            model.dp_rank,
            model.context_parallel_lm,
            model.settings["cp_size"],
            model.other_size,
        )

    check(model, layouts, read, (4, 3, 4, True, [0, 1, 2, 3], 0, 4, 4, 1))


FORMS = {
    "an integer of NumPy": (numpy.int64, int),
    "a number of NumPy": (numpy.float32, float),
    "an array": (numpy.array, int),
    "an array of one": (lambda n: numpy.array([n]), lambda held: held.item()),
    "a tensor": (torch.tensor, int),
    "a tensor of one": (lambda n: torch.tensor([n], dtype=torch.int32), int),
    "a float": (float, float),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_derived_number_is_switched_in_the_form_it_has(layouts, form):
    make, read = FORMS[form]
    model = Model(layouts[0], cp_size=make(1), cp_shards=make(3))
    held = model.cp_size
    with hcp.eval_cp_context(model, *layouts):
        assert read(model.cp_size) == 4
        assert type(model.cp_size) is type(held)
        assert getattr(model.cp_size, "dtype", None) == getattr(held, "dtype", None)
        assert getattr(model.cp_size, "shape", None) == getattr(held, "shape", None)
    assert model.cp_size is held
    (finding,) = hcp.audit(model, *layouts).uncovered
    assert finding.path == "model.cp_shards"


def test_a_derived_buffer_and_ranks_in_any_form_are_switched(layouts):
    model = Model(layouts[0], cp_ranks=torch.tensor([0]), cp_global_ranks=range(1))
    model.nest = SimpleNamespace(cp_ranks=numpy.array([0]), use_cp=numpy.bool_(False))
    model.register_buffer("cp_size", torch.tensor(1))

    def read():
        ranks = (model.cp_ranks, model.cp_global_ranks, model.nest.cp_ranks)
        return [*map(list, ranks), int(model.cp_size), bool(model.nest.use_cp)]

    check(model, layouts, read, [[0, 1, 2, 3]] * 3 + [4, True])
    assert model.cp_global_ranks == range(1)


def test_names_of_groups_are_switched_by_name_and_value(layouts):
    train, evaluation = layouts
    name = train.cp.group_name
    model = Model(train, cp_group_name=name, _pg_name=name, group_name=train.tp.group_name)
    model.label, model.options = name, {"process_group_name": name}
    new = evaluation.cp.group_name
    check(
        model,
        layouts,
        lambda: (model.cp_group_name, model._pg_name, model.options["process_group_name"]),
        (new, new, new),
    )
    assert (model.label, model.group_name) == (name, train.tp.group_name)


def test_globals_in_capitals_are_switched_as_part_of_the_model(layouts):
    state = {"_CONTEXT_PARALLEL_GROUP": layouts[0].cp, "_CONTEXT_PARALLEL_GLOBAL_RANKS": [0]}
    state |= {"CP_SIZE": 1, "Cp_size": 1}
    model = Model(layouts[0])
    with hcp.eval_cp_context([model, state], *layouts):
        assert state["_CONTEXT_PARALLEL_GROUP"] is layouts[1].cp
        assert state["_CONTEXT_PARALLEL_GLOBAL_RANKS"] == [0, 1, 2, 3]
        assert (state["CP_SIZE"], state["Cp_size"]) == (4, 1)
    assert (state["_CONTEXT_PARALLEL_GLOBAL_RANKS"], state["CP_SIZE"]) == ([0], 1)


def test_a_value_that_the_training_layout_does_not_give_is_left_and_reported(layouts):
    model = Model(layouts[0], cp_size=2, cp_rank=True)
    with hcp.eval_cp_context(model, *layouts):
        assert (model.cp_size, model.cp_rank) == (2, True)
    (finding,) = hcp.audit(model, *layouts).uncovered
    assert finding.path == "model.cp_size"
    assert "is 2, and the cp size of train_pgs is 1" in finding.reason


def test_the_table_of_names_can_be_extended(layouts, monkeypatch):
    monkeypatch.setattr(hcp.rebinding.derived, "DERIVED", dict(hcp.rebinding.derived.DERIVED))
    model = Model(layouts[0], shards=1, _shards=1)
    register_derived("shards", "cp", "size")
    check(model, layouts, lambda: (model.shards, model._shards), (4, 4))
    with pytest.raises(ValueError, match="kind is 'sizes', expected one of size, rank"):
        register_derived("shards", "cp", "sizes")
    with pytest.raises(ValueError, match="role is 'ccp', expected one of"):
        register_derived("shards", role="ccp")
    with pytest.raises(ValueError, match="name is '_', expected the name of an attribute"):
        register_derived("_")
    with pytest.raises(ValueError, match=r"caches is 'cos', expected a tuple of names: \('cos',\)"):
        rules.register_rebind(MambaContext, caches="cos")
    with pytest.raises(ValueError, match="has rebuild and attributes, expected one of them"):
        rules.register_rebind(MambaContext, rebuild=True, attributes=lambda obj, pgs: {})


# ---- caches --------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Angles of this rank's positions, cached twice: by functools and in buffers."""

    def __init__(self, cp_group):
        super().__init__()
        self.cp_group = cp_group
        self.max_seq_len_cached = 0

    @functools.lru_cache(maxsize=32)  # noqa: B019
    def forward(self, length):
        return (self.cp_group, length)

    def get_cached_cos_sin(self, length):
        if length > self.max_seq_len_cached:
            self.max_seq_len_cached = length
            self.register_buffer("cos_cached", torch.full((length,), float(id(self.cp_group))))
        return self.cos_cached[0].item()


@pytest.mark.parametrize("warm", [False, True])
def test_functools_caches_and_rotary_buffers_never_cross_an_edge(layouts, warm):
    train, evaluation = layouts
    model = Model(train, rotary=Rotary(train.cp))
    if warm:
        model.rotary.get_cached_cos_sin(8)
    kept = model.rotary._buffers.get("cos_cached")
    expected = torch.tensor(float(id(evaluation.cp))).item()
    for _ in range(2):
        assert model.rotary(8) == (train.cp, 8)
        with hcp.eval_cp_context(model, *layouts):
            assert model.rotary(8) == (evaluation.cp, 8)
            assert model.rotary.get_cached_cos_sin(4) == expected
        assert model.rotary._buffers.get("cos_cached") is kept
        assert model.rotary.max_seq_len_cached == (8 if warm else 0)
        assert model.rotary(8) == (train.cp, 8)
    Rotary.forward.cache_clear()


@dataclass(slots=True)
class SlottedCache:
    cos_cached: object
    max_seq_len_cached: int


@pytest.mark.parametrize("kind", ["object", "slots", "dictionary"])
def test_rotary_caches_of_objects_that_are_no_modules_are_invalid_inside(layouts, kind):
    kept = torch.ones(2)
    names = {"cos_cached": kept, "max_seq_len_cached": 2}
    make = {"object": SimpleNamespace, "slots": SlottedCache, "dictionary": dict}[kind]
    cache = make(**names)
    read = cache.__getitem__ if kind == "dictionary" else lambda name: getattr(cache, name)
    model = Model(layouts[0], cache=cache, freqs=make(cos_cached=kept, max_seq_len_cached=0))
    with hcp.eval_cp_context(model, *layouts):
        assert read("max_seq_len_cached") == 0
        assert kind == "slots" or "sin_cached" not in (
            cache if kind == "dictionary" else vars(cache)
        )
        if kind != "slots":
            (cache if kind == "dictionary" else vars(cache))["sin_cached"] = torch.zeros(1)
    assert read("max_seq_len_cached") == 2
    assert read("cos_cached") is kept
    assert kind == "slots" or "sin_cached" not in (cache if kind == "dictionary" else vars(cache))


def test_a_cache_that_is_none_until_made_is_none_inside(layouts):
    model = Model(layouts[0], freqs_cached=torch.ones(3))
    kept = model.freqs_cached
    with hcp.eval_cp_context(model, *layouts):
        assert model.freqs_cached is None
        model.freqs_cached = torch.zeros(1)
    assert model.freqs_cached is kept


# ---- attention that is switched by a method ------------------------------------------------------


def test_attention_is_switched_through_its_method_with_its_own_communication_type(layouts):
    config = SimpleNamespace(cp_comm_type=["p2p", "a2a"])
    layers = [TEAttention(config, 1), TEAttention(config, 2), TEAttention()]
    model = Model(layouts[0], layers=nn.ModuleList(layers))
    check(
        model,
        layouts,
        lambda: [(x.cp_group, x.cp_global_ranks, x.cp_comm_type) for x in layers],
        [(layouts[1].cp, [0, 1, 2, 3], kind) for kind in ("p2p", "a2a", "p2p")],
    )
    assert layers[1].calls == ["a2a", "p2p"]
    assert layers[1].cp_group is None


def test_a_method_that_raises_leaves_everything_as_it_was(layouts):
    model = Model(layouts[0], layers=nn.ModuleList(TEAttention() for _ in range(4)), cp_size=1)
    model.layers[2].set_context_parallel_group = lambda *arguments: 1 / 0
    with pytest.raises(ZeroDivisionError) as caught, hcp.eval_cp_context(model, *layouts):
        pytest.fail("the context was entered")
    assert "model.layers[2].set_context_parallel_group()" in caught.value.__notes__[0]
    assert [layer.cp_group for layer in model.layers] == [None] * 4
    assert model.pg_collection is layouts[0]


@pytest.mark.parametrize("kind", ["a2a", ["p2p", "a2a"]])
def test_attention_whose_heads_do_not_divide_is_refused_by_name(layouts, kind):
    attention = TEAttention(SimpleNamespace(cp_comm_type=kind), 2)
    attention.num_attention_heads, attention.num_gqa_groups = 8, 4
    model = Model(layouts[0], layer=attention)
    with hcp.eval_cp_context(model, *layouts):
        assert attention.cp_comm_type == "a2a"
    attention.num_gqa_groups = 2
    with (
        pytest.raises(ValueError, match=r"model\.layer \(TEAttention\) .* num_gqa_groups 2 over"),
        hcp.eval_cp_context(model, *layouts),
    ):
        pytest.fail("the context was entered")
    attention.config.cp_comm_type = "p2p"
    with hcp.eval_cp_context(model, *layouts):
        assert attention.cp_group is layouts[1].cp


# ---- delta nets, by the method that Megatron-Core's have -----------------------------------------


class DeltaNet(nn.Module):
    """The shape of Megatron-Core's gated delta nets after 0.16.1, KDA among them."""

    def __init__(self, groups, key_heads=8):
        super().__init__()
        self.pg_collection, self.cp_size, self.tp_size = groups, 1, 1
        self.num_key_heads, self.num_value_heads = key_heads, 16
        self.weight = nn.Parameter(torch.ones(2))
        self._chunkwise_cp_context_cache = {}
        self._setup_variant_attrs()

    def _setup_variant_attrs(self):
        self.in_proj_split_sections = (self.num_key_heads, self.num_value_heads)
        self.feat_dim_split = tuple(n // self.cp_size for n in self.in_proj_split_sections)
        self.kernel = functools.partial(max, self.cp_size)


def test_a_delta_net_has_the_splits_of_its_cp_size_and_no_context_of_another(layouts):
    net = DeltaNet(layouts[0])
    net._chunkwise_cp_context_cache[16, 1] = "of the training group"
    model, before = Model(layouts[0], net=net), dict(vars(net))
    for _ in range(2):
        with hcp.eval_cp_context(model, *layouts, strict=True):
            assert (net.cp_size, net.feat_dim_split) == (4, (2, 4))
            assert net.in_proj_split_sections == (8, 16)
            assert net._chunkwise_cp_context_cache == {}
            assert net.pg_collection is layouts[1]
            net._chunkwise_cp_context_cache[16, 1] = "of the eval group"
        assert vars(net) == before
        assert all(vars(net)[name] is value for name, value in before.items())
        assert net._chunkwise_cp_context_cache == {(16, 1): "of the training group"}


def test_a_delta_net_whose_heads_do_not_divide_is_refused_by_name(layouts):
    model = Model(layouts[0], net=DeltaNet(layouts[0], key_heads=6))
    with (
        pytest.raises(ValueError, match=r"model\.net \(DeltaNet\) .* num_key_heads 6, expected a"),
        hcp.eval_cp_context(model, *layouts),
    ):
        pytest.fail("the context was entered")
    assert model.net.cp_size == 1


# ---- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "megatron.core.transformer.dot_product_attention.DotProductAttention",
        "megatron.bridge.models.gemma.gemma2_provider.Gemma2DotProductAttention",
        "megatron.bridge.models.gemma.modeling_gemma2.Gemma2DotProductAttention",
    ],
)
def test_attention_over_own_tokens_is_refused_by_name_whatever_its_constructor_saw(layouts, name):
    module, _, cls = name.rpartition(".")
    local = type(cls, (nn.Module,), {"__module__": module})
    model = Model(layouts[0], core_attention=local())
    with (
        pytest.raises(ValueError, match=rf"model\.core_attention \({cls}\) cannot be rebound"),
        hcp.eval_cp_context(model, *layouts),
    ):
        pytest.fail("the context was entered")
    with hcp.eval_cp_context(model, *layouts, exclude=["core_attention"]):
        assert model.pg_collection is layouts[1]


@pytest.mark.parametrize("name", ["mamba_context_parallel.Mamba", "gated_delta_product.GDP"])
def test_megatrons_context_objects_are_rebuilt_wherever_they_are(layouts, name):
    module, _, prefix = name.rpartition(".")
    module = f"megatron.core.ssm.{module}"
    cls = type(f"{prefix}ContextParallel", (MambaContext,), {"__module__": module})
    SIZES.update({id(layouts[0].cp): 1, id(layouts[1].cp): 4})
    model = Model(layouts[0], mixer=SimpleNamespace(cp=cls(layouts[0].cp, 8)))
    check(model, layouts, lambda: model.mixer.cp.nheads_local_tpcp, 2)
    SIZES.clear()


def test_a_users_rule_is_asked_after_the_one_that_comes_with_hcp_and_so_wins(layouts):
    module = "megatron.core.ssm.mamba_context_parallel"
    cls = type("MambaContextParallel", (MambaContext,), {"__module__": module})
    SIZES.update({id(layouts[0].cp): 1, id(layouts[1].cp): 4})
    name = f"{module}.MambaContextParallel"
    rules.register_rebind(name, attributes=lambda obj, pgs: {"nheads_local_tpcp": 8})
    try:
        model = Model(layouts[0], mixer=SimpleNamespace(cp=cls(layouts[0].cp, 8)))
        with hcp.eval_cp_context(model, *layouts):
            assert (model.mixer.cp.nheads_local_tpcp, model.mixer.cp.cp_size) == (8, 4)
    finally:
        rules.REGISTERED.pop(name)
        SIZES.clear()


class Router(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts, self.share = experts, experts


def test_a_rule_says_what_a_class_holds_in_a_layout(layouts):
    rules.register_rebind(
        Router, attributes=lambda r, pgs: {"share": r.experts // pgs.size("cp")}, caches=("seen",)
    )
    try:
        model = Model(layouts[0], router=Router(8), alien=Router(8))
        model.alien.share = 5
        model.router.seen = "tokens"
        check(
            model,
            layouts,
            lambda: (model.router.share, model.alien.share, model.router.seen),
            (2, 5, None),
        )
    finally:
        rules.REGISTERED.pop(Router, None)


def test_a_rule_may_refuse_by_name(layouts):
    rules.register_rebind(Router, refuse=lambda r, pgs: f"no router for CP {pgs.size('cp')}")
    try:
        model = Model(layouts[0], router=Router(8))
        with (
            pytest.raises(
                ValueError, match=r"model\.router \(Router\) cannot .* no router for CP 4"
            ),
            hcp.eval_cp_context(model, *layouts),
        ):
            pytest.fail("the context was entered")
    finally:
        rules.REGISTERED.pop(Router, None)


# ---- exclude, audit, strict ----------------------------------------------------------------------


def vision_language(layouts):
    vision = Model(layouts[0], cp_size=1, config=TransformerConfig())
    return Model(layouts[0], vision_model=vision, language_model=Model(layouts[0], cp_size=1))


@pytest.mark.parametrize("by", ["name", "path", "glob", "object", "class"])
def test_an_excluded_subtree_stays_as_it_is(layouts, by):
    model = vision_language(layouts)

    class Tower(Model):
        pass

    model.vision_model.__class__ = Tower
    exclude = {
        "name": "vision_model",
        "path": "model.vision_model",
        "glob": "*vision*",
        "object": model.vision_model,
        "class": Tower,
    }[by]
    with hcp.eval_cp_context(model, *layouts, exclude=[exclude]):
        assert model.vision_model.pg_collection is layouts[0]
        assert model.vision_model.cp_size == 1
        assert model.vision_model.config.context_parallel_size == 1
        assert model.language_model.pg_collection is layouts[1]
        assert model.language_model.cp_size == 4


@pytest.mark.parametrize("exclude", ["vision", Model])
def test_an_exclude_that_is_no_sequence_is_refused(layouts, exclude):
    message = re.escape(f"exclude is {exclude!r}, expected a sequence: ({exclude!r},)")
    with (
        pytest.raises(ValueError, match=message),
        hcp.eval_cp_context(Model(layouts[0]), *layouts, exclude=exclude),
    ):
        pass
    with pytest.raises(ValueError, match=message):
        hcp.audit(Model(layouts[0]), *layouts, exclude=exclude)


def test_an_exclude_that_matches_nothing_is_refused(layouts):
    with pytest.raises(ValueError, match="exclude has 'vison', which the model does not reach"):
        hcp.audit(vision_language(layouts), *layouts, exclude=["vison"])


def test_audit_lists_slots_and_what_is_not_covered(layouts):
    train, _ = layouts
    stray = dist.new_group([0])
    model = Model(train, nheads_local_tpcp=2, cp_group=None, tp_cp_group=stray, cp_size=1)
    model.size_of = train.cp.size
    model.vision_model = Model(train)
    audit = hcp.audit(model, *layouts, exclude=["vision_model"])
    assert {f.path for f in audit.uncovered} == {
        "model.nheads_local_tpcp",
        "model.cp_group",
        "model.tp_cp_group",
        "model.size_of.__self__",
    }
    assert [slot.path for slot in audit.slots] == ["model.pg_collection", "model.cp_size"]
    assert audit.excluded == ["model.vision_model"]
    assert "model.nheads_local_tpcp: is 2, by its name derived from a CP group" in str(audit)
    shown = audit._repr_html_()
    assert "2 slots, 4 places that no switch covers" in shown
    assert shown.count("<tr>") == 1 + 2 + 4 + 1, "a row of heads, and one for each place"
    with (
        pytest.raises(ValueError, match=r"strict: 4 places(.|\n)*model\.size_of\.__self__: holds"),
        hcp.eval_cp_context(model, *layouts, exclude=["vision_model"], strict=True),
    ):
        pytest.fail("the context was entered")


def test_buffers_that_were_sized_for_training_are_reported_where_they_are_too_small(layouts):
    train, evaluation = layouts
    config_class = type("Config", (SimpleNamespace,), {"__module__": "megatron.core.a_module"})
    model = Model(train, config=config_class(tp_comm_overlap=True))
    assert hcp.audit(model, train, evaluation).uncovered == []
    back = Model(evaluation, config=config_class(tp_comm_overlap=True))
    (finding,) = hcp.audit(back, evaluation, train).uncovered
    assert finding.path == "model.config.tp_comm_overlap"
    assert "made for the rows of CP = 4, and a rank has more of them under CP = 1" in finding.reason
    back.config.tp_comm_overlap = False
    assert hcp.audit(back, evaluation, train).uncovered == []


def test_strict_enters_where_everything_is_covered(layouts):
    model = Model(layouts[0], cp_size=1)
    with hcp.eval_cp_context(model, *layouts, strict=True):
        assert model.cp_size == 4


def elsewhere(model, layouts, **options):
    return [finding.path for finding in hcp.audit(model, *layouts, **options).elsewhere]


def generator_of(group):
    yield group
    yield group


def started(generator):
    next(generator)
    return generator


UNKNOWN = {
    "a generator": (lambda g: started(generator_of(g)), "generator generator_of"),
    "an iterator": (lambda g: iter([g]), r"model\.unknown\[0\]"),
    "a queue": (lambda g: (q := queue.Queue(), q.put(g))[0], r"queue\.Queue object"),
    "a weak dictionary": (
        lambda g: weakref.WeakValueDictionary(a=g),
        r"weakref\.WeakValueDictionary object\.data\['a'\]",
    ),
    "an array in an iterator": (lambda g: iter([array_of(g)]), r"model\.unknown\[0\]\[0\]$"),
    "an object elsewhere": (Holder, r"test_rebind_coverage\.Holder object\.held"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_the_walk_does_not_know_is_found_by_asking_the_groups(layouts, name):
    make, path = UNKNOWN[name]
    model = Model(layouts[0], cp_size=1)
    before = elsewhere(model, layouts)
    unknown = make(layouts[0].cp)
    if name != "an object elsewhere":
        model.unknown = unknown
    (found,) = set(elsewhere(model, layouts)) - set(before)
    assert re.match(path, found) or re.search(path, found)
    with (
        pytest.raises(
            ValueError, match=r"strict: \d+ place(.|\n)*holds the group 'cp' of train_pgs"
        ),
        hcp.eval_cp_context(model, *layouts, strict=True),
    ):
        pytest.fail("the context was entered")
    assert set(elsewhere(model, layouts, exclude=[unknown])) == set(before)


def says_no(*args):
    raise RuntimeError(f"not ready, {len(args)} arguments")


class Unready:
    """A proxy whose object is not there yet, as of packages that make proxies."""

    def __init__(self, held):
        object.__setattr__(self, "held", held)

    __getattr__ = __bool__ = __len__ = __iter__ = __eq__ = __hash__ = __repr__ = says_no


class Unanswering(Unready):
    __getattribute__ = says_no


class ClassUnready(Unready):
    __class__ = property(says_no)


class AttributesUnready(Unready):
    __dict__ = property(says_no)


class SaysModule(Unready):
    __class__ = property(lambda self: nn.Module)


class SlotUnready:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


class SlotHidden(SlotUnready):
    __slots__ = ()
    held = property(says_no, SlotUnready.held.__set__)


class LazyDict(dict):
    items = keys = values = get = __iter__ = __contains__ = __getitem__ = __len__ = says_no


class LazyList(list):
    __iter__ = __getitem__ = __len__ = says_no


class LazyTuple(tuple):
    __iter__ = __getitem__ = __len__ = says_no


class LazyError(RuntimeError):
    args = property(says_no)


class UnnamedKey(str):
    __repr__ = __str__ = says_no


class Unhashable:
    """A key that has lost its hash."""

    def __init__(self):
        self.hashed = False

    def __hash__(self):
        return says_no(self) if self.hashed else setattr(self, "hashed", True) or 1


NO_MODULE = type("NoModule", (Holder,), {"__module__": None})

STRANGERS = {
    **{kind.__name__: kind for kind in Unready.__subclasses__()},
    "Unready": Unready,
    "SlotHidden": SlotHidden,
    "NoModule": NO_MODULE,
    "LazyDict": lambda g: Holder(LazyDict(held=g)),
    "LazyList": lambda g: Holder(LazyList([g])),
    "LazyTuple": lambda g: Holder(LazyTuple([g])),
    "LazyError": LazyError,
    "UnnamedKey": lambda g: Holder({UnnamedKey("a"): g}),
    "Unhashable": lambda g: Holder({Unhashable(): g}),
    "in strangers": lambda g: Unready(Unanswering({"deep": LazyList([g])})),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_elsewhere_is_found_and_named_though_it_answers_no_question(layouts, name):
    model = Model(layouts[0], cp_size=1)
    before = elsewhere(model, layouts)
    stranger = STRANGERS[name](layouts[0].cp)
    assert len(set(elsewhere(model, layouts)) - set(before)) == 1
    with (
        pytest.raises(
            ValueError, match=r"strict: \d+ place(.|\n)*holds the group 'cp' of train_pgs"
        ),
        hcp.eval_cp_context(model, *layouts, strict=True),
    ):
        pytest.fail("the context was entered")
    assert elsewhere(model, layouts, exclude=[stranger]) == before
    with hcp.eval_cp_context(model, *layouts):
        assert model.cp_size == 4


@pytest.mark.parametrize("kind", [Unready, *Unready.__subclasses__(), NO_MODULE])
def test_a_stranger_in_the_model_is_switched_though_it_answers_no_question(layouts, kind):
    model = Model(layouts[0], cp_size=1)
    model.strangers = [kind(layouts[0].cp)]
    before = len(find_slots(Model(layouts[0], cp_size=1), *layouts))
    assert len(find_slots(model, *layouts)) == before + 1
    for strict in (False, True):
        with hcp.eval_cp_context(model, *layouts, strict=strict):
            assert own_attributes(model.strangers[0]) == {"held": layouts[1].cp}
    assert own_attributes(model.strangers[0]) == {"held": layouts[0].cp}


def test_strict_finds_what_is_new_elsewhere_though_the_model_is_the_same(layouts):
    model = Model(layouts[0], cp_size=1)
    for _ in range(2):
        with hcp.eval_cp_context(model, *layouts, strict=True):
            assert model.cp_size == 4
    late = Holder({"deep": [layouts[0].cp]})
    with (
        pytest.raises(ValueError, match=r"Holder object\.held\['deep'\]\[0\]: holds the group"),
        hcp.eval_cp_context(model, *layouts, strict=True),
    ):
        pytest.fail("the context was entered")
    with hcp.eval_cp_context(model, *layouts, strict=True, exclude=[late]):
        assert model.cp_size == 4
    with hcp.eval_cp_context([model, late], *layouts, strict=True):
        assert late.held["deep"] == [layouts[1].cp]


def test_a_function_elsewhere_is_found_though_it_wraps_one_of_torch(layouts):
    model = Model(layouts[0], cp_size=1)
    before = elsewhere(model, layouts)
    late = WRAPS_TORCH(function_of(layouts[0].cp))
    (found,) = set(elsewhere(model, layouts)) - set(before)
    assert re.search(r"<group>$", found)
    assert late() is layouts[0].cp


def test_global_variables_that_hold_a_group_are_found(layouts):
    model = Model(layouts[0])
    module = ModuleType("a_module_of_the_trainer")
    vars(module).update(__spec__=None, GROUP=layouts[0].cp)
    sys.modules[module.__name__] = module
    try:
        path = "the globals of a_module_of_the_trainer['GROUP']"
        assert path in elsewhere(model, layouts)
        assert path not in elsewhere(model, layouts, exclude=[path])
        assert path not in elsewhere([model, vars(module)], layouts)
    finally:
        del sys.modules[module.__name__]


def test_another_model_is_not_the_model_unless_the_trainer_keeps_it(layouts):
    model = Model(layouts[0])
    teacher = Model(layouts[0], layer=Model(layouts[0], cp_group=layouts[0].cp))
    assert elsewhere(model, layouts) == []
    trainer = Holder([teacher])
    (path,) = elsewhere(model, layouts)
    assert path == "test_rebind_coverage.Holder object.held[0].layer.cp_group"
    assert elsewhere(model, layouts, exclude=[teacher]) == []
    assert elsewhere([model, teacher], layouts) == []
    assert trainer.held == [teacher]


def test_what_an_excluded_object_holds_is_not_elsewhere(layouts):
    tower = Model(layouts[0], inner=Holder([layouts[0].cp]), other=iter([layouts[0].cp]))
    model = Model(layouts[0], tower=tower)
    keeper = Holder(tower)
    assert elsewhere(Model(layouts[0]), layouts) != []
    assert elsewhere(Model(layouts[0]), layouts, exclude=[tower]) == []
    assert elsewhere(model, layouts, exclude=["tower"]) == []
    assert keeper.held is tower


def test_a_trainers_own_collection_is_not_elsewhere(layouts):
    source = SimpleNamespace(**{role: getattr(layouts[0], role) for role in layouts[0].roles})
    train = ProcessGroups.from_existing(source)
    assert elsewhere(Model(train), (train, layouts[1])) == []


def test_a_group_that_is_a_key_is_reported_and_stays(layouts):
    train, _ = layouts
    model = Model(train, masks={(train.cp, 8): "mask"}, by_group={train.cp: 1, train.tp: 2})
    findings = {f.path: f.reason for f in hcp.audit(model, *layouts).uncovered}
    assert set(findings) == {"model.masks[tuple 0]", "model.by_group[ProcessGroup 0]"}
    assert all("a key that is, or has in it, a group of train_pgs" in r for r in findings.values())
    with hcp.eval_cp_context(model, *layouts):
        assert train.cp in model.by_group


def test_a_weak_reference_with_a_callback_is_reported(layouts):
    model = Model(layouts[0], ref=weakref.ref(layouts[0].cp, print))
    (finding,) = hcp.audit(model, *layouts).uncovered
    assert str(finding) == "model.ref: is a weak reference with a callback to the group 'cp'"


# ---- one object in two roles ---------------------------------------------------------------------


def test_one_object_in_two_roles_is_told_apart_by_the_slots_name(layouts):
    train, evaluation = layouts
    groups = {role: getattr(train, role) for role in train.roles} | {"dp": train.dp_cp}
    aliased = ProcessGroups.from_existing(groups)
    model = Model(
        aliased, dp_group=train.dp_cp, dp_cp_group=train.dp_cp, data_parallel_group=train.dp_cp
    )
    with hcp.eval_cp_context(model, aliased, evaluation):
        assert model.dp_group is evaluation.dp
        assert model.data_parallel_group is evaluation.dp
        assert model.dp_cp_group is train.dp_cp
    model.reduction = train.dp_cp
    with pytest.raises(
        ValueError, match=r"model\.reduction holds .* 'dp' and 'dp_cp' are the same"
    ):
        hcp.audit(model, aliased, evaluation)


# ---- the table is kept ---------------------------------------------------------------------------


def count_walks(monkeypatch):
    walks = []
    run = hcp.rebinding.walk.Walk.run
    monkeypatch.setattr(
        hcp.rebinding.walk.Walk, "run", lambda self, m: (walks.append(1), run(self, m))
    )
    return walks


def parameter_of(groups):
    parameter = nn.Parameter(torch.zeros(1))
    parameter.cp_group = groups.cp
    return parameter


CHANGES = {
    "an attribute": lambda m, g: setattr(m.a, "cp_group", g.cp),
    "a module": lambda m, g: m.add_module("c", Model(g)),
    "a replaced module": lambda m, g: setattr(m, "a", Model(g)),
    "a list": lambda m, g: m.items.append(g.cp),
    "a dictionary": lambda m, g: m.table.update(cp=g.cp),
    "a set": lambda m, g: m.bag.add(g.cp),
    "a derived size": lambda m, g: setattr(m.a, "cp_size", 1),
    "a hook": lambda m, g: m.a.register_forward_hook(lambda *args, group=g.cp: None),
    "an attribute of a parameter": lambda m, g: setattr(m.a.weight, "cp_group", g.cp),
    "a parameter": lambda m, g: setattr(m.a, "weight", parameter_of(g)),
    "a slot's value": lambda m, g: setattr(m.a, "pg_collection", None),
}


def hooks_of(module):
    return module._forward_hooks.values()


@pytest.mark.parametrize("change", CHANGES)
def test_the_table_is_made_once_and_again_when_the_structure_changes(layouts, monkeypatch, change):
    walks = count_walks(monkeypatch)
    train, evaluation = layouts
    a = Model(train, cp_size=2, steps=0, loss=0.0, mark=None, weight=nn.Parameter(torch.ones(1)))
    model = Model(train, a=a, b=Model(train), items=[1], table={"x": 1}, bag={1})
    for step in range(4):
        model.a.steps, model.a.loss, model.b.training = step + 1000, step / 3, bool(step % 2)
        with hcp.eval_cp_context(model, *layouts):
            assert model.b.pg_collection is evaluation
    assert len(walks) == 1
    CHANGES[change](model, train)
    with hcp.eval_cp_context(model, *layouts):
        expected = places(model, "model")
        assert all(value is not train.cp and value is not train for *_, value, _ in expected)
        assert train.cp not in model.items
        assert train.cp not in model.bag
        for parameter in model.a.parameters():
            assert getattr(parameter, "cp_group", None) is not train.cp
        assert all(h.__kwdefaults__["group"] is not train.cp for h in hooks_of(model.a))
    assert len(walks) == 2
    with hcp.eval_cp_context(model, *layouts):
        pass
    assert len(walks) == 2


class Renamed(nn.Module):
    """Has attributes of any names."""

    def __init__(self, groups, **attributes):
        super().__init__()
        self.cp_group = groups.cp
        self.layer = nn.Linear(1, 1)
        vars(self).update(attributes)


class Variable:
    """A closure's variable."""

    def __init__(self, cp_size):
        def read():
            return cp_size

        def write(new):
            nonlocal cp_size
            cp_size = new

        self.read, self.write = read, write


def cell_of(size):
    variable = Variable(size)
    return {"read": variable.read, "write": variable.write}


def tensor_of(group):
    tensor = torch.zeros(1)
    tensor.cp_group = group
    return tensor


def hooked(group):
    tensor = torch.zeros(1, requires_grad=True)
    tensor.register_hook(function_of(group))
    return tensor


def add_buffer(name, tensor):
    return lambda model, _: model.register_buffer(name, tensor)


def first(hooks):
    return next(iter(hooks.values()))()


NOTICED = {
    "a group's name in place of None": (
        lambda g: {"cp_group_name": None},
        lambda m, g: setattr(m, "cp_group_name", g.cp.group_name),
        lambda m: m.cp_group_name,
        lambda e: e.cp.group_name,
    ),
    "another name in place of a group's": (
        lambda g: {"cp_group_name": g.cp.group_name},
        lambda m, g: setattr(m, "cp_group_name", "mine"),
        lambda m: m.cp_group_name,
        lambda e: "mine",
    ),
    "a size in place of another name": (
        lambda g: {"config": SimpleNamespace(steps=1)},
        lambda m, g: vars(m.config).update(cp_size=vars(m.config).pop("steps")),
        lambda m: m.config.cp_size,
        lambda e: 4,
    ),
    "a size with two underscores": (
        lambda g: {"__cp_size": 7},
        lambda m, g: vars(m).update(__cp_size=1),
        lambda m: vars(m)["__cp_size"],
        lambda e: 4,
    ),
    "a size in a closure": (
        lambda g: cell_of(7),
        lambda m, g: m.write(1),
        lambda m: m.read(),
        lambda e: 4,
    ),
    "ranks in a list": (
        lambda g: {"cp_ranks": [7]},
        lambda m, g: operator.setitem(m.cp_ranks, 0, 0),
        lambda m: m.cp_ranks,
        lambda e: [0, 1, 2, 3],
    ),
    "other ranks in a list": (
        lambda g: {"cp_ranks": [0]},
        lambda m, g: operator.setitem(m.cp_ranks, 0, 7),
        lambda m: m.cp_ranks,
        lambda e: [7],
    ),
    "a size in an array": (
        lambda g: {"cp_size": numpy.array(7)},
        lambda m, g: m.cp_size.fill(1),
        lambda m: int(m.cp_size),
        lambda e: 4,
    ),
    "a size in a tensor": (
        lambda g: {"cp_size": torch.tensor(7)},
        lambda m, g: m.cp_size.fill_(1),
        lambda m: int(m.cp_size),
        lambda e: 4,
    ),
    "another size in a tensor": (
        lambda g: {"cp_size": torch.tensor(1)},
        lambda m, g: m.cp_size.data.fill_(7),
        lambda m: int(m.cp_size),
        lambda e: 7,
    ),
    "a buffer": (
        lambda g: {},
        add_buffer("cp_size", torch.tensor(1)),
        lambda m: int(m.cp_size),
        lambda e: 4,
    ),
    "a replaced buffer": (
        lambda g: {"_buffers": {"cp_size": torch.tensor(1)}},
        add_buffer("cp_size", torch.tensor(7)),
        lambda m: int(m.cp_size),
        lambda e: 7,
    ),
    "a replaced buffer with a group": (
        lambda g: {"_buffers": {"bias": torch.zeros(1)}},
        lambda m, g: m.register_buffer("bias", tensor_of(g.cp)),
        lambda m: m.bias.cp_group,
        lambda e: e.cp,
    ),
    "a replaced buffer with a hook": (
        lambda g: {"_buffers": {"bias": torch.zeros(1)}},
        lambda m, g: m.register_buffer("bias", hooked(g.cp)),
        lambda m: first(m.bias._backward_hooks),
        lambda e: e.cp,
    ),
    "a rotary cache in a buffer": (
        lambda g: {},
        add_buffer("cos_cached", torch.ones(3)),
        lambda m: m._buffers["cos_cached"] is None,
        lambda e: True,
    ),
    "the length of a rotary cache in place of None": (
        lambda g: {"cos_cached": torch.ones(3), "max_seq_len_cached": None},
        lambda m, g: vars(m).update(max_seq_len_cached=3),
        lambda m: m.max_seq_len_cached,
        lambda e: 0,
    ),
    "a hook before backward": (
        lambda g: {},
        lambda m, g: m.layer.register_full_backward_pre_hook(function_of(g.cp)),
        lambda m: first(m.layer._backward_pre_hooks),
        lambda e: e.cp,
    ),
    "a hook after backward": (
        lambda g: {},
        lambda m, g: m.layer.register_full_backward_hook(function_of(g.cp)),
        lambda m: first(m.layer._backward_hooks),
        lambda e: e.cp,
    ),
    "a hook of state_dict": (
        lambda g: {},
        lambda m, g: m.layer.register_state_dict_post_hook(function_of(g.cp)),
        lambda m: first(m.layer._state_dict_hooks),
        lambda e: e.cp,
    ),
    "a hook of a parameter": (
        lambda g: {},
        lambda m, g: m.layer.weight.register_hook(function_of(g.cp)),
        lambda m: first(m.layer.weight._backward_hooks),
        lambda e: e.cp,
    ),
    "a hook after accumulation": (
        lambda g: {},
        lambda m, g: m.layer.weight.register_post_accumulate_grad_hook(function_of(g.cp)),
        lambda m: first(m.layer.weight._post_accumulate_grad_hooks),
        lambda e: e.cp,
    ),
    "a second hook of a tensor": (
        lambda g: {"held": hooked(None)},
        lambda m, g: m.held.register_hook(function_of(g.cp)),
        lambda m: list(m.held._backward_hooks.values())[-1](),
        lambda e: e.cp,
    ),
    "an exception's argument": (
        lambda g: {"error": KeyError(1)},
        lambda m, g: setattr(m.error, "args", (g.cp,)),
        lambda m: m.error.args[0],
        lambda e: e.cp,
    ),
}


@pytest.mark.parametrize("change", NOTICED)
def test_what_a_model_is_given_between_two_contexts_is_switched_as_in_a_new_model(
    layouts, monkeypatch, change
):
    build, give, read, inside = NOTICED[change]
    for switched_before in (False, True):
        walks = count_walks(monkeypatch)
        model = Renamed(layouts[0], **build(layouts[0]))
        for _ in range(2 * switched_before):
            with hcp.eval_cp_context(model, *layouts):
                pass
        assert len(walks) == switched_before
        give(model, layouts[0])
        for _ in range(2):
            check(model, layouts, lambda model=model: read(model), inside(layouts[1]))
        assert len(walks) == switched_before + 1


def test_a_name_that_is_registered_between_two_contexts_counts(layouts, monkeypatch):
    monkeypatch.setattr(hcp.rebinding.derived, "DERIVED", dict(hcp.rebinding.derived.DERIVED))
    model = Model(layouts[0], shards=1)
    check(model, layouts, lambda: model.shards, 1)
    register_derived("shards", "cp", "size")
    walks = count_walks(monkeypatch)
    for _ in range(2):
        check(model, layouts, lambda: model.shards, 4)
    assert len(walks) == 1


def test_a_rule_that_is_registered_between_two_contexts_counts(layouts, monkeypatch):
    monkeypatch.setattr(rules, "REGISTERED", {})
    model = Model(layouts[0], router=Router(8))
    check(model, layouts, lambda: model.router.share, 8)
    hcp.register_rebind(Router, attributes=lambda r, pgs: {"share": r.experts // pgs.size("cp")})
    for share, inside in ((8, 2), (5, 5), (8, 2)):
        model.router.share = share
        check(model, layouts, lambda: model.router.share, inside)


def test_the_rules_of_a_package_that_is_imported_between_two_contexts_count(layouts, monkeypatch):
    model = Model(layouts[0], router=Router(8))
    rule = rules.Rule(attributes=lambda r, pgs: {"share": r.experts // pgs.size("cp")})
    own = packages.PackageRules(shapes=((lambda holder: isinstance(holder, Router), rule),))
    late = ModuleType("late_rules")
    late.RULES = own
    monkeypatch.setitem(sys.modules, "late_rules", late)
    monkeypatch.setattr(packages, "_PACKAGES", {"late_package": "late_rules"})
    monkeypatch.setattr(packages, "_loaded", {})
    check(model, layouts, lambda: model.router.share, 8)
    monkeypatch.setitem(sys.modules, "late_package", ModuleType("late_package"))
    check(model, layouts, lambda: model.router.share, 2)


def test_a_model_may_replace_its_buffers_at_every_step(layouts, monkeypatch):
    walks = count_walks(monkeypatch)
    model = Model(layouts[0], step=0)
    for step in range(4):
        kept = torch.full((1,), step)
        model.register_buffer("mean", kept)
        model.step = torch.tensor(step)
        with hcp.eval_cp_context(model, *layouts):
            assert model.mean is kept
    assert len(walks) == 1
    gone = weakref.ref(kept)
    del kept, model.mean, model.step
    gc.collect()
    assert gone() is None


def test_a_step_through_ddp_leaves_the_table(layouts, monkeypatch):
    walks = count_walks(monkeypatch)
    model = Renamed(layouts[0])
    model.forward = model.layer.forward
    model.register_buffer("mean", torch.zeros(1))  # of buffers DDP makes a list at every step
    ddp = nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        ddp(torch.ones(1, 1)).sum().backward()
        with hcp.eval_cp_context(ddp, *layouts):
            assert model.cp_group is layouts[1].cp
    assert len(walks) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_a_model_may_have_a_module_of_torchscript(layouts, monkeypatch, kind):
    walks = count_walks(monkeypatch)
    parts = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    compiled = (
        torch.jit.script(parts) if kind == "scripted" else torch.jit.trace(parts, torch.zeros(1, 1))
    )
    model = Model(layouts[0], parts=compiled, cp_size=1)
    for _ in range(2):
        check(model, layouts, lambda: model.cp_size, 4)
    assert len(walks) == 1


def test_what_looks_dependent_is_searched_again_when_it_changes(layouts, monkeypatch):
    model = Model(layouts[0], cp_size=1, cp_share=0.5)
    with hcp.eval_cp_context(model, *layouts, strict=True):
        model.cp_share = 0.5
    model.cp_share = 3
    with (
        pytest.raises(ValueError, match=r"strict: 1 places(.|\n)*model.cp_share: is 3"),
        hcp.eval_cp_context(model, *layouts, strict=True),
    ):
        pytest.fail("the context was entered")


def test_the_numbers_of_a_tensor_on_a_device_are_not_read_at_each_entry():
    def refuse():
        raise AssertionError("the device was waited for")

    class OnDevice:
        device, _version = torch.device("cuda"), 3
        is_inference, data_ptr, tolist = staticmethod(bool), staticmethod(lambda: 5), refuse

    before = _contents(OnDevice)
    assert _contents(OnDevice) == before
    OnDevice._version += 1
    assert _contents(OnDevice) != before


def test_tables_stay_behind_when_a_model_is_copied_or_saved(layouts):
    model = Model(layouts[0])
    with hcp.eval_cp_context(model, *layouts):
        pass
    home = vars(model)["_hcp_rebind"]
    assert len(home.tables) == 1
    assert copy.deepcopy(home).tables == {}
    assert pickle.loads(pickle.dumps(home)).tables == {}
    assert "_hcp_rebind" not in model.state_dict()


def test_entering_again_inside_swaps_nothing_and_leaving_restores_nothing_too_early(layouts):
    train, evaluation = layouts
    model = Model(train, cp_size=1)
    with hcp.eval_cp_context(model, *layouts):
        with hcp.eval_cp_context(model, *layouts) as groups:
            assert groups is evaluation
            assert model.cp_size == 4
        assert model.pg_collection is evaluation
        assert model.cp_size == 4
    assert model.cp_size == 1


def test_a_context_inside_another_swaps_or_is_refused_whatever_it_would_find(layouts):
    """Two layouts of the same groups leave nothing to find; an excluded tower leaves a part."""
    train, evaluation = layouts
    same = train.with_context_parallel(1)
    model = Model(train, cp_size=1, tower=Model(train))
    with hcp.eval_cp_context(model, train, evaluation, exclude=["tower"]):
        for target in (same, train, build_process_groups()):
            with (
                pytest.raises(ValueError, match=r"the model is in the layout .* expected Process"),
                hcp.eval_cp_context(model, train, target),
            ):
                pytest.fail("the context was entered")
        assert (model.pg_collection, model.cp_size) == (evaluation, 4)
        assert model.tower.pg_collection is train
    with hcp.eval_cp_context(model, train, same):
        assert model.pg_collection is same
    assert model.pg_collection is train


def test_layouts_of_the_same_groups_are_refused_for_a_model_that_was_kept_in_another(layouts):
    train, evaluation = layouts
    model = Model(train, tp_group=train.tp)
    hcp.rebind(model, train, evaluation).keep()
    for target in (train, train.with_context_parallel(1)):
        with pytest.raises(ValueError, match="the model is in the layout"):
            hcp.rebind(model, train, target)
    model.pg_collection = train  # by hand
    hcp.rebind(model, train, evaluation).keep()
    assert model.pg_collection is evaluation
    with pytest.raises(ValueError, match=r"the model holds none of train_pgs, expected the coll"):
        hcp.rebind(nn.Linear(1, 1), train, train)


def test_what_is_entered_again_and_left_last_is_an_error(layouts):
    model = Model(layouts[0])
    outer, inner = (hcp.eval_cp_context(model, *layouts) for _ in range(2))
    outer.__enter__(), inner.__enter__()
    with pytest.raises(RuntimeError, match="left while 1 that were entered inside it are open"):
        outer.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="left after the one that it was entered in"):
        inner.__exit__(None, None, None)
    assert model.pg_collection is layouts[0]


def test_a_model_without_a_place_for_marks_is_left_in_order_as_well(layouts):
    train, first = layouts
    second = build_process_groups()
    model = {"group": train.cp}
    outer, inner = (
        hcp.eval_cp_context(model, train, first),
        hcp.eval_cp_context(model, first, second),
    )
    outer.__enter__(), inner.__enter__()
    for context in (outer, inner):
        with pytest.raises(RuntimeError, match="leave the inner one first"):
            context.__exit__(None, None, None)
    assert model["group"] is train.cp
    with hcp.eval_cp_context(model, train, first):
        assert model["group"] is first.cp


@pytest.mark.parametrize("again", ["the same", "one further in"])
def test_a_second_thread_cannot_enter_what_another_will_leave(layouts, again):
    train, evaluation = layouts
    third = build_process_groups()
    model = Model(train)
    pair = (train, evaluation) if again == "the same" else (evaluation, third)
    said = []

    def enter():
        try:
            with hcp.eval_cp_context(model, *pair):
                said.append(model.pg_collection)
        except hcp.HcpError as error:
            said.append(str(error))

    def run():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()

    with hcp.eval_cp_context(model, train, evaluation):
        run()
        assert "the model is inside a context that thread" in said[0]
        assert model.pg_collection is evaluation
    if again == "the same":
        run()
        assert said[1] is evaluation
    assert model.pg_collection is train


def test_a_generator_that_is_dropped_restores(layouts):
    model = Model(layouts[0])

    def losses():
        with hcp.eval_cp_context(model, *layouts):
            yield model.pg_collection
            yield None

    iterator = losses()
    assert next(iterator) is layouts[1]
    del iterator
    assert model.pg_collection is layouts[0]


def test_contexts_left_in_the_wrong_order_are_errors_and_leave_the_training_layout(layouts):
    train, first = layouts
    second, third = build_process_groups(), build_process_groups()
    for order in itertools.permutations(range(3)):
        model = Model(train, cp_size=1)
        pairs = [(train, first), (first, second), (second, third)]
        contexts = [hcp.eval_cp_context(model, *pair) for pair in pairs]
        for context in contexts:
            context.__enter__()
        assert model.pg_collection is third
        messages = []
        for at in order:
            try:
                contexts[at].__exit__(None, None, None)
            except RuntimeError as error:
                messages.append(str(error))
        assert model.pg_collection is train, order
        assert model.cp_size == 1
        assert (messages == []) == (order == (2, 1, 0)), order
        assert all("leave the inner one first" in message for message in messages)
        with hcp.eval_cp_context(model, *layouts):
            assert model.pg_collection is first


def test_generators_left_in_the_wrong_order_are_an_error(layouts):
    train, first = layouts
    second = build_process_groups()
    model = Model(train)

    def losses(*pair):
        with hcp.eval_cp_context(model, *pair):
            yield

    outer, inner = losses(train, first), losses(first, second)
    next(outer), next(inner)
    with pytest.raises(RuntimeError, match="left while 1 that were entered inside it are open"):
        outer.close()
    assert model.pg_collection is train
    with pytest.raises(RuntimeError, match="left after the one that it was entered in"):
        inner.close()
    assert model.pg_collection is train


def test_what_is_kept_is_no_open_context(layouts):
    train, evaluation = layouts
    model = Model(train)
    for _ in range(3):
        hcp.rebind(model, train, evaluation).keep()
        assert model.pg_collection is evaluation
        hcp.rebind(model, evaluation, train).keep()
        assert model.pg_collection is train
    assert len(vars(model)["_hcp_rebind"].tables) == 2


# ---- the general form ----------------------------------------------------------------------------


def test_rebind_switches_by_any_mapping_until_it_is_undone(layouts):
    train, _ = layouts
    one, two = dist.new_group([0]), dist.new_group([0])
    model = Model(train, group=one, pair=(one, 1), cp_size=1)
    rebound = hcp.rebind(model, {one: two})
    assert (model.group, model.pair, model.cp_size) == (two, (two, 1), 1)
    assert model.pg_collection is train
    rebound.restore()
    assert (model.group, model.pair) == (one, (one, 1))
    with hcp.rebind(model, {one: two}):
        assert model.group is two
    assert model.group is one


def test_rebind_between_layouts_can_be_kept(layouts):
    train, evaluation = layouts
    model = Model(train, cp_size=1)
    rebound = hcp.rebind(model, train, evaluation)
    assert model.cp_size == 4
    rebound.keep()
    del rebound
    assert model.pg_collection is evaluation
    back = hcp.rebind(model, evaluation, train)
    back.keep()
    assert (model.pg_collection, model.cp_size) == (train, 1)


def test_rebind_says_what_it_expects(layouts):
    with pytest.raises(ValueError, match="given old groups and no new ones"):
        hcp.rebind(Model(layouts[0]), layouts[0])
    with pytest.raises(ValueError, match=r"expected two hcp\.ProcessGroups, or one mapping"):
        hcp.rebind(Model(layouts[0]), {})
    with pytest.raises(ValueError, match="the model holds none of train_pgs"):
        hcp.rebind(Model(layouts[0]), {dist.new_group([0]): dist.new_group([0])})


def test_a_weak_proxy_that_calls_itself_a_module_is_walked_over():
    module = nn.Linear(1, 1)
    proxy = weakref.proxy(module)  # as Lightning's modules and loops hold each other
    assert isinstance(proxy, nn.Module)
    assert list(places(proxy, "proxy")) == []
