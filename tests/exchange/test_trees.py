"""Texts of a tree are to states, convolutions, halos and scans what each is alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import masks as drawn_masks
from support.along_documents import COLUMNS, OPERATIONS, rows_of
from support.features import drawn
from support.state_tables import previous_tokens
from support.trees import Tree, each_text, trees

import hcp
from hcp import Mask
from hcp.exchange import states as passing
from hcp.exchange.layout import Layout

# ---- what is a stretch ---------------------------------------------------------------------------


def slow_stretches(mask: Mask) -> list[tuple[int, int]]:
    """(first token, the stretch that it continues) by the definition."""
    before = previous_tokens([mask], mask.length)
    starts = [
        token
        for token in range(mask.length)
        if before[token] != token - 1 or before.count(token - 1) > 1 or token == 0
    ]
    ends = [end - 1 for end in [*starts[1:], mask.length]]
    parents = [before[start] for start in starts]
    return [
        (start, -1 if parent is None else ends.index(parent))
        for start, parent in zip(starts, parents, strict=True)
    ]


def stretches_of(mask: Mask) -> list[tuple[int, int]]:
    plan = hcp.plan([mask.length], masks=[mask], ranks=1, max_tokens_per_rank=mask.length)
    layout = Layout(plan, 0, 0)
    assert layout.spans == layout.stretches  # of one rank
    assert sum(stretch.rows for stretch in layout.stretches) == mask.length
    return [
        (stretch.start, parent)
        for stretch, parent in zip(layout.stretches, layout.parents, strict=True)
    ]


@settings(max_examples=200, deadline=None)
@given(trees())
def test_stretches_follow_from_masks_and_positions(tree: Tree) -> None:
    assert stretches_of(tree.mask) == slow_stretches(tree.mask)


STRETCHES: dict[str, tuple[Mask, list[tuple[int, int]]]] = {
    "one document": (Mask.documents([5]), [(0, -1)]),
    "documents": (Mask.documents([3, 2]), [(0, -1), (3, -1)]),
    "a tree that is a chain": (Mask.tree([3, 2], [-1, 0]), [(0, -1)]),
    "answers to one prompt": (Mask.shared_prefix(3, [2, 2]), [(0, -1), (3, 0), (5, 0)]),
    "an answer far from its prompt": (
        Mask.tree([3, 2, 2], [-1, -1, 0]),
        [(0, -1), (3, -1), (5, 0)],
    ),
    "answers to an inner token": (
        Mask(
            7,
            [((0, 5), (0, 5), "causal"), ((5, 7), (0, 2)), ((5, 7), (5, 7), "causal")],
            [(0, 0), (5, 2)],
        ),
        [(0, -1), (2, 0), (5, 0)],
    ),
    "positions that go on from another part": (
        Mask.tree([3, 2, 2, 2], [-1, 0, 0, 1]),
        [(0, -1), (3, 0), (5, 0), (7, 1)],
    ),
    "a tree among documents": (
        Mask.documents([4, Mask.shared_prefix(2, [1, 1])]),
        [(0, -1), (4, -1), (6, 1), (7, 1)],
    ),
}


@pytest.mark.parametrize("name", STRETCHES)
def test_what_is_a_stretch(name: str) -> None:
    mask, stretches = STRETCHES[name]
    assert stretches_of(mask) == stretches == slow_stretches(mask)


NO_TREES: dict[str, tuple[Mask, str]] = {
    "a branch of two parents": (drawn_masks.joined(), "token 6 goes on from one earlier token, at"),
    "a branch that sees beside its path": (
        Mask(6, [*Mask.tree([2, 2, 2], [-1, 0, 0]).slices, ((4, 6), (2, 3))], [(0, 0), (4, 2)]),
        "token 4 goes on from one earlier token, at position 1,",
    ),
    "a branch whose later tokens see beside its path": (
        Mask(
            8,
            [*Mask.tree([2, 3, 3], [-1, 0, 0]).slices, ((5, 8), (2, 4), "causal")],
            [(0, 0), (5, 2)],
        ),
        "token 6 goes on from one earlier token, at position 2,",
    ),
    "a branch after a gap": (
        Mask(6, Mask.tree([2, 2, 2], [-1, 0, 0]).slices, [(0, 0), (4, 9)]),
        "token 4 goes on from one earlier token, at position 8,",
    ),
}


@pytest.mark.parametrize("name", NO_TREES)
def test_branches_that_are_no_tree_are_refused(name: str) -> None:
    mask, message = NO_TREES[name]
    plan = hcp.plan([mask.length], masks=[mask], ranks=1, max_tokens_per_rank=mask.length)
    with pytest.raises(ValueError, match=f"^a test is called in .* expected that {message}"):
        plan.core.expect_trees("a test")


# ---- texts under a plan --------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A plan of trees. Some are given as sequences without a mask, if they are one part."""

    trees: tuple[Tree, ...]
    ranks: int
    min_degree: int
    alignment: int
    scan_type: str
    round_bytes: int

    @property
    def plan(self) -> hcp.Plan:
        return hcp.plan(
            [tree.length for tree in self.trees],
            masks=[tree.mask if len(tree.lengths) > 1 else None for tree in self.trees],
            ranks=self.ranks,
            min_degree=self.min_degree,
            alignment=self.alignment,
            max_tokens_per_rank=64,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    return Case(
        tuple(draw(st.lists(trees(), min_size=1, max_size=3))),
        ranks,
        draw(st.integers(1, ranks)),
        draw(st.sampled_from([1, 4])),
        draw(st.sampled_from(["pass_states", "auto"])),
        draw(st.sampled_from([0, 1 << 40])),
    )


def check(groups: Any, case: Case, operation: str) -> None:
    under_plan, alone = OPERATIONS[operation]
    plan, lengths = case.plan, [tree.length for tree in case.trees]
    x, grads = (drawn(lengths, COLUMNS, seed=seed) for seed in (1, 2))
    expected = [
        each_text(alone, rows, grad, tree)
        for rows, grad, tree in zip(x, grads, case.trees, strict=True)
    ]
    for m in range(len(plan.micro_batches)):
        cp = hcp.ContextParallelHandler(plan, m, groups.transport, scan_type=case.scan_type)
        rows = rows_of(cp, x).requires_grad_()
        out = under_plan(cp, rows)
        out.backward(rows_of(cp, [grad[:, : out.shape[1]] for grad in grads]))
        real = cp.rows - cp.layout.padding
        assert rows.grad is not None
        for found, wanted in zip(
            (out.detach(), rows.grad), zip(*expected, strict=True), strict=True
        ):
            whole = rows_of(cp, list(wanted))
            torch.testing.assert_close(found[:real], whole[:real], rtol=0, atol=1e-10)


TREES = [name for name in OPERATIONS if name not in ("labels", "roll by -5", "sequence_to_head")]


@pytest.mark.parametrize("operation", TREES)
@settings(max_examples=20, deadline=None)
@given(cases())
def test_texts_of_a_tree_are_what_each_is_alone(operation: str, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passing, "ROUND_BYTES", case.round_bytes)
        hcp.loopback(case.ranks, lambda groups: check(groups, case, operation))
