"""Replay a plan on a machine: GPUs, their hosts, links of two classes, and memory.

A plan's own makespan adds prices up, in integers, so that all ranks decide alike. A replay has more
of a machine: each rank's host queues micro-batches ahead of its GPU, rows of the own node and of
others come over links of their own, and attention over a rank's own rows hides them. It decides
nothing, and may be in floats.
"""

# d ranks of a group, n tokens of a sequence

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Self

from hcp.planning.cost import CostModel
from hcp.planning.memory import MemoryModel
from hcp.planning.plan import Group, Plan
from hcp.planning.report import rows_held


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds that one rank takes for a model, forward and backward of all its layers."""

    pair: float = 0.0
    """One query-key pair of attention."""
    token: float = 0.0
    """One row through everything that is not attention."""
    launch: float = 0.0
    """What the GPU does once in a micro-batch, whatever its rows."""
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
    """0: rows arrive behind attention over the rank's own rows, and nothing hides the third of them
    that are gradients (all_gather). 1: all are hidden by attention but for a ring's last stage."""
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
            name: getattr(cost, name) * cost.unit for name in ("pair", "token", "launch", "step")
        }
        links = {"near": cost.exchange, "far": max(cost.exchange, cost.exchange_far)}
        times |= {name: price * cost.unit for name, price in links.items()}
        times["shared"] = cost.all_to_all * cost.unit
        return cls(**times, overlap=cost.overlap, **more)

    def prices(self) -> CostModel:
        """Return the machine as a cost model for :func:`hcp.plan`, which adds all times up."""
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
    if plan.core.pipeline_stages > 1:
        raise ValueError(
            f"the plan has {plan.core.pipeline_stages} pipeline stages, expected 1: its makespan is"
            " a simulation of the pipeline already"
        )
    _check_memory(plan, machine.memory)
    ranks = range(plan.ranks)
    free, queued = [0.0 for _ in ranks], [0.0 for _ in ranks]
    busy, exposed, starved = ([0.0 for _ in ranks] for _ in range(3))
    for groups in plan.micro_batches:
        if plan.sync == "micro_batch":
            free = [max(free)] * plan.ranks
        for group in groups:
            members = range(group.first_rank, group.first_rank + group.degree)
            slowest = min(plan.speeds[r] for r in members)
            computed, waited = _times(plan, machine, group)
            computed /= slowest
            begun = max(max(free[r], queued[r]) for r in members)
            by_host = machine.host if group.degree == 1 else machine.host_shared
            told = max(queued[r] for r in members) + by_host
            end = max(begun + computed + waited, told)
            for r in members:
                starved[r] += end - (begun + computed + waited)
                busy[r] += computed + waited
                exposed[r] += waited
                queued[r] += by_host
                free[r] = end
    return Replay(max(free, default=0.0), tuple(busy), tuple(exposed), tuple(starved))


def _check_memory(plan: Plan, memory: MemoryModel) -> None:
    if not memory.limit:
        return
    alignment = max(1, plan.core.alignment)
    for m, groups in enumerate(plan.micro_batches):
        for group in groups:
            lengths = [plan.lengths[s] for s in group.sequences]
            held = max(
                sum(rows_held(n, group.degree, j) for n in lengths) for j in range(group.degree)
            )
            padding = -held % alignment
            needed = memory.bytes(held + padding, sum(lengths) + padding, group.degree)
            if needed > memory.limit:
                raise ValueError(
                    f"micro-batch {m} needs {needed:,} bytes on a rank from rank "
                    f"{group.first_rank} on, expected <= memory.limit ({memory.limit:,}): plan with"
                    " this memory model, or with fewer max_tokens_per_rank"
                )


def _times(plan: Plan, machine: Machine, group: Group) -> tuple[float, float]:
    """Return a group's seconds on each of its GPUs: of work, and of waiting for rows that arrive
    after the attention over the rank's own rows has ended."""
    d = group.degree
    work, waited = machine.launch, 0.0
    for s in group.sequences:
        n = plan.lengths[s]
        pairs = plan.pairs[s] if plan.pairs else n * (n + 1) / 2
        attention = machine.pair * pairs / d
        work += attention + machine.token * n / d
        if d > 1:
            work += machine.shared * n / d + machine.step * (d - 1)
            waited += _exposed(machine, _arrival(machine, n, group), attention, d)
    return work, waited


def _exposed(machine: Machine, arrival: float, attention: float, d: int) -> float:
    """Return the part of a sequence's exchange that attention does not hide."""
    if machine.overlap:
        return max(0.0, arrival - (attention - attention / d))
    gradients = arrival / 3  # on their way back, after the last of the backward's attention
    return max(0.0, arrival - gradients - attention / d) + gradients


def _arrival(machine: Machine, tokens: int, group: Group) -> float:
    """Seconds until the slowest rank of a group has all keys and values of a sequence. Links of the
    node and of the network work at once."""
    d, node = group.degree, machine.ranks_per_node
    own = tokens / d
    if not node or group.first_rank // node == (group.first_rank + d - 1) // node:
        return machine.near * (tokens - own)
    last = group.first_rank + d
    inside = [
        min(last, (k + 1) * node) - max(group.first_rank, k * node)
        for k in range(group.first_rank // node, (last - 1) // node + 1)
    ]
    if machine.once:
        return max(max(machine.near * (d - 1), machine.far * (d - k) / k) * own for k in inside)
    return max(max(machine.near * (k - 1), machine.far * (d - k)) * own for k in inside)
