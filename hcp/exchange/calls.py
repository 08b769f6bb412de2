"""The calls of a handler: their numbers and kinds, the refusal of one that fails, and the module
that makes it.

A module is found without being told, by a name that is the same on all ranks. The call's stack has
the modules whose forward runs. A module's name is its path in the outermost of these, from the
first numbered list on: "layers.3.attention". If no list is between them, as where a trainer loops
over layers, it begins with the list that holds the outermost one. What else holds or wraps a model,
which may differ between ranks, is no part of a name. Nor is an order of calls: a recomputation in
the backward finds what the forward did.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
from torch import Tensor, nn

from hcp._core import tracked_objects
from hcp._this_process import BoundToProcess
from hcp.exchange.agreement import (
    CallKind,
    LayerName,
    Moves,
    Refusal,
    Stamp,
    agree_once,
    rows_like,
)
from hcp.exchange.move import AllPairs
from hcp.exchange.tables import Origin
from hcp.exchange.transport import Transport

_T = TypeVar("_T")
_log = logging.getLogger("hcp")


class Calls:
    """Numbers the calls that a group makes, and those that the whole domain makes."""

    def __init__(
        self, transport: Transport, origin: Origin, group: range, sites: bool = False
    ) -> None:
        """``sites``: whether calls are also named by the lines of source that they come from."""
        self._transport, self._origin, self._sites = transport, origin, sites
        self.group = group
        """The ranks that compute this rank's sequences."""
        self.pairs = AllPairs(group, transport.rank)
        """A row from each of them to each other, for calls that all of them compare."""
        self.numbers: Iterator[int] = itertools.count(1)
        """Numbers of the group's calls."""
        self._domain_numbers: Iterator[int] = itertools.count(1)
        self._kinds: dict[tuple[object, ...], CallKind] = {}
        self._nameless = 0
        """Calls of layers that no module with a name has made."""

    def make(self, operation: str, work: Callable[[int], _T], *, everywhere: bool = False) -> _T:
        """Do the work of a call, given its number. The group makes the call or (``everywhere``) the
        domain. If it fails, the ranks that wait for this one are told."""
        number = next(self._domain_numbers if everywhere else self.numbers)
        try:
            return work(number)
        except Exception as error:
            self.refuse(operation, number, error, everywhere)
            raise

    def refuse(
        self, operation: str, number: int, error: Exception, everywhere: bool = False
    ) -> None:
        """Tell the other ranks of a call why this one does not make it."""
        ranks = range(self._transport.size) if everywhere else self.group
        peers = [rank for rank in ranks if rank != self._transport.rank]
        if peers:
            call = *self._origin, everywhere, number
            reason = f"{operation}: {type(error).__name__}: {error}"
            self._transport.refuse(Refusal(call, reason), peers)

    @contextmanager
    def checking(self, operation: str) -> Iterator[None]:
        """Refuse the group's next call when a check before it raises."""
        try:
            yield
        except Exception as error:
            self.refuse(operation, next(self.numbers), error)
            raise

    def layer(self, warns: bool = False) -> LayerName:
        """Name the layer that makes a call: its module, and the lines of source where they are
        wanted. ``warns``: of the second call that no module with a name makes."""
        # Also where nobody compares: a module keeps the name of its first call, on all ranks.
        module = calling_module()
        if len(self.group) < 2:
            return None
        if module == "" and warns:
            self._nameless += 1
            if self._nameless == 2:
                _warn_of_nameless()
        if not self._sites:
            return module or None
        return f"{module} ({call_site()})" if module else call_site()

    def stamp(
        self, operation: str, number: int, x: Tensor, dtype: torch.dtype, **options: int | str
    ) -> Stamp:
        """The stamp of a call whose rows are like those of x."""
        return Stamp(self._kind(operation, x, dtype, options), number, layer=self.layer())

    def domain_stamp(self, operation: str, number: int, x: Tensor, dtype: torch.dtype) -> Stamp:
        """The same of a call of the domain, which ranks with and without rows may make in different
        modules."""
        return Stamp(self._kind(operation, x, dtype, {}), number)

    def _kind(
        self, operation: str, x: Tensor, dtype: torch.dtype, options: dict[str, int | str]
    ) -> CallKind:
        """Ranks whose rows need gradients wait for the others in the backward, so all of them
        must."""
        if x.requires_grad and torch.is_grad_enabled():
            options["gradients"] = "x.requires_grad"
        key = operation, x.dtype, x.shape[1:], dtype, *options.values()
        kind = self._kinds.get(key)
        if kind is None:
            to = str(dtype).removeprefix("torch.")
            given = {"x": rows_like(x), "dtype": to, **options}
            kind = self._kinds[key] = CallKind(operation, self._origin, **given)
        return kind

    def agree(self, moves: Moves, stamp: Stamp) -> Stamp:
        """Compare the first call of a kind with the peers of these moves, and return its stamp."""
        agree_once(self._transport, moves, stamp)
        return stamp

    def agreed_stamp(self, operation: str, number: int, x: Tensor, **options: int | str) -> Stamp:
        """The stamp of a call whose rows are like those of x, once all ranks of the group have
        compared it."""
        return self.agree(self.pairs, self.stamp(operation, number, x, x.dtype, **options))


class HandlerPart(BoundToProcess):
    """A part of a handler under a name of its own, such as ``cp.scan``.

    A part holds what it needs of the handler, and not the handler: they are freed together without
    the garbage collector, and the part can be kept alone.
    """

    _ELSEWHERE = (
        "send the plan and the samples, and call hcp.dispatch there; cp.layout and local are "
        "pickled"
    )


