"""Which transport carries a domain's rows, and what refuses one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ranks import RankError, run_ranks, try_ranks

import hcp
from hcp.layout import Move
from hcp.nccl import NcclTransport
from hcp.transports import _obstacle


def transport_of(rank: int, size: int, name: str) -> str:
    groups = hcp.build_process_groups(transport=name)
    chosen = groups.transport.name
    groups.close()
    return chosen


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_ranks_without_gpus_exchange_through_torch(name: str) -> None:
    assert run_ranks(2, transport_of, name) == ["torch", "torch"]


@pytest.mark.parametrize("name", ["nccl", "peer"])
def test_a_transport_that_cannot_work_here_is_refused_by_name(name: str) -> None:
    outcomes = try_ranks(2, transport_of, name)
    expected = f"transport is {name!r}, but rank 0 has no GPU in this group"
    assert all(isinstance(x, RankError) and expected in str(x) for x in outcomes), outcomes


def test_an_unknown_transport_is_refused() -> None:
    (outcome,) = try_ranks(1, transport_of, "smoke")
    assert "transport is 'smoke', expected one of ('auto', 'torch', 'nccl', 'peer')" in str(outcome)


def differing(rank: int, size: int) -> None:
    hcp.build_process_groups(transport=("auto", "torch")[rank])


def test_ranks_that_name_different_transports_are_told() -> None:
    outcomes = try_ranks(2, differing)
    assert any("transport is 'auto', but 'torch' on rank 1" in str(x) for x in outcomes), outcomes


VIEW = {"gpu": "a", "host": "h", "kernels": True, "reaches": True}


@pytest.mark.parametrize(
    ("transport", "views", "reason"),
    [
        ("peer", [VIEW, {**VIEW, "gpu": "b"}], None),
        (
            "peer",
            [VIEW, {**VIEW, "gpu": "b", "host": "i"}],
            "rank 1 is on another host than rank 0",
        ),
        ("peer", [VIEW, VIEW], "two ranks share a GPU"),
        ("peer", [VIEW, {**VIEW, "reaches": False}], "rank 1 does not reach the memory of all"),
        ("nccl", [VIEW, {**VIEW, "gpu": "b", "host": "i"}], None),
        ("nccl", [VIEW, {**VIEW, "kernels": False}], "without its CUDA kernels on rank 1"),
        ("nccl", [{**VIEW, "gpu": None}], "rank 0 has no GPU in this group"),
        ("torch", [{**VIEW, "gpu": None}], None),
    ],
)
def test_what_stands_in_the_way_is_said(transport: str, views: list, reason: str | None) -> None:
    said = _obstacle(transport, views)
    assert said is None if reason is None else reason in str(said)


def test_an_exchange_that_cannot_be_queued_names_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # On the CPU the operator has no kernel: it takes its arguments, and fails.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    transport = NcclTransport.__new__(NcclTransport)
    transport.rank, transport._failure, transport._communicator = 1, None, 7
    transport._tables, transport.stream = {}, SimpleNamespace(cuda_stream=0)
    rows = torch.zeros(4, 2)
    moves = [Move(1, 0, 1), Move(0, 1, 1), Move(3, 2, 2)]
    with pytest.raises(
        hcp.HcpError, match=r"rank 1: the exchange with ranks \[0, 3\] could not be"
    ):
        transport.start(rows, moves, torch.zeros(4, 2), moves)
    (table,) = transport._tables.values()
    assert table.words.tolist() == [[0, 1, 1], [3, 2, 2]]
    transport._failure = "late"
    with pytest.raises(hcp.HcpError, match="late"):
        transport.start(rows, moves, torch.zeros(4, 2), moves)
