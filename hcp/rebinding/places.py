"""List the places in which an object holds values, in an order that is equal on every rank.

What other threads may change meanwhile, such as a dictionary, is copied as a whole before its items
are looked at: CPython refuses to go on with one that has grown.
"""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import types
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from hcp.rebinding import derived
from hcp.rebinding.not_entered import is_open_function, is_wrapper
from hcp.rebinding.safe_access import class_attribute, is_a, members, own_attributes
from hcp.rebinding.writers import PartialArguments

Place = tuple[str, Any, Any, Any, str]
"""(kind, owner, key, value, path) of one place. Kind "fixed" cannot be written."""

ATOMS = frozenset(
    {str, int, float, bool, complex, bytes, type(None), torch.Tensor, torch.nn.Parameter}
    | {torch.dtype, torch.device, torch.Size, types.BuiltinFunctionType}
)
"""Classes of values that hold no group and nothing derived from one."""

MODEL_TABLES = "_hcp_rebind"
"""The attribute in which a model keeps its ``tables.ModelTables``. It is no place of the model."""

_EXCEPTION = ("args", "__cause__", "__context__")
_MODULE_KEEPS = frozenset(vars(torch.nn.Module()))  # parameters, buffers, hooks, children
MODULE_HOOKS = sorted(name for name in _MODULE_KEEPS if name.endswith("_hooks"))
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_backward_hooks, _accumulated_hooks = (getattr(torch.Tensor, n).__get__ for n in _TENSOR_HOOKS)
_CONTAINERS = (dict, list, deque)


def places(holder: Any, path: str) -> list[Place]:
    """Return all places of one object, in a fixed order."""
    cls = type(holder)
    found: list[Place] = []
    if issubclass(cls, _CONTAINERS) or cls.__module__ == "numpy":
        found += _items(holder, path)
    if issubclass(cls, torch.nn.Module):
        found += _module_places(holder, path)
    elif issubclass(cls, type):
        found += _class_places(holder, path)
    elif issubclass(cls, types.FunctionType):
        found += _function_places(holder, path)
    elif issubclass(cls, types.MethodType):
        found.append(("fixed", holder, "__self__", holder.__self__, f"{path}.__self__"))
        found.append(("fixed", holder, "__func__", holder.__func__, f"{path}.__func__"))
    elif issubclass(cls, types.CellType):
        found += _cell_places(holder, path)
    elif issubclass(cls, types.MappingProxyType):
        found += _proxy_places(holder, path)
    elif issubclass(cls, threading.local):
        found += _local_places(holder, path)
    elif cls is not dict and cls is not list:  # which have items alone
        found += _object_places(holder, path)
    return found


def _items(holder: Any, path: str) -> Iterator[Place]:
    """Yield the items of a dictionary, a list, a deque or an array of NumPy."""
    cls = type(holder)
    if issubclass(cls, dict):
        for position, (key, value) in enumerate(list(dict.items(holder))):
            yield "item", holder, key, value, f"{path}[{key_text(key, position)}]"
    elif issubclass(cls, (list, deque)):
        items = list.copy(holder) if issubclass(cls, list) else _items_of_deque(holder)
        for i, value in enumerate(items):
            yield "item", holder, i, value, f"{path}[{i}]"
    elif derived.is_numpy(holder):
        for at in itertools.product(*map(range, holder.shape)):
            yield "item", holder, at, holder[at], f"{path}[{', '.join(map(str, at))}]"


def _items_of_deque(holder: deque[Any]) -> list[Any]:
    """Return the items of a deque, also of a class with an iterator of its own. The iterator is
    made and used within one call, in which no other thread runs."""
    return list(itertools.chain.from_iterable(map(deque.__iter__, (holder,))))


def _object_places(holder: Any, path: str) -> Iterator[Place]:
    """Yield the places of an object of no class that has places of its own kind."""
    yield from _partial_places(holder, path)
    yield from _exception_places(holder, path)
    yield from _attribute_places(holder, path)
    if issubclass(type(holder), torch.Tensor):
        yield from tensor_hooks(holder, path)


