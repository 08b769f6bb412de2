"""Queries of one layout against keys of another equal those on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.along_documents import rows_of
from support.cases import GlooGroups
from support.features import drawn, rows_here
from support.ranks import run_ranks
from support.trees import Tree
from torch import Tensor

import hcp
from hcp.attention.cross import KeyRoute


class Options(NamedTuple):
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    cap: float = 0.0
    sinks: bool = False


def hidden(queries: int, keys: int, options: Options) -> Tensor:
    """Whether a key is hidden from a query, the last of both being aligned."""
    left, right = options.window
    right = 0 if options.causal else right
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    none = torch.zeros(queries, keys, dtype=torch.bool)
    return (ahead < -left if left >= 0 else none) | (ahead > right if right >= 0 else none)


def whole(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Options) -> list[Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    scores = options.cap * (scores / options.cap).tanh() if options.cap else scores
    mask = hidden(len(q), len(k), options)
    blind = mask.all(1) & (sinks is None)
    # A row that sees nothing gives 0 and -inf, and has no gradient.
    scores = scores.masked_fill(mask & ~blind[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], 2)
    weights = scores.softmax(-1)[..., : len(k)].masked_fill(blind[:, None], 0)
    lse = scores.logsumexp(-1).masked_fill(blind, -torch.inf)
    return [torch.einsum("hqk,khd->qhd", weights, v), lse.t()]


def difference(result: Tensor, want: Tensor) -> float:
    """The largest; rows that see nothing have the same -inf."""
    assert result.shape == want.shape
    assert not result.isnan().any()
    assert torch.equal(result.isinf(), want.isinf())
    finite = want.isfinite()
    return float((result - want)[finite].abs().max()) if finite.any() else 0.0


def handler(
    groups: Any, lengths: Any, degree: int, sizes: Sequence[int] = ()
) -> hcp.ContextParallelHandler:
    """One micro-batch. ``sizes``: how many of these lengths, as documents, are each sequence."""
    masks = [hcp.Mask.documents(own) for own in split(lengths, sizes)] if sizes else None
    plan = hcp.plan(
        [sum(own) for own in split(lengths, sizes)],
        masks=masks,
        ranks=groups.transport.size,
        max_tokens_per_rank=4096,
        min_degree=degree,
    )
    assert len(plan.micro_batches) == 1
    return hcp.ContextParallelHandler(plan, 0, groups.transport)


def split(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Items in runs of these sizes, or one by one."""
    each = iter(items)
    return [list(itertools.islice(each, size)) for size in sizes or [1] * len(items)]


def error(
    groups: Any,
    lengths: Any,
    key_lengths: Any,
    degrees: tuple[int, int],
    options: Options,
    sizes: Sequence[int] = (),
) -> float:
    """``sizes``: see ``handler``."""

    def joined(parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(own) for own in split(parts, sizes)]

    inputs = [drawn(lengths, 4, 6, seed=1), drawn(key_lengths, 2, 6, seed=2)]
    inputs += [drawn(key_lengths, 2, 5, seed=3)]
    grad, grad_lse = drawn(lengths, 4, 5, seed=4), drawn(lengths, 4, seed=5)
    whole_sinks = torch.randn(4, generator=torch.Generator().manual_seed(6)).double()
    whole_sinks.requires_grad_()
    answers: list[list[Tensor]] = []
    for s in range(len(lengths)):
        leaves = [x[s].clone().requires_grad_() for x in inputs]
        out, lse = whole(*leaves, whole_sinks if options.sinks else None, options)
        torch.autograd.backward((out, lse), (grad[s], grad_lse[s]))
        answers.append([out.detach(), lse.detach(), *(x.grad for x in leaves)])

    cp = handler(groups, lengths, degrees[0], sizes)
    keys = handler(groups, key_lengths, degrees[1], sizes)
    sides = (cp, keys, keys)
    leaves = [rows_here(c, joined(x)).requires_grad_() for c, x in zip(sides, inputs, strict=True)]
    sinks = whole_sinks.detach().clone().requires_grad_() if options.sinks else None
    given: Any = {"causal": options.causal, "window_size": options.window, "softcap": options.cap}
    out, lse = cp.cross_attention(*leaves, keys, sinks=sinks, return_lse=True, **given)
    grads = rows_here(cp, joined(grad)), rows_here(cp, joined(grad_lse))
    torch.autograd.backward((out, lse), grads)
    results = [out.detach(), lse.detach(), *(x.grad for x in leaves)]
    worst = 0.0
    for n, (result, side) in enumerate(zip(results, (cp, cp, *sides), strict=True)):
        want = rows_here(side, joined([answer[n] for answer in answers]))
        worst = max(worst, difference(result, want))
    if sinks is not None:
        shares = groups.transport.all_gather_bytes(str(sinks.grad.tolist()).encode(), "test")
        total = sum(torch.tensor(eval(share), dtype=torch.float64) for share in shares)
        worst = max(worst, float((total - whole_sinks.grad).abs().max()))
    return worst


