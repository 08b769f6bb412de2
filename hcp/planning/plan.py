"""Plans: which ranks compute which sequences."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple, cast

from hcp import _core
from hcp._validate import (
    IntegerArray,
    expect_choice,
    expect_items,
    expect_names,
    expect_size,
    expect_sizes,
    shallow,
)
from hcp._words import Degrees, Sync
from hcp.planning.cost import CostModel, TimeTable
from hcp.planning.limits import (
    CHOICES,
    DEGREES,
    INTEGERS,
    LIMITS,
    SIZES,
    SYNCS,
    Limits,
)
from hcp.planning.mask import Masks, MasksLike, masks_from, masks_of, packed, pairs_of, plain_masks
from hcp.planning.memory import MemoryModel
from hcp.planning.report import Report, report


class Group(NamedTuple):
    """A contiguous interval of ranks that computes one packed set of sequences."""

    first_rank: int
    degree: int
    sequences: tuple[int, ...]
    """Indices of the plan's lengths."""


class Plan:
    """An immutable plan. Equal input gives the same plan on every rank.

    It is made by :func:`plan` or :meth:`from_dict`. ``core`` is the C core's value.
    """

    def __init__(self, core: _core.Plan, masks: Masks | None = None) -> None:
        self.core = core
        self.masks: Masks = masks or {}
        """The masks of all sequences, by name; the first is that of layers that name none. Empty:
        each layer has its causal mask and window."""
        if self.masks:
            core.set_masks([packed(each) for each in self.masks.values()])
        self.planning_seconds: float | None = None
        """Seconds that :func:`plan` took; None for a plan that came from data."""
        self.kernels: tuple[str, ...] = ()
        """Those of the cost model that :func:`plan` was given; empty for a plan that came from
        data."""
        self.unit: float | None = None
        """The seconds of one unit of its times, if they are known. A plan's data keep them."""

    @property
    def ranks(self) -> int:
        """Ranks of the domain."""
        return self.core.ranks

    @property
    def max_tokens_per_rank(self) -> int:
        """Rows that one rank may hold in one micro-batch."""
        return self.core.max_tokens_per_rank

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(self.core.lengths)

    @cached_property
    def micro_batches(self) -> tuple[tuple[Group, ...], ...]:
        """Groups of each micro-batch, in the order in which every rank runs them."""
        sequences = tuple(self.core.sequences)
        groups = [
            Group(first_rank, degree, sequences[start : start + count])
            for first_rank, degree, start, count in _records(self.core.groups)
        ]
        return tuple(
            tuple(groups[start : start + count])
            for start, count in _records(self.core.micro_batches)
        )

    @property
    def micro_batch_count(self) -> int:
        """``len(plan.micro_batches)``, which are not made for it."""
        return len(self.core.micro_batches)

    def group_rows(self) -> list[list[int]]:
        """Return ``[first_rank, degree, start, count]`` of each group, micro-batch after
        micro-batch. Its sequences are ``core.sequences[start : start + count]``."""
        return _records(self.core.groups)

    def sequences_of(self, micro_batch: int) -> list[int]:
        """List the sequences of a micro-batch.

        Args:
            micro_batch: its place in the plan, from 0.

        Returns:
            Indices of ``lengths``, group after group.
        """
        first, count = _records(self.core.micro_batches[micro_batch : micro_batch + 1])[0]
        groups = _records(self.core.groups[first : first + count])
        start = groups[0][2] if groups else 0
        return self.core.sequences[start : start + sum(group[3] for group in groups)].tolist()

    @property
    def makespan(self) -> int:
        """The busiest rank's time, in the cost model's unit."""
        return self.core.makespan

    @property
    def bound(self) -> int:
        """No plan under the same limits and cost is faster than this."""
        return self.core.bound

    @property
    def work(self) -> int:
        """The rank-time that all sequences need together, each on one rank."""
        return self.core.work

    @property
    def efficiency(self) -> float:
        """work / (ranks * makespan): 1 if no rank ever waits or does extra work.

        Exchanges and launches are extra work, which every plan may need. makespan / bound tells how
        near a plan is to the best one."""
        return self.work / (self.ranks * self.makespan) if self.makespan else 1.0

    @cached_property
    def checksum(self) -> int:
        """A hash of the whole plan, masks included, 64 bits."""
        if not self.masks:
            return self.core.checksum
        digest = blake2b(self.core.checksum.to_bytes(8, "little"), digest_size=8)
        for name, masks in self.masks.items():
            digest.update(f"{name} {len(masks)} ".encode())
            digest.update(b"".join(mask.checksum.to_bytes(8, "little") for mask in masks))
        return int.from_bytes(digest.digest(), "little")

    def with_masks(self, masks: MasksLike) -> Plan:
        """Make a plan of the same groups with other masks. Its times stay those that it was planned
        by.

        Args:
            masks: as :func:`plan` takes them.

        Returns:
            The plan.
        """
        data = {name: entry for name, entry in self.to_dict().items() if name != "masks"}
        made = Plan.from_dict(data)._masked(masks)
        made.kernels, made.unit = self.kernels, self.unit
        return made

    def _masked(self, masks: MasksLike | None) -> Plan:
        if masks is None:
            return self
        made = Plan(self.core, masks_of(masks, self.lengths))
        made.planning_seconds, made.kernels = self.planning_seconds, self.kernels
        made.unit = self.unit
        return made

    @property
    def sync(self) -> str:
        """The value "step" or "micro_batch": ranks wait for each other after each of these."""
        return SYNCS[self.core.sync]

    @cached_property
    def cost(self) -> CostModel:
        """The cost model of the plan, as integers, with the seconds of a unit if they are known."""
        table = self.core.table
        rows = TimeTable(*(tuple(view) for view in table)) if table else None
        prices: dict[str, Any] = dict(zip(_core.PRICES, self.core.prices, strict=True))
        return CostModel(**prices, table=rows, unit=self.unit, kernels=self.kernels)

    @cached_property
    def memory(self) -> MemoryModel:
        """The memory model of the plan; all 0 if it was made without one."""
        return MemoryModel(*self.core.memory)

    @cached_property
    def pairs(self) -> tuple[int, ...] | None:
        """Pairs of a query and a key of each sequence, by which it was priced; None: those of the
        cost model's window."""
        pairs = self.core.pairs
        return None if pairs is None else tuple(pairs)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """The speed of each rank, relative to the fastest."""
        slowness = self.core.slowness
        if slowness is None:
            return (1.0,) * self.ranks
        return tuple(_core.FULL_SPEED / slow for slow in slowness)

    def group_times(self, group: Group) -> tuple[int, ...]:
        """Say when each sequence of a group ends, counted from the group's start, in one stage. It
        includes launch and the slowest rank's speed.

        Args:
            group: of this plan.

        Returns:
            The time of each, in order.
        """
        return tuple(_core.group_times(self.core, *group))

    def group_time(self, group: Group) -> int:
        """Give the time of each rank of a group, in one stage.

        Args:
            group: of this plan.

        Returns:
            The time.
        """
        return self.group_times(group)[-1]

    def report(self) -> Report:
        """Judge the plan: its times, its balance, and each rank's work."""
        return report(self)

    def sample_id_groups(self) -> list[list[list[int]]]:
        """Return the plan in the form of Megatron's schedulers: for each micro-batch, for each rank
        of the domain, the sequences that it computes. One of degree d is in the lists of d
        ranks."""
        batches = []
        for groups in self.micro_batches:
            ranks: list[list[int]] = [[] for _ in range(self.ranks)]
            for group in groups:
                for rank in range(group.first_rank, group.first_rank + group.degree):
                    ranks[rank] = list(group.sequences)
            batches.append(ranks)
        return batches

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, from which :meth:`from_dict` makes an equal plan."""
        cost: dict[str, Any] = dict(zip(_core.PRICES, self.core.prices, strict=True))
        if self.core.table is not None:
            cost["table"] = [list(view) for view in self.core.table]
        if self.unit is not None:
            cost["unit"] = self.unit
        return {
            **{name: getattr(self.core, name) for name in INTEGERS},
            "degrees": DEGREES[self.core.pow2],
            "sync": self.sync,
            "memory": asdict(self.memory),
            **{name: _listed(getattr(self.core, name)) for name in _core.LIMIT_LISTS},
            "cost": cost,
            "lengths": list(self.lengths),
            "micro_batches": self._listed_groups(),
            **({"pairs": list(self.pairs)} if self.pairs is not None else {}),
            **({"masks": plain_masks(self.masks)} if self.masks else {}),
        }

    def _listed_groups(self) -> list[dict[str, Any]]:
        sequences = self.core.sequences.tolist()
        groups = [
            {"first_rank": first, "degree": degree, "sequences": sequences[start : start + count]}
            for first, degree, start, count in _records(self.core.groups)
        ]
        batches = _records(self.core.micro_batches)
        return [{"groups": groups[start : start + count]} for start, count in batches]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Make a plan of given groups, and check it by the rules of all plans.

        Args:
            data: ``lengths``, ``ranks``, ``max_tokens_per_rank`` and ``micro_batches`` are
                required. Other entries are those of :func:`plan`.

        Returns:
            The plan.

        Raises:
            ValueError: a group that breaks a rule, or an entry that is missing or unknown; it is
                named.
        """
        with shallow("the plan"):
            return cls._of_data(data)

    @classmethod
    def _of_data(cls, data: dict[str, Any]) -> Plan:
        expect_data(data)
        places = [
            f"micro_batches[{m}].groups[{g}]"
            for m, batch in enumerate(data["micro_batches"])
            for g in range(len(batch["groups"]))
        ]
        groups = [group for batch in data["micro_batches"] for group in batch["groups"]]
        memory = data.get("memory")
        named = data if memory is None else {**data, "memory": MemoryModel(**memory)}
        cost = _cost_of(data.get("cost", {}))
        request = _request(data["lengths"], Limits.among(named), cost, data.get("pairs"))
        try:
            core = _core.create_plan_from(
                **request,
                micro_batches=[len(batch["groups"]) for batch in data["micro_batches"]],
                groups=[
                    number
                    for group in groups
                    for number in (group["first_rank"], group["degree"], len(group["sequences"]))
                ],
                sequences=[sequence for group in groups for sequence in group["sequences"]],
            )
        except ValueError as error:
            # The core counts groups through all micro-batches.
            said = re.sub(r"^groups\[(\d+)\](?! is )", lambda m: places[int(m[1])], str(error))
            raise ValueError(said) from None
        made = cls(core)
        made.unit = cost.unit
        return made._masked(masks_from(data.get("masks")))

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_dict, (self.to_dict(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.checksum)

    def __repr__(self) -> str:
        return (
            f"Plan(sequences={len(self.lengths)}, ranks={self.ranks}, "
            f"micro_batches={self.micro_batch_count}, efficiency={self.efficiency:.3f}, "
            f"makespan={self.makespan / self.bound if self.bound else 1.0:.3f} * bound)"
        )

    def _repr_html_(self) -> str:
        """The timeline, in a notebook: only there is a tool imported."""
        drawn: str = import_module("hcp.tools.drawing").timeline_svg({"plan": self})
        return drawn


def _listed(view: memoryview | None) -> list[int] | None:
    return None if view is None else list(view)


def _records(matrix: memoryview) -> list[list[int]]:
    return cast(list[list[int]], matrix.tolist())


REQUIRED = ("lengths", "ranks", "max_tokens_per_rank", "micro_batches")


def expect_data(data: Any) -> None:
    """Raise ValueError unless this is the plain data of a plan: complete, of the right types, and
    nothing else. The rules of plans are not checked here."""
    expect_names("", data, REQUIRED, (*LIMITS, "cost", "pairs", "masks"))
    for name in ("ranks", "max_tokens_per_rank"):
        expect_size(name, data[name])
    for name in SIZES:
        if data.get(name) is not None:
            expect_size(name, data[name], least=0)
    for name, choices in CHOICES.items():
        if data.get(name) is not None:
            expect_choice(name, data[name], choices)
    if data.get("slowness") is not None:
        expect_sizes("slowness", data["slowness"])
    if data.get("cost") is not None:
        _cost_of(data["cost"])
    expect_sizes("lengths", data["lengths"])
    if data.get("pairs") is not None:
        expect_sizes("pairs", data["pairs"], least=0)
    for name in ("min_degrees", "max_degrees"):
        if data.get(name) is not None:
            degrees, count = expect_sizes(name, data[name]), len(data["lengths"])
            if len(degrees) != count:
                raise ValueError(f"{name} has {len(degrees)} items, expected {count}")
    if data.get("memory") is not None:
        expect_names("memory", data["memory"], (), MemoryModel.__slots__)
        MemoryModel(**data["memory"])
    expect_items("micro_batches", data["micro_batches"], "objects")
    for m, batch in enumerate(data["micro_batches"]):
        expect_names(f"micro_batches[{m}]", batch, ("groups",))
        expect_items(f"micro_batches[{m}].groups", batch["groups"], "objects")
        for g, group in enumerate(batch["groups"]):
            place = f"micro_batches[{m}].groups[{g}]"
            expect_names(place, group, Group._fields)
            expect_size(f"{place}.first_rank", group["first_rank"], least=0)
            expect_size(f"{place}.degree", group["degree"])
            expect_sizes(f"{place}.sequences", group["sequences"], least=0)


def _cost_of(data: Any) -> CostModel:
    expect_names("cost", data, (), (*_core.PRICES, "table", "unit"))
    table = data.get("table")
    if table is None:
        return CostModel(**data)
    if not isinstance(table, (list, tuple)) or len(table) != len(TimeTable._fields):
        raise ValueError(f"cost.table is {table!r:.60}, expected {', '.join(TimeTable._fields)}")
    return CostModel(**{**data, "table": TimeTable(*table)})


def _request(
    lengths: Sequence[int] | IntegerArray,
    limits: Limits,
    cost: CostModel | None,
    pairs: Sequence[int] | IntegerArray | None,
) -> dict[str, Any]:
    """Return the core's arguments. A cost function stands for the times of its table."""
    lengths = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    pairs = cast(Any, pairs).tolist() if hasattr(pairs, "tolist") else pairs
    if cost is not None and not isinstance(cost, CostModel):
        raise ValueError(f"cost is {cost!r}, expected a CostModel: CostModel.preset(...), say")
    cost = cost or CostModel()
    return {
        "lengths": lengths,
        "limits": limits.numbers(),
        "lists": limits.lists(),
        "prices": cost.prices,
        "table": cost.table if cost.function is None else _asked(cost, lengths, limits),
        "pairs": pairs,
    }


def _asked(cost: CostModel, lengths: Any, limits: Limits) -> tuple[Any, ...]:
    """Return the rows and columns of a table, the function that gives its times when they are asked
    for, and the seconds of a unit."""
    least = expect_size("min_degree", limits.min_degree)
    last = expect_size("max_degree", limits.most)
    rows = sorted(set(expect_sizes("lengths", lengths)))
    return rows, _table_degrees(least, last, limits.degrees == "pow2"), cost.function, cost.unit


def _table_degrees(least: int, most: int, pow2: bool) -> list[int]:
    """Return the degrees of a function's table: all up to 64, then 16 per octave, and the last."""
    chosen = {*range(least, min(most, 64) + 1), most}
    for octave in range(6, most.bit_length()):
        chosen.update(range(1 << octave, 2 << octave, 1 << octave >> 4))
    allowed = (d for d in chosen if least <= d <= most)
    return sorted(d for d in allowed if not pow2 or d & (d - 1) == 0)


def plan(
    lengths: Sequence[int] | IntegerArray,
    *,
    ranks: int,
    max_tokens_per_rank: int,
    min_degree: int = 1,
    max_degree: int | None = None,
    degrees: Degrees = "any",
    alignment: int = 1,
    ranks_per_node: int | None = None,
    sync: Sync = "step",
    pipeline_stages: int = 1,
    virtual_stages: int = 1,
    micro_batch_group: int | None = None,
    memory: MemoryModel | None = None,
    min_degrees: Sequence[int] | None = None,
    max_degrees: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    cost: CostModel | None = None,
    effort: int = 1,
    pairs: Sequence[int] | IntegerArray | None = None,
    masks: MasksLike | None = None,
) -> Plan:
    """Assign sequences to ranks: packing, CP degree and placement of each.

    The function is pure: equal arguments give the same plan, bit for bit, on every rank. Ctrl-C
    ends it, and other threads run.

    Args:
        lengths: tokens of each sequence, each >= 1, as integers or a tensor. The plan of none has
            no micro-batches: :func:`hcp.dispatch` then yields nothing, on any rank.
        ranks: size of the domain.
        max_tokens_per_rank: rows that one rank may hold in one micro-batch, never exceeded.
        min_degree: the least allowed CP degree, any integer.
        max_degree: the greatest one (default: ``ranks``); equal ones give static CP.
        degrees: "any", or "pow2" for powers of two only, at multiples of themselves.
        alignment: a rank's rows are padded to a multiple of it.
        ranks_per_node: a group of up to so many ranks stays inside a node, a larger one takes whole
            nodes.
        sync: when ranks wait for each other: at the end of the step ("step": DDP) or after every
            micro-batch ("micro_batch": FSDP, experts).
        pipeline_stages: stages of a 1F1B pipeline, each on its own ``ranks``. All follow this plan,
            and ``cost`` is that of one stage.
        virtual_stages: more than 1 interleaves the pipeline; the number of micro-batches is then a
            multiple of ``micro_batch_group``.
        micro_batch_group: by default ``pipeline_stages``; up to 4096.
        memory: a limit of bytes, in addition to that of rows.
        min_degrees: of each sequence, in addition to ``min_degree``.
        max_degrees: of each sequence, in addition to ``max_degree``.
        speeds: the speed of each rank, in any unit; ``cost`` is that of the fastest.
        cost: prices, by default those of ``CostModel()``.
        effort: 1, or more for a longer search.
        pairs: pairs of a query and a key of each sequence, which ``cost`` prices in place of those
            of its window; by default those of the masks, on average over their names. A cost table
            or function prices lengths: it takes neither pairs nor those of masks.
        masks: a :class:`Mask` of each sequence, None for a causal one; or several by name, for
            layers of several kinds: the first is that of layers that name none. They travel with
            the plan.

    Returns:
        The plan.

    Raises:
        ValueError: an argument out of its range, or a sequence that no allowed degree can hold.
        OverflowError: prices that sum to more than 62 bits.
    """
    limits = Limits.among(locals())
    begun = time.perf_counter()
    request = _request(lengths, limits, cost, pairs)
    named = None if masks is None else masks_of(masks, expect_sizes("lengths", request["lengths"]))
    if pairs is None and named is not None and request["table"] is None:
        request["pairs"] = pairs_of(named)
    made = Plan(_core.create_plan(**request, effort=effort))._masked(named)
    made.planning_seconds = time.perf_counter() - begun
    if cost is not None:
        made.kernels, made.unit = cost.kernels, cost.unit
    return made


def lower_bound(
    lengths: Sequence[int] | IntegerArray,
    *,
    ranks: int,
    max_tokens_per_rank: int,
    cost: CostModel | None = None,
    pairs: Sequence[int] | IntegerArray | None = None,
    effort: int = 1,
    **limits: Any,
) -> int:
    """Return a time that no plan for these arguments beats.

    Args:
        lengths: as in :func:`plan`.
        ranks: as in :func:`plan`.
        max_tokens_per_rank: as in :func:`plan`.
        cost: as in :func:`plan`.
        pairs: as in :func:`plan`.
        effort: 1 is the bound of plans. Its time grows with the distinct lengths, and with the
            degrees that the longest of them may have: 0.2 to 0.5 ms for 512 sequences on 64 ranks,
            5 to 40 ms for 131,072 on 16,384. Under ``sync="micro_batch"``, 2 and more prove a
            sharper one, in seconds.
        **limits: the other limits of :func:`plan`.

    Returns:
        The time, in the cost model's unit.

    Raises:
        ValueError: as :func:`plan`, and for an unknown limit.
    """
    expect_names("", limits, (), LIMITS)
    asked = Limits(ranks=ranks, max_tokens_per_rank=max_tokens_per_rank, **limits)
    request = _request(lengths, asked, cost, pairs)
    return _core.plan_bound(**request, effort=effort)[0]
