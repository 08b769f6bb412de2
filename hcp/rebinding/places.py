"""List the places in which an object holds values, in an order that is equal on every rank."""

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
from hcp.rebinding.closed import is_open_function, is_wrapper
from hcp.rebinding.looks import class_attribute, is_a, members, own_attributes
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


def places(holder: Any, path: str) -> Iterator[Place]:
    """Yield all places of one object, in a fixed order."""
    if is_a(holder, dict):
        for position, (key, value) in enumerate(list(dict.items(holder))):
            yield "item", holder, key, value, f"{path}[{key_text(key, position)}]"
    elif is_a(holder, (list, deque)):
        items: Any = list.__iter__ if is_a(holder, list) else deque.__iter__
        for i, value in enumerate(items(holder)):
            yield "item", holder, i, value, f"{path}[{i}]"
    elif derived.is_numpy(holder):
        for at in itertools.product(*map(range, holder.shape)):
            yield "item", holder, at, holder[at], f"{path}[{', '.join(map(str, at))}]"
    if is_a(holder, torch.nn.Module):
        yield from _module_places(holder, path)
    elif is_a(holder, type):
        yield from _class_places(holder, path)
    elif is_a(holder, types.FunctionType):
        yield from _function_places(holder, path)
    elif is_a(holder, types.MethodType):
        yield "fixed", holder, "__self__", holder.__self__, f"{path}.__self__"
        yield "fixed", holder, "__func__", holder.__func__, f"{path}.__func__"
    elif is_a(holder, types.CellType):
        yield from _cell_places(holder, path)
    elif is_a(holder, types.MappingProxyType):
        yield from _proxy_places(holder, path)
    elif is_a(holder, threading.local):
        yield from _local_places(holder, path)
    else:
        yield from _partial_places(holder, path)
        yield from _exception_places(holder, path)
        yield from _attribute_places(holder, path)
        if is_a(holder, torch.Tensor):
            yield from tensor_hooks(holder, path)


def _module_places(module: torch.nn.Module, path: str) -> Iterator[Place]:
    attributes = own_attributes(module) or {}
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
        function = hook.func if is_a(hook, functools.partial) else hook
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
        return tuple(getattr(torch.Tensor, name).__get__(tensor) for name in _TENSOR_HOOKS)


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


def _class_places(cls: type, path: str) -> Iterator[Place]:
    for name, value in list(vars(cls).items()):
        if name.startswith("__") and name.endswith("__"):
            continue
        for function in _functions_of(value):
            yield "class", cls, name, function, f"{path}.{name}"


def _functions_of(value: Any) -> Iterator[Any]:
    """Yield the functions that a descriptor wraps, or the class attribute itself."""
    if is_a(value, staticmethod) or is_a(value, classmethod):
        yield value.__func__
    elif is_a(value, property):
        yield from (f for f in (value.fget, value.fset, value.fdel) if f is not None)
    elif is_a(value, functools.cached_property):
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
    if not is_a(holder, functools.partial):
        return
    yield "fixed", holder, "func", holder.func, f"{path}.func"
    yield "attribute", PartialArguments(holder), "value", holder.args, f"{path}.args"
    for name, value in holder.keywords.items():
        yield "item", holder.keywords, name, value, f"{path}.keywords[{name!r}]"


def _proxy_places(proxy: Any, path: str) -> Iterator[Place]:
    """Yield the mapping of a read-only view, unless it is that of a class, which has its places."""
    for mapping in gc.get_referents(proxy):
        if not (is_a(mapping, dict) and dict.__contains__(mapping, "__module__")):
            yield "fixed", proxy, "mapping", mapping, path


def _local_places(local: threading.local, path: str) -> Iterator[Place]:
    """Yield the dictionaries that a thread-local object keeps for all threads."""
    by_thread = [d for d in gc.get_referents(local) if type(d) is dict]
    for position, values in enumerate(v for d in by_thread for v in d.values()):
        if type(values) is dict:
            yield "fixed", local, "threads", values, f"{path}.threads[{position}]"


def _exception_places(holder: Any, path: str) -> Iterator[Place]:
    if is_a(holder, BaseException):
        args, *chained = (getattr(BaseException, name).__get__(holder) for name in _EXCEPTION)
        yield "attribute", holder, "args", args, f"{path}.args"
        for name, value in zip(_EXCEPTION[1:], chained, strict=True):
            yield "fixed", holder, name, value, f"{path}.{name}"


# ---- by name -------------------------------------------------------------------------------------


def cache_places(holder: Any) -> dict[str, tuple[str, Any, Any]]:
    """Return (kind, owner, value) of one object's places that have the names of rotary caches."""
    named: dict[str, tuple[str, Any, Any]] = {}
    for owner in namespaces(holder):
        if is_a(owner, dict):
            held = filter(functools.partial(dict.__contains__, owner), derived.CACHES)
            named |= {name: ("entry", owner, dict.__getitem__(owner, name)) for name in held}
    for name, member in members(type(holder)).items():
        if name in derived.CACHES:
            with suppress(AttributeError):  # declared and not set
                named[name] = ("member", holder, member.__get__(holder))
    return named


def namespaces(holder: Any) -> tuple[Any, ...]:
    """Return the dictionaries of an object's attributes, None for a missing one. New attributes go
    to the last."""
    if is_a(holder, torch.nn.Module):
        return own_attributes(holder), holder._buffers
    return (holder,) if is_a(holder, dict) else (own_attributes(holder),)


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


def _child_text(name: str) -> str:
    return f".{name}" if name.isidentifier() else f"[{name}]"


def key_text(key: object, position: int) -> str:
    """Write a key for a path. The text is equal on every rank: it has no address of an object."""
    for kind in (str, bool, int):
        if is_a(key, kind):
            return kind.__repr__(key)
    return f"{type(key).__name__} {position}"