OPTIONS = st.builds(
    Options,
    st.booleans(),
    st.tuples(st.integers(-1, 20), st.integers(-1, 20)),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=4),
    OPTIONS,
    st.data(),
)
def test_cross_attention_of_two_layouts_equals_one_rank(
    ranks: int, pairs: list[tuple[int, int]], options: Options, data: st.DataObject
) -> None:
    degrees = data.draw(st.tuples(st.integers(1, ranks), st.integers(1, ranks)))
    lengths, key_lengths = zip(*pairs, strict=True)
    errors = hcp.loopback(
        ranks, lambda groups: error(groups, lengths, key_lengths, degrees, options)
    )
    assert max(errors) < 1e-10


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.lists(
        st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    OPTIONS,
    st.data(),
)
def test_queries_of_a_document_see_the_keys_of_the_one_of_its_number(
    ranks: int, packs: list[list[tuple[int, int]]], options: Options, data: st.DataObject
) -> None:
    degrees = data.draw(st.tuples(st.integers(1, ranks), st.integers(1, ranks)))
    lengths, key_lengths = zip(*itertools.chain.from_iterable(packs), strict=True)
    sizes = [len(own) for own in packs]
    errors = hcp.loopback(
        ranks, lambda groups: error(groups, lengths, key_lengths, degrees, options, sizes)
    )
    assert max(errors) < 1e-10


def test_more_documents_of_queries_than_of_keys_are_refused() -> None:
    def call(groups: Any) -> None:
        cp, keys = handler(groups, (5, 4), 1, [2]), handler(groups, (3,), 1, [1])
        cp.cross_attention(torch.zeros(9, 1, 2), *[torch.zeros(3, 1, 2)] * 2, keys)

    message = r"sequence 0 has 2 documents in the queries' plan and 1 in the keys', expected as m"
    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


def gloo_errors(rank: int, size: int) -> list[float]:
    masks = Options(sinks=True), Options(causal=True), Options(window=(7, 3))
    return [error(GlooGroups(), (20, 3, 9), (5, 40, 1), (3, 2), mask) for mask in masks]


def test_cross_attention_works_on_gloo_ranks() -> None:
    assert max(map(max, run_ranks(3, gloo_errors))) < 1e-10


def test_the_last_query_sees_the_last_key_and_first_queries_without_keys_give_zeros() -> None:
    """5 queries, 3 keys, causal: the first two stand before the first key."""

    def call(groups: Any) -> Tensor:
        cp, keys = handler(groups, (5,), 1), handler(groups, (3,), 1)
        q, v = torch.zeros(5, 1, 2), torch.tensor([3.0, 5.0, 10.0]).view(3, 1, 1).expand(-1, 1, 2)
        return cp.cross_attention(q, v, v, keys, causal=True)[:, 0, 0]

    (out,) = hcp.loopback(1, call)
    assert out.tolist() == [0, 0, 3, 4, 6]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_sink_of_minus_infinity_is_none(dtype: torch.dtype) -> None:
    """Of 5 queries that see up to 3 keys the first two see none. The second head has a sink."""

    def results(groups: Any, sinks: Tensor | None) -> list[Tensor]:
        cp, keys = handler(groups, (5,), 2), handler(groups, (3,), 2)
        wholes = [drawn((n,), 2, 4, seed=n, dtype=dtype) for n in (5, 3, 3)]
        sides = zip((cp, keys, keys), wholes, strict=True)
        leaves = [rows_here(c, x).requires_grad_() for c, x in sides]
        given = [] if sinks is None else [sinks.requires_grad_()]
        out, lse = cp.cross_attention(*leaves, keys, causal=True, sinks=sinks, return_lse=True)
        (out.sum() + lse.masked_fill(lse.isinf(), 0).sum()).backward()
        return [out.detach(), lse.detach(), *(x.grad for x in (*leaves, *given))]

    def check(groups: Any) -> None:
        *found, grad = results(groups, torch.tensor([-torch.inf, 0.5]).double())
        for x, want in zip(found, results(groups, None), strict=True):
            assert not x.isnan().any()
            assert torch.allclose(x[:, 0].double(), want[:, 0].double(), rtol=0.01)
        assert grad[0] == 0
        assert grad[1] != 0

    hcp.loopback(2, check)


