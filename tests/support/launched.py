"""Run a check's file again as ranks that may hang or die, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Outcome:
    """The exit codes and the output of the ranks that were waited for."""

    codes: list[int | None]
    """Exit codes; None for a rank that had to be ended."""
    seconds: float
    said: str
    """The output of these ranks."""


TESTS = Path(__file__).resolve().parents[1]
PATHS = str(TESTS), str(TESTS.parent)


def environment_of(rank: int, ranks: int, hosts: int = 1) -> dict[str, str]:
    """A rank's environment. NCCL takes ranks for those of several hosts, if there are several."""
    own = {
        "LOCAL_RANK": str(rank),
        "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    if hosts > 1:
        own["NCCL_HOSTID"] = f"host {rank * hosts // ranks}"
        own["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")
    return {**os.environ, **own}


def run_as_ranks(
    file: str,
    ranks: int,
    *arguments: str,
    patience: float,
    wait_for: int | None = None,
    hosts: int = 1,
) -> Outcome:
    """Run `python FILE ARGUMENTS --rank R --store PATH` for each rank, and end all of them.

    ``wait_for``: the number of first ranks to wait for (default: all). ``hosts``: on which NCCL
    takes them to be.
    """
    with tempfile.TemporaryDirectory() as folder:
        said, started = Path(folder, "said"), time.monotonic()
        with said.open("w") as log:
            processes = [
                subprocess.Popen(
                    [
                        *(sys.executable, file, *arguments),
                        *("--rank", str(rank), "--store", str(Path(folder, "store"))),
                    ],
                    stdout=log if rank < (wait_for or ranks) else subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                    env=environment_of(rank, ranks, hosts),
                )
                for rank in range(ranks)
            ]
            codes: list[int | None] = []
            for process in processes[:wait_for]:
                try:
                    codes.append(process.wait(max(1.0, started + patience - time.monotonic())))
                except subprocess.TimeoutExpired:
                    codes.append(None)
            for process in processes:
                process.kill()
                process.wait()
        return Outcome(codes, time.monotonic() - started, said.read_text())


def join(rank: int, ranks: int, device: str, store: str, timeout: timedelta | None = None) -> None:
    """Make the default group: NCCL on a GPU, which no other rank of this host has, or Gloo."""
    import torch
    import torch.distributed as dist

    own = None
    if device == "cuda":
        own = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(own)
    dist.init_process_group(
        "nccl" if own else "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        device_id=own,
    )


def end(transport: Any, code: int) -> NoReturn:
    """End this rank with a code after its device has failed, and say why."""
    from hcp import HcpError

    try:
        if hasattr(transport, "check"):
            transport.check()
    except HcpError:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)
