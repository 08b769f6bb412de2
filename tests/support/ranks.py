"""A pool of gloo ranks that lives for many cases, and processes that run one program.

    results = run_ranks(4, case, argument)     # case(rank, size, argument) on 4 processes
    outcomes = try_ranks(4, case, argument)    # returns a RankError for each rank that failed
    done = run_module("hcp", "demo", ranks=2, folder=path)   # python -m hcp demo, as torchrun would
    done = run_alone(function, argument, folder=path)        # a call in a process of its own

`case` is a function at the top of a module, since it is pickled by name. Each case gets a fresh
default group, so that groups and unfinished exchanges of a case do not reach the next one. All
processes are forked from a server that has imported the modules that most of them need
(`PRELOADED`) and never used them, because a fork of a process whose torch has started threads may
hang. The first pool takes as long as `import torch`, each further one a tenth of a second, each
case a few milliseconds. A case that leaves a setting of its process changed (`process_settings.py`)
fails, because the next case would get it. Its variables of the environment are put back.

An exception of a rank is returned with its traceback. The others then have `GRACE` seconds to end
by themselves. Ranks that are not done within the timeout, or after the grace, are killed, and the
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
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from support.process_settings import check_unchanged, process_settings, put_back

GRACE = 30.0
"""Seconds that the other ranks have after the first one failed."""

IDLE = 0.5
"""Seconds for which the groups of a case are kept for the next one."""

MAX_POOLS = 3
"""The most pools that are kept. The one unused for longest is ended first."""

PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "hypothesis", "pytest", "hcp"]
"""Modules that the server imports; torch imports torch._dynamo at an optimizer's first step."""

OF_TRAINERS = (
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "transformers.trainer",
)
"""What it imports too where a file of the tests is about that package: seconds for each rank."""

_context = multiprocessing.get_context("forkserver")
_pools: dict[int, _Pool] = {}


@dataclass(frozen=True)
class RankError:
    """The failure of one rank. `kind` is the exception's class name, or "exited" or "timeout"."""

    rank: int
    kind: str
    message: str
    traceback: str
    """The exception's, or the stacks of all threads of a rank that had to be ended."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.message}\n{self.traceback}".rstrip()


@dataclass(frozen=True)
class _Case:
    """The message to every rank. The call is pickled separately, to be read after `path` is set."""

    path: list[str]
    call: bytes
    group_timeout: float


class RanksFailed(AssertionError):
    """Raised if a rank failed. `results` holds a RankError in the place of each failed rank."""

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
    """Run like `run_ranks`, but return failures, each a `RankError` in its rank's place."""
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


def _start_process(name: str, target: Callable[..., None], *args: Any, daemon: bool = True) -> Any:
    """Fork a process that makes the call under this process's environment."""
    _start_server()
    process = _context.Process(
        target=_call_under, args=(dict(os.environ), target, args), name=name, daemon=daemon
    )
    process.start()
    return process


