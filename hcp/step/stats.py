"""The statistics of a step, in numbers for loggers."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from hcp.planning.ahead import PlanningTime

if TYPE_CHECKING:
    from hcp.planning.plan import Plan


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
    too_long: int = 0
    """Samples that were dropped or cut, since all ranks together do not hold them."""

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


def stats_of(
    plan: Plan, layer_bytes: int, planning: PlanningTime | None, too_long: int
) -> StepStats:
    """Make the numbers that :meth:`hcp.Step.stats` returns. `layer_bytes`: of all micro-batches."""
    report = plan.report()
    ends = [0, *accumulate(plan.lengths[s] for s in plan.core.sequences.tolist())]
    degrees = [
        (degree, ends[start + count] - ends[start]) for _, degree, start, count in plan.group_rows()
    ]
    tokens = ends[-1]
    seconds, waited = planning or (0.0, 0.0)
    return StepStats(
        sequences=len(plan.lengths),
        tokens=tokens,
        micro_batches=plan.micro_batch_count,
        efficiency=plan.efficiency,
        idle_share=report.idle_share,
        bound_ratio=report.ratio,
        largest_degree=max((degree for degree, _ in degrees), default=0),
        mean_degree=sum(degree * held for degree, held in degrees) / tokens if tokens else 0.0,
        layer_bytes=layer_bytes,
        plan_seconds=seconds,
        plan_waited=waited,
        too_long=too_long,
    )
