"""Choose the transport that carries a domain's rows, and connect it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import os
import platform
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp import _core
from hcp._version import __version__
from hcp._words import TransportName
from hcp.errors import HcpError
from hcp.exchange.mixed import MixedTransport
from hcp.exchange.nccl import NcclTransport
from hcp.exchange.peer import BUFFER_BYTES, PeerTransport
from hcp.exchange.torch_p2p import TorchTransport

TRANSPORTS: tuple[TransportName, ...] = ("auto", "torch", "nccl", "peer", "mixed")
"""``torch``: grouped point-to-point calls of torch.distributed. ``nccl``: one NCCL group per
exchange. ``peer``: keys and values, or rows exchanged for heads, are read from each other's memory.
``mixed``: rows are read from memory inside a host, and sent by NCCL between hosts. ``auto``:
``peer`` where all ranks' GPUs reach each other's memory, ``mixed`` where those of some host do,
``nccl`` on other GPUs, ``torch`` otherwise."""

_PREFERRED: tuple[TransportName, ...] = ("peer", "mixed", "nccl", "torch")
"""The order in which ``auto`` tries them."""

_log = logging.getLogger("hcp")


def connect(
    group: dist.ProcessGroup,
    transport: TransportName = "auto",
    *,
    timeout: timedelta | None = None,
    peer_buffer_bytes: int = BUFFER_BYTES,
) -> TorchTransport:
    """Connect the transport over hcp's own group. Every rank of the group calls it.

    NCCL connects a group at its first use, which all of its ranks must take part in; later on,
    ranks that exchange nothing call nothing. Raises ValueError when a named transport cannot work
    here: it is never replaced. What ``auto`` picks, and why, the group's first rank logs.
    """
    plain = TorchTransport(group)
    own = _view(plain, transport)
    views = [
        json.loads(view) for view in plain.all_gather_bytes(json.dumps(own).encode(), "connect")
    ]
    if transport not in TRANSPORTS:  # not before: the others would wait for this rank's view
        raise ValueError(f"transport is {transport!r}, expected one of {TRANSPORTS}")
    for rank, view in enumerate(views):
        for what, mine in own["build"].items():
            if view["build"][what] != mine:
                raise HcpError(
                    f"rank {plain.rank}: the {what} of hcp is {mine} here, {view['build'][what]} "
                    f"on rank {rank}; install the same hcp on every rank",
                    code="builds-differ",
                )
        if view["transport"] != transport:
            raise ValueError(
                f"transport is {transport!r}, but {view['transport']!r} on rank {rank}: "
                "every rank names the same"
            )
    obstacles: dict[str, str | None] = {name: _obstacle(name, views) for name in TRANSPORTS[1:]}
    if transport == "auto":
        transport = next(name for name in _PREFERRED if obstacles[name] is None)
        if plain.rank == 0:
            _log.info(
                "ranks %s exchange rows by transport %r: %s",
                list(plain.global_ranks),
                transport,
                _reasons(transport, obstacles),
            )
    if obstacles[transport] is not None:
        raise ValueError(f"transport is {transport!r}, but {obstacles[transport]}")
    seconds = {} if timeout is None else {"timeout": timeout.total_seconds()}
    if transport == "peer":
        return PeerTransport(group, buffer_bytes=peer_buffer_bytes, **seconds)
    if transport == "mixed":
        nodes = nodes_of(views)
        return MixedTransport(group, nodes, buffer_bytes=peer_buffer_bytes, **seconds)
    if transport == "nccl":
        return NcclTransport(group, **seconds)
    return plain


def _view(plain: TorchTransport, transport: str) -> dict[str, Any]:
    """Describe this rank to the others."""
    on_gpu = plain.device.type == "cuda"
    return {
        "build": _build(),
        "transport": transport,
        "gpu": _uuid(plain.device) if on_gpu else None,
        "index": plain.device.index,
        "host": _host(),
        "kernels": on_gpu and has_kernels(),
        "reaches": _reached(plain.device) if on_gpu else [],
    }


@functools.cache
def _build() -> dict[str, str]:
    """Identify this hcp. Ranks with another one would plan and call differently."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return {"version": __version__, "core": _core.CORE_HASH, "Python": digest.hexdigest()[:16]}


