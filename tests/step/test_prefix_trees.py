"""Prefix trees of rollouts: what they hold, beside tries made of each rollout alone."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hcp
from hcp import Trees, prefix_trees
from hcp.step.trees import TREE_PATHS, TREE_ROWS, TREE_SIZES

Rollouts = list[list[int]]


@st.composite
def families(draw: st.DrawFn) -> Rollouts:
    """Rollouts over few tokens, so that many begin alike, end inside others, or are the same."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    tokens, most = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 12))
    return [
        [rng.randrange(tokens) for _ in range(rng.randint(1, most))]
        for _ in range(rng.randrange(9))
    ]


def as_values(rollouts: Rollouts) -> list[torch.Tensor]:
    return [torch.tensor(each, dtype=torch.float64) for each in rollouts]


def check_rows(trees: Trees, rollouts: Rollouts) -> None:
    """Each rollout finds its tokens and targets in its rows."""
    tokens = trees.by_rollout([each.double() for each in trees.tokens])
    labels = trees.by_rollout([each.double() for each in trees.labels])
    for rollout, own, targets in zip(rollouts, tokens, labels, strict=True):
        assert own.tolist() == rollout
        assert targets.tolist() == [*rollout[1:], -100]


def check_masks(trees: Trees, rollouts: Rollouts) -> None:
    """A rollout's row sees the rollout's rows up to itself, at the rollout's positions."""
    for tree, mask in enumerate(trees.masks):
        places = [torch.full((n,), -1.0, dtype=torch.float64) for n in trees.lengths]
        places[tree] = torch.arange(trees.lengths[tree], dtype=torch.float64)
        paths = trees.by_rollout(places)
        mask = mask or hcp.Mask.causal(trees.lengths[tree])
        assert (mask.length, mask.pairs) == (trees.lengths[tree], trees.pairs[tree])
        seen = mask.dense()
        for rollout in trees.rollouts[tree]:
            rows = paths[rollout].long().tolist()
            assert [mask.positions[row] for row in rows] == list(range(len(rows)))
            for j, row in enumerate(rows):
                assert seen[row].nonzero()[:, 0].tolist() == sorted(rows[: j + 1])


def check(trees: Trees, rollouts: Rollouts) -> None:
    check_rows(trees, rollouts)
    check_masks(trees, rollouts)
    assert sorted(i for own in trees.rollouts for i in own) == list(range(len(rollouts)))


def in_order(rollouts: Rollouts, members: Sequence[int], depth: int) -> list[int]:
    """Those that begin alike side by side, branches by first appearance; each that ends alone."""
    branches: dict[Any, list[int]] = {}
    for i in members:
        ends = len(rollouts[i]) == depth
        branches.setdefault(("end", i) if ends else rollouts[i][depth], []).append(i)
    return [
        i
        for own in branches.values()
        for i in (own if len(own) == 1 else in_order(rollouts, own, depth + 1))
    ]


@settings(max_examples=80, deadline=None)
@given(families())
def test_trees_have_each_edge_of_the_trie_once(rollouts: Rollouts) -> None:
    trees = prefix_trees(rollouts)
    check(trees, rollouts)
    edges = {tuple(own[: j + 2]) for own in rollouts for j in range(len(own) - 1)}
    assert sum(trees.lengths) == len(edges) + len(rollouts)
    assert [i for own in trees.rollouts for i in own] == in_order(rollouts, range(len(rollouts)), 0)


@settings(max_examples=80, deadline=None)
@given(families(), st.integers(1, 6), st.integers(0, 6))
def test_trees_keep_their_limits(rollouts: Rollouts, least: int, more: int) -> None:
    most = max(map(len, rollouts), default=1) + more
    trees = prefix_trees(rollouts, max_tokens=most, min_shared=least)
    check(trees, rollouts)
    assert max(trees.lengths, default=0) <= most
    for mask, fields in zip(trees.masks, trees.fields(), strict=True):
        if mask is None:
            continue
        rows = fields[TREE_ROWS][:, 0].bincount()
        paths = fields[TREE_PATHS][:, 1].bincount(minlength=len(rows))
        assert int(rows[paths > 1].min()) >= least


