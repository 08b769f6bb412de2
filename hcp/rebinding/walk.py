"""The walk: every place of a model that holds a training group, or something derived from one."""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hcp._core import Structure
from hcp.groups.groups import ProcessGroups
from hcp.rebinding import derived, rules


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place that changes hands."""

    path: str
    """Where it is, seen from the model: "model.layers[3].attention.cp_group"."""

    role: str
    """What it holds: a role such as "cp", "collection", or several for a tuple of groups; "cp size"
    for what was derived from one; "cache"; "rule" for what a class's rule says."""

    kind: str
    """How it is written: "item" is owner[key]; "member" an attribute of __slots__."""

    owner: Any = field(repr=False)
    key: Any

    value: Any = field(repr=False)
    """What it holds inside the context."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A place that looks as if it depended on the layout, and that nothing covers."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


# ---- twins ---------------------------------------------------------------------------------------


class Twins:
    """From the identity of each object of one layout to its counterpart in another."""

    def __init__(self, train: ProcessGroups, evaluation: ProcessGroups) -> None:
        self.train, self.evaluation = train, evaluation
        self.kept: dict[Any, Any] = {}
        self._by_id: dict[int, dict[str, Any]] = {}
        self.differing = [
            role
            for role in train.roles
            if getattr(train, role) is not getattr(evaluation, role, None)
        ]
        self.eval_only: set[int] = set()
        self._add("collection", train, evaluation)
        if train.source is not None and evaluation.source is not None:
            self._add("collection", train.source, evaluation.source)
        for role in train.roles:
            self._add(role, getattr(train, role), getattr(evaluation, role, None))
        self._add_levels()
        originals = {id(getattr(train, role)) for role in train.roles}
        for role in evaluation.roles:
            self.eval_only |= {id(getattr(evaluation, role))} - originals
        if evaluation is not train:
            self.eval_only.add(id(evaluation))
        self.closed = {id(o) for o in (train.source, evaluation.source) if o is not None}
        if train.source is not None and evaluation.source is None:
            # Its own attributes are the slots: nothing of the trainer's kind could replace it.
            self.closed.discard(id(train.source))
        self.known = {id(group) for group in _free_groups(train.source)}
        self.ranks = {role: train.ranks(role) for role in self.differing}
        self._derived = _derived_pairs(train, evaluation)
        self._names = {str(group.group_name): group for group in self.groups()}

    @classmethod
    def of_mapping(cls, mapping: Mapping[Any, Any]) -> Twins:
        """Any objects for any others: nothing is derived, and nothing has a role."""
        self = cls.__new__(cls)
        self._by_id = {id(old): {f"group {i}": new} for i, (old, new) in enumerate(mapping.items())}
        self.kept = dict(mapping)
        self.differing = [f"group {i}" for i in range(len(mapping))]
        self.eval_only, self.closed, self.known = set(), set(), set()
        self.ranks, self._derived, self._names = {}, {}, {}
        return self

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of the first layout that have another twin in the second."""
        if not hasattr(self, "train"):
            return [old for old in self.kept if isinstance(old, dist.ProcessGroup)]
        train = [*(getattr(self.train, role) for role in self.train.roles), *self.train.hierarchy]
        differing = (
            group for group in train if any(t is not group for t in self._by_id[id(group)].values())
        )
        return list({id(group): group for group in differing}.values())

    def named(self, name: str) -> dist.ProcessGroup | None:
        """The group of the first layout that torch knows by a name."""
        return self._names.get(name)

    def get(self, value: object) -> dict[str, Any] | None:
        """The roles of an object of the training layout, and the twin of each."""
        return self._by_id.get(id(value))

    def choose(self, roles: Mapping[str, Any], name: object, path: str) -> tuple[str, Any]:
        """The role and twin of a slot. The slot's name decides for one object in several roles."""
        role = derived.role_of_name(name) if isinstance(name, str) else None
        if role not in roles or role is None:
            twins = {id(twin) for twin in roles.values()}
            if len(twins) > 1:
                raise ValueError(_ambiguous(path, list(roles)))
            role = next(iter(roles))
        if roles[role] is None:
            raise ValueError(
                f"{path} holds the group {role!r}: eval_pgs has no role {role!r}; give it one, so "
                "that it can be swapped"
            )
        return role, roles[role]

    def derived(self, name: str) -> tuple[str, str, Any, Any] | None:
        """(role, kind, training value, eval value) of a name in the table."""
        known = derived.derivation(name)
        if known is None:
            return None
        if known not in self._derived:
            return None
        return (*known, *self._derived[known])

    def _add(self, role: str, original: object, value: object | None) -> None:
        self._by_id.setdefault(id(original), {})[role] = value

    def _add_levels(self) -> None:
        """Hierarchical CP groups: Megatron's field `hcp`, a list of one group per level."""
        train, evaluation = self.train.hierarchy, self.evaluation.hierarchy
        for i, level in enumerate(train):
            self._add(f"hcp[{i}]", level, evaluation[i] if i < len(evaluation) else None)


def _free_groups(source: object) -> Iterator[object]:
    fields = source if isinstance(source, Mapping) else getattr(source, "__dict__", {})
    for name in derived.CP_FREE_FIELDS:
        if name in fields:
            yield fields[name]


