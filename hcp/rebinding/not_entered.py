"""The objects that the walk does not enter: those of torch, Python, and packages that shard."""

from __future__ import annotations

import argparse
import functools
import sys
import sysconfig
import threading
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding import derived, packages
from hcp.rebinding.safe_access import module_of

_CLOSED: Any = (
    torch.Tensor,
    types.ModuleType,
    type,
    dist.ProcessGroup,
    ProcessGroups,
    torch.optim.Optimizer,
)
_CONTAINERS = (dict, list, deque, UserDict, UserList)
_OPEN_STDLIB: Any = (
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
OWN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""The plain classes of tensors. torch's other classes keep the groups over which they shard."""
LRU_CACHE = type(cache(lambda: None))
"""The class of functions that functools caches."""
_FUNCTIONS: Any = (types.FunctionType, LRU_CACHE)


def is_open(value: Any) -> bool:
    """Whether the walk goes into an object."""
    if issubclass(type(value), _CLOSED):
        return False
    if issubclass(type(value), (torch.nn.Module, set)):
        return True
    if type(value).__module__ == "numpy" and derived.is_numpy(value):
        return bool(value.dtype == object)
    if issubclass(type(value), _FUNCTIONS):
        return is_open_function(value)
    if is_closed_package(module_of(type(value))):
        return issubclass(type(value), _OPEN_STDLIB)
    return True


def is_open_function(function: Any) -> bool:
    """Whether a function is, or wraps, one of the user's code."""
    return not all(map(is_closed_package, modules_of(function)))


def modules_of(function: Any) -> Iterator[str]:
    """Yield the names of the modules that a function comes from.

    It has several if a decorator made it. `functools.wraps` copies the `__module__` of what it
    wraps, and the decorator's own module is that of the globals. So a user's function around one of
    torch has a module of the user's, and so has one of torch around a user's (`torch.no_grad()`).
    """
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        function = function.__func__ if issubclass(type(function), types.MethodType) else function
        if issubclass(type(function), (*_FUNCTIONS, types.BuiltinFunctionType)):
            yield function.__module__ or ""
        else:
            yield module_of(type(function))
        if issubclass(type(function), types.FunctionType):
            yield function.__globals__.get("__name__") or ""
        plain = issubclass(type(function), _FUNCTIONS)
        wrapped = vars(function).get("__wrapped__") if plain else None
        if issubclass(type(wrapped), (*_FUNCTIONS, types.MethodType)):
            function = wrapped


def is_kept_by_torch(holder: Any, module: str) -> bool:
    """Whether an object belongs to torch or to a package that shards.

    `module`: the name of its class's module.
    """
    if issubclass(type(holder), torch.nn.Module):
        return is_wrapper(type(holder))
    return type(holder) not in OWN_TENSORS and (
        module.partition(".")[0] == "torch" or packages.is_sharder(module)
    )


def _is_wrapper(module: type) -> bool:
    """Whether a class of modules is a DDP, FSDP or compiled wrapper, which has groups of its own to
    shard and reduce over.

    `fully_shard` derives a class from the user's. That is no wrapper, since the user's attributes
    are the module's.
    """
    classes = module.__mro__[: module.__mro__.index(torch.nn.Module)]
    if not classes:
        return False
    own = str(classes[0].__module__)
    if own.startswith("torch.nn.modules."):
        return False
    if packages.is_sharder(own):
        return True
    if not own.startswith("torch."):
        return False
    return all(module_of(cls).startswith("torch.") for cls in classes if cls is not object)


is_wrapper: Callable[[type], bool] = cache(_is_wrapper)
"""The same, found once for each class."""


@cache
def is_closed_package(module: str) -> bool:
    """Whether a module belongs to torch, NumPy, the standard library or a package that shards. A
    user's module of such a name does not."""
    name = module.partition(".")[0]
    if name in ("torch", "numpy") or packages.is_sharder(module):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return (
        name in sys.stdlib_module_names
        and name != "__main__"
        and (file is None or library in Path(file).resolve().parents)
    )
