"""A rank that dies inside hcp.eval_cp_context ends all others with an error, on GPUs over NCCL.

    python tests/cuda/check_killed.py --ranks 4

No launcher ends the others here: each has to notice by itself, within the groups' timeout and what
the library takes to act on it. Exits with 1 where one goes on, ends as if nothing had happened, or
hangs. With --device cpu the same over Gloo.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

KILLED, SURVIVED = 77, 0
TIMEOUT = 20
"""Seconds of every group."""
PATIENCE = 180
"""Seconds after which a rank hangs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int, help="be this one")
    parser.add_argument("--victim", type=int)
    parser.add_argument("--store")
    args = parser.parse_args()
    if args.rank is not None:
        evaluate_until_one_dies(args)
        return SURVIVED
    wrong = 0
    for victim in (0, args.ranks - 1):
        for rank, (code, seconds) in enumerate(outcomes(args, victim)):
            ok = code == KILLED if rank == victim else code not in (SURVIVED, KILLED, None)
            wrong += not ok
            how = "hung" if code is None else f"ended with {code} after {seconds:.0f} s"
            print(f"{'ok ' if ok else 'BAD'} rank {victim} died, rank {rank} {how}", flush=True)
    return wrong > 0


def outcomes(args: argparse.Namespace, victim: int) -> list[tuple[int | None, float]]:
    """The exit code of each rank, None for one that had to be ended, and when."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--device", args.device, "--rank", str(rank)),
                    *("--ranks", str(args.ranks), "--victim", str(victim)),
                    *("--store", str(Path(folder, "store"))),
                ],
                stderr=subprocess.DEVNULL,
                env={**os.environ, "LOCAL_RANK": str(rank), "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
            )
            for rank in range(args.ranks)
        ]
        ends: dict[int, float] = {}
        while len(ends) < args.ranks and time.monotonic() - started < PATIENCE:
            for rank, process in enumerate(ranks):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = time.monotonic() - started
            time.sleep(0.1)
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
        return [
            (process.returncode if rank in ends else None, ends.get(rank, PATIENCE))
            for rank, process in enumerate(ranks)
        ]


def evaluate_until_one_dies(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import trainer

    import hcp

    own = None
    if args.device == "cuda":
        own = torch.device("cuda", args.rank)
        torch.cuda.set_device(own)
        torch.set_default_device(own)
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo",
        store=dist.FileStore(args.store, args.ranks),
        rank=args.rank,
        world_size=args.ranks,
        timeout=timedelta(seconds=TIMEOUT),
        device_id=own,
    )
    train = hcp.build_process_groups()
    evaluation = train.with_context_parallel(args.ranks)
    model, optimizer = trainer.build(train)
    for step in range(1000):
        trainer.train_step(model, optimizer, trainer.samples_of(2 * args.ranks))
        with hcp.eval_cp_context(model, train, evaluation):
            if step == 2 and args.rank == args.victim:
                os._exit(KILLED)
            trainer.evaluate(model, trainer.samples_of(4), 1)
    if args.device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
