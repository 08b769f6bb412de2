"""The module that makes a call, found without being told, and its name, the same on all ranks.

The call's stack has the modules whose forward runs. A module's name is its path in the outermost of
these, from the first numbered list on: "layers.3.attention". If no list is between them, as where a
trainer loops over layers, it begins with the list that holds the outermost one. What else holds or
wraps a model, which may differ between ranks, is no part of a name. Nor is an order of calls: a
recomputation in the backward finds what the forward did.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from types import FrameType

from torch import nn

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


# ---- names ---------------------------------------------------------------------------------------


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
    for holder in (x for x in gc.get_objects() if issubclass(type(x), nn.Module)):
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
    return ((key, child) for key, child in children.items() if child is not None)


def _step(key: str) -> _Path:
    return () if key in _WRAPPED else (key,)


def _is_numbered(path: _Path) -> bool:
    return any(name.isdigit() for name in path)


def _text(path: _Path) -> str:
    """Write a path from its first list on: "layers.3.attention"."""
    first = next((i for i, name in enumerate(path) if name.isdigit()), 0)
    return ".".join(path[max(0, first - 1) :])
