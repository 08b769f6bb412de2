"""The public names that docs/reference/api.md lists: those of hcp, and those in its modules."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/api.md"


def public_names() -> list[str]:
    """With their modules, as the page lists them."""
    return re.findall(r"^\| `(hcp\.[\w.]+)", PAGE.read_text(), re.MULTILINE)


def value_of(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(import_module(module), own)
