"""Masks say what they are asked for, count their pairs, and refuse what is none."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support import masks, slices
from support.trees import Tree, trees

import hcp
from hcp import Mask, _core
from hcp.exchange.layout import Layout
from hcp.planning.mask import KINDS, Slice
from hcp.planning.plan import lower_bound
from hcp.tools.check import check_plan

LENGTHS = (1, 2, 3, 7, 20, 33)


def dense(length: int, sees: Callable[[int, int], bool]) -> torch.Tensor:
    return torch.tensor([[sees(q, k) for k in range(length)] for q in range(length)])


def expect(mask: Mask, sees: Callable[[int, int], bool]) -> None:
    expected = dense(mask.length, sees)
    assert torch.equal(mask.dense(), expected), mask.slices
    assert mask.pairs == int(expected.sum())
    for first in range(0, mask.length, 5):
        assert mask.pairs_of(first, first + 5) == int(expected[first : first + 5].sum())


@pytest.mark.parametrize("n", LENGTHS)
def test_plain_masks(n: int) -> None:
    expect(Mask.full(n), lambda q, k: True)
    expect(Mask.causal(n), lambda q, k: k <= q)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("left", [-1, 0, 1, 3, 50])
@pytest.mark.parametrize("right", [-1, 0, 2, 40])
def test_a_window_sees_both_sides(n: int, left: int, right: int) -> None:
    expect(
        Mask.window(n, left, right),
        lambda q, k: (left < 0 or k >= q - left) and (right < 0 or k <= q + right),
    )


@pytest.mark.parametrize("n", LENGTHS)
def test_chunks_and_streams(n: int) -> None:
    for size in (1, 3, 100):
        expect(Mask.chunked(n, size), lambda q, k, c=size: k <= q and k // c == q // c)
        for left in (0, 2, 9):
            expect(
                Mask.streaming(n, size, left),
                lambda q, k, c=size, w=left: k <= q and (k < c or k >= q - w),
            )


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("left", [-1, 0, 1, 5, 30])
def test_spans_see_themselves_whole(n: int, left: int) -> None:
    for spans in ([], [(0, n)], [(0, 1), (n // 2, n)], [(n // 3, n // 3 + 1)]):
        spans = [s for i, s in enumerate(spans) if i == 0 or s[0] >= spans[i - 1][1]]
        expect(
            Mask.bidirectional_spans(n, spans, left=left),
            lambda q, k, s=spans: (
                any(a <= q < b and a <= k < b for a, b in s)
                or (k <= q and (left < 0 or k >= q - left))
            ),
        )
    expect(Mask.prefix_lm(n, n // 2), lambda q, k: k <= q or (q < n // 2 and k < n // 2))


def test_documents_see_themselves_and_restart() -> None:
    mask = Mask.documents([2, Mask.full(3), 1])
    bounds = [0, 0, 1, 1, 1, 2]
    expect(mask, lambda q, k: bounds[q] == bounds[k] and (k <= q or bounds[q] == 1))
    assert mask.positions == (0, 1, 0, 1, 2, 0)
    assert Mask.documents([2, 4], restart=False).positions == tuple(range(6))


def test_positions_that_restart_are_documents() -> None:
    mask = Mask.from_positions(torch.tensor([0, 1, 2, 0, 5, 6]))
    assert mask == Mask.from_positions([0, 1, 2, 0, 5, 6])
    assert [part.queries for part in mask.slices] == [(0, 3), (3, 4), (4, 6)]
    assert mask.positions == (0, 1, 2, 0, 5, 6)
    assert Mask.from_positions([0, 1, 2]) == Mask.causal(3)


def tree_of(lengths: list[int], parents: list[int]) -> Mask:
    """A tree's mask, made of what each part sees: runs of tokens, joined where adjacent."""
    seen: list[list[tuple[int, int]]] = []
    depths: list[int] = []
    made: list[Slice] = []
    starts = [0]
    for length, up in zip(lengths, parents, strict=True):
        first, end = starts[-1], starts[-1] + length
        runs = [*seen[up]] if up >= 0 else []
        own = runs.pop()[0] if runs and runs[-1][1] == first else first
        made += [Slice((first, end), run) for run in runs]
        made.append(Slice((first, end), (own, end), "causal"))
        seen.append([*runs, (own, end)])
        depths.append(depths[up] + lengths[up] if up >= 0 else 0)
        starts.append(end)
    return Mask(starts[-1], made, list(zip(starts, depths, strict=False)))


