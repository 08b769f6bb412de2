"""The revision of what is registered: names and rules. A table of an earlier one is made anew."""

from __future__ import annotations

_revision = object()


def current() -> object:
    """Return the revision: the same object until something is registered."""
    return _revision


def advance() -> None:
    """Begin a new revision, once a name or a rule was registered."""
    global _revision
    _revision = object()