def _module_places(module: torch.nn.Module, path: str) -> list[Place]:
    found: list[Place] = []
    attributes = own_attributes(module) or {}
    if not is_wrapper(type(module)):
        found += [
            ("item", attributes, name, value, f"{path}.{name}")
            for name, value in list(attributes.items())
            if name not in _MODULE_KEEPS and name != MODEL_TABLES
        ]
        for owner in (module._parameters, module._buffers):
            for name, tensor in list(owner.items()):
                if tensor is not None:
                    found.append(
                        (
                            "item",
                            owner,
                            name,
                            tensor,
                            f"{path}.{name}" if name.isidentifier() else f"{path}[{name}]",
                        )
                    )
        for name in MODULE_HOOKS:
            if attributes[name]:
                found += _hooks(attributes[name], f"{path}.{name}")
    for name, child in list(module._modules.items()):
        found.append(
            (
                "item",
                module._modules,
                name,
                child,
                f"{path}.{name}" if name.isidentifier() else f"{path}[{name}]",
            )
        )
    return found


def _hooks(hooks: Any, path: str) -> Iterator[Place]:
    """Yield the hooks of a module or a tensor, except torch's own. Paths number them from 0, since
    their keys number the hooks of the whole process."""
    for position, (key, hook) in enumerate(list((hooks or {}).items())):
        function = hook.func if issubclass(type(hook), functools.partial) else hook
        if is_open_function(function):
            yield "item", hooks, key, hook, f"{path}[{position}]"


def tensor_hooks(tensor: torch.Tensor, path: str = "") -> Iterator[Place]:
    """Yield the hooks of one tensor."""
    for name, hooks in zip(_TENSOR_HOOKS, hooks_of(tensor), strict=True):
        yield from _hooks(hooks, f"{path}.{name}")


def hooks_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the dictionaries of a tensor's hooks, None for those that it has none of. They are not
    asked of the tensor's class."""
    with torch._C.DisableTorchFunctionSubclass():
        return _backward_hooks(tensor), _accumulated_hooks(tensor)


def _attribute_places(holder: Any, path: str) -> Iterator[Place]:
    attributes = own_attributes(holder) or {}
    for name, value in list(attributes.items()):
        if name != MODEL_TABLES:
            yield "item", attributes, name, value, f"{path}.{name}"
    for name, member in members(type(holder)).items():
        try:
            value = member.__get__(holder)
        except AttributeError:
            continue  # declared and not set
        yield "member", holder, name, value, f"{path}.{name}"


def _class_places(cls: type, path: str) -> list[Place]:
    found: list[Place] = []
    for name, value in list(vars(cls).items()):
        if name.startswith("__") and name.endswith("__"):
            continue
        functions = _functions_of(value) if issubclass(type(value), _WRAPPING) else (value,)
        for function in functions:
            found.append(("class", cls, name, function, f"{path}.{name}"))
    return found


_WRAPPING = (staticmethod, classmethod, property, functools.cached_property)


def _functions_of(value: Any) -> tuple[Any, ...]:
    """Return the functions that a descriptor wraps."""
    if issubclass(type(value), property):
        return tuple([f for f in (value.fget, value.fset, value.fdel) if f is not None])
    return (value.func if issubclass(type(value), functools.cached_property) else value.__func__,)


def _function_places(function: types.FunctionType, path: str) -> Iterator[Place]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield "fixed", function, "__closure__", cell, f"{path}.<{name}>"
    if function.__defaults__:
        yield "attribute", function, "__defaults__", function.__defaults__, f"{path}.__defaults__"
    for name, value in list((function.__kwdefaults__ or {}).items()):
        yield "item", function.__kwdefaults__, name, value, f"{path}.<{name}>"
    for name, value in list(vars(function).items()):
        yield "item", vars(function), name, value, f"{path}.{name}"


