"""Attention under every plan equals attention on one rank over the whole sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, GlooGroups, attention_errors, gloo_errors, loopback_error, whole_sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankError, run_ranks, try_ranks

import hcp

TYPES = hcp.COMM_TYPES
MASKS = {"causal": True, "full": False}


def edge_lengths(degree: int) -> tuple[int, ...]:
    """Shorter than the chunks, exactly as long, a prime, and a giant with dust."""
    return (1, 2, 2 * degree - 1, 2 * degree, 2 * degree + 1, 13, 97, 3, 1)


@pytest.mark.parametrize("causal", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("degree", range(1, 8))
def test_any_degree_equals_one_rank(degree: int, comm_type: str, causal: bool) -> None:
    case = Case(edge_lengths(degree), degree, min_degree=degree, comm_type=comm_type, causal=causal)
    assert loopback_error(case) <= 1e-10


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)], ids=["1", "4", "all-to-one"])
@pytest.mark.parametrize("comm_type", TYPES)
def test_grouped_queries_equal_one_rank(comm_type: str, heads: tuple[int, int]) -> None:
    case = Case((29, 5, 1), 3, min_degree=3, comm_type=comm_type, heads=heads[0], kv_heads=heads[1])
    assert loopback_error(case) <= 1e-10


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (5, 5), (6, 2), (6, 3), (9, 3), (16, 4)])
@pytest.mark.parametrize("degree", [2, 3, 4, 7])
def test_heads_divide_over_any_degree(degree: int, heads: tuple[int, int]) -> None:
    case = Case((29, 5, 1), degree, min_degree=degree, comm_type="a2a", window=(9, 2), causal=False)
    case = replace(case, heads=heads[0], kv_heads=heads[1], value_dim=5, sinks=True, lse=True)
    assert loopback_error(case) <= 1e-10


@pytest.mark.parametrize("causal", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("comm_type", TYPES)
def test_mixed_degrees_in_one_micro_batch_equal_one_rank(comm_type: str, causal: bool) -> None:
    lengths = (31, 7, 11, 2, 5, 1, 8)
    groups = [(0, 1, [1, 5]), (1, 3, [0, 4]), (4, 2, [2]), (6, 1, [3])]
    later = [(2, 5, [6])]  # overlaps them; ranks 0 and 1 have no rows
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
    case = Case(lengths, 7, comm_type=comm_type, causal=causal)
    assert loopback_error(case, plan) <= 1e-10


@pytest.mark.parametrize("causal", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("window", [(0, 0), (3, 0), (5, 2), (-1, 4), (90, -1), (64, 64)])
@pytest.mark.parametrize("comm_type", TYPES)
def test_a_sliding_window_equals_one_rank(
    comm_type: str, window: tuple[int, int], causal: bool
) -> None:
    case = Case((301, 2, 70, 1, 5), 3, min_degree=3, window=window, comm_type=comm_type)
    assert loopback_error(replace(case, causal=causal, sinks=True, lse=True)) <= 1e-10


@pytest.mark.parametrize("comm_type", TYPES)
def test_a_window_in_bfloat16_rounds_as_one_rank_does(comm_type: str) -> None:
    case = Case((401, 17), 3, min_degree=3, window=(90, 0), comm_type=comm_type, dtype="bfloat16")
    alone = replace(case, ranks=1, min_degree=1)
    assert loopback_error(case) <= 3 * loopback_error(alone)


def test_layers_of_one_model_have_windows_of_their_own() -> None:
    case = Case((40, 9), 2, min_degree=2)

    def check(groups: object) -> None:
        cp, local = next(iter(dispatched(groups, case)))
        inputs = (local.query, local.key, local.value)
        narrow, wide = (cp.attention(*inputs, window_size=(left, 0)) for left in (0, 100))
        groups_of_heads = case.heads // case.kv_heads
        assert torch.allclose(narrow, local.value.repeat_interleave(groups_of_heads, 1))
        assert torch.equal(wide, cp.attention(*inputs))

    hcp.loopback(2, check)


WINDOW = st.one_of(st.integers(-1, 3), st.integers(-1, 220))


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 7))
    capacity = draw(st.sampled_from([2, 5, 16, 64]))
    longest = max(1, ranks * (capacity - 2))
    short = st.integers(1, min(longest, 2 * ranks + 1))
    lengths = draw(st.lists(st.one_of(short, st.integers(1, min(longest, 200))), max_size=7))
    min_degree = draw(st.integers(1, ranks))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
    return Case(
        tuple(lengths),
        ranks,
        capacity,
        min_degree,
        comm_type=draw(st.sampled_from(TYPES)),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.just((-1, -1)), st.tuples(WINDOW, WINDOW))),
        heads=heads,
        kv_heads=kv_heads,
        value_dim=draw(st.sampled_from([None, 3, 16])),
        sinks=draw(st.booleans()),
        lse=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60)
@given(drawn_cases())
def test_any_plan_equals_one_rank(case: Case) -> None:
    assert loopback_error(case) <= 1e-10


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gloo_ranks_equal_one_rank(ranks: int, comm_type: str) -> None:
    case = Case((97, 40, 13, 2, 1, 7), ranks, capacity=64, comm_type=comm_type)
    for min_degree, changes in (
        (1, {}),
        (ranks, {"sinks": True, "lse": True}),
        (ranks, {"causal": False, "value_dim": 5}),
        (1, {"window": (7, 0)}),
        (ranks, {"causal": False, "window": (20, 3)}),
    ):
        errors = run_ranks(ranks, gloo_errors, replace(case, min_degree=min_degree, **changes))
        assert max(map(max, errors)) <= 1e-10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("comm_type", TYPES)
def test_narrow_types_round_as_one_rank_does(comm_type: str, dtype: str) -> None:
    case = Case((129, 17), 4, min_degree=4, comm_type=comm_type, dtype=dtype, head_dim=16)
    alone = replace(case, ranks=1, min_degree=1)
    # One kernel call rounds as well; merging and summing add at most one rounding each.
    assert loopback_error(case) <= 3 * loopback_error(alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_of_the_lse_is_not_rounded_more_than_that_of_the_output(dtype: str) -> None:
    case = Case((61, 9), 3, min_degree=3, dtype=dtype, head_dim=16, sinks=True)
    alone = replace(case, ranks=1, min_degree=1)
    assert loopback_error(replace(case, lse=True)) <= 4 * loopback_error(alone)


@pytest.mark.parametrize("comm_type", TYPES)
def test_the_lse_alone_has_a_gradient(comm_type: str) -> None:
    case = Case((23, 4), 2, min_degree=2, comm_type=comm_type)

    def error(groups: object) -> float:
        cp, local = next(iter(dispatched(groups, case)))
        inputs = [local[name].clone().requires_grad_() for name in ("query", "key", "value")]
        _, lse = cp.attention(*inputs, return_lse=True)
        lse.backward(local.grad_lse)
        zeros = torch.zeros_like(local.grad)
        again = [x.detach().clone().requires_grad_() for x in inputs]
        both = cp.attention(*again, return_lse=True)
        torch.autograd.backward(both, (zeros, local.grad_lse))
        assert not inputs[2].grad.any()  # values do not matter to it
        assert inputs[1].grad.abs().max() > 0.01
        return max(float((a.grad - b.grad).abs().max()) for a, b in zip(inputs, again, strict=True))

    assert max(hcp.loopback(2, error)) <= 1e-14


@pytest.mark.parametrize("comm_type", TYPES)
def test_the_same_call_gives_the_same_bits(comm_type: str) -> None:
    case = Case((57, 9), 3, min_degree=3, comm_type=comm_type, dtype="bfloat16")

    def bits(groups: object) -> torch.Tensor:
        cp, local = next(iter(dispatched(groups, case)))
        out: torch.Tensor = cp.attention(local.query, local.key, local.value)
        return out

    first, second = hcp.loopback(3, bits), hcp.loopback(3, bits)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def dispatched(groups: object, case: Case) -> hcp.Step:
    plan, rank = case.plan(), groups.transport.rank  # type: ignore[attr-defined]
    sources = [0] * len(case.lengths)
    samples = whole_sequences(case) if rank == 0 else []
    return hcp.dispatch(plan, samples, sources, groups, comm_types=(case.comm_type,))


# ---- what travels --------------------------------------------------------------------------------


def rows_sent(case: Case, causal: bool = True) -> int:
    """Key and value rows that went between ranks in one forward."""

    def count(groups: object) -> int:
        step = dispatched(groups, case)
        before = groups.transport.rows_sent  # type: ignore[attr-defined]
        agreements = 0
        for cp, local in step:
            qkv = (local.query, local.key, local.value)
            cp.attention(*qkv, causal=causal, window_size=case.window)
            words = cp._schedules[case.comm_type, case.window[0], 0 if causal else case.window[1]]
            schedule = hcp.layout.Schedule(words)
            peers = {m.peer for stage in schedule.stages for m in stage.sends}
            agreements += len(peers - {groups.transport.rank})  # type: ignore[attr-defined]
        return int(groups.transport.rows_sent - before - agreements)  # type: ignore[attr-defined]

    return sum(hcp.loopback(case.ranks, count))


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_causal_all_gather_sends_three_quarters_of_the_ring(degree: int) -> None:
    length = 16 * degree
    ring = rows_sent(Case((length,), degree, min_degree=degree, comm_type="p2p"))
    gathered = rows_sent(Case((length,), degree, min_degree=degree, comm_type="all_gather"))
    assert ring == (degree - 1) * length
    assert gathered == ring * 3 // 4


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_all_gather_under_a_window_sends_a_window_for_each_border(degree: int) -> None:
    case = Case((16 * degree,), degree, min_degree=degree, comm_type="all_gather", window=(5, 0))
    # Of the 2d - 1 borders of chunks, one lies within a rank.
    assert rows_sent(case) == (2 * degree - 2) * 5


@pytest.mark.parametrize("degree", [2, 4])
def test_a2a_sends_each_row_but_for_the_own_heads(degree: int) -> None:
    case = Case((16 * degree,), degree, min_degree=degree, comm_type="a2a", heads=8, kv_heads=4)
    # There: query, key, value. Back: output and log-sum-exp. In bytes.
    row = 8 * (case.heads * case.head_dim * 2 + case.kv_heads * case.head_dim * 2 + case.heads)
    assert rows_sent(case) == case.lengths[0] * row * (degree - 1) // degree


def test_a_ring_computes_nothing_that_a_window_hides() -> None:
    plan = hcp.plan([64], ranks=4, max_tokens_per_rank=64, min_degree=4)
    words = hcp.layout.schedule_words(plan, 0, 0, "p2p", window_size=(4, 0), transport_key=0)
    stages = hcp.layout.Schedule(words).stages
    # Rank 0 holds tokens 0-7 and 56-63: the latter see tokens 52-55, of rank 1.
    assert [[e[:4] for e in stage.entries] for stage in stages[1:]] == [[], [], [(8, 4, 12, 4)]]


@pytest.mark.parametrize("comm_type", TYPES)
def test_degree_one_sends_nothing(comm_type: str) -> None:
    assert rows_sent(Case((9, 9), 2, max_degree=1, comm_type=comm_type)) == 0


# ---- odd ways to call ----------------------------------------------------------------------------


def test_strided_inputs_and_expanded_gradients_are_computed_right() -> None:
    case = Case((21,), 2, min_degree=2, heads=2, kv_heads=2)

    def error(groups: object) -> float:
        cp, local = next(iter(dispatched(groups, case)))
        fused = torch.stack([local.query, local.key, local.value], dim=-1).requires_grad_()
        cp.attention(*fused.unbind(-1)).sum().backward()
        dense = [local[name].clone().requires_grad_() for name in ("query", "key", "value")]
        cp.attention(*dense).backward(torch.ones_like(local.query))
        stacked = torch.stack([x.grad for x in dense], dim=-1)
        return float((fused.grad - stacked).abs().max())

    assert max(hcp.loopback(2, error)) <= 1e-14


def test_scale_replaces_the_default() -> None:
    case = Case((15,), 2, min_degree=2)

    def error(groups: object) -> float:
        cp, local = next(iter(dispatched(groups, case)))
        given_scale = cp.attention(local.query, local.key, local.value, softmax_scale=0.5)
        scaled = cp.attention(local.query * 0.5 * 8**0.5, local.key, local.value)
        return float((given_scale - scaled).abs().max())

    assert max(hcp.loopback(2, error)) <= 1e-14


def test_a_second_derivative_is_refused() -> None:
    case = Case((5,), 1)

    def differentiate(groups: object) -> None:
        cp, local = next(iter(dispatched(groups, case)))
        query = local.query.clone().requires_grad_()
        out = cp.attention(query, local.key, local.value)
        (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
        grad.sum().backward()

    with pytest.raises(NotImplementedError, match="differentiated twice, expected once"):
        hcp.loopback(1, differentiate)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[:-1], k, v), "query has 4 rows, expected 5"),
        (lambda q, k, v: (q, k[:, :, :4], v), "key has head_dim 4, expected 8"),
        (lambda q, k, v: (q, k, v[:, :1]), "value has 1 heads, expected 2"),
        (lambda q, k, v: (q[:, :3], k, v), "query has 3 heads, expected a multiple of the 2"),
        (lambda q, k, v: (q, k.float(), v), "key has dtype torch.float32, expected torch.float64"),
        (lambda q, k, v: (q.long(), k, v), "key has dtype torch.float64, expected torch.int64"),
        (lambda q, k, v: (q.flatten(1), k, v), r"query has shape \(5, 32\), expected \(rows"),
    ],
    ids=["rows", "head_dim", "value", "heads", "mixed", "integer", "dims"],
)
def test_a_wrong_tensor_is_refused_with_its_value(change: object, message: str) -> None:
    case = Case((5,), 1)

    def call(groups: object) -> None:
        cp, local = next(iter(dispatched(groups, case)))
        cp.attention(*change(local.query, local.key, local.value))  # type: ignore[operator]

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p is 0.1, expected 0.0"),
        ({"softcap": 30.0}, "softcap is 30.0, expected 0.0"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\), expected \(4,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks is torch.int32 on cpu, expected flo"),
    ],
    ids=["dropout", "softcap", "sinks", "integer-sinks"],
)
def test_an_option_that_no_kernel_has_is_refused(options: dict[str, object], message: str) -> None:
    def call(groups: object) -> None:
        cp, local = next(iter(dispatched(groups, Case((5,), 1))))
        cp.attention(local.query, local.key, local.value, **options)

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


def test_a_comm_type_that_was_not_prepared_is_refused() -> None:
    def call(groups: object) -> None:
        cp, local = next(iter(dispatched(groups, Case((5,), 1))))
        cp.attention(local.query, local.key, local.value, comm_type="all_gather")

    with pytest.raises(ValueError, match=r"comm_type is 'all_gather', expected one of \['p2p'\]"):
        hcp.loopback(1, call)


TRAITS = ["dtype", "heads", "mask", "scale"]


def differing_call(rank: int, size: int, trait: str, calls_before: int) -> None:
    cp, local = next(iter(dispatched(GlooGroups(), Case((40,), size, min_degree=size))))
    inputs = [local.query, local.key, local.value]
    for _ in range(calls_before):
        cp.attention(*inputs)
    options = {}
    if rank == 1:
        change = {"dtype": lambda x: x.float(), "heads": lambda x: torch.cat([x, x], 1)}.get(trait)
        inputs = [change(x) for x in inputs] if change else inputs
        options = {"mask": {"causal": False}, "scale": {"softmax_scale": 0.5}}.get(trait, {})
    cp.attention(*inputs, **options)


@pytest.mark.parametrize("trait", TRAITS)
def test_ranks_that_call_differently_all_get_an_error(trait: str) -> None:
    results = try_ranks(2, differing_call, trait, 0, timeout=30)
    for rank, result in enumerate(results):
        assert isinstance(result, RankError)
        assert result.kind == "HcpError"
        assert f"rank {rank}: the call differs between ranks" in result.message


@pytest.mark.parametrize("trait", TRAITS)
def test_ranks_that_differ_later_never_read_rows_that_are_not_theirs(trait: str) -> None:
    """The rank that changes its call waits for an agreement, the other for rows: until the
    timeout, and without a wrong number."""
    for result in try_ranks(2, differing_call, trait, 1, timeout=60):
        assert isinstance(result, RankError)
        assert result.kind == "HcpError"


def dies_in_attention(rank: int, size: int) -> None:
    cp, local = next(iter(dispatched(GlooGroups(), Case((40,), size, min_degree=size))))
    if rank == 1:
        raise OSError("disk gone")
    cp.attention(local.query, local.key, local.value)


def test_a_rank_that_fails_before_attention_ends_the_others() -> None:
    results = try_ranks(3, dies_in_attention, timeout=60)
    assert [r.kind for r in results] == ["HcpError", "OSError", "HcpError"]
    assert "rank 0: the exchange with ranks" in results[0].message


def test_the_case_itself_compares_something() -> None:
    """A wrong answer would be noticed: errors of half the data are not small."""
    case = Case((33,), 2, min_degree=2)
    wrong = replace(case, seed=1)

    def error(groups: object) -> float:
        errors = attention_errors(groups, case)
        cp, local = next(iter(dispatched(groups, wrong)))
        out = cp.attention(local.query, local.key, local.value)
        right = dispatched(groups, case)
        cp, local = next(iter(right))
        return float((cp.attention(local.query, local.key, local.value) - out).abs().max()) - sum(
            errors
        )

    assert min(hcp.loopback(2, error)) > 0.1
