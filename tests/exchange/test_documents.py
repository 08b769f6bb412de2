"""Documents of one sequence are to states, convolutions, rolls and scans what they are alone; what
these calls cannot do in a plan with branches is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import masks as drawn_masks
from support.along_documents import COLUMNS, OPERATIONS, rows_of
from support.features import drawn
from torch import Tensor

import hcp
from hcp import Mask
from hcp.exchange import states as passing
from hcp.exchange.layout import Layout

# ---- drawn plans ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A plan of sequences of several documents. Those that are not masked are one document."""

    documents: tuple[tuple[int, ...], ...]
    masked: tuple[bool, ...]
    ranks: int
    min_degree: int
    alignment: int
    named: bool
    scan_type: str
    round_bytes: int

    @property
    def plan(self) -> hcp.Plan:
        masks = [
            Mask.documents([Mask.full(n) if n % 5 == 4 else n for n in own]) if masked else None
            for own, masked in zip(self.documents, self.masked, strict=True)
        ]
        windows = [
            Mask.documents([Mask.window(n, 2) for n in own]) if masked else None
            for own, masked in zip(self.documents, self.masked, strict=True)
        ]
        return hcp.plan(
            [sum(own) for own in self.documents],
            masks={"all": masks, "near": windows} if self.named else masks,
            ranks=self.ranks,
            min_degree=self.min_degree,
            alignment=self.alignment,
            max_tokens_per_rank=64,
        )

    @property
    def alone(self) -> list[tuple[int, ...]]:
        """What each sequence is made of."""
        pairs = zip(self.documents, self.masked, strict=True)
        return [own if masked else (sum(own),) for own, masked in pairs]


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 4))
    documents = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=4)))
    masked = draw(st.lists(st.sampled_from([True, True, False]), min_size=4, max_size=4))
    return Case(
        documents,
        tuple(masked[: len(documents)]),
        ranks,
        draw(st.integers(1, ranks)),
        draw(st.sampled_from([1, 4])),
        draw(st.booleans()),
        draw(st.sampled_from(["pass_states", "auto"])),
        draw(st.sampled_from([0, 1 << 40])),
    )


def expected_of(case: Case, alone: Any, x: list[Tensor], grads: list[Tensor]) -> list[list[Tensor]]:
    """Results and gradients of each sequence, whose documents are computed one by one."""
    found = []
    for sizes, rows, grad in zip(case.alone, x, grads, strict=True):
        leaves = [part.clone().requires_grad_() for part in rows.split(list(sizes))]
        outs = torch.cat([alone(leaf) for leaf in leaves])
        outs.backward(grad[:, : outs.shape[1]])
        found.append([outs.detach(), torch.cat([leaf.grad for leaf in leaves])])
    return found


def check(groups: Any, case: Case, operation: str) -> None:
    under_plan, alone = OPERATIONS[operation]
    plan, lengths = case.plan, [sum(own) for own in case.documents]
    x, grads = (drawn(lengths, COLUMNS, seed=seed) for seed in (1, 2))
    expected = expected_of(case, alone, x, grads)
    for m in range(len(plan.micro_batches)):
        cp = hcp.ContextParallelHandler(plan, m, groups.transport, scan_type=case.scan_type)
        rows = rows_of(cp, x).requires_grad_()
        out = under_plan(cp, rows)
        out.backward(rows_of(cp, [grad[:, : out.shape[1]] for grad in grads]))
        real = cp.rows - cp.layout.padding
        for found, i in ((out.detach(), 0), (rows.grad, 1)):
            assert found is not None
            wanted = rows_of(cp, [own[i] for own in expected])
            torch.testing.assert_close(found[:real], wanted[:real], rtol=0, atol=1e-10)


@pytest.mark.parametrize("operation", OPERATIONS)
@settings(max_examples=20)
@given(cases())
def test_documents_of_a_sequence_are_what_each_is_alone(operation: str, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passing, "ROUND_BYTES", case.round_bytes)
        hcp.loopback(case.ranks, lambda groups: check(groups, case, operation))


