"""Report the times and the balance of a plan, and the work of each rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hcp import _core
from hcp._html import table

if TYPE_CHECKING:
    from hcp.planning.plan import Plan


@dataclass(frozen=True)
class Report:
    """The times, balance and traffic of a plan. Times are in the cost model's unit."""

    makespan: int
    """The time at which the last rank ends, in a pipeline that of the last stage."""
    bound: int
    """No plan under the same limits and cost is faster."""
    ratio: float
    """makespan / bound: 1 is optimal."""
    idle_share: float
    """The share of all ranks' time until the makespan that they spend waiting."""
    pipeline_stages: int
    bubble: float
    """The share of the makespan that filling and emptying the pipeline adds to one stage's time."""
    micro_batches: int
    groups: int
    rank_tokens: tuple[int, ...]
    """Rows that each rank computes in the step, without padding."""
    rank_bytes: tuple[int, ...]
    """The most bytes that each rank needs in a micro-batch, by the plan's ``memory``: its
    ``buffer``, for a rank without rows."""
    peak_tokens: int
    """Rows of the fullest rank in one micro-batch, alignment included."""
    padding: int
    """Rows that ``alignment`` adds."""
    node_crossings: int
    """The sum over tokens of the nodes that their keys and values enter from outside."""
    node_bytes: int
    """``node_crossings`` in bytes of one layer's forward, by the plan's ``memory.gathered``."""
    planning_seconds: float | None
    """None for a plan that came from data."""

    def __str__(self) -> str:
        took = "" if self.planning_seconds is None else f", {self.planning_seconds * 1e3:.2f} ms"
        piped = f"{self.pipeline_stages} stages, bubble {self.bubble:.1%}; "
        peak_bytes = max(self.rank_bytes, default=0)
        return (
            f"makespan {self.makespan:,} = {self.ratio:.4f} x bound {self.bound:,}; "
            f"{piped if self.pipeline_stages > 1 else ''}"
            f"idle {self.idle_share:.1%}; {self.micro_batches} micro-batches, "
            f"{self.groups} groups; at most {self.peak_tokens:,} rows"
            f"{f' and {peak_bytes:,} bytes' if peak_bytes else ''} on a rank, "
            f"{self.padding:,} of padding; {self.node_crossings:,} tokens into other nodes{took}"
        )

    def _repr_html_(self) -> str:
        rows = [(name.replace("_", " "), _shown(value)) for name, value in asdict(self).items()]
        return table("report of a plan, in the cost model's unit", (), rows)


def _shown(value: Any) -> object:
    """A number, or the least and the most of several."""
    if isinstance(value, tuple):
        return f"{min(value, default=0):,} to {max(value, default=0):,}"
    return "unknown" if value is None else value


def report(plan: Plan) -> Report:
    """Make the report that :meth:`Plan.report` returns."""
    rows, needed, busy, ends, (peak, padding, crossings) = _core.measure_plan(plan.core)
    span = max(ends)  # if there were one stage
    whole = plan.ranks * plan.makespan
    return Report(
        makespan=plan.makespan,
        bound=plan.bound,
        ratio=plan.makespan / plan.bound if plan.bound else 1.0,
        idle_share=1 - sum(busy) / whole if whole else 0.0,
        pipeline_stages=max(1, plan.core.pipeline_stages),
        bubble=1 - span / plan.makespan if plan.makespan else 0.0,
        micro_batches=plan.micro_batch_count,
        groups=len(plan.core.groups),
        rank_tokens=tuple(rows),
        rank_bytes=tuple(needed),
        peak_tokens=peak,
        padding=padding,
        node_crossings=crossings,
        node_bytes=crossings * plan.memory.gathered,
        planning_seconds=plan.planning_seconds,
    )
