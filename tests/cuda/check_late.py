"""A rank that stays away from an exchange ends the others before rows that have not come are used,
on two GPUs.

    PYTHONPATH=tests python tests/cuda/check_late.py
    PYTHONPATH=tests python tests/cuda/check_late.py --ranks 4 --hosts 2 --transports mixed nccl

All ranks attend to one sequence, twice. The second time, the last rank stays away from the whole
layer, or from its backward, or, through peers' memory, from the second replay of a CUDA graph. Each
other one has to end with hcp's error, one of them with an error that names that rank, and none may
read a result. The check exits with 1 if a rank reads one, hangs, or ends otherwise, and says where
a rank hangs. With --hosts, NCCL takes the ranks for those of several hosts, and rows cross each
border once: 4 ranks run on 2 GPUs. --device cpu runs it over Gloo.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING

from support.launched import end, join, run_as_ranks

if TYPE_CHECKING:
    from torch import Tensor

READ, RAISED = 77, 78
TIMEOUT = 8
"""Seconds of every group."""
PATIENCE = 45
"""Seconds after which a rank hangs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1, help="that the ranks are on")
    parser.add_argument("--transports", nargs="+")
    parser.add_argument("--rank", type=int, help="be this one")
    parser.add_argument("--away", choices=("forward", "backward", "replay"))
    parser.add_argument("--store")
    args = parser.parse_args()
    if args.rank is not None:
        return replay(args) if args.away == "replay" else attend(args)
    usual = "torch" if args.device == "cpu" else "nccl"
    cases = [*product(args.transports or [usual], ("forward", "backward"))]
    if args.device == "cuda" and args.hosts == 1:
        cases.append(("peer", "replay"))
    return sum(check(args, transport, away) for transport, away in cases)


def check(args: argparse.Namespace, transport: str, away: str) -> int:
    """Whether a rank ends in another way than it should."""
    last = args.ranks - 1
    outcome = run_as_ranks(
        __file__,
        args.ranks,
        *("--device", args.device, "--away", away, "--transports", transport),
        *("--ranks", str(args.ranks), "--hosts", str(args.hosts)),
        patience=PATIENCE,
        wait_for=last,
        hosts=args.hosts,
    )
    said = [error_of(rank, outcome.said) for rank in range(last)]
    named = any(re.search(rf"\b{last}\b", error.partition(":")[2]) for error in said)
    ok = named and all(said) and not {None, 0, READ} & set(outcome.codes)
    print(f"{'ok ' if ok else 'BAD'} {transport}: rank {last} stayed away from {away}", flush=True)
    for rank, (code, error) in enumerate(zip(outcome.codes, said, strict=True)):
        how = {None: "hung", READ: "read a result"}.get(code, f"ended with {code}")
        print(f"    rank {rank} {how}: {error or 'no error in words'}", flush=True)
    print(f"    after {outcome.seconds:.0f} s", flush=True)
    if not ok:
        print(outcome.said[-9000:], flush=True)
    return not ok


def error_of(rank: int, said: str) -> str:
    """A rank's error about an exchange; empty where there is none."""
    late = rf"rank {rank}: (?:the exchange with ranks \[[\d, ]+\] \w+|rank \d+ has not come)"
    found = re.search(late, said)
    return found[0] if found else ""


def attend(args: argparse.Namespace) -> int:
    import torch

    import hcp

    ranks, last = args.ranks, args.ranks - 1
    join(args.rank, ranks, args.device, args.store)
    groups = hcp.build_process_groups(
        transport=args.transports[0], timeout=timedelta(seconds=TIMEOUT), peer_buffer_bytes=2**26
    )
    plan = hcp.plan(
        [500 * ranks],
        ranks=ranks,
        max_tokens_per_rank=1000,
        min_degree=ranks,
        ranks_per_node=ranks // args.hosts if args.hosts > 1 else None,
    )
    cp = hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=["all_gather"])
    leaves = [
        torch.randn(cp.rows, 4, 64, device=args.device).bfloat16().requires_grad_()
        for _ in range(3)
    ]

    out = cp.attention(*leaves)
    print(largest((out, *torch.autograd.grad(out, leaves, out.detach()))), flush=True)
    if (args.rank, args.away) == (last, "forward"):
        time.sleep(2 * PATIENCE)
    try:
        out = cp.attention(*leaves)
        results: tuple[torch.Tensor, ...] = (out,)
        if args.away == "backward":
            print(largest(results), flush=True)
            if args.rank == last:
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

    join(args.rank, args.ranks, args.device, args.store)
    groups = hcp.build_process_groups(transport="peer", timeout=timedelta(seconds=TIMEOUT))
    fixed = hcp.GraphHandler(groups, rows=256, sequences=24, ranks=args.ranks, backend="torch")
    layer = FixedLayer(fixed, 64, torch.bfloat16)
    plan = plans_of_rows(args.ranks, 256)[0]
    layer.capture(hcp.ContextParallelHandler(plan, 0, groups.transport))
    print(largest(layer.replay()), flush=True)
    if args.rank == args.ranks - 1:
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