@settings(max_examples=60, deadline=None)
@given(trees())
def test_a_tree_has_the_slices_of_its_parts(tree: Tree) -> None:
    expected = tree_of([*tree.lengths], [*tree.parents])
    found = tree.mask
    assert found == expected
    assert (found.words, found.checksum, found.pairs) == (
        expected.words,
        expected.checksum,
        expected.pairs,
    )
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_tree_takes_tensors() -> None:
    assert Mask.tree(torch.tensor([3, 4]), torch.tensor([-1, 0])) == Mask.tree([3, 4], [-1, 0])


def test_a_tree_shares_what_its_texts_begin_with() -> None:
    """A prompt, two answers, a second turn after the first of them."""
    mask = Mask.tree([3, 2, 2, 1], [-1, 0, 0, 1])
    part = [0, 0, 0, 1, 1, 2, 2, 3]
    before = {0: {0}, 1: {0, 1}, 2: {0, 2}, 3: {0, 1, 3}}
    expect(mask, lambda q, k: k <= q and part[k] in before[part[q]])
    assert mask.positions == (0, 1, 2, 3, 4, 3, 4, 5)
    shared = Mask.shared_prefix(8, [2] * 16)
    assert shared.pairs == 36 + 16 * (2 * 8 + 3)
    assert shared.positions[-2:] == (8, 9)


def test_random_slices_count_their_pairs_and_refuse_a_common_one() -> None:
    r = Random(3)
    refused = 0
    for _ in range(300):
        n = r.randint(1, 9)
        parts = []
        for _ in range(2):
            (a, b), (c, d) = (sorted(r.sample(range(n + 1), 2)) for _ in range(2))
            parts.append(Slice((a, b), (c, d), r.choice(KINDS)))
        one, other = (Mask(n, [part]) for part in parts)
        assert one.pairs == int(one.dense().sum()), parts
        common = one.dense() & other.dense()
        if common.any():
            refused += 1
            with pytest.raises(ValueError, match="in both, expected slices without a common pair"):
                Mask(n, parts)
        else:
            assert Mask(n, parts).pairs == one.pairs + other.pairs
    assert refused > 50


@pytest.mark.parametrize("kind", masks.KINDS)
def test_a_mask_is_plain_data_and_back(kind: str) -> None:
    r = Random(kind)
    for n in LENGTHS:
        mask = masks.KINDS[kind](r, n) or Mask.causal(n)
        for copy in (Mask.from_dict(mask.to_dict()), pickle.loads(pickle.dumps(mask))):
            assert copy == mask
            assert copy.checksum == mask.checksum
            assert torch.equal(copy.dense(), mask.dense())


def test_checksums_differ_by_slices_positions_and_length() -> None:
    whole = [
        Mask.causal(6),
        Mask.full(6),
        Mask.causal(7),
        Mask.documents([3, 3]),
        Mask.documents([3, 3], restart=False),
        Mask.window(6, 2),
    ]
    assert len({mask.checksum for mask in whole}) == len(set(whole)) == len(whole)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask(0, []), "length is 0, expected an integer >= 1"),
        (lambda: Mask(4, [((0, 5), (0, 4))]), r"slices\[0\].queries is \(0, 5\), expected"),
        (lambda: Mask(4, [((0, 4), (3, 3))]), r"slices\[0\].keys is \(3, 3\), expected"),
        (lambda: Mask(4, [((0, 4), (0, 4), "upper")]), r"slices\[0\].kind is 'upper'"),
        (lambda: Mask(4, [((0, 4),)]), r"slices\[0\] is"),
        (lambda: Mask(4, [], [(1, 0)]), r"positions\[0\] is \(1, 0\), expected"),
        (lambda: Mask.tree([2**30, 2**30], [-1, 0]), r"length is 2147483648, expected < 2\^31"),
        (lambda: Mask.shared_prefix(2**32, [5]), r"length is 4294967301, expected < 2\^31"),
        (lambda: Mask(4, [], [(0, 2**63)]), r"positions\[0\] is \(0, 9.*\), expected .* < 2\^63"),
        (lambda: Mask.tree([2, 2], [-1, 1]), r"parents\[1\] is 1, expected an earlier part"),
        (lambda: Mask.tree([2, 2], [-2, 0]), r"parents\[0\] is -2, expected an earlier part"),
        (lambda: Mask.tree([2, 2], [-1]), r"parents has 1 items, expected 2"),
        (lambda: Mask.tree([2, 0], [-1, 0]), r"lengths\[1\] is 0, expected an integer >= 1"),
        (lambda: Mask.tree([], []), r"lengths is empty, expected one part or more"),
        (lambda: Mask.bidirectional_spans(9, [(3, 5), (4, 6)]), r"spans\[1\] is \(4, 6\)"),
        (lambda: Mask.documents([]), "parts is empty"),
        (lambda: setattr(Mask.full(2), "length", 3), "immutable"),
    ],
)
def test_what_is_no_mask_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, AttributeError), match=message):
        make()


