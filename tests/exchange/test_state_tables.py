"""The core's tables of states equal tables that slow and obvious Python makes, on every rank."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import masks as drawn_masks
from support.state_tables import Group, levels, listed_levels, listed_path, path

import hcp
from hcp import _core
from hcp.exchange.layout import Layout, tensor_of
from hcp.exchange.states import StateTable


def table_of(layout: Layout, by_rounds: bool) -> StateTable:
    words = layout.plan.core.states(layout.micro_batch, layout.rank, by_rounds)
    return StateTable(tensor_of(words, torch.int64), by_rounds, torch.device("cpu"))


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
    """Plans with and without documents and trees in their sequences, padding, and degrees forced
    and free."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    rng = random.Random(draw(st.integers(0, 2**32)))
    masks = None
    if draw(st.booleans()):
        cuts = [sorted({0, *rng.choices(range(n), k=rng.randrange(7))}) for n in lengths]
        parts = [
            [b - a for a, b in zip(cut, [*cut[1:], n], strict=True)]
            for cut, n in zip(cuts, lengths, strict=True)
        ]
        masks = [
            drawn_masks.tree(rng, each) if rng.random() < 0.5 else hcp.Mask.documents(each)
            for each in parts
        ]
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


def test_tables_of_a_deep_tree_equal_those_of_slow_python() -> None:
    """A map that several spans of a rank want travels once."""
    parents = [-1, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 3, 3, 2, 1, 0]
    tree = hcp.Mask.tree([9, 3, 1, 2, 30, 1, 1, 1, 1, 1, 1, 5, 4, 1, 1, 7], parents)
    for ranks in (1, 2, 3, 8):
        check_all(
            hcp.plan(
                [tree.length, 5],
                ranks=ranks,
                min_degree=ranks,
                max_tokens_per_rank=99,
                masks=[tree, None],
            )
        )


def test_a_branch_of_two_parents_is_refused() -> None:
    plan = hcp.plan([8], ranks=1, max_tokens_per_rank=8, masks=[drawn_masks.joined()])
    with pytest.raises(
        ValueError, match="of sequence 0 has branches that are no tree: expected that token 6"
    ):
        plan.core.states(0, 0, False)


def test_sections_have_the_names_of_the_header() -> None:
    assert [name for name, _ in _core.STATES_SECTIONS][:2] == ["PATHS", "PACK"]
