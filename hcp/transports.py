"""Which transport carries a domain's rows."""

from __future__ import annotations

import json
import platform
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hcp.exchange import TorchTransport
from hcp.nccl import NcclTransport
from hcp.peer import BUFFER_BYTES, PeerTransport

TRANSPORTS = ("auto", "torch", "nccl", "peer")
"""``torch``: grouped point-to-point calls of torch.distributed. ``nccl``: one NCCL group per
exchange. ``peer``: keys and values are read from each other's memory. ``auto``: ``peer`` where all
ranks' GPUs reach each other's memory, ``nccl`` on other GPUs, ``torch`` otherwise."""


def connect(
    group: dist.ProcessGroup,
    transport: str = "auto",
    *,
    timeout: timedelta | None = None,
    peer_buffer_bytes: int = BUFFER_BYTES,
) -> TorchTransport:
    """The transport over hcp's own group. Every rank of the group calls it.

    NCCL connects a group at its first use, which all of its ranks must take part in; later on,
    ranks that exchange nothing call nothing. Raises ValueError when a named transport cannot work
    here: it is never replaced.
    """
    plain = TorchTransport(group)
    own = _view(plain, transport)
    views = [json.loads(view) for view in plain.all_gather_bytes(json.dumps(own).encode())]
    if transport not in TRANSPORTS:  # not before: the others would wait for this rank's view
        raise ValueError(f"transport is {transport!r}, expected one of {TRANSPORTS}")
    for rank, view in enumerate(views):
        if view["transport"] != transport:
            raise ValueError(
                f"transport is {transport!r}, but {view['transport']!r} on rank {rank}: "
                "every rank names the same"
            )
    obstacles = {name: _obstacle(name, views) for name in TRANSPORTS[1:]}
    if transport == "auto":
        transport = next(name for name in ("peer", "nccl", "torch") if obstacles[name] is None)
    if obstacles[transport] is not None:
        raise ValueError(f"transport is {transport!r}, but {obstacles[transport]}")
    seconds = {} if timeout is None else {"timeout": timeout.total_seconds()}
    if transport == "peer":
        return PeerTransport(group, buffer_bytes=peer_buffer_bytes, **seconds)
    if transport == "nccl":
        return NcclTransport(group, **seconds)
    return plain


def _view(plain: TorchTransport, transport: str) -> dict[str, object]:
    """What the other ranks must know of this one."""
    on_gpu = plain.device.type == "cuda"
    return {
        "transport": transport,
        "gpu": str(torch.cuda.get_device_properties(plain.device).uuid) if on_gpu else None,
        "host": f"{platform.node()} {_boot()}",
        "kernels": on_gpu and has_kernels(),
        "reaches": on_gpu and _reaches_all(plain.device),
    }


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def has_kernels() -> bool:
    """Whether hcp was built with its CUDA kernels."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("hcp::signal_set", "CUDA"))


def _reaches_all(device: torch.device) -> bool:
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    return all(torch.cuda.can_device_access_peer(device, i) for i in others)


def _obstacle(transport: str, views: list[dict[str, object]]) -> str | None:
    """Why these ranks cannot use it."""
    if transport == "torch":
        return None
    for rank, view in enumerate(views):
        if view["gpu"] is None:
            return f"rank {rank} has no GPU in this group: its backend is not NCCL"
        if not view["kernels"]:
            return f"hcp was built without its CUDA kernels on rank {rank}: nvcc was missing"
    if transport == "nccl":
        return None
    for rank, view in enumerate(views):
        if view["host"] != views[0]["host"]:
            return f"rank {rank} is on another host than rank 0"
        if not view["reaches"]:
            return f"the GPU of rank {rank} does not reach the memory of all others"
    if len({str(view["gpu"]) for view in views}) < len(views):
        return "two ranks share a GPU"
    return None
