"""Plan the next global batch while the current one trains."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from hcp._this_process import expect_here

Batch = TypeVar("Batch")
Planned = TypeVar("Planned")

_PATIENCE = 5.0
"""Seconds for which the interpreter's end waits for calls that are under way."""
_WHAT = "a thread that plans ahead"


class PlanningTime(NamedTuple):
    """How long the planning of one batch took, and for how much of it the trainer waited."""

    seconds: float
    waited: float

    @property
    def hidden(self) -> float:
        """The share of the seconds for which the trainer did not wait, 0 to 1."""
        return max(0.0, 1.0 - self.waited / self.seconds) if self.seconds > 0 else 0.0


# ---- a thread of its own -------------------------------------------------------------------------


class WorkerCall(Generic[Planned]):
    """A call that a `Worker` runs."""

    def __init__(self, function: Callable[[], Planned]) -> None:
        self._function: Callable[[], Planned] | None = function
        self._done, self._process = threading.Event(), os.getpid()
        self._result: Any = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        """How long it ran."""

    def run(self) -> None:
        """Run it, on the worker's thread, unless nobody wants it any more."""
        function, self._function = self._function, None
        begun = time.perf_counter()
        try:
            if function is not None:
                self._result = function()
        except BaseException as error:  # raised where the result is asked for
            self._error = error
        self.seconds = time.perf_counter() - begun
        self._done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has run. False if it has not within ``timeout`` seconds."""
        return self._done.wait(timeout)

    def result(self) -> Planned:
        """Wait for the result, and return it; raise what the call has raised."""
        expect_here(self._process, _WHAT)  # no thread of a forked process ends it
        self._done.wait()
        result, error, self._result, self._error = self._result, self._error, None, None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def cancel(self) -> None:
        """Do not run it, if it has not begun."""
        self._function = None


class Worker:
    """One thread that runs calls in the order in which they are given.

    It is a daemon: a call that waits for another process keeps no program from ending. At its end a
    program waits a few seconds for calls under way, so that their threads are not ended inside of
    other libraries.
    """

    def __init__(self, name: str = "hcp-plan-ahead") -> None:
        calls: queue.SimpleQueue[WorkerCall[Any] | None] = queue.SimpleQueue()
        self._calls, self._process = calls, os.getpid()
        self.end = weakref.finalize(self, calls.put, None)
        """End the thread after the calls that it was given."""
        threading.Thread(target=_run, args=(calls,), name=name, daemon=True).start()

    def submit(self, function: Callable[[], Planned]) -> WorkerCall[Planned]:
        expect_here(self._process, _WHAT)
        call = WorkerCall(function)
        _under_way.add(1)
        self._calls.put(call)
        return call

    def settle(self, timeout: float = _PATIENCE) -> bool:
        """Wait for the calls that it was given. False if some run longer than ``timeout``
        seconds."""
        return not self.end.alive or self.submit(_nothing).wait(timeout)


def _run(calls: queue.SimpleQueue[WorkerCall[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # frees here what nobody else holds
        _under_way.add(-1)


def _nothing() -> None:
    pass


class _UnderWay:
    """Counts the calls of all workers that were given, and are not over."""

    def __init__(self) -> None:
        self._count, self._changed = 0, threading.Condition()

    def add(self, count: int) -> None:
        with self._changed:
            self._count += count
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait for all calls, at most for the time of patience."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, _PATIENCE)


_under_way = _UnderWay()
atexit.register(_under_way.settle)
# The threads of a forked process are its parent's.
os.register_at_fork(after_in_child=_under_way.__init__)  # type: ignore[misc]


# ---- batches that are planned ahead --------------------------------------------------------------


class PlanAhead(Generic[Batch, Planned]):
    """Iterates over (batch, planned), planning up to ``depth`` batches ahead on a thread.

    ::

        def prepare(lengths):
            return hcp.plan(lengths, ranks=8, max_tokens_per_rank=16_384)

        with hcp.planning.ahead.PlanAhead(batches_of_lengths, prepare) as steps:
            for lengths, plan in steps:
                ...

    ``prepare(batch)`` runs on the thread. Planning does not slow the trainer, as the C core
    releases the GIL. ``prepare`` may also make layouts (``Layout(plan, micro_batch, rank)``).
    Collectives in it need a process group that no other thread uses. ``batches`` is read on the
    caller's thread, in order: the next ones when a batch was taken. An exception of ``prepare`` or
    ``batches`` is raised in place of its batch. After ``close`` there are no more batches.

    ``time`` says how long the planning of the batch taken last took (``time.seconds``), and for
    how long the caller waited for it (``time.waited``).
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        prepare: Callable[[Batch], Planned],
        *,
        depth: int = 1,
        worker: Worker | None = None,
    ) -> None:
        """Keep what will be planned. Planning begins when the first batch is asked for.

        Args:
            batches: what is planned; read on the caller's thread, in order.
            prepare: makes the plan of a batch, on the planning thread.
            depth: batches that are planned ahead of the one that was taken.
            worker: runs ``prepare``, and outlives these batches. All that it was given is run, in
                order, also after ``close``: each rank of a job then makes the same calls. None: one
                of its own.
        """
        if depth < 1:
            raise ValueError(f"depth is {depth}, expected >= 1")
        self._batches = iter(batches)
        self._prepare = prepare
        self._depth = depth
        self._worker = worker or Worker()
        self._owns_worker = worker is None
        self._waiting: list[tuple[Batch, WorkerCall[Planned]]] = []
        self._failed: BaseException | None = None
        """The error that ended the batches. It is raised after those that wait."""
        self._ended = False
        self.time = PlanningTime(0.0, 0.0)
        """The planning time of the batch that was taken last."""

    def __iter__(self) -> Iterator[tuple[Batch, Planned]]:
        return self

    def __next__(self) -> tuple[Batch, Planned]:
        self._fill()
        if not self._waiting:
            self.close()
            failed, self._failed = self._failed, None
            raise failed or StopIteration
        batch, call = self._waiting.pop(0)
        begun = time.perf_counter()
        planned = call.result()
        self.time = PlanningTime(call.seconds, time.perf_counter() - begun)
        self._fill()  # not before: what follows a batch that failed is not asked for
        return batch, planned

    def _fill(self) -> None:
        while not self._ended and len(self._waiting) < self._depth:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._ended = True
            except Exception as error:
                self._ended, self._failed = True, error
            else:
                call = self._worker.submit(partial(self._prepare, batch))
                self._waiting.append((batch, call))

    def close(self) -> None:
        """Drop the batches that were planned ahead. A thread of these batches alone ends."""
        self._ended = True
        if self._owns_worker:
            for _, call in self._waiting:
                call.cancel()
            self._worker.end()
        self._waiting.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