@pytest.mark.parametrize("operation", ["delta_rule", "pass_states", "sequence_to_head"])
def test_more_documents_than_ranks_have_rows_of(operation: str) -> None:
    """Documents of one token, ranks without rows, and a sequence that a border parts on no rank."""
    case = Case(((1,) * 9, (1, 1), (16, 16)), (True,) * 3, 4, 4, 1, False, "auto", 0)
    hcp.loopback(4, lambda groups: check(groups, case, operation))


# ---- what is a document --------------------------------------------------------------------------


def slow_documents(masks: list[Mask]) -> list[int] | None:
    """Where documents of a sequence begin by the definition, None for one with branches."""
    positions, seen = masks[0].positions, [mask.dense() for mask in masks]
    starts = [0]
    for token in range(1, len(positions)):
        if positions[token] == positions[token - 1] + 1:
            continue
        if not any(one[token:, :token].any() or one[:token, token:].any() for one in seen):
            starts.append(token)
        elif not any(one[token, token - 1] for one in seen):
            return None
    return starts


def documents_of(masks: list[Mask]) -> list[int] | None:
    length = masks[0].length
    named = {str(i): [mask] for i, mask in enumerate(masks)}
    plan = hcp.plan([length], masks=named, ranks=1, max_tokens_per_rank=length)
    try:
        plan.core.expect_no_branches("a test")
    except ValueError:
        return None
    return [start for _, start, _ in Layout(plan, 0, 0).documents]


def with_positions(mask: Mask | None, length: int, runs: Any) -> Mask:
    return Mask(length, mask.slices if mask else Mask.causal(length).slices, runs)


@settings(max_examples=300)
@given(st.randoms(use_true_random=False), st.integers(1, 14))
def test_documents_and_branches_follow_from_masks_and_positions(r: Random, length: int) -> None:
    kinds = [drawn_masks.KINDS[r.choice(list(drawn_masks.KINDS))] for _ in range(r.randint(1, 3))]
    given_masks = [make(r, length) for make in kinds]
    runs = given_masks[0].runs if given_masks[0] and r.random() < 0.5 else None
    if runs is None and r.random() < 0.8:
        tokens = sorted({0, *(r.randrange(length) for _ in range(r.randint(0, 3)))})
        runs = [(token, r.randint(0, 6)) for token in tokens]
    made = [with_positions(mask, length, runs) for mask in given_masks]
    assert documents_of(made) == slow_documents(made)


