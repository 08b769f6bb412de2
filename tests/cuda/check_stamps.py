"""Ranks whose calls differ get an error before they use each other's rows, on two GPUs.

    PYTHONPATH=tests python tests/cuda/check_stamps.py

Two ranks attend to the micro-batches of a step, over each transport. Then one of them takes two
micro-batches in another order, or attends with another scale. Neither may read a result, and at
least one error has to name the difference. The check exits with 1 if a rank reads a result or
hangs, or if no error names it. --device cpu runs it over Gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from datetime import timedelta
from typing import Any

from support.launched import join, run_as_ranks

RANKS = 2
READ, RAISED = 77, 78
TIMEOUT = 20
"""Seconds of every group."""
PATIENCE = 90
"""Seconds after which a rank hangs."""
SAID = {
    "order": "micro-batch is",
    "scale": "softmax_scale is",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rank", type=int, help="be this one")
    parser.add_argument("--transport", default="torch")
    parser.add_argument("--what", choices=list(SAID))
    parser.add_argument("--store")
    args = parser.parse_args()
    if args.rank is not None:
        return attend(args)
    wrong = 0
    for transport in ("torch", "nccl", "peer") if args.device == "cuda" else ("torch",):
        for what, words in SAID.items():
            flags = "--device", args.device, "--what", what, "--transport", transport
            end = run_as_ranks(__file__, RANKS, *flags, patience=PATIENCE)
            # Devices of torch.distributed stop without a word.
            named = words in end.said or (transport == "torch" and args.device == "cuda")
            ok = named and not {None, 0, READ} & set(end.codes)
            wrong += not ok
            print(
                f"{'ok ' if ok else 'BAD'} {transport:5} {what}: ranks ended with {end.codes} "
                f"after {end.seconds:.0f} s, {words!r} {'' if words in end.said else 'not '}said",
                flush=True,
            )
            for line in end.said.splitlines():
                if "is in another call" in line:
                    print("     ", line[:200], flush=True)
            if not ok:
                print(end.said[-3000:], flush=True)
    return wrong > 0


def attend(args: argparse.Namespace) -> int:
    import torch

    import hcp

    join(args.rank, RANKS, args.device, args.store)
    groups = hcp.build_process_groups(transport=args.transport, timeout=timedelta(seconds=TIMEOUT))
    lengths = [1000] * 3
    plan = hcp.plan(lengths, ranks=RANKS, max_tokens_per_rank=500, min_degree=RANKS)
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
    try:
        if hasattr(groups.transport, "check"):
            groups.transport.check()
    except hcp.HcpError:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(RAISED)


if __name__ == "__main__":
    sys.exit(main())
