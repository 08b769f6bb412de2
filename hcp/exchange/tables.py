"""The tables that say who sends what to whom.

The C core builds every table; here their sections get names. A table is one block of 64-bit words,
hence one tensor, which may travel through a compiled model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hcp import _core
from hcp.exchange.layout import buffer_of, rows_may_vary, tensor_of
from hcp.exchange.sizes import STAGE_TOKENS as STAGE_TOKENS
from hcp.planning.plan import Plan

_serials = itertools.count(1)


class Move(NamedTuple):
    """Rows of a buffer that are sent to, or received from, a rank of the domain."""

    peer: int
    row: int
    rows: int


class Origin(NamedTuple):
    """The micro-batch that a call belongs to, the same on all ranks."""

    plan: int
    """The plan's checksum."""
    step: int
    """The step's number among those that the domain has dispatched. 0 for a handler of no step."""
    micro_batch: int


class Sections:
    """Named sections of a table's words."""

    SECTIONS: tuple[tuple[str, int], ...]
    PLACES: Mapping[str, tuple[int, int]]
    """The number of each section, by name, and the words of a record of it."""

    def __init__(self, words: Tensor) -> None:
        """Raises ValueError for words that are no such table."""
        self.words = words
        self._found = self._find_sections()

    def _find_sections(self) -> Sequence[tuple[int, int, int]]:
        """(first word, end, records) of each section."""
        return _core.read_table(buffer_of(self.words), self.SECTIONS)

    def section(self, name: str) -> Tensor:
        """Records of a section: int64 (records, width), a view of the words."""
        number, width = self.PLACES[name]
        first, end, _ = self._found[number]
        return self.words[first:end].view(-1, width)

    def records(self, name: str) -> list[list[int]]:
        """The same as lists. Most are empty on a rank that computes alone."""
        return self.section(name).tolist() if self.count(name) else []

    def count(self, name: str) -> int:
        """Number of records of a section."""
        return self._found[self.PLACES[name][0]][2]

    def moves(self, name: str) -> list[Move]:
        return [Move(*record) for record in self.records(name)]