def _derived_pairs(
    train: ProcessGroups, evaluation: ProcessGroups
) -> dict[tuple[str, str], tuple[Any, Any]]:
    return {
        (role, kind): (
            derived.derived_value(train, role, kind),
            derived.derived_value(evaluation, role, kind),
        )
        for role in train.roles
        if role in evaluation.roles
        for kind in derived.KINDS
    }


def _ambiguous(path: str, roles: Sequence[str]) -> str:
    return (
        f"{path} holds the group {roles[0]!r}: in train_pgs {' and '.join(map(repr, roles))} are "
        "the same object, eval_pgs has different ones for them, and the name of the slot says none "
        "of them; give each role of train_pgs a group of its own, as build_process_groups does, or "
        f"name the slot {roles[0]}_group"
    )


# ---- places that only code can write -------------------------------------------------------------


class _Contents:
    """A set, as a whole: it changes in one call, and is read back as what was written."""

    def __init__(self, owner: set[Any]) -> None:
        self.owner = owner
        self._last: frozenset[Any] = frozenset(owner)

    @property
    def value(self) -> frozenset[Any]:
        if self._last != self.owner:
            self._last = frozenset(self.owner)
        return self._last

    @value.setter
    def value(self, new: frozenset[Any]) -> None:
        self._last = new
        self.owner.symmetric_difference_update(self.owner ^ new)


class _PartialArguments:
    """The positional arguments of a functools.partial, which has no setter but its unpickling."""

    def __init__(self, owner: functools.partial[Any]) -> None:
        self.owner = owner

    @property
    def value(self) -> tuple[Any, ...]:
        return self.owner.args

    @value.setter
    def value(self, new: tuple[Any, ...]) -> None:
        owner = self.owner
        owner.__setstate__((owner.func, new, owner.keywords, vars(owner)))  # type: ignore[attr-defined]


class _ClearedCache:
    """A functools cache: whatever is written, it is empty afterwards."""

    value = property(lambda self: None, lambda self, new: self.clear())

    def __init__(self, clear: Callable[[], None]) -> None:
        self.clear = clear


class _FreshDictionary:
    """A cache in a dictionary: where None is written, an empty one takes its place."""

    def __init__(self, owner: dict[str, Any], name: str) -> None:
        self._owner, self._name = owner, name

    @property
    def value(self) -> dict[Any, Any]:
        return self._owner[self._name]  # type: ignore[no-any-return]

    @value.setter
    def value(self, new: dict[Any, Any] | None) -> None:
        self._owner[self._name] = {} if new is None else new


class _SwitchedByMethod:
    """What a method was last called with; writing calls it."""

    def __init__(self, owner: Any, rule: rules.Rule, count: int) -> None:
        assert rule.method is not None
        self._owner, self._method, self._held = owner, rule.method, rule.held[:count]

    @property
    def value(self) -> tuple[Any, ...]:
        return tuple(getattr(self._owner, name, None) for name in self._held)

    @value.setter
    def value(self, arguments: tuple[Any, ...]) -> None:
        getattr(self._owner, self._method)(*arguments)


# ---- what is not looked into ---------------------------------------------------------------------

Exclude = Sequence[Any]
"""What stays as it is: paths ("vision_model", "model.layers[0]", "*.vision"), objects, classes."""


def listed(exclude: Exclude) -> tuple[Any, ...]:
    if isinstance(exclude, (str, type)):
        raise ValueError(f"exclude is {exclude!r}, expected a sequence: ({exclude!r},)")
    return tuple(exclude)


class _Excluded:
    def __init__(self, exclude: Exclude) -> None:
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        self._types: list[type] = []
        self._ids: dict[int, Any] = {}
        self._unused: dict[Any, str] = {}
        for item in exclude:
            self._unused[id(item)] = repr(item) if isinstance(item, (str, type)) else _name(item)
            if isinstance(item, str):
                text = ".*".join(map(re.escape, item.split("*")))
                self._patterns.append((item, re.compile(rf"(model[.]?)?{text}")))
            elif isinstance(item, type):
                self._types.append(item)
            else:
                self._ids[id(item)] = item
        self._items = list(exclude)
        self.paths: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._items)

    def matches(self, value: Any, path: str) -> bool:
        covered = self.covers(value, path)
        if covered:
            self.paths.append(path)
        return covered

    def covers(self, value: Any, path: str) -> bool:
        found = next(self._matching(value, path), None)
        if found is not None:
            self.note_used(found)
        return found is not None

    def note_used(self, given: Any) -> None:
        self._unused.pop(id(given), None)

    def objects(self) -> list[Any]:
        """Those that are neither paths nor classes."""
        return list(self._ids.values())

    def _matching(self, value: Any, path: str) -> Iterator[Any]:
        if id(value) in self._ids:
            yield self._ids[id(value)]
        yield from (kind for kind in self._types if isinstance(value, kind))
        yield from (text for text, pattern in self._patterns if pattern.fullmatch(path))

    def check_used(self) -> None:
        if self._unused:
            unused = ", ".join(self._unused.values())
            raise ValueError(
                f"exclude has {unused}, which the model does not reach: expected paths such as "
                "'vision_model' or 'model.layers[0]', objects of the model, or classes"
            )


def _name(value: object) -> str:
    return f"a {type(value).__name__}"


