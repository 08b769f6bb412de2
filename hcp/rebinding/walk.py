"""Walk through a model, and find the places of training groups and of values derived from them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding import derived, packages
from hcp.rebinding.exclude import Exclude, Excluded
from hcp.rebinding.findings import (
    Finding,
    doubt_about_group,
    doubt_about_mesh,
    doubt_about_value,
)
from hcp.rebinding.not_entered import LRU_CACHE, is_closed_package, is_open
from hcp.rebinding.places import (
    ATOMS,
    Place,
    cache_places,
    is_dataclass_field,
    item_names,
    key_text,
    namespaces,
    places,
)
from hcp.rebinding.records import Records
from hcp.rebinding.rules import Rule, attributes_of
from hcp.rebinding.safe_access import has, is_a, own_attributes
from hcp.rebinding.twins import Twins
from hcp.rebinding.writers import (
    ClearedCache,
    FreshDictionary,
    SetContents,
    Slot,
    SwitchedByMethod,
    writer_of,
)

_NEVER_DERIVED = (torch.nn.Module, dist.ProcessGroup)
"""Classes of values that are no size, rank or flag, whatever the place is called."""
_WEAK = (weakref.ProxyType, weakref.CallableProxyType)


class Walk:
    """Visits every object that a model reaches, each once, in an order that all ranks share."""

    def __init__(self, twins: Twins, exclude: Exclude = ()) -> None:
        self.twins = twins
        self.excluded = Excluded(exclude)
        self._excludes = bool(exclude)
        self.records = Records()
        self.slots: list[Slot] = []
        self.findings: list[Finding] = []
        self.groups_found = 0
        self.shared: list[str] = []
        """Places that hold a group of both layouts."""
        self.shared_roles: set[str] = set()
        self.eval_held: list[str] = []
        """Places that hold what only the eval layout has."""

        # For the search outside the model.
        self.kept: list[Any] = []
        """Every object that was visited, but tuples and frozen sets."""
        self.tuples: list[Any] = []
        self.paths: dict[int, str] = {}
        """The path at which each of `kept` was met first, by identity."""
        self.left_out: list[Any] = []
        """Values that `exclude` kept the walk out of."""
        self.weak_seen: set[int] = set()
        """Weak references to a group that the walk has met, by identity."""
        self.keyed: set[int] = set()
        """Dictionaries in which a group is a key, by identity."""

        self._seen: set[int] = set()
        self._todo: deque[tuple[Any, str]] = deque()
        self._rebuilt: dict[int, tuple[str, Any]] = {}
        """Role and new value of each tuple and frozen set, by identity."""
        self._ruled: set[tuple[int, str]] = set()
        """(identity of the owner, name) of places that a rule or a cache's slots cover."""
        self._class_rules: dict[type, list[Rule]] = {}
        self._weak = {id(ref): g for g in twins.groups for ref in weakref.getweakrefs(g)}

    def run(self, model: object) -> None:
        """Walk through a model, and then through the globals that its code reads."""
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
        """Reach the globals of packages' modules that hold a group which changes."""
        for name, namespace, stay in packages.imported_globals():
            held = (self.twins.get(value) or {} for value in list(namespace.values()))
            changing = any(role in self.twins.differing for roles in held for role in roles)
            if changing and id(namespace) not in self._seen:
                self._ruled.update((id(namespace), key) for key in stay)
                self._reach(namespace, name)

    @classmethod
    def through(cls, holders: list[Any]) -> Walk:
        """Return a walk that swaps nothing, and has visited the objects that `holders` reach."""
        walk = cls(Twins.of_mapping({}))
        walk.run(holders)
        return walk

    def _visit(self, holder: Any, path: str) -> None:
        switches = list(self._rules(holder, path))
        self._rotary_cache(holder, path)
        self.records.note(holder, path)
        if issubclass(type(holder), set):
            self._set(holder, path)
        if issubclass(type(holder), dict):
            self._keys(holder, path)
        if issubclass(type(holder), LRU_CACHE) and self.twins.differing:
            cleared = ClearedCache(holder.cache_clear)
            self.slots.append(Slot(path, "cache", "attribute", cleared, "value", None))
        for place in places(holder, path):
            self._look(place)
        if not issubclass(type(holder), type):
            self._classes(type(holder))
        for switch in switches:  # once the object holds what its method reads
            self.slots.append(switch)

    def _look(self, place: Place) -> None:
        kind, owner, key, value, path = place
        named = type(key) is str
        if self._ruled and named and (id(owner), key) in self._ruled:
            return
        if self._excludes and self._is_excluded(value, path):
            return
        if kind == "class" and named and is_dataclass_field(owner, key) and self.twins.derived(key):
            return  # a dataclass's default: its instances hide it
        derives = named and not issubclass(type(value), _NEVER_DERIVED)
        watched = derives and derived.traits_of(key).watched
        own = self._derived(key, value, path) if watched else None
        role, new = own or self._replace(value, path, key)
        if not role:
            return
        if kind != "fixed":
            self.slots.append(Slot(path, role, *writer_of(kind, owner, key), new))
        elif issubclass(type(value), dist.ProcessGroup):
            self._find(path, f"holds the group {role!r} where nothing can be written")

    def _is_excluded(self, value: Any, path: str) -> bool:
        if not self.excluded.matches(value, path):
            return False
        self.left_out.append(value)
        return True

    def _find(self, path: str, reason: str) -> None:
        self.findings.append(Finding(path, reason))

    def _doubt(self, path: str, reason: str | None) -> None:
        if reason is not None:
            self._find(path, reason)

    # ---- groups ----

    def _replace(self, value: Any, path: str, name: object) -> tuple[str, Any]:
        """The role and the new value of a place. The role is "" if nothing is to change."""
        if type(value) in ATOMS:
            self._atom(value, path, name)
            return "", value
        roles = self.twins.by_id.get(id(value))
        if roles is not None:
            return self._twin(value, roles, path, name)
        if id(value) in self.twins.eval_only:
            self.eval_held.append(path)
        elif issubclass(type(value), (tuple, frozenset)):
            return self._replace_items(value, path, name)
        elif issubclass(type(value), torch.nn.Module):
            self._later(value, path)
        elif id(value) in self._weak:
            return self._weakly(value, path, name)
        elif issubclass(type(value), dist.ProcessGroup):
            self._doubt(path, doubt_about_group(value, name, self.twins))
        elif issubclass(type(value), DeviceMesh):
            self._doubt(path, doubt_about_mesh(value, self.twins))
        elif issubclass(type(value), torch.Tensor) or type(value).__module__ == "numpy":
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
        """The role of a weak reference to a group, and a weak reference to its twin."""
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
        if issubclass(type(value), torch.Tensor) and self.records.note_tensor(value):
            self._later(value, path)
        if type(name) is str and (value is True or derived.traits_of(name).looks_dependent):
            self._doubt(path, doubt_about_value(name, value, self.twins))

    def _replace_items(self, value: Collection[Any], path: str, name: object) -> tuple[str, Any]:
        if id(value) not in self._rebuilt:
            self.tuples.append(value)  # an identity is only good while its object lives
            self._rebuilt[id(value)] = self._rebuild(value, path, name)
        return self._rebuilt[id(value)]

    def _rebuild(self, value: Collection[Any], path: str, name: object) -> tuple[str, Any]:
        roles, items = [], []
        fields = item_names(value)
        items_of: Any = tuple.__iter__ if issubclass(type(value), tuple) else frozenset.__iter__
        for i, item in enumerate(items_of(value)):
            at = f"{path}.{fields[i]}" if fields else f"{path}[{i}]"
            role, new = "", item
            if not (self._excludes and self._is_excluded(item, at)):
                own = (fields and self._derived(fields[i], item, at)) or None
                role, new = own or self._replace(item, at, fields[i] if fields else name)
            items.append(new)
            roles += [role] if role else []
        if not roles:
            return "", value
        if is_a(value, frozenset):
            return ", ".join(sorted(roles)), type(value)(items)
        # Also right for named tuples, whose classes take their fields one by one.
        new_tuple: Any = tuple.__new__
        return ", ".join(roles), new_tuple(type(value), items)

    def _set(self, holder: set[Any], path: str) -> None:
        role, new = self._replace_items(frozenset(holder), path, None)
        if role:
            self.slots.append(Slot(path, role, "attribute", SetContents(holder), "value", new))

    def _keys(self, holder: dict[Any, Any], path: str) -> None:
        """Report groups that are keys. They stay, since their values may be caches for them."""
        for position, key in enumerate(list(dict.keys(holder))):
            if type(key) not in ATOMS and self._is_of_training(key):
                self.keyed.add(id(holder))
                self._find(
                    f"{path}[{key_text(key, position)}]",
                    "is a key that is, or has in it, a group of train_pgs: inside, the group of "
                    "eval_pgs is not found there; hcp.register_rebind(cls, caches=...) empties a "
                    "cache, exclude= says that it is not read inside",
                )

    def _is_of_training(self, key: Any) -> bool:
        if issubclass(type(key), tuple):
            return any(map(self._is_of_training, tuple.__iter__(key)))
        if issubclass(type(key), frozenset):
            return any(map(self._is_of_training, frozenset.__iter__(key)))
        roles = self.twins.get(key) or {}
        return any(twin is not key for twin in roles.values())

    def _reach(self, value: Any, path: str) -> None:
        if issubclass(type(value), (tuple, frozenset)):
            self._replace_items(value, path, None)
        elif id(value) not in self.twins.closed and is_open(value):
            self._later(value, path)

    def _later(self, value: Any, path: str) -> None:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self.kept.append(value)
            self.paths[id(value)] = path
            self._todo.append((value, path))

    def _classes(self, cls: type) -> None:
        """Visit the class attributes of a class of the model's objects."""
        for base in cls.__mro__:
            if id(base) in self._seen:
                continue
            self._seen.add(id(base))
            module = base.__module__
            if type(module) is not str or not is_closed_package(module):
                self._todo.append((base, f"class {base.__qualname__}"))

    # ---- derived values and caches ----

    def _derived(self, name: str, value: Any, path: str) -> tuple[str, Any] | None:
        """The role and the new value of a place with a derived value of the training layout. The
        role is "" if it is the same in both layouts. None for any other place."""
        if type(value) is str and derived.traits_of(name).names_a_group:
            return self._group_name(name, value, path)
        known = self.twins.derived(name)
        if known is None:
            return None
        self.records.note_contents(value)
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

    def _rotary_cache(self, holder: Any, path: str) -> None:
        """Add slots that empty a rotary cache, which was made for the training layout's rows."""
        if issubclass(type(holder), type) or not self.twins.differing:
            return
        held = cache_places(holder)
        if not held:
            return
        for name in held.keys() & derived.CACHE_LENGTHS:
            self.records.note_type(*held[name][:2], name)
        tensors = [n for n in derived.CACHE_TENSORS if n in held]
        lengths = [n for n in derived.CACHE_LENGTHS if type(held.get(n, [None])[-1]) is int]
        if not (tensors or (lengths and has(holder, "get_cached_cos_sin"))):
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
            kind, owner = "absent", namespaces(holder)[-1]
            if not issubclass(type(owner), dict):
                return
        self._ruled.add((id(owner), name))
        at = f"{path}[{name!r}]" if owner is holder and kind == "entry" else f"{path}.{name}"
        self.slots.append(Slot(at, "cache", kind, owner, name, inside))

    # ---- rules ----

    def _rules(self, holder: Any, path: str) -> Iterator[Slot]:
        """Add the slots of the rules for an object, and yield those that call a method."""
        if issubclass(type(holder), type) or self.twins.layouts is None or not self.twins.ranks:
            return
        train, target = self.twins.layouts
        for rule in packages.rules_for(holder, self._class_rules):
            changes, arguments = _ask(rule, holder, path, train, target)
            self._note_ruled(rule, holder, (*changes, *rule.held), train)
            self._rule_slots(rule, holder, path, changes)
            if arguments is not None:
                yield self._method_slot(rule, holder, path, arguments)

    def _note_ruled(
        self, rule: Rule, holder: Any, names: tuple[str, ...], train: ProcessGroups
    ) -> None:
        """Note the values by which a rule tells whether an object is in the training layout."""
        if rule.attributes and not names:
            names = tuple(rule.attributes(holder, train))
        for name in names:
            self.records.note_value(*_owner_of(holder, name), name)

    def _rule_slots(self, rule: Rule, holder: Any, path: str, changes: dict[str, Any]) -> None:
        changes = dict(changes)
        for name in rule.caches:
            attributes = own_attributes(holder)
            if attributes is not None and issubclass(type(attributes.get(name)), dict):
                self._dictionary_slot(attributes, name, path)
            else:
                changes[name] = None
        for name, value in changes.items():
            self._attribute_slot(holder, name, value, path)

    def _method_slot(self, rule: Rule, holder: Any, path: str, arguments: tuple[Any, ...]) -> Slot:
        """The slot that calls the rule's method. What the method sets has slots of its own."""
        assert rule.method is not None
        attributes = own_attributes(holder) or {}
        for name in rule.held:
            if name in attributes:
                self._attribute_slot(holder, name, attributes[name], path)
        switched = SwitchedByMethod(holder, rule.method, rule.held[: len(arguments)])
        self.groups_found += 1
        return Slot(f"{path}.{rule.method}()", "rule", "attribute", switched, "value", arguments)

    def _dictionary_slot(self, attributes: dict[str, Any], name: str, path: str) -> None:
        fresh = FreshDictionary(attributes, name)
        self._ruled.add((id(attributes), name))
        self.slots.append(Slot(f"{path}.{name}", "rule", "attribute", fresh, "value", None))

    def _attribute_slot(self, holder: Any, name: str, value: Any, path: str) -> None:
        kind, owner = _owner_of(holder, name)
        self._ruled.add((id(owner), name))
        self.groups_found += issubclass(type(value), dist.ProcessGroup)
        self.slots.append(Slot(f"{path}.{name}", "rule", kind, owner, name, value))


