"""The options of a trainer that uses hcp, under Megatron's names.

hcp.add_arguments(parser)                   # --sequence-packing-scheduler and its friends
config = hcp.Config.from_args(parser.parse_args())
plan = config.plan(lengths, ranks=groups.size("dp_cp"))
"""

from __future__ import annotations

import argparse
import bisect
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from hcp._validate import expect_choice, expect_size, flag, plain
from hcp._words import CommType, ScanType, Scheduler, Sync, SyncOption, TooLong
from hcp.attention.comm_types import COMM_TYPES, check_comm_types, check_prices, fitted_sizes
from hcp.attention.scan_types import check_scan_type
from hcp.planning.cost import CostModel
from hcp.planning.limits import SYNCS as PLAN_SYNCS
from hcp.planning.limits import (
    allowed_degrees,
    bytes_up_to,
    divisors,
    even_degrees,
    least_degree,
    rows_up_to,
)
from hcp.planning.memory import MemoryModel, expect_limiting
from hcp.planning.plan import Plan, plan

SCHEDULERS = ("dynamic_cp", "static_cp")
SYNCS = ("auto", *PLAN_SYNCS)
TOO_LONG = ("refuse", "drop", "cut")
MEGATRON_SCHEDULERS = {
    "default_dynamic_cp": "dynamic_cp",
    "dp_balanced": "static_cp",
    "hcp": "dynamic_cp",
}
"""Names of schedulers in Megatron, and what hcp calls the same."""
NO_WINDOW = (-1, -1)

Value = TypeVar("Value")

_SHORTER = "raise it, use more ranks, or shorten the sequences (too_long='cut' does)"
_OWN_WORDS = {
    "max_tokens_per_rank": "max_seqlen_per_dp_cp_rank",
    "raise either, or split the sequence": _SHORTER,
}
"""Of a refusal by :func:`hcp.plan`, and what it is to one who has set these options."""


