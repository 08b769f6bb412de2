"""Run a check's file again as ranks that may hang or die, each in a process of its own."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
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
    """The output of these ranks, and where those hung that had to be ended."""


TESTS = Path(__file__).resolve().parents[1]
PATHS = str(TESTS), str(TESTS.parent)


def environment_of(rank: int, ranks: int, hosts: int = 1) -> dict[str, str]:
    """A rank's environment. NCCL takes ranks for those of several hosts, if there are several."""
    own = {
        "LOCAL_RANK": str(rank),
        "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "NCCL_SET_THREAD_NAME": "1",  # for say_where
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
        with said.open("a") as log:
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
            for rank, code in enumerate(codes):
                if code is None:
                    say_where(rank, processes[rank], said)
            for process in processes:
                process.kill()
                process.wait()
        return Outcome(codes, time.monotonic() - started, said.read_text())


def answer_where() -> None:
    """Let `say_where` ask this process where it is, even while it waits in C or for the GIL."""
    faulthandler.register(signal.SIGUSR1)


def say_where(rank: int, process: subprocess.Popen[Any], said: Path) -> None:
    """Append to ``said`` where a rank that has not ended is: its threads as the system sees them,
    then their Python stacks, which the rank writes itself (see `answer_where`)."""
    with said.open("a") as log:
        print(f"\nrank {rank} has not ended; its threads: number, name, state", file=log)
        for thread, count in Counter(_threads(process.pid)).most_common():
            print(f"    {count} {thread}", file=log)
    process.send_signal(signal.SIGUSR1)
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)


def _threads(process: int) -> Iterator[str]:
    for thread in Path(f"/proc/{process}/task").glob("*"):
        with suppress(OSError):  # it has ended
            name, status = ((thread / file).read_text() for file in ("comm", "status"))
            yield f"{name.strip()}, {status.partition('State:')[2].split()[0]}"


def join(rank: int, ranks: int, device: str, store: str, timeout: timedelta | None = None) -> None:
    """Make the default group: NCCL on a GPU, which no other rank of this host has, or Gloo."""
    import torch
    import torch.distributed as dist

    answer_where()
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