def _owner_of(holder: Any, name: str) -> tuple[str, Any]:
    """The kind and the owner of the place of an object's attribute."""
    attributes = own_attributes(holder)
    if attributes is None:
        return "member", holder
    if issubclass(type(holder), torch.nn.Module) and name in holder._buffers:
        return "entry", holder._buffers
    return "entry", attributes


def _ask(
    rule: Rule, holder: Any, path: str, train: ProcessGroups, target: ProcessGroups
) -> tuple[dict[str, Any], tuple[Any, ...] | None]:
    """Ask a rule about an object: attributes to change, and arguments of its method or None."""
    where = f"{path} ({type(holder).__name__})"
    reason = rule.refuse(holder, target) if rule.refuse else None
    if reason:
        raise ValueError(f"{where} cannot be rebound: {reason}")
    try:
        changes: dict[str, Any] = {}
        if rule.rebuild or rule.attributes:
            changes = attributes_of(rule, holder, train, target)
        arguments = None
        if rule.arguments and hasattr(holder, rule.method or "") and _is_of(holder, train):
            arguments = rule.arguments(holder, target)
    except AssertionError as error:  # by which constructors say what they do not take
        raise ValueError(
            f"{where} cannot be rebound: it asserts in a layout of CP = {target.size('cp')}: "
            f"{error}"
        ) from error
    except Exception as error:
        error.add_note(f"hcp: while asking the rule of {where}")
        raise
    return changes, arguments


def _is_of(holder: Any, train: ProcessGroups) -> bool:
    """Whether an object is in the training layout: it has its CP group, its levels, or none yet."""
    group = getattr(holder, "cp_group", None)
    if is_a(group, (list, tuple)):
        return list(map(id, group)) == list(map(id, train.hierarchy))
    return group is None or group is train.cp
