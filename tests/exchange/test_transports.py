"""The choice of a domain's transport, and the reasons for which one is refused."""

from __future__ import annotations

import json
import logging
import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankError, run_ranks, try_ranks

import hcp
from hcp.exchange import connect as transports
from hcp.exchange.connect import _obstacle, nodes_of
from hcp.exchange.torch_p2p import TorchTransport


def transport_of(rank: int, size: int, name: str) -> str:
    groups = hcp.build_process_groups(transport=name)
    chosen = groups.transport.name
    groups.close()
    return chosen


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_ranks_without_gpus_exchange_through_torch(name: str) -> None:
    assert run_ranks(2, transport_of, name) == ["torch", "torch"]


@pytest.mark.parametrize("name", ["nccl", "peer", "mixed"])
def test_a_transport_that_cannot_work_here_is_refused_by_name(name: str) -> None:
    outcomes = try_ranks(2, transport_of, name)
    expected = f"transport is {name!r}, but rank 0 has no GPU in this group"
    assert all(isinstance(x, RankError) and expected in str(x) for x in outcomes), outcomes


def test_an_unknown_transport_is_refused() -> None:
    (outcome,) = try_ranks(1, transport_of, "smoke")
    assert "transport is 'smoke', expected one of ('auto', 'torch', 'nccl', 'peer', " in str(
        outcome
    )


def differing(rank: int, size: int) -> None:
    hcp.build_process_groups(transport=("auto", "torch")[rank])


def test_ranks_that_name_different_transports_are_told() -> None:
    outcomes = try_ranks(2, differing)
    assert any("transport is 'auto', but 'torch' on rank 1" in str(x) for x in outcomes), outcomes


def views(**changes: list) -> list[dict]:
    """Facts of two ranks, each with a GPU of its own that reaches the other's."""
    own = [
        {"gpu": gpu, "index": index, "host": "h", "kernels": True, "reaches": [other]}
        for index, (gpu, other) in enumerate(("ab", "ba"))
    ]
    for name, values in changes.items():
        for view, value in zip(own, values, strict=True):
            view[name] = value
    return own


def of_hosts(hosts: str, apart: str = "") -> list[dict]:
    """Facts of ranks of several hosts, whose GPUs reach each other but for the hosts of ``apart``.
    The first GPU of each host has index 0."""
    gpus = [f"{host}{hosts[:rank].count(host)}" for rank, host in enumerate(hosts)]
    return [
        {
            "gpu": gpu,
            "index": int(gpu[1]),
            "host": gpu[0],
            "kernels": True,
            "reaches": [x for x in gpus if x[0] == gpu[0] not in apart and x != gpu],
        }
        for gpu in gpus
    ]


@pytest.mark.parametrize(
    ("hosts", "apart", "nodes"),
    [
        ("hhii", "", [[0, 1], [2, 3]]),
        ("hihi", "", [[0, 2], [1, 3]]),
        ("hhiij", "i", [[0, 1], [2], [3], [4]]),
    ],
)
def test_nodes_are_ranks_that_reach_each_other(hosts: str, apart: str, nodes: list) -> None:
    assert nodes_of(of_hosts(hosts, apart)) == nodes


