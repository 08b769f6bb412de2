"""Attention on several GPUs over NCCL, against one rank with whole sequences.

    torchrun --nproc-per-node 2 tests/cuda/check_multi.py

Exits with 1 where a result is wrong.
"""

from __future__ import annotations

import os
import sys
from itertools import product

import torch
import torch.distributed as dist
from cases import Case, attention_errors

import hcp

LENGTHS = (97, 40, 13, 2, 1, 7, 300)


def main() -> int:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    groups = hcp.build_process_groups()
    ranks = groups.size("dp_cp")
    wrong = 0
    for comm_type, causal, min_degree in product(
        hcp.COMM_TYPES, (True, False), sorted({1, 2, ranks})
    ):
        for dtype, limit in (("float64", 1e-10), ("float32", 1e-4), ("bfloat16", 0.1)):
            case = Case(
                LENGTHS,
                ranks,
                capacity=512,
                min_degree=min(min_degree, ranks),
                comm_type=comm_type,
                causal=causal,
                head_dim=64,
                dtype=dtype,
            )
            worst = torch.tensor(max(attention_errors(groups, case)), device="cuda")
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            ok = worst.item() <= limit
            wrong += not ok
            if groups.rank("dp_cp") == 0:
                print(
                    f"{'ok ' if ok else 'BAD'} {comm_type:10} {'causal' if causal else 'full':6} "
                    f"degree >= {min_degree} {dtype:8} largest error {worst.item():.2e}"
                )
    groups.close()
    dist.destroy_process_group()
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
