"""Name parts of a step in traces of torch.profiler, and in NVTX under torch's ``emit_nvtx``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled

P = ParamSpec("P")
R = TypeVar("R")


def ranged(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose calls are a range of this name, where a profiler runs."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def in_range(*given: P.args, **named: P.kwargs) -> R:
            # The range itself takes some microseconds, and compilers know none.
            if torch.compiler.is_compiling() or not _profiler_enabled():
                return function(*given, **named)
            with torch.profiler.record_function(name):
                return function(*given, **named)

        return in_range

    return decorate


def range_of(name: str) -> AbstractContextManager[Any]:
    """Return a range of this name, where a profiler runs."""
    return torch.profiler.record_function(name) if _profiler_enabled() else nullcontext()


def later_range(name: str) -> AbstractContextManager[Any] | None:
    """Return a range to be entered later, where a profiler runs."""
    return torch.profiler.record_function(name) if _profiler_enabled() else None
