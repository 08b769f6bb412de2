"""A twin of a module for one call, and what names stand for in the file of its class."""

from __future__ import annotations

import sys
from typing import Any


def twin(module: Any, kind: Any = None, **changes: Any) -> Any:
    """Copy a module for one call: with its own parameters, and with other attributes. `kind`: a
    class derived of its own.

    The module itself does not change: the backward of another micro-batch may need it.
    """
    made: Any = object.__new__(kind or type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__["_modules"] = {k: v for k, v in module._modules.items() if k not in changes}
    made.__dict__.update(changes)
    return made


def named(module: type, name: str) -> Any:
    """Return what a name stands for in Megatron's file of a class, or of a base of it."""
    homes = [vars(sys.modules[base.__module__]) for base in module.__mro__]
    return next(home[name] for home in homes if name in home)
