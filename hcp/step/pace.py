"""Whether steps take as long as their plans say."""

from __future__ import annotations

import logging
import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hcp.planning.plan import Plan

_log = logging.getLogger("hcp")

FIRST = 5
"""Steps that are not looked at: kernels are compiled, memory is allocated."""
FITTED = 20
"""Steps whose median says what a unit takes, where the prices have no seconds."""
IN_A_ROW = 20
"""Steps that all have to be off."""
OFF = 0.2
"""How far a step's time is from what its plan said, in shares of that, before it is off."""


class Pace:
    """Compares the time from step to step with what the plans say, and tells once of plans that are
    wrong.

    It reads the host's clock when a step is handed out, and never waits for a device: a host that
    runs ahead is held up as often as it gains. Steps that somebody takes without gradients, as an
    evaluation does, are left out.

    Where prices have seconds, a step is expected to take them. Where they have none, the median of
    the first steps says how long a unit takes, and steps are compared with each other.
    """

    def __init__(self, unit: float | None) -> None:
        """``unit``: the seconds of a unit of the prices; None: not known."""
        self._unit = unit
        self._told = False
        self._plan: Plan | None = None
        self._begun = 0.0
        self._steps = 0
        self._fitted: list[float] = []
        self._off: list[float] = []

    def hand_out(self, plan: Plan, rank: int) -> None:
        """A step of this plan is handed out now: the one before it has ended."""
        if self._told:
            return
        now, before = time.perf_counter(), self._plan
        self._plan = plan if torch.is_grad_enabled() else None
        if before is not None and self._plan is not None and before.makespan > 0:
            self._compare(before, now - self._begun, rank)
        self._begun = now

    def pause(self) -> None:
        """Forget the step that was handed out last: what follows it is none of its time."""
        self._plan = None

    def _compare(self, plan: Plan, seconds: float, rank: int) -> None:
        self._steps += 1
        if self._steps <= FIRST:
            return
        unit = self._unit
        if unit is None and len(self._fitted) < FITTED:
            self._fitted.append(seconds / plan.makespan)
            return
        said = plan.makespan * (statistics.median(self._fitted) if unit is None else unit)
        ratio = seconds / said
        self._off = [*self._off, ratio] if abs(ratio - 1) > OFF else []
        if len(self._off) == IN_A_ROW:
            self._told = True
            if rank == 0:
                self._tell(said, seconds, unit is None)

    def _tell(self, said: float, seconds: float, fitted: bool) -> None:
        _log.warning(
            "hcp: %d steps in a row took %.2f to %.2f times what their plans said%s (the last one "
            "%.3g s, expected %.3g s): plans are as good as their prices. Measure those of your "
            "model and machine by `python -m hcp calibrate --out cost.json`, and give "
            "cost=hcp.CostModel.load('cost.json')",
            IN_A_ROW,
            min(self._off),
            max(self._off),
            f", by the median of {FITTED} steps before" if fitted else "",
            seconds,
            said,
        )
