"""A pool of gloo ranks that lives for many cases.

    results = run_ranks(4, case, argument)     # case(rank, size, argument) on 4 processes
    outcomes = try_ranks(4, case, argument)    # the same; a rank that failed gives a RankError

`case` is a function at the top of a module: it travels by name. Each case gets a fresh default
group, so nothing that a case leaves behind (groups, half-done exchanges) reaches the next.
Processes are forked from a server that has imported torch and never used it, because a fork of a
process whose torch has started threads may hang: the first pool takes as long as `import torch`,
each further one a tenth of a second, each case a few milliseconds.

What a rank raises comes back with its traceback; the others have `GRACE` seconds to come to an end
by themselves. Ranks that are not done within the timeout, or outlive the grace, are killed, and the
message shows their stacks. After any failure the next case forks a new pool.
"""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

GRACE = 30.0
"""Seconds that the other ranks have after the first one failed."""

MAX_POOLS = 4
"""Pools kept; the one unused for longest goes first."""

_context = multiprocessing.get_context("forkserver")
_pools: dict[int, _Pool] = {}


@dataclass(frozen=True)
class RankError:
    """How one rank failed. `kind` is the exception's class name, or "exited" or "timeout"."""

    rank: int
    kind: str
    message: str
    traceback: str
    """Of the exception, or the stacks of all threads of a rank that had to be ended."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.message}\n{self.traceback}".rstrip()


@dataclass(frozen=True)
class _Case:
    """What travels to every rank. The call is pickled apart: it is read once `path` is set."""

    path: list[str]
    call: bytes
    group_timeout: float


class RanksFailed(AssertionError):
    """At least one rank failed. `results` holds a RankError in the place of each that did."""

    def __init__(self, name: str, results: list[Any]) -> None:
        self.results = results
        self.errors = [result for result in results if isinstance(result, RankError)]
        failed = "\n\n".join(str(error) for error in self.errors)
        super().__init__(f"{name}: {len(self.errors)} of {len(results)} ranks failed\n{failed}")


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 150,
    group_timeout: float | None = None,
) -> list[Any]:
    """Call `function(rank, size, *args)` on `size` ranks and return what each returned, by rank.

    `group_timeout` is the default group's own timeout in seconds, `timeout` unless given. Raises
    `RanksFailed` when any rank raises, dies or is not done in time.
    """
    results = try_ranks(size, function, *args, timeout=timeout, group_timeout=group_timeout)
    if any(isinstance(result, RankError) for result in results):
        raise RanksFailed(f"{function.__module__}.{function.__qualname__} on {size} ranks", results)
    return results


def try_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 150,
    group_timeout: float | None = None,
) -> list[Any]:
    """As `run_ranks`, but failures are returned, each a `RankError` in its rank's place."""
    case = _Case(list(sys.path), pickle.dumps((function, args)), group_timeout or timeout)
    results = _pool(size).run(case, timeout)
    if any(isinstance(result, RankError) for result in results):
        _discard(size)
    return results


def _pool(size: int) -> _Pool:
    pool = _pools.pop(size, None)
    if pool is not None and not pool.alive():
        pool.close()
        pool = None
    while pool is None and len(_pools) >= MAX_POOLS:
        _discard(next(iter(_pools)))
    _pools[size] = pool or _Pool(size)
    return _pools[size]


def _discard(size: int) -> None:
    pool = _pools.pop(size, None)
    if pool is not None:
        pool.close()


@atexit.register
def _close_all() -> None:
    for size in list(_pools):
        _discard(size)


class _Pool:
    """`size` processes, a pipe to each, and a folder for rendezvous files and stacks."""

    def __init__(self, size: int) -> None:
        _context.set_forkserver_preload(["torch", "torch.distributed", "pytest"])
        self.folder = Path(tempfile.mkdtemp(prefix="hcp-ranks-"))
        self.processes: list[Any] = []
        self.pipes: list[connection.Connection] = []
        self.cases = 0
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve,
                args=(theirs, rank, size, self.folder),
                name=f"rank {rank} of {size}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def run(self, case: _Case, timeout: float) -> list[Any]:
        """Send the case to every rank and collect answers until all are there or time is up."""
        self.cases += 1
        results: dict[int, Any] = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send((self.cases, case))
            except OSError:
                results[rank] = self._exited(rank)
        deadline = time.monotonic() + timeout
        reason = f"not done after {timeout:g} s"
        while len(results) < len(self.pipes):
            pending: dict[Any, int] = {
                pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results
            }
            ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._end(results, reason)
                break
            for rank in [pending[pipe] for pipe in ready]:
                results[rank] = self._receive(rank)
                if isinstance(results[rank], RankError) and time.monotonic() + GRACE < deadline:
                    deadline = time.monotonic() + GRACE
                    reason = f"not done {GRACE:g} s after rank {rank} failed"
        return [results[rank] for rank in range(len(self.pipes))]

    def _receive(self, rank: int) -> Any:
        try:
            failed, payload = self.pipes[rank].recv()
        except (EOFError, OSError):
            return self._exited(rank)
        try:
            return RankError(rank, *payload) if failed else pickle.loads(payload)
        except Exception as error:  # a result that only its own process can read
            return RankError(
                rank, type(error).__name__, f"its result cannot be unpickled: {error}", ""
            )

    def _exited(self, rank: int) -> RankError:
        process = self.processes[rank]
        process.join(5)
        return RankError(
            rank,
            "exited",
            f"exit code {process.exitcode} before the case was done",
            self._stacks(rank),
        )

    def _end(self, results: dict[int, Any], reason: str) -> None:
        """Ask every rank that has not answered for its stacks, then kill it."""
        late = [rank for rank in range(len(self.pipes)) if rank not in results]
        for rank in late:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        for rank in late:
            self.processes[rank].kill()
            results[rank] = RankError(rank, "timeout", reason, self._stacks(rank))

    def _stacks(self, rank: int) -> str:
        try:
            return (self.folder / f"stacks-{rank}").read_text(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(pipe: connection.Connection, rank: int, size: int, folder: Path) -> None:
    """The life of one rank: a case, an answer, the next case."""
    import torch

    # faulthandler writes to it until the process ends.
    stacks = (folder / f"stacks-{rank}").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the test process, which ends the pool
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    while True:
        try:
            number, case = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(_answer(rank, size, folder / f"case-{number}", case))


def _answer(rank: int, size: int, rendezvous: Path, case: _Case) -> tuple[bool, Any]:
    """(False, pickled result), or (True, (kind, message, traceback))."""
    try:
        sys.path[:] = case.path
        return False, pickle.dumps(_run_case(rank, size, rendezvous, case))
    except BaseException as error:
        return True, (type(error).__name__, str(error), traceback.format_exc())


def _run_case(rank: int, size: int, rendezvous: Path, case: _Case) -> Any:
    import torch.distributed as dist

    function, args = pickle.loads(case.call)
    # Not at the end of the case before: by now every rank has left it, and closed connections
    # disturb nobody.
    if dist.is_initialized():
        dist.destroy_process_group()
        # Groups in reference cycles keep threads that wake a hundred times a second. What survives
        # is modules: frozen, they cost the next collection nothing.
        gc.collect()
        gc.freeze()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(rendezvous), size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=case.group_timeout),
    )
    return function(rank, size, *args)