# ---- the walk ------------------------------------------------------------------------------------

_ATOMS = frozenset(
    {str, int, float, bool, complex, bytes, type(None), torch.Tensor, torch.nn.Parameter}
    | {torch.dtype, torch.device, torch.Size, types.BuiltinFunctionType}
)
_CLOSED = (
    torch.Tensor,
    types.ModuleType,
    type,
    dist.ProcessGroup,
    ProcessGroups,
    torch.optim.Optimizer,
)
_CONTAINERS = (dict, list, deque, UserDict, UserList)
_OPEN_STDLIB = (
    *_CONTAINERS,
    ChainMap,
    types.MappingProxyType,
    threading.local,
    BaseException,
    types.SimpleNamespace,
    argparse.Namespace,
    functools.partial,
    types.MethodType,
    types.CellType,
)
_MODULE_KEEPS = frozenset(vars(torch.nn.Module()))  # parameters, buffers, hooks, children
_HOOKS = sorted(name for name in _MODULE_KEEPS if name.endswith("_hooks"))
_RUN_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_OWN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WEAK = (weakref.ProxyType, weakref.CallableProxyType)
_KEEPERS = ("megatron.core.distributed", "megatron.core.optimizer", "megatron_fsdp")
"""Packages that shard and reduce over groups of their own."""
_PLAIN_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_LRU = type(cache(lambda: None))
_HOME = "_hcp_rebind"
"""Where a model keeps its tables: see hcp.rebind."""

Held = tuple[str, Any, Any, Any, str]
"""kind, owner, key, value, path of one place that holds something."""


