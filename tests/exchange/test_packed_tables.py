"""Packed entries, blocks of ranks, kept moves and the places of sections, as the core makes them,
equal those of slow and obvious Python."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import packed_tables as slow
from support.launch_tables import drawn_plan

import hcp
from hcp import _core
from hcp.attention.block_exchange import BlockTable
from hcp.attention.kernels import Launch, PackedSizes
from hcp.exchange.layout import buffer_of, tensor_of
from hcp.exchange.tables import (
    Entry,
    Move,
    Route,
    Schedule,
    ScheduleHeader,
    ScheduleSizes,
    schedule_words,
)


def drawn_entries(rng: random.Random) -> list[Entry]:
    """Entries that ascend, with gaps or without."""
    entries, query, key = [], rng.randrange(9), rng.randrange(9)
    gaps = rng.choice([(0, 0), (0, 3), (3, 0), (2, 2)])
    for _ in range(rng.randint(1, 7)):
        query, key = query + rng.randint(0, gaps[0]), key + rng.randint(0, gaps[1])
        queries, keys = rng.randrange(9), rng.randrange(9)
        low, high = sorted((rng.randint(-12, 12), rng.randint(-12, 12)))
        entries.append(Entry(query, queries, key, keys, low, high))
        query, key = query + queries, key + keys
    return entries


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_packed_entries_equal_those_of_slow_python(seed: int) -> None:
    rng = random.Random(seed)
    entries = drawn_entries(rng)
    launch = Launch(entries)
    sequences = len(entries) + rng.randrange(5)
    packed = launch.packed(sequences)
    assert list(packed.sizes) == slow.packed_sizes(entries)
    assert packed.section("BOUNDS").tolist() == slow.bounds_of(entries)
    assert packed.places().tolist() == slow.places_of(entries, sequences)
    assert launch.packed().count("STARTS") == launch.packed().count("ROWS") == 0
    bounds = [list(side) for side in zip(*slow.bounds_of(entries), strict=True)]
    assert [side.tolist() for side in launch.bounds(torch.device("cpu"))] == bounds


def test_bounds_are_not_made_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be there after a replay alone, and calls outside of the graph read them, too."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launch = Launch([Entry(0, 4, 0, 4, -4, 0)])
    with pytest.raises(hcp.HcpError, match=r"first call of its kind.*run the layer once") as raised:
        launch.bounds(torch.device("cuda"))
    assert raised.value.code == "cuda-graph"


def test_sizes_of_packed_entries_have_the_names_of_the_core() -> None:
    assert PackedSizes._fields == _core.PACKED_SIZES
    assert ScheduleSizes._fields == _core.SCHEDULE_SIZES


@pytest.mark.parametrize(
    ("entries", "sequences", "message"),
    [
        ([], 0, "entries has 0 records, expected >= 1"),
        ([Entry(0, 4, 0, 4, -3, 0)] * 2, 0, "4 queries from row 0 on, expected rows from 4 on"),
        ([Entry(0, 4, 9, 4, 0, 0), Entry(4, 4, 0, 4, 0, 0)], 0, r"entries\[1\] has 4 keys"),
        ([Entry(0, -1, 0, 4, 0, 0)], 0, r"entries\[0\] has -1 queries"),
        ([Entry(2**31, 1, 0, 4, 0, 0)], 0, "below 2"),
        ([Entry(0, 2, 0, 4, 0, 0), Entry(2, 1, 4, 4, 0, 0)], 1, "sequences is 1, expected 0 or >="),
    ],
)
def test_entries_that_are_no_pack_are_refused(
    entries: list[Entry], sequences: int, message: str
) -> None:
    words = torch.tensor(entries, dtype=torch.int64, device="cpu")
    with pytest.raises(ValueError, match=message):
        _core.packed(buffer_of(words), sequences)


# ---- blocks of ranks -----------------------------------------------------------------------------


class Rank:
    """As much of a transport as a table of a block asks for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 20), st.integers(1, 12), st.data())
