"""Memory of a GPU that torch's allocator does not count."""

from __future__ import annotations

import torch


def outside_torch(device: torch.device) -> float:
    """Return the GPU's memory in use, but for torch's allocator, in GiB: its context, buffers of
    NCCL, memory that peers read. On a CPU 0."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 2**30
