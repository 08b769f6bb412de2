"""Look at objects of any class without running their code.

A walk, and the search of a process more so, meets objects of strangers: proxies that are not ready,
mocks, lazy modules. Their ``__class__``, attributes and iterators may raise, load something or say
what is not so. Types, and what Python itself keeps of an object, do neither.
"""

from __future__ import annotations

import types
from typing import Any, TypeGuard, TypeVar

_T = TypeVar("_T")
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)


def is_a(value: object, classes: type[_T] | tuple[type[_T], ...]) -> TypeGuard[_T]:
    """Whether the type of a value is one of these classes or derived from one. isinstance would
    also ask the value for its ``__class__``. What the walk asks of every object it asks as this
    does, without the call."""
    return issubclass(type(value), classes)


def own_attributes(value: object) -> dict[str, Any] | None:
    """Return the ``__dict__`` of an object, None if it has none. A class may define another one by
    this name."""
    for base in type(value).__mro__:
        descriptor = vars(base).get("__dict__")
        if type(descriptor) in _DESCRIPTORS:
            held = descriptor.__get__(value)  # type: ignore[union-attr]
            return held if type(held) is dict else None
    return None


def has(value: object, name: str) -> bool:
    """Whether an object or its class holds anything under a name."""
    classes = type(value).__mro__
    return name in (own_attributes(value) or ()) or any(name in vars(base) for base in classes)


def class_attribute(cls: type, name: str) -> Any:
    """Return what a class or a base of it holds under a name. None if none does."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def members(cls: type) -> dict[str, Any]:
    """Return the descriptors of the names in ``__slots__`` of a class and its bases."""
    found = {}
    for base in reversed(cls.__mro__):
        if "__slots__" in vars(base):
            for name, member in list(vars(base).items()):
                if type(member) is types.MemberDescriptorType:
                    found[name] = member
    return found


def module_of(cls: type) -> str:
    """Return the name of the module of a class; "" if it has none."""
    name = cls.__module__
    return name if type(name) is str else ""
