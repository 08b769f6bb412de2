"""Memory that work takes; that of a GPU that torch's allocator does not count; and a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from common.timing import slowest


def outside_torch(device: torch.device) -> float:
    """Return the GPU's memory in use, but for torch's allocator, in GiB: its context, buffers of
    NCCL, memory that peers read. On a CPU 0."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 2**30


def limit_memory(device: torch.device, gib: float) -> None:
    """Let torch's allocator have what the context, NCCL and memory for peers leave of these GiB."""
    torch.cuda.empty_cache()
    left = gib - slowest(outside_torch(device), device)
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    if left <= 0:
        raise SystemExit(
            f"--memory-gib is {gib}, expected more than {gib - left:.2f} outside torch"
        )
    torch.cuda.set_per_process_memory_fraction(min(1.0, left / total))


def staged_bytes(tokens: int, ranks: int, kv_elements: int, itemsize: int) -> int:
    """Return the memory of a rank for rows of a sequence that peers read: two exchanges, the
    largest of which is that of the gradients of all other ranks' keys and values.

    ``kv_elements``: of a row's keys and values."""
    rows = (tokens // ranks + 2) * max(1, ranks - 1)
    return max(2**20, 2 * (rows * kv_elements * itemsize + 4096))


def peak_bytes(work: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes that work allocates at once, beyond what was there before it."""
    if device.type != "cuda":
        return allocated(work)[1]
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def allocated(work: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of the CPU that work leaves allocated while its result lives, and at its peak."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = work()
    kineto: Any = profile.profiler
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in kineto.kineto_results.events()
        if event.name() == "[memory]"
    )
    total = peak = 0
    for _, size in events:
        total += size
        peak = max(peak, total)
    del result
    return total, peak
