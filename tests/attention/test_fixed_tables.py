"""The core's tables of fixed capacity equal those that slow and obvious Python makes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fixed_tables
from support.payload_tables import result
from torch import Tensor

import hcp
from hcp.attention.fixed_capacity import Capacity, words_of


def listed(make: Callable[..., Tensor], *given_to_it: Any) -> list[int]:
    words: list[int] = make(*given_to_it).tolist()
    return words


def check_all(capacity: Capacity, plan: hcp.Plan) -> None:
    """Tables of all ranks, or the words of their refusals."""
    assert [size for size in capacity.sizes if size] == fixed_tables.sizes_of(capacity)
    for micro_batch in range(len(plan.micro_batches)):
        for rank in range(plan.ranks):
            place = capacity, plan, micro_batch, rank
            expected, found = (
                result(partial(listed, make, *place)) for make in (fixed_tables.words_of, words_of)
            )
            assert found == expected


@st.composite
def requests(draw: st.DrawFn) -> tuple[Capacity, hcp.Plan]:
    """Blocks with and without nodes, padding, pipelines and masks; some lack room."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    block = draw(st.sampled_from([d for d in (1, 2, 3, 4, 8) if ranks % d == 0]))
    rows = draw(st.integers(8, 40))
    within = draw(st.booleans())
    widest = block if within else ranks
    lengths = draw(st.lists(st.integers(1, widest * (rows - 6)), min_size=1, max_size=8))
    masked = draw(st.integers(0, 9)) == 0
    plan = hcp.plan(
        lengths,
        ranks=ranks,
        max_tokens_per_rank=rows,
        max_degree=widest,
        ranks_per_node=block if within else None,
        alignment=draw(st.sampled_from([1, 2])),
        pipeline_stages=draw(st.sampled_from([1, 2])),
        masks=[hcp.Mask.causal(n) for n in lengths] if masked else None,
    )
    capacity = Capacity(
        rows=rows + draw(st.integers(-1, 3)),
        sequences=draw(st.integers(1, 9)),
        max_seqlen=max(lengths) + draw(st.integers(-1, 3)) or 1,
        ranks=block,
    )
    return capacity, plan


@settings(max_examples=150, deadline=None)
@given(requests())
def test_tables_equal_those_of_slow_python(request: tuple[Capacity, hcp.Plan]) -> None:
    check_all(*request)


def test_tables_of_64_ranks_equal_those_of_slow_python() -> None:
    rng = random.Random(4)
    lengths = [rng.randint(1, 900) for _ in range(40)]
    plan = hcp.plan(lengths, ranks=64, max_tokens_per_rank=128, max_degree=32, ranks_per_node=32)
    check_all(Capacity(rows=128, sequences=40, max_seqlen=900, ranks=32), plan)


@pytest.mark.parametrize("name", ["rows", "sequences", "max_seqlen", "ranks"])
def test_a_number_below_1_is_refused(name: str) -> None:
    numbers = {"rows": 8, "sequences": 2, "max_seqlen": 8, "ranks": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0, expected 1 to"):
        _ = Capacity(**numbers).sizes


def test_a_rank_outside_the_plan_is_refused() -> None:
    plan = hcp.plan([8], ranks=2, max_tokens_per_rank=8)
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        words_of(Capacity(8, 2, 8, 1), plan, 0, 2)
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        words_of(Capacity(8, 2, 8, 3), plan, 0, 1)
