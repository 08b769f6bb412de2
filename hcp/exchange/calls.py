"""The calls of a handler: their numbers and kinds, and the refusal of one that fails."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
from torch import Tensor

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
from hcp.exchange.callers import calling_module
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
