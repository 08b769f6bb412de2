"""Attention under every plan equals attention on one rank over the whole sequences."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import (
    RESULTS,
    Case,
    GlooGroups,
    attention_errors,
    dispatched,
    gloo_errors,
    loopback_error,
    loopback_rms,
    staged_by,
)
from support.ranks import RankError, run_ranks, try_ranks

import hcp
import hcp.exchange.tables
from hcp.attention import kernel_calls, key_transfer
from hcp.attention import layer as attend
from hcp.exchange.tables import Schedule, ScheduleHeader, schedule_words

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


@pytest.mark.parametrize("value_dim", [3, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_row_of_narrow_heads_on_each_rank_equals_one_rank(dtype: str, value_dim: int) -> None:
    case = Case((2,), 2, min_degree=2, comm_type="a2a", heads=2, kv_heads=1, dtype=dtype)
    assert loopback_error(replace(case, head_dim=3, value_dim=value_dim)) <= 0.02


@pytest.mark.parametrize("length", [2, 9])
def test_values_of_one_element_are_read_where_they_lie(length: int) -> None:
    case = Case((length,), 2, min_degree=2, heads=2, value_dim=1, sharing=True)
    assert loopback_error(case) <= 1e-10


@pytest.mark.parametrize("comm_type", TYPES)
def test_gradients_of_one_element_may_come_expanded(comm_type: str) -> None:
    case = Case((2,), 2, min_degree=2, comm_type=comm_type, heads=1, kv_heads=1, head_dim=1)

    def check(groups: object) -> None:
        ((cp, local),) = dispatched(groups, case)
        query, key, value = (x.requires_grad_() for x in (local.query, local.key, local.value))
        cp.attention(query, key, value).sum().backward()
        cp.whole.sequence_to_head(value).sum().backward()

    hcp.loopback(2, check)


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


STAGE_TOKENS = st.sampled_from([1, 20, hcp.exchange.tables.STAGE_TOKENS])


@pytest.mark.parametrize("sharing", [False, True], ids=["sent", "read"])
@pytest.mark.parametrize("causal", MASKS.values(), ids=MASKS)
def test_keys_that_come_in_several_stages_equal_one_rank(causal: bool, sharing: bool) -> None:
    case = Case(
        (40, 31, 2, 64, 7, 29, 50), 4, min_degree=4, comm_type="all_gather", stage_tokens=30
    )
    case = replace(case, causal=causal, sharing=sharing, sinks=True, lse=True)
    with staged_by(case.stage_tokens):
        stages = [
            len(Schedule(words_of(case.plan(), rank, case.comm_type)).stages) for rank in range(4)
        ]
    assert stages == [4] * 4  # the local one and three
    assert loopback_error(case) <= 1e-10
    assert loopback_error(replace(case, window=(9, 2), stage_tokens=9)) <= 1e-10


def words_of(
    plan: hcp.Plan, rank: int, comm_type: str, window: tuple[int, int] = (-1, 0)
) -> torch.Tensor:
    return schedule_words(
        plan, hcp.exchange.tables.ScheduleHeader(rank=rank), comm_type, window_size=window
    )


WINDOW = st.one_of(st.integers(-1, 3), st.integers(-1, 220))


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 7))
    capacity = draw(st.sampled_from([2, 5, 16, 64]))
    alignment = draw(st.sampled_from([1, 1, 2, 3, 8]))
    alignment = alignment if capacity >= 2 * alignment + 2 else 1
    longest = max(1, ranks * (capacity // alignment * alignment - 2))
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
        sharing=draw(st.booleans()),
        stage_tokens=draw(STAGE_TOKENS),
        seed=draw(st.integers(0, 99)),
        alignment=alignment,
    )


@settings(max_examples=60)
@given(drawn_cases())
def test_any_plan_equals_one_rank(case: Case) -> None:
    assert loopback_error(case) <= 1e-10


@st.composite
def mixed_cases(draw: st.DrawFn) -> tuple[Case, hcp.Plan]:
    """Groups of degrees 1 to 8 side by side in one micro-batch, perhaps nodes of 2 to 4 ranks."""
    node = draw(st.sampled_from([0, 0, 2, 4]))
    allowed = [d for d in range(1, 9) if not node or d % node == 0 or d < node]
    degrees = draw(st.lists(st.sampled_from(allowed), min_size=1, max_size=3))
    groups, lengths, first = [], [], 0
    for degree in degrees:
        if node and first // node != (first + degree - 1) // node:
            first = -(-first // node) * node  # within a node, or whole nodes
        own = draw(
            st.lists(
                st.one_of(st.integers(1, 2 * degree + 1), st.integers(1, 90)),
                min_size=1,
                max_size=3,
            )
        )
        sequences = list(range(len(lengths), len(lengths) + len(own)))
        groups.append({"first_rank": first, "degree": degree, "sequences": sequences})
        lengths += own
        first += degree
    ranks = first + draw(st.integers(0, 1))
    ranks = -(-ranks // node) * node if node else ranks
    plan = hcp.Plan.from_dict(
        {
            "ranks": ranks,
            "max_tokens_per_rank": 4096,
            "ranks_per_node": node,
            "lengths": lengths,
            "micro_batches": [{"groups": groups}],
        }
    )
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1), (6, 3), (8, 8), (5, 5)]))
    case = Case(
        tuple(lengths),
        ranks,
        comm_type=draw(st.sampled_from(TYPES)),
        sizes=(draw(st.integers(1, 8)), draw(st.integers(1, 2)), 2),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.just((-1, -1)), st.tuples(WINDOW, WINDOW))),
        heads=heads,
        kv_heads=kv_heads,
        value_dim=draw(st.sampled_from([None, 3, 16])),
        sinks=draw(st.booleans()),
        lse=draw(st.booleans()),
        sharing=draw(st.booleans()),
        stage_tokens=draw(STAGE_TOKENS),
        seed=draw(st.integers(0, 99)),
    )
    return case, plan


@settings(max_examples=60)
@given(mixed_cases())
def test_any_mix_of_degrees_equals_one_rank(drawn: tuple[Case, hcp.Plan]) -> None:
    assert loopback_error(*drawn) <= 1e-10


@pytest.mark.parametrize("causal", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("alignment", [2, 8, 16])
def test_rows_of_padding_change_nothing(alignment: int, comm_type: str, causal: bool) -> None:
    for degree in (1, 2, 3, 5):
        case = Case(edge_lengths(degree), degree, min_degree=degree, alignment=alignment)
        case = replace(case, comm_type=comm_type, causal=causal, sinks=True, lse=True)
        assert loopback_error(case) <= 1e-10
        assert loopback_error(replace(case, window=(5, 2))) <= 1e-10


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
        (1, {"alignment": 8}),
    ):
        errors = run_ranks(ranks, gloo_errors, replace(case, min_degree=min_degree, **changes))
        assert max(map(max, errors)) <= 1e-10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("comm_type", TYPES)
def test_narrow_types_round_as_one_rank_does(comm_type: str, dtype: str) -> None:
    case = Case((129, 17), 4, min_degree=4, comm_type=comm_type, dtype=dtype, head_dim=16)
    alone, found = loopback_rms(replace(case, ranks=1, min_degree=1)), loopback_rms(case)
    # The kernel's own error and a rounding; summing parts that are rounded adds one of its size.
    for name, error in found.items():
        assert error <= 1.25 * alone[name], (name, error / alone[name])


def chained_merge(
    outs: list[torch.Tensor], lses: list[torch.Tensor], runs: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs corrected and added one by one in their own dtype, as ring attention's usual
    implementations do."""
    out = torch.zeros(rows, *outs[0].shape[1:], dtype=outs[0].dtype)
    lse = torch.full((rows, outs[0].shape[1]), -torch.inf, dtype=lses[0].dtype)
    for row, count, part, first in runs.tolist():
        here, there = slice(row, row + count), slice(first, first + count)
        total = torch.logaddexp(lse[here], lses[part][there])
        before, after = ((x - total).exp().unsqueeze(-1) for x in (lse[here], lses[part][there]))
        out[here] = (out[here] * before).to(out.dtype) + (outs[part][there] * after).to(out.dtype)
        lse[here] = total
    return out, lse


