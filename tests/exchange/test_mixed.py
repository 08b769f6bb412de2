"""Exchanges of which a part goes through the memory of a node, and the rest between nodes.

Mailboxes, halves and signals are those between GPUs, in CPU memory (``support.mapped``).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import mailbox_tables
from support.cases import Case, dispatched, loopback_error, staged_by
from support.mailbox_tables import core_rounds
from support.mapped import MixedLoopback

import hcp
from hcp.exchange.agreement import CallKind, Stamp
from hcp.exchange.mailbox import Mailboxes
from hcp.exchange.mixed import MixedTransport
from hcp.exchange.nccl import NcclTransport
from hcp.exchange.tables import Move
from hcp.exchange.transport import read_in_place

loopback_module = sys.modules["hcp.tools.loopback"]


@pytest.fixture(autouse=True)
def mixed(monkeypatch: pytest.MonkeyPatch) -> type[MixedLoopback]:
    """hcp.loopback(..., sharing=True) runs on it."""

    class Own(MixedLoopback):
        """Whose attributes a test may set."""

    monkeypatch.setattr(loopback_module, "SharingLoopbackTransport", Own)
    return Own


# ---- attention -----------------------------------------------------------------------------------


NODES = [(2, 2), (3, 3), (4, 2), (2, None)]
"""Ranks of a node of the transport, and of the plan, which may know of none."""


@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
@pytest.mark.parametrize(("own", "planned"), NODES)
def test_attention_over_nodes_equals_one_rank(
    mixed: Any, comm_type: str, own: int, planned: int | None
) -> None:
    mixed.ranks_per_node = own
    case = Case((97, 40, 9), 6, min_degree=6, comm_type=comm_type, sharing=True, node=planned)
    assert loopback_error(case) <= 1e-10
    windowed = replace(case, causal=False, window=(9, 2), sinks=True, lse=True, value_dim=5)
    assert loopback_error(replace(windowed, stage_tokens=20, dtype="float64")) <= 1e-10


@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
def test_groups_of_a_node_and_of_several_in_one_plan_equal_one_rank(
    mixed: Any, comm_type: str
) -> None:
    case = Case((97, 40, 130, 9, 3), 6, capacity=70, comm_type=comm_type, sharing=True, node=2)
    groups = [group for batch in case.plan().micro_batches for group in batch]
    assert {group.degree > 2 for group in groups if group.degree > 1} == {True, False}
    assert loopback_error(case) <= 1e-10


@pytest.mark.parametrize("buffer_bytes", [2 * 4096 * 2, 2 * 4096 * 5, 2**18])
def test_messages_longer_than_a_mailbox_go_in_rounds(mixed: Any, buffer_bytes: int) -> None:
    mixed.ranks_per_node, mixed.buffer_bytes = 3, buffer_bytes
    case = Case((300, 57), 6, min_degree=6, comm_type="all_gather", sharing=True, node=3)
    assert loopback_error(case) <= 1e-10


def layers(groups: Any, case: Case, count: int) -> list[torch.Tensor]:
    """Outputs and gradients of consecutive layers, in every micro-batch."""
    results = []
    for cp, local in dispatched(groups, case):
        leaves = [local[name].clone().requires_grad_() for name in ("query", "key", "value")]
        out = leaves[0]
        for _ in range(count):
            out = cp.attention(out, *leaves[1:])
        out.backward(local.grad)
        results += [out.detach(), *(leaf.grad for leaf in leaves)]
    return results


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a+p2p"])
def test_many_layers_have_the_bits_of_rows_that_are_sent(comm_type: str) -> None:
    case = Case((57, 9, 130, 40, 22), 4, capacity=40, comm_type=comm_type, dtype="bfloat16", node=2)
    assert len(case.plan().micro_batches) > 1
    with staged_by(30):
        sent, read = (
            hcp.loopback(4, lambda groups: layers(groups, case, 5), sharing=sharing)
            for sharing in (False, True)
        )
    for one, other in zip(sent, read, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- exchanges -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (4, 2), (8,)], ids=lambda shape: "x".join(map(str, shape)) or "scalar"
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bfloat16, torch.uint8])
def test_rows_of_any_kind_arrive_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Also those that are no numbers: NaN in any guise, negative zeros, integers."""
    size = 4

    def exchange(groups: Any) -> None:
        transport = groups.transport
        generator = torch.Generator().manual_seed(transport.rank)
        for step in range(4):
            rows = [[1 + (a * 3 + b + step) % 5 for b in range(size)] for a in range(size)]
            row_bytes = torch.Size(shape).numel() * dtype.itemsize
            own = sum(rows[transport.rank]), row_bytes
            drawn = torch.randint(0, 256, own, generator=generator).byte()
            sent = drawn.flatten().view(dtype).view(-1, *shape)
            received = torch.zeros(sum(rows[a][transport.rank] for a in range(size)), *shape).to(
                dtype
            )
            sends, receives = ends(rows, transport.rank)
            stamp = Stamp(CallKind("a test"), step)
            transport.start(sent, sends, received, receives, stamp=stamp).wait()
            seen = transport.all_gather_bytes(
                sent.contiguous().view(torch.uint8).numpy().tobytes(), "rows"
            )
            for peer, row, count in receives:
                begin = sum(rows[peer][: transport.rank]) * row_bytes
                found = received[row : row + count].contiguous().view(torch.uint8).numpy().tobytes()
                assert found == seen[peer][begin : begin + count * row_bytes]

    hcp.loopback(size, exchange, sharing=True)


