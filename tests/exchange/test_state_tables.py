"""The core's tables of states equal tables that slow and obvious Python makes, on every rank."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state_tables import Group, levels, listed_levels, listed_path, path

import hcp
from hcp import _core
from hcp.exchange.layout import Layout, tensor_of
from hcp.exchange.states import StateTable


def table_of(layout: Layout, by_rounds: bool) -> StateTable:
    words = layout.plan.core.states(layout.micro_batch, layout.rank, by_rounds)
    return StateTable(tensor_of(words, torch.int64), by_rounds)


def check(layout: Layout) -> None:
    """All of one rank's tables."""
    group, place = Group(layout), layout.rank - layout.first_rank
    core = layout.plan.core
    assert core.states_rows(layout.micro_batch, layout.rank) == group.rows()
    for by_rounds, wanted in group.ways().items():
        table = table_of(layout, by_rounds)
        expected = [path(each, layout.first_rank, place) for each in wanted]
        assert [listed_path(each) for each in table.paths] == expected
        if by_rounds:
            own = [group.wanting(place, number) for number in range(len(wanted))]
            assert [spans.tolist() for spans in table.wanting] == own
        else:
            assert listed_levels(table) == levels(group, place)


def check_all(plan: hcp.Plan) -> None:
    for micro_batch in range(len(plan.micro_batches)):
        for rank in range(plan.ranks):
            layout = Layout(plan, micro_batch, rank)
            if layout.degree:
                check(layout)


@st.composite
def plans(draw: st.DrawFn) -> hcp.Plan:
    """Plans with and without documents in their sequences, padding, and degrees forced and free."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    rng = random.Random(draw(st.integers(0, 2**32)))
    masks = None
    if draw(st.booleans()):
        cuts = [sorted({0, *rng.choices(range(n), k=rng.randrange(4))}) for n in lengths]
        parts = [
            [b - a for a, b in zip(cut, [*cut[1:], n], strict=True)]
            for cut, n in zip(cuts, lengths, strict=True)
        ]
        masks = [hcp.Mask.documents(each) for each in parts]
    return hcp.plan(
        lengths,
        ranks=ranks,
        max_tokens_per_rank=max(lengths) + 8,
        min_degree=ranks if draw(st.booleans()) else 1,
        alignment=draw(st.sampled_from([1, 4])),
        masks=masks,
    )


@settings(max_examples=60, deadline=None)
@given(plans())
def test_tables_equal_those_of_slow_python(plan: hcp.Plan) -> None:
    check_all(plan)


def test_tables_of_many_sequences_and_ranks_equal_those_of_slow_python() -> None:
    lengths = [1, 2, 63, 64, 65, 500, 127]
    check_all(hcp.plan(lengths, ranks=32, max_tokens_per_rank=900, min_degree=32))


def test_a_rank_without_rows_is_refused() -> None:
    plan = hcp.plan([8], ranks=2, max_tokens_per_rank=8, max_degree=1)
    idle = next(rank for rank in range(2) if not Layout(plan, 0, rank).degree)
    with pytest.raises(ValueError, match=f"rank is {idle}, which has no rows in micro-batch 0"):
        plan.core.states(0, idle, False)
    assert plan.core.states_rows(0, idle) == (0, 0, 1)


def test_branches_are_refused() -> None:
    tree = hcp.Mask.tree([4, 4, 4], [-1, 0, 0])
    plan = hcp.plan([12], ranks=1, max_tokens_per_rank=12, masks=[tree])
    with pytest.raises(ValueError, match="the mask of sequence 0 has branches"):
        plan.core.states(0, 0, False)


def test_sections_have_the_names_of_the_header() -> None:
    assert [name for name, _ in _core.STATES_SECTIONS][:2] == ["PATHS", "PACK"]