def places(sections: Sequence[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    return {name: (index, width) for index, (name, width) in enumerate(sections)}


class PathTable(Sections):
    """The way of rows from a source to an output: packed, sent, received, arranged. See
    ``move.Path``."""

    def __init__(self, words: memoryview) -> None:
        super().__init__(tensor_of(words, torch.int64))
        sizes = self.section("SIZES").tolist()[0]
        self.source_rows, self.sent_rows, self.received_rows, self.output_rows = sizes
        self.pack = self.section("PACK")
        self.sends = self.moves("SENDS")
        self.receives = self.moves("RECEIVES")
        self.arrange = self.section("ARRANGE")
        self.agreed: set[int] = set()
        """See ``agreement.Moves``."""


class Route(PathTable):
    """The way of a micro-batch's rows: to or from the ranks that compute them, or shifted."""

    SECTIONS = _core.ROUTE_SECTIONS
    PLACES = places(SECTIONS)

    @property
    def parts(self) -> list[int]:
        """The output's rows of each micro-batch, where the route serves several."""
        rows: list[int] = self.section("PARTS").flatten().tolist()
        return rows

    @classmethod
    def dispatch(
        cls, plan: Plan, sources: Sequence[int], rank: int, first: int, count: int, *, reverse: bool
    ) -> Route:
        """Rows of ``count`` micro-batches from where they were loaded to where they are computed,
        or (``reverse``) back."""
        return cls(plan.core.route_dispatch(sources, rank, first, count, reverse))

    @classmethod
    def by_sequence(cls, plan: Plan, sources: Sequence[int], micro_batch: int, rank: int) -> Route:
        """A row of each sequence, from the first rank of its group to where it was loaded."""
        return cls(plan.core.route_by_sequence(sources, micro_batch, rank))

    @classmethod
    def roll(cls, plan: Plan, micro_batch: int, rank: int, shift: int) -> Route:
        """Rows of a micro-batch shifted along their documents."""
        return cls(plan.core.route_roll(micro_batch, rank, shift))

    @classmethod
    def halo(cls, plan: Plan, micro_batch: int, rank: int, before: int) -> Route:
        """Each span, preceded by the ``before`` rows that come before it in its document."""
        return cls(plan.core.route_halo(micro_batch, rank, before))


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


class Relay(NamedTuple):
    """Rows that go on, once those of an exchange have come: keys from another node to their readers
    in this one, or summed gradients to their owners in other nodes."""

    table: Tensor
    """For keys: (row, rows) of the received rows. For gradients: runs, whose parts are the received
    and the sent rows."""
    sends: list[Move]
    receives: list[Move]
    """Into the received rows of that exchange."""
    sent_rows: int


class Stage(NamedTuple):
    """Keys that arrive together, and the entries that attend to them."""

    pack: Tensor
    packs: bool
    """Whether it has rows; else the keys of the stage before are forwarded."""
    sends: list[Move]
    receives: list[Move]
    arrange: Tensor
    arranges: bool
    """Whether it has rows; else the received rows are the keys, as they arrive."""
    blocks: Tensor
    """int64 (entries, 6): the fields of each entry."""
    pulls: Tensor
    """(row, rows, peer, peer_row): the same keys, as rows of their owners."""
    attends: bool
    """Whether it has entries."""
    sent_rows: int
    received_rows: int
    key_rows: int
    relay: Relay | None
    """None where no rows go on, or come, by another rank of the node."""

    @property
    def entries(self) -> list[Entry]:
        """The blocks as objects, made anew at each call."""
        return [Entry(*record) for record in self.blocks.tolist()]

    @property
    def sends_of_all(self) -> list[Move]:
        """All rows that are sent, relayed ones too."""
        return self.sends if self.relay is None else [*self.sends, *self.relay.sends]

    @property
    def receives_of_all(self) -> list[Move]:
        """All rows that are received, relayed ones too."""
        return self.receives if self.relay is None else [*self.receives, *self.relay.receives]


class PeerRead(NamedTuple):
    """Rows that are read at once where their owners hold them."""

    owners: list[tuple[int, int]]
    """(rank, all that it holds)."""
    runs: Tensor
    """(row, rows, part, part_row): rows that are read <- rows of those owners."""
    rows: int
    """Number of rows that are read."""
    done: list[int]
    """Those that no later read of the exchange reads."""


class HeadMoves(NamedTuple):
    """The all-to-all between neighbours, rows for heads, before the first stage; and back after the
    last."""

    receives: list[Move]
    """The rows from each of the neighbours, in order, this rank among them."""
    sends: list[Move]
    """The rows to each of the neighbours: all that this rank has."""
    gather: Tensor
    """Received rows in token order."""
    scatter: Tensor
    """Gathered rows as they were received."""
    rows: int
    """Rows of all neighbours."""
    even_sends: list[Move]
    """``sends`` with rows, where the neighbours' blocks are of one width and lie end to end."""
    even_receives: list[Move]
    """``receives`` with rows."""


def _relay(table: Tensor, sends: list[Move], receives: list[Move], rows: int) -> Relay | None:
    return Relay(table, sends, receives, rows) if sends or receives else None


class ScheduleHeader(NamedTuple):
    """The header of a schedule's words: ``hcp_schedule_header``."""

    serial: int = 0
    """A number that names it in this process. ``schedule_words`` gives it, and ``plan``."""
    transport: int = 0
    """Which transport it runs on: see ``exchange.transport_of``."""
    plan: int = 0
    """The plan's checksum, as a signed number."""
    step: int = 0
    """See ``Origin``."""
    micro_batch: int = 0
    rank: int = 0
    mask: int = -1
    """Which of the plan's, -1 in a plan without."""
    head_chunks: int = 1
    """In which heads are computed, one after the other."""
    in_place: int = 0
    """1 where ranks read keys where their owners hold them."""


class ScheduleSizes(NamedTuple):
    """What a schedule's words say beside: ``hcp_schedule_sizes``."""

    rows: int
    """Of this rank."""
    return_sent_rows: int
    return_received_rows: int
    return_relayed_rows: int
    comm_type: int
    """The number of its name."""
    inner: int
    left: int
    right: int
    query_rows: int
    """Rows that the entries' queries count in: the local rows, or those of all neighbours."""
    staged_rows: int
    """At most so many rows does any rank stage for the others to read, keys or their gradients."""


class Schedule(Sections):
    """The steps of one attention layer on one rank. A section is read when somebody asks for it."""

    SECTIONS = _core.SCHEDULE_SECTIONS
    PLACES = places(SECTIONS)

    def _find_sections(self) -> Sequence[tuple[int, int, int]]:
        found, header, numbers = _core.read_schedule(buffer_of(self.words))
        self.header, sizes = ScheduleHeader(*header), ScheduleSizes(*numbers)
        self.rows, self.query_rows, self.inner = sizes.rows, sizes.query_rows, sizes.inner
        self.return_sent_rows = sizes.return_sent_rows
        self.return_received_rows = sizes.return_received_rows
        self.staged_rows = sizes.staged_rows
        self._return_relayed_rows = sizes.return_relayed_rows
        self.comm_type = _core.COMM_TYPES[sizes.comm_type]
        self.window = sizes.left, sizes.right
        """(left, right), as FlashAttention has it."""
        return found

    @cached_property
    def return_sends(self) -> list[Move]:
        return self.moves("RETURN_SENDS")

    @cached_property
    def return_receives(self) -> list[Move]:
        return self.moves("RETURN_RECEIVES")

    @cached_property
    def return_relay(self) -> Relay | None:
        """None where no owner of keys is in another node, or the borders of nodes do not count."""
        return _relay(
            self.section("RETURN_RELAY_RUNS"),
            self.moves("RETURN_RELAY_SENDS"),
            self.moves("RETURN_RELAY_RECEIVES"),
            self._return_relayed_rows,
        )

    @cached_property
    def readers(self) -> list[int]:
        """Ranks that read local rows, ascending."""
        return sorted({move.peer for move in self.return_receives})

    @cached_property
    def whole_run(self) -> Tensor:
        """All local rows as they are, as runs of one part."""
        return torch.tensor([[0, self.query_rows, 0, 0]], device="cpu")

    @property
    def sends(self) -> list[Move]:
        heads = self.head_moves.sends if self.head_moves else []
        return [*heads, *(move for stage in self.stages for move in stage.sends_of_all)]

    @property
    def receives(self) -> list[Move]:
        heads = self.head_moves.receives if self.head_moves else []
        return [*heads, *(move for stage in self.stages for move in stage.receives_of_all)]

    @property
    def origin(self) -> Origin:
        return Origin(self.header.plan % 2**64, self.header.step, self.header.micro_batch)

    @property
    def callers(self) -> tuple[int, ...]:
        """The ranks that compare its calls, beyond those that exchange rows."""
        return tuple(self.section("CALLERS").flatten().tolist())

    @cached_property
    def head_moves(self) -> HeadMoves | None:
        """None where rows stay."""
        receives, rows = self.moves("HEAD_RECEIVES"), self.rows
        if not receives:
            return None
        return HeadMoves(
            receives,
            [Move(peer, 0, rows) for peer, _, _ in receives],
            self.section("GATHER"),
            self.section("SCATTER"),
            self.query_rows,
            [Move(peer, i * rows, rows) for i, (peer, *_) in enumerate(receives)] if rows else [],
            [move for move in receives if move.rows],
        )

    @cached_property
    def stages(self) -> list[Stage]:
        pack, arrange, blocks = (self.section(name) for name in ("PACK", "ARRANGE", "ENTRIES"))
        pulls, relay_pack = self.section("PULLS"), self.section("RELAY_PACK")
        sends, receives = self.moves("SENDS"), self.moves("RECEIVES")
        relay_sends, relay_receives = self.moves("RELAY_SENDS"), self.moves("RELAY_RECEIVES")
        stages = []
        begin = [0] * 9
        for *end, sent_rows, received_rows, key_rows, relayed in self.section("STAGES").tolist():
            stages.append(
                Stage(
                    pack=pack[begin[0] : end[0]],
                    packs=end[0] > begin[0],
                    sends=sends[begin[1] : end[1]],
                    receives=receives[begin[2] : end[2]],
                    arrange=arrange[begin[3] : end[3]],
                    arranges=end[3] > begin[3],
                    blocks=blocks[begin[4] : end[4]],
                    attends=end[4] > begin[4],
                    pulls=pulls[begin[5] : end[5]],
                    sent_rows=sent_rows,
                    received_rows=received_rows,
                    key_rows=key_rows,
                    relay=_relay(
                        relay_pack[begin[6] : end[6]],
                        relay_sends[begin[7] : end[7]],
                        relay_receives[begin[8] : end[8]],
                        relayed,
                    ),
                )
            )
            begin = end
        return stages


def schedule_words(
    plan: Plan,
    header: ScheduleHeader,
    comm_type: str,
    *,
    inner: int = 1,
    window_size: tuple[int, int],
    by_nodes: bool = False,
) -> Tensor:
    """The schedule that a header names, as one tensor, int64 (words,), which begins with it.
    ``inner``: how many neighbours exchange rows for heads, a divisor of the degree, for "a2a+p2p".
    ``window_size``: FlashAttention's; (-1, 0) is causal. ``by_nodes``: whether rows cross each
    border of the plan's nodes once, and are relayed inside of them."""
    table = plan.core.schedule(
        header.micro_batch,
        header.rank,
        comm_type,
        inner,
        *window_size,
        STAGE_TOKENS,
        header.mask,
        by_nodes,
        serial=next(_serials),
        transport=header.transport,
        step=header.step,
        head_chunks=header.head_chunks,
        checksum=plan.checksum,
        in_place=bool(header.in_place),
    )
    return rows_may_vary(tensor_of(table, torch.int64))