CASES: dict[str, tuple[Mask, list[int] | None]] = {
    "one document": (Mask.documents([5]), [0]),
    "documents": (Mask.documents([3, Mask.full(2), 1]), [0, 3, 5]),
    "documents whose positions go on": (Mask.documents([3, 2], restart=False), [0]),
    "positions that restart or jump": (Mask.from_positions([0, 1, 0, 5, 6]), [0, 2, 3]),
    "a tree of roots alone": (Mask.tree([3, 2], [-1, -1]), [0, 3]),
    "a tree that is a chain": (Mask.tree([3, 2], [-1, 0]), [0]),
    "answers to one prompt": (Mask.shared_prefix(3, [2, 2]), None),
    "answers of one token": (Mask.shared_prefix(3, [1, 1]), None),
    "a tree whose positions seem to go on": (Mask.tree([4, 4, 2], [-1, -1, 0]), None),
    "a tree among documents": (Mask.documents([Mask.shared_prefix(2, [1, 1]), 3]), None),
    "chunks": (Mask.chunked(9, 4), [0]),
    "a prefix": (Mask.prefix_lm(9, 4), [0]),
    "a window": (Mask.window(9, 1), [0]),
    "images whose tokens share a position": (
        Mask(6, [((0, 6), (0, 6), "causal")], [(0, 0), (2, 1), (3, 1), (4, 7)]),
        [0],
    ),
    "positions that restart in one causal text": (
        Mask(6, [((0, 6), (0, 6), "causal")], [(0, 0), (3, 0)]),
        [0],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_a_document(name: str) -> None:
    mask, starts = CASES[name]
    assert documents_of([mask]) == starts == slow_documents([mask])


def test_a_layer_of_another_name_that_looks_across_makes_one_text_of_documents() -> None:
    causal = Mask(6, [((0, 6), (0, 6), "causal")], [(0, 0), (3, 0)])
    assert documents_of([Mask.documents([3, 3]), causal]) == [0]


def test_bounds_name_documents_and_rows_keep_their_places() -> None:
    masks = [Mask.documents([2, 6]), None, Mask.documents([1, 1, 1])]
    plan = hcp.plan(
        [8, 6, 3], masks=masks, ranks=2, min_degree=2, max_tokens_per_rank=16, alignment=4
    )

    def bounds(groups: Any) -> Any:
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        whole = {"token": torch.arange(17.0)}
        own = hcp.get_batch_on_this_cp_rank(whole, cp_handler=cp)["token"]
        rows = cp.whole.row_indices[: cp.rows - cp.layout.padding]
        assert torch.equal(own[: len(rows)], whole["token"][rows])
        assert int(cp.whole.cu_seqlens[-1]) == 17 + sum(cp.layout.paddings)
        params = cp.packed_seq_params()
        return cp.whole.cu_seqlens.diff().tolist()[:6], params.cu_seqlens_q.diff().tolist()[:6]

    sizes = {0: [2, 6], 1: [6], 2: [1, 1, 1]}
    order = Layout(plan, 0, 0).sequences
    want = list(itertools.chain.from_iterable(sizes[s] for s in order))
    assert hcp.loopback(2, bounds) == [(want, want)] * 2


# ---- refused -------------------------------------------------------------------------------------

X = torch.zeros(8, COLUMNS).double()
CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{
        name: (call, lambda cp, f=OPERATIONS[name][0]: f(cp, X[: cp.rows]))
        for name, call in {
            "pass_states": "scan.pass_states",
            "pass_maps": "scan.pass_maps",
            "sequence_to_head": "whole.sequence_to_head",
            "convolve": "scan.halo",
            "labels": "roll_tensor",
            "delta_rule": "scan.choose",
            "scan_mamba": "scan.pass_states",
        }.items()
    },
    "halo_rows": ("scan.halo", lambda cp: cp.scan.halo_rows(2)),
    "choose_scan": ("scan.choose", lambda cp: cp.scan.choose(2, row_bytes=8, state_bytes=8)),
    "cross_attention": ("cross_attention", lambda cp: cp.cross_attention(*[rows_for(cp)] * 3, cp)),
}


def rows_for(cp: Any) -> Tensor:
    return torch.zeros(cp.rows, 2, 4)


def refusals(mask: Mask, name: str, ranks: int) -> list[str]:
    """What each rank is told in a micro-batch of other sequences, and on ranks without rows."""
    plan = hcp.plan(
        [3, 8], masks=[None, mask], ranks=ranks + 1, max_tokens_per_rank=8, max_degree=ranks
    )

    def refused(groups: Any) -> str:
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        with pytest.raises(ValueError, match=r"branch.* expected") as found:
            CALLS[name][1](cp)
        return str(found.value)

    return hcp.loopback(ranks + 1, refused)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["cross_attention", "labels", "sequence_to_head"])
def test_branches_are_refused_by_the_name_of_the_call(name: str, ranks: int) -> None:
    message = (
        f"cp.{CALLS[name][0]} is called in a plan in which the mask of sequence 1 has branches (a "
        "tree, a shared prefix), expected none: "
    )
    assert all(message in x for x in refusals(Mask.shared_prefix(4, [2, 2]), name, ranks))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_branch_of_two_parents_is_refused_by_the_name_of_the_call(name: str, ranks: int) -> None:
    said = f"cp.{CALLS[name][0]} is called in a plan in which the mask of sequence 1 has branches"
    assert all(x.startswith(said) for x in refusals(drawn_masks.joined(), name, ranks))


def test_branches_hinder_attention_in_nothing() -> None:
    plan = hcp.plan([8], masks=[Mask.shared_prefix(4, [2, 2])], ranks=1, max_tokens_per_rank=8)

    def computed(groups: Any) -> list[int]:
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        value = torch.eye(8).view(8, 1, 8)
        out = cp.attention(torch.zeros(8, 1, 8), torch.zeros(8, 1, 8), value)
        return (out[:, 0] > 0).sum(1).tolist()

    assert hcp.loopback(1, computed) == [[1, 2, 3, 4, 5, 6, 5, 6]]
