"""Attention's results, kept for a recomputation of its layer, which then does not attend again.

Activation checkpointing computes a layer twice. Over long sequences attention takes most of that
time, and its result little memory beside what the layer makes: output and log-sum-exp are kept, and
the second computation gets them back, without exchanging anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

Result = tuple[Tensor, Tensor]
"""Output (T, H, E) and log-sum-exp (T, H)."""


class Results(Protocol):
    """What a call of attention asks, where some are kept."""

    def next(self) -> Result | None:
        """Return the result of this call if it was kept; None: it has to attend."""

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Take what a call has computed."""


class _OfThread(threading.local):
    """A recomputation runs in the thread of a backward, beside others."""

    results: Results | None = None


current = _OfThread()


class KeptResults:
    """Results of the calls inside of ``keeping()``, which calls inside of ``recalling()`` get back
    in the same order.

    ``pack`` and ``unpack`` are those of ``torch.autograd.graph.saved_tensors_hooks``: they may put
    the results elsewhere. Calls that compilers or modes watch keep nothing, and attend again.
    """

    def __init__(
        self,
        pack: Callable[[Tensor], Any] = lambda kept: kept,
        unpack: Callable[[Any], Tensor] = lambda kept: kept,
    ) -> None:
        self._pack, self._unpack = pack, unpack
        self._kept: list[tuple[Any, Any]] = []

    def keeping(self) -> AbstractContextManager[None]:
        return _While(lambda: _Keeping(self._kept, self._pack))

    def recalling(self) -> AbstractContextManager[None]:
        """Return a context that may be entered several times: a graph may be walked twice."""
        return _While(lambda: _Recalling(self._kept, self._unpack))


class _Keeping:
    def __init__(self, kept: list[tuple[Any, Any]], pack: Callable[[Tensor], Any]) -> None:
        self._kept, self._pack = kept, pack

    def next(self) -> None:
        return None

    def add(self, out: Tensor, lse: Tensor) -> None:
        # The output itself will hold the graph, which holds these.
        self._kept.append((self._pack(out.detach()), self._pack(lse.detach())))


class _Recalling:
    def __init__(self, kept: list[tuple[Any, Any]], unpack: Callable[[Any], Tensor]) -> None:
        self._kept, self._unpack, self._next = kept, unpack, 0

    def next(self) -> Result | None:
        if not self._kept:
            return None
        if self._next == len(self._kept):
            raise RuntimeError(
                f"a recomputation calls attention again after call {self._next}, expected "
                f"{self._next} calls as in the forward: its layer must compute the same twice"
            )
        out, lse = self._kept[self._next]
        self._next += 1
        return self._unpack(out), self._unpack(lse)

    def add(self, out: Tensor, lse: Tensor) -> None:
        """A call that was not kept: nothing to do."""


class _While(AbstractContextManager[None]):
    """Sets the results of this thread, and puts back what was there."""

    def __init__(self, made: Callable[[], Results]) -> None:
        self._made = made
        self._before: list[Results | None] = []

    def __enter__(self) -> None:
        self._before.append(current.results)
        current.results = self._made()

    def __exit__(self, *failure: object) -> None:
        current.results = self._before.pop()