class Walk:
    """Goes through everything that a model reaches, each object once, in a fixed order."""

    def __init__(self, twins: Twins, exclude: Exclude = ()) -> None:
        self.slots: list[Slot] = []
        self.findings: list[Finding] = []
        self.shared: list[str] = []
        self.shared_roles: set[str] = set()
        self.eval_held: list[str] = []
        self.groups_found = 0
        self.excluded = _Excluded(exclude)
        self.records = _Records()
        self.twins = twins
        self.weak_seen: set[int] = set()
        """Weak references to a group that the walk has met, by identity."""
        self.keyed: set[int] = set()
        """Dictionaries in which a group is a key, by identity."""
        self._seen: set[int] = set()
        self._todo: deque[tuple[Any, str]] = deque()
        self._rebuilt: dict[int, tuple[str, Any]] = {}
        self._ruled: set[tuple[int, str]] = set()
        self._weak = {id(ref): g for g in twins.groups() for ref in weakref.getweakrefs(g)}
        self.kept: list[Any] = []
        """All that was looked into, but tuples and frozen sets."""
        self.tuples: list[Any] = []
        self.paths: dict[int, str] = {}
        """Where each of them was met first, by identity."""
        self.left_out: list[Any] = []
        """What `exclude` kept the walk out of."""

    def run(self, model: object) -> None:
        self._reach(model, "model")
        self._visit_all()
        if self.groups_found and self.twins.ranks:  # the globals do not make up for a model
            self._globals()
            self._visit_all()

    def _visit_all(self) -> None:
        while self._todo:
            holder, path = self._todo.popleft()
            self._visit(holder, path)

    def _globals(self) -> None:
        """Groups in the globals of modules that the model's code reads when it runs."""
        for name, namespace, stay in rules.loaded_globals():
            held = (self.twins.get(value) or {} for value in namespace.values())
            changing = any(role in self.twins.differing for roles in held for role in roles)
            if changing and id(namespace) not in self._seen:
                self._ruled.update((id(namespace), key) for key in stay)
                self._reach(namespace, name)

    @classmethod
    def through(cls, holders: list[Any]) -> Walk:
        """A walk that finds nothing: what is reached from somewhere."""
        walk = cls(Twins.of_mapping({}))
        walk.run(holders)
        return walk

    def _visit(self, holder: Any, path: str) -> None:
        switches = list(self._rules(holder, path))
        self._rotary_cache(holder, path)
        self.records.note(holder)
        if isinstance(holder, set):
            self._set(holder, path)
        if isinstance(holder, dict):
            self._keys(holder, path)
        if isinstance(holder, _LRU) and self.twins.differing:
            cleared = _ClearedCache(holder.cache_clear)
            self.slots.append(Slot(path, "cache", "attribute", cleared, "value", None))
        for held in places(holder, path):
            self._look(held)
        if not isinstance(holder, type):
            self._classes(type(holder))
        for switch in switches:  # once the object holds what its method reads
            self.slots.append(switch)

    def _look(self, held: Held) -> None:
        kind, owner, key, value, path = held
        named = type(key) is str
        if self._ruled and named and (id(owner), key) in self._ruled:
            return
        if self._is_excluded(value, path):
            return
        if kind == "class" and named and _is_field(owner, key) and self.twins.derived(key):
            return  # a dataclass's default, which nobody reads behind its instances
        role, new = (named and self._derived(key, value, path)) or self._replace(value, path, key)
        if not role:
            return
        if kind != "fixed":
            self.slots.append(Slot(path, role, *_writer(kind, owner, key), new))
        elif isinstance(value, dist.ProcessGroup):
            self._find(path, f"holds the group {role!r} where nothing can be written")

    def _is_excluded(self, value: Any, path: str) -> bool:
        if not self.excluded or not self.excluded.matches(value, path):
            return False
        self.left_out.append(value)
        return True

    # ---- groups ----

    def _replace(self, value: Any, path: str, name: object) -> tuple[str, Any]:
        """The role and the new value of a place; no role when nothing is to change."""
        if type(value) in _ATOMS:
            self._atom(value, path, name)
            return "", value
        roles = self.twins.get(value)
        if roles is not None:
            return self._twin(value, roles, path, name)
        if id(value) in self.twins.eval_only:
            self.eval_held.append(path)
        elif isinstance(value, (tuple, frozenset)):
            return self._replace_items(value, path, name)
        elif id(value) in self._weak:
            return self._weakly(value, path, name)
        elif isinstance(value, dist.ProcessGroup):
            self._stranger(value, path, name)
        elif isinstance(value, DeviceMesh):
            self._mesh(value, path)
        elif isinstance(value, torch.Tensor) or derived.is_numpy(value):
            self._atom(value, path, name)
            self._reach(value, path)
        else:
            self._reach(value, path)
        return "", value

    def _twin(
        self, value: Any, roles: Mapping[str, Any], path: str, name: object
    ) -> tuple[str, Any]:
        role, twin = self.twins.choose(roles, name, path)
        if twin is value:
            self.shared.append(f"{path} ({role})")
            self.shared_roles.add(role)
            return "", value
        self.groups_found += 1
        return role, twin

    def _weakly(self, value: Any, path: str, name: object) -> tuple[str, Any]:
        """A weak reference to a group: another one to its twin takes its place."""
        group = self._weak[id(value)]
        self.weak_seen.add(id(value))
        role, twin = self._twin(group, self.twins.get(group) or {}, path, name)
        if twin is group:
            return "", value
        if type(value) is weakref.ref and value.__callback__ is None:
            return role, weakref.ref(twin)
        if type(value) in _WEAK:
            return role, weakref.proxy(twin)
        self._find(path, f"is a weak reference with a callback to the group {role!r}")
        return "", value

    def _atom(self, value: Any, path: str, name: object) -> None:
        if isinstance(value, torch.Tensor):
            self.records.note_tensor(value)
            self._reach_tensor(value, path)
        if type(name) is not str:
            return
        if derived.looks_dependent(name):
            self._suspect(name, value, path)
        elif value is True and name in derived.SIZED_ONCE:
            self._sized_once(path)

    def _replace_items(
        self, value: tuple[Any, ...] | frozenset[Any], path: str, name: object
    ) -> tuple[str, Any]:
        if id(value) not in self._rebuilt:
            self.tuples.append(value)  # an identity is only good while its object lives
            self._rebuilt[id(value)] = self._rebuild(value, path, name)
        return self._rebuilt[id(value)]

    def _rebuild(
        self, value: tuple[Any, ...] | frozenset[Any], path: str, name: object
    ) -> tuple[str, Any]:
        roles, items = [], []
        fields = _fields(value)
        for i, item in enumerate(value):
            at = f"{path}.{fields[i]}" if fields else f"{path}[{i}]"
            role, new = "", item
            if not self._is_excluded(item, at):
                own = (fields and self._derived(fields[i], item, at)) or None
                role, new = own or self._replace(item, at, fields[i] if fields else name)
            items.append(new)
            roles += [role] if role else []
        if not roles:
            return "", value
        if isinstance(value, frozenset):
            return ", ".join(sorted(roles)), type(value)(items)
        # Also right for named tuples, whose classes take their fields one by one.
        return ", ".join(roles), tuple.__new__(type(value), items)

    def _set(self, holder: set[Any], path: str) -> None:
        role, new = self._replace_items(frozenset(holder), path, None)
        if role:
            self.slots.append(Slot(path, role, "attribute", _Contents(holder), "value", new))

    def _keys(self, holder: dict[Any, Any], path: str) -> None:
        """A group as a key stays: what it leads to may be a cache that was made for it."""
        for position, key in enumerate(holder):
            if type(key) not in _ATOMS and self._is_of_training(key):
                self.keyed.add(id(holder))
                self._find(
                    f"{path}[{_key_text(key, position)}]",
                    "is a key that is, or has in it, a group of train_pgs: inside, the group of "
                    "eval_pgs is not found there; hcp.register_rebind(cls, caches=...) empties a "
                    "cache, exclude= says that it is not read inside",
                )

    def _is_of_training(self, key: Any) -> bool:
        if isinstance(key, (tuple, frozenset)):
            return any(self._is_of_training(item) for item in key)
        roles = self.twins.get(key) or {}
        return any(twin is not key for twin in roles.values())

    def _reach(self, value: Any, path: str) -> None:
        if isinstance(value, (tuple, frozenset)):
            self._replace_items(value, path, None)
        elif id(value) not in self.twins.closed and _is_open(value):
            self._later(value, path)

    def _reach_tensor(self, value: torch.Tensor, path: str) -> None:
        """Its attributes and hooks. torch's own kinds keep groups there for what they shard."""
        if type(value) not in _OWN_TENSORS and _is_closed_package(type(value).__module__):
            return
        if vars(value) or any(True for _ in _tensor_hooks(value)):
            self._later(value, path)

    def _later(self, value: Any, path: str) -> None:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self.kept.append(value)
            self.paths[id(value)] = path
            self._todo.append((value, path))

    def _classes(self, cls: type) -> None:
        """The class attributes of what the model is made of."""
        for base in cls.__mro__:
            if id(base) in self._seen:
                continue
            self._seen.add(id(base))
            if not _is_closed_package(base.__module__):
                self._todo.append((base, f"class {base.__qualname__}"))

    # ---- derived values and caches ----

    def _derived(self, name: str, value: Any, path: str) -> tuple[str, Any] | None:
        """The role and the new value of a place with a derived value of the training layout; no
        role when it is the same in both, None for any other place."""
        if type(value) is str and derived.names_a_group(name):
            return self._group_name(name, value, path)
        known = self.twins.derived(name)
        if known is None:
            return None
        role, what, now, new = known
        if not derived.holds_derived(value, now, what):
            return None
        # A rank that happens to keep its place has the slot as well: all ranks find the same.
        if role not in self.twins.differing:
            return "", value
        return f"{role} {what}", derived.in_form_of(value, new)

    def _group_name(self, name: str, value: str, path: str) -> tuple[str, Any] | None:
        group = self.twins.named(value)
        if group is None:
            return None
        role, twin = self.twins.choose(self.twins.get(group) or {}, name, path)
        self.groups_found += 1
        return f"{role} name", twin.group_name

    def _suspect(self, name: str, value: Any, path: str) -> None:
        known = self.twins.derived(name)
        number = derived.scalar(value)
        if known is not None and type(number) is type(known[2]):
            role, what, now, new = known
            if now != new:
                self._find(
                    path,
                    f"is {value!r}, and the {role} {what} of train_pgs is {now!r}: exclude the "
                    "object that holds it if it is meant to differ",
                )
        elif value is None and name.endswith(("cp_group", "context_parallel_group")):
            self._find(path, "is None, and would stay so: torch takes None for the whole world")
        elif known is None and type(number) is int:
            self._find(
                path,
                f"is {value}, by its name derived from a CP group: hcp.register_derived or "
                "hcp.register_rebind say how, exclude= says that it is not",
            )

    def _sized_once(self, path: str) -> None:
        now, new = (self.twins.derived("cp_size") or (None, None, 0, 0))[2:]
        if new < now:
            self._find(
                path,
                f"says that buffers were made for the rows of CP = {now}, and a rank has more of "
                f"them under CP = {new}",
            )

    def _stranger(self, group: dist.ProcessGroup, path: str, name: object) -> None:
        """A group of neither layout: does it look like one that changes?"""
        if not self.twins.ranks or id(group) in self.twins.known:
            return
        if isinstance(name, str) and derived.role_of_name(name) in self.twins.differing:
            self._find(
                path,
                "is a group by that name which train_pgs does not have: exclude it if it is "
                "meant to stay",
            )
        elif group.size() > 1:
            ranks = dist.get_process_group_ranks(group)
            role = next((r for r, its in self.twins.ranks.items() if its == ranks), None)
            if role is not None:
                self._find(
                    path,
                    f"is another group of the same ranks as {role!r} of train_pgs: exclude it if "
                    "it is meant to stay",
                )

    def _mesh(self, mesh: DeviceMesh, path: str) -> None:
        for name in mesh.mesh_dim_names or ():
            roles = self.twins.get(mesh.get_group(name)) or {}
            if any(role in self.twins.differing for role in roles):
                self._find(path, f"is a DeviceMesh, which goes on handing out its group {name!r}")
                return

    def _find(self, path: str, reason: str) -> None:
        self.findings.append(Finding(path, reason))

    def _rotary_cache(self, holder: Any, path: str) -> None:
        """Tensors that were made for the training layout's positions: inside, there are none."""
        if isinstance(holder, type) or not self.twins.differing:
            return
        held = _named_places(holder)
        tensors = [n for n in derived.CACHE_TENSORS if n in held]
        lengths = [n for n in derived.CACHE_LENGTHS if type(held.get(n, [None])[-1]) is int]
        if not (tensors or (lengths and hasattr(holder, "get_cached_cos_sin"))):
            return
        for name in derived.CACHE_TENSORS if lengths else tensors:
            # With a length that says 0 the tensors are not read before they are made anew.
            kept = held[name][-1] if name in held and lengths else None
            self._cache_slot(held, name, kept, holder, path)
        for name in (*lengths, *(n for n in derived.CACHE_TRAITS if n in held)):
            self._cache_slot(held, name, 0 if name in lengths else held[name][-1], holder, path)

    def _cache_slot(
        self, held: dict[str, Any], name: str, inside: Any, holder: Any, path: str
    ) -> None:
        if name in held:
            kind, owner, _ = held[name]
        else:
            kind, owner = "absent", _namespaces(holder)[-1]
            if not isinstance(owner, dict):
                return
        self._ruled.add((id(owner), name))
        at = f"{path}[{name!r}]" if owner is holder and kind == "entry" else f"{path}.{name}"
        self.slots.append(Slot(at, "cache", kind, owner, name, inside))

    # ---- rules ----

    def _rules(self, holder: Any, path: str) -> Iterator[Slot]:
        """Adds what rules say of an object's attributes; gives the method that goes last."""
        if isinstance(holder, type) or not self.twins.ranks:
            return
        for rule in rules.rules_of(type(holder)):
            yield from self._rule(rule, holder, path)
        if _is_te_attention(holder):
            yield from self._rule(rules.TE_RULE, holder, path)
        if _is_delta_net(holder):
            yield from self._rule(rules.DELTA_RULE, holder, path)

    def _rule(self, rule: rules.Rule, holder: Any, path: str) -> Iterator[Slot]:
        train, target = self.twins.train, self.twins.evaluation
        reason = rule.refuse(holder, target) if rule.refuse else None
        if reason:
            raise ValueError(f"{path} ({type(holder).__name__}) cannot be rebound: {reason}")
        try:
            changes: dict[str, Any] = {}
            if rule.rebuild or rule.attributes:
                changes = rules.attributes_of(rule, holder, train, target)
            arguments = None
            if rule.arguments and hasattr(holder, rule.method or "") and _is_of(holder, train):
                arguments = rule.arguments(holder, target)
        except AssertionError as error:  # by which constructors say what they do not take
            raise ValueError(
                f"{path} ({type(holder).__name__}) cannot be rebound: it asserts in a layout of "
                f"CP = {target.size('cp')}: {error}"
            ) from error
        except Exception as error:
            error.add_note(f"hcp: while asking the rule of {path} ({type(holder).__name__})")
            raise
        for name in rule.caches:
            if isinstance(getattr(holder, "__dict__", {}).get(name), dict):
                self._dictionary_slot(vars(holder), name, path)
            else:
                changes[name] = None
        for name, value in changes.items():
            self._attribute_slot(holder, name, value, path)
        if arguments is not None:
            for name in rule.held:
                if name in vars(holder):
                    self._attribute_slot(holder, name, vars(holder)[name], path)
            switched = _SwitchedByMethod(holder, rule, len(arguments))
            self.groups_found += 1
            yield Slot(f"{path}.{rule.method}()", "rule", "attribute", switched, "value", arguments)

    def _dictionary_slot(self, attributes: dict[str, Any], name: str, path: str) -> None:
        fresh = _FreshDictionary(attributes, name)
        self._ruled.add((id(attributes), name))
        self.slots.append(Slot(f"{path}.{name}", "rule", "attribute", fresh, "value", None))

    def _attribute_slot(self, holder: Any, name: str, value: Any, path: str) -> None:
        attributes = getattr(holder, "__dict__", None)
        if type(attributes) is dict:
            kind, owner = "entry", attributes
            if isinstance(holder, torch.nn.Module) and name in holder._buffers:
                owner = holder._buffers
        else:
            kind, owner = "member", holder
        self._ruled.add((id(owner), name))
        self.groups_found += isinstance(value, dist.ProcessGroup)
        self.slots.append(Slot(f"{path}.{name}", "rule", kind, owner, name, value))


