"""A plan's timeline by its cost model, also as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hcp._core import FULL_SPEED

if TYPE_CHECKING:
    from hcp.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Box:
    """A group in time. Times are in the cost model's unit, from the start of the step."""

    micro_batch: int
    first_rank: int
    degree: int
    start: int
    end: int
    sequences: tuple[int, ...]
    """Indices of the plan's lengths, in the order in which they run."""
    ends: tuple[int, ...]
    """The end of each sequence. The first starts after the group's launch."""


def timeline(plan: Plan) -> list[Box]:
    """Return the time span of every group of a plan.

    A group starts when all of its ranks are free or, under ``sync="micro_batch"``, when all ranks
    of the domain are free. Under ``sync="step"`` a rank takes ``launch``, or ``host`` if that is
    more, for each micro-batch in which it is in no group; there is no box for it. The last end is
    ``plan.makespan``, or such times follow. For a pipeline, this is the timeline of one stage that
    never waits for its neighbours."""
    free, idle = [0] * plan.ranks, _launches(plan)
    boxes = []
    for m, groups in enumerate(plan.micro_batches):
        outside = set(range(plan.ranks))
        if plan.sync == "micro_batch":
            free = [max(free)] * plan.ranks
        for group in groups:
            ranks = slice(group.first_rank, group.first_rank + group.degree)
            start = max(free[ranks])
            ends = tuple(start + time for time in plan.group_times(group))
            free[ranks] = [ends[-1]] * group.degree
            boxes.append(
                Box(m, group.first_rank, group.degree, start, ends[-1], group.sequences, ends)
            )
            outside -= set(range(*ranks.indices(plan.ranks)))
        for rank in outside:
            free[rank] += idle[rank]
    return boxes


def _launches(plan: Plan) -> list[int]:
    """Return what each rank takes for a micro-batch in which it has no rows."""
    if plan.sync == "micro_batch" or plan.core.pipeline_stages > 1:
        return [0] * plan.ranks
    slowness = plan.core.slowness or [FULL_SPEED] * plan.ranks
    return [-(-plan.cost.launched(0) * slow // FULL_SPEED) for slow in slowness]


def idle_shares(plan: Plan, boxes: Iterable[Box]) -> list[float]:
    """Return the share of the makespan that each rank spends waiting. `boxes`: of `timeline`."""
    busy = [0] * plan.ranks
    for box in boxes:
        for rank in range(box.first_rank, box.first_rank + box.degree):
            busy[rank] += box.end - box.start
    return [1 - time / plan.makespan if plan.makespan else 0.0 for time in busy]


def spans(plan: Plan, box: Box) -> Iterator[tuple[int, int, int]]:
    """Yield each sequence of a group with its start and its end."""
    start = box.start + plan.cost.launch
    for s, end in zip(box.sequences, box.ends, strict=True):
        yield s, start, end
        start = end


def chrome_trace(plan: Plan, unit: float | None = None) -> dict[str, Any]:
    """Return the timeline in Chrome's trace format, for Perfetto or chrome://tracing: a track
    per rank, and groups that contain their sequences.

    ``unit``: seconds of one unit of the cost model. The trace then has the microseconds of a
    measured one, such as torch.profiler's. None: the makespan is shown as one second.
    """
    scale = 1e6 * unit if unit else 1e6 / max(1, plan.makespan)
    staged = ", one stage" if plan.core.pipeline_stages > 1 else ""
    names = [_name("process_name", 0, f"hcp plan{staged}: times by the cost model, not measured")]
    names += [_name("thread_name", rank, f"rank {rank}") for rank in range(plan.ranks)]
    slices = [
        {
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "ts": start * scale,
            "dur": (end - start) * scale,
            **what,
        }
        for box in timeline(plan)
        for start, end, what in _slices(plan, box)
        for rank in range(box.first_rank, box.first_rank + box.degree)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *slices]}


def _name(kind: str, rank: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": rank, "name": kind, "args": {"name": text}}


def _slices(plan: Plan, box: Box) -> Iterator[tuple[int, int, dict[str, Any]]]:
    tokens = sum(plan.lengths[s] for s in box.sequences)
    yield (
        box.start,
        box.end,
        {
            "cat": "group",
            "name": f"micro-batch {box.micro_batch}: cp{box.degree}",
            "args": {"sequences": list(box.sequences), "tokens": tokens},
        },
    )
    for s, start, end in spans(plan, box):
        yield (
            start,
            end,
            {
                "cat": "sequence",
                "name": f"sequence {s}",
                "args": {"tokens": plan.lengths[s], "degree": box.degree},
            },
        )
