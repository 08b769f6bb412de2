"""Check whether a model is still as the walk saw it. C code does this at every switch."""

from __future__ import annotations

import functools
import operator
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hcp._core import Structure
from hcp.rebinding import derived
from hcp.rebinding.not_entered import OWN_TENSORS, is_closed_package, is_wrapper
from hcp.rebinding.places import ATOMS, MODULE_HOOKS, hooks_of, places, tensor_hooks
from hcp.rebinding.safe_access import members, module_of, own_attributes

_PLAIN_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_MORE_THAN_ATTRIBUTES: Any = (
    *(dict, list, deque, set, functools.partial, types.FunctionType),
    *(BaseException, threading.local),
)
"""Classes of objects that have places beside their attributes."""
_hooks_among = operator.itemgetter(*MODULE_HOOKS)
"""Takes the dictionaries of hooks out of a module's attributes."""
_NUMBERS_AND_TEXT = (int, float, bool, str)


class Records:
    """The objects that a walk has looked into, and afterwards a test of whether they changed."""

    def __init__(self) -> None:
        self.holders: list[Any] = []
        self.others: list[tuple[Any, str]] = []
        """(object, path): the path says how a closure's variable is called."""
        self.exact: list[Any] = []
        """Dictionaries in which a tensor that takes another's place is a change."""
        self.buffers: list[dict[str, torch.Tensor | None]] = []
        self._tensors: set[int] = set()
        """Identities of the attributes of noted tensors. `holders` keeps these alive."""
        self._hooks: list[tuple[weakref.ref[torch.Tensor], Any, Any]] = []
        """(tensor, its hooks after backward, and after accumulation). No tensor is kept alive."""
        self._reads: list[tuple[Callable[[], Any], Any]] = []
        """(function, what it returned) of values that change in place, or that no pointer shows."""

    def note_tensor(self, tensor: torch.Tensor) -> bool:
        """Note a tensor, which can be given attributes and hooks. Return whether the walk goes into
        it: it has some, and its class is none of those that keep groups there."""
        attributes = vars(tensor)
        if id(attributes) in self._tensors:
            return False
        self._tensors.add(id(attributes))
        self.holders.append(attributes)
        if type(tensor) not in OWN_TENSORS and is_closed_package(module_of(type(tensor))):
            return False  # a class of torch's that keeps groups there for what it shards
        hooks = hooks_of(tensor)
        self._hooks.append((weakref.ref(tensor), *hooks))
        for each in hooks:
            if each is not None:
                self.holders.append(each)
        return bool(attributes) or (any(hooks) and any(True for _ in tensor_hooks(tensor)))

    def note(self, holder: Any, path: str) -> None:
        """Note an object that the walk looks into."""
        if issubclass(type(holder), torch.nn.Module):
            self._note_module(holder, path)
            return
        if type(holder) in _PLAIN_DICTS or type(holder) is list:
            self.holders.append(holder)
            return
        attributes = own_attributes(holder)
        if attributes is not None and not (
            issubclass(type(holder), _MORE_THAN_ATTRIBUTES) or members(type(holder))
        ):
            self.holders.append(attributes)
        else:
            self.others.append((holder, path))

    def _note_module(self, module: torch.nn.Module, path: str) -> None:
        if not isinstance(module._modules, dict):  # TorchScript's
            self.others.append((module, path))
            return
        self.holders.append(module._modules)
        if is_wrapper(type(module)):
            return  # its own attributes change at every step, and are no places
        own = vars(module)
        self.holders += (own, module._buffers, *_hooks_among(own))
        self.exact.append(module._parameters)
        if module._buffers:
            self.buffers.append(module._buffers)

    def note_contents(self, value: Any) -> None:
        """Note what a value that is derived from a group has in it, and that may change there."""
        if type(value) is list:
            self._read(functools.partial(_integers, value))
        elif derived.is_numpy(value):
            self._read(value.tolist)
        elif type(value) in derived.TENSORS and not value.is_meta:
            self._read(functools.partial(_contents, value))

    def note_value(self, kind: str, owner: Any, name: str) -> None:
        """Note the number or text in a place, whatever its name. C sees what else is there."""
        self._read(functools.partial(_number_or_text, kind, owner, name))

    def note_type(self, kind: str, owner: Any, name: str) -> None:
        """Note whether a place has an integer: which one makes no difference."""
        self._read(lambda: type(_value_at(kind, owner, name)) is int)

    def _read(self, read: Callable[[], Any]) -> None:
        self._reads.append((read, read()))

    def take(self, strict: bool) -> Callable[[], bool]:
        """Record the values that all noted objects hold. Return a function that tells whether they
        still hold them. `strict`: whether what looks dependent counts, too."""
        names = _names((*self.holders, *self.exact))
        watched = frozenset([name for name in names if derived.is_watched(name, strict)])
        structure = Structure(self.holders, watched, tuple(ATOMS))
        exact = Structure(self.exact, watched, (type(None),))
        others = [(holder, path, _values(holder, path, strict)) for holder, path in self.others]
        known = {id(vars(tensor)): vars(tensor) for tensor in self._current_buffers()}

        def holds() -> bool:
            return (
                structure.holds()
                and exact.holds()
                and self._hooks_are_the_same()
                and all(
                    id(vars(tensor)) in known or _is_bare(tensor)
                    for tensor in self._current_buffers()
                )
                and all(read() == before for read, before in self._reads)
                and all(
                    _same(values, _values(holder, path, strict)) for holder, path, values in others
                )
            )

        return holds

    def _hooks_are_the_same(self) -> bool:
        """Whether each tensor has the dictionaries of hooks that it had, or none still. What is in
        them is for C."""
        for reference, backward, accumulated in self._hooks:
            tensor = reference()
            if tensor is None:
                continue
            now = hooks_of(tensor)
            if now[0] is not backward or now[1] is not accumulated:
                return False
        return True

    def _current_buffers(self) -> Iterator[torch.Tensor]:
        for buffers in self.buffers:
            yield from (tensor for tensor in list(buffers.values()) if tensor is not None)


