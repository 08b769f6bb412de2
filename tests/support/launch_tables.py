"""The tables of ``hcp.attention.kernel_calls`` in slow and obvious Python, from a schedule's
objects."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hcp
from hcp.attention.kernel_calls import WAITING, GradientReturn
from hcp.attention.kernels import Launch
from hcp.exchange.tables import Entry, Move, PeerRead, Schedule, Stage


class Launches(NamedTuple):
    """Launches of each stage, and the tables of rows that they take and give."""

    stages: list[list[Launch]]
    number: int
    """The number of launches in all stages."""
    query_cuts: Tensor | None
    """int64 (launches of all stages, 2) of (row, rows): their queries. None: all of them."""
    key_cuts: list[Tensor | None]
    """Their keys, by stage. None, for keys that lie here: all of them."""
    running_runs: list[Tensor | None]
    """By stage: what its launches and those that wait gave goes into a total when it ends, by these
    runs, whose parts are these launches. None: they wait."""
    output_runs: Tensor
    """The same of the launches that no total has when the last stage ends."""
    sunk_runs: Tensor
    """``output_runs`` with the sinks as one more part, after the launches."""
    return_runs: Tensor
    local_runs: Tensor
    one_launch: bool
    """Whether a single launch computes all rows on all keys, which lie here: nothing is merged or
    summed."""


def each_alone(entries: Sequence[Entry]) -> list[Launch]:
    """One launch an entry."""
    return [Launch([entry]) for entry in entries]


def in_packs(entries: Sequence[Entry]) -> list[Launch]:
    """Each entry in the first launch that takes it."""
    packs: list[list[Entry]] = []
    for entry in entries:
        fitting = next((pack for pack in packs if _accepts(Launch(pack), entry)), None)
        if fitting is None:
            packs.append([entry])
        else:
            fitting.append(entry)
    return [Launch(pack) for pack in packs]


def _accepts(launch: Launch, entry: Entry) -> bool:
    return (
        entry.window == launch.window
        and entry.query_row >= launch.queries.stop
        and entry.key_row >= launch.keys.stop
    )


def launches_of(schedule: Schedule, packs: bool) -> Launches:
    """A schedule's launches of a kernel."""
    group = in_packs if packs else each_alone
    stages = [group(stage.entries) for stage in schedule.stages]
    # Of each entry: its launch, and where its queries and its keys start there.
    places: list[tuple[int, int, int]] = []
    number = 0
    for stage, launches in zip(schedule.stages, stages, strict=True):
        found: dict[Entry, tuple[int, int, int]] = {}
        for launch in launches:
            for entry in launch.entries:
                query = entry.query_row - launch.queries.start
                found[entry] = (number, query, entry.key_row - launch.keys.start)
            number += 1
        places += [found[entry] for entry in stage.entries]
    # Returned gradients are one more part, after the entries and the launches of stage 0.
    local = [*places[: len(schedule.stages[0].entries)], (len(stages[0]), 0, 0)]
    running_runs, output_runs, left = _running(
        _renumber(schedule.section("OUTPUT_RUNS"), places, 1),
        [len(launches) for launches in stages],
    )
    local_runs = _renumber(schedule.section("LOCAL_RUNS"), local, 2)
    rows = schedule.query_rows
    all_local = number == len(schedule.stages) == 1
    queries = _cuts([launch.queries for launches in stages for launch in launches])
    own, *others = [_cuts([launch.keys for launch in launches]) for launches in stages]
    return Launches(
        stages,
        number,
        _unless_all(queries, rows),
        [_unless_all(own, rows), *others],
        running_runs,
        output_runs,
        _with_sinks(output_runs, left, rows),
        _renumber(schedule.section("RETURN_RUNS"), places, 2),
        local_runs,
        all_local and _covers(output_runs, rows) and _covers(local_runs, rows),
    )


def _cuts(chosen: Sequence[slice]) -> Tensor:
    cuts = [(part.start, part.stop - part.start) for part in chosen]
    return torch.tensor(cuts, dtype=torch.int64, device="cpu").view(-1, 2)


def _unless_all(cuts: Tensor, rows: int) -> Tensor | None:
    return None if bool((cuts[:, 1] == rows).all()) else cuts


