"""Run a program on ranks that share the GPUs of one host, and read each other's memory there.

    torchrun --nproc-per-node 2 tests/cuda/sharing.py PROGRAM [ARGUMENTS]

Rank r uses GPU r modulo their number. NCCL, which takes one rank a GPU, sees each rank as a host of
its own and sends rows through its network transport; hcp sees one host, and its transport `peer`
maps memory of the same GPU. What ranks compute by `peer` and `nccl` is then shown on a single GPU,
and how fast they are is not.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

from hcp.exchange import connect


def main() -> None:
    rank, program = int(os.environ["RANK"]), sys.argv[1]
    os.environ["LOCAL_RANK"] = str(rank % torch.cuda.device_count())
    os.environ["NCCL_HOSTID"] = f"rank {rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    connect._host = lambda: "one host"
    connect._apart = lambda ranks, views: None
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
