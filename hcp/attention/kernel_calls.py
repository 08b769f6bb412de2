"""A schedule's entries as launches of a kernel, and its tables in terms of these launches. The core
makes them; here their sections get names."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hcp import _core
from hcp.attention.kernels import Kernel, Launch, LaunchTable
from hcp.exchange.layout import buffer_of, tensor_of
from hcp.exchange.tables import PeerRead, Schedule

WAITING = 5
"""The most stages whose outputs wait for the last one. They have no more bytes than those of three
and a total of twice the width."""


class Launches(LaunchTable):
    """Launches of each stage, and the tables of rows that they take and give. A section is read
    when somebody asks for it."""

    def __init__(self, words: Tensor) -> None:
        super().__init__(words)
        sizes = self.section("SIZES")[0].tolist()
        self.number, self._query_rows, whole, one, self._staged_rows = sizes
        """``number``: of the launches in all stages."""
        self.one_launch = bool(one)
        """Whether a single launch computes all rows on all keys, which lie here: nothing is merged
        or summed."""
        self.query_cuts = None if whole else self.section("QUERY_CUTS")
        """int64 (launches of all stages, 2) of (row, rows): their queries. None: all of them."""
        self._stages = [_StageEnds(*record) for record in self.records("STAGES")]

    @cached_property
    def stages(self) -> list[list[Launch]]:
        made = self.launches()
        return [made[a:b] for a, b in self._bounds("launches")]

    @cached_property
    def key_cuts(self) -> list[Tensor | None]:
        """Keys of the launches, by stage. None, for keys that lie here: all of them."""
        cuts = self._by_stage("KEY_CUTS", "launches")
        return [
            None if stage.whole_keys else own for stage, own in zip(self._stages, cuts, strict=True)
        ]

    @cached_property
    def running_runs(self) -> list[Tensor | None]:
        """By stage: what its launches and those that wait gave goes into a total when it ends, by
        these runs, whose parts are these launches. None: they wait."""
        runs = self._by_stage("RUNNING_RUNS", "running")
        return [
            own if stage.ends_total else None for stage, own in zip(self._stages, runs, strict=True)
        ]

    @cached_property
    def output_runs(self) -> Tensor:
        """The same of the launches that no total has when the last stage ends."""
        return self.section("OUTPUT_RUNS")

    @cached_property
    def sunk_runs(self) -> Tensor:
        """``output_runs`` with the sinks as one more part, after the launches."""
        return self.section("SUNK_RUNS")

    @cached_property
    def return_runs(self) -> Tensor:
        return self.section("RETURN_RUNS")

    @cached_property
    def local_runs(self) -> Tensor:
        return self.section("LOCAL_RUNS")

    # ---- rows that ranks read where their owners hold them ----

    @cached_property
    def reads(self) -> list[PeerRead | None]:
        """The rows that each stage reads from the memory of the keys' owners; None: nothing."""
        owners, runs = self.records("READ_OWNERS"), self._by_stage("READ_RUNS", "read_runs")
        return [
            _read(owners[a:b], own, stage.key_rows) if b > a else None
            for (a, b), own, stage in zip(
                self._bounds("read_owners"), runs, self._stages, strict=True
            )
        ]

    @cached_property
    def read_of_all(self) -> PeerRead:
        """The rows of all reads at once, those of one after the other's."""
        rows = sum(read.rows for read in self.reads if read is not None)
        return _read(self.records("ALL_OWNERS"), self.section("ALL_RUNS"), rows)

    @property
    def key_cuts_of_all(self) -> Tensor:
        """The keys of the launches of all stages that read some, in the rows of that read."""
        return self.section("ALL_KEY_CUTS")

    @cached_property
    def gradient_return(self) -> GradientReturn:
        read = _read(
            self.records("RETURN_OWNERS"), self.section("RETURN_READ_RUNS"), self._query_rows
        )
        readers = self.section("READERS").flatten().tolist()
        return GradientReturn(self._staged_rows, self.section("STAGED_RUNS"), readers, read)

    def _bounds(self, name: str) -> list[tuple[int, int]]:
        """Where the records of each stage begin and end."""
        ends = [getattr(stage, name) for stage in self._stages]
        return list(zip([0, *ends], ends, strict=False))

    def _by_stage(self, section: str, name: str) -> list[Tensor]:
        records = self.section(section)
        return [records[a:b] for a, b in self._bounds(name)]


class _StageEnds(NamedTuple):
    """Where the records of a stage end, and what it is."""

    launches: int
    running: int
    read_owners: int
    read_runs: int
    ends_total: int
    whole_keys: int
    key_rows: int


class GradientReturn(NamedTuple):
    """Partial gradients, staged where their owners read them. Each rank stages, for each of the
    others, as many rows as that owner has."""

    staged_rows: int
    staged_runs: Tensor
    readers: list[int]
    """Owners that staged rows are for, ascending."""
    read: PeerRead
    """The rows that this rank reads. Its parts: this rank's launches of stage 0, then the ranks
    that staged rows for it."""


def _read(owners: list[list[int]], runs: Tensor, rows: int) -> PeerRead:
    held = [(peer, count) for peer, count, _ in owners]
    return PeerRead(held, runs, rows, [peer for peer, _, done in owners if done])


def launches_of(schedule: Schedule, kernel: Kernel) -> Launches:
    """Make a schedule's launches of a kernel. Raises ValueError for words that are no schedule."""
    words = _core.launches(buffer_of(schedule.words), kernel.packs, WAITING)
    return Launches(tensor_of(words, torch.int64))