@pytest.mark.parametrize("given", [None, "", "rack 7"])
def test_a_job_may_name_its_hosts_as_nccl_does(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    own = transports._host()
    if given is not None:
        monkeypatch.setenv("NCCL_HOSTID", given)
    assert transports._host() == (given or own)
    assert own.startswith(platform.node())


@pytest.mark.parametrize(
    ("transport", "views", "reason"),
    [
        ("peer", views(), None),
        ("peer", views()[:1], None),
        ("peer", views(host="hi"), "rank 1 is on another host than rank 0"),
        ("peer", views(gpu="aa", index=[0, 0]), "ranks 0 and 1 share a GPU"),
        ("peer", views(index=[0, 0]), "ranks 0 and 1 both have device index 0"),
        ("peer", views(reaches=[["b", "c"], ["c"]]), "rank 1 does not reach the memory of rank 0"),
        ("peer", views(reaches=[[], ["a"]]), "rank 0 does not reach the memory of rank 1"),
        ("nccl", views(host="hi", index=[0, 0]), None),
        ("nccl", views(kernels=[True, False]), "without its CUDA kernels on rank 1"),
        ("nccl", views(gpu=[None, None]), "rank 0 has no GPU in this group"),
        ("torch", views(gpu=[None, None]), None),
        ("mixed", views(), "all of them are on one host: name 'peer'"),
        ("mixed", views(index=[0, 0]), "ranks 0 and 1 both have device index 0"),
        ("mixed", views(host="hi"), "each of them is alone on its host"),
        ("mixed", views(gpu=[None, None]), "rank 0 has no GPU in this group"),
        ("mixed", of_hosts("hhii"), None),
        ("mixed", of_hosts("hihi"), None),
        ("mixed", of_hosts("hhi"), None),
        ("peer", of_hosts("hhii"), "rank 2 is on another host than rank 0"),
        (
            "mixed",
            of_hosts("hhii", apart="hi"),
            "GPU of rank 0 does not reach the memory of rank 1",
        ),
        ("mixed", of_hosts("hhii", apart="h"), None),
    ],
)
def test_what_stands_in_the_way_is_said(transport: str, views: list, reason: str | None) -> None:
    said = _obstacle(transport, views)
    assert said is None if reason is None else reason in str(said)


class Host:
    """GPUs of one host, as the process of rank 0 sees them, and another rank's view."""

    def __init__(self, patch: pytest.MonkeyPatch, gpus: str, reached: bool, other: dict) -> None:
        """``gpus``: the UUIDs that the process sees."""
        patch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: reached)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu_at(gpus, device))
        patch.setattr(transports, "has_kernels", lambda: True)
        patch.setattr(transports, "TorchTransport", lambda group: self)
        for name in ("nccl", "peer", "mixed"):
            kind = f"{name.capitalize()}Transport"
            patch.setattr(transports, kind, lambda group, *nodes, name=name, **options: name)
        self.rank, self.global_ranks, self.device = 0, [4, 5], torch.device("cuda", 0)
        self._other = other

    def all_gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        return [payload, json.dumps({**json.loads(payload), **self._other}).encode()]


def gpu_at(gpus: str, device: Any) -> SimpleNamespace:
    """A device, or its index."""
    return SimpleNamespace(uuid=gpus[getattr(device, "index", device)])


NEIGHBOUR = {"gpu": "b", "index": 1, "reaches": ["a"]}


@pytest.mark.parametrize(
    ("gpus", "reached", "other", "picked", "reason"),
    [
        ("ab", True, NEIGHBOUR, "peer", "all their GPUs reach each other's memory"),
        ("ab", False, NEIGHBOUR, "nccl", "GPU of rank 0 does not reach the memory of rank 1's"),
        ("a", True, {"gpu": "b", "reaches": []}, "nccl", "ranks 0 and 1 both have device index 0"),
        ("a", True, NEIGHBOUR, "nccl", "or its process does not see that one"),
        ("ab", True, {**NEIGHBOUR, "host": "i"}, "nccl", "rank 1 is on another host than rank 0"),
    ],
)
def test_gpus_are_read_from_where_each_process_reaches_the_other(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpus: str,
    reached: bool,
    other: dict,
    picked: str,
    reason: str,
) -> None:
    Host(monkeypatch, gpus, reached, other)
    with caplog.at_level(logging.INFO, "hcp"):
        assert transports.connect(None) == picked
    (said,) = caplog.messages
    assert said.startswith(f"ranks [4, 5] exchange rows by transport {picked!r}: ")
    assert reason in said
    if picked != "peer":
        with pytest.raises(ValueError, match=f"transport is 'peer', but .*{reason}"):
            transports.connect(None, "peer")


def logged(rank: int, size: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("hcp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for name in ("auto", "torch"):
        hcp.build_process_groups(transport=name).close()
    logger.removeHandler(handler)
    return said


def test_the_first_rank_says_what_auto_picked() -> None:
    first, second = run_ranks(2, logged)
    assert first == [
        "ranks [0, 1] exchange rows by transport 'torch': not by 'peer' or 'mixed' or 'nccl', "
        "since rank 0 has no GPU in this group: its backend is not NCCL"
    ]
    assert second == []


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:0"),  # also what torch takes where none is named
        ("cuda:nccl", "cuda:0"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo", "cpu"),
    ],
)
def test_rows_lie_on_gpus_where_a_group_has_nccl_for_them(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
        assert str(TorchTransport(dist.new_group()).device) == device
    finally:
        dist.destroy_process_group()