def _is_te_attention(holder: Any) -> bool:
    return (
        isinstance(holder, torch.nn.Module)
        and hasattr(holder, rules.TE_METHOD)
        and hasattr(holder, "cp_global_ranks")
    )


def _is_delta_net(holder: Any) -> bool:
    return (
        isinstance(holder, torch.nn.Module)
        and hasattr(holder, rules.DELTA_METHOD)
        and type(getattr(holder, "cp_size", None)) is int
    )


def _is_of(holder: Any, train: ProcessGroups) -> bool:
    """Whether the object uses the training layout: it holds its group, its levels, or none yet."""
    group = getattr(holder, "cp_group", None)
    if isinstance(group, (list, tuple)):
        return list(map(id, group)) == list(map(id, train.hierarchy))
    return group is None or group is train.cp


def _writer(kind: str, owner: Any, key: Any) -> tuple[str, Any, Any]:
    if kind == "cell":
        return "attribute", owner, "cell_contents"
    return ("attribute", owner, key) if kind == "class" else (kind, owner, key)


def _fields(value: object) -> tuple[str, ...]:
    """The names of a named tuple's items."""
    fields = getattr(type(value), "_fields", ()) if isinstance(value, tuple) else ()
    return fields if isinstance(fields, tuple) and len(fields) == len(value) else ()  # type: ignore[arg-type]


