"""The limits of a plan: degrees, rows, bytes, and the speeds of its ranks as integers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Self

from hcp import _core
from hcp._validate import expect_choice, expect_items, is_finite
from hcp._words import Degrees, Sync
from hcp.planning.memory import MemoryModel

SYNCS: tuple[str, ...] = _core.SYNCS
DEGREES = ("any", "pow2")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a plan, by the names of :func:`hcp.plan`'s arguments.

    The request to the core, plain data and the command line take the names from here."""

    ranks: int
    """Size of the domain."""
    max_tokens_per_rank: int
    """Rows that one rank may hold in one micro-batch, never exceeded."""
    min_degree: int = 1
    """The fewest ranks of a group."""
    max_degree: int | None = None
    """The most ranks of a group; None: all."""
    degrees: Degrees = "any"
    """"any", or "pow2": powers of two, at multiples of themselves."""
    alignment: int = 1
    """A rank's rows are padded to a multiple of it."""
    ranks_per_node: int | None = None
    """A group of up to so many ranks stays inside a node. A larger one takes whole nodes."""
    sync: Sync = "step"
    """Ranks wait for each other at the end of the "step", or after every "micro_batch"."""
    pipeline_stages: int = 1
    """Stages of a 1F1B pipeline, each on its own ranks."""
    virtual_stages: int = 1
    """Chunks of each stage; more than 1 interleaves the pipeline."""
    micro_batch_group: int | None = None
    """Micro-batches of an interleaved pipeline come in multiples of it; None: its stages."""
    memory: MemoryModel | None = None
    """The limit of bytes, in addition to that of rows."""
    min_degrees: Sequence[int] | None = None
    """The fewest ranks of each sequence."""
    max_degrees: Sequence[int] | None = None
    """The most ranks of each sequence."""
    speeds: Sequence[float] | None = None
    """The speed of each rank, in any unit."""
    slowness: Sequence[int] | None = None
    """``speeds`` as the core's integers; ``speeds`` replaces it."""

    def __post_init__(self) -> None:
        if self.memory is not None and not isinstance(self.memory, MemoryModel):
            raise ValueError(f"memory is {self.memory!r}, expected a MemoryModel")
        expect_choice("degrees", self.degrees, DEGREES)
        expect_choice("sync", self.sync, SYNCS)

    @classmethod
    def among(cls, values: Mapping[str, Any]) -> Self:
        """Make limits of the named values that are limits. Others are left out."""
        return cls(**{name: values[name] for name in LIMITS if name in values})

    @property
    def most(self) -> int:
        """The largest degree."""
        return self.ranks if self.max_degree is None else self.max_degree

    def numbers(self) -> tuple[int, ...]:
        """The core's integers, in its order."""
        own = {name: getattr(self, name) for name in INTEGERS}
        own |= {name: 0 for name, default in INTEGERS.items() if default is own[name] is None}
        own |= {"max_degree": self.most, "pow2": DEGREES.index(self.degrees)}
        own["sync"] = SYNCS.index(self.sync)
        memory = asdict(self.memory or MemoryModel())
        own |= {f"memory.{name}": count for name, count in memory.items()}
        return tuple(own[name] for name in _core.LIMITS)

    def lists(self) -> tuple[Sequence[int] | None, ...]:
        """The core's lists, in its order."""
        own: dict[str, Any] = {name: getattr(self, name) for name in _core.LIMIT_LISTS}
        if self.speeds is not None:
            own["slowness"] = slowness_of(self.speeds)
            if len(own["slowness"]) != self.ranks:
                raise ValueError(
                    f"speeds has {len(own['slowness'])} items, expected {self.ranks!r}, "
                    "one per rank"
                )
        return tuple(own[name] for name in _core.LIMIT_LISTS)


LIMITS = tuple(field.name for field in fields(Limits))
"""The names of all limits."""
INTEGERS: dict[str, Any] = {
    field.name: field.default for field in fields(Limits) if field.type in ("int", "int | None")
}
"""Limits that are one integer, with their defaults: MISSING for those that are required."""
CHOICES = {"degrees": DEGREES, "sync": SYNCS}
"""Limits that are one of some words."""
SIZES = tuple(name for name, default in INTEGERS.items() if default is not MISSING)
"""Limits that are one integer, or left out."""


def slowness_of(speeds: Sequence[float]) -> list[int]:
    """Convert speeds to the core's integers: the time of each rank over that of the fastest.

    If speeds were measured, one rank converts them and sends the result to the others, since floats
    may differ.
    """
    expect_items("speeds", speeds, "numbers")
    for rank, speed in enumerate(speeds):
        if not (is_finite(speed) and speed > 0):
            raise ValueError(f"speeds[{rank}] is {speed!r}, expected a finite number > 0")
    fastest = max(speeds, default=1.0)
    return [round(_core.FULL_SPEED * fastest / speed) for speed in speeds]


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def even_degrees(ranks: int, ranks_per_node: int | None) -> list[int]:
    """Return the divisors of the ranks that cut nodes evenly, or take whole ones, ascending."""
    node = ranks_per_node or ranks
    return [d for d in allowed_degrees(divisors(ranks), node) if d > node or node % d == 0]


def allowed_degrees(degrees: Iterable[int], ranks_per_node: int | None) -> list[int]:
    """Return those of some degrees that nodes allow: up to a node's ranks, or whole nodes."""
    return [d for d in degrees if _core.nodes_allow(d, ranks_per_node or 0)]


def least_degree(
    longest: int,
    degrees: Sequence[int],
    rows: int,
    alignment: int = 1,
    memory: MemoryModel | None = None,
) -> int | None:
    """Return the first of some degrees whose ranks can hold every sequence of up to ``longest``
    tokens in so many rows, of which each rank pads its own to the alignment, and in the bytes of
    the memory. None: none can."""
    most = rows // alignment * alignment
    for d in degrees:
        if rows_up_to(longest, d) <= most and (
            memory is None or bytes_up_to(longest, d, memory, alignment) <= memory.limit
        ):
            return d
    return None


def bytes_up_to(longest: int, degree: int, memory: MemoryModel, alignment: int = 1) -> int:
    """Return the most bytes of a rank if ``degree`` ranks share up to ``longest`` tokens zigzag,
    and each pads its rows to the alignment, with the buffer of exchanges."""
    rows, padding = rows_up_to(longest, degree), max(0, alignment - 1)
    own = memory.bytes(rows, longest, degree) + memory.bytes(padding, padding, degree)
    return memory.buffer + own


def rows_up_to(longest: int, degree: int) -> int:
    """Return the most rows of a rank if ``degree`` ranks share up to ``longest`` tokens zigzag.

    A shorter sequence may need a row more than the longest: on 4 ranks 11 tokens put 4 on one of
    them, and 12 tokens 3 on each.
    """
    return _core.rows_up_to(longest, degree)


def rows_held(length: int, degree: int, j: int) -> int:
    """Return the rows of rank j if ``degree`` ranks share one sequence of ``length`` tokens zigzag.
    Beside others of its group it may lie another way: :class:`hcp.exchange.layout.Layout`."""
    return _core.rows_held(length, degree, j)