def chained_sums(
    grads: list[torch.Tensor],
    home: torch.Tensor | None,
    runs: torch.Tensor,
    rows: int,
    columns: int,
    turn: object,
) -> list[torch.Tensor]:
    """Gradients added one by one in their own dtype, those that came home last."""
    widths = [grad.shape[1:].numel() for grad in grads[:columns]]
    parts = [*grads, *([] if home is None else home.split(widths, 1))]
    sums = []
    for column, like in enumerate(grads[:columns]):
        total = like.new_zeros(rows, *like.shape[1:])
        for row, count, part, first in runs.tolist():
            added = parts[part * columns + column][first : first + count]
            total[row : row + count] += added.view(count, *like.shape[1:])
        sums.append(total)
    return sums


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("comm_type", "degree"), [("p2p", 4), ("p2p", 8), ("a2a+p2p", 8)])
def test_one_merge_rounds_less_than_a_chain(
    comm_type: str, degree: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((700, 90), degree, min_degree=degree, comm_type=comm_type, dtype=dtype)
    case = replace(case, sizes=(2, degree // 2), head_dim=32, causal=False)
    merged = hcp.loopback(degree, lambda groups: attention_errors(groups, case, mean=True))
    monkeypatch.setattr(attend, "merged", chained_merge)
    monkeypatch.setattr(kernel_calls, "WAITING", degree)  # one call merges all
    for module in (attend, key_transfer):
        monkeypatch.setattr(module, "sum_gradients", chained_sums)
    chained = hcp.loopback(degree, lambda groups: attention_errors(groups, case, mean=True))
    worst = [map(max, zip(*errors, strict=True)) for errors in (merged, chained)]
    for name, merged_error, chained_error in zip(RESULTS, *worst, strict=True):
        print(f"{comm_type} on {degree}, {dtype}, {name}: {merged_error:.2e}, {chained_error:.2e}")
        if name != "lse":  # which a chain keeps in float32 too
            assert merged_error < chained_error


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


@pytest.mark.parametrize("stage_tokens", [20, hcp.exchange.tables.STAGE_TOKENS])
@pytest.mark.parametrize("window", [(-1, -1), (20, 0)])
@pytest.mark.parametrize("comm_type", TYPES)
def test_rows_that_are_read_and_rows_that_are_sent_give_the_same_bits(
    comm_type: str, window: tuple[int, int], stage_tokens: int
) -> None:
    case = Case((57, 9, 130), 4, min_degree=3, comm_type=comm_type, dtype="bfloat16")

    def bits(groups: object) -> list[torch.Tensor]:
        results = []
        for cp, local in dispatched(groups, case):
            inputs = [local[name].clone().requires_grad_() for name in ("query", "key", "value")]
            out = cp.attention(*inputs, window_size=window)
            out.backward(local.grad)
            results += [out.detach(), *(x.grad for x in inputs)]
        return results

    with staged_by(stage_tokens):
        sent, read = (hcp.loopback(4, bits, sharing=sharing) for sharing in (False, True))
    for one, other in zip(itertools.chain(*sent), itertools.chain(*read), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("comm_type", TYPES)
def test_a_default_device_changes_nothing(comm_type: str, sharing: bool) -> None:
    case = Case((57, 9, 30), 3, min_degree=3, comm_type=comm_type, window=(20, 0), sharing=sharing)

    def error(groups: object) -> float:
        cp, local = next(iter(dispatched(groups, case)))
        inputs = [local[name].clone().requires_grad_() for name in ("query", "key", "value")]
        results = []
        for device in ("meta", "cpu"):  # what is made once is made under the first
            with torch.device(device):
                out = cp.attention(*inputs, window_size=case.window)
                grads = torch.autograd.grad(out, inputs, local.grad)
                results.append([out.detach(), *grads, cp.roll_tensor(out.detach())])
        return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))

    assert max(hcp.loopback(3, error, sharing=sharing)) == 0


def test_rows_of_any_strides_travel() -> None:
    case = Case((40, 9), 2, min_degree=2)

    def check(groups: object) -> None:
        cp, local = next(iter(dispatched(groups, case)))
        columns = local.query.flatten(1).t().contiguous().t()
        assert columns.stride(1) != 1
        assert torch.equal(cp.roll_tensor(columns), cp.roll_tensor(columns.contiguous()))

    hcp.loopback(2, check)


# ---- what travels --------------------------------------------------------------------------------


class Wire(NamedTuple):
    """Bytes between ranks, of all of them, and what the busiest receives in a forward."""

    forward: int
    backward: int
    busiest: int


def wire(case: Case, causal: bool = True) -> Wire:
    """One layer's, counted once ranks have agreed on the call."""

    def count(groups: object) -> tuple[int, int, int]:
        transport = groups.transport  # type: ignore[attr-defined]
        counts = (0, 0, 0)
        for cp, local in dispatched(groups, case):
            options = {"causal": causal, "window_size": case.window}
            inputs = [local[name].clone().requires_grad_() for name in ("query", "key", "value")]
            cp.attention(*inputs, **options)
            sent, received = transport.bytes_sent, transport.bytes_received
            out = cp.attention(*inputs, **options)
            forward, busy = transport.bytes_sent - sent, transport.bytes_received - received
            out.backward(local.grad)
            both = transport.bytes_sent - sent
            added = (forward, both - forward, busy)
            counts = tuple(map(sum, zip(counts, added, strict=True)))  # type: ignore[assignment]
        return counts

    forward, backward, received = zip(*hcp.loopback(case.ranks, count), strict=True)
    return Wire(sum(forward), sum(backward), max(received))


DEGREES = [2, 3, 4, 8]


def one_sequence(degree: int, comm_type: str, **options: object) -> Case:
    return Case((16 * degree,), degree, min_degree=degree, comm_type=comm_type, **options)  # type: ignore[arg-type]


def row_bytes(case: Case) -> tuple[int, int]:
    """Bytes of a query (as wide as an output), and of a key and value; float64, D = E."""
    return 8 * case.heads * case.head_dim, 8 * case.kv_heads * 2 * case.head_dim


@pytest.mark.parametrize("degree", DEGREES)
def test_a_ring_passes_every_block_to_every_rank(degree: int) -> None:
    case = one_sequence(degree, "p2p")
    _, keys = row_bytes(case)
    rows = (degree - 1) * case.lengths[0]
    for causal, home in ((True, rows * 3 // 4), (False, rows)):
        assert wire(case, causal)[:2] == (rows * keys, (rows + home) * keys)


@pytest.mark.parametrize("degree", DEGREES)
def test_causal_all_gather_sends_three_quarters_of_the_ring(degree: int) -> None:
    ring = wire(one_sequence(degree, "p2p"))
    gathered = wire(one_sequence(degree, "all_gather"))
    assert 4 * gathered.forward == 3 * ring.forward
    assert gathered.backward == 2 * gathered.forward
    # The quarter is not shared evenly: the rank with the last chunk needs every block.
    assert gathered.busiest == ring.busiest


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 0)], ids=str)
def test_where_owners_hold_keys_a_ring_reads_what_is_seen(
    degree: int, window: tuple[int, int]
) -> None:
    """As many rows as all_gather, one owner a stage."""
    plan = hcp.plan([16 * degree], ranks=degree, max_tokens_per_rank=16, min_degree=degree)

    def rows_of(comm_type: str, in_place: int) -> list[list[int]]:
        headers = [ScheduleHeader(rank=rank, in_place=in_place) for rank in range(degree)]
        made = [
            Schedule(schedule_words(plan, header, comm_type, window_size=window))
            for header in headers
        ]
        return [[stage.key_rows for stage in schedule.stages[1:]] for schedule in made]

    sent, read, gathered = rows_of("p2p", 0), rows_of("p2p", 1), rows_of("all_gather", 1)
    assert [len(rows) for rows in read] == [degree - 1] * degree
    assert [sum(rows) for rows in read] == [sum(rows) for rows in gathered]
    if window == (-1, 0):
        assert 4 * sum(map(sum, read)) == 3 * sum(map(sum, sent))
        assert max(map(sum, read)) == max(map(sum, sent))


@settings(max_examples=30)
@given(st.integers(2, 8), st.lists(st.integers(1, 90), min_size=1, max_size=4))
def test_causal_all_gather_never_sends_more_than_the_ring(degree: int, lengths: list[int]) -> None:
    cases = [
        Case(tuple(lengths), degree, min_degree=degree, comm_type=comm_type)
        for comm_type in ("p2p", "all_gather")
    ]
    ring, gathered = map(wire, cases)
    assert gathered.forward <= ring.forward
    _, keys = row_bytes(cases[0])
    # Of chunks that are rounded, each of a rank's two pieces sees at most a row more.
    spare = 2 * degree * len(lengths) * degree * keys
    assert 4 * gathered.forward <= 3 * ring.forward + spare


@pytest.mark.parametrize("degree", DEGREES)
def test_all_gather_under_a_window_sends_a_window_for_each_border(degree: int) -> None:
    case = one_sequence(degree, "all_gather", window=(5, 0))
    # Of the 2d - 1 borders of chunks, one lies within a rank.
    assert wire(case).forward == (2 * degree - 2) * 5 * row_bytes(case)[1]


@pytest.mark.parametrize("degree", [2, 4])
def test_a2a_sends_each_row_but_for_the_own_heads(degree: int) -> None:
    case = one_sequence(degree, "a2a", heads=8, kv_heads=4)
    query, keys = row_bytes(case)
    lse = 8 * case.heads
    # There: query, key, value. Back: output and log-sum-exp.
    forward = 2 * query + keys + lse
    # There: query, key, value, output and its gradient, log-sum-exp. Back: gradients.
    backward = 4 * query + 2 * keys + lse
    share = case.lengths[0] * (degree - 1) // degree
    assert wire(case) == (forward * share, backward * share, forward * share // degree)


@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (2, 3), (4, 2), (2, 4), (1, 4), (4, 1)])
def test_a_hierarchy_exchanges_heads_within_and_passes_keys_between(inner: int, outer: int) -> None:
    case = one_sequence(inner * outer, "a2a+p2p", heads=8, kv_heads=4, sizes=(inner, outer))
    query, keys = row_bytes(case)
    length, lse = case.lengths[0], 8 * case.heads
    exchanged, ring = Fraction(length * (inner - 1), inner), (outer - 1) * length
    assert wire(case)[:2] == (
        exchanged * (2 * query + keys + lse) + ring * keys,
        exchanged * (4 * query + 2 * keys + lse) + (ring + ring * 3 // 4) * keys,
    )
    # A rank's: its rows of heads, and of its share of the heads the blocks of other places.
    received = (2 * query + keys + lse) * exchanged + ring * keys
    assert wire(case).busiest == received / case.ranks


def test_a_ring_computes_nothing_that_a_window_hides() -> None:
    plan = hcp.plan([64], ranks=4, max_tokens_per_rank=64, min_degree=4)
    words = words_of(plan, 0, "p2p", window=(4, 0))
    stages = Schedule(words).stages
    # Rank 0 holds tokens 0-7 and 56-63: the latter see tokens 52-55, of rank 1.
    assert [[e[:4] for e in stage.entries] for stage in stages[1:]] == [[], [], [(8, 4, 12, 4)]]


@pytest.mark.parametrize("comm_type", TYPES)
def test_degree_one_sends_nothing(comm_type: str) -> None:
    assert wire(Case((9, 9), 2, max_degree=1, comm_type=comm_type)) == (0, 0, 0)


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
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\), expected \(4,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks is torch.int32 on cpu, expected flo"),
    ],
    ids=["dropout", "sinks", "integer-sinks"],
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
    groups = GlooGroups(5) if calls_before else GlooGroups()
    cp, local = next(iter(dispatched(groups, Case((40,), size, min_degree=size))))
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
    results = try_ranks(2, differing_call, trait, 0)
    for rank, result in enumerate(results):
        assert isinstance(result, RankError)
        assert result.kind == "HcpError"
        assert f"rank {rank}: rank {1 - rank} is in another call: " in result.message


@pytest.mark.parametrize("trait", TRAITS)
def test_ranks_that_differ_later_never_read_rows_that_are_not_theirs(trait: str) -> None:
    """The rank that changes its call waits for an agreement, the other for rows: until the
    timeout, and without a wrong number."""
    for result in try_ranks(2, differing_call, trait, 1):
        assert isinstance(result, RankError)
        assert result.kind == "HcpError"


def dies_in_attention(rank: int, size: int) -> None:
    cp, local = next(iter(dispatched(GlooGroups(15), Case((40,), size, min_degree=size))))
    if rank == 1:
        raise OSError("disk gone")
    cp.attention(local.query, local.key, local.value)


def test_a_rank_that_fails_before_attention_ends_the_others() -> None:
    results = try_ranks(3, dies_in_attention)
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