@settings(max_examples=40, deadline=None)
@given(families(), st.integers(1, 5))
def test_a_limit_of_the_longest_rollout_leaves_every_rollout_whole(
    rollouts: Rollouts, copies: int
) -> None:
    given_rollouts = [own for own in rollouts for _ in range(copies)]
    most = max(map(len, given_rollouts), default=1)
    check(prefix_trees(given_rollouts, max_tokens=most), given_rollouts)


def brute_sums(trees: Trees, values: list[torch.Tensor]) -> list[list[float]]:
    places = iter(range(sum(trees.lengths)))
    rows = [
        torch.tensor([next(places) for _ in range(n)], dtype=torch.float64) for n in trees.lengths
    ]
    sums = [0.0] * sum(trees.lengths)
    for path, own in zip(trees.by_rollout(rows), values, strict=True):
        for row, value in zip(path.long().tolist(), own.tolist(), strict=True):
            sums[row] += value
    return [[sums[int(row)] for row in own] for own in rows]


@settings(max_examples=60, deadline=None)
@given(families())
def test_sums_are_those_of_all_rollouts_through_a_row(rollouts: Rollouts) -> None:
    trees = prefix_trees(rollouts)
    generator = torch.Generator().manual_seed(1)
    values = [torch.randint(9, (len(own),), generator=generator).double() for own in rollouts]
    assert [each.tolist() for each in trees.summed(values)] == brute_sums(trees, values)
    rows = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in trees.lengths]
    leaves = [row.requires_grad_() for row in rows]
    spread = trees.by_rollout(leaves)
    wanted = [
        torch.randn(len(own), 2, generator=generator, dtype=torch.float64) for own in rollouts
    ]
    total = sum((x * y).sum() for x, y in zip(spread, wanted, strict=True))
    if not rollouts:
        return
    total.backward()  # type: ignore[union-attr]
    for row, expected in zip(leaves, trees.summed(wanted), strict=True):
        torch.testing.assert_close(row.grad, expected)


def test_one_prompt_and_its_answers_are_one_tree() -> None:
    trees = prefix_trees([[5, 6, 7, 1, 2], [5, 6, 7, 3], [9, 9], [5, 6, 7, 1, 4]])
    assert trees.rollouts == [(0, 3, 1), (2,)]
    assert trees.masks == [hcp.Mask.tree([2, 1, 2, 2, 2], [-1, 0, 1, 1, 0]), None]
    assert trees.tokens[0].tolist() == [5, 6, 7, 1, 2, 1, 4, 7, 3]
    assert trees.labels[0].tolist() == [6, 7, 1, 2, -100, 4, -100, 3, -100]
    fields = trees.fields()[0]
    assert fields[TREE_ROWS].tolist() == [
        [0, -1], [0, -1], [1, -1], [2, -1], [2, 0], [3, -1], [3, 1], [4, -1], [4, 2],
    ]  # fmt: skip
    assert fields[TREE_SIZES].tolist() == [5, 3]
    paths = [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 3], [2, 0], [2, 4]]
    assert fields[TREE_PATHS].tolist() == paths


def test_equal_rollouts_share_all_but_their_last_rows() -> None:
    trees = prefix_trees([[4, 5, 6]] * 3)
    assert trees.lengths == [5]
    ends = trees.ends([torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0])])
    assert [float(each) for each in ends] == [1.0, 2.0, 3.0]
    assert [each.tolist() for each in trees.by_tree([7, 8, 9])] == [[7, 8, 9]]
    apart = hcp.prefix_trees([[1, 2], [3, 4]])  # integers and floats travel as one dtype
    assert [each.tolist() for each in apart.by_tree([1, 0.5])] == [[1.0], [0.5]]
    assert {each.dtype for each in apart.by_tree([1, 0.5])} == {torch.float32}
    assert trees.by_tree(["a", None, ("b", 1)]) == [("a", None, ("b", 1))]


