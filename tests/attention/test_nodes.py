"""Groups of several nodes: rows cross a border once, and results are those of one rank."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import (
    Case,
    GlooGroups,
    attention_errors,
    dispatched,
    gloo_errors,
    loopback_error,
    loopback_rms,
    staged_by,
)
from support.mapped import MixedGloo
from support.nodes import rows_needed_elsewhere
from support.ranks import run_ranks, try_ranks
from torch import Tensor

import hcp
from hcp.exchange.tables import Move, Schedule, ScheduleHeader, schedule_words

TYPES = hcp.COMM_TYPES
SENDING = ("p2p", "all_gather")
SHAPES = [(2, 4), (2, 6), (3, 6), (1, 4), (4, 8)]
"""Ranks of a node, and of all."""


def case_of(node: int, ranks: int, **options: object) -> Case:
    lengths = (2 * ranks, 97, 1, 2 * ranks - 1, 40)
    return Case(lengths, ranks, min_degree=ranks, node=node, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize(("node", "ranks"), SHAPES)
def test_groups_of_nodes_equal_one_rank(node: int, ranks: int, comm_type: str) -> None:
    case = case_of(node, ranks, comm_type=comm_type)
    assert loopback_error(case) <= 1e-10
    assert loopback_error(replace(case, causal=False, value_dim=5)) <= 1e-10
    assert loopback_error(replace(case, window=(9, 2), causal=False, sinks=True)) <= 1e-10
    assert loopback_error(replace(case, stage_tokens=30, lse=True, alignment=8)) <= 1e-10


@pytest.mark.parametrize("comm_type", TYPES)
def test_gloo_ranks_of_two_nodes_equal_one_rank(comm_type: str) -> None:
    for changes in ({}, {"causal": False, "window": (20, 3)}, {"sinks": True, "lse": True}):
        case = case_of(2, 4, comm_type=comm_type, **changes)
        assert max(map(max, run_ranks(4, gloo_errors, case))) <= 1e-10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("comm_type", SENDING)
def test_narrow_types_round_once_more_at_a_border(comm_type: str, dtype: str) -> None:
    case = Case((129, 40), 4, min_degree=4, comm_type=comm_type, dtype=dtype, head_dim=16)
    alone = loopback_rms(replace(case, ranks=1, min_degree=1))
    found = loopback_rms(replace(case, node=2))
    for name, error in found.items():
        assert error <= 1.4 * alone[name], (name, error / alone[name])


# ---- what crosses --------------------------------------------------------------------------------


def tables(plan: hcp.Plan, comm_type: str, *, by_nodes: bool, causal: bool) -> list[Schedule]:
    window = (-1, 0 if causal else -1)
    options = {"window_size": window, "by_nodes": by_nodes}
    return [
        Schedule(schedule_words(plan, ScheduleHeader(rank=rank), comm_type, **options))  # type: ignore[arg-type]
        for rank in range(plan.ranks)
    ]


def crossing(plan: hcp.Plan, moves: Callable[[Schedule], list[Move]], found: list[Schedule]) -> int:
    """Rows that leave their node."""
    node = plan.core.ranks_per_node
    return sum(
        move.rows
        for rank, table in enumerate(found)
        for move in moves(table)
        if move.peer // node != rank // node
    )


def sent_home(table: Schedule) -> list[Move]:
    return [*table.return_sends, *(table.return_relay.sends if table.return_relay else [])]


@pytest.mark.parametrize("comm_type", SENDING)
@pytest.mark.parametrize(("node", "ranks"), SHAPES)
def test_each_row_crosses_once_for_each_node_that_sees_it(
    node: int, ranks: int, comm_type: str
) -> None:
    """Of a causal sequence, a node needs the first half of an earlier node's rows, and all of a
    later one's: that one's first tokens come before its own last ones, and so do its last."""
    tokens, nodes = 4 * ranks, ranks // node
    limits = {"max_tokens_per_rank": tokens, "min_degree": ranks, "ranks_per_node": node}
    plan = hcp.plan([tokens], ranks=ranks, **limits)  # type: ignore[arg-type]
    whole = tokens * (nodes - 1)
    for causal, expected in ((True, whole * 3 // 4), (False, whole)):
        found = tables(plan, comm_type, by_nodes=True, causal=causal)
        assert crossing(plan, lambda table: table.sends, found) == expected
        assert crossing(plan, sent_home, found) == expected
        before = tables(plan, comm_type, by_nodes=False, causal=causal)
        assert crossing(plan, sent_home, before) == node * expected  # once for each reader


def crossed(groups: Any, case: Case, node: int) -> list[int]:
    """Bytes that this rank sends to other nodes: in forwards of a layer, and in its backwards."""
    transport, sent = groups.transport, [0]
    start = transport.start

    def counted(buffer: Tensor, sends: list[Move], *arguments: Any, **options: Any) -> Any:
        row_bytes = buffer.shape[1:].numel() * buffer.itemsize
        sent[-1] += row_bytes * sum(
            move.rows for move in sends if move.peer // node != transport.rank // node
        )
        return start(buffer, sends, *arguments, **options)

    transport.start = counted
    total = [0, 0]
    for cp, local in list(dispatched(groups, case)):
        inputs = [local[name].clone().requires_grad_() for name in ("query", "key", "value")]
        sent.append(0)
        out = cp.attention(*inputs, causal=case.causal, window_size=case.window)
        total[0] += sent[-1]
        sent.append(0)
        out.backward(local.grad)
        total[1] += sent[-1]
    return total


PACKS = [(64,), (64, 1, 40, 97, 3, 12), (7, 7, 7, 5)]
WINDOWS = [(-1, 0), (9, 0), (30, 4), (3, -1)]


@pytest.mark.parametrize("comm_type", [*SENDING, "a2a+p2p"])
@pytest.mark.parametrize(("node", "ranks"), [(2, 4), (2, 6), (3, 6)])
def test_bytes_over_borders_are_those_of_rows_that_are_needed_there(
    node: int, ranks: int, comm_type: str
) -> None:
    """Each row once for each node that sees it, forward and back, and once more in the backward."""
    for lengths, window in product(PACKS, WINDOWS):
        case = Case(
            tuple(length + ranks for length in lengths),
            ranks,
            min_degree=ranks,
            comm_type=comm_type,
            causal=window[1] == 0,
            window=window,
            heads=6,
            kv_heads=6,
            node=node,
            sizes=(node, ranks // node) if comm_type == "a2a+p2p" else None,
        )
        bound = rows_needed_elsewhere(case.plan(), node, window) * 6 * 16 * 8
        found = hcp.loopback(ranks, lambda groups: crossed(groups, case, node))  # noqa: B023
        forward, backward = (sum(each) for each in zip(*found, strict=True))
        assert bound <= forward <= 1.05 * bound, (lengths, window, forward / max(1, bound))
        assert 2 * bound <= backward <= 1.05 * 2 * bound, (lengths, window, backward, bound)


@pytest.mark.parametrize("comm_type", [*SENDING, "a2a+p2p"])
def test_plans_of_several_degrees_send_over_borders_what_is_needed_there(comm_type: str) -> None:
    lengths = 200, 77, 13, 37, 20, 68, 62, 65
    case = Case(lengths, 8, capacity=64, kv_heads=4, node=2, comm_type=comm_type)
    case = replace(case, sizes=(2, 2) if comm_type == "a2a+p2p" else None)
    groups = [group for batch in case.plan().micro_batches for group in batch]
    assert min(group.degree for group in groups) <= 2 < max(group.degree for group in groups)
    bound = rows_needed_elsewhere(case.plan(), 2, (-1, 0)) * 4 * 16 * 8
    found = hcp.loopback(8, lambda groups: crossed(groups, case, 2))
    forward, backward = (sum(each) for each in zip(*found, strict=True))
    assert 0 < bound <= forward <= 1.05 * bound, forward / bound
    assert backward <= 1.05 * 2 * bound, backward / bound


def test_heads_are_exchanged_inside_nodes() -> None:
    """Of a2a+p2p, whose neighbours share a node: only rows of keys, and their gradients, leave."""
    case = case_of(2, 4, comm_type="a2a+p2p", sizes=(2, 2))
    plan = case.plan()
    for rank in range(4):
        words = schedule_words(
            plan,
            ScheduleHeader(rank=rank),
            "a2a+p2p",
            inner=2,
            window_size=(-1, 0),
            by_nodes=True,
        )
        moves = Schedule(words).head_moves
        assert moves is not None
        assert {move.peer // 2 for move in moves.sends} == {rank // 2}
        assert {move.peer // 2 for move in moves.receives} == {rank // 2}


def heads_over_gloo(rank: int, size: int, case: Case) -> tuple[float, int, int]:
    """The largest error, and the bytes that leave the node in forwards and backwards."""
    error = max(attention_errors(GlooGroups(), case))
    forward, backward = crossed(GlooGroups(), case, 2)
    return error, forward, backward


def test_hierarchical_groups_over_gloo_send_between_nodes_what_is_needed_there() -> None:
    case = case_of(2, 4, comm_type="a2a+p2p", sizes=(2, 2))
    errors, forward, backward = zip(*run_ranks(4, heads_over_gloo, case), strict=True)
    assert max(errors) <= 1e-10
    bound = rows_needed_elsewhere(case.plan(), 2, (-1, 0)) * 2 * 16 * 8
    assert sum(forward) == bound
    assert sum(backward) == 2 * bound


def test_all_ranks_of_a_node_bring_rows_over_its_border() -> None:
    plan = hcp.plan([64], ranks=8, max_tokens_per_rank=64, min_degree=8, ranks_per_node=4)
    for comm_type in SENDING:
        for rank, table in enumerate(tables(plan, comm_type, by_nodes=True, causal=False)):
            entering = [move for move in table.receives if move.peer // 4 != rank // 4]
            assert entering == [Move((rank + 4) % 8, entering[0].row, 8)]


def test_a_group_with_a_rank_without_rows_sends_to_each_reader() -> None:
    plan = hcp.plan([5], ranks=4, max_tokens_per_rank=5, min_degree=4, ranks_per_node=2)
    assert 0 in [table.rows for table in tables(plan, "p2p", by_nodes=False, causal=True)]
    for comm_type in SENDING:
        given = [
            [
                table.words.tolist()[2:]
                for table in tables(plan, comm_type, by_nodes=by, causal=True)
            ]
            for by in (False, True)
        ]
        assert given[0] == given[1]


# ---- ranks of the other node that fail -----------------------------------------------------------


def dies_on_the_other_node(rank: int, size: int, comm_type: str) -> None:
    case = case_of(2, size, comm_type=comm_type)
    cp, local = next(iter(dispatched(GlooGroups(15), case)))
    if rank == 3:
        raise OSError("disk gone")
    cp.attention(local.query, local.key, local.value)


@pytest.mark.parametrize("comm_type", SENDING)
def test_a_rank_that_fails_on_the_other_node_ends_the_others(comm_type: str) -> None:
    results = try_ranks(4, dies_on_the_other_node, comm_type)
    assert [result.kind for result in results] == [*["HcpError"] * 3, "OSError"]


def ends_on_the_other_node(
    rank: int, size: int, transport: str, comm_type: str, folder: str, away: str
) -> None:
    """The last rank is killed, or late, in the second layer."""
    mixed = transport == "mixed"
    over = MixedGloo(folder, 2, SECONDS) if mixed else GlooGroups(SECONDS).transport
    case = case_of(2, size, comm_type=comm_type)
    cp = hcp.ContextParallelHandler(case.plan(), 0, over, comm_types=[comm_type])
    query, key, value = torch.randn(3, cp.rows, 4, 8).unbind()
    cp.attention(query, key, value)
    if rank == size - 1:
        if away == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 * SECONDS)
        raise OSError("late")
    cp.attention(query, key, value)


SECONDS = 4
"""The timeout of an exchange, in the tests that wait until it ends."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "comm_type", "away"),
    [
        ("torch", "p2p", "killed"),
        ("torch", "all_gather", "late"),
        ("mixed", "p2p", "late"),
        ("mixed", "all_gather", "killed"),
    ],
)
def test_a_rank_of_the_other_node_that_is_killed_or_late_ends_all_others_in_words(
    tmp_path: Path, transport: str, comm_type: str, away: str
) -> None:
    results = try_ranks(4, ends_on_the_other_node, transport, comm_type, str(tmp_path), away)
    assert [result.kind for result in results[:3]] == ["HcpError"] * 3, results
    said = [result.message for result in results[:3]]
    assert all(re.search(r"rank \d: (the exchange with|rank \d has not come)", x) for x in said)
    assert any(re.search(r"rank \d: .*\b3\b", x) for x in said), said


