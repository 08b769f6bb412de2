"""A program that starts its own ranks, or runs as one of them under torchrun.

    PROGRAM = Program("hcp demo", "hcp.demo", check=..., parse_args=..., run=...)
    sys.exit(PROGRAM.main(sys.argv[1:]))

An error is one line that begins with the program's name, on any rank.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hcp.errors import HcpError

USER_ERROR = 2
GRACE_SECONDS = 3.0
"""Time for rank 0, then for the first rank of each machine, to say what is wrong. A launcher ends
the ranks of its machine when the first one exits."""


class InputError(ValueError):
    """An error in the user's input. Only its message is printed."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Return a context in which an HcpError, or a ValueError that hcp's own code raises, is an
    InputError."""
    try:
        yield
    except (HcpError, ValueError) as error:
        if isinstance(error, InputError) or not is_refusal(error):
            raise
        raise InputError(error) from error


@dataclass(frozen=True)
class Program:
    name: str
    """The name with which its errors begin."""
    module: str
    """The module that ``python -m`` runs."""
    check: Callable[[], object]
    """Raises ImportError or ValueError if a package is missing. --help does without."""
    parse_args: Callable[[Sequence[str]], argparse.Namespace]
    """Raises ValueError for options that are unknown or do not go together, and HcpError for what
    is not installed here. The result has `ranks`."""
    run: Callable[[argparse.Namespace], None]
    """Runs one rank of a job that a launcher started. Raises OSError that names a file too."""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run as one rank if a launcher started this process; else start all ranks. Return the exit
        code."""
        argv = list(sys.argv[1:] if argv is None else argv)
        rank = int(os.environ.get("RANK", 0))
        try:
            if not asks_for_help(argv):
                self.check()
            args = parse_on_rank(rank, argv, self.parse_args)
        except (HcpError, ImportError, ValueError) as error:
            return fail(error, rank, self.name)
        if "RANK" not in os.environ:
            return start_ranks(args.ranks, ["-m", self.module, *argv], self.name)
        try:
            self.run(args)
        except Exception as error:
            if is_refusal(error):
                return fail(error, rank, self.name)
            let_others_speak(rank)
            raise
        return 0


def asks_for_help(argv: Sequence[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(argv)


def require_packages(who: str, *packages: str) -> None:
    """Raise ValueError that names those of the packages that are missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{who} needs {', '.join(missing)}: python -m pip install {' '.join(missing)}"
        )


def start_ranks(ranks: int, command: Sequence[str], program: str) -> int:
    """Run a command on so many ranks of this machine. Return the program's exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    processors = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, processors // ranks)))
    # A rank that fails says why itself; the launcher's report of it would bury that.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = parse_args(  # type: ignore[no-untyped-call]
        ["--standalone", f"--nproc-per-node={ranks}", *command]
    )
    try:
        run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return report_failure(rank, failure.exitcode, program)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def report_failure(rank: int, code: int, program: str) -> int:
    """Print how a rank ended, unless it has said so itself. Return the program's exit code."""
    if code == USER_ERROR:
        return code
    if code > 0:
        print(f"{program}: rank {rank} failed with exit code {code}", file=sys.stderr)
        return code
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    print(f"{program}: rank {rank} was ended by {name}{hint}", file=sys.stderr)
    return 128 - code


def parse_on_rank(
    rank: int,
    argv: Sequence[str],
    parse_args: Callable[[Sequence[str]], argparse.Namespace],
) -> argparse.Namespace:
    """Parse the options. Where argparse prints a help and ends the process, only rank 0 prints."""
    if rank == 0:
        return parse_args(argv)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return parse_args(argv)
    except SystemExit:
        let_others_speak(rank)
        raise


def is_refusal(error: Exception) -> bool:
    """Whether an error is what hcp itself says of the user's input, and no fault of a program."""
    if isinstance(error, InputError | HcpError):
        return True
    if isinstance(error, OSError) and error.filename is not None:
        return True
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    raised_by_hcp = str(last.f_globals.get("__name__")).startswith("hcp.")
    return raised_by_hcp and isinstance(error, ValueError | ImportError)


def let_others_speak(rank: int) -> None:
    """Wait, so that one rank alone says what all have to say: its exit ends this one."""
    time.sleep(GRACE_SECONDS * ((rank > 0) + (int(os.environ.get("LOCAL_RANK", rank)) > 0)))


def fail(error: Exception, rank: int, program: str) -> int:
    """Print an error as one line, rank 0's if that failed too. Return the exit code."""
    let_others_speak(rank)
    place = f"rank {rank}: " if rank > 0 else ""
    print(f"{program}: error: {place}{error}", file=sys.stderr, flush=True)
    return USER_ERROR
