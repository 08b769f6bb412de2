"""Who computes what, with how many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hcp import _core

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CostModel:
    """Integer prices in one unit of your choice: only their ratios decide a plan.

    One sequence of L tokens on d ranks takes
    ``(pair * L * (L + 1) / 2 + token * L) / d + exchange * (L - L / d)``, and every micro-batch on
    a rank ``launch`` more. The defaults are those of a 7B decoder (hidden size 4096: a token
    through the linear layers costs as much as 12,288 pairs, the 24,576 s + s^2 that RL trainers
    balance by) with 4 KiB of keys and values a token and layer over 50 GB/s beside 400 TFLOP/s.
    """

    pair: int = 2
    """One query-key pair of causal attention."""
    token: int = 24_576
    """One token through everything that is not attention."""
    exchange: int = 4_096
    """One token's keys and values received by one rank."""
    launch: int = 1_048_576
    """One micro-batch on one rank, whatever it holds."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 0:
                raise ValueError(f"cost.{field.name} is {value!r}, expected an integer >= 0")

    @classmethod
    def for_transformer(
        cls,
        *,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int | None = None,
        head_dim: int | None = None,
        bytes_per_element: int = 2,
        flops_per_byte: int = 8_000,
        launch_flops: int = 10_000_000_000,
    ) -> CostModel:
        """Prices in floating-point operations of one decoder layer's forward pass.

        ``flops_per_byte`` is the machine's compute rate over its exchange rate (400 TFLOP/s over
        50 GB/s by default); ``launch_flops`` what it could compute in the time that a layer's
        launches take. SwiGLU is assumed (three matrices in the feed-forward layer).
        """
        head_dim = head_dim or hidden_size // num_attention_heads
        groups = num_query_groups or num_attention_heads
        query_width, key_width = num_attention_heads * head_dim, groups * head_dim
        weights = 2 * hidden_size * (query_width + key_width) + 3 * hidden_size * ffn_hidden_size
        return cls(
            pair=4 * query_width,
            token=2 * weights,
            exchange=2 * key_width * bytes_per_element * flops_per_byte,
            launch=launch_flops,
        )


class Group(NamedTuple):
    """A contiguous interval of ranks that computes one packed set of sequences."""

    first_rank: int
    degree: int
    sequences: tuple[int, ...]
    """Indices of the plan's lengths."""


class Plan:
    """An immutable plan, the same on every rank that was given the same input.

    Made by :func:`plan` or :meth:`from_dict`. ``core`` is the value of the C core behind it.
    """

    def __init__(self, core: _core.Plan) -> None:
        self.core = core

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
        """work / (ranks * makespan): 1 where no rank ever waits or does extra work."""
        return self.work / (self.ranks * self.makespan) if self.makespan else 1.0

    @property
    def checksum(self) -> int:
        """64 bits over everything that the plan says."""
        return self.core.checksum

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, enough to make it again with :meth:`from_dict`."""
        return {
            "ranks": self.ranks,
            "max_tokens_per_rank": self.max_tokens_per_rank,
            "min_degree": self.core.min_degree,
            "max_degree": self.core.max_degree,
            "cost": {f.name: getattr(self.core, f.name) for f in fields(CostModel)},
            "lengths": list(self.lengths),
            "micro_batches": [
                {
                    "groups": [
                        {
                            "first_rank": group.first_rank,
                            "degree": group.degree,
                            "sequences": list(group.sequences),
                        }
                        for group in groups
                    ]
                }
                for groups in self.micro_batches
            ],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """A plan from groups that somebody chose, checked by the rules that every plan keeps.

        ``lengths``, ``ranks``, ``max_tokens_per_rank`` and ``micro_batches`` are required.
        Raises ValueError that names the group and the rule.
        """
        batches = [batch["groups"] for batch in data["micro_batches"]]
        groups = [group for batch in batches for group in batch]
        ranks = data["ranks"]
        return cls(
            _core.create_plan_from(
                data["lengths"],
                ranks,
                data["max_tokens_per_rank"],
                data.get("min_degree", 1),
                data.get("max_degree", ranks),
                **_prices(CostModel(**data.get("cost", {}))),
                micro_batches=[len(batch) for batch in batches],
                groups=[
                    number
                    for group in groups
                    for number in (group["first_rank"], group["degree"], len(group["sequences"]))
                ],
                sequences=[sequence for group in groups for sequence in group["sequences"]],
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_dict, (self.to_dict(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.checksum)

    def __repr__(self) -> str:
        return (
            f"Plan(sequences={len(self.lengths)}, ranks={self.ranks}, "
            f"micro_batches={len(self.micro_batches)}, efficiency={self.efficiency:.3f})"
        )


def _records(matrix: memoryview) -> list[list[int]]:
    return cast(list[list[int]], matrix.tolist())


def _prices(cost: CostModel) -> dict[str, int]:
    return {field.name: getattr(cost, field.name) for field in fields(cost)}


def plan(
    lengths: Sequence[int] | Tensor,
    *,
    ranks: int,
    max_tokens_per_rank: int,
    min_degree: int = 1,
    max_degree: int | None = None,
    cost: CostModel | None = None,
) -> Plan:
    """Assign sequences to ranks: packing, CP degree and placement of each.

    ``lengths``: tokens of each sequence, each >= 1, as integers or a tensor; may be empty.
    ``ranks``: size of the domain.
    ``max_tokens_per_rank``: rows that one rank may hold in one micro-batch, never exceeded.
    ``min_degree`` to ``max_degree`` (default: ``ranks``): allowed CP degrees, any integers; equal
    ones give static CP. Pure: the same arguments give the same plan, bit for bit, on every rank.

    Raises ValueError for an argument out of its range, and for a sequence that no allowed degree
    can hold.
    """
    return Plan(
        _core.create_plan(
            lengths.tolist() if hasattr(lengths, "tolist") else lengths,
            ranks,
            max_tokens_per_rank,
            min_degree,
            ranks if max_degree is None else max_degree,
            **_prices(cost or CostModel()),
        )
    )