def _named_places(holder: Any) -> dict[str, tuple[str, Any, Any]]:
    """(kind, owner, value) of the places of one object that have a name, in any form of object."""
    named: dict[str, tuple[str, Any, Any]] = {}
    for owner in _namespaces(holder):
        if isinstance(owner, dict) and not derived.CACHES.isdisjoint(owner):
            named |= {n: ("entry", owner, owner[n]) for n in derived.CACHES if n in owner}
    for name in derived.CACHES.intersection(_slot_names(type(holder))):
        if hasattr(holder, name):
            named[name] = ("member", holder, getattr(holder, name))
    return named


def _namespaces(holder: Any) -> tuple[Any, ...]:
    """What may be a dictionary of an object's names; new ones go to the last."""
    if issubclass(type(holder), torch.nn.Module):
        return vars(holder), holder._buffers
    return (holder,) if isinstance(holder, dict) else (getattr(holder, "__dict__", None),)


def _is_field(cls: Any, name: str) -> bool:
    return name in getattr(cls, "__dataclass_fields__", {})


# ---- what holds what -----------------------------------------------------------------------------


def _is_open(value: Any) -> bool:
    """Whether the walk goes inside."""
    if isinstance(value, _CLOSED):
        return False
    if derived.is_numpy(value):
        return bool(value.dtype == object)
    if isinstance(value, (torch.nn.Module, set)):
        return True
    if isinstance(value, (types.FunctionType, _LRU)):
        return not _is_closed_package(value.__module__ or "")
    if _is_closed_package(type(value).__module__):
        return isinstance(value, _OPEN_STDLIB)
    return True


