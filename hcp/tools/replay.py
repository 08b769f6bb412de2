"""Replay a plan on a machine: GPUs, their hosts, links of two classes, and memory.

A plan's own makespan adds prices up, in integers, so that all ranks decide alike. A replay has more
of a machine: each rank's host queues micro-batches ahead of its GPU, rows of the own node and of
others come over links of their own, and attention over a rank's own rows hides them. It decides
nothing, and may be in floats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Self

from hcp import _core
from hcp.planning.cost import CostModel
from hcp.planning.memory import MemoryModel
from hcp.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds that one rank takes for a model, forward and backward of all its layers."""

    pair: float = 0.0
    """One query-key pair of attention."""
    token: float = 0.0
    """One row through everything that is not attention."""
    launch: float = 0.0
    """The time of what the GPU does once in a micro-batch, whatever its rows."""
    shared: float = 0.0
    """One row of a sequence that several ranks compute, in addition: it is copied for readers, and
    its partial outputs and gradients are merged."""
    step: float = 0.0
    """One more rank in the group, for each sequence."""
    near: float = 0.0
    """One token's keys and values from another rank of the node."""
    far: float = 0.0
    """One token's keys and values from another node."""
    host: float = 0.0
    """The host's time to queue a micro-batch that exchanges nothing."""
    host_shared: float = 0.0
    """The host's time to queue a micro-batch of a group of several ranks."""
    overlap: int = 0
    """Whether ranks form a ring, in which attention hides all rows but those of the last stage: 1
    if they do. Without a ring (all_gather), attention over the rank's own rows hides the rows that
    arrive, and nothing hides the third of them that are gradients."""
    ranks_per_node: int = 0
    """Ranks of a node; 0: all ranks are in one."""
    once: bool = False
    """Whether a row enters a node once, shared out over its ranks' links, and goes on inside it.
    False: every rank of a group receives it from where it lies."""
    memory: MemoryModel = field(default_factory=MemoryModel)
    """Bytes of a micro-batch on a rank, and their limit."""

    def __post_init__(self) -> None:
        if self.once and self.ranks_per_node < 1:
            raise ValueError(
                f"machine.ranks_per_node is {self.ranks_per_node}, expected >= 1 with once"
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "float" and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"machine.{each.name} is {value!r}, expected seconds >= 0")

    @classmethod
    def of(cls, cost: CostModel, **more: Any) -> Self:
        """Make a machine of a cost model's prices; ``more``: fields that it has no price for.

        Raises ValueError for a model without a unit, and for one that prices what a machine has
        not: times of whole sequences, windows, tiles, or heads exchanged between nodes."""
        if cost.unit is None:
            raise ValueError(
                "the cost model has no unit, expected its seconds: a replay is in them"
            )
        for name in ("table", "function", "window", "tile", "all_to_all_far"):
            if getattr(cost, name):
                raise ValueError(
                    f"the cost model has a {name}, expected none: a replay needs prices"
                )
        times = {
            name: getattr(cost, name) * cost.unit
            for name in ("pair", "token", "launch", "step", "host")
        }
        links = {"near": cost.exchange, "far": max(cost.exchange, cost.exchange_far)}
        times |= {name: price * cost.unit for name, price in links.items()}
        times["shared"] = cost.all_to_all * cost.unit
        times["host_shared"] = times["host"]
        return cls(**{**times, "overlap": cost.overlap, **more})

    @property
    def seconds(self) -> tuple[float, ...]:
        """The core's times, in its order."""
        return tuple(getattr(self, name) for name in _core.MACHINE_TIMES)

    def prices(self) -> CostModel:
        """Return the machine as a cost model for :func:`hcp.plan`, which adds all times up. The
        hosts' are left out: here they queue ahead."""
        seconds: dict[str, Any] = {
            "pair": self.pair,
            "token": self.token,
            "launch": self.launch,
            "exchange": self.near,
            "exchange_far": max(
                self.near, self.far / self.ranks_per_node if self.once else self.far
            ),
            "all_to_all": self.shared,
            "step": self.step,
        }
        return CostModel.from_seconds(**seconds, overlap=self.overlap)


@dataclass(frozen=True)
class Replay:
    """The simulated step of a plan, in seconds."""

    seconds: float
    """The time at which the last rank ends."""
    busy: tuple[float, ...]
    """The time in which each rank's GPU has work or waits for rows of its own micro-batch."""
    exposed: tuple[float, ...]
    """The part of ``busy`` in which each rank only waits for rows that nothing hides."""
    host: tuple[float, ...]
    """The time in which each rank's GPU waits for its host."""

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they wait for other ranks or for their hosts."""
        whole = self.seconds * len(self.busy)
        return 1 - sum(self.busy) / whole if whole else 0.0


def replay(plan: Plan, machine: Machine) -> Replay:
    """Simulate one step of a plan.

    A group starts when the GPUs of all of its ranks are free and all of its hosts have begun to
    queue, and ends no sooner than the slowest host has queued it. Hosts queue one micro-batch after
    the other and never wait for GPUs. Under ``sync="micro_batch"`` a group also waits for the ends
    of all others of the micro-batch before.

    Raises ValueError for a micro-batch that needs more bytes on a rank than ``machine.memory``
    allows, before anything is replayed, and for a pipeline, which needs :attr:`Plan.makespan`.
    """
    busy, exposed, starved, ends = _core.replay_plan(
        plan.core,
        machine.seconds,
        machine.overlap,
        machine.ranks_per_node,
        machine.once,
        machine.memory.numbers(),
    )
    return Replay(max(ends), tuple(busy), tuple(exposed), tuple(starved))