def test_tokens_of_any_integers_give_the_same_trees() -> None:
    rollouts = [[1, 2, 3], [1, 2, 4]]
    lists = prefix_trees(rollouts)
    for dtype in (torch.int32, torch.int64, torch.int16, torch.uint8):
        tensors = prefix_trees([torch.tensor(own, dtype=dtype) for own in rollouts])
        assert tensors.masks == lists.masks
        assert [each.tolist() for each in tensors.tokens] == [
            each.tolist() for each in lists.tokens
        ]


def forms(rollouts: list[torch.Tensor], more: int) -> list[torch.Tensor]:
    """One tensor of all: end to end, and padded at their ends."""
    most = max((len(own) for own in rollouts), default=0) + more
    padded = [torch.cat([own, own.new_full((most - len(own),), 7)]) for own in rollouts]
    return [torch.cat(rollouts), torch.stack(padded)]


@settings(max_examples=40, deadline=None)
@given(families().filter(bool), st.integers(0, 2), st.sampled_from([torch.int32, torch.uint8]))
def test_one_tensor_of_all_rollouts_gives_the_same_trees(
    rollouts: Rollouts, more: int, dtype: torch.dtype
) -> None:
    each = [torch.tensor(own, dtype=dtype) for own in rollouts]
    weights = [torch.rand(len(own), dtype=torch.float64) for own in rollouts]
    lengths = [len(own) for own in rollouts]
    expected = prefix_trees(each)
    for tokens, values in zip(forms(each, more), forms(weights, more), strict=True):
        trees = prefix_trees(tokens, torch.tensor(lengths))
        check(trees, rollouts)
        assert trees.rollout_lengths == expected.rollout_lengths
        assert trees.masks == expected.masks
        for found, given_alone in (
            (trees.first(values), expected.first(weights)),
            (trees.summed(values), expected.summed(weights)),
        ):
            assert all(map(torch.equal, found, given_alone))
    ids = torch.arange(len(rollouts))
    assert [own.tolist() for own in expected.by_tree(ids)] == [[*own] for own in expected.rollouts]


def test_trees_keep_their_tokens_when_a_tensor_of_rollouts_is_overwritten() -> None:
    rollouts = [[1, 2, 3], [1, 2, 4]]
    for tokens in forms([torch.tensor(own) for own in rollouts], 0):
        trees = prefix_trees(tokens, [3, 3])
        tokens.fill_(-100)
        check(trees, rollouts)


def test_values_of_padded_rollouts_have_any_shape() -> None:
    trees = prefix_trees(torch.tensor([[1, 2, 0], [1, 2, 3]]), [2, 3])
    values = torch.arange(12.0).view(2, 3, 2)
    assert trees.first(values)[0].tolist() == [[0, 1], [2, 3], [8, 9], [10, 11]]
    assert trees.summed(values)[0].tolist() == [[6, 8], [2, 3], [8, 9], [10, 11]]


def test_values_of_rollouts_may_be_lists_of_numbers() -> None:
    trees = prefix_trees([[1, 2, 3], [1, 2, 4, 5]])
    rewards = [[0.5, 0.25, 2.0], [1.5, 0.75, 4.0, 8.0]]
    for give in (trees.first, trees.summed):
        (found,), (expected,) = give(rewards), give([torch.tensor(each) for each in rewards])
        assert torch.equal(found, expected)
    (pairs,) = trees.first([[[1, 2]] * 3, torch.tensor([[1, 2]] * 4)])
    assert pairs.tolist() == [[1, 2]] * sum(trees.lengths)


