"""A rank that stays away from an exchange over NCCL ends the other before rows that have not come
are used, on two GPUs.

    python tests/cuda/check_late.py

Two ranks attend to one sequence; at the second time the last one stays away from all of it, or from
the backward. The other has to end with hcp's error, which names it, and must not read a result.
Exits with 1 where it reads one, hangs, or ends otherwise. With --device cpu the same over Gloo.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

RANKS = 2
READ, RAISED = 77, 78
TIMEOUT = 8
"""Seconds of every group."""
PATIENCE = 50
"""Seconds after which a rank hangs."""
SAID = "rank 0: the exchange with ranks [1]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rank", type=int, help="be this one")
    parser.add_argument("--away", choices=("forward", "backward"))
    parser.add_argument("--store")
    args = parser.parse_args()
    if args.rank is not None:
        return attend(args)
    wrong = 0
    for away in ("forward", "backward"):
        code, seconds, said = outcome(args.device, away)
        ok = code not in (None, 0, READ) and SAID in said
        wrong += not ok
        how = {None: "hung", READ: "read a result"}.get(
            code, f"ended with {code} after {seconds:.0f} s, {SAID!r} {'' if ok else 'not '}said"
        )
        print(f"{'ok ' if ok else 'BAD'} rank 1 stayed away from {away}, rank 0 {how}", flush=True)
        if not ok:
            print(said[-4000:], flush=True)
    return wrong > 0


def outcome(device: str, away: str) -> tuple[int | None, float, str]:
    """Rank 0's exit code, None where it had to be ended, when, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        said, started = Path(folder, "said"), time.monotonic()
        with said.open("w") as log:
            outputs = log.fileno(), subprocess.DEVNULL
            first, last = (
                subprocess.Popen(
                    [
                        *(sys.executable, __file__, "--device", device, "--away", away),
                        *("--rank", str(rank), "--store", str(Path(folder, "store"))),
                    ],
                    stdout=output,
                    stderr=output,
                    env={**os.environ, "LOCAL_RANK": str(rank), "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
                )
                for rank, output in enumerate(outputs)
            )
            try:
                code = first.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                code = None
            for process in (first, last):
                process.kill()
                process.wait()
        return code, time.monotonic() - started, said.read_text()


def attend(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    import hcp
    from hcp.exchange.nccl import NcclTransport

    own = None
    if args.device == "cuda":
        own = torch.device("cuda", args.rank)
        torch.cuda.set_device(own)
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo",
        store=dist.FileStore(args.store, RANKS),
        rank=args.rank,
        world_size=RANKS,
        device_id=own,
    )
    groups = hcp.build_process_groups(
        transport="nccl" if args.device == "cuda" else "torch", timeout=timedelta(seconds=TIMEOUT)
    )
    plan = hcp.plan([1000], ranks=RANKS, max_tokens_per_rank=1000, min_degree=RANKS)
    cp = hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=["all_gather"])
    leaves = [
        torch.randn(cp.rows, 4, 64, device=args.device).bfloat16().requires_grad_()
        for _ in range(3)
    ]

    def largest(results: Sequence[torch.Tensor]) -> float:
        return max(float(result.detach().abs().max()) for result in results)

    out = cp.attention(*leaves)
    print(largest((out, *torch.autograd.grad(out, leaves, out.detach()))), flush=True)
    if (args.rank, args.away) == (1, "forward"):
        time.sleep(2 * PATIENCE)
    try:
        out = cp.attention(*leaves)
        results: tuple[torch.Tensor, ...] = (out,)
        if args.away == "backward":
            print(largest(results), flush=True)
            if args.rank == 1:
                time.sleep(2 * PATIENCE)
            results = torch.autograd.grad(out, leaves, out.detach())
        print(largest(results), flush=True)
    except RuntimeError:
        traceback.print_exc()
    else:
        os._exit(READ)
    try:
        if isinstance(groups.transport, NcclTransport):
            groups.transport.check()
    except hcp.HcpError:
        traceback.print_exc()
    os._exit(RAISED)


if __name__ == "__main__":
    sys.exit(main())
