"""Find the holders of training groups outside the model, starting from the groups.

The walk knows the kinds of objects that it goes into. Other objects may also refer to a group: a
generator, a global variable, an object that the model does not reach. The garbage collector knows
the references of every object. This search lists all objects that refer to a group. It leaves out
those that the walk has seen, that the caller excludes, and that torch and hcp keep for themselves.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hcp._core import find_holders, tracked_objects
from hcp.rebinding import derived
from hcp.rebinding.findings import Finding
from hcp.rebinding.not_entered import is_kept_by_torch, modules_of
from hcp.rebinding.places import places
from hcp.rebinding.safe_access import class_attribute, is_a, module_of, own_attributes
from hcp.rebinding.walk import Walk

_PLAIN = (
    *(dict, list, tuple, set, frozenset, deque),
    *(types.CellType, types.MappingProxyType),
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
)
"""Classes of objects that are reported by their holders. Iterators are also such objects, and so
are modules and tensors, which may belong to this model or to another one."""
_OWN = ("hcp._core", "hcp.groups.", "hcp.rebinding.")
"""Beginnings of the names of modules in which hcp holds groups for itself."""
_NAMED: Any = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
)
"""Classes of objects that have a ``__qualname__`` of their own."""
_COUNTED_OTHERWISE: Any = (set, functools.partial, type(functools.cache(len)))
_LEVELS = 100
"""The largest number of nested plain objects through which a holder is searched for."""


def find_elsewhere(walk: Walk) -> list[Finding]:
    """Find the holders of training groups that the walk did not reach.

    The search goes through all objects of the process, a few times. If it finds something, it
    collects garbage and searches again: what nobody can reach any more does no harm.
    """
    found = _Search(walk).run()
    if found:
        gc.collect()
        found = _Search(walk).run()
    return found


class _Search:
    def __init__(self, walk: Walk) -> None:
        self._objects: list[Any] = tracked_objects()  # first: what is made below does not count
        self._walk = walk
        self._groups = {id(group): group for group in walk.twins.groups}
        self._looked_into = {id(holder) for holder in walk.kept}
        self._known = _reached(walk)
        self._left_out = {**_reached(Walk.through(walk.left_out)), **_sources(walk)}
        self._excluded = [(x, _reached(Walk.through([x]))) for x in walk.excluded.objects()]
        self._below: dict[int, Any] = {}
        self._findings: dict[tuple[int, str], Finding] = {}

    def run(self) -> list[Finding]:
        level: dict[int, Any] = dict(self._groups)
        pairs = [*self._first_pairs(), *self._weak()]
        seen = set(level)
        for _ in range(_LEVELS):
            level = {key: x for key, x in self._plain(pairs).items() if key not in seen}
            if not level:
                break
            seen.update(level)
            pairs = self._pairs(level)
        return list(self._findings.values())

    def _plain(self, pairs: list[tuple[Any, Any]]) -> dict[int, Any]:
        """Return the plain ones of some holders. Others become findings unless they are known."""
        plain = {}
        for holder, target in pairs:
            if id(holder) in self._known:
                self._check_seen(holder, target)
            elif id(holder) in self._left_out or self._is_excluded(holder):
                continue
            elif _is_plain(holder):
                self._below.setdefault(id(holder), target)
                plain[id(holder)] = holder
            elif not _is_own(holder):
                self._find(holder, target)
        return plain

    def _is_excluded(self, holder: Any) -> bool:
        for given, reached in self._excluded:
            if id(holder) in reached:
                self._walk.excluded.note_used(given)
                return True
        return False

    def _pairs(self, level: dict[int, Any]) -> list[tuple[Any, Any]]:
        flat = find_holders(self._objects, tuple(level.values()), ())
        return list(zip(flat[::2], flat[1::2], strict=True))

    def _first_pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yield (holder, group) of all holders. The collector does not know the items of NumPy's
        arrays: they are read here."""
        numpy = sys.modules.get("numpy")
        opaque = () if numpy is None else (numpy.ndarray,)
        flat = find_holders(self._objects, tuple(self._groups.values()), opaque)
        arrays: dict[int, Any] = {}
        for holder, target in zip(flat[::2], flat[1::2], strict=True):
            if target is None:
                arrays[id(holder)] = holder
            else:
                yield holder, target
        for array in arrays.values():
            if array.dtype == object:
                items = array.reshape(-1).tolist()
                yield from ((array, item) for item in items if id(item) in self._groups)

    def _weak(self) -> Iterator[tuple[Any, Any]]:
        for group in self._groups.values():
            for reference in weakref.getweakrefs(group):
                if id(reference) not in self._walk.weak_seen:
                    yield reference, group

    def _check_seen(self, holder: Any, group: Any) -> None:
        """Report a place that the walk did not see, of an object that it has looked into."""
        if id(group) not in self._groups:
            if id(group) not in self._known and not _is_own(self._known[id(holder)]):
                self._find(holder, group)  # it saw it, and did not look into it
            return
        if id(holder) not in self._looked_into:
            return
        if is_a(holder, _COUNTED_OTHERWISE) or id(holder) in self._walk.keyed:
            return
        seen = sum(value is group for _, _, _, value, _ in places(holder, ""))
        if sum(x is group for x in gc.get_referents(holder)) > seen:
            self._find(holder, group)

    def _find(self, holder: Any, target: Any) -> None:
        chain = [holder, target]
        while id(chain[-1]) in self._below:
            chain.append(self._below[id(chain[-1])])
        owner = self._known.get(id(holder), holder)
        chain = chain if owner is holder else [owner, *chain]
        path, below = _path(chain, self._walk.paths.get(id(owner))), chain[-1]
        if self._walk.excluded.covers(holder, path) or self._walk.excluded.covers(target, path):
            return
        role = next(iter(self._walk.twins.get(below) or {"": None}))
        self._findings[id(holder), path] = Finding(
            path,
            f"holds the group {role!r} of train_pgs where no walk of the model comes: give what "
            "holds it as a further part of the model, or exclude it",
        )


