"""List the places in which an object holds values, in an order that is equal on every rank."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from hcp.rebinding import derived
from hcp.rebinding.closed import is_open_function, is_wrapper
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

_MODULE_KEEPS = frozenset(vars(torch.nn.Module()))  # parameters, buffers, hooks, children
MODULE_HOOKS = sorted(name for name in _MODULE_KEEPS if name.endswith("_hooks"))
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def places(holder: Any, path: str) -> Iterator[Place]:
    """Yield all places of one object, in a fixed order."""
    if isinstance(holder, dict):
        for position, (key, value) in enumerate(list(holder.items())):
            yield "item", holder, key, value, f"{path}[{key_text(key, position)}]"
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
            yield from tensor_hooks(holder, path)


def _module_places(module: torch.nn.Module, path: str) -> Iterator[Place]:
    attributes: dict[str, Any] = vars(module)
    if not is_wrapper(module):
        for name, value in list(attributes.items()):
            if name not in _MODULE_KEEPS and name != MODEL_TABLES:
                yield "item", attributes, name, value, f"{path}.{name}"
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is not None:
                    yield "item", owner, name, tensor, f"{path}{_child_text(name)}"
        for name in MODULE_HOOKS:
            if attributes[name]:
                yield from _hooks(attributes[name], f"{path}.{name}")
    for name, child in module._modules.items():
        yield "item", module._modules, name, child, f"{path}{_child_text(name)}"


def _hooks(hooks: Any, path: str) -> Iterator[Place]:
    """Yield the hooks of a module or a tensor, except torch's own. Paths number them from 0, since
    their keys number the hooks of the whole process."""
    for position, (key, hook) in enumerate(list((hooks or {}).items())):
        function = hook.func if isinstance(hook, functools.partial) else hook
        if is_open_function(function):
            yield "item", hooks, key, hook, f"{path}[{position}]"


def tensor_hooks(tensor: torch.Tensor, path: str = "") -> Iterator[Place]:
    """Yield the hooks of one tensor."""
    for name in TENSOR_HOOKS:
        yield from _hooks(getattr(tensor, name, None), f"{path}.{name}")


def _attribute_places(holder: Any, path: str) -> Iterator[Place]:
    try:
        attributes = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        attributes = None
    if type(attributes) is dict:
        for name, value in list(attributes.items()):
            if name != MODEL_TABLES:
                yield "item", attributes, name, value, f"{path}.{name}"
    for name in member_names(type(holder)):
        try:
            value = object.__getattribute__(holder, name)
        except AttributeError:
            continue  # declared and not set
        yield "member", holder, name, value, f"{path}.{name}"


def member_names(cls: type) -> list[str]:
    """Return the names in __slots__ of a class and its bases."""
    return [
        name
        for base in reversed(cls.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _class_places(cls: type, path: str) -> Iterator[Place]:
    for name, value in list(vars(cls).items()):
        if name.startswith("__") and name.endswith("__"):
            continue
        for function in _functions_of(value):
            yield "class", cls, name, function, f"{path}.{name}"


def _functions_of(value: Any) -> Iterator[Any]:
    """Yield the functions that a descriptor wraps, or the class attribute itself."""
    if isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (f for f in (value.fget, value.fset, value.fdel) if f is not None)
    elif isinstance(value, functools.cached_property):
        yield value.func
    else:
        yield value


def _function_places(function: types.FunctionType, path: str) -> Iterator[Place]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield "fixed", function, "__closure__", cell, f"{path}.<{name}>"
    if function.__defaults__:
        yield "attribute", function, "__defaults__", function.__defaults__, f"{path}.__defaults__"
    for name, value in (function.__kwdefaults__ or {}).items():
        yield "item", function.__kwdefaults__, name, value, f"{path}.<{name}>"
    for name, value in vars(function).items():
        yield "item", vars(function), name, value, f"{path}.{name}"


def _cell_places(cell: types.CellType, path: str) -> Iterator[Place]:
    try:
        value = cell.cell_contents
    except ValueError:
        return  # not set yet
    # The name in the source, so that "cp_size" in a closure is known as well.
    yield "cell", cell, path.rpartition("<")[2].rstrip(">"), value, path


def _partial_places(holder: Any, path: str) -> Iterator[Place]:
    if not isinstance(holder, functools.partial):
        return
    yield "fixed", holder, "func", holder.func, f"{path}.func"
    yield "attribute", PartialArguments(holder), "value", holder.args, f"{path}.args"
    for name, value in holder.keywords.items():
        yield "item", holder.keywords, name, value, f"{path}.keywords[{name!r}]"


def _proxy_places(proxy: Any, path: str) -> Iterator[Place]:
    """Yield the mapping of a read-only view, unless it is that of a class, which has its places."""
    for mapping in gc.get_referents(proxy):
        if not (isinstance(mapping, dict) and "__module__" in mapping):
            yield "fixed", proxy, "mapping", mapping, path


def _local_places(local: threading.local, path: str) -> Iterator[Place]:
    """Yield the dictionaries that a thread-local object keeps for all threads."""
    by_thread = [d for d in gc.get_referents(local) if type(d) is dict]
    for position, values in enumerate(v for d in by_thread for v in d.values()):
        if type(values) is dict:
            yield "fixed", local, "threads", values, f"{path}.threads[{position}]"


def _exception_places(holder: Any, path: str) -> Iterator[Place]:
    if isinstance(holder, BaseException):
        yield "attribute", holder, "args", holder.args, f"{path}.args"
        for name in ("__cause__", "__context__"):
            yield "fixed", holder, name, getattr(holder, name), f"{path}.{name}"


# ---- by name -------------------------------------------------------------------------------------


def cache_places(holder: Any) -> dict[str, tuple[str, Any, Any]]:
    """Return (kind, owner, value) of one object's places that have the names of rotary caches."""
    named: dict[str, tuple[str, Any, Any]] = {}
    for owner in namespaces(holder):
        if isinstance(owner, dict) and not derived.CACHES.isdisjoint(owner):
            named |= {n: ("entry", owner, owner[n]) for n in derived.CACHES if n in owner}
    for name in derived.CACHES.intersection(member_names(type(holder))):
        if hasattr(holder, name):
            named[name] = ("member", holder, getattr(holder, name))
    return named


def namespaces(holder: Any) -> tuple[Any, ...]:
    """Return the dictionaries of an object's attributes, None for a missing one. New attributes go
    to the last."""
    if issubclass(type(holder), torch.nn.Module):
        return vars(holder), holder._buffers
    return (holder,) if isinstance(holder, dict) else (getattr(holder, "__dict__", None),)


def item_names(value: object) -> tuple[str, ...]:
    """Return the names of a named tuple's items; empty for any other object."""
    fields = getattr(type(value), "_fields", ()) if isinstance(value, tuple) else ()
    return fields if isinstance(fields, tuple) and len(fields) == len(value) else ()  # type: ignore[arg-type]


def is_dataclass_field(cls: Any, name: str) -> bool:
    """Whether a class attribute is the default of a dataclass's field."""
    return name in getattr(cls, "__dataclass_fields__", {})


# ---- paths ---------------------------------------------------------------------------------------


def _child_text(name: str) -> str:
    return f".{name}" if name.isidentifier() else f"[{name}]"


def key_text(key: object, position: int) -> str:
    """Write a key for a path. The text is equal on every rank: it has no address of an object."""
    if isinstance(key, (str, int, bool)):
        return repr(key)
    return f"{type(key).__name__} {position}"
