"""Plan the next global batch while the current one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

Batch = TypeVar("Batch")
Planned = TypeVar("Planned")


class PlanAhead(Generic[Batch, Planned]):
    """Iterates over (batch, planned), planning up to ``depth`` batches ahead on a thread.

    ::

        def prepare(lengths):
            return hcp.plan(lengths, ranks=8, max_tokens_per_rank=16_384)

        with hcp.PlanAhead(batches_of_lengths, prepare) as steps:
            for lengths, plan in steps:
                ...

    ``prepare(batch)`` runs on the thread. Planning does not slow the trainer, as the C core
    releases the GIL. ``prepare`` may also make layouts (``hcp.Layout(plan, micro_batch, rank)``),
    but must call no collective: those belong to the main thread. ``batches`` is read on the
    caller's thread, in order. An exception of ``prepare`` or ``batches`` is raised in place of its
    batch. After ``close`` there are no more batches.
    """

    def __init__(
        self, batches: Iterable[Batch], prepare: Callable[[Batch], Planned], *, depth: int = 1
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}, expected >= 1")
        # Not above: imported before torch, its exit handler runs after Gloo's threads should have
        # been joined, and a program that leaves its process group open then aborts at its end.
        from concurrent.futures import ThreadPoolExecutor

        self._batches = iter(batches)
        self._prepare = prepare
        self._depth = depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hcp-plan-ahead")
        self._waiting: list[tuple[Batch, Future[Planned]]] = []
        self._failed: BaseException | None = None
        """The error that ended the batches. It is raised after those that wait."""
        self._ended = False

    def __iter__(self) -> Iterator[tuple[Batch, Planned]]:
        return self

    def __next__(self) -> tuple[Batch, Planned]:
        self._fill()
        if not self._waiting:
            self.close()
            failed, self._failed = self._failed, None
            raise failed or StopIteration
        batch, planned = self._waiting.pop(0)
        self._fill()
        return batch, planned.result()

    def _fill(self) -> None:
        while not self._ended and len(self._waiting) < self._depth:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._ended = True
            except Exception as error:
                self._ended, self._failed = True, error
            else:
                self._waiting.append((batch, self._thread.submit(self._prepare, batch)))

    def close(self) -> None:
        """End the thread. Batches that were planned ahead are dropped."""
        self._ended = True
        self._waiting.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