@dataclass(frozen=True)
class Config:
    """The options of a trainer, checked. Names are Megatron's, where Megatron has one."""

    max_seqlen_per_dp_cp_rank: int
    """Most tokens one rank holds in one micro-batch. Start at the longest sequence that trains
    without context parallelism."""

    sequence_packing_scheduler: Scheduler = "dynamic_cp"
    """"dynamic_cp" chooses a degree for each group of sequences in each step; "static_cp" uses one
    for all. The names in Megatron, "default_dynamic_cp", "dp_balanced" and "hcp", become these."""

    min_dynamic_context_parallel_size: int = 1
    """Fewest ranks that "dynamic_cp" gives a sequence."""

    context_parallel_size: int | None = None
    """Degree of "static_cp", a divisor of the ranks. None: the least one that holds the longest
    sequence planned."""

    cp_comm_type: CommType | tuple[CommType, ...] = "p2p"
    """How keys and values travel: "p2p" (ring), "all_gather" (what is seen), "a2a" (heads for
    sequence), "a2a+p2p" (both, on levels) or "auto" (by the plan's prices). One for all layers, or
    one per layer."""

    eval_context_parallel_size: int | Literal["auto"] | None = None
    """Context-parallel size of the evaluation layout, a divisor of the ranks. "auto": the trainer
    asks `hcp.tools.choose.choose_eval_context_parallel`. None: the trainer's choice."""

    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    """Sizes of the levels of "a2a+p2p", the inner all-to-all first and the ring last. Under
    "static_cp" their product is the degree; under "dynamic_cp" the inner ones are a wish, of which
    each group takes what its degree allows."""

    window_size: tuple[int, int] | tuple[tuple[int, int], ...] = NO_WINDOW
    """FlashAttention's sliding window, tokens to the left and to the right, -1 being no limit. One
    for all layers, or one per layer."""

    ranks_per_node: int | None = None
    """Ranks whose links are fast. A degree up to it stays inside a node, a larger one takes whole
    nodes, and neighbours that exchange heads under "a2a+p2p" share one. None: all links are
    equal."""

    attention_backend: str = "auto"
    """Whose kernels compute attention: a backend of `hcp.get_cp_handler_cls`. "auto": for every
    call the fastest kernel that is installed. In a rank (RANK is set, as torchrun does, or
    torch.distributed is initialised), one whose package is not installed is an HcpError at once.
    Elsewhere it is none, since options are also read where no rank runs, such as on a login node:
    `require_backend` asks there."""

    scan_type: ScanType = "auto"
    """How recurrent layers get past the borders of ranks: "pass_states" (each rank scans its rows,
    states travel), "sequence_to_head" (each scans some heads, rows travel) or "auto" (by bytes)."""

    sync: SyncOption = "auto"
    """When ranks wait for each other, for `hcp.plan`: at the end of a "step" (DDP), or in every
    layer and so in each "micro_batch" (FSDP, DeepSpeed's ZeRO-3, experts over several ranks).
    "auto": as the trainer's model does."""

    plan_ahead: int = 1
    """Batches that loaders read, plan and dispatch while the one before them trains, on a thread
    and a group of their own. 0: a batch is planned when the trainer asks for it."""

    memory: MemoryModel | str | Path | None = None
    """The bytes of a micro-batch on one rank, to which every plan keeps in addition to the rows. A
    path is that of a file of `hcp calibrate --memory`, read here. None: rows alone."""

    too_long: TooLong = "refuse"
    """What becomes of a training sample that is too long for all ranks together (`longest`):
    "refuse" raises, "drop" leaves it out, "cut" keeps its first tokens. `Step.too_long` and the
    metric `hcp/too_long` count them. Evaluation has room for all."""

    def __post_init__(self) -> None:
        from hcp.step.backends import BACKENDS, is_rank  # torch, which the options do not need

        object.__setattr__(self, "memory", _memory_of(self.memory))
        for name in ("cp_comm_type", "hierarchical_context_parallel_sizes", "window_size"):
            object.__setattr__(self, name, _as_tuples(getattr(self, name)))
        expect_choice("sync", self.sync, SYNCS)
        check_scan_type(self.scan_type)
        expect_choice("too_long", self.too_long, TOO_LONG)
        expect_choice("attention_backend", self.attention_backend, tuple(BACKENDS))
        scheduler: str = self.sequence_packing_scheduler
        expect_choice("sequence_packing_scheduler", scheduler, (*SCHEDULERS, *MEGATRON_SCHEDULERS))
        scheduler = MEGATRON_SCHEDULERS.get(scheduler, scheduler)
        object.__setattr__(self, "sequence_packing_scheduler", scheduler)
        for name in ("max_seqlen_per_dp_cp_rank", "min_dynamic_context_parallel_size"):
            object.__setattr__(self, name, expect_size(name, getattr(self, name)))
        object.__setattr__(self, "plan_ahead", expect_size("plan_ahead", self.plan_ahead, least=0))
        for name in ("context_parallel_size", "ranks_per_node"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, expect_size(name, getattr(self, name)))
        name, size = "eval_context_parallel_size", self.eval_context_parallel_size
        if size is not None and size != "auto":
            object.__setattr__(self, name, expect_size(name, size, "or 'auto'"))
        for name in ("cp_comm_type", "window_size"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} is an empty list, expected one value or one per layer")
        for name, value in _by_place("cp_comm_type", self._layers("cp_comm_type")):
            expect_choice(name, value, COMM_TYPES)
        for name, window in _by_place("window_size", self._layers("window_size")):
            _expect_window(name, window)
        static = self.sequence_packing_scheduler == "static_cp"
        self._check_levels(self.context_parallel_size if static else None)
        if is_rank():
            self.require_backend()

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Config:
        """Take the options that add_arguments added.

        Args:
            args: parsed arguments. An option that is None, or that args lacks, takes its default.

        Returns:
            The options.
        """
        values: dict[str, Any] = {f.name: getattr(args, f.name, None) for f in fields(cls)}
        for name in ("cp_comm_type", "window_size"):
            if isinstance(values[name], list) and len(values[name]) == 1:
                values[name] = values[name][0]
        for field in fields(cls):
            if values[field.name] is None and field.default is MISSING:
                raise ValueError(
                    f"{flag(field.name)} is missing, expected the most tokens that a rank can hold"
                )
        return cls(**{name: value for name, value in values.items() if value is not None})

    def require_backend(self) -> None:
        """Raise HcpError unless the package of ``attention_backend`` is installed in this Python.
        For programs that start ranks on this machine, and for what is given groups of ranks."""
        from hcp.step.backends import require_backend

        require_backend(self.attention_backend)

    @property
    def comm_types(self) -> tuple[CommType, ...]:
        """Every comm type that some layer uses, once: what hcp.dispatch prepares for."""
        return tuple(dict.fromkeys(self._layers("cp_comm_type")))

    def comm_type(self, layer: int) -> CommType:
        """Say how keys and values travel in a layer.

        Args:
            layer: its number, from 0.

        Returns:
            The comm type.
        """
        used: CommType = self._of_layer("cp_comm_type", layer)
        return used

    def window(self, layer: int) -> tuple[int, int]:
        """Say which sliding window a layer has.

        Args:
            layer: its number, from 0.

        Returns:
            (left, right); -1: no limit.
        """
        left, right = self._of_layer("window_size", layer)
        return left, right

    def dispatch_options(self, degree: int | None = None) -> dict[str, Any]:
        """Give the options of :func:`hcp.dispatch` that describe the layers.

        Args:
            degree: the one degree of a job layout that is not training's, as evaluation may use.
                The levels of "a2a+p2p" are fitted to it.

        Returns:
            The options by name.

        Raises:
            HcpError: the library of ``attention_backend`` cannot be imported.
        """
        from hcp.step.backends import get_cp_handler_cls

        return {
            "comm_types": self.comm_types,
            "hierarchical_context_parallel_sizes": self._levels(degree),
            "window_sizes": tuple(dict.fromkeys(self._layers("window_size"))),
            "handler_cls": get_cp_handler_cls(self.attention_backend, self.comm_types),
            "scan_type": self.scan_type,
        }

    def for_evaluation(self, degree: int, longest: int, alignment: int = 1) -> Config:
        """Change these options to one degree for all sequences.

        Args:
            degree: ranks of each sequence.
            longest: tokens of the longest one.
            alignment: of what every rank's rows are a multiple.

        Returns:
            The options of the evaluation.
        """
        return replace(
            self,
            sequence_packing_scheduler="static_cp",
            context_parallel_size=degree,
            hierarchical_context_parallel_sizes=self._levels(degree),
            max_seqlen_per_dp_cp_rank=self.rows_in_evaluation(degree, longest, alignment),
            memory=self.memory_in_evaluation(degree, longest, alignment),
        )

    def rows_in_evaluation(self, degree: int, longest: int, alignment: int = 1) -> int:
        """Give the rows that a rank may hold in evaluation: its share of the longest sequence,
        however large, since there is no backward.

        Args:
            degree: ranks of each sequence.
            longest: tokens of the longest one.
            alignment: of what every rank's rows are a multiple.

        Returns:
            The rows.
        """
        aligned = -(-rows_up_to(longest, degree) // alignment) * alignment
        return max(self.max_seqlen_per_dp_cp_rank, aligned)

    def memory_in_evaluation(
        self, degree: int, longest: int, alignment: int = 1
    ) -> MemoryModel | None:
        """Give the bytes that a rank may hold in evaluation: those of the longest sequence by
        training's measure, however many, since there is no backward.

        Args:
            degree: ranks of each sequence.
            longest: tokens of the longest one.
            alignment: of what every rank's rows are a multiple.

        Returns:
            The memory model; None where these options have none.
        """
        memory = self.memory_model
        if memory is None:
            return None
        needed = bytes_up_to(longest, degree, memory, alignment)
        return replace(memory, limit=max(memory.limit, needed))

    @property
    def memory_model(self) -> MemoryModel | None:
        """``memory``, whose file was read."""
        return cast(MemoryModel | None, self.memory)

    def _levels(self, degree: int | None) -> tuple[int, ...]:
        """The levels of "a2a+p2p", fitted to a degree. None: those of training."""
        sizes = self.hierarchical_context_parallel_sizes
        return fitted_sizes(sizes, degree) if sizes and degree is not None else sizes

    def validate(
        self,
        *,
        ranks: int,
        num_layers: int | None = None,
        longest: int | None = None,
        alignment: int = 1,
    ) -> None:
        """Find options that cannot work on this many ranks, before anything starts.

        Args:
            ranks: of the domain.
            num_layers: of the model; None: not known.
            longest: tokens of the longest sequence; None: not known.
            alignment: of what every rank's rows are a multiple.

        Raises:
            ValueError: such an option.
        """
        if self.min_dynamic_context_parallel_size > ranks:
            raise ValueError(
                f"min_dynamic_context_parallel_size is {self.min_dynamic_context_parallel_size},"
                f" expected at most {ranks}, the ranks: lower it, or use more ranks"
            )
        for name in ("context_parallel_size", "eval_context_parallel_size"):
            size = getattr(self, name)
            if isinstance(size, int) and ranks % size != 0:
                raise ValueError(
                    f"{name} is {size}, expected a divisor of the {ranks} ranks: choose one of"
                    f" {divisors(ranks)}, or use another number of ranks"
                )
        for name in ("cp_comm_type", "window_size"):
            values = self._layers(name)
            if num_layers is not None and self._is_per_layer(name) and len(values) != num_layers:
                raise ValueError(
                    f"{name} lists {len(values)} values for {num_layers} layers,"
                    f" expected 1 or {num_layers}"
                )
        if longest is not None and self.too_long != "refuse":
            longest = min(longest, self.longest(ranks, alignment))
        if longest is not None:
            degree = self._degree_of(longest, self._degrees(ranks), alignment)
            if self.sequence_packing_scheduler == "static_cp":
                self._check_levels(degree)

    def longest(self, ranks: int, alignment: int = 1) -> int:
        """Give the tokens of the longest sequence that the ranks hold, as they do all shorter ones.

        Args:
            ranks: of the domain.
            alignment: of what every rank's rows are a multiple.

        Returns:
            The tokens.

        Raises:
            ValueError: the ranks do not hold a single token.
        """
        degrees, limit = self._degrees(ranks), self.max_seqlen_per_dp_cp_rank
        self._degree_of(1, degrees, alignment)

        def is_longer(tokens: int) -> bool:
            return least_degree(tokens, degrees, limit, alignment, self.memory_model) is None

        return bisect.bisect_left(range(1, limit * ranks + 2), True, key=is_longer)

    def _degrees(self, ranks: int) -> list[int]:
        """The degrees that a sequence may have, ascending."""
        if self.sequence_packing_scheduler == "static_cp":
            return self._static_degrees(ranks)
        degrees = range(self.min_dynamic_context_parallel_size, ranks + 1)
        return allowed_degrees(degrees, self.ranks_per_node) or [ranks]

    def _static_degrees(self, ranks: int) -> list[int]:
        size = self.context_parallel_size
        return even_degrees(ranks, self.ranks_per_node) if size is None else [size]

    def static_degree(self, longest: int, ranks: int, alignment: int = 0) -> int:
        """Choose the degree of "static_cp": a divisor of the ranks that cuts nodes evenly, or takes
        whole ones.

        Args:
            longest: tokens of the longest sequence.
            ranks: of the domain.
            alignment: of what every rank's rows are a multiple, 0: of nothing.

        Returns:
            The degree.

        Raises:
            ValueError: no degree holds the longest sequence.
        """
        ranks = expect_size("ranks", ranks)
        return self._degree_of(longest, self._static_degrees(ranks), alignment or 1)

    def _degree_of(self, longest: int, degrees: Sequence[int], alignment: int = 1) -> int:
        """The least of ascending degrees that holds every sequence of up to `longest` tokens."""
        limit, memory = self.max_seqlen_per_dp_cp_rank, self.memory_model
        degree = least_degree(longest, degrees, limit, alignment, memory)
        if degree is not None:
            return degree
        holding = [d for d in degrees if least_degree(longest, [d], limit, alignment)]
        if memory is not None and holding:
            raise ValueError(_too_many_bytes(longest, holding, memory, alignment))
        raise ValueError(
            f"rows of {longest} tokens on a rank of {degrees[-1]}"
            f" ({rows_up_to(longest, degrees[-1])}) > max_seqlen_per_dp_cp_rank ({limit}):"
            f" {_SHORTER}"
        )

    def plan(
        self, lengths: Sequence[int], ranks: int, cost: CostModel | None = None, **limits: Any
    ) -> Plan:
        """Plan one global batch. Every rank that passes the same values gets the same plan.

        Args:
            lengths: tokens of each sequence.
            ranks: of the domain.
            cost: the prices; None: the default ones.
            **limits: what the job layout needs in addition to these options, by :func:`hcp.plan`'s
                names: ``alignment``, ``pipeline_stages``, ``memory``, ...; a ``sync`` among them
                takes the place of the option, of which "auto" is "step" here.

        Returns:
            The plan.

        Raises:
            ValueError: as of :func:`hcp.plan`, but of a sequence that is too long by the names of
                these options; or a layer's comm type is "auto" and ``cost`` has no prices for it.
        """
        self.validate(ranks=ranks)
        if cost is not None:
            check_prices(self.comm_types, cost)
        try:
            return self._plan(lengths, ranks, cost, limits)
        except ValueError as error:
            said = str(error)
            for core, own in _OWN_WORDS.items():
                said = said.replace(core, own)
            if said == str(error):  # such as one of a cost function, which keeps its traceback
                raise
            raise ValueError(said) from None

    def _plan(
        self, lengths: Sequence[int], ranks: int, cost: CostModel | None, limits: dict[str, Any]
    ) -> Plan:
        if self.sequence_packing_scheduler == "static_cp":
            size = self.context_parallel_size
            longest = max(lengths, default=1)
            least = most = size or self.static_degree(longest, ranks, limits.get("alignment", 0))
        else:
            least, most = self.min_dynamic_context_parallel_size, ranks
        return plan(
            lengths,
            ranks=ranks,
            max_tokens_per_rank=self.max_seqlen_per_dp_cp_rank,
            min_degree=least,
            max_degree=most,
            ranks_per_node=self.ranks_per_node,
            cost=cost,
            **{"sync": self.sync_where(waiting=False), "memory": self.memory_model, **limits},
        )

    def sync_where(self, *, waiting: bool) -> Sync:
        """Give the option ``sync`` as :func:`hcp.plan` takes it.

        Args:
            waiting: whether ranks wait for each other in the layers of the model; decides where the
                option is "auto".

        Returns:
            "step" or "micro_batch".
        """
        if self.sync != "auto":
            return self.sync
        return "micro_batch" if waiting else "step"

    def _check_levels(self, degree: int | None) -> None:
        sizes = self.hierarchical_context_parallel_sizes
        check_comm_types(self.comm_types, sizes, degree, where="cp_comm_type")

    def _is_per_layer(self, name: str) -> bool:
        value = getattr(self, name)
        return isinstance(value, tuple) and not (value and isinstance(value[0], int))

    def _layers(self, name: str) -> tuple[Any, ...]:
        """The values of a field that has one per layer or one for all."""
        value = getattr(self, name)
        return tuple(value) if self._is_per_layer(name) else (value,)

    def _of_layer(self, name: str, layer: int) -> Any:
        values = self._layers(name)
        if not self._is_per_layer(name):
            return values[0]
        if not 0 <= layer < len(values):
            raise ValueError(f"layer is {layer}, but {name} lists {len(values)} layers")
        return values[layer]


def _memory_of(given: object) -> MemoryModel | None:
    """Read the file, if one is given."""
    if isinstance(given, str | os.PathLike):
        try:
            return MemoryModel.load(given)
        except OSError as error:
            raise ValueError(
                f"memory is {os.fspath(given)!r}, expected a file of `hcp calibrate "
                f"--memory`: {error.strerror}"
            ) from None
    if given is None:
        return None
    if not isinstance(given, MemoryModel):
        raise ValueError(f"memory is {given!r}, expected a MemoryModel, or a path of its file")
    return expect_limiting(given)


def _too_many_bytes(
    longest: int, degrees: Sequence[int], memory: MemoryModel, alignment: int
) -> str:
    """Say what a sequence needs on the ranks that need least, and what would help."""
    needed, degree = min((bytes_up_to(longest, d, memory, alignment), d) for d in degrees)
    ways = ["use more ranks"]
    if alignment > 1:
        ways.append(f"a smaller alignment than {alignment}")
    if memory.gathered:
        ways.append("a comm type that holds fewer keys, such as a2a")
    if memory.gathered or memory.attention:
        ways.append("more head_chunks")
    if memory.buffer:
        ways.append(f"a smaller peer_buffer_bytes (memory.buffer is {memory.buffer:,})")
    return (
        f"a sequence of {longest} tokens takes {needed:,} bytes on each of {degree} ranks > "
        f"memory.limit ({memory.limit:,}): {', '.join(ways)}, recompute activations in the "
        "backward and calibrate again, or shorten the sequences"
    )


def _as_tuples(value: Any) -> Any:
    """Lists, as JSON and argparse give them, as tuples, and integers as ints."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else plain(value)


def _by_place(name: str, values: tuple[Value, ...]) -> list[tuple[str, Value]]:
    if len(values) == 1:
        return [(name, values[0])]
    return [(f"{name}[{layer}]", value) for layer, value in enumerate(values)]


def _expect_window(name: str, value: object) -> None:
    sides = value if isinstance(value, tuple) else ()
    if len(sides) != 2 or any(type(tokens) is not int or tokens < -1 for tokens in sides):
        raise ValueError(f"{name} is {value!r}, expected (left, right) in tokens, -1: no limit")
