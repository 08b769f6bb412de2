"""Functions of the caller that ranks call different numbers of times, and the modules in them.

A module that a trainer shards as a unit of its own gathers its parameters at each call. All ranks
take part in a gathering, so they must call the module equally often.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

_T = TypeVar("_T")


def expect_no_unit(name: str, function: object) -> None:
    """Raise ValueError if a function is a module that is, or has in it, a unit."""
    for module in function.modules() if isinstance(function, nn.Module) else ():
        _expect_no_unit(name, module)


class without_units:
    """A context in which this thread may call no unit: ValueError before the unit gathers."""

    def __init__(self, name: str) -> None:
        """``name``: of the argument whose function is called."""
        self._name, self._thread = name, threading.get_ident()
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> None:
        self._hook = register_module_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, given: Any) -> None:
        if threading.get_ident() == self._thread:
            _expect_no_unit(self._name, module)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        assert self._hook is not None
        self._hook.remove()


def guarded(name: str, function: Callable[..., _T]) -> Callable[..., _T]:
    """Return a function that does the same ``without_units``."""

    def call(*given: Any) -> _T:
        with without_units(name):
            return function(*given)

    return call


def _expect_no_unit(name: str, module: nn.Module) -> None:
    sharder = _sharder_of(module)
    if sharder is not None:
        raise ValueError(
            f"{name} calls {type(module).__name__}, which {sharder} shards as a unit of its own, "
            "expected none: ranks call it different numbers of times, and its gatherings would "
            f"not meet; let it belong to the unit of its layer, or call it before: {_BEFORE[name]}"
        )


_BEFORE = {
    "expand": "cp.attention(query, *expand(latent))",
    "combine": "give what it computes among maps",
    "apply": "give what it computes among maps",
}


def _sharder_of(module: nn.Module) -> str | None:
    """Return by what a module gathers its parameters when it is called. None: by nothing."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return "fully_shard"
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    own = module.parameters(recurse=False)
    return "ZeRO-3" if any(hasattr(parameter, "ds_id") for parameter in own) else None