# ---- plans ---------------------------------------------------------------------------------------

REQUEST = {"ranks": 4, "max_tokens_per_rank": 64}


def test_masks_travel_with_the_plan_and_are_part_of_its_checksum() -> None:
    lengths = [50, 7, 90]
    bare = hcp.plan(lengths, **REQUEST)
    plan = hcp.plan(lengths, masks=[None, Mask.full(7), Mask.chunked(90, 16)], **REQUEST)
    assert bare.masks == {}
    assert plan.masks["mask"][0] == Mask.causal(50)
    for copy in (hcp.Plan.from_dict(plan.to_dict()), pickle.loads(pickle.dumps(plan))):
        assert copy == plan
        assert copy.checksum == plan.checksum
    masks_now = [plan.masks["mask"], [None] * 3, {"a": [None] * 3}, {"b": [None] * 3}]
    others = [plan.with_masks(each).checksum for each in masks_now]
    assert others[0] == plan.checksum
    assert len({bare.checksum, *others}) == 5
    assert plan.pairs == (1275, 49, 3 * 136 + 2 * 136 + 55)
    check_plan(plan)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([None], r"masks has 1 items, expected 2"),
        ([None, Mask.full(9)], r"masks\[1\] is of 9 tokens, expected 8"),
        ([None, "full"], r"masks\[1\] is 'full', expected a Mask or None"),
        ({}, "masks is empty"),
        (
            {"a": [None, None], "b": [None, Mask.documents([4, 4])]},
            "of sequence 1 have different positions",
        ),
    ],
)
def test_masks_that_do_not_fit_the_lengths_are_refused(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hcp.plan([5, 8], masks=given, **REQUEST)  # type: ignore[arg-type]


def held_pairs(plan: hcp.Plan) -> list[int]:
    """Pairs of each rank."""
    pairs = [0] * plan.ranks
    for rank in range(plan.ranks):
        for m in range(len(plan.micro_batches)):
            layout = Layout(plan, m, rank)
            for i, start, rows in layout.spans:
                pairs[rank] += plan.masks["mask"][layout.sequences[i]].pairs_of(start, start + rows)
    return pairs


@pytest.mark.parametrize("degree", [2, 3, 8])
@pytest.mark.parametrize(
    "mask",
    [
        Mask.prefix_lm(700, 500),
        Mask.shared_prefix(300, [100] * 4),
        Mask.documents([400, Mask.full(100), 200]),
        Mask.bidirectional_spans(700, [(10, 200), (600, 650)]),
        Mask(700, [((0, 700), (0, 2)), ((660, 700), (2, 700))]),
    ],
    ids=["prefix", "tree", "documents", "spans", "few queries"],
)
def test_a_cut_balances_pairs_and_keeps_the_rows_of_zigzag(mask: Mask, degree: int) -> None:
    request = {"ranks": degree, "max_tokens_per_rank": 700, "min_degree": degree}
    plan, bare = hcp.plan([700], masks=[mask], **request), hcp.plan([700], **request)
    assert [Layout(plan, 0, r).rows for r in range(degree)] == [
        Layout(bare, 0, r).rows for r in range(degree)
    ]
    tokens = torch.cat([Layout(plan, 0, r).positions for r in range(degree)])
    assert torch.equal(tokens.sort().values, torch.arange(700))
    pairs = held_pairs(plan)
    assert sum(pairs) == mask.pairs
    assert max(pairs) <= 1.05 * mask.pairs / degree, pairs


def test_few_queries_with_most_pairs_are_shared_in_few_pieces() -> None:
    """A phase of every kind: none seen, a growing and a falling number of keys, all keys."""
    mask = Mask(
        5000,
        [
            ((0, 900), (0, 900), "inverse_causal"),
            ((2000, 4900), (2000, 4900), "causal"),
            ((4900, 5000), (0, 5000)),
        ],
    )
    for degree in (2, 7, 16):
        plan = hcp.plan(
            [5000], ranks=degree, max_tokens_per_rank=5000, min_degree=degree, masks=[mask]
        )
        pairs = held_pairs(plan)
        assert sum(pairs) == mask.pairs
        assert max(pairs) <= 1.02 * mask.pairs / degree, (degree, pairs)
        assert max(len(Layout(plan, 0, rank).spans) for rank in range(degree)) <= 6


def test_a_causal_mask_keeps_zigzag() -> None:
    request = {"ranks": 3, "max_tokens_per_rank": 300, "min_degree": 3}
    plan, bare = hcp.plan([300], masks=[None], **request), hcp.plan([300], **request)
    for rank in range(3):
        assert Layout(plan, 0, rank).spans == Layout(bare, 0, rank).spans


def test_pairs_are_priced_in_place_of_the_window() -> None:
    cost = hcp.CostModel(pair=7, token=2, exchange=1, launch=3)
    lengths, pairs = [50, 50, 9], [100, 2500, 0]
    plan = hcp.plan(lengths, pairs=pairs, cost=cost, ranks=1, max_tokens_per_rank=200)
    assert plan.makespan == 7 * 2600 + 2 * 109 + 3
    assert plan.pairs == (100, 2500, 0)
    group = plan.micro_batches[0][0]
    assert plan.group_time(group) == plan.makespan
    assert plan.report().makespan == plan.makespan
    (copy,) = {hcp.Plan.from_dict(plan.to_dict()), plan}
    assert copy.pairs == plan.pairs
    other = hcp.plan(lengths, pairs=[101, 2500, 0], cost=cost, ranks=1, max_tokens_per_rank=200)
    assert other.checksum != plan.checksum
    bound = lower_bound(lengths, pairs=pairs, cost=cost, ranks=1, max_tokens_per_rank=200)
    assert bound == plan.bound


def test_pairs_of_a_window_give_the_plan_of_the_window() -> None:
    r = Random(5)
    for ranks in (2, 5):
        lengths = [r.randint(1, 300) for _ in range(40)]
        request = {"ranks": ranks, "max_tokens_per_rank": 400}
        base = {"pair": 7, "token": 2, "exchange": 1, "launch": 3}
        windowed = hcp.plan(lengths, cost=hcp.CostModel(**base, window=20), **request)
        pairs = [Mask.window(n, 19).pairs for n in lengths]
        plan = hcp.plan(lengths, pairs=pairs, cost=hcp.CostModel(**base), **request)
        assert plan.micro_batches == windowed.micro_batches
        assert (plan.makespan, plan.bound) == (windowed.makespan, windowed.bound)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_plans_by_pairs_stay_near_their_bound(sync: str) -> None:
    """Sequences of equal lengths and very different masks."""
    r = Random(sync)
    lengths = [r.choice([1000, 2000, 4000]) for _ in range(60)]
    masks_now = [
        r.choice([None, Mask.full(n), Mask.documents([n // 4] * 4), Mask.window(n, 50)])
        for n in lengths
    ]
    cost = hcp.CostModel(pair=100, token=1000, exchange=100, launch=1000)
    request = {"ranks": 8, "max_tokens_per_rank": 4000, "sync": sync, "cost": cost}
    plan = hcp.plan(lengths, masks=masks_now, **request)
    check_plan(plan, lengths)
    assert plan.makespan <= 1.1 * plan.bound


@pytest.mark.parametrize(
    ("request_now", "message"),
    [
        ({"pairs": [1]}, "pairs has 1 items, expected 2"),
        ({"pairs": [26, 1]}, r"pairs\[0\] is 26, expected 0 to the square of 5"),
        ({"pairs": [1, -1]}, r"pairs\[1\] is -1, expected 0 to the square of 8"),
        (
            {"pairs": [1, 1], "cost": hcp.CostModel.from_function(lambda n, d: n / d)},
            "pairs are given with a cost table",
        ),
    ],
)
def test_pairs_that_cannot_be_are_refused(request_now: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hcp.plan([5, 8], **request_now, **REQUEST)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["length", "slices", "positions"])
def test_data_that_are_nested_too_deeply_are_refused(place: str) -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    mask = {**Mask.shared_prefix(2, [2, 2]).to_dict(), place: deep}
    with pytest.raises(ValueError, match="the mask has lists or objects nested too deeply"):
        Mask.from_dict(mask)
    plan = hcp.plan([6], masks=[None], ranks=1, max_tokens_per_rank=8).to_dict()
    plan["masks"]["different"] = [mask]
    with pytest.raises(ValueError, match="nested too deeply, expected what to_dict"):
        hcp.Plan.from_dict(plan)
    with pytest.raises(ValueError, match="the plan has lists or objects nested too deeply"):
        hcp.Plan.from_dict({**plan, "lengths": deep})


GOOD = ([0, 1], [0, 6, 0, 6, -5, 5], [0, 1], [0, 3])


@pytest.mark.parametrize(
    ("masks", "error", "message"),
    [
        (7, TypeError, "object of type 'int' has no len"),
        ([7], TypeError, "a mask is 7, expected a tuple of firsts and words, twice"),
        ([GOOD[:2]], TypeError, r"a mask is \(\[0, 1\], .*, expected a tuple"),
        ([(*GOOD[:2], [0, 1], [0])], ValueError, "has 1 words, expected a multiple of 2"),
        (
            [([0, 1], [0] * 7, *GOOD[2:])],
            ValueError,
            "has 7 words, expected a multiple of 6",
        ),
        (
            [([0, 2], *GOOD[1:])],
            ValueError,
            "firsts have 2 items, expected 2 from 0 up to",
        ),
        ([([0], *GOOD[1:])], ValueError, "firsts have 1 items, expected 2 from 0 up to 1"),
        ([(*GOOD[:3], ["x", 0])], ValueError, r"words\[0\] is 'x', expected an integer"),
        ([(*GOOD[:3], [6, 0])], ValueError, r"masks\[0\] has position 0 at token 6 of sequence 0"),
        ([], ValueError, "mask_count is 0, expected 1 to 64"),
    ],
)
def test_what_the_core_takes_for_no_masks_is_an_error_that_says_why(
    masks: Any, error: type[Exception], message: str
) -> None:
    core = hcp.plan([6], ranks=1, max_tokens_per_rank=8).core
    with pytest.raises(error, match=message):
        core.set_masks(masks)
    core.set_masks([GOOD])


def test_positions_beyond_what_the_core_counts_are_refused() -> None:
    mask = Mask(6, [((0, 6), (0, 6), "causal")], [(0, 0), (3, 2**39)])
    with pytest.raises(ValueError, match=r"has position 549755813888 at token 3 of sequence 0"):
        hcp.plan([6], masks=[mask], ranks=1, max_tokens_per_rank=8)


def test_the_core_counts_pairs_and_finds_common_ones_as_slow_python_does() -> None:
    draw = Random(1)
    overlaps = 0
    for _ in range(3000):
        length = draw.randint(1, 12)
        ends = [sorted(draw.sample(range(length + 1), 2)) for _ in range(2 * draw.randint(0, 4))]
        parts = [
            Slice((*queries,), (*keys,), draw.choice(KINDS))  # type: ignore[arg-type]
            for queries, keys in zip(ends[::2], ends[1::2], strict=True)
        ]
        words = [n for part in parts for n in (*part.queries, *part.keys, *part.band)]
        first, end = sorted(draw.choices(range(length + 1), k=2))
        seen = [query for part in parts for query, _ in slices.pairs_of(part)]
        assert _core.slices_pairs(words, first, end) == sum(first <= q < end for q in seen), parts
        found, expected = _core.slices_overlap(words), slices.first_overlap(parts)
        assert (found is None) == (expected is None), parts
        if found is not None:
            a, b, *pair = found
            common = slices.pairs_of(parts[a]) & slices.pairs_of(parts[b])
            assert a < b
            assert tuple(pair) in common, parts
            overlaps += 1
    assert overlaps > 500
