"""Attention over tables of fixed sizes, against the micro-batch's own handler, in float64.
Captured and replayed: tests/cuda/test_graphs_cuda.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import hcp
from hcp.attention.fixed_capacity import Capacity, words_of

ROWS, HEADS = 32, (4, 2, 2, 4)
PACKS = [(61, 9, 3), (100,), (17, 17, 17, 17, 5, 2, 1), (31, 30, 2, 1)]


def drawn(rows: int, seed: int) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 8, 8, 6, 6
    return [
        torch.randn(rows, heads, size, generator=generator, dtype=torch.float64)
        for heads, size in zip(HEADS, sizes, strict=True)
    ]


def passes(attention: Any, rows: list[Tensor]) -> list[Tensor]:
    *leaves, grad = (x.detach().clone() for x in rows)
    for leaf in leaves:
        leaf.requires_grad_()
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compared(groups: Any, ranks: int, plans: list[hcp.Plan], window: tuple[int, int]) -> float:
    """The largest difference of one handler's results, over all micro-batches of the plans."""
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=8, ranks=ranks)
    memory = fixed.position_ids.data_ptr()
    worst = 0.0
    for plan in plans:
        for micro_batch in range(len(plan.micro_batches)):
            cp = hcp.ContextParallelHandler(plan, micro_batch, groups.transport)
            fixed.load(cp)
            rows = drawn(cp.rows, 7 * micro_batch + groups.transport.rank)
            want = passes(partial(cp.attention, window_size=window), rows)
            padded = [fixed.pad(x) for x in rows]
            found = passes(partial(fixed.attention, window_size=window), padded)
            assert torch.equal(fixed.position_ids[: cp.rows], cp.position_ids)
            for a, b in zip(found, want, strict=True):
                tokens = int(cp.cu_seqlens[-1])
                if tokens:
                    worst = max(worst, float((a[:tokens] - b[:tokens]).abs().max()))
                assert not a[tokens:].any()
    assert fixed.position_ids.data_ptr() == memory
    return worst


@pytest.mark.parametrize("window", [(-1, -1), (5, 0)])
@pytest.mark.parametrize(
    ("size", "ranks", "sharing"),
    [
        *((1, 1, False), (4, 1, False), (4, 2, False), (3, 3, False), (4, 4, False)),
        *((4, 1, True), (4, 2, True), (3, 3, True)),
    ],
)
def test_one_handler_computes_every_plan_that_fits(size, ranks, sharing, window):
    plans = [
        hcp.plan(
            pack if ranks > 1 else [min(n, ROWS) for n in pack],
            ranks=size,
            max_tokens_per_rank=ROWS,
            max_degree=ranks,
            ranks_per_node=ranks,
            alignment=alignment,
        )
        for pack in PACKS
        for alignment in (1, ROWS)
        if ranks == 1 or max(pack) <= ranks * ROWS
    ]
    errors = hcp.loopback(
        size, lambda groups: compared(groups, ranks, plans, window), sharing=sharing
    )
    assert max(errors) <= 1e-12


def test_rows_that_are_read_and_rows_that_are_sent_give_the_same_bits():
    plan = hcp.plan(PACKS[0], ranks=3, max_tokens_per_rank=ROWS, min_degree=3)

    def results(groups: Any) -> list[Tensor]:
        fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=8, ranks=3)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        fixed.load(cp)
        rows = [fixed.pad(x.float()) for x in drawn(cp.rows, groups.transport.rank)]
        return passes(fixed.attention, rows)

    sent, read = (hcp.loopback(3, results, sharing=sharing) for sharing in (False, True))
    for one, other in zip(sent, read, strict=True):
        assert all(map(torch.equal, one, other))


def one_micro_batch(lengths: tuple[int, ...], ranks: int = 1, **options: Any) -> hcp.Plan:
    return hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=64, **options)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((30, 20), "rank 0: rows is 50, expected <= 48"),
        ((1, 1, 1, 1), "rank 0: sequences is 4, expected <= 3"),
        ((41,), "rank 0: max_seqlen is 41, expected <= 40"),
    ],
)
def test_a_micro_batch_over_the_capacity_is_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        words_of(Capacity(48, 3, 40, 1), one_micro_batch(lengths), 0, 0)


