"""What process groups take of a GPU's memory, outside torch's allocator.

    torchrun --nproc-per-node 4 benchmarks/studies/group_memory.py

The job is initialised with `device_id`, as many trainers do it. Then the groups of a layout are
created, rows travel by each comm type, and the groups are closed, for `peer` and for `nccl`. A line
for each step: the memory that is in use on rank 0's GPU after it, and what the step took, in GiB.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.flags import parser_of
from common.memory import outside_torch
from common.timing import end_ranks, start_ranks, synchronize

import hcp
from hcp._words import CommType, TransportName

TYPES: tuple[CommType, ...] = ("p2p", "all_gather", "a2a")
TRANSPORTS: tuple[TransportName, ...] = ("peer", "nccl")
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 16_384, 8, 2, 128
BUFFER_BYTES = 2**27


class Taken:
    """Prints what each step took."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._last = device, outside_torch(device)
        self.after("CUDA's context and init_process_group", since=0.0)

    def after(self, step: str, since: float | None = None) -> None:
        synchronize(self._device)
        now = outside_torch(self._device)
        if dist.get_rank() == 0:
            taken = now - (self._last if since is None else since)
            print(f"{step:42} {now:7.3f} {taken:+7.3f}", flush=True)
        self._last = now


def main() -> None:
    args = parser_of(__doc__, devices=("cuda",), device="cuda", rounds=1, deadline=100).parse_args()
    device = start_ranks(args.device, args.deadline, timedelta(seconds=args.deadline))
    taken = Taken(device)
    dist.all_reduce(torch.zeros(1, device=device))
    taken.after("a first sum over all ranks")
    for transport in TRANSPORTS:
        exchange(transport, taken, device)
    end_ranks()


def exchange(transport: TransportName, taken: Taken, device: torch.device) -> None:
    """Create a layout's groups, attend by each comm type, and close the groups."""
    groups = hcp.build_process_groups(transport=transport, peer_buffer_bytes=BUFFER_BYTES)
    taken.after(f"build_process_groups, {transport}")
    ranks = dist.get_world_size()
    plan = hcp.plan([TOKENS], ranks=ranks, max_tokens_per_rank=TOKENS // ranks, min_degree=ranks)
    for comm_type in TYPES:
        cp = hcp.get_cp_handler_cls("auto")(plan, 0, groups.transport, comm_types=[comm_type])
        leaves = [
            torch.randn(cp.rows, heads, HEAD_DIM, device=device, dtype=torch.bfloat16)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        out = cp.attention(*leaves)
        torch.autograd.grad(out, leaves, out.detach())
        taken.after(f"  attention by {comm_type}, both passes")
    groups.close()
    taken.after("  closed")


if __name__ == "__main__":
    main()