@pytest.mark.parametrize("skipped", [0, 4], ids=["own memory", "another library's"])
def test_rows_that_begin_inside_a_word_arrive(skipped: int) -> None:
    """Those of another library's tensor begin at a word, but the tensor does not."""

    def exchange(groups: Any) -> None:
        transport = groups.transport
        first = 2 if skipped else 1
        whole = torch.zeros(16, dtype=torch.bfloat16).view(torch.uint8).numpy()
        drawn = torch.frombuffer(whole, dtype=torch.bfloat16, offset=skipped)
        sent = drawn[first : first + 12].view(3, 4)
        sent += torch.arange(12).view(3, 4) + 16 * transport.rank
        assert sent.data_ptr() % 8 == (0 if skipped else 2)
        received = torch.zeros(3, 4, dtype=torch.bfloat16)
        peer = transport.rank ^ 1
        ends = [Move(peer, 0, 3)], received, [Move(peer, 0, 3)]
        transport.start(sent, *ends, stamp=Stamp(CallKind("a test"), 1)).wait()
        assert torch.equal(received, sent + 16 * (peer - transport.rank))

    hcp.loopback(2, exchange, sharing=True)


def ends(rows: list[list[int]], rank: int) -> tuple[list[Move], list[Move]]:
    """Moves of ``rows[a][b]`` rows from each a to each b, end to end in either buffer."""
    size = len(rows)
    sends = [Move(b, sum(rows[rank][:b]), rows[rank][b]) for b in range(size)]
    receives = [Move(a, sum(rows[c][rank] for c in range(a)), rows[a][rank]) for a in range(size)]
    return sends, receives


def drawn_moves(draw: random.Random) -> list[Move]:
    peers = draw.sample(range(9), draw.randint(1, 4))
    moves, at = [], 0
    for peer in draw.choices(peers, k=draw.randint(1, 6)):
        at += draw.choice((0, 0, 3))
        moves.append(Move(peer, at, draw.randint(0, 9)))
        at += moves[-1].rows
    return moves


def as_lists(rounds: list[Any]) -> list[Any]:
    """Rounds with tables as lists, which can be compared."""
    return [
        [
            [tuple(x.tolist() if isinstance(x, torch.Tensor) else x for x in each) for each in part]
            for part in one
        ]
        for one in rounds
    ]


def test_rounds_equal_those_of_slow_python() -> None:
    draw = random.Random(6)
    for _ in range(3000):
        sends, receives, rows = drawn_moves(draw), drawn_moves(draw), draw.randint(1, 12)
        found, expected = (
            as_lists(made(sends, receives, rows))
            for made in (core_rounds, mailbox_tables.rounds_of)
        )
        assert found == expected, (sends, receives, rows)
    assert core_rounds([], [], 1) == []