def test_a_block_equals_that_of_slow_python(first: int, ranks: int, data: st.DataObject) -> None:
    block = range(first, first + ranks)
    rank, rows = data.draw(st.sampled_from(block)), data.draw(st.integers(1, 99))
    table = BlockTable(Rank(rank), block, rows)  # type: ignore[arg-type]
    found = {name: table.section(name).tolist() for name, _ in _core.BLOCK_SECTIONS}
    assert found == slow.block_of(block, rank, rows)
    place = block.index(rank)
    assert table.own == slice(place * rows, (place + 1) * rows)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ((4, 2, 6, 1), "rank is 6, expected one of 2 ranks from rank 4 on"),
        ((4, 2, 3, 1), "rank is 3"),
        ((0, 0, 0, 1), "expected one of 0 ranks"),
        ((0, 2, 1, 0), "rows is 0, expected 1 to"),
    ],
)
def test_what_is_no_block_is_refused(given_: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.block(*given_)


# ---- moves of kept rows --------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_kept_moves_equal_those_of_slow_python(seed: int) -> None:
    rng = random.Random(seed)
    moves, row = [], 0
    for peer in rng.sample(range(9), rng.randrange(6)):
        rows = rng.randrange(5)
        moves.append(Move(peer, row, rows))
        row += rows
    kept = torch.tensor([rng.random() < 0.4 for _ in range(row)], dtype=torch.bool, device="cpu")
    words = torch.tensor(moves, dtype=torch.int64, device="cpu").view(-1, 3)
    found = [Move(*move) for move in _core.keep_moves(buffer_of(words), buffer_of(kept))]
    assert found == slow.kept_moves(moves, kept)


@pytest.mark.parametrize("move", [(0, 0, 4), (0, 4, 0), (0, -1, 1), (0, 1, -1), (0, 2, 2**62)])
def test_moves_of_rows_that_are_not_there_are_refused(move: tuple[int, int, int]) -> None:
    words = torch.tensor([move], device="cpu")
    with pytest.raises(ValueError, match=r"a move has -?\d+ rows from row -?\d+ on, expected <= 3"):
        _core.keep_moves(buffer_of(words), b"\1\0\1")


# ---- where sections lie --------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_what_a_schedule_says_equals_what_slow_python_reads(seed: int) -> None:
    rng = random.Random(seed)
    plan = drawn_plan(rng, 16)
    micro_batch, rank = rng.randrange(plan.micro_batch_count), rng.randrange(plan.ranks)
    window = rng.choice([(-1, 0), (-1, -1), (rng.randrange(9), rng.randrange(9)), (3, -1)])
    comm_type = rng.choice(["p2p", "all_gather", "a2a"])
    mask = 0 if plan.masks else -1
    given_ = ScheduleHeader(transport=5, micro_batch=micro_batch, rank=rank, mask=mask)
    words = schedule_words(plan, given_, comm_type, window_size=window)
    found, header, sizes = _core.read_schedule(buffer_of(words))
    count = len(_core.SCHEDULE_HEADER)
    assert found == slow.sections_of(words, count, _core.SCHEDULE_SECTIONS)
    assert list(header) == words[:count].tolist()
    names = [name for name, _ in _core.SCHEDULE_SECTIONS]
    wanted = [found[names.index(name)] for name in ("SIZES", "STAGES", "KEY_OWNERS")]
    assert list(sizes) == slow.schedule_sizes(words, wanted)
    schedule = Schedule(words)
    assert (schedule.comm_type, schedule.window) == (comm_type, (sizes[6], sizes[7]))
    if schedule.head_moves is not None:
        assert schedule.head_moves.rows == sum(x.rows for x in schedule.head_moves.receives)


def test_the_sections_of_a_route_equal_what_slow_python_reads() -> None:
    plan = hcp.plan([40, 9], ranks=4, max_tokens_per_rank=16, min_degree=4)
    route = Route.dispatch(plan, [0, 3], 1, 0, len(plan.micro_batches), reverse=False)
    found = _core.read_table(buffer_of(route.words), _core.ROUTE_SECTIONS)
    assert found == slow.sections_of(route.words, 2, _core.ROUTE_SECTIONS)


@pytest.mark.parametrize("word", [2, 3])
@pytest.mark.parametrize("value", [-1, 2**40, 2**62])
def test_a_section_outside_of_the_words_is_refused(word: int, value: int) -> None:
    words = tensor_of(_core.block(0, 4, 1, 3), torch.int64).clone()
    words[word] = value
    with pytest.raises(ValueError, match=f"words has {len(words)} items that are no table of 8"):
        _core.read_table(buffer_of(words), _core.BLOCK_SECTIONS)


def test_sections_of_any_spoiled_schedule_are_found_or_refused() -> None:
    rng = random.Random(7)
    plan = hcp.plan([64], ranks=3, max_tokens_per_rank=64, min_degree=3)
    sound = schedule_words(plan, ScheduleHeader(), "p2p", window_size=(-1, 0))
    for _ in range(2000):
        words = sound.clone()
        words[rng.randrange(len(words))] = rng.choice([-1, 0, 1, 5, 2**20, 2**55, -(2**55), 2**62])
        found: list[tuple[int, int, int]] = []
        with contextlib.suppress(ValueError):
            found, *_ = _core.read_schedule(buffer_of(words))
        assert all(0 <= first <= end <= len(words) for first, end, _ in found)
