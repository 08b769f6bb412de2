"""Run a check's file again as ranks that may hang or die, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
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


def run_as_ranks(
    file: str, ranks: int, *arguments: str, patience: float, wait_for: int | None = None
) -> Outcome:
    """Run `python FILE ARGUMENTS --rank R --store PATH` for each rank, and end all of them.

    ``wait_for``: the number of first ranks to wait for (default: all).
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
                    env={
                        **os.environ,
                        "LOCAL_RANK": str(rank),
                        "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]),
                        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
                    },
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


def join(rank: int, ranks: int, device: str, store: str) -> None:
    """Make the default group: NCCL on a GPU of this rank's own, or Gloo."""
    import torch
    import torch.distributed as dist

    own = None
    if device == "cuda":
        own = torch.device("cuda", rank)
        torch.cuda.set_device(own)
    dist.init_process_group(
        "nccl" if own else "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
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
