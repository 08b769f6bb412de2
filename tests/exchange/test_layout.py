"""The rows of a rank: zigzag chunks of any length, by the definition."""

from __future__ import annotations

import gc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

import hcp
from hcp.exchange.layout import Layout


def chunks(length: int, degree: int) -> list[range]:
    cuts = [k * length // (2 * degree) for k in range(2 * degree + 1)]
    return [range(start, end) for start, end in pairwise(cuts)]


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
    for j in range(degree):
        layout = Layout(plan, 0, 1 + j)
        held = [
            [*chunks(length, degree)[j], *chunks(length, degree)[2 * degree - 1 - j]]
            for length in lengths
        ]
        assert layout.positions.tolist() == [token for own in held for token in own]
        assert layout.rows == sum(map(len, held))
        assert layout.cu_seqlens.tolist() == [
            sum(map(len, held[:s])) for s in range(len(lengths) + 1)
        ]
        assert (layout.degree, layout.first_rank) == (degree, 1)
        assert layout.lengths == tuple(lengths)


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
