"""What one rank holds in a micro-batch, and the tables that say who sends what to whom.

The C core builds every table; here their sections get names. A table is one block of 64-bit words,
hence one tensor, which may travel through a compiled model.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hcp import _core
from hcp.plan import Plan

_serials = itertools.count(1)


class Span(NamedTuple):
    """A run of consecutive tokens of one sequence on one rank."""

    sequence: int
    start: int
    rows: int


class Move(NamedTuple):
    """Rows of a buffer that travel to, or come from, a rank of the domain."""

    peer: int
    row: int
    rows: int


class Layout:
    """What ``rank`` holds in a micro-batch of a plan; a rank without rows has degree 0."""

    def __init__(self, plan: Plan, micro_batch: int, rank: int) -> None:
        core = _core.create_layout(plan.core, micro_batch, rank)
        self.plan = plan
        self.micro_batch = micro_batch
        self.rank = rank
        self.first_rank: int = core.first_rank
        """First rank of the group."""
        self.degree: int = core.degree
        """Ranks of the group."""
        self.rows: int = core.rows
        """Rows of this rank."""
        self.sequences: tuple[int, ...] = tuple(core.sequences)
        """The group's sequences, as indices of ``plan.lengths``."""
        self.lengths: tuple[int, ...] = tuple(core.lengths)
        """Tokens of each of them."""
        self.cu_seqlens: Tensor = _tensor(core.cu_seqlens, torch.int32)
        """int32 (sequences + 1,): local rows of each sequence, summed."""
        self.positions: Tensor = _tensor(core.positions, torch.int64)
        """int64 (rows,): each row's place in its sequence."""
        self._core = core

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The rank's rows, end to end, as runs of tokens."""
        return tuple(Span(*span) for span in self._core.spans)


def _tensor(view: memoryview, dtype: torch.dtype) -> Tensor:
    if view.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype)


def rows_may_vary(tensor: Tensor) -> Tensor:
    """Tell a compiler in use that dim 0 differs from plan to plan, so that one graph serves all."""
    dynamo = sys.modules.get("torch._dynamo")  # there once torch.compile was called
    mark = getattr(dynamo, "maybe_mark_dynamic", None)  # not yet, while another thread imports it
    if mark is not None:
        mark(tensor, 0)
    return tensor


class _Table:
    """Named sections of a table's words."""

    SECTIONS: Sequence[tuple[str, int]]

    def __init__(self, words: Tensor) -> None:
        self.words = words
        self._heads = words[2 : 2 + 2 * len(self.SECTIONS)].tolist()

    def section(self, name: str) -> Tensor:
        """Records of a section: int64 (records, width), a view of the words."""
        index, width = next(
            (i, width) for i, (key, width) in enumerate(self.SECTIONS) if key == name
        )
        start, records = self._heads[2 * index : 2 * index + 2]
        return self.words[start : start + records * width].view(records, width)

    def moves(self, name: str) -> list[Move]:
        return [Move(*record) for record in self.section(name).tolist()]


class Route(_Table):
    """How rows get from a source to an output: packed, sent, received, arranged."""

    SECTIONS = _core.ROUTE_SECTIONS

    def __init__(self, words: memoryview) -> None:
        super().__init__(_tensor(words, torch.int64))
        sizes = self.section("SIZES").tolist()[0]
        self.source_rows, self.sent_rows, self.received_rows, self.output_rows = sizes
        self.pack = self.section("PACK")
        self.sends = self.moves("SENDS")
        self.receives = self.moves("RECEIVES")
        self.arrange = self.section("ARRANGE")
        self.agreed: set[tuple[int, ...]] = set()
        """Traits of rows that the ranks have found equal: see ``exchange.agree_once``."""

    @classmethod
    def dispatch(
        cls, plan: Plan, sources: Sequence[int], rank: int, first: int, count: int, *, reverse: bool
    ) -> Route:
        """Rows of ``count`` micro-batches from where they were loaded to where they are computed,
        or (``reverse``) back."""
        return cls(plan.core.route_dispatch(sources, rank, first, count, reverse))

    @classmethod
    def roll(cls, plan: Plan, micro_batch: int, rank: int, shift: int) -> Route:
        """Rows of a micro-batch shifted along their sequences."""
        return cls(plan.core.route_roll(micro_batch, rank, shift))


