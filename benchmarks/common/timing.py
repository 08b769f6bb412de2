"""Start, time and end ranks that run together."""

from __future__ import annotations

import faulthandler
import os
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from common.flags import end_after

Step = Callable[[], object]


def start_ranks(device: str, deadline: float, timeout: timedelta) -> torch.device:
    """Join torchrun's ranks: a GPU for each under NCCL, or the CPU under Gloo.

    The process ends, with the stack of each thread, if it lives longer than ``deadline`` seconds;
    torchrun then ends the others.
    """
    end_after(deadline)
    if device == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    own = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=own, timeout=timeout)
    return own


def copy_rate(device: torch.device, rounds: int) -> float:
    """Return the bytes per second that each GPU copies from the next one's memory, all at once. A
    CPU copies from its own."""
    if device.type == "cpu":
        source = torch.empty(2**22, dtype=torch.uint8)
    else:
        from torch.distributed import _symmetric_memory as symmetric

        size = 2**27
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, world())
        peer = (dist.get_rank() + 1) % dist.get_world_size()
        source = handle.get_buffer(peer, (size,), torch.uint8)
    target = torch.empty_like(source, device=device)
    clock = partial(timed, device=device, calls=4)
    times = by_turns({"copy": lambda: target.copy_(source)}, device, clock, rounds)
    return source.numel() / times["copy"]


def end_ranks() -> None:
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_of(name: str) -> torch.device:
    """Return the CPU, or this process's GPU as its tensors name it."""
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def slowest(seconds: float, device: torch.device) -> float:
    """Return the largest of all ranks' values."""
    worst = torch.tensor(seconds, device=device, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def timed(step: Step, device: torch.device, calls: int = 1) -> float:
    """Return the mean seconds of several calls, from a common start to the end of the device's
    work."""
    synchronize(device)
    dist.barrier()
    synchronize(device)
    begun = time.perf_counter()
    if device.type != "cuda":
        for _ in range(calls):
            step()
        return (time.perf_counter() - begun) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def queued(step: Step, device: torch.device) -> float:
    """Return the seconds that the host needs for one call."""
    synchronize(device)
    dist.barrier()
    synchronize(device)
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def by_turns(
    steps: Mapping[str, Step],
    device: torch.device,
    clock: Callable[[Step], float],
    rounds: int,
    *,
    warm: bool = False,
    take: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Return each step's time on the slowest rank, the median of rounds through all steps.

    ``clock`` times one call. ``take`` replaces the median. ``warm``: all steps have run before.
    """
    for step in () if warm else steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(slowest(clock(step), device))
    return {name: take(taken) for name, taken in times.items()}