def _covers(runs: Tensor, rows: int) -> bool:
    """Whether runs of one part are that part, row by row."""
    in_place = bool((runs[:, 0] == runs[:, 3]).all())
    return in_place and int(runs[:, 1].sum()) == rows


def _renumber(runs: Tensor, places: list[tuple[int, int, int]], offset: int) -> Tensor:
    """Runs over entries as runs over launches: the part, and where it starts in there."""
    if len(runs) == 0:
        return runs
    table = torch.tensor(places, device="cpu")[runs[:, 2]]
    return torch.stack([runs[:, 0], runs[:, 1], table[:, 0], runs[:, 3] + table[:, offset]], 1)


_TOGETHER = 3


def _running(runs: Tensor, numbers: list[int]) -> tuple[list[Tensor | None], Tensor, int]:
    """The runs of the launches that go into a total after each stage, those of the launches that
    are left after the last one, and how many these are. ``numbers``: of launches, by stage."""
    busy = [stage for stage, number in enumerate(numbers) if number > 0]
    ends = busy[_TOGETHER - 1 : -1 : _TOGETHER] if len(busy) > WAITING else []
    running: list[Tensor | None] = [None] * len(numbers)
    first = 0
    for stage in ends:
        after = sum(numbers[: stage + 1])
        running[stage] = _of_parts(runs, first, after)
        first = after
    return running, _of_parts(runs, first, sum(numbers)), sum(numbers) - first


def _of_parts(runs: Tensor, first: int, after: int) -> Tensor:
    """The records of parts [first, after), counted from the first of them."""
    chosen = runs[(runs[:, 2] >= first) & (runs[:, 2] < after)]
    return chosen - chosen.new_tensor([0, 0, first, 0])


def _with_sinks(runs: Tensor, part: int, rows: int) -> Tensor:
    """One more part, of ``rows`` rows, in every run, and for the rows that no run names."""
    starts = runs[torch.cat([runs.new_ones(1).bool(), runs[1:, 0] != runs[:-1, 0]])[: len(runs)]]
    begins = torch.cat([runs.new_zeros(1), starts[:, 0] + starts[:, 1]])
    ends = torch.cat([starts[:, 0], runs.new_full((1,), rows)])
    gaps = torch.stack([begins, ends - begins], 1)[ends > begins]
    own = torch.cat([starts[:, :2], gaps])
    extra = torch.stack([own[:, 0], own[:, 1], torch.full_like(own[:, 0], part), own[:, 0]], 1)
    both = torch.cat([runs, extra])
    return both[both[:, 0].sort(stable=True).indices]


def key_owners(schedule: Schedule) -> dict[int, int]:
    """Local rows of each rank that keys come from, this one among them."""
    return dict(schedule.section("KEY_OWNERS").tolist())


def gradient_return_of(schedule: Schedule, launches: Launches, rank: int) -> GradientReturn:
    """What a rank stages for others, and reads of what they staged."""

    def start(stager: int, owner: int) -> int:
        return sum(n for peer, n in key_owners(schedule).items() if peer < owner and peer != stager)

    def shifted(rows: Tensor, moves: list[Move], starts: list[int]) -> tuple[Tensor, Tensor]:
        """The move that each row belongs to, and the row counted from that move's start."""
        firsts = torch.tensor([move.row for move in moves], device="cpu")
        move = torch.searchsorted(firsts, rows, right=True) - 1
        return move, rows - firsts[move] + torch.tensor(starts, device="cpu")[move]

    sends = sorted(schedule.return_sends, key=lambda move: move.row)
    staged = launches.return_runs
    if sends:
        _, rows = shifted(
            staged[:, 0].contiguous(), sends, [start(rank, move.peer) for move in sends]
        )
        staged = torch.cat([rows.unsqueeze(1), staged[:, 1:]], 1)
        staged = staged[rows.sort(stable=True).indices]
    receives = sorted(schedule.return_receives, key=lambda move: move.row)
    local = len(launches.stages[0])
    runs = launches.local_runs.clone()
    home = runs[:, 2] == local
    if receives:
        starts = [start(move.peer, rank) for move in receives]
        move, rows = shifted(runs[home, 3], receives, starts)
        runs[home, 2], runs[home, 3] = local + move, rows
    total = sum(key_owners(schedule).values())
    return GradientReturn(
        total - schedule.query_rows,
        staged,
        sorted(move.peer for move in sends),
        PeerRead(
            [(move.peer, total - key_owners(schedule)[move.peer]) for move in receives],
            runs,
            schedule.query_rows,
            [move.peer for move in receives],
        ),
    )