@pytest.mark.parametrize(
    ("moves", "row_bytes", "says"),
    [
        ([Move(0, 0, 1)], 0, "a row has 0 bytes, expected <= 4096"),
        ([Move(0, 0, 1)], 4097, "a row has 4097 bytes, expected <= 4096"),
        ([Move(0, 0, 1), Move(1, -1, 2)], 8, r"sends\[1\] has -1, expected a rank and rows >= 0"),
        ([Move(10, 0, 1)], 8, "a move is for rank 10, with which rank 9 has no mailboxes"),
        ([Move(9, 0, 1)], 8, "a move is for rank 9, with which rank 9 has no mailboxes"),
    ],
)
def test_moves_that_are_none_are_refused(moves: list[Move], row_bytes: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        core_rounds(moves, [], 1, row_bytes)
    with pytest.raises(ValueError, match=says.replace("sends", "receives")):
        core_rounds([], moves, 1, row_bytes)


def test_rounds_move_every_row_once() -> None:
    draw = random.Random(5)
    for _ in range(200):
        moves = drawn_moves(draw)
        mailbox = draw.randint(1, 12)
        sent = {(m.peer, row) for m in moves for row in range(m.row, m.row + m.rows)}
        for number, one in enumerate(core_rounds(moves, moves, mailbox)):
            staged = {stage.reader: stage for stage in one.stages}
            assert all(0 < stage.rows <= mailbox for stage in one.stages)
            for read in one.read_ranges:
                for row, rows, part, mailbox_row in read.runs.tolist():
                    peer, held = read.owners[part]
                    assert held == staged[peer].rows, (moves, mailbox, number)
                    here = [read.first + row + i for i in range(rows)]
                    there = [
                        (b - a + c)
                        for a, n, _, b in staged[peer].runs.tolist()
                        for c in range(a, a + n)
                    ][mailbox_row : mailbox_row + rows]
                    assert here == there  # the moves of both directions are the same
                    sent -= {(peer, place) for place in here}
        assert not sent, (moves, mailbox, sent)


# ---- errors --------------------------------------------------------------------------------------


def attend(case: Case, scale: Callable[[int], float]) -> None:
    def layer(groups: Any) -> None:
        for cp, local in dispatched(groups, case):
            rank = groups.transport.rank
            if scale(rank):
                given = local.query, local.key, local.value
                cp.attention(*given, softmax_scale=scale(rank))

    hcp.loopback(4, layer, sharing=True, timeout=2)


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
def test_a_rank_of_the_same_node_that_calls_differently_is_named(
    mixed: Any, comm_type: str
) -> None:
    mixed.timeout = 2.0
    case = Case((40, 9), 4, min_degree=4, comm_type=comm_type, node=2)
    with pytest.raises(hcp.HcpError, match=r"softmax_scale differs: .*2\.0 on rank 1"):
        attend(case, lambda rank: 1.0 + (rank == 1))


def exchange_once(stamps: Callable[[int], Stamp | None]) -> None:
    """All ranks of two nodes exchange a row with all others."""

    def exchange(groups: Any) -> None:
        transport = groups.transport
        sent, received = torch.zeros(4, 8), torch.zeros(4, 8)
        moves = [Move(peer, peer, 1) for peer in range(4)]
        stamp = stamps(transport.rank)
        if stamp is not None:
            transport.start(sent, moves, received, moves, stamp=stamp).wait()

    hcp.loopback(4, exchange, sharing=True, timeout=2)


def test_a_rank_of_the_node_in_another_call_is_found_before_its_rows_are_used() -> None:
    kinds = [Stamp(CallKind("a test"), number) for number in (1, 1, 1, 2)]
    with pytest.raises(hcp.HcpError, match=r"is in another call|call differs"):
        exchange_once(lambda rank: kinds[rank])


def test_a_rank_that_does_not_come_is_named_in_its_node(mixed: Any) -> None:
    mixed.timeout = 0.2
    with pytest.raises(hcp.HcpError, match=r"rank 2: rank 3 has not come .* within 0\.2 s"):
        exchange_once(lambda rank: None if rank == 3 else Stamp(CallKind("a test"), 1))


@pytest.mark.parametrize("buffer_bytes", [2 * 2 * 4096, 2 * 2 * 8192])
def test_rows_larger_than_a_mailbox_go_as_between_nodes(
    mixed: Any, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    mixed.ranks_per_node, mixed.buffer_bytes = 3, buffer_bytes
    near = []
    start = Mailboxes.start
    monkeypatch.setattr(Mailboxes, "start", lambda *given: near.append(1) or start(*given))

    def exchange(groups: Any) -> Any:
        transport = groups.transport
        sent = torch.full((3, 1024), float(transport.rank), dtype=torch.float64)
        received = torch.zeros(3, 1024, dtype=torch.float64)
        moves = [Move(peer, peer, 1) for peer in range(3)]
        transport.start(sent, moves, received, moves, stamp=Stamp(CallKind("a test"), 1)).wait()
        return received[:, 0].tolist()

    assert hcp.loopback(3, exchange, sharing=True) == 3 * [[0, 1, 2]]
    assert len(near) == (3 if buffer_bytes > 2 * 2 * 4096 else 0)


# ---- the transport of GPUs -----------------------------------------------------------------------


class Far:
    """Stands for NCCL: it notes what it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[Any, ...]] = []

        def init(transport: Any, group: Any, *, timeout: float) -> None:
            transport.rank, transport.size, transport.global_ranks = 1, 4, [4, 5, 6, 7]
            transport.check()  # as connecting does

        def start(
            transport: Any, sent: Any, sends: Any, received: Any, receives: Any, *, stamp: Any
        ) -> Any:
            self.given.append((sends, receives))
            return SimpleNamespace(wait=lambda: self.given.append(("waited",)))

        monkeypatch.setattr(NcclTransport, "__init__", init)
        monkeypatch.setattr(NcclTransport, "start", start)
        monkeypatch.setattr(NcclTransport, "check", lambda transport: None)


class Near:
    """Stands for a node's memory, of ranks 0 and 1."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def start(self, far: Any, *given: Any) -> Any:
        self.given.append(given)
        return far(*given[:4], stamp=given[4])

    def check(self) -> None:
        raise hcp.HcpError("rank 0 has not come", code="rank-late")


MOVES = [Move(0, 0, 1), Move(2, 1, 1)]


def test_a_rank_alone_in_its_node_sends_all_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    far, rows, stamp = Far(monkeypatch), torch.zeros(2, 8), Stamp(CallKind("a test"))
    transport = MixedTransport(None, [[0], [1], [2, 3]], timeout=9.0)  # type: ignore[arg-type]
    assert transport.node == [1]
    assert not read_in_place(transport, [0, 1])
    transport.start(rows, MOVES, rows, MOVES, stamp=stamp).wait()
    transport.check()
    assert far.given == [(MOVES, MOVES), ("waited",)]


def test_a_rank_of_a_node_splits_exchanges_and_reports_what_fails_in_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far, near, made = Far(monkeypatch), Near(), []
    monkeypatch.setattr(
        MixedTransport, "_map", lambda transport, *given: made.append(given) or near
    )
    rows, stamp = torch.zeros(2, 8), Stamp(CallKind("a test"))
    group: Any = None
    transport = MixedTransport(group, [[0, 1], [2, 3]], buffer_bytes=7, timeout=9.0)
    assert made == [(7, 9.0)]
    assert read_in_place(transport, [0, 1])
    assert not read_in_place(transport, [0, 1, 2])
    transport.start(rows, MOVES, rows, MOVES, stamp=stamp).wait()
    assert near.given == [(rows, MOVES, rows, MOVES, stamp)]
    assert far.given == [(MOVES, MOVES), ("waited",)]
    with pytest.raises(hcp.HcpError, match="rank 0 has not come"):
        transport.check()
