"""Steps that are planned and dispatched while the one before them is computed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Generic, TypeVar

import torch

from hcp._ranges import ranged
from hcp.groups.process_groups import ProcessGroups
from hcp.planning.ahead import PlanAhead, PlanningTime
from hcp.step.config import Config
from hcp.step.dispatch import Step, StepTransport

Item = TypeVar("Item")
Share = TypeVar("Share")


class ReadItems(Generic[Item]):
    """The part of a batch that a rank has read, and the error that kept it from reading more.

    Iterates over the items, then raises the error: where ranks exchange what they have, so that
    all of them learn of it at the step that it belongs to.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        """Read all items now. An error of the iterable is kept, and raised when this is iterated.

        Args:
            items: the samples of this rank, or whatever is read.
        """
        self.items: list[Item] = []
        self._error: Exception | None = None
        try:
            self.items.extend(items)
        except Exception as error:
            self._error = error

    @property
    def is_last(self) -> bool:
        """Whether nothing was read, or reading failed."""
        return not self.items or self._error is not None

    def __iter__(self) -> Iterator[Item]:
        yield from self.items
        if self._error is not None:
            raise self._error


def planned_steps(
    shares: Iterable[Share],
    make: Callable[[Share, StepTransport], Step | None],
    groups: ProcessGroups,
    config: Config,
) -> Generator[Step]:
    """Yield the steps that ``make`` plans and dispatches for this rank's shares of global batches.

    Every rank of the domain iterates, and of the job when it takes the first step. What ``make``
    raises is raised at its own step, and no later step is made.

    Args:
        shares: this rank's shares, read on the caller's thread.
        make: ``make(share, step_transport)`` hands it to ``hcp.dispatch`` and uses its
            transport for all other exchanges. None: there are no more steps.
        groups: this rank's process groups.
        config: ``config.plan_ahead`` steps are made on a thread and a group of their own, while the
            trainer computes one before them. 0: a step is made when it is asked for.

    Returns:
        A generator of :class:`hcp.Step`.
    """
    yield from steps_of(shares, make, groups, config.plan_ahead)


def steps_of(
    shares: Iterable[Share],
    make: Callable[[Share, StepTransport], Step | None],
    groups: ProcessGroups,
    ahead: int,
) -> Generator[Step]:
    """Yield the steps of ``planned_steps``, so many made ahead."""
    made = (
        _made_ahead(shares, make, groups, ahead) if ahead else _made_in_turn(shares, make, groups)
    )
    with contextlib.closing(made):
        for step, seconds in made:
            step.to_device()
            step.planning = seconds
            yield step


def _made_in_turn(
    shares: Iterable[Share],
    make: Callable[[Share, StepTransport], Step | None],
    groups: ProcessGroups,
) -> Generator[tuple[Step, PlanningTime]]:
    make = ranged("hcp: plan")(make)
    for share in shares:
        begun = time.perf_counter()
        step = make(share, StepTransport.of(groups))
        if step is None:
            return
        seconds = time.perf_counter() - begun
        yield step, PlanningTime(seconds, seconds)


def _made_ahead(
    shares: Iterable[Share],
    make: Callable[[Share, StepTransport], Step | None],
    groups: ProcessGroups,
    depth: int,
) -> Generator[tuple[Step, PlanningTime]]:
    thread = groups.planning_thread()
    device = groups.transport.device
    ended = False

    def make_here(share: Share) -> Step | None:
        nonlocal ended
        if ended:  # on all ranks: they share what ends the steps
            return None
        ended = True
        step = make(share, StepTransport.of(thread))
        ended = step is None
        if step is not None and device.type == "cuda":
            with torch.cuda.device(device):
                step.pin()
        return step

    with PlanAhead(shares, make_here, depth=depth, worker=thread.worker) as steps:
        take = ranged("hcp: plan")(functools.partial(next, steps, None))  # waits for the plan
        while (taken := take()) is not None:
            _, step = taken
            if step is None:
                return
            yield step, steps.time
