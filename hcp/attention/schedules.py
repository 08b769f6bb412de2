"""The schedules of a micro-batch on one rank, for each comm type, mask and number of heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hcp import _core
from hcp.attention import comm_types as comm
from hcp.attention.checks import check_options, scale_of, window_of
from hcp.attention.kernels import KernelChoice
from hcp.attention.prepared import LayerOptions, Prepared, prepared_of
from hcp.exchange.calls import HandlerPart
from hcp.exchange.layout import Layout
from hcp.exchange.tables import ScheduleHeader, schedule_words
from hcp.exchange.transport import Transport, read_in_place

_CAUSAL, _FULL = (-1, 0), (-1, -1)


class Asked(NamedTuple):
    """The options of a call of attention, as its caller gave them."""

    comm_type: str | None
    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    mask: str | None


class VisibleKeys(NamedTuple):
    """The keys that a layer's queries see."""

    left: int
    right: int
    mask: int
    """Which of the plan's, -1 in a plan without."""


class Schedules:
    """Prepares each schedule once, and keeps it for all layers."""

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        comm_types: Sequence[str],
        sizes: Sequence[int],
        *,
        kernel_family: str,
        step: int,
        numbers: Iterator[int],
    ) -> None:
        """``sizes``: of the levels of "a2a+p2p". ``kernel_family``: whose kernels compute
        attention. ``numbers``: of the group's calls."""
        plan = layout.plan
        comm.check_comm_types(comm_types, sizes, comm.only_degree(plan))
        comm.check_prices(comm_types, plan.cost)
        comm.check_masks(comm_types, plan)
        self.default = comm_types[0]
        """The comm type of a layer that names none."""
        self._comm_types = tuple(dict.fromkeys(comm_types))
        self._layout, self._transport, self._sizes = layout, transport, tuple(sizes)
        self._kernel_family, self._step, self._numbers = kernel_family, step, numbers
        self.head_chunks = _head_chunks(layout)
        """Chunks in which layers compute their heads, one after the other."""
        self._words: dict[tuple[object, ...], Tensor] = {}
        self._choices: dict[tuple[object, ...], comm.CommChoice] = {}
        self._prepared: list[Prepared] = []

    @property
    def layer_bytes(self) -> int:
        """Bytes that the forward of a layer receives: of the kind of layer with the most so far."""
        return max((prepared.layer_bytes for prepared in self._prepared), default=0)

    def prepare_all(
        self, window_sizes: Sequence[tuple[int, int]], heads: Sequence[tuple[int, int]]
    ) -> None:
        """Prepare for layers with and without a causal mask, under each of the windows and, where
        the comm type depends on them, numbers of (query, key-value) heads."""
        # Without masks, a causal layer without a window is one with the window of a causal mask.
        windows = [_CAUSAL, _FULL] if self._layout.plan.masks else [_FULL]
        for name in self._comm_types:
            for counts in heads if name in comm.CHOSEN else [(1, 1)]:
                for window in (*windows, *window_sizes):
                    for causal in (False, True):
                        for mask in self._layout.plan.masks or (None,):
                            self._prepare(name, self._limits(window, causal, mask), counts)

    def options_of(
        self, query: Tensor, key: Tensor, asked: Asked, *, latent: bool = False
    ) -> LayerOptions:
        """The options of a layer for a call that asked for these, which are checked. ``latent``:
        whether keys are latent rows, which have no heads to exchange."""
        check_options(asked.softcap, asked.dropout_p)
        limits = self._limits(asked.window_size, asked.causal, asked.mask)
        scale = scale_of(query, asked.softmax_scale)
        counts = _head_count(query), _head_count(key)
        comm_type = asked.comm_type or self.default
        if latent:
            comm.check_sends_rows(comm_type)
            counts = counts[0], comm.NO_HEADS
        words = self.words_of(comm_type, *limits[:2], counts, limits.mask)
        return LayerOptions(words, scale, KernelChoice(self._kernel_family, asked.softcap))

    def _limits(self, window: tuple[int, int], causal: bool, mask: str | None) -> VisibleKeys:
        """Under masks, whether a layer is causal is the mask's to say."""
        names = tuple(self._layout.plan.masks)
        if mask is not None and mask not in names:
            raise ValueError(
                f"mask is {mask!r}, expected one of {list(names)}: the names of masks= of hcp.plan"
            )
        left, right = window_of(window, causal and not names)
        return VisibleKeys(left, right, (names.index(mask) if mask else 0) if names else -1)

    def words_of(
        self, comm_type: str, left: int, right: int, counts: tuple[int, int], mask: int = -1
    ) -> Tensor:
        """The schedule of a layer, as a compiler sees it. ``counts``: query and key-value heads.
        ``mask``: which of the plan's."""
        if comm_type not in self._comm_types:
            raise ValueError(
                f"comm_type is {comm_type!r}, expected one of {sorted(self._comm_types)}: "
                "name every type in comm_types= of hcp.dispatch"
            )
        limits = VisibleKeys(left, right, mask)
        words = self._words.get(_key_of(comm_type, limits, counts))
        if words is None and torch.compiler.is_compiling():
            raise ValueError(
                f"window_size is {limits[:2]} and the heads are {counts} in a compiled layer, "
                "expected what was prepared: name the window in window_sizes= and, under "
                f"{' or '.join(comm.CHOSEN)}, the heads in heads= of hcp.dispatch"
            )
        return self._prepare(comm_type, limits, counts) if words is None else words

    def of_heads(self) -> Prepared:
        """The schedule that exchanges all rows for heads, whichever comm types layers name."""
        return prepared_of(self._prepare(comm.A2A, self._limits(_FULL, False, None), (1, 1)))

    @property
    def choices(self) -> tuple[comm.CommChoice, ...]:
        """The group's choice for each comm type, mask and number of heads so far."""
        return tuple(dict.fromkeys(self._choices.values()))

    def _prepare(self, comm_type: str, limits: VisibleKeys, counts: tuple[int, int]) -> Tensor:
        key = _key_of(comm_type, limits, counts)
        if key not in self._words:
            layout = self._layout
            given = layout.plan, layout, comm_type, self._sizes, limits[:2], counts
            packed = self._transport.device.type == "cuda"
            group = range(layout.first_rank, layout.first_rank + layout.degree)
            in_place = read_in_place(self._transport, group)
            choice = self._choices[key] = comm.choose(*given, packed, in_place)
            self._words[key] = self._schedule(choice.used, choice.inner, limits, in_place)
        return self._words[key]

    def _schedule(self, comm_type: str, inner: int, limits: VisibleKeys, in_place: bool) -> Tensor:
        layout = self._layout
        header = ScheduleHeader(
            transport=self._transport.key,
            step=self._step,
            micro_batch=layout.micro_batch,
            rank=layout.rank,
            mask=limits.mask,
            head_chunks=self.head_chunks,
            in_place=in_place,
        )
        words = schedule_words(
            layout.plan,
            header,
            comm_type,
            inner=inner,
            window_size=limits[:2],
            by_nodes=not in_place,  # who reads from memory needs no relays
        )
        prepared = prepared_of(words)
        prepared.numbers = self._numbers
        self._prepared.append(prepared)
        return words


