"""The rows of a rank: zigzag chunks of any length, by the definition."""

from __future__ import annotations

import gc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from support.plan_prices import chunks_of, rows_held, turns_of

import hcp
from hcp.exchange.layout import Layout


def one_group(lengths: list[int], degree: int, first_rank: int = 0) -> hcp.Plan:
    group = {
        "first_rank": first_rank,
        "degree": degree,
        "sequences": list(range(len(lengths))),
    }
    return hcp.Plan.from_dict(
        {
            "ranks": first_rank + degree + 1,
            "max_tokens_per_rank": sum(lengths) + 2 * len(lengths),
            "lengths": lengths,
            "micro_batches": [{"groups": [group]}],
        }
    )


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 9))
def test_rank_j_holds_chunks_j_and_2d_minus_1_minus_j(lengths: list[int], degree: int) -> None:
    plan = one_group(lengths, degree, first_rank=1)
    turns = turns_of(lengths, degree)
    chunks = [chunks_of(n, degree, turn) for n, turn in zip(lengths, turns, strict=True)]
    for j in range(degree):
        layout = Layout(plan, 0, 1 + j)
        held = [[*own[j], *own[2 * degree - 1 - j]] for own in chunks]
        assert layout.positions.tolist() == [token for own in held for token in own]
        assert layout.rows == sum(map(len, held))
        assert layout.cu_seqlens.tolist() == [
            sum(map(len, held[:s])) for s in range(len(lengths) + 1)
        ]
        assert (layout.degree, layout.first_rank) == (degree, 1)
        assert layout.lengths == tuple(lengths)


@given(
    st.one_of(
        st.lists(st.integers(1, 60), min_size=1, max_size=40),
        st.tuples(st.integers(1, 60), st.integers(1, 90)).map(lambda drawn: [drawn[0]] * drawn[1]),
    ),
    st.integers(1, 9),
)
def test_no_rank_is_two_rows_from_its_share_for_each_way_of_rounding(
    lengths: list[int], degree: int
) -> None:
    """k sequences with one rest fill k neighbouring chunks, each of which is less than a row from
    its share, and a rank has two chunks."""
    plan = one_group(lengths, degree)
    rows = [Layout(plan, 0, rank).rows for rank in range(degree)]
    rests = {length % (2 * degree) for length in lengths} - {0}
    for own in rows:
        assert abs(own * degree - sum(lengths)) <= 2 * len(rests) * degree, (rows, rests)
    fullest = [max(rows_held(n, degree, j) for j in range(degree)) for n in lengths]
    assert max(rows) <= sum(fullest), "more than the plan's limits count"


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 3))
def test_equal_sequences_once_round_leave_all_ranks_the_same(
    length: int, degree: int, rounds: int
) -> None:
    plan = one_group([length] * (2 * degree * rounds), degree)
    assert {Layout(plan, 0, rank).rows for rank in range(degree)} == {2 * length * rounds}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 9))
def test_whole_chunks_lie_alike_in_all_sequences(counts: list[int], degree: int) -> None:
    lengths = [2 * degree * n for n in counts]
    plan = one_group(lengths, degree)
    for j in range(degree):
        alone = [Layout(one_group([n], degree), 0, j).positions.tolist() for n in lengths]
        assert Layout(plan, 0, j).positions.tolist() == [t for own in alone for t in own]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 9))
def test_every_token_is_held_once_in_maximal_spans(lengths: list[int], degree: int) -> None:
    plan = one_group(lengths, degree)
    held: list[tuple[int, int]] = []
    for rank in range(degree):
        layout = Layout(plan, 0, rank)
        for sequence, start, rows in layout.spans:
            assert rows >= 1
            held += [(sequence, token) for token in range(start, start + rows)]
        for a, b in pairwise(layout.spans):
            assert a.sequence < b.sequence or a.start + a.rows < b.start
    assert sorted(held) == [(s, t) for s, length in enumerate(lengths) for t in range(length)]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 16))
def test_alignment_adds_rows_behind_all_sequences(
    lengths: list[int], degree: int, alignment: int
) -> None:
    data = one_group(lengths, degree).to_dict()
    plain = hcp.Plan.from_dict(data)
    room = data["max_tokens_per_rank"] + 16
    padded = hcp.Plan.from_dict(data | {"alignment": alignment, "max_tokens_per_rank": room})
    added = []
    for rank in range(degree):
        layout, without = Layout(padded, 0, rank), Layout(plain, 0, rank)
        assert layout.rows % alignment == 0
        assert layout.padding == layout.rows - without.rows < alignment
        assert layout.positions.tolist() == without.positions.tolist() + [0] * layout.padding
        assert layout.cu_seqlens.tolist() == without.cu_seqlens.tolist()
        assert layout.spans == without.spans
        added.append(layout.padding)
    assert Layout(padded, 0, 0).paddings == tuple(added)
    assert padded.report().padding == sum(added)


def test_a_rank_outside_every_group_holds_nothing() -> None:
    layout = Layout(one_group([5], 2), 0, 2)
    assert (layout.rows, layout.degree, layout.spans, layout.lengths) == (0, 0, (), ())
    assert layout.cu_seqlens.tolist() == [0]
    assert layout.positions.tolist() == []


def test_tensors_outlive_the_layout_they_came_from() -> None:
    positions = Layout(one_group([1000], 1), 0, 0).positions
    gc.collect()
    assert positions.tolist() == list(range(1000))


def test_bad_places_are_refused() -> None:
    import pytest

    plan = one_group([5], 2)
    with pytest.raises(ValueError, match="micro_batch is 1, expected >= 0 and < 1 "):
        Layout(plan, 1, 0)
    with pytest.raises(ValueError, match="rank is 3, expected 0 to 2"):
        Layout(plan, 0, 3)