def is_kept_by_torch(holder: Any, module: str) -> bool:
    """Whether an object of a module is one that torch, or a package that shards, has of its own."""
    if issubclass(type(holder), torch.nn.Module):
        return _is_wrapper(holder)
    return type(holder) not in _OWN_TENSORS and (
        module.partition(".")[0] == "torch" or module.startswith(_KEEPERS)
    )


@cache
def _is_closed_package(module: str) -> bool:
    """torch, numpy, the standard library and what shards; not a user's module of such a name."""
    name = module.partition(".")[0]
    if name in ("torch", "numpy") or module.startswith(_KEEPERS):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return (
        name in sys.stdlib_module_names
        and name != "__main__"
        and (file is None or library in Path(file).resolve().parents)
    )


def places(holder: Any, path: str) -> Iterator[Held]:
    """Every place of one object, in a fixed order."""
    if isinstance(holder, dict):
        for position, (key, value) in enumerate(list(holder.items())):
            yield "item", holder, key, value, f"{path}[{_key_text(key, position)}]"
    elif isinstance(holder, (list, deque)):
        for i, value in enumerate(holder):
            yield "item", holder, i, value, f"{path}[{i}]"
    elif derived.is_numpy(holder):
        for at in itertools.product(*map(range, holder.shape)):
            yield "item", holder, at, holder[at], f"{path}[{', '.join(map(str, at))}]"
    if issubclass(type(holder), torch.nn.Module):  # a weak proxy of one says that it is one too
        yield from _module_places(holder, path)
    elif isinstance(holder, type):
        yield from _class_places(holder, path)
    elif isinstance(holder, types.FunctionType):
        yield from _function_places(holder, path)
    elif isinstance(holder, types.MethodType):
        yield "fixed", holder, "__self__", holder.__self__, f"{path}.__self__"
        yield "fixed", holder, "__func__", holder.__func__, f"{path}.__func__"
    elif isinstance(holder, types.CellType):
        yield from _cell_places(holder, path)
    elif isinstance(holder, types.MappingProxyType):
        yield from _proxy_places(holder, path)
    elif isinstance(holder, threading.local):
        yield from _local_places(holder, path)
    else:
        yield from _partial_places(holder, path)
        yield from _exception_places(holder, path)
        yield from _attribute_places(holder, path)
        if isinstance(holder, torch.Tensor):
            yield from _tensor_hooks(holder, path)


def _module_places(module: torch.nn.Module, path: str) -> Iterator[Held]:
    attributes: dict[str, Any] = vars(module)
    if not _is_wrapper(module):
        for name, value in list(attributes.items()):
            if name not in _MODULE_KEEPS and name != _HOME:
                yield "item", attributes, name, value, f"{path}.{name}"
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is not None:
                    yield "item", owner, name, tensor, f"{path}{_child_text(name)}"
        for name in _HOOKS:
            if attributes[name]:
                yield from _hooks(attributes[name], f"{path}.{name}")
    for name, child in module._modules.items():
        yield "item", module._modules, name, child, f"{path}{_child_text(name)}"


def _hooks(hooks: Any, path: str) -> Iterator[Held]:
    """By their place: their keys count the hooks of the whole process. torch's own stay."""
    for position, (key, hook) in enumerate(list((hooks or {}).items())):
        function = hook.func if isinstance(hook, functools.partial) else hook
        if not _is_closed_package(getattr(function, "__module__", None) or ""):
            yield "item", hooks, key, hook, f"{path}[{position}]"


def _tensor_hooks(tensor: torch.Tensor, path: str = "") -> Iterator[Held]:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        yield from _hooks(getattr(tensor, name, None), f"{path}.{name}")


def _is_wrapper(module: torch.nn.Module) -> bool:
    """DDP, FSDP and compiled modules keep groups of their own, for what they shard and reduce.

    `fully_shard` makes a class of torch's on top of the user's: the user's attributes count then.
    """
    classes = type(module).__mro__[: type(module).__mro__.index(torch.nn.Module)]
    if not classes:
        return False
    if classes[0].__module__.startswith(_KEEPERS):
        return True
    return not classes[0].__module__.startswith("torch.nn.modules.") and all(
        cls.__module__.startswith("torch.") for cls in classes if cls is not object
    )


def _attribute_places(holder: Any, path: str) -> Iterator[Held]:
    try:
        attributes = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        attributes = None
    if type(attributes) is dict:
        for name, value in list(attributes.items()):
            if name != _HOME:
                yield "item", attributes, name, value, f"{path}.{name}"
    for name in _slot_names(type(holder)):
        try:
            value = object.__getattribute__(holder, name)
        except AttributeError:
            continue  # declared and not set
        yield "member", holder, name, value, f"{path}.{name}"


