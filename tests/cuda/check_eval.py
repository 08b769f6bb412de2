"""Training that switches to an eval layout after every step, on GPUs over NCCL.

    torchrun --nproc-per-node 4 tests/cuda/check_eval.py

It compares two things for all pairs of CP sizes, with tensor and pipeline parallelism. Validation
losses inside and outside of hcp.eval_cp_context must be equal. Weights and optimizer states must be
those of a run that never switched, bit for bit. It exits with 1 on a fault. --device cpu runs it
over Gloo.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # or cuBLAS may add up in another order

import torch
import torch.distributed as dist
from support import trainer

from hcp.planning.limits import divisors

LIMITS = {"float64": 1e-12, "float32": 1e-6}
SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))
"""tp, pp"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    start(parser.parse_args().device)
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = 0
    for tp, pp in SHAPES:
        if size % (tp * pp):
            continue
        sizes = tuple(divisors(size // (tp * pp)))
        losses = trainer.compare_layouts(rank, size, sizes, tp, pp, *LIMITS)
        for dtype, limit in LIMITS.items():
            worst = torch.tensor(max(losses[dtype].values()))
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            ok = worst.item() <= limit
            wrong += not ok
            if rank == 0:
                print(
                    f"{'ok ' if ok else 'BAD'} tp {tp} pp {pp} cp {sizes} {dtype}: training bit "
                    f"for bit, losses differ by {worst.item():.1e}",
                    flush=True,
                )
    dist.destroy_process_group()
    return wrong > 0


def start(device: str) -> None:
    if device == "cpu":
        dist.init_process_group("gloo")
        return
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    torch.set_default_device(own)
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl", device_id=own)


if __name__ == "__main__":
    sys.exit(main())
