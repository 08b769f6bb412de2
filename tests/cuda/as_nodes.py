"""Run a program on ranks that NCCL takes for those of several hosts.

    torchrun --nproc-per-node 4 tests/cuda/as_nodes.py 2 PROGRAM [ARGUMENTS]

The first argument is the number of hosts, between which NCCL sends rows through its network
transport. Ranks of different hosts may share a GPU: 4 ranks as 2 hosts run on 2 GPUs, and as 4
hosts on one. What they compute is then shown, and how fast they are is not.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch


def main() -> None:
    hosts, program = int(sys.argv[1]), sys.argv[2]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["NCCL_HOSTID"] = f"host {rank * hosts // ranks}"
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks // hosts)
    os.environ["LOCAL_RANK"] = str(rank % torch.cuda.device_count())
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
