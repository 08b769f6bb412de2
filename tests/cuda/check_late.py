"""A rank that stays away from an exchange over NCCL ends the other before rows that have not come
are used, on two GPUs.

    PYTHONPATH=tests python tests/cuda/check_late.py

Two ranks attend to one sequence, twice. The second time, the last rank stays away from the whole
layer, or from its backward. The other has to end with hcp's error, which names that rank, and must
not read a result. The check exits with 1 if it reads one, hangs, or ends otherwise. --device cpu
runs it over Gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta

from support.launched import join, run_as_ranks

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
        flags = "--device", args.device, "--away", away
        end = run_as_ranks(__file__, RANKS, *flags, patience=PATIENCE, wait_for=1)
        (code,) = end.codes
        ok = code not in (None, 0, READ) and SAID in end.said
        wrong += not ok
        how = {None: "hung", READ: "read a result"}.get(
            code,
            f"ended with {code} after {end.seconds:.0f} s, {SAID!r} {'' if ok else 'not '}said",
        )
        print(f"{'ok ' if ok else 'BAD'} rank 1 stayed away from {away}, rank 0 {how}", flush=True)
        if not ok:
            print(end.said[-4000:], flush=True)
    return wrong > 0


def attend(args: argparse.Namespace) -> int:
    import torch

    import hcp
    from hcp.exchange.nccl import NcclTransport

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