def _slot_names(cls: type) -> list[str]:
    return [
        name
        for base in reversed(cls.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _class_places(cls: type, path: str) -> Iterator[Held]:
    for name, value in list(vars(cls).items()):
        if name.startswith("__") and name.endswith("__"):
            continue
        for function in _functions_of(value):
            yield "class", cls, name, function, f"{path}.{name}"


def _functions_of(value: Any) -> Iterator[Any]:
    """A class attribute, or the functions that a descriptor wraps."""
    if isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (f for f in (value.fget, value.fset, value.fdel) if f is not None)
    elif isinstance(value, functools.cached_property):
        yield value.func
    else:
        yield value


def _function_places(function: types.FunctionType, path: str) -> Iterator[Held]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield "fixed", function, "__closure__", cell, f"{path}.<{name}>"
    if function.__defaults__:
        yield "attribute", function, "__defaults__", function.__defaults__, f"{path}.__defaults__"
    for name, value in (function.__kwdefaults__ or {}).items():
        yield "item", function.__kwdefaults__, name, value, f"{path}.<{name}>"
    for name, value in vars(function).items():
        yield "item", vars(function), name, value, f"{path}.{name}"


def _cell_places(cell: types.CellType, path: str) -> Iterator[Held]:
    try:
        value = cell.cell_contents
    except ValueError:
        return  # not set yet
    # The name in the source, so that "cp_size" in a closure is known as well.
    yield "cell", cell, path.rpartition("<")[2].rstrip(">"), value, path


def _partial_places(holder: Any, path: str) -> Iterator[Held]:
    if not isinstance(holder, functools.partial):
        return
    yield "fixed", holder, "func", holder.func, f"{path}.func"
    yield "attribute", _PartialArguments(holder), "value", holder.args, f"{path}.args"
    for name, value in holder.keywords.items():
        yield "item", holder.keywords, name, value, f"{path}.keywords[{name!r}]"


def _proxy_places(proxy: Any, path: str) -> Iterator[Held]:
    """The mapping that a read-only view shows. That of a class is written through the class."""
    for mapping in gc.get_referents(proxy):
        if not (isinstance(mapping, dict) and "__module__" in mapping):
            yield "fixed", proxy, "mapping", mapping, path


def _local_places(local: threading.local, path: str) -> Iterator[Held]:
    """What every thread has: the values of a thread are a dictionary that the object keeps."""
    by_thread = [d for d in gc.get_referents(local) if type(d) is dict]
    for position, values in enumerate(v for d in by_thread for v in d.values()):
        if type(values) is dict:
            yield "fixed", local, "threads", values, f"{path}.threads[{position}]"


def _exception_places(holder: Any, path: str) -> Iterator[Held]:
    if isinstance(holder, BaseException):
        yield "attribute", holder, "args", holder.args, f"{path}.args"
        for name in ("__cause__", "__context__"):
            yield "fixed", holder, name, getattr(holder, name), f"{path}.{name}"


def _child_text(name: str) -> str:
    return f".{name}" if name.isidentifier() else f"[{name}]"


def _key_text(key: object, position: int) -> str:
    """The same on every rank: the repr of most objects tells their address."""
    if isinstance(key, (str, int, bool)):
        return repr(key)
    return f"{type(key).__name__} {position}"


# ---- whether it still holds ----------------------------------------------------------------------


class _Records:
    """What the walk saw, so that the next switch can tell in a moment whether it is still so."""

    def __init__(self) -> None:
        self.holders: list[Any] = []
        self.others: list[Any] = []
        self.exact: list[Any] = []
        """Dictionaries in which a tensor that takes another's place is a change."""

    def note_tensor(self, tensor: torch.Tensor) -> None:
        self.holders.append(vars(tensor))

    def note(self, holder: Any) -> None:
        if isinstance(holder, torch.nn.Module):
            own = vars(holder)
            self.holders += (own, holder._modules)
            self.holders += [own[name] for name in _RUN_FORWARD]
            self.exact.append(holder._parameters)
            return
        if type(holder) in _PLAIN_DICTS or type(holder) is list:
            self.holders.append(holder)
            return
        attributes = getattr(holder, "__dict__", None)
        plain = type(attributes) is dict and not isinstance(
            holder, (dict, list, deque, set, functools.partial, types.FunctionType)
        )
        if plain and not _slot_names(type(holder)):
            self.holders.append(attributes)
        else:
            self.others.append(holder)

    def take(self) -> Callable[[], bool]:
        """Whether everything is as it is now, to be asked later."""
        names = [n for name in derived.DERIVED for n in (name, name.upper())]
        watched = frozenset(spelling for n in names for spelling in (n, f"_{n}"))
        structure = Structure(self.holders, watched, tuple(_ATOMS))
        exact = Structure(self.exact, watched, (type(None),))
        others = [(holder, _values(holder, watched)) for holder in self.others]

        def holds() -> bool:
            return (
                structure.holds()
                and exact.holds()
                and all(_same(values, _values(holder, watched)) for holder, values in others)
            )

        return holds


def _values(holder: Any, watched: frozenset[str]) -> list[Any]:
    values = sorted(holder, key=id) if isinstance(holder, set) else []
    values += [
        value if type(value) not in _ATOMS or key in watched else None
        for _, _, key, value, _ in places(holder, "")
    ]
    return values


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        a is b or (type(a) is int and a == b) for a, b in zip(before, now, strict=True)
    )
