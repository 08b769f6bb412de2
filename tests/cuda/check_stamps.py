"""Ranks whose calls differ get an error before they use each other's rows, on two GPUs.

    PYTHONPATH=tests python tests/cuda/check_stamps.py
    PYTHONPATH=tests python tests/cuda/check_stamps.py --ranks 4 --hosts 2 --transports mixed

All ranks attend to the micro-batches of a step, over each transport. Then the first one takes two
micro-batches in another order, or attends with another scale, or, through peers' memory, replays
another CUDA graph. None may read a result, and at least one error has to name the difference. The
check exits with 1 if a rank reads a result or hangs, or if no error names it. With --hosts, NCCL
takes the ranks for those of several hosts: 4 ranks run on 2 GPUs. --device cpu runs it over Gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from datetime import timedelta
from typing import Any

from support.launched import end, join, run_as_ranks

READ, RAISED = 77, 78
TIMEOUT = 20
"""Seconds of every group."""
PATIENCE = 90
"""Seconds after which a rank hangs."""
SAID = {
    "order": "micro-batch differs",
    "scale": "softmax_scale differs",
    "replay": "call differs",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rank", type=int, help="be this one")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1, help="that the ranks are on")
    parser.add_argument("--transports", nargs="+")
    parser.add_argument("--what", choices=list(SAID))
    parser.add_argument("--store")
    args = parser.parse_args()
    if args.rank is not None:
        return replay(args) if args.what == "replay" else attend(args)
    wrong = 0
    usual = ["torch", "nccl", "peer"] if args.device == "cuda" else ["torch"]
    for transport in args.transports or usual:
        for what, words in SAID.items():
            if what == "replay" and (transport != "peer" or args.hosts > 1):
                continue
            outcome = run_as_ranks(
                __file__,
                args.ranks,
                *("--device", args.device, "--what", what, "--transports", transport),
                *("--ranks", str(args.ranks), "--hosts", str(args.hosts)),
                patience=PATIENCE,
                hosts=args.hosts,
            )
            # Devices of torch.distributed stop without a word.
            named = words in outcome.said or (transport == "torch" and args.device == "cuda")
            ok = named and not {None, 0, READ} & set(outcome.codes)
            wrong += not ok
            print(
                f"{'ok ' if ok else 'BAD'} {transport:5} {what}: ranks ended with {outcome.codes} "
                f"after {outcome.seconds:.0f} s, {words!r} "
                f"{'' if words in outcome.said else 'not '}said",
                flush=True,
            )
            for line in outcome.said.splitlines():
                if "is in another call" in line:
                    print("     ", line[:200], flush=True)
            if not ok:
                print(outcome.said[-3000:], flush=True)
    return wrong > 0


def attend(args: argparse.Namespace) -> int:
    import torch

    import hcp

    ranks = args.ranks
    join(args.rank, ranks, args.device, args.store)
    groups = hcp.build_process_groups(
        transport=args.transports[0], timeout=timedelta(seconds=TIMEOUT), peer_buffer_bytes=2**26
    )
    lengths = [500 * ranks] * 3
    plan = hcp.plan(
        lengths,
        ranks=ranks,
        max_tokens_per_rank=500,
        min_degree=ranks,
        ranks_per_node=ranks // args.hosts if args.hosts > 1 else None,
    )
    samples = [{"tokens": torch.zeros(n)} for n in lengths] if args.rank == 0 else []
    first, *others = list(hcp.dispatch(plan, samples, [0] * 3, groups))

    def largest(micro: Any, **options: Any) -> float:
        cp, _ = micro
        rows = [torch.randn(cp.rows, 4, 64, device=args.device).bfloat16() for _ in range(3)]
        leaves = [x.requires_grad_() for x in rows]
        out = cp.attention(*leaves, **options)
        results = out, *torch.autograd.grad(out, leaves, out.detach())
        return max(float(result.detach().abs().max()) for result in results)

    for micro in (first, *others):  # the ranks have seen all kinds of calls
        print(largest(micro), flush=True)
    try:
        if args.what == "scale":
            largest(first, softmax_scale=0.5 if args.rank else 0.25)
        else:
            for micro in others if args.rank else reversed(others):
                largest(micro)
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
    groups = hcp.build_process_groups(
        transport=args.transports[0], timeout=timedelta(seconds=TIMEOUT)
    )
    fixed = hcp.GraphHandler(groups, rows=256, sequences=24, ranks=args.ranks, backend="torch")
    cp = hcp.ContextParallelHandler(plans_of_rows(args.ranks, 256)[0], 0, groups.transport)
    layers = [FixedLayer(fixed, 64, torch.bfloat16) for _ in range(2)]
    for layer in layers:
        layer.capture(cp)
        print(float(layer.replay()[0].abs().max()), flush=True)
    try:
        print(float(layers[args.rank].replay()[0].abs().max()), flush=True)
    except RuntimeError:
        traceback.print_exc()
    else:
        os._exit(READ)
    end(groups.transport, RAISED)


if __name__ == "__main__":
    sys.exit(main())
