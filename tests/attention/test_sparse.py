"""Sparse attention: keys that an indexer chooses, under any plan, against the published formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.features import handlers
from support.ranks import run_ranks
from support.sparse import SparseCase, gloo_errors, loopback_error
from torch import Tensor

import hcp


@pytest.mark.parametrize("degree", range(1, 9))
def test_any_degree_equals_one_rank(degree: int) -> None:
    lengths = (1, 2, 2 * degree - 1, 2 * degree, 2 * degree + 1, 13, 60, 3, 1)
    assert loopback_error(SparseCase(lengths, degree, degree)) <= 1e-10


@settings(max_examples=20)
@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([1, 3, 8, 64]),
    st.data(),
)
def test_drawn_cases_equal_one_rank(
    ranks: int, lengths: list[int], top_k: int, data: st.DataObject
) -> None:
    options: Any = {
        "min_degree": st.integers(1, ranks),
        "groups": st.sampled_from([4, 2, 1]),
        "alignment": st.sampled_from([1, 4]),
        **dict.fromkeys(("relu", "latent", "checkpointed"), st.booleans()),
    }
    taken = data.draw(st.fixed_dictionaries(options))
    assert loopback_error(SparseCase(tuple(lengths), ranks, top_k=top_k, **taken)) <= 1e-10


def test_mixed_degrees_and_ranks_without_rows_equal_one_rank() -> None:
    lengths = (31, 7, 11, 2, 5, 1, 8)
    groups = [(0, 1, [1, 5]), (1, 3, [0, 4]), (4, 2, [2]), (6, 1, [3])]
    later = [(2, 5, [6])]  # ranks 0 and 1 have no rows
    plan = hcp.Plan.from_dict(
        {
            "ranks": 7,
            "max_tokens_per_rank": 16,
            "lengths": lengths,
            "micro_batches": [
                {"groups": [dict(first_rank=f, degree=d, sequences=s) for f, d, s in batch]}
                for batch in (groups, later)
            ],
        }
    )
    assert loopback_error(SparseCase(lengths, 7), plan) <= 1e-10


@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_ranks_equal_one_rank(ranks: int) -> None:
    case = SparseCase((37, 5, 1), ranks, ranks)
    cases = [case, replace(case, latent=False, relu=False), replace(case, checkpointed=True)]
    assert max(map(max, run_ranks(ranks, gloo_errors, cases))) <= 1e-10


def test_a_few_queries_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcp.attention.sparse._ELEMENTS", 200)
    assert loopback_error(SparseCase((37, 5), 3, 3)) <= 1e-10


def test_keys_may_come_in_any_order() -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [23], min_degree=2)
        query, key = (torch.randn(cp.rows, 4, 8, dtype=torch.float64) for _ in range(2))
        own = cp.position_ids
        first, second = own // 2, own.masked_fill(own == 0, -1)
        outs = [
            cp.sparse.attention(query, key, key, indices=torch.stack(places, 1))[0]
            for places in ((first, second), (second, first))
        ]
        assert torch.allclose(*outs)

    hcp.loopback(2, check)


def test_all_keys_are_those_of_dense_attention() -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [23, 4], min_degree=2)
        query, key = (torch.randn(cp.rows, 4, 8, dtype=torch.float64) for _ in range(2))
        places = torch.arange(23).expand(cp.rows, -1)
        indices = places.masked_fill(places > cp.position_ids[:, None], -1)
        out, lse, weights = cp.sparse.attention(query, key, key, indices=indices)
        want, want_lse = cp.attention(query, key, key, return_lse=True)
        assert torch.allclose(out, want)
        assert torch.allclose(lse, want_lse)
        assert torch.allclose(weights.sum(1), torch.ones(cp.rows).double())

    hcp.loopback(2, check)


# ---- what travels --------------------------------------------------------------------------------


def test_only_rows_that_some_query_chose_travel_and_each_once() -> None:
    """The formulas of docs/concepts/sparse-attention.md."""
    degree, length, width = 4, 64, 8

    def sent(groups: Any) -> list[int]:
        (cp,) = handlers(groups, [length], min_degree=degree)
        query = torch.randn(cp.rows, 2, width, dtype=torch.float64, requires_grad=True)
        rows = torch.randn(cp.rows, width, dtype=torch.float64, requires_grad=True)
        start = groups.transport.bytes_sent
        cp.sparse.top_k(query, rows, torch.randn(cp.rows, 2).double(), 3)
        index = groups.transport.bytes_sent
        own = cp.position_ids.masked_fill(cp.position_ids == 0, -1)
        indices = torch.stack([0 * cp.position_ids, own], 1)  # the first key, and self
        out, *_ = cp.sparse.attention(
            query, rows, indices=indices, expand=lambda x: (x[:, None], x[:, None])
        )
        forward = groups.transport.bytes_sent
        out.sum().backward()
        return [index - start, forward - index, groups.transport.bytes_sent - forward]

    totals = [sum(of_rank) for of_rank in zip(*hcp.loopback(degree, sent), strict=True)]
    seen = 3 * (degree - 1) * length // 4  # by queries on other ranks
    fetched = degree - 1  # the first key, by all ranks but its own
    assert totals == [seen * width * 8, seen + fetched * width * 8, fetched * width * 8]


# ---- refused -------------------------------------------------------------------------------------


def tensors(cp: Any) -> dict[str, Tensor]:
    return {
        "query": torch.randn(cp.rows, 2, 4, dtype=torch.float64),
        "key": torch.randn(cp.rows, 4, dtype=torch.float64),
        "weights": torch.randn(cp.rows, 2, dtype=torch.float64),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": torch.zeros(9, 4)}, r"query has shape \(9, 4\), expected \(9, heads, size\)"),
        ({"key": torch.zeros(9, 3)}, r"key has shape \(9, 3\), expected \(9, 4\)"),
        ({"weights": torch.zeros(9, 4)}, r"weights has shape \(9, 4\), expected \(9, 2\)"),
        ({"weights": torch.zeros(9, 2).long()}, "weights is torch.int64 on cpu, expected one of"),
        ({"top_k": 0}, "top_k is 0, expected an integer >= 1"),
    ],
)
def test_an_indexer_that_does_not_fit_is_refused(options: Any, message: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9])
        cp.sparse.top_k(**{**tensors(cp), "top_k": 2, **options})

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"indices": torch.full((9, 2), 5)},
            r"indices\[0, 0\] is 5, expected -1 or a key up to the",
        ),
        (
            {"indices": torch.tensor([[0, -1, -1]] * 8 + [[4, 1, 4]])},
            r"indices\[8\] has key 4 twice, expected each key once: it would count as two",
        ),
        ({"indices": torch.full((9, 2), -2)}, r"indices\[0, 0\] is -2, expected -1 or"),
        (
            {"indices": torch.zeros(8, 2).long()},
            r"indices is torch.int64 of shape \(8, 2\), expect",
        ),
        ({"indices": torch.zeros(9, 2)}, "indices is torch.float32 of shape"),
        ({"key": torch.zeros(9, 1, 4).double()}, r"key \(9, 1, 4\) with expand=, expected"),
        ({"value": torch.zeros(9, 1, 4).double()}, "with expand=, expected"),
        ({"key": torch.zeros(9, 4)}, "key has 9 rows of torch.float32 on cpu, expected 9 of"),
        ({"expand": None}, "value is None, expected a tensor, or expand="),
        ({"expand": lambda x: (x, x)}, "expected a key and a value"),
        (
            {"expand": None, "key": torch.zeros(9, 1, 3), "value": torch.zeros(9, 1, 4)},
            "key has head size 3, expected 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: Any, message: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9])
        given: Any = {
            "query": tensors(cp)["query"],
            "key": torch.zeros(9, 4).double(),
            "indices": torch.zeros(9, 1).long(),
            "expand": lambda x: (x[:, None], x[:, None]),
        }
        cp.sparse.attention(**{**given, **options})

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


def test_masks_are_refused() -> None:
    def call(groups: Any) -> None:
        plan = hcp.plan([9], masks=[hcp.Mask.full(9)], ranks=1, max_tokens_per_rank=9)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        with pytest.raises(
            ValueError, match=r"cp\.sparse\.attention is called in a plan with the m"
        ):
            cp.sparse.attention(*3 * [torch.zeros(9, 1, 4)], indices=torch.zeros(9, 1).long())
        cp.sparse.top_k(**tensors(cp), top_k=2)

    with pytest.raises(ValueError, match=r"cp\.sparse\.top_k is called in a plan with the masks"):
        hcp.loopback(1, call)


def test_ranks_that_choose_different_numbers_of_keys_are_refused() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9], min_degree=2)
        cp.sparse.top_k(**tensors(cp), top_k=2 + groups.transport.rank)

    with pytest.raises(hcp.HcpError, match=r"is in another call: in sparse\.top_k, top_k differs"):
        hcp.loopback(2, call)


def test_a_rank_that_refuses_tells_the_others() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9], min_degree=2)
        given = tensors(cp)
        if groups.transport.rank:
            given["key"] = given["key"][:, :3]
        with pytest.raises((hcp.HcpError, ValueError), match="key has shape"):
            cp.sparse.top_k(**given, top_k=2)

    hcp.loopback(2, call)
