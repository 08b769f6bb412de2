"""Models as JSON files: their entries, and where they come from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hcp._files import write_file
from hcp._validate import expect_names

Model = TypeVar("Model")


def write(
    path: str | os.PathLike[str],
    format: str,
    entries: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> None:
    """Write the entries of a model, as JSON values. ``format`` names their kind and version. Raises
    OSError that names the file, and keeps the one that was there."""
    data = {"format": format, **entries, "provenance": dict(provenance)}
    write_file(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def read(
    path: str | os.PathLike[str],
    format: str,
    names: tuple[str, ...],
    made_of: Callable[[dict[str, Any]], Model],
) -> Model:
    """Read a file of :func:`write`, and make the model of its entries, which have these names.

    Raises ValueError that names the file and the entry that is not as expected.
    """
    try:
        return made_of(_checked(json.loads(Path(path).read_text()), format, names))
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError too
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _checked(data: Any, format: str, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(data, dict) or data.get("format") != format:
        given = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"format is {given!r}, expected {format!r}")
    expect_names("", data, ("format", *names, "provenance"))
    if not isinstance(data["provenance"], dict):
        raise ValueError(f"provenance is {data['provenance']!r:.60}, expected an object")
    return data
