"""A rank that stays away from an exchange ends the other before rows that have not come are used,
on two GPUs.

    PYTHONPATH=tests python tests/cuda/check_late.py

Two ranks attend to one sequence, twice. The second time, the last rank stays away from the whole
layer over NCCL, or from its backward, or, through peers' memory, from the second replay of a CUDA
graph. The other has to end with hcp's error, which names that rank, and must not read a result. The
check exits with 1 if it reads one, hangs, or ends otherwise. --device cpu runs it over Gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from support.launched import end, join, run_as_ranks

if TYPE_CHECKING:
    from torch import Tensor

RANKS = 2
READ, RAISED = 77, 78
TIMEOUT = 8
"""Seconds of every group."""
PATIENCE = 50
"""Seconds after which a rank hangs."""
SAID = {
    "forward": "rank 0: the exchange with ranks [1]",
    "backward": "rank 0: the exchange with ranks [1]",
    "replay": "rank 0: rank 1 has not come to an exchange",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rank", type=int, help="be this one")
    parser.add_argument("--away", choices=list(SAID))
    parser.add_argument("--store")
    args = parser.parse_args()
    if args.rank is not None:
        return replay(args) if args.away == "replay" else attend(args)
    wrong = 0
    for away, words in SAID.items():
        if (away, args.device) == ("replay", "cpu"):
            continue
        flags = "--device", args.device, "--away", away
        outcome = run_as_ranks(__file__, RANKS, *flags, patience=PATIENCE, wait_for=1)
        (code,) = outcome.codes
        ok = code not in (None, 0, READ) and words in outcome.said
        wrong += not ok
        said = f"{words!r} {'' if ok else 'not '}said"
        how = {None: "hung", READ: "read a result"}.get(
            code, f"ended with {code} after {outcome.seconds:.0f} s, {said}"
        )
        print(f"{'ok ' if ok else 'BAD'} rank 1 stayed away from {away}, rank 0 {how}", flush=True)
        if not ok:
            print(outcome.said[-4000:], flush=True)
    return wrong > 0


def attend(args: argparse.Namespace) -> int:
    import torch

    import hcp

    join(args.rank, RANKS, args.device, args.store)
    groups = hcp.build_process_groups(
        transport="nccl" if args.device == "cuda" else "torch", timeout=timedelta(seconds=TIMEOUT)
    )
    plan = hcp.plan([1000], ranks=RANKS, max_tokens_per_rank=1000, min_degree=RANKS)
    cp = hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=["all_gather"])
    leaves = [
        torch.randn(cp.rows, 4, 64, device=args.device).bfloat16().requires_grad_()
        for _ in range(3)
    ]

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
    end(groups.transport, RAISED)


def replay(args: argparse.Namespace) -> int:
    import torch
    from support.graphs import FixedLayer, plans_of_rows

    import hcp

    join(args.rank, RANKS, args.device, args.store)
    groups = hcp.build_process_groups(transport="peer", timeout=timedelta(seconds=TIMEOUT))
    fixed = hcp.GraphHandler(groups, rows=256, sequences=24, ranks=RANKS, backend="torch")
    layer = FixedLayer(fixed, 64, torch.bfloat16)
    plan = plans_of_rows(RANKS, 256)[0]
    layer.capture(hcp.ContextParallelHandler(plan, 0, groups.transport))
    print(largest(layer.replay()), flush=True)
    if args.rank == 1:
        time.sleep(2 * PATIENCE)
    try:
        print(largest(layer.replay()), flush=True)
    except RuntimeError:
        traceback.print_exc()
    else:
        os._exit(READ)
    end(groups.transport, RAISED)


def largest(results: Sequence[Tensor]) -> float:
    return max(float(result.detach().abs().max()) for result in results)


if __name__ == "__main__":
    sys.exit(main())
