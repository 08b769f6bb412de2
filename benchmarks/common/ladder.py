"""A ladder of lengths: each contestant doubles its sequence until its memory, or time, is used up.

Ranks that run out of memory leave others waiting in an exchange. So each contestant runs in
processes of its own, which torchrun ends together.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from common.timing import slowest
from common.torchrun import started

FULL = "out of memory at"
NOT_TRIED = "not tried at"
ENDING = 5.0
"""Seconds that are left for the rows, after all contestants."""


def add_ladder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="without torchrun: double the tokens until memory is used up",
    )
    parser.add_argument("--ranks", type=int, help="with --ladder (all GPUs; on a CPU 2)")
    says = "with --ladder: memory of each GPU that a contestant may use (all)"
    parser.add_argument("--memory-gib", type=float, help=says)
    parser.add_argument("--most-tokens", type=int, default=2**24, help="with --ladder (2^24)")
    says = "with --ladder: try no length that is expected to take longer (60)"
    parser.add_argument("--rung-seconds", type=float, default=60, help=says)
    parser.add_argument("--climb", metavar="CONTESTANT", help=argparse.SUPPRESS)


def check_ladder(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.memory_gib is not None and args.device == "cpu":
        parser.error("--memory-gib is for GPUs, whose allocator can be limited")


# ---- in the ranks --------------------------------------------------------------------------------


def is_full(error: BaseException) -> bool:
    """Whether memory ran out: of torch's allocator, of NCCL, or memory that peers read."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def leave_full(name: str, tokens: int, error: BaseException) -> NoReturn:
    """Tell that memory ran out, and end this process at once: others may wait for it in an
    exchange, until torchrun ends them."""
    why = str(error).splitlines()[0]
    print(f"{name}: {FULL} {tokens} tokens on rank {dist.get_rank()}: {why}", flush=True)
    os._exit(1)


def climb(args: argparse.Namespace, device: torch.device, rung: Callable[[int], None]) -> None:
    """Call ``rung(tokens)``, doubling, until --most-tokens, or until the next length is expected to
    take more than --rung-seconds."""
    tokens = args.tokens
    while tokens <= args.most_tokens:
        begun = time.perf_counter()
        rung(tokens)
        # Attention grows with the square of the length.
        expected = 4 * slowest(time.perf_counter() - begun, device)
        tokens *= 2
        if tokens <= args.most_tokens and expected > args.rung_seconds:
            if dist.get_rank() == 0:
                print(f"{args.climb}: {NOT_TRIED} {tokens} tokens, expected {expected:.0f} s")
            return


# ---- in the process that starts them -------------------------------------------------------------


def ranks_of(args: argparse.Namespace) -> int:
    """How many ranks a ladder has."""
    return args.ranks or (2 if args.device == "cpu" else torch.cuda.device_count())


def climb_all(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Start torchrun for each contestant: this program with ``--climb NAME``. Print its rows as
    they come, and at last how each ended. Each has an equal share of the time that is left."""
    begun = time.perf_counter()
    ranks, ends = ranks_of(args), []
    for i, name in enumerate(names):
        left = args.deadline - ENDING - (time.perf_counter() - begun)
        share = left / (len(names) - i)
        if share < 1:
            ends.append(f"{name}: not started, --deadline {args.deadline:g} is over")
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            climbs = ["--climb", name, "--deadline", str(share), "--json", str(file)]
            status, printed, errors = told(ranks, [*this_program(), *climbs], Path(folder))
            rows = json.loads(file.read_text())["rows"] if file.exists() else []
        for row in rows:
            args.json.add(row)
        reached = [row["tokens"] for row in rows]
        ends.append(end_of(name, status, printed, errors, reached))
    print("\n" + "\n".join(ends))


def told(ranks: int, program: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run a program, and print the rows of a table in what it prints at once. Return its exit
    status, what it printed, and its errors."""
    printed = []
    with (folder / "errors").open("w+") as errors:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
        with started(
            ranks, *program, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as torchrun:
            assert torchrun.stdout is not None
            for line in torchrun.stdout:
                printed.append(line)
                if line.startswith("|"):
                    print(line, end="", flush=True)
        errors.seek(0)
        return torchrun.returncode, "".join(printed), errors.read()


def this_program() -> list[str]:
    return [str(Path(sys.argv[0]).resolve()), *(x for x in sys.argv[1:] if x != "--ladder")]


def end_of(name: str, status: int, printed: str, errors: str, reached: Sequence[int]) -> str:
    """Say how far a contestant came, and what ended it."""
    most = f"{name}: {max(reached)} tokens" if reached else f"{name}: no length"
    if found := re.search(rf"{FULL} (\d+) tokens on rank (\d+): (.*)", printed):
        tokens, rank, why = found.groups()
        return f"{most}; {FULL} {tokens} (rank {rank}: {why[:120]})"
    if found := re.search(rf"{NOT_TRIED} .*", printed):
        return f"{most}; {found[0]}"
    if status:
        return f"{most}; ended with status {status}: {' '.join(errors.split())[-300:]}"
    return f"{most}, the most that was asked for"
