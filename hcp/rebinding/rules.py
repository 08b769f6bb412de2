"""Rules for classes whose state neither identity nor a name gives away.

    hcp.register_rebind(Mixer, attributes=lambda mixer, pgs: {"share": mixer.n // pgs.size("cp")})
    hcp.register_rebind(Sharder, rebuild=True)
    hcp.register_rebind(Attention, method="set_context_parallel_group", arguments=...)

A rule is asked what an object would hold in a layout; the walk turns the answer into slots, so
that what a rule changes is undone like everything else.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hcp.groups.groups import ProcessGroups

Attributes = Callable[[Any, ProcessGroups], Mapping[str, Any]]
Arguments = Callable[[Any, ProcessGroups], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What `register_rebind` was told about a class."""

    attributes: Attributes | None = None
    rebuild: bool = False
    caches: tuple[str, ...] = ()
    method: str | None = None
    arguments: Arguments | None = None
    held: tuple[str, ...] = ()
    refuse: Callable[[Any, ProcessGroups], str | None] | None = None


_RULES: dict[type | str, list[Rule]] = {}


def register_rebind(
    cls: type | str,
    *,
    attributes: Attributes | None = None,
    rebuild: bool = False,
    caches: tuple[str, ...] = (),
    method: str | None = None,
    arguments: Arguments | None = None,
    held: tuple[str, ...] = (),
    refuse: Callable[[Any, ProcessGroups], str | None] | None = None,
) -> None:
    """Add a rule for a class and its subclasses; `cls` may be its "module.Name", not imported.

    attributes(obj, pgs): values by attribute name that the object has in a layout. It is asked for
      both; where the object does not hold what the training layout gives, it is left alone.
    rebuild: the same, by calling the constructor again with the attributes of its parameters'
      names, groups replaced: for plain objects, since the constructor's own checks run as well.
    caches: attributes that are None inside, dictionaries empty.
    method, arguments(obj, pgs), held: a method that switches, its arguments in a layout, and the
      attributes that tell the arguments it was last called with, for the way back.
    refuse(obj, eval_pgs): a reason why the object cannot work in that layout, or None.
    """
    if (method is None) != (arguments is None):
        raise ValueError("method and arguments go together: give both or neither")
    if not (attributes or rebuild or caches or method or refuse):
        raise ValueError(f"the rule for {cls} says nothing, expected one of its arguments")
    if rebuild and attributes is not None:
        raise ValueError(f"the rule for {cls} has rebuild and attributes, expected one of them")
    for name, given in (("caches", caches), ("held", held)):
        if isinstance(given, str):
            raise ValueError(f"{name} is {given!r}, expected a tuple of names: ({given!r},)")
    rule = Rule(attributes, rebuild, tuple(caches), method, arguments, tuple(held), refuse)
    _RULES.setdefault(cls, []).append(rule)


def rules_of(cls: type) -> list[Rule]:
    """The rules of a class, its own before its bases'."""
    found: list[Rule] = []
    for base in cls.__mro__:
        found += _RULES.get(base, [])
        found += _RULES.get(f"{base.__module__}.{base.__qualname__}", [])
    return found


def attributes_of(
    rule: Rule, obj: Any, train: ProcessGroups, target: ProcessGroups
) -> dict[str, Any]:
    """What the object is to hold in the target layout; empty when it is not of the training one."""
    if rule.rebuild:
        if not any(value is train.cp for value in vars(obj).values()):
            return {}
        fresh = vars(_constructed_again(obj, train, target))
        return {name: v for name, v in fresh.items() if vars(obj).get(name, _NOTHING) is not v}
    assert rule.attributes is not None
    for name, value in rule.attributes(obj, train).items():
        if getattr(obj, name, _NOTHING) != value:
            return {}
    return dict(rule.attributes(obj, target))


_NOTHING = object()


def _constructed_again(obj: Any, train: ProcessGroups, target: ProcessGroups) -> Any:
    twins = {
        id(getattr(train, role)): getattr(target, role)
        for role in target.roles
        if role in train.roles
    }
    arguments = {}
    for name in _parameters(type(obj)):
        value = vars(obj)[name]
        arguments[name] = twins.get(id(value), value)
    return type(obj)(**arguments)


def _parameters(cls: type) -> Iterator[str]:
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        yield name


# ---- modules whose globals a trainer's code reads ------------------------------------------------


GLOBALS: dict[str, tuple[str, ...]] = {
    "megatron.core.parallel_state": (
        "_global_process_group_list",  # for destroying them
        "_HYBRID_DP_CP_GROUPS",  # of each size, by ranks of dp_cp
        "_TENSOR_AND_DATA_PARALLEL_GROUP",  # read nowhere without CP
        "_DATA_PARALLEL_GROUP_GLOO",  # of checkpoints and optimizers, as those that follow
        "_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
        "_EXPERT_DATA_PARALLEL_GROUP_GLOO",
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO",
    ),
}
"""By module: which of its globals stay what they are in every layout. The others are a part of
every model whose groups the module holds."""


def loaded_globals() -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """(path, globals, names that stay) of each module of GLOBALS that is imported."""
    for name, stay in GLOBALS.items():
        module = sys.modules.get(name)
        if module is not None:
            namespace = vars(module)
            code = (types.FunctionType, types.ModuleType, type)
            defined = (key for key, value in namespace.items() if isinstance(value, code))
            yield name.rpartition(".")[2], namespace, (*stay, *defined)


# ---- Megatron-Core and Transformer Engine, by name: neither is imported --------------------------