def _host() -> str:
    """Name this host as NCCL does: a job may declare ranks of one machine to be on several."""
    return os.environ.get("NCCL_HOSTID") or f"{platform.node()} {_boot()}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def has_kernels() -> bool:
    """Whether hcp was built with its CUDA kernels."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("hcp::signal_set", "CUDA"))


def _uuid(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _reached(device: torch.device) -> list[str]:
    """List the other GPUs that this process sees and whose memory its own GPU reaches."""
    return [
        _uuid(i)
        for i in range(torch.cuda.device_count())
        if i != device.index and torch.cuda.can_device_access_peer(device, i)
    ]


def _obstacle(transport: str, views: list[dict[str, Any]]) -> str | None:
    """Say why these ranks cannot use a transport. None: they can."""
    if transport == "torch":
        return None
    for rank, view in enumerate(views):
        if view["gpu"] is None:
            return f"rank {rank} has no GPU in this group: its backend is not NCCL"
        if not view["kernels"]:
            return f"hcp was built without its CUDA kernels on rank {rank}: nvcc was missing"
    if transport == "nccl":
        return None
    hosts = _hosts(views)
    if transport == "mixed" and len(hosts) > 1:
        found = [_apart(host, views) for host in hosts if len(host) > 1]
        if not found:
            return "each of them is alone on its host"
        return None if None in found else found[0]
    if len(hosts) > 1:
        return f"rank {hosts[1][0]} is on another host than rank 0"
    apart = _apart(hosts[0], views)
    if transport == "mixed" and apart is None:
        return "all of them are on one host: name 'peer'"
    return apart


def _hosts(views: list[dict[str, Any]]) -> list[list[int]]:
    """The ranks of each host, by the first of them."""
    hosts: dict[str, list[int]] = {}
    for rank, view in enumerate(views):
        hosts.setdefault(view["host"], []).append(rank)
    return list(hosts.values())


def nodes_of(views: list[dict[str, Any]]) -> list[list[int]]:
    """The ranks that read each other's memory: those of a host, or each by itself."""
    return [
        node
        for host in _hosts(views)
        for node in ([host] if _apart(host, views) is None else [[rank] for rank in host])
    ]


def _apart(ranks: list[int], views: list[dict[str, Any]]) -> str | None:
    """Say why ranks of one host cannot read each other's memory. None: they can."""
    for rank, other in itertools.combinations(ranks, 2):
        view, its = views[rank], views[other]
        if view["gpu"] == its["gpu"]:
            return f"ranks {rank} and {other} share a GPU"
        if view["index"] == its["index"]:
            return (
                f"ranks {rank} and {other} both have device index {view['index']}: each process "
                "sees only its own GPU, or in an order of its own; let all of them see every GPU "
                "of the host (CUDA_VISIBLE_DEVICES, SLURM's --gpus-per-task), and each choose its "
                "own by torch.cuda.set_device"
            )
    for rank, other in itertools.permutations(ranks, 2):
        if views[other]["gpu"] not in views[rank]["reaches"]:
            return (
                f"the GPU of rank {rank} does not reach the memory of rank {other}'s, or its "
                "process does not see that one"
            )
    return None


def _reasons(picked: str, obstacles: dict[str, str | None]) -> str:
    """Say why a transport is picked, and those before it are not."""
    if picked == "peer":
        return "all their GPUs reach each other's memory"
    others = _PREFERRED[: _PREFERRED.index(picked)]
    found = dict.fromkeys(obstacles[name] for name in others)  # often the same for all
    return f"not by {' or '.join(map(repr, others))}, since {'; '.join(map(str, found))}"
