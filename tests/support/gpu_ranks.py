"""Ranks of a test, which met over Gloo, as ranks on GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import hcp
from hcp._words import TransportName


def on_gpus(rank: int, transport: TransportName) -> Any:
    """Groups of ranks that NCCL takes for hosts of their own where they share a GPU."""
    if torch.cuda.device_count() == 1:
        os.environ.update(NCCL_HOSTID=f"host {rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    size, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    own = dist.PrefixStore("of GPUs", store)
    dist.init_process_group("nccl", store=own, rank=rank, world_size=size)
    return hcp.build_process_groups(transport=transport)