def _cell_places(cell: types.CellType, path: str) -> Iterator[Place]:
    try:
        value = cell.cell_contents
    except ValueError:
        return  # not set yet
    # The name in the source, so that "cp_size" in a closure is known as well.
    yield "cell", cell, path.rpartition("<")[2].rstrip(">"), value, path


def _partial_places(holder: Any, path: str) -> Iterator[Place]:
    if not issubclass(type(holder), functools.partial):
        return
    yield "fixed", holder, "func", holder.func, f"{path}.func"
    yield "attribute", PartialArguments(holder), "value", holder.args, f"{path}.args"
    for name, value in list(holder.keywords.items()):
        yield "item", holder.keywords, name, value, f"{path}.keywords[{name!r}]"


def _proxy_places(proxy: Any, path: str) -> Iterator[Place]:
    """Yield the mapping of a read-only view, unless it is that of a class, which has its places."""
    for mapping in gc.get_referents(proxy):
        if not (issubclass(type(mapping), dict) and dict.__contains__(mapping, "__module__")):
            yield "fixed", proxy, "mapping", mapping, path


def _local_places(local: threading.local, path: str) -> Iterator[Place]:
    """Yield the dictionaries that a thread-local object keeps for all threads."""
    by_thread = [d for d in gc.get_referents(local) if type(d) is dict]
    for position, values in enumerate(v for d in by_thread for v in list(d.values())):
        if type(values) is dict:
            yield "fixed", local, "threads", values, f"{path}.threads[{position}]"


def _exception_places(holder: Any, path: str) -> Iterator[Place]:
    if issubclass(type(holder), BaseException):
        args, *chained = (getattr(BaseException, name).__get__(holder) for name in _EXCEPTION)
        yield "attribute", holder, "args", args, f"{path}.args"
        for name, value in zip(_EXCEPTION[1:], chained, strict=True):
            yield "fixed", holder, name, value, f"{path}.{name}"


# ---- by name -------------------------------------------------------------------------------------


def cache_places(holder: Any) -> dict[str, tuple[str, Any, Any]]:
    """Return (kind, owner, value) of one object's places that have the names of rotary caches."""
    named: dict[str, tuple[str, Any, Any]] = {}
    for owner in namespaces(holder):
        if issubclass(type(owner), dict):
            for name in filter(functools.partial(dict.__contains__, owner), derived.CACHES):
                named[name] = "entry", owner, dict.__getitem__(owner, name)
    for name, member in members(type(holder)).items():
        if name in derived.CACHES:
            with suppress(AttributeError):  # declared and not set
                named[name] = ("member", holder, member.__get__(holder))
    return named


def namespaces(holder: Any) -> tuple[Any, ...]:
    """Return the dictionaries of an object's attributes, None for a missing one. New attributes go
    to the last."""
    if issubclass(type(holder), torch.nn.Module):
        return own_attributes(holder), holder._buffers
    return (holder,) if issubclass(type(holder), dict) else (own_attributes(holder),)


def item_names(value: object) -> tuple[str, ...]:
    """Return the names of a named tuple's items; empty for any other object."""
    if not is_a(value, tuple):
        return ()
    fields = class_attribute(type(value), "_fields")
    return fields if type(fields) is tuple and len(fields) == tuple.__len__(value) else ()


def is_dataclass_field(cls: Any, name: str) -> bool:
    """Whether a class attribute is the default of a dataclass's field."""
    return name in (class_attribute(cls, "__dataclass_fields__") or ())


# ---- paths ---------------------------------------------------------------------------------------


def key_text(key: object, position: int) -> str:
    """Write a key for a path. The text is equal on every rank: it has no address of an object."""
    for kind in (str, bool, int):
        if issubclass(type(key), kind):
            return kind.__repr__(key)
    return f"{type(key).__name__} {position}"
