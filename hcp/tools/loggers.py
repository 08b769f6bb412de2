"""Means of what steps did, and a callback that writes them to loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hcp._validate import expect_size
from hcp.step.stats import StepStats

if TYPE_CHECKING:
    from hcp.step.dispatch import Step


class MeanMetrics:
    """The means of the metrics of steps, computed when somebody takes them.

    Until then it keeps the plans of at most ``MOST`` steps, however many there are: not every
    trainer logs."""

    MOST = 16

    def __init__(self) -> None:
        self.clear()

    def add(self, step: Step | StepStats) -> None:
        """Add a step whose layers have run, or its numbers."""
        if isinstance(step, StepStats):
            self._count(step)
            return
        self._waiting.append(step.later_stats())
        if len(self._waiting) == self.MOST:
            self._count_waiting()

    def clear(self) -> None:
        self._steps = 0
        self._sums: dict[str, float] = {}
        self._waiting: list[Callable[[], StepStats]] = []

    def take(self) -> dict[str, float]:
        """Return the means over the steps since the last call, nothing if there were none."""
        self._count_waiting()
        means = {name: value / self._steps for name, value in self._sums.items()}
        self.clear()
        return means

    def _count_waiting(self) -> None:
        for later in self._waiting:
            self._count(later())
        self._waiting.clear()

    def _count(self, stats: StepStats) -> None:
        self._steps += 1
        for name, value in stats.metrics().items():
            self._sums[name] = self._sums.get(name, 0.0) + value


Write = Callable[[Mapping[str, float], int], object]
"""Write metrics, by their names, of the training step of this number."""


def log_to(*writers: Any, every: int = 1) -> StepLogger:
    """Return a callback that writes what steps did: ``log(step, iteration)`` after each of them.

    Nothing is communicated.

    Args:
        *writers: each has ``add_scalar(name, value, step)``, as TensorBoard's does, or
            ``log(metrics, step=)``, as a run of W&B and an Accelerator do, or is a function of
            (metrics, step). Give them on the rank that logs: others pass none.
        every: means over so many steps are written.

    Returns:
        The callback.

    Raises:
        ValueError: another writer.
    """
    return StepLogger([_write_of(writer) for writer in writers], every)


class StepLogger:
    """What :func:`log_to` returns."""

    def __init__(self, writers: Sequence[Write], every: int) -> None:
        expect_size("every", every)
        self._writers, self._every = writers, every
        self._means, self._steps = MeanMetrics(), 0

    def __call__(self, step: Step | StepStats, iteration: int) -> None:
        """Take the numbers of a step whose layers have run, and write if it is time to.

        ``iteration``: the number of the training step, as the writers have it."""
        if not self._writers:
            return
        self._means.add(step)
        self._steps += 1
        if self._steps % self._every:
            return
        metrics = self._means.take()
        for write in self._writers:
            write(metrics, iteration)


def _write_of(writer: Any) -> Write:
    if hasattr(writer, "add_scalar"):
        return lambda metrics, step: [
            writer.add_scalar(name, value, step) for name, value in metrics.items()
        ]
    if hasattr(writer, "log"):
        return lambda metrics, step: writer.log(dict(metrics), step=step)
    if callable(writer):
        return lambda metrics, step: writer(dict(metrics), step)
    raise ValueError(
        f"the writer is a {type(writer).__name__}, expected add_scalar(name, value, step), "
        "log(metrics, step=) or a function of (metrics, step): a SummaryWriter, a run of W&B"
    )


class LogsMeans:
    """Mixed into a Trainer of Transformers: it logs the metrics of the steps that train it."""

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        self._means = MeanMetrics()
        super().__init__(*positional, **keywords)

    def train(self, *positional: Any, **keywords: Any) -> Any:
        self._means.clear()  # of a training before, which nothing logged
        return super().train(*positional, **keywords)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *others: Any, **keywords: Any) -> None:
        """Log, with the loss, the metrics of `StepStats`: means over the steps that have
        trained since the last log, on this rank."""
        if "loss" in logs:
            logs |= self._means.take()
        super().log(logs, *others, **keywords)  # type: ignore[misc]