def test_only_the_keys_that_are_seen_travel() -> None:
    """Each of 4 ranks has 2 of 8 runs of 10 queries, whose window reaches 4 keys back."""

    def received(groups: Any, window: tuple[int, int]) -> int:
        cp, keys = handler(groups, (80,), 4), handler(groups, (80,), 4)
        route = KeyRoute(cp.layout, keys.layout, window)
        rank = groups.transport.rank
        assert route.output_rows == sum(move.rows for move in route.receives)
        return sum(move.rows for move in route.receives if move.peer != rank)

    # The first run has nothing before it, and rank 3's two runs lie side by side.
    assert hcp.loopback(4, lambda groups: received(groups, (4, 0))) == [4, 8, 8, 4]
    assert hcp.loopback(4, lambda groups: received(groups, (-1, -1))) == [60] * 4


def test_keys_of_other_sequences_are_refused() -> None:
    def call(groups: Any) -> None:
        cp, keys = handler(groups, (5, 6), 1), handler(groups, (7,), 1)
        x, y = torch.zeros(11, 1, 4), torch.zeros(7, 1, 4)
        cp.cross_attention(x, y, y, keys)

    with pytest.raises(ValueError, match=r"queries' micro-batch has sequences \[0, 1\] on 1 ranks"):
        hcp.loopback(1, call)


def test_rows_of_the_wrong_side_are_refused() -> None:
    def call(groups: Any) -> None:
        cp, keys = handler(groups, (5,), 1), handler(groups, (7,), 1)
        x = torch.zeros(5, 1, 4)
        cp.cross_attention(x, x, x, keys)

    with pytest.raises(ValueError, match="key has 5 rows, expected 7: this rank's rows in keys="):
        hcp.loopback(1, call)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_texts_of_a_tree_see_all_keys_of_their_sequence(ranks: int) -> None:
    """Each text is computed alone; a token that texts share counts once."""
    tree, sizes = Tree((7, 5, 3, 1, 6), (-1, 0, 0, 1, 0)), [11, 4]
    lengths = [tree.length, 3]
    q, g = (drawn(lengths, 8, seed=seed) for seed in (1, 2))
    k, v = (drawn(sizes, 8, seed=seed) for seed in (3, 4))
    given = [[x.requires_grad_() for x in own] for own in (q, k, v)]
    expected = [torch.zeros_like(x) for x in q]
    for i, own in enumerate((tree, Tree((3,), (-1,)))):
        for text, first in zip(own.texts, own.firsts, strict=True):
            alone = (x.unflatten(1, (2, 4)) for x in (q[i][text], k[i], v[i]))
            out = whole(*alone, None, Options())[0].flatten(1)
            out[first].backward(g[i][text][first])
            expected[i][text] = out.detach()
    grads = [[x.grad for x in own] for own in given]

    def check(groups: Any) -> None:
        options = {"ranks": ranks, "max_tokens_per_rank": 64, "min_degree": ranks}
        masks = [tree.mask, None]
        plans = hcp.plan(lengths, masks=masks, **options), hcp.plan(sizes, **options)
        cp, keys = (hcp.ContextParallelHandler(plan, 0, groups.transport) for plan in plans)
        mine = [
            rows_of(at, [x.detach() for x in own]).requires_grad_()
            for at, own in zip((cp, keys, keys), given, strict=True)
        ]
        out = cp.cross_attention(*(x.unflatten(1, (2, 4)) for x in mine), keys).flatten(1)
        out.backward(rows_of(cp, g))
        assert difference(out.detach(), rows_of(cp, expected)) < 1e-10
        for at, x, grad in zip((cp, keys, keys), mine, grads, strict=True):
            assert difference(x.grad, rows_of(at, grad)) < 1e-10

    hcp.loopback(ranks, check)
