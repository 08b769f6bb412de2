"""A rank that dies inside hcp.eval_cp_context ends all others with hcp's error, which names it.

    PYTHONPATH=tests python tests/cuda/check_killed.py --ranks 4
    PYTHONPATH=tests python tests/cuda/check_killed.py --ranks 4 --hosts 2

It kills the first rank and the last one, under each transport of GPUs. No launcher ends the others:
each notices by itself within the groups' timeout, in a layer whose keys do not arrive. It exits
with 1 if a rank goes on, hangs, or ends in another way. With --hosts, NCCL takes the ranks for
those of several hosts, and rows cross each border once: 4 ranks run on 2 GPUs. A rank may then
name one that waits itself, whose rows came over the border. --device cpu runs it over Gloo.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from itertools import product
from pathlib import Path

from support.launched import environment_of, join, say_where

KILLED = 77
FAILED = (1, -signal.SIGABRT)
"""Exit codes of a rank that ends by an error; the second if torch's own threads also meet the
stopped device."""
TIMEOUT = 8
"""Seconds of every group."""
START, PATIENCE, ACROSS = 60, TIMEOUT + 12, 30
"""Seconds. After START no rank has died. After PATIENCE the others hang. NCCL may take ACROSS
longer to end what it has connected across hosts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int, help="be this one")
    parser.add_argument("--hosts", type=int, default=1, help="that the ranks are on")
    parser.add_argument("--transports", nargs="+")
    parser.add_argument(
        "--victims", type=int, nargs="+", help="default: the first rank and the last"
    )
    parser.add_argument("--store")
    args = parser.parse_args()
    if args.rank is not None:
        evaluate_until_one_dies(args)
        return 0
    usual = "torch" if args.device == "cpu" else "peer nccl" if args.hosts == 1 else "mixed nccl"
    transports = args.transports or usual.split()
    victims = args.victims or [0, args.ranks - 1]
    return sum(check(args, *run) for run in product(transports, victims)) > 0


def check(args: argparse.Namespace, transport: str, victim: int) -> int:
    """The number of ranks that end in another way than they should."""
    print(f"{transport}: rank {victim} dies", flush=True)
    wrong, named = 0, False
    with tempfile.TemporaryDirectory() as folder:
        for rank, (code, seconds) in enumerate(outcomes(args, transport, victim, Path(folder))):
            text = Path(folder, f"{rank}").read_text(errors="replace")
            said = re.findall(rf"(?:HcpError: |^)(rank {rank}: .*)$", text, re.MULTILINE)
            if rank == victim:
                ok = code == KILLED
            else:
                named = named or any(victim in named_by(line) for line in said)
                others = {victim} if args.hosts == 1 else {*range(args.ranks)}
                ok = code in FAILED and any(others & named_by(line) for line in said)
            wrong += not ok
            how = "hung" if code is None else f"ended with {code} after {seconds:.0f} s"
            why = f": {said[-1].partition(';')[0]}" if said else ""
            print(f"{'ok ' if ok else 'BAD'} rank {rank} {how}{why}", flush=True)
            if not ok:
                print("\n".join(text.splitlines()[-20 if code else -100 :]), flush=True)
    if not named:
        print(f"BAD no rank names rank {victim}", flush=True)
    return wrong + (not named)


def named_by(error: str) -> set[int]:
    """The ranks of which hcp's error says that they, or one of them, did not come."""
    found = re.search(r": rank (\d+) has not come to an exchange", error) or re.search(
        r": the exchange with ranks \[([\d, ]+)\] (?:did not|could not|failed)", error
    )
    return {int(rank) for rank in found[1].split(", ")} if found else set()


def outcomes(
    args: argparse.Namespace, transport: str, victim: int, folder: Path
) -> list[tuple[int | None, float]]:
    """The exit code of each rank, None for one that had to be ended, and seconds after the victim's
    death. What each says is in the folder, in a file of its number."""
    ranks = [start(args, transport, victim, folder, rank) for rank in range(args.ranks)]
    died, ends = time.monotonic() + START, dict[int, float]()
    patience = PATIENCE + ACROSS * (args.hosts > 1)
    while len(ends) < args.ranks and time.monotonic() < died + patience * (victim in ends):
        for rank, process in enumerate(ranks):
            if rank not in ends and process.poll() is not None:
                ends[rank] = time.monotonic()
        died = ends.get(victim, died)
        time.sleep(0.1)
    for rank, process in enumerate(ranks):
        if process.poll() is None:
            say_where(rank, process, folder / f"{rank}")
            process.kill()
        process.wait()
    return [
        (process.returncode if rank in ends else None, ends.get(rank, died) - died)
        for rank, process in enumerate(ranks)
    ]


def start(
    args: argparse.Namespace, transport: str, victim: int, folder: Path, rank: int
) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, __file__, "--device", args.device, "--transports", transport),
        *("--ranks", str(args.ranks), "--rank", str(rank), "--victims", str(victim)),
        *("--hosts", str(args.hosts), "--store", str(folder / "store")),
    ]
    environment = environment_of(rank, args.ranks, args.hosts)
    with (folder / f"{rank}").open("ab") as said:
        return subprocess.Popen(command, stderr=said, env=environment)


def evaluate_until_one_dies(args: argparse.Namespace) -> None:
    import torch
    from support import trainer

    import hcp

    join(args.rank, args.ranks, args.device, args.store, timeout=timedelta(seconds=START))
    own = None
    if args.device == "cuda":
        own = torch.device("cuda", torch.cuda.current_device())
        torch.set_default_device(own)
    train = hcp.build_process_groups(
        transport=args.transports[0], timeout=timedelta(seconds=TIMEOUT), peer_buffer_bytes=2**26
    )
    evaluation = train.with_context_parallel(args.ranks)
    model, optimizer = trainer.build(train)
    plan = hcp.plan(
        [64 * args.ranks],
        ranks=args.ranks,
        max_tokens_per_rank=64,
        min_degree=args.ranks,
        ranks_per_node=args.ranks // args.hosts if args.hosts > 1 else None,
    )
    cp = hcp.ContextParallelHandler(plan, 0, evaluation.transport, comm_types=["all_gather"])
    query, key, value = torch.randn(3, cp.rows, 4, 64).unbind()
    for step in range(1000):
        trainer.train_step(model, optimizer, trainer.samples_of(2 * args.ranks))
        with hcp.eval_cp_context(model, train, evaluation):
            for layer in range(4):
                if (step, layer, args.rank) == (2, 2, args.victims[0]):
                    os._exit(KILLED)
                cp.attention(query, key, value)
                synchronize(own)
            trainer.evaluate(model, trainer.samples_of(4), 1)


def synchronize(device: object) -> None:
    """A layer that waits in vain stops the device; hcp's next call says why."""
    import torch

    try:
        if device is not None:
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the device stopped: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