def _is_bare(tensor: torch.Tensor) -> bool:
    """Whether a tensor has nothing in which a group could be. A model may replace a buffer at every
    step."""
    return not vars(tensor) and not any(True for _ in tensor_hooks(tensor))


def _names(holders: tuple[Any, ...]) -> set[str]:
    dictionaries = [holder for holder in holders if issubclass(type(holder), dict)]
    return {key for dictionary in dictionaries for key in dictionary if type(key) is str}


def _integers(values: list[Any]) -> list[int | None]:
    return [value if type(value) is int else None for value in values]


def _contents(tensor: torch.Tensor) -> Any:
    """The numbers of a tensor. On a device, which would have to be waited for, the count of its
    changes, which tensors of inference mode do not have."""
    if tensor.device.type == "cpu" or tensor.is_inference():
        return tensor.tolist()
    return tensor.data_ptr(), tensor._version


def _value_at(kind: str, owner: Any, name: str) -> Any:
    return getattr(owner, name, None) if kind == "member" else owner.get(name)


def _number_or_text(kind: str, owner: Any, name: str) -> tuple[type, Any] | None:
    value = _value_at(kind, owner, name)
    return (type(value), value) if type(value) in _NUMBERS_AND_TEXT else None


def _values(holder: Any, path: str, strict: bool) -> list[Any]:
    values = sorted(set.__iter__(holder), key=id) if issubclass(type(holder), set) else []
    values += [
        value if type(value) not in ATOMS or _is_watched(key, strict) else None
        for _, _, key, value, _ in places(holder, path)
    ]
    return values


def _is_watched(key: Any, strict: bool) -> bool:
    return type(key) is str and derived.is_watched(key, strict)


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        a is b or (type(a) is type(b) and type(a) in (int, str) and a == b)
        for a, b in zip(before, now, strict=True)
    )
