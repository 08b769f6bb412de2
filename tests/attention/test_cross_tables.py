"""The core's tables of cross-attention equal those that slow and obvious Python makes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cross_tables import Tables, launch_runs, listed

import hcp
from hcp.attention.cross import KeyRoute
from hcp.exchange.layout import Layout


def check(
    queries: hcp.Plan, keys: hcp.Plan, places: tuple[int, int], window: tuple[int, int]
) -> None:
    """The tables of every rank. ``places``: the micro-batches."""
    tables = Tables(Layout(queries, places[0], 0), Layout(keys, places[1], 0), window)
    for rank in range(queries.ranks):
        sides = Layout(queries, places[0], rank), Layout(keys, places[1], rank)
        assert listed(KeyRoute(*sides, window)) == tables.of(rank, sides[1].rows)


# ---- drawn plans ---------------------------------------------------------------------------------

WINDOWS = st.one_of(
    st.sampled_from([(-1, -1), (-1, 0), (0, 0)]),
    st.tuples(st.integers(-1, 40), st.integers(-1, 40)),
)


def cut(rng: random.Random, length: int, count: int) -> list[int]:
    """Lengths of documents of a sequence."""
    edges = [0, *sorted(rng.sample(range(1, length), count - 1)), length]
    return [b - a for a, b in itertools.pairwise(edges)]


def masks_of(
    rng: random.Random, lengths: Sequence[int], counts: Sequence[int]
) -> list[hcp.Mask] | dict[str, list[hcp.Mask]]:
    """Masks of so many documents, with cuts of their own where work is uneven; now and then of two
    kinds of layers."""
    parts = [cut(rng, length, count) for length, count in zip(lengths, counts, strict=True)]
    causal = [hcp.Mask.documents(each) for each in parts]
    if rng.random() < 0.7:
        return causal
    full = [hcp.Mask.documents([hcp.Mask.full(n) for n in each]) for each in parts]
    return {"causal": causal, "full": full}


def planned(rng: random.Random, lengths: Sequence[int], ranks: int) -> hcp.Plan:
    """A plan as the planner makes it, under some of its limits."""
    degree = rng.choice([1, rng.randint(1, ranks), ranks])
    options: dict[str, Any] = {"min_degree": degree, "alignment": rng.choice([1, 1, 4, 16])}
    if rng.random() < 0.3:
        options["max_degree"] = rng.randint(degree, ranks)
    if rng.random() < 0.2 and ranks % 2 == 0:
        options = {"ranks_per_node": 2, "alignment": options["alignment"]}
    if rng.random() < 0.2:
        options["pipeline_stages"] = 2
    room = rng.choice([max(lengths), sum(lengths)]) + 16 * len(lengths)
    return hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=room, **options)


def groups_of(rng: random.Random, sequences: Sequence[int], ranks: int) -> list[dict[str, Any]]:
    """The sequences in groups with gaps between them, at random."""
    count = rng.randint(1, min(len(sequences), ranks))
    edges = sorted(rng.sample(range(ranks), count))
    order = rng.sample(sequences, len(sequences))
    starts = [0, *sorted(rng.sample(range(1, len(order)), count - 1)), len(order)]
    return [
        {"first_rank": first, "degree": rng.randint(1, end - first), "sequences": order[a:b]}
        for (first, end), (a, b) in zip(
            itertools.pairwise([*edges, ranks]), itertools.pairwise(starts), strict=True
        )
    ]


def by_hand(
    rng: random.Random, lengths: Sequence[int], ranks: int, wanted: Sequence[int]
) -> tuple[hcp.Plan, int]:
    """A plan with a micro-batch of the wanted sequences, and maybe others."""
    others = [s for s in range(len(lengths)) if s not in wanted]
    more = [s for s in others if rng.random() < 0.3]
    batches = [[*wanted, *more], [s for s in others if s not in more]]
    rng.shuffle(batches)
    place = int(wanted[0] not in batches[0])
    made = [{"groups": groups_of(rng, each, ranks)} for each in batches if each]
    data = {"lengths": list(lengths), "ranks": ranks, "max_tokens_per_rank": 2**31 - 1}
    data |= {"micro_batches": made, "alignment": rng.choice([1, 4])}
    return hcp.Plan.from_dict(data), place if len(made) == 2 else 0


def drawn(seed: int) -> tuple[hcp.Plan, hcp.Plan, tuple[int, int]]:
    """Plans of queries and of keys, and micro-batches of them that belong together."""
    rng = random.Random(seed)
    ranks, top = rng.choice([1, 2, 3, 4, 5, 8, 8, 16, 33, 64]), rng.choice([3, 12, 60, 300])
    count = rng.randint(1, 6)
    lengths, key_lengths = ([rng.randint(1, top) for _ in range(count)] for _ in range(2))
    if rng.random() < 0.7:
        queries = planned(rng, lengths, ranks)
    else:
        queries, _ = by_hand(rng, lengths, ranks, [rng.randrange(count)])
    micro_batch = rng.randrange(len(queries.micro_batches))
    wanted = [s for group in queries.micro_batches[micro_batch] for s in group.sequences]
    keys, place = by_hand(rng, key_lengths, ranks, wanted)
    if rng.random() < 0.4:
        other = planned(rng, key_lengths, ranks)
        for number, groups in enumerate(other.micro_batches):
            if set(wanted) <= {s for group in groups for s in group.sequences}:
                keys, place = other, number
    if rng.random() < 0.5:
        counts = [rng.randint(1, min(*pair, 7)) for pair in zip(lengths, key_lengths, strict=True)]
        queries = queries.with_masks(masks_of(rng, lengths, counts))
        keys = keys.with_masks(masks_of(rng, key_lengths, counts))
    elif rng.random() < 0.2:
        keys, place = queries, micro_batch
    return queries, keys, (micro_batch, place)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), WINDOWS)
def test_tables_equal_those_of_slow_python(seed: int, window: tuple[int, int]) -> None:
    check(*drawn(seed), window)


class Kernel(NamedTuple):
    """As far as launches are concerned."""

    packs: bool


@pytest.mark.parametrize("packs", [False, True])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), window=WINDOWS)
def test_runs_of_launches_equal_those_of_slow_python(
    packs: bool, seed: int, window: tuple[int, int]
) -> None:
    queries, keys, places = drawn(seed)
    for rank in range(queries.ranks):
        sides = Layout(queries, places[0], rank), Layout(keys, places[1], rank)
        blocks = KeyRoute(*sides, window).blocks_of(Kernel(packs))  # type: ignore[arg-type]
        found = [sorted(map(tuple, x.tolist())) for x in (blocks.query_runs, blocks.key_runs)]
        assert found == launch_runs(blocks.launch_list)


def test_a_limit_that_reaches_past_every_key_is_none() -> None:
    plan = hcp.plan([40, 7], ranks=2, max_tokens_per_rank=64, min_degree=2)
    rows = [KeyRoute(*[Layout(plan, 0, 0)] * 2, (far, far)).output_rows for far in (-1, 2**62)]
    assert rows == [47, 47]


def test_branches_without_one_end_or_one_root_are_refused() -> None:
    tree, forest = (hcp.Mask.tree([4, 4, 4], parents) for parents in ([-1, 0, 0], [-1, -1, 0]))
    whole, two = hcp.Mask.causal(12), hcp.Mask.documents([6, 6])
    branching, rooted, plain, parted = (
        hcp.plan([12], ranks=1, max_tokens_per_rank=12, masks=[mask])
        for mask in (tree, forest, whole, two)
    )
    for queries, keys, left in ((branching, plain, 3), (plain, branching, -1)):
        with pytest.raises(ValueError, match="the mask of sequence 0 has branches"):
            queries.core.cross(0, 0, keys.core, 0, left, -1)
    for keys in (plain, parted):
        with pytest.raises(ValueError, match="has branches and 2 texts that continue no other"):
            rooted.core.cross(0, 0, keys.core, 0, -1, -1)


def test_places_outside_the_plans_are_refused() -> None:
    core = hcp.plan([8], ranks=2, max_tokens_per_rank=8).core
    with pytest.raises(ValueError, match="micro_batch is 1, expected >= 0 and < 1"):
        core.cross(0, 0, core, 1, -1, -1)
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        core.cross(0, 2, core, 0, -1, -1)
    with pytest.raises(TypeError, match="plan is 3, expected a Plan"):
        core.cross(0, 0, 3, 0, -1, -1)  # type: ignore[arg-type]


def test_a_long_list_of_sequences_is_cut_short() -> None:
    queries, keys = (hcp.plan([2] * n, ranks=1, max_tokens_per_rank=64) for n in (12, 1))
    message = r"has sequences \[0, 1, 2, 3, 4, 5, 6, 7, ... \(12\)\] on 1 ranks, the keys' \[0\] on"
    with pytest.raises(ValueError, match=message):
        queries.core.cross(0, 0, keys.core, 0, -1, -1)