def mixed_over_gloo(rank: int, size: int, case: Case, folder: str) -> list[float]:
    transport = MixedGloo(folder, 2, 60)
    with staged_by(case.stage_tokens):
        return attention_errors(SimpleNamespace(transport=transport), case)


@pytest.mark.parametrize("comm_type", TYPES)
def test_processes_that_read_inside_nodes_and_send_between_them_equal_one_rank(
    tmp_path: Path, comm_type: str
) -> None:
    case = case_of(2, 4, comm_type=comm_type, stage_tokens=30)
    assert max(map(max, run_ranks(4, mixed_over_gloo, case, str(tmp_path)))) <= 1e-10


def differs_on_the_other_node(rank: int, size: int, comm_type: str) -> None:
    cp, local = next(iter(dispatched(GlooGroups(15), case_of(2, size, comm_type=comm_type))))
    cp.attention(local.query, local.key, local.value, softmax_scale=0.5 if rank == 3 else 0.25)


@pytest.mark.parametrize("comm_type", SENDING)
def test_a_rank_that_calls_differently_on_the_other_node_is_named(comm_type: str) -> None:
    results = try_ranks(4, differs_on_the_other_node, comm_type)
    assert all(result.kind == "HcpError" for result in results)
    assert "softmax_scale differs" in results[0].message


@pytest.mark.parametrize("comm_type", SENDING)
def test_ranks_that_read_from_memory_read_from_owners(comm_type: str) -> None:
    assert loopback_error(case_of(2, 4, comm_type=comm_type, sharing=True)) <= 1e-10