# ---- what is known -------------------------------------------------------------------------------


def _reached(walk: Walk) -> dict[int, Any]:
    """Return the owner of every object that a walk looked into, or of its plain parts, by
    identity."""
    reached: dict[int, Any] = {}
    for holder in walk.kept:
        attributes = own_attributes(holder) if is_a(holder, torch.nn.Module) else None
        if attributes is None or _is_plain(holder):
            parts = [part for part in gc.get_referents(holder) if _is_part(part)]
            parts += [part for part in list((attributes or {}).values()) if type(part) is dict]
            reached |= {id(part): holder for part in parts}
    return reached | {id(holder): holder for holder in (*walk.kept, *walk.tuples)}


def _is_part(value: Any) -> bool:
    return type(value) in (dict, tuple, list, types.CellType) and _is_plain(value)


def _sources(walk: Walk) -> dict[int, Any]:
    """Return the trainer's own collections, which stay: code that has one asks it for groups."""
    if walk.twins.layouts is None:
        return {}
    sources = [pgs.source for pgs in walk.twins.layouts]
    held = [own_attributes(source) for source in sources]
    return {id(x): x for x in (*sources, *held) if x is not None}


def _is_plain(holder: Any) -> bool:
    if type(holder) is dict:
        return _module_of(holder) is None
    if issubclass(type(holder), (torch.nn.Module, torch.Tensor)):
        return not is_kept_by_torch(holder, module_of(type(holder)))
    if class_attribute(type(holder), "__next__") is not None:
        return not is_a(holder, types.GeneratorType)  # a loop's
    return issubclass(type(holder), _PLAIN) or derived.is_numpy(holder)


def _is_own(holder: Any) -> bool:
    """Whether an object holds groups for torch, a package that shards or hcp, or is a frame."""
    cls = type(holder)
    if issubclass(cls, (types.FrameType, dist.ProcessGroup, torch.optim.Optimizer)):
        return True
    if issubclass(cls, types.FunctionType):
        return all(_is_own_module(name, holder) for name in modules_of(holder))
    if cls is dict:
        module = _module_of(holder)
    else:
        module = module_of(holder if issubclass(cls, type) else cls)
    return module is not None and _is_own_module(module, holder)


def _is_own_module(module: str, holder: Any) -> bool:
    return module.startswith(_OWN) or is_kept_by_torch(holder, module)


def _module_of(holder: dict[Any, Any]) -> str | None:
    """Return the name of the module whose globals a dictionary is, or None."""
    name = holder.get("__name__")
    module = sys.modules.get(name) if type(name) is str else None
    return name if module is not None and own_attributes(module) is holder else None


# ---- how to say it -------------------------------------------------------------------------------


def _text(holder: Any) -> str:
    if type(holder) is dict:
        return f"the globals of {_module_of(holder)}"
    if is_a(holder, _NAMED):
        name = holder.__qualname__
        kind = "class" if is_a(holder, type) else type(holder).__name__
        module = getattr(holder, "__module__", None)
        return f"{kind} {module}.{name}" if module else f"{kind} {name}"
    return f"{module_of(type(holder))}.{type(holder).__qualname__} object"


def _path(chain: list[Any], start: str | None) -> str:
    """Write a chain of holders as a path, from the outermost one to the group."""
    path, at = start or _text(chain[0]), 0
    while at < len(chain) - 1:
        # A closure, a __dict__ or a module's _modules is left out: its owner says more.
        steps = [step for step in (3, 2, 1) if _place(chain[at], chain[at + 1 : at + 1 + step])]
        step = steps[0] if steps else 1
        path += _place(chain[at], chain[at + 1 : at + 1 + step]) or ""
        at += step
    return path


def _place(holder: Any, inside: list[Any]) -> str | None:
    """Return the path of the last of `inside` in a holder, or None if there is none."""
    if is_a(holder, tuple):
        held = ((item, f"[{i}]") for i, item in enumerate(tuple.__iter__(holder)))
    else:
        held = ((value, path) for _, _, _, value, path in places(holder, ""))
    return next((path for value, path in held if value is inside[-1]), None)