class CommChoices(HandlerPart):
    """The comm types that layers use, and the bytes that they receive: ``cp.comm``."""

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules

    @property
    def choices(self) -> tuple[comm.CommChoice, ...]:
        """The comm type that this rank's group uses for each one, mask and number of heads that
        layers have named so far or that were prepared, each with the reason."""
        return self._schedules.choices

    @property
    def default_type(self) -> str:
        """The comm type of a layer that names none."""
        return self._schedules.default

    @property
    def layer_bytes(self) -> int:
        """Bytes that this rank receives in the forward of one attention layer: of the kind of layer
        with the most so far, 0 before the first."""
        return self._schedules.layer_bytes


def _head_chunks(layout: Layout) -> int:
    """As few as fit, by the plan's memory model: alike on all ranks of the group."""
    return _core.group_chunks(layout.plan.core, layout.micro_batch, layout.rank)


def _head_count(rows: Tensor) -> int:
    """0 for what has none, which is refused later."""
    return rows.shape[1] if rows.dim() > 1 else 0


def _key_of(comm_type: str, limits: VisibleKeys, counts: tuple[int, int]) -> tuple[object, ...]:
    """The key of a layer's schedule among those of a plan."""
    return (comm_type, *limits, *(counts if comm_type in comm.CHOSEN else ()))
