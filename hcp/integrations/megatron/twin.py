"""A twin of a module: its parameters, with other attributes, for one call."""

from __future__ import annotations

from typing import Any


def twin(module: Any, **changes: Any) -> Any:
    """Copy a module for one call: with its own parameters, and with other attributes.

    The module itself does not change: the backward of another micro-batch may need it.
    """
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__["_modules"] = {k: v for k, v in module._modules.items() if k not in changes}
    made.__dict__.update(changes)
    return made
