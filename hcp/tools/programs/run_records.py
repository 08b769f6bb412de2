"""The records of training runs that a program compares: steps, evaluations and their means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hcp.planning.ahead import PlanningTime

NAMES = {"static_cp": "static CP", "dynamic_cp": "dynamic CP"}
"""The schedulers as tables name them."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step."""

    loss: float
    """Mean over the batch's loss tokens, before the update."""
    grad_norm: float
    sequences: int
    tokens: int
    loss_tokens: int
    micro_batches: int
    efficiency: float
    """work / (ranks x makespan) of the plan."""
    seconds: float
    """From loading the batch to the updated weights."""
    plan_seconds: float
    """Seconds of planning and dispatching the batch, on this rank."""
    plan_waited: float
    """For how much of `plan_seconds` the step waited."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Evaluation:
    """One evaluation, and the layout of its ranks."""

    cp: int
    dp: int
    loss: float
    documents: int
    tokens: int


Step = TypeVar("Step", bound=StepRecord)


@dataclass
class RunRecord(Generic[Step]):
    """A training run with one scheduler."""

    scheduler: str
    steps: list[Step] = field(default_factory=list)

    @property
    def timed_steps(self) -> list[Step]:
        """All steps but the first, which is slower than later ones. A single step is kept."""
        return self.steps[1:] or self.steps

    @property
    def tokens_per_second(self) -> float:
        timed = self.timed_steps
        return sum(step.tokens for step in timed) / sum(step.seconds for step in timed)

    @property
    def planning(self) -> PlanningTime:
        """Mean seconds of planning and of waiting for it in a step."""
        timed = self.timed_steps
        sums = (sum(s.plan_seconds for s in timed), sum(s.plan_waited for s in timed))
        return PlanningTime(*(each / len(timed) for each in sums))

    @property
    def micro_batches(self) -> float:
        """Mean number of micro-batches in a step."""
        return sum(step.micro_batches for step in self.steps) / len(self.steps)


def planning_text(time: PlanningTime) -> str:
    """Return the time of planning as tables have it: milliseconds, and the hidden share."""
    return f"{1e3 * time.seconds:.1f} ms, {time.hidden:.0%}"


def loss_difference(runs: Sequence[RunRecord[Step]]) -> float:
    """The largest difference of losses between the first and the last run."""
    pairs = zip(runs[0].steps, runs[-1].steps, strict=True)
    return max(abs(a.loss - b.loss) for a, b in pairs)