class Entry(NamedTuple):
    """One block of attention: query rows against key rows of the stage. Query q of the entry sees
    its key k when low <= k - q <= high."""

    query_row: int
    query_rows: int
    key_row: int
    key_rows: int
    low: int
    high: int

    @property
    def window(self) -> tuple[int, int]:
        """FlashAttention's window, aligned bottom right: (-1, -1) is full, (-1, 0) causal."""
        ahead = self.key_rows - self.query_rows
        left = -1 if self.low <= 1 - self.query_rows else ahead - self.low
        right = -1 if self.high >= self.key_rows - 1 else self.high - ahead
        return left, right


class Stage(NamedTuple):
    """Keys that arrive together, and the entries that attend to them."""

    pack: Tensor
    """Empty: the keys of the stage before are forwarded."""
    sends: list[Move]
    receives: list[Move]
    arrange: Tensor
    """Empty: the received rows are the keys, as they arrive."""
    entries: list[Entry]
    first_entry: int
    sent_rows: int
    received_rows: int
    key_rows: int


class Schedule(_Table):
    """The steps of one attention layer on one rank."""

    SECTIONS = _core.SCHEDULE_SECTIONS

    def __init__(self, words: Tensor) -> None:
        super().__init__(words)
        sizes = self.section("SIZES").tolist()[0]
        self.rows, self.home_sent_rows, self.home_received_rows, *kind = sizes
        self.kind = tuple(kind)
        """Comm type and mask, as numbers."""
        self.output_runs = self.section("OUTPUT_RUNS")
        self.home_runs = self.section("HOME_RUNS")
        self.local_runs = self.section("LOCAL_RUNS")
        self.home_sends = self.moves("HOME_SENDS")
        self.home_receives = self.moves("HOME_RECEIVES")
        self.stages = self._stages()
        self.calls: dict[object, object] = {}
        """The entries as calls of each kernel that has computed them: see ``hcp.attention``."""
        self.agreed: set[tuple[int, ...]] = set()
        """Traits of calls that the ranks have found equal: see ``exchange.agree_once``."""

    @property
    def sends(self) -> list[Move]:
        return [move for stage in self.stages for move in stage.sends]

    @property
    def receives(self) -> list[Move]:
        return [move for stage in self.stages for move in stage.receives]

    @property
    def query_rows(self) -> int:
        """Rows that the entries' queries count in: the local rows, or for "a2a" whole
        sequences."""
        return self.stages[0].key_rows

    @property
    def trades_heads(self) -> bool:
        """Whether each rank computes whole sequences of some heads."""
        return bool(_core.COMM_TYPES[self.kind[0]] == "a2a")

    @property
    def transport_key(self) -> int:
        """Which transport the schedule runs on: see ``exchange.transport_of``."""
        return int(self.words[1])

    def _stages(self) -> list[Stage]:
        pack, arrange = self.section("PACK"), self.section("ARRANGE")
        sends, receives = self.moves("SENDS"), self.moves("RECEIVES")
        entries = [Entry(*record) for record in self.section("ENTRIES").tolist()]
        stages = []
        begin = [0] * 5
        for *end, sent_rows, received_rows, key_rows in self.section("STAGES").tolist():
            stages.append(
                Stage(
                    pack=pack[begin[0] : end[0]],
                    sends=sends[begin[1] : end[1]],
                    receives=receives[begin[2] : end[2]],
                    arrange=arrange[begin[3] : end[3]],
                    entries=entries[begin[4] : end[4]],
                    first_entry=begin[4],
                    sent_rows=sent_rows,
                    received_rows=received_rows,
                    key_rows=key_rows,
                )
            )
            begin = end
        return stages


def schedule_words(
    plan: Plan,
    micro_batch: int,
    rank: int,
    comm_type: str,
    *,
    window_size: tuple[int, int],
    transport_key: int,
) -> Tensor:
    """The schedule as one tensor, int64 (words,), which names itself (word 0, a serial number) and
    the transport it runs on (word 1). ``window_size``: FlashAttention's; (-1, 0) is causal."""
    words = _tensor(plan.core.schedule(micro_batch, rank, comm_type, *window_size), torch.int64)
    words[0] = next(_serials)
    words[1] = transport_key
    return rows_may_vary(words)


_schedules: weakref.WeakValueDictionary[int, Schedule] = weakref.WeakValueDictionary()


def schedule_of(words: Tensor) -> Schedule:
    """The schedule that a tensor of words holds: read once for as long as somebody keeps it, as a
    handler does, and again in a backward that outlives its handler. The words say everything."""
    serial = int(words[0])
    schedule = _schedules.get(serial)
    if schedule is None:
        schedule = _schedules[serial] = Schedule(words)
    return schedule