_warnings = itertools.count()


def _warn_of_nameless() -> None:
    """Log it once in a process."""
    if next(_warnings) == 0:
        _log.warning(
            "cp.attention is called again by no module that a model holds, at %s: ranks that call "
            "such layers in different orders cannot be told apart, and would use each other's "
            "rows; hold layers in a torch.nn.Module, or name them: cp.attention(..., layer=)",
            call_site(),
        )


def call_site() -> str:
    """The nearest callers outside hcp, innermost first, by file and line."""
    frame: FrameType | None = sys._getframe()
    found: list[str] = []
    while frame is not None and len(found) < 3:
        if frame.f_globals.get("__name__", "").partition(".")[0] != "hcp":
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


# ---- the module that makes a call ----------------------------------------------------------------

_FORWARD = nn.Module._call_impl.__code__
"""The function that runs a module's forward. Its frame holds the module, and no tensor that others
let go."""

_WRAPPED = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names by which wrappers (DDP, FSDP, compiled, checkpointed modules) hold what they wrap."""

_Path = tuple[str, ...]
_names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
"""Modules by identity, and their names; "" of one that nothing with a name holds."""


def calling_module() -> str | None:
    """Return the name of the module whose forward makes this call; "" if no name tells who does.

    None under torch.compile: ranks may compile other parts of a model, and what is compiled is not
    on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    if _is_compiled(frame):
        return None
    while frame is not None and frame.f_code is not _FORWARD:
        frame = frame.f_back
    if frame is None:
        return ""
    return _known(frame.f_locals["self"]) or _found([*_modules_on(frame)])


def _modules_on(frame: FrameType | None) -> Iterator[nn.Module]:
    """Yield the modules whose forward runs, the innermost first."""
    while frame is not None:
        if frame.f_code is _FORWARD:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _is_compiled(frame: FrameType | None) -> bool:
    """Whether a compiled model is on the stack. Its parts may run as they are on a rank that has
    compiled them too often."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if not getattr(compiler, "FRAME_COUNTER", 0):  # this process has compiled nothing
        return False
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper":
            return True
        frame = frame.f_back
    return False


# ---- names of modules ----------------------------------------------------------------------------


def _known(module: nn.Module) -> str | None:
    known = _names.get(id(module))
    return known[1] if known is not None and known[0]() is module else None


def _found(modules: list[nn.Module]) -> str:
    """Find the name of modules of which each runs inside of the next. One that nothing holds, as if
    it were made for a single call, has the name of the one around it."""
    innermost, outermost = modules[0], modules[-1]
    if _known(innermost) is None:
        around = next((x for x in modules if _known(x) is not None), None)
        if around is None or id(innermost) in _within(around):
            _learn(innermost, outermost)
    return next(filter(None, map(_known, modules)), "")


def _learn(innermost: nn.Module, outermost: nn.Module) -> None:
    """Name the modules inside of the outermost one that runs."""
    within = _within(outermost)
    _, path = within.get(id(innermost), (innermost, ()))
    place = None if _is_numbered(path) else _place_of(outermost)
    for key, (module, path) in within.items():
        if place is not None or _is_numbered(path):
            whole = path if place is None or _is_numbered(path) else place + path
            # One name after the other, and none that is there: threads learn at the same time.
            _names.setdefault(key, (weakref.ref(module, partial(_forget, key)), _text(whole)))


def _forget(key: int, _: weakref.ref[nn.Module]) -> None:
    """Leave out a module that is gone, before another one gets its identity."""
    _names.pop(key, None)


def _within(outermost: nn.Module) -> dict[int, tuple[nn.Module, _Path]]:
    """Return a module and those that it holds, by identity, each with its first path from there."""
    found: dict[int, tuple[nn.Module, _Path]] = {}
    todo: list[tuple[nn.Module, _Path]] = [(outermost, ())]
    while todo:
        module, path = todo.pop()
        if id(module) not in found:
            found[id(module)] = module, path
            children = [(child, path + _step(key)) for key, child in _children(module)]
            todo += reversed(children)
    return found


def _place_of(module: nn.Module) -> _Path:
    """Return the path of a module from the list on that holds it, at any depth. Of several, the
    first by its text. Empty if no list does. All modules of the process are searched."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for holder in tracked_objects(nn.Module):
        for key, child in _children(holder):
            holders.setdefault(id(child), []).append((holder, key))
    return min(_places(module, (), holders, {id(module)}), default=())


def _places(
    module: nn.Module, path: _Path, holders: dict[int, list[tuple[nn.Module, str]]], seen: set[int]
) -> Iterator[_Path]:
    for holder, key in holders.get(id(module), []):
        below = _step(key) + path
        if key.isdigit():
            names = [name for _, name in holders.get(id(holder), []) if not name.isdigit()]
            yield min(map(_step, names), default=()) + below
        elif id(holder) not in seen:
            seen.add(id(holder))
            yield from _places(holder, below, holders, seen)


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = vars(module).get("_modules", {})  # TorchScript's has none there
    # A list: other threads add modules to others meanwhile.
    return ((key, child) for key, child in list(children.items()) if child is not None)


def _step(key: str) -> _Path:
    return () if key in _WRAPPED else (key,)


def _is_numbered(path: _Path) -> bool:
    return any(name.isdigit() for name in path)


def _text(path: _Path) -> str:
    """Write a path from its first list on: "layers.3.attention"."""
    first = next((i for i, name in enumerate(path) if name.isdigit()), 0)
    return ".".join(path[max(0, first - 1) :])
