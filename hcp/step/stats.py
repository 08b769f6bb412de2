"""What a step did, in numbers for loggers, and a callback that logs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hcp._validate import expect_size
from hcp.planning.ahead import PlanningTime

if TYPE_CHECKING:
    from hcp.planning.plan import Plan
    from hcp.step.dispatch import Step


class StepStats(NamedTuple):
    """The numbers of one step: of its plan, by the cost model, and of what this rank measured."""

    sequences: int
    tokens: int
    micro_batches: int
    efficiency: float
    """work / (ranks x makespan), 0 to 1: see ``Plan.efficiency``."""
    idle_share: float
    """The share of all ranks' time until the makespan that they spend waiting, 0 to 1."""
    bound_ratio: float
    """makespan / bound: 1 is optimal."""
    largest_degree: int
    mean_degree: float
    """The mean over tokens of their sequence's CP degree."""
    layer_bytes: int
    """Bytes that this rank receives in the forward of one attention layer, all micro-batches
    together: of the kind of layer that receives the most, 0 before layers have run."""
    plan_seconds: float
    """Planning, tables and dispatch. 0 if nobody measured it."""
    plan_waited: float
    """For how much of it the trainer waited."""

    @property
    def plan_hidden(self) -> float:
        """The share of the planning for which the trainer did not wait, 0 to 1."""
        return PlanningTime(self.plan_seconds, self.plan_waited).hidden

    def metrics(self) -> dict[str, float]:
        """Return the numbers as loggers have them, by names such as ``hcp/efficiency``."""
        return {
            f"hcp/{name}": float(value)
            for name, value in {**self._asdict(), "plan_hidden": self.plan_hidden}.items()
        }


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


def stats_of(plan: Plan, layer_bytes: int, planning: PlanningTime | None) -> StepStats:
    """Make the numbers that :meth:`hcp.Step.stats` returns. `layer_bytes`: of all micro-batches."""
    report = plan.report()
    degrees = [
        (group.degree, sum(plan.lengths[s] for s in group.sequences))
        for groups in plan.micro_batches
        for group in groups
    ]
    tokens = sum(plan.lengths)
    seconds, waited = planning or (0.0, 0.0)
    return StepStats(
        sequences=len(plan.lengths),
        tokens=tokens,
        micro_batches=len(plan.micro_batches),
        efficiency=plan.efficiency,
        idle_share=report.idle_share,
        bound_ratio=report.ratio,
        largest_degree=max((degree for degree, _ in degrees), default=0),
        mean_degree=sum(degree * held for degree, held in degrees) / tokens if tokens else 0.0,
        layer_bytes=layer_bytes,
        plan_seconds=seconds,
        plan_waited=waited,
    )


# ---- a callback for loggers ----------------------------------------------------------------------

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