def _call_under(
    environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def _start_server() -> None:
    """Start the server unless it runs. It has this process's module path, and starts no thread."""
    kept = dict(os.environ)
    os.environ.update(PYTHONPATH=os.pathsep.join(sys.path), PYTHONSAFEPATH="1", OMP_NUM_THREADS="1")
    try:
        known = [name for name in OF_TRAINERS if name.partition(".")[0] in sys.modules]
        _context.set_forkserver_preload([*PRELOADED, *known])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(kept)


class _Pool:
    """`size` processes, a pipe to each, the store by which they connect, and a folder for
    stacks."""

    def __init__(self, size: int) -> None:
        # Not a file, which ranks that wait would read a hundred times a second.
        self.store = _new_store()
        self.folder = Path(tempfile.mkdtemp(prefix="hcp-ranks-"))
        self.processes: list[Any] = []
        self.pipes: list[connection.Connection] = []
        self.cases = 0
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _start_process(
                f"rank {rank} of {size}", _serve, theirs, rank, size, self.store.port, self.folder
            )
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


def _new_store() -> Any:
    """Return a store that this process serves, at a free port."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _serve(pipe: connection.Connection, rank: int, size: int, port: int, folder: Path) -> None:
    """Run one rank: read a case, send the answer, read the next case."""
    import torch
    import torch.distributed as dist

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
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    while True:
        try:
            # Not at once: by then every rank has left the case, and closed connections disturb
            # nobody.
            if not pipe.poll(IDLE):
                _leave_groups()
            number, case = pipe.recv()
        except (EOFError, OSError):
            return
        _leave_groups()
        pipe.send(_answer(rank, size, dist.PrefixStore(f"case-{number}", store), case))


_idle_threads = 0
"""Threads that this rank had after all groups of a case were gone."""


def _threads() -> int:
    return len([*Path("/proc/self/task").iterdir()])


def _leave_groups() -> None:
    """Destroy the groups of the last case, whose threads wake hundreds of times a second."""
    import torch.distributed as dist

    global _idle_threads
    megatron = sys.modules.get("megatron.core.parallel_state")
    if dist.is_initialized():
        if megatron is not None:  # its globals hold groups
            megatron.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()  # groups in reference cycles
        if _threads() > _idle_threads:  # in those of frozen objects, too, among all modules
            gc.unfreeze()
            gc.collect()
            _idle_threads = _threads()


def _answer(rank: int, size: int, store: Any, case: _Case) -> tuple[bool, Any]:
    """Run a case. Return (False, pickled result), or (True, (kind, message, traceback))."""
    try:
        sys.path[:] = case.path
        return False, pickle.dumps(_run_case(rank, size, store, case))
    except BaseException as error:
        return True, (type(error).__name__, str(error), traceback.format_exc())


def _run_case(rank: int, size: int, store: Any, case: _Case) -> Any:
    import torch.distributed as dist

    function, args = pickle.loads(case.call)
    # What is there is modules: frozen, they cost no collection and no search of hcp.audit anything.
    gc.freeze()
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=case.group_timeout),
    )
    before, environment = process_settings(), dict(os.environ)
    result = function(rank, size, *args)
    put_back(environment)
    check_unchanged(before, f"{function.__module__}.{function.__qualname__}")
    return result


# ---- programs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """The end of a program: the exit code of the first rank that failed, and all output."""

    code: int
    out: str
    err: str


def run_module(
    module: str, *argv: str, folder: Path, ranks: int | None = None, timeout: float = 250
) -> Finished:
    """Run `python -m module argv` in a folder, on ranks under a launcher's environment if asked."""
    if ranks is None:
        return _finish([({}, _run_module, (module, argv))], folder, timeout)
    store = _new_store()
    launched = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
    }
    calls = [
        ({**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)}, _run_module, (module, argv))
        for rank in range(ranks)
    ]
    return _finish(calls, folder, timeout)


def run_alone(
    function: Callable[..., None], *args: Any, folder: Path, timeout: float = 250
) -> Finished:
    """Call a function of a module's top in a process of its own."""
    return _finish([({}, function, args)], folder, timeout)


def _finish(
    calls: list[tuple[dict[str, str], Callable[..., None], tuple[Any, ...]]],
    folder: Path,
    timeout: float,
) -> Finished:
    """Make each call in a process of its own. Once one fails, the others have a few seconds."""
    with tempfile.TemporaryDirectory(prefix="hcp-program-") as printed:
        outputs = [Path(printed, name) for name in ("out", "err")]
        processes = [
            _start_process("program", _call_printing, *call, folder, outputs, daemon=False)
            for call in calls
        ]
        try:
            codes = _exit_codes(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join(5)
        return Finished(next(filter(None, codes), 0), *(path.read_text() for path in outputs))


def _exit_codes(processes: list[Any], deadline: float) -> list[int | None]:
    """Return exit codes in the order in which processes ended; None for those that were killed."""
    codes: list[int | None] = []
    running = list(processes)
    while running:
        left = max(0.0, deadline - time.monotonic())
        if not connection.wait([process.sentinel for process in running], left):
            break
        for process in [p for p in running if not p.is_alive()]:
            running.remove(process)
            codes.append(process.exitcode)
            if process.exitcode:
                deadline = min(deadline, time.monotonic() + 5)
    if running and not any(codes):
        raise AssertionError(f"{len(running)} of {len(processes)} processes are not done in time")
    return codes + [None] * len(running)


def _call_printing(
    environment: dict[str, str],
    function: Callable[..., None],
    args: tuple[Any, ...],
    folder: Path,
    outputs: list[Path],
) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    for stream, output in zip((sys.stdout, sys.stderr), outputs, strict=True):
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    function(*args)


def _run_module(module: str, argv: tuple[str, ...]) -> None:
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
