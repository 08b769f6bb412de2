"""How every trainer's steps are made: lengths gathered, planned, and rows dispatched, in one place.

planner = StepPlanner.of(config, groups.size("dp_cp"), waits=lambda: waits_in_layers(model))
step = planner.step(samples, groups)             # this rank's samples of one global batch
for step in planner.steps(shares, groups): ...   # each is made while the one before it trains
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, TypeVar

from hcp._ranges import ranged
from hcp._words import Sync
from hcp.groups.process_groups import ProcessGroups
from hcp.planning.ahead import PlanningTime
from hcp.planning.cost import CostModel
from hcp.planning.mask import MasksFor
from hcp.planning.plan import Plan
from hcp.step.ahead import steps_of
from hcp.step.config import Config
from hcp.step.dispatch import (
    Groups,
    Step,
    StepTransport,
    dispatch,
    gather_lengths,
)
from hcp.step.fields import Given, Rules, Sample
from hcp.step.pace import Pace

Share = TypeVar("Share")
Fit = Callable[
    [Sequence[int], Sequence[int], Sequence[Sample], int],
    tuple[Sequence[int], Sequence[int], Sequence[Sample], int],
]
"""Takes lengths, sources, a rank's samples and the rank; gives what is left of the first three, and
how many samples were too long."""


class StepPlanner:
    """Makes the steps of a trainer.

    A step is made in three parts, and every rank of the domain calls each of them: ``gather`` tells
    all ranks the lengths of the global batch, ``plan`` decides who computes what, and ``dispatch``
    moves the rows. ``step_of`` is all three. An error of one rank, such as that of a sample which
    it could not load, is raised on all of them.
    """

    def __init__(
        self,
        plan: Callable[[Sequence[int]], Plan],
        options: Callable[[], Mapping[str, Any]],
        *,
        plan_ahead: int = 0,
        pace: Pace | None = None,
        fit: Fit | None = None,
    ) -> None:
        """``plan``: makes the plan of a global batch from its lengths in tokens, the same on every
        rank. ``options``: gives the options of :func:`hcp.dispatch`. It is asked once, when a rank
        makes its first step: where plans are only made, the library of attention may be absent.
        ``plan_ahead``: how many steps ``steps`` makes while the one before them trains. ``pace``:
        compares the time from step to step with what plans say. ``fit``: leaves out or cuts
        samples that are too long."""
        self.plan, self._options = plan, options
        self._pace, self._fit = pace, fit
        self.plan_ahead = plan_ahead

    @classmethod
    def of(
        cls,
        config: Config,
        ranks: int,
        *,
        cost: CostModel | None = None,
        waits: Callable[[], bool] | None = None,
        masks: MasksFor | None = None,
        fields: Rules | None = None,
        window_sizes: Sequence[tuple[int, int]] = (),
        compares: bool = True,
        fit: Fit | None = None,
        **limits: Any,
    ) -> StepPlanner:
        """Make the planner of a trainer with these options.

        Args:
            config: the trainer's options; limits, memory, degrees and comm types are among them.
            ranks: those of the domain, DP x CP.
            cost: prices of the model's sizes; None: see :func:`hcp.plan`.
            waits: whether ranks wait for each other inside the layers of the model. It is asked
                once, with the first batch, and decides where ``config.sync`` is "auto". None: they
                do not.
            masks: gives the masks of sequences of these lengths, in tokens.
            fields: the rules of fields that have not one row per token: :func:`hcp.dispatch`.
            window_sizes: sliding windows in addition to those of ``config``.
            fit: as for a planner that is made directly.
            compares: whether the time from step to step is compared with what plans say, and a
                warning tells once that it is another. False where a trainer does more than to train
                between two steps.
            **limits: what the job's layout needs, by :func:`hcp.plan`'s names: ``alignment``,
                ``pipeline_stages``, ``virtual_stages``, ``micro_batch_group``, ``memory``. A
                ``sync`` that is not None takes the place of ``config.sync`` and of ``waits``.

        Raises:
            ValueError: from ``plan``, for lengths that the options do not allow.
            HcpError: from the first step, if the attention backend's library is not installed.
        """
        sync = _sync_of(config, limits.pop("sync", None), waits)

        def plan(lengths: Sequence[int]) -> Plan:
            given = {"sync": sync(), "masks": masks(lengths) if masks else None}
            return config.plan(lengths, ranks, cost, **given, **limits)

        def options() -> Mapping[str, Any]:
            chosen = config.dispatch_options()
            windows = (*chosen["window_sizes"], *window_sizes)
            return {**chosen, "window_sizes": windows, "fields": fields}

        return cls(
            plan,
            options,
            plan_ahead=config.plan_ahead,
            pace=Pace(None if cost is None else cost.unit) if compares else None,
            fit=fit,
        )

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """The options of :func:`hcp.dispatch`."""
        return self._options()

    # ---- the parts of a step ----

    def gather(
        self, samples: Iterable[Given], groups: Groups
    ) -> tuple[list[int], list[int], list[Sample]]:
        """Gather lengths, sources and this rank's samples, as :func:`hcp.gather_lengths` does.

        ``groups``: process groups, or the transport of a step that is made on another thread.
        """
        return gather_lengths(samples, groups, fields=self.options.get("fields"))

    def dispatch(
        self,
        plan: Plan,
        samples: Sequence[Given],
        sources: Sequence[int],
        groups: ProcessGroups,
        **others: Any,
    ) -> Step:
        """Move the rows to where a plan computes them: :func:`hcp.dispatch` with the trainer's
        options. ``others`` take the place of those of the same name."""
        return dispatch(plan, samples, sources, groups, **{**self.options, **others})

    # ---- whole steps ----

    def step(self, samples: Iterable[Given], groups: ProcessGroups) -> Step:
        """Make the step of this rank's samples of a global batch, on the thread whose layers run.

        ``samples`` may be a generator, which loads them. The step says how long it took: the
        trainer waited for all of it."""
        begun = time.perf_counter()
        step = self._step_here(samples, groups)
        step.to_device()
        took = time.perf_counter() - begun
        step.planning = PlanningTime(took, took)
        self._hand_out(step, groups)
        return step

    def _hand_out(self, step: Step, groups: ProcessGroups) -> None:
        if self._pace is not None:
            self._pace.hand_out(step.plan, groups.transport.rank)

    def step_of(
        self, samples: Iterable[Given], groups: ProcessGroups, step_transport: StepTransport
    ) -> Step:
        """Make the step of this rank's samples of a global batch, on any thread. Call its
        ``to_device`` before its use."""
        return self._planned(*self.gather(samples, step_transport), groups, step_transport)

    def steps(
        self,
        shares: Iterable[Share],
        groups: ProcessGroups,
        make: Callable[[Share, StepTransport], Step | None] | None = None,
        *,
        until_empty: bool = False,
    ) -> Generator[Step]:
        """Yield a step for each of this rank's shares of global batches, made ahead.

        Every rank of the domain iterates, and of the job when it takes the first step.

        Args:
            shares: of each batch the samples of this rank, as a :class:`hcp.step.ahead.ReadItems`,
                which is read on the caller's thread; or anything that ``make`` takes.
            groups: this rank's process groups.
            make: makes the step of a share in place of ``step_of``, as for
                :func:`hcp.planned_steps`.
            until_empty: end with the first batch of which no rank has samples.
        """
        own = self.step_of_some if until_empty else self.step_of
        make = make or (lambda share, step_transport: own(share, groups, step_transport))  # type: ignore[arg-type]
        with contextlib.closing(steps_of(shares, make, groups, self.plan_ahead)) as steps:
            if self._pace is not None:
                self._pace.pause()  # what lies between two epochs is none of a step's time
            for step in steps:
                self._hand_out(step, groups)
                yield step

    def step_of_some(
        self, samples: Iterable[Given], groups: ProcessGroups, step_transport: StepTransport
    ) -> Step | None:
        """Make a step as ``step_of`` does. None: no rank has samples."""
        lengths, sources, own = self.gather(samples, step_transport)
        return self._planned(lengths, sources, own, groups, step_transport) if lengths else None

    @ranged("hcp: plan")
    def _step_here(self, samples: Iterable[Given], groups: ProcessGroups) -> Step:
        return self.step_of(samples, groups, StepTransport.of(groups))

    def _planned(
        self,
        lengths: Sequence[int],
        sources: Sequence[int],
        samples: Sequence[Sample],
        groups: ProcessGroups,
        step_transport: StepTransport,
    ) -> Step:
        count = 0
        if self._fit is not None:
            rank = step_transport.transport.rank
            lengths, sources, samples, count = self._fit(lengths, sources, samples, rank)
        plan = self.plan(lengths)
        step = self.dispatch(plan, samples, sources, groups, step_transport=step_transport)
        step.too_long = count
        return step


def _sync_of(
    config: Config, given: Sync | None, waits: Callable[[], bool] | None
) -> Callable[[], Sync]:
    """When ranks wait for each other, found out once: with the first batch, when the model is
    sharded already."""

    @cache
    def sync() -> Sync:
        return given or config.sync_where(waiting=waits is not None and waits())

    return sync
