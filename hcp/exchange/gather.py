"""Gather Python objects from all ranks.

torch.distributed's own collectives of objects want numpy, which torch does not require.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hcp._digest import bytes_of


def all_gather_object(own: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's object, by rank of the group (None: the default one). All its ranks call
    it."""
    payload = pickle.dumps(own)
    device = dist.distributed_c10d._get_object_coll_device(group)
    lengths = [int(x) for x in _all_gather(torch.tensor([len(payload)], device=device), group)]
    block = torch.frombuffer(bytearray(payload.ljust(max(lengths))), dtype=torch.uint8)
    blocks = _all_gather(block.to(device), group)
    return [
        pickle.loads(bytes_of(block)[:length])
        for block, length in zip(blocks, lengths, strict=True)
    ]


def _all_gather(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return parts