def _te_arguments(attention: Any, pgs: ProcessGroups) -> tuple[Any, ...]:
    """cp_group, cp_global_ranks, cp_stream, cp_comm_type of Transformer Engine's method."""
    comm_type = comm_type_of(attention)
    group: Any = pgs.cp
    if comm_type == "a2a+p2p":
        levels = pgs.hierarchy
        if len(levels) != 2:
            raise ValueError(
                "cp_comm_type 'a2a+p2p' takes two levels of CP groups, and the layout has "
                f"{len(levels)}: give with_context_parallel(hierarchical=[a2a, p2p])"
            )
        group = list(levels)
    stream = getattr(attention, "cp_stream", None)
    if stream is None and torch.cuda.is_available():
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return group, pgs.ranks("cp"), stream, comm_type


def _heads_that_do_not_divide(attention: Any, pgs: ProcessGroups) -> str | None:
    """Transformer Engine asserts it only once attention is computed."""
    comm_type = comm_type_of(attention)
    if pgs.size("cp") == 1 or comm_type not in ("a2a", "a2a+p2p"):
        return None
    levels = pgs.hierarchy
    inner = levels[0].size() if comm_type == "a2a+p2p" and levels else pgs.size("cp")
    tp = pgs.size("tp") if "tp" in pgs.roles else 1
    for name in ("num_attention_heads", "num_gqa_groups"):
        heads = getattr(attention, name, 0)
        if heads // tp % inner:
            return (
                f"it trades rows for heads among {inner} ranks ({comm_type}), and has {name} "
                f"{heads} over tp = {tp}, expected a multiple of {inner} on each"
            )
    return None


def comm_type_of(attention: Any) -> str:
    """The communication type of one attention layer.

    Megatron gives Transformer Engine the configured type only where it builds with CP > 1; a layer
    that was built without has Transformer Engine's default, whatever the configuration says.
    """
    configured = getattr(getattr(attention, "config", None), "cp_comm_type", None)
    if isinstance(configured, (list, tuple)):
        layer = getattr(attention, "layer_number", 1)
        configured = configured[layer - 1] if layer - 1 < len(configured) else None
    return configured or getattr(attention, "cp_comm_type", None) or "p2p"


def _local_attention_only(attention: Any, pgs: ProcessGroups) -> str | None:
    if pgs.size("cp") == 1:
        return None
    return (
        f"it computes attention over this rank's own tokens and would be wrong with CP = "
        f"{pgs.size('cp')}, which its constructor refuses"
    )


DELTA_METHOD = "_setup_variant_attrs"


def _delta_attributes(module: Any, pgs: ProcessGroups) -> dict[str, Any]:
    """The numbers that a gated delta net's own method makes of a CP size, made on a copy."""
    copy = object.__new__(type(module))
    vars(copy).update(vars(module), cp_size=pgs.size("cp"))
    getattr(copy, DELTA_METHOD)()
    held = vars(module)
    return {
        name: value
        for name, value in vars(copy).items()
        if value is not held.get(name) and type(value) in (int, tuple, list)
    }


def _delta_heads(module: Any, pgs: ProcessGroups) -> str | None:
    """What its constructor refuses."""
    cp, tp = pgs.size("cp"), getattr(module, "tp_size", 1)
    for name in ("num_key_heads", "num_value_heads"):
        heads = getattr(module, name, 0)
        if heads % (tp * cp):
            return f"it has {name} {heads}, expected a multiple of tp * cp = {tp} * {cp}"
    return None


def _without_context_parallelism(module: Any, pgs: ProcessGroups) -> str | None:
    """Megatron-Core 0.16.1's gated delta net, which no constructor or configuration refuses."""
    if pgs.size("cp") == 1 or hasattr(module, DELTA_METHOD) or hasattr(module, "cp_size"):
        return None
    return (
        f"it runs its recurrence over this rank's own tokens and would be wrong with CP = "
        f"{pgs.size('cp')}"
    )


def _mamba_heads(context: Any, pgs: ProcessGroups) -> str | None:
    """What its constructor asserts."""
    cp, tp = pgs.size("cp"), pgs.size("tp") if "tp" in pgs.roles else 1
    heads = getattr(context, "nheads_local_tp", 0)
    groups = getattr(context, "ngroups_local_tp", 1)
    if heads % cp:
        return f"it has {heads} heads on each of tp = {tp} ranks, expected a multiple of CP = {cp}"
    if groups % cp and cp % groups:
        return (
            f"it has {groups} groups on each of tp = {tp} ranks, expected a divisor or a multiple "
            f"of CP = {cp}"
        )
    return None


_TE_HELD = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
TE_METHOD = "set_context_parallel_group"
TE_RULE = Rule(
    method=TE_METHOD,
    arguments=_te_arguments,
    held=_TE_HELD,
    refuse=_heads_that_do_not_divide,
)
"""For every module that has Transformer Engine's method and attributes, whatever its class."""

DELTA_RULE = Rule(
    attributes=_delta_attributes, caches=("_chunkwise_cp_context_cache",), refuse=_delta_heads
)
"""For every module that has the method of Megatron-Core's gated delta nets (KDA among them) and a
cp_size, wherever a version keeps its class."""

register_rebind(
    "megatron.core.ssm.mamba_context_parallel.MambaContextParallel",
    rebuild=True,
    refuse=_mamba_heads,
)
register_rebind("megatron.core.ssm.gated_delta_product.GDPContextParallel", rebuild=True)
for _name in (
    "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "megatron.bridge.models.gemma.gemma2_provider.Gemma2DotProductAttention",
    "megatron.bridge.models.gemma.modeling_gemma2.Gemma2DotProductAttention",
):
    register_rebind(_name, refuse=_local_attention_only)
register_rebind(
    "megatron.core.ssm.gated_delta_net.GatedDeltaNet", refuse=_without_context_parallelism
)
