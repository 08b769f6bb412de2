"""The option ``exclude=``: the objects that a walk leaves out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from hcp.rebinding.safe_access import is_a

Exclude = Sequence[Any]
"""Paths ("vision_model", "model.layers[0]", "*.vision"), objects and classes that stay."""


def listed(exclude: Exclude) -> tuple[Any, ...]:
    """Return the items of `exclude`. Raises ValueError for a single path or class, which is no
    sequence."""
    if _is_named(exclude):
        raise ValueError(f"exclude is {exclude!r}, expected a sequence: ({exclude!r},)")
    return tuple(exclude)


class Excluded:
    """The objects that `exclude` covers, and its items that have covered nothing yet."""

    def __init__(self, exclude: Exclude) -> None:
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        self._types: list[type] = []
        self._ids: dict[int, Any] = {}
        self._unused: dict[Any, str] = {}
        for item in exclude:
            self._unused[id(item)] = repr(item) if _is_named(item) else _name(item)
            if is_a(item, str):
                text = ".*".join(map(re.escape, item.split("*")))
                self._patterns.append((item, re.compile(rf"(model[.]?)?{text}")))
            elif is_a(item, type):
                self._types.append(item)
            else:
                self._ids[id(item)] = item
        self._items = list(exclude)
        self.paths: list[str] = []
        """Paths at which `matches` has said yes."""

    def __bool__(self) -> bool:
        return bool(self._items)

    def matches(self, value: Any, path: str) -> bool:
        """Whether a value at a path is left out. If it is, `paths` records it."""
        covered = self.covers(value, path)
        if covered:
            self.paths.append(path)
        return covered

    def covers(self, value: Any, path: str) -> bool:
        """Whether an item stands for a value at a path."""
        found = next(self._matching(value, path), None)
        if found is not None:
            self.note_used(found)
        return found is not None

    def note_used(self, given: Any) -> None:
        """Note that an item of `exclude` covers something."""
        self._unused.pop(id(given), None)

    def objects(self) -> list[Any]:
        """The items that are neither paths nor classes."""
        return list(self._ids.values())

    def check_used(self) -> None:
        """Raise ValueError for items that have covered nothing."""
        if self._unused:
            unused = ", ".join(self._unused.values())
            raise ValueError(
                f"exclude has {unused}, which the model does not reach: expected paths such as "
                "'vision_model' or 'model.layers[0]', objects of the model, or classes"
            )

    def _matching(self, value: Any, path: str) -> Iterator[Any]:
        if id(value) in self._ids:
            yield self._ids[id(value)]
        yield from (kind for kind in self._types if is_a(value, kind))
        yield from (text for text, pattern in self._patterns if pattern.fullmatch(path))


def _is_named(value: object) -> bool:
    return issubclass(type(value), (str, type))


def _name(value: object) -> str:
    return f"a {type(value).__name__}"