def test_all_ranks_of_a_block_refuse_what_one_has_no_room_for():
    plan = one_micro_batch((50, 3), ranks=2, max_degree=1)
    for rank in range(2):
        with pytest.raises(ValueError, match="rows is 50, expected <= 48"):
            words_of(Capacity(48, 3, 96, 2), plan, 0, rank)


def test_a_group_that_reaches_over_the_block_is_refused():
    plan = one_micro_batch((120,), ranks=2, min_degree=2)
    with pytest.raises(ValueError, match=r"its group is the ranks 0 to 1, expected .* 1 to 1"):
        words_of(Capacity(64, 3, 128, 1), plan, 0, 1)


def test_masks_are_refused():
    plan = one_micro_batch((8,), masks=[hcp.Mask.causal(8)])
    with pytest.raises(ValueError, match="the plan has masks, expected none"):
        words_of(Capacity(64, 3, 64, 1), plan, 0, 0)


def test_wrong_sizes_are_refused():
    groups = hcp.loopback(1, lambda groups: groups)[0]
    for name in ("rows", "sequences", "max_seqlen", "ranks"):
        with pytest.raises(ValueError, match=f"{name} is 0, expected >= 1"):
            hcp.GraphHandler(groups, **{"rows": 8, "sequences": 2, name: 0})
    with pytest.raises(ValueError, match="ranks is 2, expected a divisor of the 1 ranks"):
        hcp.GraphHandler(groups, rows=8, sequences=2, ranks=2)
    fixed = hcp.GraphHandler(groups, rows=8, sequences=2)
    with pytest.raises(ValueError, match="x has 9 rows, expected <= 8"):
        fixed.pad(torch.zeros(9))
    with pytest.raises(ValueError, match=r"window_size is \(3, 2\), expected"):
        fixed.attention(*drawn(8, 0)[:3], window_size=(3, 2))
    with pytest.raises(ValueError, match=r"dtype is torch.bfloat16 on cpu, expected float32"):
        fixed.attention(*(x.bfloat16() for x in drawn(8, 0)[:3]))


def test_ranks_of_other_capacities_are_found():
    def work(groups: Any) -> None:
        fixed = hcp.GraphHandler(groups, rows=8 + groups.transport.rank, sequences=2, ranks=2)
        fixed.attention(*drawn(fixed.rows, 0)[:3])

    with pytest.raises(hcp.HcpError, match="capacity"):
        hcp.loopback(2, work)


def loaded(groups: Any, lengths: tuple[int, ...], micro_batch: int = 0) -> tuple[Any, Any]:
    """A handler with a micro-batch's tables, and that micro-batch."""
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=8, ranks=2)
    plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=ROWS, min_degree=2)
    cp = hcp.ContextParallelHandler(plan, micro_batch, groups.transport)
    fixed.load(cp)
    return fixed, cp


@pytest.mark.parametrize("sharing", [False, True])
def test_a_backward_under_tables_of_another_micro_batch_is_refused(sharing):
    def work(groups: Any) -> None:
        fixed, cp = loaded(groups, (40,))
        _, other = loaded(groups, (17, 23))
        query, key, value, grad = (fixed.pad(x) for x in drawn(cp.rows, 0))
        out = fixed.attention(query.requires_grad_(), key, value)
        fixed.load(other)
        found = f"the tables of micro-batch 0 of plan {other.plan.checksum:016x}, expected those of"
        with pytest.raises(hcp.HcpError, match=f"{found} its forward, micro-batch 0 of plan"):
            out.backward(grad)
        fixed.load(cp)
        fixed.attention(query, key, value).backward(grad)

    hcp.loopback(2, work, sharing=sharing)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("calls_before", [0, 1])
def test_ranks_with_tables_of_other_micro_batches_are_found(calls_before, sharing):
    def work(groups: Any) -> None:
        rank = groups.transport.rank
        fixed, cp = loaded(groups, (40, 17, 23, 11, 30))
        for _ in range(calls_before):
            fixed.attention(*[fixed.pad(x) for x in drawn(cp.rows, 0)][:3])
        fixed.load(hcp.ContextParallelHandler(cp.plan, rank, groups.transport))
        fixed.attention(*drawn(ROWS, 0)[:3])

    with pytest.raises(hcp.HcpError, match=r"micro-batch 0 of plan .* micro-batch 1 of plan"):
        hcp.loopback(2, work, sharing=sharing)
