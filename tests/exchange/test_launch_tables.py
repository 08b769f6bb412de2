"""The core's launches of a schedule equal those that slow and obvious Python makes."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import launch_tables as slow
from support.launch_tables import drawn_plan
from torch import Tensor

import hcp
from hcp import _core
from hcp.attention.kernel_calls import Launches, launches_of
from hcp.attention.kernels import Launch, join
from hcp.exchange.layout import Layout, buffer_of
from hcp.exchange.tables import Entry, PeerRead, Schedule, ScheduleHeader, schedule_words


class Kernel:
    """What ``launches_of`` asks a kernel."""

    def __init__(self, packs: bool) -> None:
        self.packs = packs


def plain(x: Any) -> Any:
    """Tensors as their dtype, shape and items, so that == compares everything."""
    if isinstance(x, Tensor):
        return x.dtype, tuple(x.shape), x.tolist()
    if isinstance(x, Launch):
        return list(x.entries), x.queries, x.keys, x.window
    if isinstance(x, list | tuple):
        return [plain(item) for item in x]
    return x


def check(schedule: Schedule, packs: bool) -> None:
    made: Launches = launches_of(schedule, Kernel(packs))  # type: ignore[arg-type]
    wanted = slow.launches_of(schedule, packs)
    for name in wanted._fields:
        assert plain(getattr(made, name)) == plain(getattr(wanted, name)), (name, packs)
    if schedule.header.in_place:
        check_reads(schedule, made, wanted)


def check_reads(schedule: Schedule, made: Launches, wanted: slow.Launches) -> None:
    reads = slow.reads_of(schedule)
    found: list[PeerRead] = [read for read in reads if read is not None]
    assert plain(made.reads) == plain(reads)
    assert plain(made.read_of_all) == plain(slow.read_of_all(found))
    cuts = slow.key_cuts_of_all(reads, wanted.key_cuts)
    assert plain(made.key_cuts_of_all) == plain(cuts)
    home = slow.gradient_return_of(schedule, wanted, schedule.header.rank)
    assert plain(made.gradient_return) == plain(home)


def drawn_schedule(rng: random.Random, plan: hcp.Plan) -> Schedule:
    masked = bool(plan.masks)
    comm_type = rng.choice(["p2p", "all_gather", "a2a"] if masked else _core.COMM_TYPES)
    micro_batch, rank = rng.randrange(plan.micro_batch_count), rng.randrange(plan.ranks)
    degrees = [group.degree for group in plan.micro_batches[micro_batch]]
    inner = rng.choice([n for n in range(1, 9) if all(d % n == 0 for d in degrees)])
    in_place = rng.random() < 0.6
    words = schedule_words(
        plan,
        ScheduleHeader(
            micro_batch=micro_batch, rank=rank, mask=0 if masked else -1, in_place=in_place
        ),
        comm_type,
        inner=inner,
        window_size=rng.choice([(-1, 0), (-1, -1), (7, 0), (5, 9), (60, 0), (0, 0)]),
        by_nodes=not in_place and rng.random() < 0.5,
    )
    return Schedule(words)


def check_drawn(seed: int, most_ranks: int = 64) -> None:
    rng = random.Random(seed)
    plan = drawn_plan(rng, most_ranks)
    for _ in range(3):
        schedule = drawn_schedule(rng, plan)
        for packs in (False, True):
            check(schedule, packs)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_launches_equal_those_of_slow_python(seed: int) -> None:
    check_drawn(seed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_entries_without_a_schedule_are_joined_likewise(seed: int, packs: bool) -> None:
    rng = random.Random(seed)
    entries = []
    for _ in range(rng.randrange(12)):
        queries, keys = rng.randint(1, 5), rng.randint(1, 5)
        low = 1 - queries if rng.random() < 0.5 else rng.randint(1 - queries, 0)
        place = rng.randrange(20), queries, rng.randrange(20), keys
        entries.append(Entry(*place, low, rng.randint(0, keys - 1)))
    group = slow.in_packs if packs else slow.each_alone
    assert plain(join(entries, packs=packs)) == plain(group(entries))


def test_a_total_takes_outputs_of_three_stages_where_more_than_five_compute() -> None:
    plan = hcp.plan([640], ranks=8, max_tokens_per_rank=90, min_degree=8)
    words = schedule_words(plan, ScheduleHeader(rank=7), "p2p", window_size=(-1, 0))
    runs = launches_of(Schedule(words), Kernel(packs=True)).running_runs  # type: ignore[arg-type]
    assert [i for i, own in enumerate(runs) if own is not None] == [2, 5]


def test_reads_become_one_with_the_rows_of_one_after_the_others() -> None:
    first = PeerRead([(1, 5), (4, 6)], torch.tensor([[0, 2, 1, 3], [2, 1, 0, 4]]), 3, [1])
    second = PeerRead([(0, 7), (4, 6)], torch.tensor([[0, 4, 0, 1], [4, 1, 1, 0]]), 5, [0, 4])
    read = slow.read_of_all([first, second])
    assert read.owners == [(0, 7), (1, 5), (4, 6)]
    assert read.runs.tolist() == [[0, 2, 2, 3], [2, 1, 1, 4], [3, 4, 0, 1], [7, 1, 2, 0]]
    assert (read.rows, read.done) == (8, [0, 1, 4])


# ---- what a schedule says of itself --------------------------------------------------------------


def test_a_header_says_what_the_words_are() -> None:
    assert ScheduleHeader._fields == _core.SCHEDULE_HEADER
    plan = hcp.plan([40, 9], ranks=4, max_tokens_per_rank=16, min_degree=4)
    given = ScheduleHeader(transport=7, step=5, rank=2, head_chunks=3, in_place=1)
    words = schedule_words(plan, given, "all_gather", window_size=(-1, 0))
    schedule = Schedule(words)
    assert schedule.header._replace(serial=0, plan=0) == (0, 7, 0, 5, 0, 2, -1, 3, 1)
    assert schedule.origin == (plan.checksum, 5, 0)
    assert schedule.callers == (0, 1, 2, 3)
    assert int(words[0]) == schedule.header.serial > 0


def test_ranks_without_rows_and_two_ranks_compare_nothing_more() -> None:
    for ranks, tokens, callers in ((2, 40, ()), (3, 2, (0, 2)), (4, 40, (0, 1, 2, 3))):
        plan = hcp.plan([tokens], ranks=ranks, max_tokens_per_rank=40, min_degree=ranks)
        words = schedule_words(plan, ScheduleHeader(), "p2p", window_size=(-1, 0))
        held = tuple(r for r in range(ranks) if Layout(plan, 0, r).rows)
        assert Schedule(words).callers == (held if ranks > 2 else ()) == callers


# ---- words that are no schedule ------------------------------------------------------------------


def schedule_of(ranks: int) -> Schedule:
    plan = hcp.plan([64], ranks=ranks, max_tokens_per_rank=64, min_degree=ranks)
    header = ScheduleHeader(in_place=1)
    return Schedule(schedule_words(plan, header, "p2p", window_size=(-1, 0)))


@pytest.mark.parametrize(
    ("section", "record", "field", "value", "reason"),
    [
        ("STAGES", 0, 4, 9, "a stage ends before it begins"),
        ("OUTPUT_RUNS", 0, 2, 99, "a run names an entry that is not there"),
        ("LOCAL_RUNS", 0, 2, -1, "a run names an entry that is not there"),
        ("PULLS", 0, 2, 77, "it names a rank that has no keys"),
        ("KEY_OWNERS", 0, 1, -4, "a rank has less than no rows"),
        ("ENTRIES", 0, 0, 2**60, "a number is no row"),
    ],
)
def test_a_spoiled_schedule_is_refused(
    section: str, record: int, field: int, value: int, reason: str
) -> None:
    schedule = schedule_of(4)
    schedule.section(section)[record, field] = value
    with pytest.raises(ValueError, match=f"items that are no schedule: {reason}"):
        launches_of(schedule, Kernel(packs=True))  # type: ignore[arg-type]


def test_any_spoiled_word_gives_launches_or_an_error() -> None:
    rng, sound = random.Random(4), schedule_of(3).words
    for _ in range(3000):
        words = sound.clone()
        words[rng.randrange(len(words))] = rng.choice([-1, 0, 1, 5, 2**20, 2**55, -(2**55), 2**62])
        with contextlib.suppress(ValueError):
            _core.launches(buffer_of(words), rng.random() < 0.5, 5)


def test_words_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="words has 3 bytes, expected aligned records of 8"):
        _core.launches(b"abc", True, 5)
    with pytest.raises(ValueError, match="words has 0 items that are no schedule"):
        _core.launches(b"", True, 5)