def test_prices_decide_between_trees_and_rollouts_alone() -> None:
    rollouts = [[0] * 60 + [i] * 40 for i in range(1, 5)]
    cheap = hcp.CostModel(pair=1, token=10, exchange=0, launch=0)
    dear = hcp.CostModel(pair=1, token=10, exchange=10**6, launch=0)
    assert len(prefix_trees(rollouts, cost=cheap, max_tokens_per_rank=100)) == 1
    assert len(prefix_trees(rollouts, cost=dear, max_tokens_per_rank=100)) == 4
    assert len(prefix_trees(rollouts, cost=dear)) == 1, "one rank exchanges nothing"
    small = prefix_trees(rollouts, cost=dear, max_tokens=150, max_tokens_per_rank=150)
    assert small.lengths == [141, 141], "trees of two rollouts fit on one rank"
    check(small, rollouts)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([[1], []], {}, r"rollouts\[1\] has 0 tokens, expected 1 to"),
    ([[1, 2, 3]], {"max_tokens": 2}, r"rollouts\[0\] has 3 tokens, expected 1 to 2"),
    ([[1.5]], {}, r"rollouts\[0\] is \(1,\) of torch.float32, expected \(tokens,\) integers"),
    ([["a"]], {}, r"rollouts\[0\] is \['a'\], expected tokens"),
    ([torch.ones(2, 2, dtype=torch.int64)], {}, r"rollouts\[0\] is \(2, 2\)"),
    (7, {}, "rollouts is 7"),
    (torch.ones(2, 2).long(), {}, "rollouts is a Tensor and lengths None, expected one tensor"),
    ([[1]], {"lengths": [1]}, r"rollouts is a list and lengths \[1\], expected one tensor"),
    (torch.ones(3).long(), {"lengths": [1, 1]}, r"rollouts has shape \(3,\), expected \(2, ...\)"),
    (torch.ones(2, 2).long(), {"lengths": [3, 1]}, r"shape \(2, 2\), expected \(2, 3 or more, "),
    (torch.ones(2), {"lengths": [2]}, r"rollouts is \(2,\) of torch.float32, expected"),
    (torch.ones(2).long(), {"lengths": [2.5]}, r"lengths\[0\] is 2.5, expected an integer"),
    (torch.ones(2).long(), {"lengths": [2, 0]}, r"rollouts\[1\] has 0 tokens, expected 1 to"),
    ([[1]], {"min_shared": 0}, "min_shared is 0, expected an integer >= 1"),
    ([[1]], {"max_tokens": 0}, "max_tokens is 0, expected an integer >= 1"),
    (
        [[1]],
        {"cost": hcp.CostModel.from_function(lambda n, d: float(n))},
        "cost has times of whole sequences, expected prices",
    ),
]


@pytest.mark.parametrize(("rollouts", "options", "said"), REFUSED)
def test_what_is_no_rollout_or_limit_is_refused(
    rollouts: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        prefix_trees(rollouts, **options)


def test_values_of_other_shapes_are_refused() -> None:
    trees = prefix_trees([[1, 5], [1, 5, 4]])
    with pytest.raises(ValueError, match=r"values has 1 items, expected 2: rollouts"):
        trees.first([torch.zeros(2)])
    with pytest.raises(ValueError, match=r"values has shape \(2, 3\), expected \(5, ...\)"):
        trees.first(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"values\[1\] has shape \(2,\), expected 3 rows"):
        trees.summed([torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ValueError, match=r"values are torch.int64, expected floats"):
        trees.summed([torch.ones(2, dtype=torch.int64), torch.ones(3, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"rows\[0\] has shape \(3,\), expected 4 rows"):
        trees.by_rollout([torch.zeros(3)])
    with pytest.raises(ValueError, match=r"values\[0\] has shape \(\), expected 2 rows"):
        trees.summed([1.0, 2.0])
    with pytest.raises(ValueError, match=r"values\[1\] is 'abc', expected numbers"):
        trees.first([[1, 2], "abc"])
    weight = torch.ones((), requires_grad=True)
    for nested in ([weight] * 2, ([0.5], [weight])):
        with pytest.raises(
            ValueError, match=r"values\[1\] is a (list|tuple) with tensors, .*stack"
        ):
            trees.summed([[1.0, 2.0], nested])
    with pytest.raises(ValueError, match="values has 1 items, expected 2"):
        trees.by_tree([1.0])


CTRL_C = """
import signal, threading, time, torch
from hcp import prefix_trees
rollouts = [torch.zeros(4_000, dtype=torch.int64) + i // 64 * 0 for i in range(1_500)]
for i, own in enumerate(rollouts):
    own[i:] = i                      # each leaves the others one token later: many comparisons
threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
try:
    while True:
        prefix_trees(rollouts)
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.mark.skipif(not hasattr(signal, "raise_signal"), reason="signals of POSIX")
def test_ctrl_c_ends_the_search() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "stopped\n", done.stderr
