"""Ranks in processes of their own, which live for many calls and may fail in any of them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = [
    "torch",
    "torch.distributed.tensor.experimental",
    "torch.nn.attention.flex_attention",
    "hcp",
]
"""What the server imports once, from which all processes are forked."""

_context = get_context("forkserver")


ENDED, LATE = "ended", "late"
"""Kinds of a failure that is no exception: the process ended, or did not answer."""


@dataclass(frozen=True)
class Failure:
    """What ended a call on one rank."""

    kind: str
    """The exception's class, ENDED or LATE."""
    message: str


class Pool:
    """``size`` ranks, each with a default group of its own for each call."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._ranks: list[tuple[Any, connection.Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float) -> list[Any]:
        """Call ``function(rank, size, device, *args)`` on every rank. Return the results, with a
        Failure in the place of one that is missing. An exchange without an answer fails after
        ``seconds``."""
        self._start()
        self._calls += 1
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        for _, pipe in self._ranks:
            pipe.send((function, args, store, seconds))
        end = time.monotonic() + 2 * seconds
        late = Failure(LATE, f"no answer in {2 * seconds:g} s")
        answers = [_answer(process, pipe, end, late) for process, pipe in self._ranks]
        failed = [answer for answer in answers if isinstance(answer, Failure)]
        gone = any(each.kind in (ENDED, LATE) for each in failed)
        if gone or (failed and self.device == "cuda"):  # whose context an error may have spoiled
            self.end()
        return answers

    def end(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []

    def _start(self) -> None:
        if self._ranks:
            return
        _context.set_forkserver_preload(PRELOADED)
        for rank in range(self.size):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, self.size, self.device, there), daemon=True
            )
            process.start()
            there.close()
            self._ranks.append((process, here))


def _answer(process: Any, pipe: connection.Connection, end: float, late: Failure) -> Any:
    if not pipe.poll(max(0.0, end - time.monotonic())):
        return late
    try:
        return pipe.recv()
    except EOFError:
        process.join(5)
        return Failure(ENDED, f"the process ended with status {process.exitcode}")


def _serve(rank: int, size: int, device: str, pipe: connection.Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    own = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    while True:
        function, args, store, seconds = pipe.recv()
        pipe.send(_called(rank, size, own, store, seconds, function, args))


def _called(
    rank: int,
    size: int,
    device: torch.device,
    store: str,
    seconds: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    try:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        dist.barrier()  # so that none leaves while another one still connects
        return function(rank, size, device, *args)
    except Exception as error:
        return Failure(type(error).__name__, str(error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
