"""The ranks of a group that have rows are those whose layouts have."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hcp
from hcp.exchange.layout import Layout, ranks_with_rows


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from([1, 4]),
    st.data(),
)
def test_ranks_with_rows_are_those_whose_layouts_have(
    lengths: list[int], ranks: int, alignment: int, data: st.DataObject
) -> None:
    degree = data.draw(st.integers(1, ranks))
    masks = [hcp.Mask.full(length) for length in lengths] if data.draw(st.booleans()) else None
    given = {"ranks": ranks, "max_tokens_per_rank": 64, "alignment": alignment, "masks": masks}
    plan = hcp.plan(lengths, min_degree=degree, **given)
    for micro_batch in range(len(plan.micro_batches)):
        layouts = [Layout(plan, micro_batch, rank) for rank in range(ranks)]
        for layout in layouts:
            group = layouts[layout.first_rank : layout.first_rank + layout.degree]
            assert ranks_with_rows(layout) == tuple(x.rank for x in group if x.rows)


def test_a_rank_outside_the_plan_is_refused() -> None:
    plan = hcp.plan([8], ranks=2, max_tokens_per_rank=8)
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        plan.core.ranks_with_rows(0, 2)
