"""Process groups of the ranks that compute a micro-batch together, for code that needs one.

Layers of `hcp_layer_spec` take the handler and need no group.
"""

from __future__ import annotations

import torch.distributed as dist

import hcp
from hcp.exchange.gather import all_gather_object
from hcp.groups.create import new_group

Interval = tuple[int, int]
"""(first rank in the domain, number of ranks)."""


class CPGroupPool:
    """One process group for each interval of ranks that a plan has used. It is made at the first
    use, and kept.

    `plan_batches(..., cp_groups=CPGroupPool())` puts the groups into `PackedSeqParams.cp_group`. A
    communicator, which NCCL makes at a group's first use, costs memory on GPUs: there are at most
    `limit` intervals.
    """

    def __init__(self, limit: int = 32) -> None:
        self.limit = limit
        self._groups: dict[Interval, dist.ProcessGroup | None] = {}
        self._domains: list[list[int]] = []

    def __len__(self) -> int:
        """The number of intervals that have groups."""
        return len(self._groups)

    def of_step(self, step: hcp.Step, groups: hcp.ProcessGroups) -> list[dist.ProcessGroup | None]:
        """Return this rank's group in each micro-batch, None where it has no rows.

        Every rank of the job calls it for every step, and all domains have the same plan. Raises
        HcpError on all ranks if the plans so far have more than `limit` intervals.
        """
        plan = step.plan
        used = [(first, degree) for first, degree, _, _ in plan.group_rows()]
        new = [interval for interval in dict.fromkeys(used) if interval not in self._groups]
        if len(self._groups) + len(new) > self.limit:
            raise hcp.HcpError(
                f"plans have {len(self._groups) + len(new)} intervals of ranks, expected <= "
                f"{self.limit}, the pool's limit: raise it, or min_dynamic_context_parallel_size",
                code="pool-full",
            )
        for interval in new:
            self._groups[interval] = self._new(*interval, groups)
        return [
            self._groups[cp.layout.first_rank, cp.degree] if cp.degree else None for cp, _ in step
        ]

    def _new(self, first: int, degree: int, groups: hcp.ProcessGroups) -> dist.ProcessGroup | None:
        """Create a group in every domain, and return this rank's, if any. Every rank creates all of
        them, since torch.distributed numbers groups by their order of creation."""
        if not self._domains:
            domains = all_gather_object(groups.ranks("dp_cp"))
            self._domains = sorted({tuple(domain): domain for domain in domains}.values())
        own = None
        for domain in self._domains:
            ranks = domain[first : first + degree]
            own = new_group(ranks, description="hcp:cp_group") or own
        return own

    def close(self) -> None:
        """Destroy all groups. Every rank calls it."""
        while self._groups:
            group = self._groups.popitem()[1]
            if group is not None:
                dist.destroy_process_group(group)
