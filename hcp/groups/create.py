"""Create and destroy torch process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from hcp._core import Grid
from hcp._words import TransportName
from hcp.exchange.connect import connect
from hcp.exchange.gather import expect_own
from hcp.exchange.torch_p2p import TorchTransport
from hcp.groups.alone import not_initialised
from hcp.groups.grids import ROLES, groups_of_level

_T = TypeVar("_T")


class Creator:
    """Creates groups with the same options, and destroys those that it has created.

    torch.distributed numbers groups as they are created, on every rank of the job, also outside of
    the group. So every rank creates the groups of all parents in one order.
    """

    def __init__(
        self, parents: list[list[int]], backend: str | None, timeout: timedelta | None
    ) -> None:
        self._parents = parents
        self._backend = backend
        self._timeout = timeout
        self._created: list[dist.ProcessGroup] = []
        self._members: dict[str, list[list[int]]] = {}
        """The ranks of all groups that were created under a name."""

    def again(self) -> Creator:
        return Creator(self._parents, self._backend, self._timeout)

    @property
    def own_parent(self) -> list[int]:
        return next(ranks for ranks in self._parents if dist.get_rank() in ranks)

    def create_role(self, name: str, grid: Grid, role: str | None = None) -> dist.ProcessGroup:
        """Create all groups of a role, in the grid's order, and return this rank's."""
        groups = grid.groups(role or ROLES[name])
        return self.create(
            name, [[ranks[i] for i in group] for ranks in self._parents for group in groups]
        )

    def create_levels(self, grid: Grid, sizes: Sequence[int]) -> tuple[dist.ProcessGroup, ...]:
        """Create the groups of hierarchical CP, and return this rank's of every level, the
        innermost first."""
        levels, inner = [], 1
        for i, size in enumerate(sizes):
            groups = [
                [ranks[r] for r in members]
                for ranks in self._parents
                for group in grid.groups("cp")
                for members in groups_of_level(group, size, inner)
            ]
            levels.append(self.create(f"hcp[{i}]", groups))
            inner *= size
        return tuple(levels)

    def create(self, name: str, groups: Iterable[Iterable[int]]) -> dist.ProcessGroup:
        members = self._members[name] = [list(ranks) for ranks in groups]
        own = [
            self.undo_unless(partial(self._new, name, ranks, self._backend)) for ranks in members
        ]
        return next(group for group in own if group is not None)

    def duplicate(self, of: str, name: str, *, backend: str) -> dist.ProcessGroup:
        """Create groups of the same ranks as those of another name, on a backend of their own."""
        own = [self._new(name, ranks, backend) for ranks in self._members[of]]
        return next(group for group in own if group is not None)

    def _new(self, name: str, ranks: list[int], backend: str | None) -> dist.ProcessGroup | None:
        group = new_group(ranks, timeout=self._timeout, backend=backend, description=f"hcp:{name}")
        if group is not None:
            self._created.append(group)
        return group

    def connect(
        self, duplicate: dist.ProcessGroup, transport: TransportName, peer_buffer_bytes: int
    ) -> TorchTransport:
        """Connect the transport over hcp's own group."""
        return self.undo_unless(
            lambda: connect(
                duplicate, transport, timeout=self._timeout, peer_buffer_bytes=peer_buffer_bytes
            )
        )

    def undo_unless(self, step: Callable[[], _T]) -> _T:
        """Run a step. If it fails, destroy the groups that were created before it."""
        try:
            return step()
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        while self._created:
            expect_own(self._created[-1])
            group = self._created.pop()
            # The default group's end is the end of all others.
            if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)


def new_group(
    ranks: Sequence[int],
    *,
    description: str,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Create a group that NCCL connects when it is first used, and return it on its ranks.

    Where the job was initialised with `device_id`, torch connects every group as it is created, and
    each takes some 0.3 GiB of a GPU. Most trainers use few of a layout's groups.
    """
    require_initialised("process groups are created")
    whole = dist.group.WORLD
    expect_own(whole)
    assert whole is not None
    device, whole.bound_device_id = whole.bound_device_id, None
    try:
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=backend, group_desc=description
        )
    finally:
        whole.bound_device_id = device
    if dist.get_rank() not in ranks:
        return None
    if device is not None:
        group.bound_device_id = device  # what a barrier of the group synchronises
    return group


def require_initialised(what: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise not_initialised(what)


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Read a group's own timeout. None, torch's default, if this torch does not tell it."""
    assert group is not None
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None
