"""A Megatron-style training script with dynamic context parallelism on real text.

    python -m hcp demo --ranks 4                  starts 4 ranks on this machine
    torchrun --nproc-per-node 4 -m hcp.demo       the same, under a launcher of your own

Read training.py first: it is the script that your own would look like.
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
from collections.abc import Callable, Sequence

USER_ERROR = 2
GRACE_SECONDS = 2.0
"""For rank 0 to say what is wrong. The launcher ends all ranks when the first one exits."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo: as one rank when a launcher started us, else by starting all ranks. Returns the
    exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return run_rank(argv) if "RANK" in os.environ else launch(argv)


def launch(argv: Sequence[str]) -> int:
    """Check the options, then start the ranks through torch.distributed.run. Their exit code is
    ours."""
    from hcp.demo.arguments import parse_args

    try:
        check_packages()
        args = parse_args(argv)
    except ValueError as error:
        return fail(error)
    return start_ranks(args.ranks, ["-m", "hcp.demo", *argv])


def start_ranks(ranks: int, command: Sequence[str], program: str = "demo") -> int:
    """Run a command on so many ranks of this machine. The exit code for theirs."""
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
    """The exit code for that of a rank, and a line on what the rank could not say itself."""
    if code == USER_ERROR:
        return code
    if code > 0:
        print(f"hcp {program}: rank {rank} failed with exit code {code}", file=sys.stderr)
        return code
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    print(f"hcp {program}: rank {rank} was ended by {name}{hint}", file=sys.stderr)
    return 128 - code


def run_rank(argv: Sequence[str]) -> int:
    rank = int(os.environ["RANK"])
    try:
        check_packages()
        from hcp import HcpError
        from hcp.demo.arguments import parse_args
        from hcp.demo.training import InputError, pretrain

        args = parse_on_rank(rank, argv, parse_args)
    except ValueError as error:
        return fail(error, rank)
    try:
        pretrain(args)
    except (InputError, HcpError) as error:
        return fail(error, rank)
    return 0


def parse_on_rank(
    rank: int,
    argv: Sequence[str],
    parse_args: Callable[[Sequence[str]], argparse.Namespace],
) -> argparse.Namespace:
    """The options. argparse ends the process for those that it does not know: rank 0 speaks."""
    if rank == 0:
        return parse_args(argv)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return parse_args(argv)
    except SystemExit:
        time.sleep(GRACE_SECONDS)
        raise


def fail(error: Exception, rank: int = 0, program: str = "demo") -> int:
    """One line, from rank 0 if it failed too."""
    if rank > 0:
        time.sleep(GRACE_SECONDS)
    place = f"rank {rank}: " if rank > 0 else ""
    print(f"hcp {program}: error: {place}{error}", file=sys.stderr, flush=True)
    return USER_ERROR


def check_packages() -> None:
    missing = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the demo needs {' and '.join(missing)}: python -m pip install {' '.join(missing)}"
        )
