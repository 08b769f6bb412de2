"""The options of a trainer that uses hcp, under Megatron's names.

hcp.add_arguments(parser)                   # --sequence-packing-scheduler and its friends
config = hcp.Config.from_args(parser.parse_args())
plan = config.plan(lengths, ranks=groups.size("dp_cp"))
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING

from hcp import _core

if TYPE_CHECKING:
    from hcp.cost import CostModel
    from hcp.plan import Plan

SCHEDULERS = ("dynamic_cp", "static_cp")
COMM_TYPES: tuple[str, ...] = _core.COMM_TYPES


@dataclass(frozen=True)
class Config:
    max_seqlen_per_dp_cp_rank: int
    """Most tokens one rank holds in one micro-batch. Start at the longest sequence that trains
    without context parallelism."""

    sequence_packing_scheduler: str = "dynamic_cp"
    """""dynamic_cp" chooses a degree for each group of sequences in each step; "static_cp" uses one
    for all."""

    min_dynamic_context_parallel_size: int = 1
    """Fewest ranks that "dynamic_cp" gives a sequence."""

    context_parallel_size: int | None = None
    """Degree of "static_cp", a divisor of the ranks. None: the least one that holds the longest
    sequence planned."""

    cp_comm_type: str | tuple[str, ...] = "p2p"
    """How keys and values travel: "p2p" (ring), "all_gather" (what is seen) or "a2a" (heads for
    sequence). One for all layers, or one per layer."""

    eval_context_parallel_size: int | None = None
    """Context-parallel size of the evaluation layout, a divisor of the ranks. None: the trainer's
    choice."""

    def __post_init__(self) -> None:
        if not isinstance(self.cp_comm_type, str):
            object.__setattr__(self, "cp_comm_type", tuple(self.cp_comm_type))
        expect_choice("sequence_packing_scheduler", self.sequence_packing_scheduler, SCHEDULERS)
        expect_size("max_seqlen_per_dp_cp_rank", self.max_seqlen_per_dp_cp_rank)
        expect_size("min_dynamic_context_parallel_size", self.min_dynamic_context_parallel_size)
        if self.context_parallel_size is not None:
            expect_size("context_parallel_size", self.context_parallel_size)
        if self.eval_context_parallel_size is not None:
            expect_size("eval_context_parallel_size", self.eval_context_parallel_size)
        if not self.cp_comm_type:
            raise ValueError("cp_comm_type is an empty list, expected one value or one per layer")
        for name, value in self._comm_types_by_place():
            expect_choice(name, value, COMM_TYPES)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Config:
        """The options that add_arguments added. An option that is None, or that args lacks, takes
        its default."""
        values = {field.name: getattr(args, field.name, None) for field in fields(cls)}
        if isinstance(values["cp_comm_type"], list) and len(values["cp_comm_type"]) == 1:
            values["cp_comm_type"] = values["cp_comm_type"][0]
        for field in fields(cls):
            if values[field.name] is None and field.default is MISSING:
                raise ValueError(
                    f"{flag(field.name)} is missing, expected the most tokens that a rank can hold"
                )
        return cls(**{name: value for name, value in values.items() if value is not None})

    @property
    def comm_types(self) -> tuple[str, ...]:
        """Every comm type that some layer uses, once: what hcp.dispatch prepares for."""
        return tuple(dict.fromkeys(value for _, value in self._comm_types_by_place()))

    def comm_type(self, layer: int) -> str:
        """How keys and values travel in a layer, counted from 0."""
        if isinstance(self.cp_comm_type, str):
            return self.cp_comm_type
        if not 0 <= layer < len(self.cp_comm_type):
            raise ValueError(
                f"layer is {layer}, but cp_comm_type lists {len(self.cp_comm_type)} layers"
            )
        return self.cp_comm_type[layer]

    def validate(
        self, *, ranks: int, num_layers: int | None = None, longest: int | None = None
    ) -> None:
        """Refuse what cannot work on this many ranks, before anything starts.

        longest is the longest sequence in tokens, num_layers the model's; leave out what is not
        known.
        """
        if self.min_dynamic_context_parallel_size > ranks:
            raise ValueError(
                f"min_dynamic_context_parallel_size ({self.min_dynamic_context_parallel_size})"
                f" > ranks ({ranks})"
            )
        for name in ("context_parallel_size", "eval_context_parallel_size"):
            size = getattr(self, name)
            if size is not None and ranks % size != 0:
                raise ValueError(
                    f"ranks ({ranks}) % {name} ({size}) == {ranks % size}, expected 0:"
                    f" choose one of {divisors(ranks)}"
                )
        if (
            not isinstance(self.cp_comm_type, str)
            and num_layers is not None
            and len(self.cp_comm_type) != num_layers
        ):
            raise ValueError(
                f"cp_comm_type lists {len(self.cp_comm_type)} values for {num_layers} layers,"
                f" expected 1 or {num_layers}"
            )
        if longest is not None and self.sequence_packing_scheduler == "static_cp":
            self.static_degree(longest, ranks)
        elif longest is not None:
            self._degree_of(longest, range(self.min_dynamic_context_parallel_size, ranks + 1))

    def static_degree(self, longest: int, ranks: int) -> int:
        """The degree of "static_cp" for sequences of at most `longest` tokens."""
        size = self.context_parallel_size
        return self._degree_of(longest, divisors(ranks) if size is None else [size])

    def _degree_of(self, longest: int, degrees: Sequence[int]) -> int:
        """The least of ascending degrees that holds every sequence of up to `longest` tokens."""
        limit = self.max_seqlen_per_dp_cp_rank
        for degree in degrees:
            if rows_up_to(longest, degree) <= limit:
                return degree
        raise ValueError(
            f"rows of {longest} tokens on a rank of {degrees[-1]}"
            f" ({rows_up_to(longest, degrees[-1])}) > max_seqlen_per_dp_cp_rank ({limit}):"
            " raise it, use more ranks, or shorten the sequences"
        )

    def plan(self, lengths: Sequence[int], ranks: int, cost: CostModel | None = None) -> Plan:
        """The plan of one global batch. Every rank that passes the same values gets the same
        plan."""
        from hcp.plan import plan

        self.validate(ranks=ranks)
        if self.sequence_packing_scheduler == "static_cp":
            size = self.context_parallel_size
            least = most = size or self.static_degree(max(lengths, default=1), ranks)
        else:
            least, most = self.min_dynamic_context_parallel_size, ranks
        return plan(
            lengths,
            ranks=ranks,
            max_tokens_per_rank=self.max_seqlen_per_dp_cp_rank,
            min_degree=least,
            max_degree=most,
            cost=cost,
        )

    def _comm_types_by_place(self) -> list[tuple[str, str]]:
        if isinstance(self.cp_comm_type, str):
            return [("cp_comm_type", self.cp_comm_type)]
        return [(f"cp_comm_type[{layer}]", value) for layer, value in enumerate(self.cp_comm_type)]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add an option for each field of Config. One that the parser already has, as Megatron's does,
    stays as it is."""
    group = parser.add_argument_group("context parallelism")

    def add(name: str, **options: object) -> None:
        if flag(name) not in parser._option_string_actions:
            group.add_argument(flag(name), **options)  # type: ignore[arg-type]

    add(
        "sequence_packing_scheduler",
        choices=SCHEDULERS,
        help="a degree for each group of sequences, or one for all (default: dynamic_cp)",
    )
    add(
        "max_seqlen_per_dp_cp_rank",
        type=int,
        metavar="TOKENS",
        help="most tokens of one rank in one micro-batch",
    )
    add(
        "min_dynamic_context_parallel_size",
        type=int,
        metavar="RANKS",
        help="fewest ranks that dynamic_cp gives a sequence (default: 1)",
    )
    add(
        "context_parallel_size",
        type=int,
        metavar="RANKS",
        help="degree of static_cp (default: the least that holds the longest sequence)",
    )
    add(
        "cp_comm_type",
        nargs="+",
        metavar="TYPE",
        help=f"how keys and values travel, one value or one per layer, of {', '.join(COMM_TYPES)}"
        " (default: p2p)",
    )
    add(
        "eval_context_parallel_size",
        type=int,
        metavar="RANKS",
        help="context-parallel size of the evaluation layout",
    )
    return parser


def flag(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def rows_up_to(longest: int, degree: int) -> int:
    """Rows of the fullest rank, at most, when degree ranks share up to longest tokens zigzag.

    A shorter sequence may need a row more than the longest: on 4 ranks 11 tokens put 4 on one of
    them, and 12 tokens 3 on each.
    """
    whole, rest = divmod(longest, 2 * degree)
    # A rank holds two of 2 * degree chunks. The least remainder that rounds up both of them on some
    # rank is the least one above 2 that does not divide the number of chunks.
    both = next(r for r in itertools.count(3) if 2 * degree % r != 0)
    return 2 * whole + min(rest, 1) + (rest >= both)


def expect_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected an integer >= 1")


def expect_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
