"""Check whether a model is still as the walk saw it. C code does this at every switch."""

from __future__ import annotations

import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from hcp._core import Structure
from hcp.rebinding import derived
from hcp.rebinding.places import ATOMS, member_names, places

_RUN_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_PLAIN_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})


class Records:
    """The objects that a walk has looked into, and afterwards a test of whether they changed."""

    def __init__(self) -> None:
        self.holders: list[Any] = []
        self.others: list[Any] = []
        self.exact: list[Any] = []
        """Dictionaries in which a tensor that takes another's place is a change."""

    def note_tensor(self, tensor: torch.Tensor) -> None:
        """Note a tensor, which can be given attributes."""
        self.holders.append(vars(tensor))

    def note(self, holder: Any) -> None:
        """Note an object that the walk looks into."""
        if isinstance(holder, torch.nn.Module):
            own = vars(holder)
            self.holders += (own, holder._modules)
            self.holders += [own[name] for name in _RUN_FORWARD]
            self.exact.append(holder._parameters)
            return
        if type(holder) in _PLAIN_DICTS or type(holder) is list:
            self.holders.append(holder)
            return
        attributes = getattr(holder, "__dict__", None)
        plain = type(attributes) is dict and not isinstance(
            holder, (dict, list, deque, set, functools.partial, types.FunctionType)
        )
        if plain and not member_names(type(holder)):
            self.holders.append(attributes)
        else:
            self.others.append(holder)

    def take(self) -> Callable[[], bool]:
        """Record the values that all noted objects hold. Return a function that tells whether they
        still hold them."""
        names = [n for name in derived.DERIVED for n in (name, name.upper())]
        watched = frozenset(spelling for n in names for spelling in (n, f"_{n}"))
        structure = Structure(self.holders, watched, tuple(ATOMS))
        exact = Structure(self.exact, watched, (type(None),))
        others = [(holder, _values(holder, watched)) for holder in self.others]

        def holds() -> bool:
            return (
                structure.holds()
                and exact.holds()
                and all(_same(values, _values(holder, watched)) for holder, values in others)
            )

        return holds


def _values(holder: Any, watched: frozenset[str]) -> list[Any]:
    values = sorted(holder, key=id) if isinstance(holder, set) else []
    values += [
        value if type(value) not in ATOMS or key in watched else None
        for _, _, key, value, _ in places(holder, "")
    ]
    return values


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        a is b or (type(a) is int and a == b) for a, b in zip(before, now, strict=True)
    )
