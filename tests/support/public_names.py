"""Public names of hcp and its modules, as docs/reference/api.md lists them, and of a handler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import hcp
from hcp.exchange.calls import HandlerPart

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/api.md"


def public_names() -> list[str]:
    """With their modules, as the page lists them."""
    return re.findall(r"^\| `(hcp\.[\w.]+)", PAGE.read_text(), re.MULTILINE)


def value_of(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(import_module(module), own)


def parts_of_handler() -> dict[str, str]:
    """The class of each part of a handler by the part's name, as the page lists them."""
    rows = re.findall(r"^\| `(hcp\.[\w.]+)` \| `cp\.(\w+)`: ", PAGE.read_text(), re.MULTILINE)
    return {part: cls for cls, part in rows}


def own_names(value: object) -> list[str]:
    return [name for name in dir(value) if not name.startswith("_")]


def names_of_handler(cp: hcp.ContextParallelHandler) -> Iterator[str]:
    """Its public names; those of its parts follow the part's own name, as in "scan.halo"."""
    for name in own_names(cp):
        value = getattr(cp, name)
        if isinstance(value, HandlerPart):
            yield from (f"{name}.{own}" for own in own_names(value))
        else:
            yield name
