"""Write the value of a place, and restore it.

Most places are an item or an attribute, which C writes itself (``csrc/python/slots.h``). The
classes here are for the others: each has one attribute ``value``, and setting it writes the place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place of a model that holds a training group, or something that depends on one."""

    path: str
    """The path from the model to it: "model.layers[3].attention.cp_group"."""

    role: str
    """The role of its value: "cp", "collection", several for a tuple of groups; "cp size" for a
    derived value; "cache"; "rule" for a value of a class's rule."""

    kind: str
    """The way to write it: "item" is owner[key]; "member" an attribute of __slots__."""

    owner: Any = field(repr=False)
    key: Any

    value: Any = field(repr=False)
    """The value that it holds inside the context."""


def writer_of(kind: str, owner: Any, key: Any) -> tuple[str, Any, Any]:
    """Return (kind, owner, key) of a slot at a place of this kind."""
    if kind == "cell":
        return "attribute", owner, "cell_contents"
    return ("attribute", owner, key) if kind == "class" else (kind, owner, key)


class SetContents:
    """The contents of a set. They change in one call, and reading returns what was written."""

    def __init__(self, owner: set[Any]) -> None:
        self.owner = owner
        self._last: frozenset[Any] = frozenset(owner)

    @property
    def value(self) -> frozenset[Any]:
        if self._last != self.owner:
            self._last = frozenset(self.owner)
        return self._last

    @value.setter
    def value(self, new: frozenset[Any]) -> None:
        self._last = new
        self.owner.symmetric_difference_update(self.owner ^ new)


class PartialArguments:
    """The positional arguments of a functools.partial. Only unpickling sets them."""

    def __init__(self, owner: functools.partial[Any]) -> None:
        self.owner = owner

    @property
    def value(self) -> tuple[Any, ...]:
        return self.owner.args

    @value.setter
    def value(self, new: tuple[Any, ...]) -> None:
        owner = self.owner
        owner.__setstate__((owner.func, new, owner.keywords, vars(owner)))  # type: ignore[attr-defined]


class ClearedCache:
    """A functools cache. It is empty after any write."""

    value = property(lambda self: None, lambda self, new: self.clear())

    def __init__(self, clear: Callable[[], None]) -> None:
        self.clear = clear


class FreshDictionary:
    """A dictionary that is used as a cache. Writing None puts an empty dictionary there."""

    def __init__(self, owner: dict[str, Any], name: str) -> None:
        self._owner, self._name = owner, name

    @property
    def value(self) -> dict[Any, Any]:
        return self._owner[self._name]  # type: ignore[no-any-return]

    @value.setter
    def value(self, new: dict[Any, Any] | None) -> None:
        self._owner[self._name] = {} if new is None else new


class SwitchedByMethod:
    """The arguments that a method was last called with, by the attributes that keep them. Writing
    calls the method."""

    def __init__(self, owner: Any, method: str, held: tuple[str, ...]) -> None:
        self._owner, self._method, self._held = owner, method, held

    @property
    def value(self) -> tuple[Any, ...]:
        return tuple(getattr(self._owner, name, None) for name in self._held)

    @value.setter
    def value(self, arguments: tuple[Any, ...]) -> None:
        getattr(self._owner, self._method)(*arguments)