# ---- reads ---------------------------------------------------------------------------------------


def reads_of(schedule: Schedule) -> list[PeerRead | None]:
    """The rows that each stage reads from the memory of the keys' owners; None: nothing."""
    owners = [sorted(set(stage.pulls[:, 2].tolist())) for stage in schedule.stages]
    reads: list[PeerRead | None] = []
    for i, (stage, own) in enumerate(zip(schedule.stages, owners, strict=True)):
        later = set(itertools.chain.from_iterable(owners[i + 1 :]))
        reads.append(_read(schedule, stage, own, later) if stage.attends and own else None)
    return reads


def _read(schedule: Schedule, stage: Stage, owners: list[int], later: set[int]) -> PeerRead:
    parts = torch.searchsorted(torch.tensor(owners), stage.pulls[:, 2].contiguous())
    return PeerRead(
        [(peer, key_owners(schedule)[peer]) for peer in owners],
        torch.stack([*stage.pulls.t()[:2], parts, stage.pulls[:, 3]], 1),
        stage.key_rows,
        [peer for peer in owners if peer not in later],
    )


def read_of_all(reads: Sequence[PeerRead]) -> PeerRead:
    """The rows of several reads of an exchange at once, those of one after the other's."""
    held = dict(sorted(owner for read in reads for owner in read.owners))
    places = {peer: i for i, peer in enumerate(held)}
    runs, rows = [torch.empty(0, 4, dtype=torch.int64)], 0
    for read in reads:
        parts = torch.tensor([places[peer] for peer, _ in read.owners])
        row, count, part, part_row = read.runs.unbind(1)
        runs.append(torch.stack([row + rows, count, parts[part], part_row], 1))
        rows += read.rows
    done = sorted(peer for read in reads for peer in read.done)
    return PeerRead([*held.items()], torch.cat(runs), rows, done)


def key_cuts_of_all(reads: Sequence[PeerRead | None], key_cuts: Sequence[Tensor | None]) -> Tensor:
    """The keys of the launches of all stages that read some, in the rows of that read."""
    cuts, row = [torch.empty(0, 2, dtype=torch.int64)], 0
    for read, own in zip(reads, key_cuts, strict=True):
        if read is not None and own is not None:
            cuts.append(own + own.new_tensor([row, 0]))
            row += read.rows
    return torch.cat(cuts)


# ---- drawn plans ---------------------------------------------------------------------------------


def drawn_plan(rng: random.Random, most_ranks: int) -> hcp.Plan:
    """With or without masks, padding, nodes and pipeline stages, of forced or free degrees."""
    ranks = rng.choice([n for n in (1, 2, 3, 4, 6, 8, 16, 64) if n <= most_ranks])
    lengths = [rng.randint(1, rng.choice([8, 90, 400])) for _ in range(rng.randint(1, 6))]
    degree = ranks if rng.random() < 0.7 else 1
    limits: dict[str, Any] = {"max_tokens_per_rank": max(lengths) + 8, "min_degree": degree}
    node = rng.choice([n for n in (1, 2, 4, 8) if ranks % n == 0])
    if node > 1:
        limits["ranks_per_node"] = node
    if rng.random() < 0.2:
        limits["pipeline_stages"] = 2
    if rng.random() < 0.4:
        limits["masks"] = [drawn_mask(rng, n) for n in lengths]
    return hcp.plan(lengths, ranks=ranks, alignment=rng.choice([1, 4]), **limits)


def drawn_mask(rng: random.Random, tokens: int) -> hcp.Mask:
    cut = sorted({0, *rng.choices(range(tokens), k=rng.randrange(4)), tokens})
    return hcp.Mask.documents([b - a for a, b in itertools.pairwise(cut)])
