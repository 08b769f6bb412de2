"""A job of one rank for a process that no launcher started: `python file.py`, a notebook."""

from __future__ import annotations

import atexit
import logging
import os
import threading

import torch
import torch.distributed as dist

from hcp.errors import HcpError

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which launchers tell a process how many were started."""

this_thread = threading.local()
"""Where the thread is one of several ranks, as in hcp.loopback, `ranks` is their number."""

_log = logging.getLogger("hcp")


def initialize_alone(what: str, device: torch.device | str | None = None) -> None:
    """Initialise torch.distributed with one rank, unless it is initialised. Logs it (logger "hcp",
    INFO).

    `device`: where the rank computes, by default this process's GPU, or the CPU if it has none. A
    GPU gets NCCL, a CPU Gloo. `what` is named in errors. Raises HcpError if a launcher started
    several processes, or this is one of several threads that are ranks: ranks that each took
    themselves for a job of one would train apart.
    """
    if (ranks := getattr(this_thread, "ranks", 1)) > 1:
        raise HcpError(
            f"{what} was called in hcp.loopback, whose {ranks} ranks are threads of one process, "
            "expected the groups that it gives to its function; for process groups start "
            f"processes: torchrun --nproc-per-node {ranks}",
            code="not-initialised",
        )
    if not dist.is_available():
        raise not_initialised(what)
    if dist.is_initialized():
        return
    for name in _SIZES:
        size = os.environ.get(name, "1")
        if size != "1":
            raise not_initialised(what, f"{name} is {size}, and ")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = torch.device(where).type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    atexit.register(_finalize, os.getpid())
    _log.info(
        "one process, started without torchrun: hcp made a job of one rank on the %s",
        "GPU (NCCL)" if on_gpu else "CPU (Gloo)",
    )


def not_initialised(what: str, found: str = "") -> HcpError:
    return HcpError(
        f"{found}torch.distributed is not initialised, expected it to be before {what}: "
        "call torch.distributed.init_process_group() first",
        code="not-initialised",
    )


def _finalize(process: int) -> None:
    """End the job at exit of the process that began it, as torch asks for."""
    if dist.is_initialized() and os.getpid() == process:
        dist.destroy_process_group()
