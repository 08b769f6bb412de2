"""Steps that the ranks of a program take together, in addition to training."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from hcp.exchange.gather import all_gather_object
from hcp.tools.programs.launch import InputError

T = TypeVar("T")


def initialize_distributed(args: argparse.Namespace) -> torch.device:
    """Initialise torch.distributed and return this rank's device.

    NCCL connects the ranks if each rank of this machine has a GPU, else Gloo on the CPU.
    `args.device` is "auto", "cpu" or "cuda". Raises InputError if it is "cuda" and GPUs are too
    few.
    """
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    if args.device == "cuda" and gpus < local_ranks:
        raise InputError(
            f"--device cuda: {local_ranks} ranks on this machine > {gpus} GPUs: lower --ranks"
        )
    if gpus < local_ranks:
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=5), device_id=device)
    return device


def runs_on_cpus(device: str, ranks: int) -> bool:
    """Whether `initialize_distributed` is going to choose the CPU and Gloo.

    `ranks`: those on this machine, unless a launcher has set their number.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return device == "cpu" or torch.cuda.device_count() < local_ranks


def on_every_rank(work: Callable[[], T]) -> T:
    """Return the result of `work`. If it fails on one rank, all raise InputError with its text."""
    result, problem = None, None
    try:
        result = work()
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    for rank, theirs in enumerate(all_gather_object(problem)):
        if theirs is not None:
            raise InputError(theirs if rank == 0 else f"rank {rank}: {theirs}")
    return result  # type: ignore[return-value]


def same_on_every_rank(what: str, value: object) -> None:
    """Raise InputError on all ranks unless all have the same value."""
    values = all_gather_object(value)
    other = [rank for rank, theirs in enumerate(values) if theirs != values[0]]
    if other:
        raise InputError(
            f"{what} differ between rank 0 and rank {other[0]}: give every machine the same text"
        )
