"""The process groups of a job layout, by role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hcp._core import Grid
from hcp._html import table
from hcp._this_process import BoundToProcess
from hcp._validate import expect_size
from hcp._words import TransportName
from hcp.errors import HcpError
from hcp.exchange.gather import expect_own
from hcp.exchange.peer import BUFFER_BYTES
from hcp.exchange.torch_p2p import TorchTransport
from hcp.groups.absent_ranks import naming_silent_ranks
from hcp.groups.agree import agree_on_layout, tell_others_of_errors, views_of_all
from hcp.groups.create import Creator, require_initialised, timeout_of
from hcp.groups.grids import ROLES, check_levels, fit_grid, grid_of_mesh, levels_within, resized
from hcp.groups.planning import Planning, PlanningThread

CREATED, SHARED, GIVEN = "created", "shared", "given"
"""The origins of a collection's group: see ``ProcessGroups.report``."""


class ProcessGroups(BoundToProcess):
    """The process groups of one job layout, seen from this rank.

    Each role that is present is an attribute that holds a ``torch.distributed.ProcessGroup``: `tp`,
    `pp`, `cp`, `dp`, `dp_cp`, `tp_cp`, `tp_dp_cp`, `mp` (tensor and pipeline ranks). Groups of
    different roles are different objects even if they have equal ranks, so that the group in a
    model's slot tells its role. A role that is absent raises AttributeError.

    `transport` carries hcp's own exchanges, on a duplicate of the `dp_cp` group that nobody else
    uses. (Megatron's collection has a field `hcp` of its own: its *hierarchical* CP groups.)"""

    _ELSEWHERE = "call hcp.build_process_groups there"

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    tp_cp: dist.ProcessGroup
    tp_dp_cp: dist.ProcessGroup
    mp: dist.ProcessGroup
    transport: TorchTransport

    def __init__(
        self,
        groups: Mapping[str, dist.ProcessGroup],
        origins: Mapping[str, str],
        transport: TorchTransport,
        grid: Grid | None,
        creator: Creator,
        source: object = None,
        hierarchy: tuple[dist.ProcessGroup, ...] = (),
        planning: Planning | None = None,
    ) -> None:
        """For `build_process_groups`, `with_context_parallel` and `from_existing` only."""
        self._groups = dict(groups)
        self._origins = dict(origins)
        self._grid = grid
        self._creator = creator
        self._source = source
        self._hierarchy = hierarchy
        self.transport = transport
        self._planning = planning or Planning(creator)

    @classmethod
    def from_existing(
        cls,
        collection: object,
        *,
        order: str = "tp-cp-dp-pp",
        timeout: timedelta | None = None,
        transport: TransportName = "auto",
        peer_buffer_bytes: int = BUFFER_BYTES,
    ) -> ProcessGroups:
        """Take the groups that a trainer already has.

        Only `dp_cp` must be there. Roles that are missing or None stay absent. The groups remain
        the trainer's; hcp creates one, its duplicate of `dp_cp`. Every rank of the job calls this.
        hcp's own groups are returned as they are, and take no options.

        Args:
            collection: a mapping, or an object with the groups as attributes.
            order: of dimensions in which the trainer lays out its ranks. If the groups fit a grid
                of that order, `grid` and `with_context_parallel` work.
            timeout: of hcp's own group; None: that of `dp_cp`.
            transport: as of `build_process_groups`.
            peer_buffer_bytes: as of `build_process_groups`.

        Returns:
            The groups.

        Raises:
            ValueError: `dp_cp` is missing, or something is not a process group of this rank.
        """
        if isinstance(collection, ProcessGroups):
            if (timeout, transport, peer_buffer_bytes) != (None, "auto", BUFFER_BYTES):
                raise ValueError(
                    "from_existing was given hcp.ProcessGroups and options, expected groups of a "
                    "trainer: those of hcp keep the transport that they were built with"
                )
            return collection
        require_initialised("ProcessGroups.from_existing")
        with tell_others_of_errors():
            expect_size("peer_buffer_bytes", peer_buffer_bytes)
            Grid(order=order)  # refuses what is no order, also where no grid will have it
            groups = _find_groups(collection)
            ranks = dist.get_process_group_ranks(groups["dp_cp"])
            fitted_here = fit_grid(groups, order)
        with naming_silent_ranks("ProcessGroups.from_existing"):
            views = views_of_all((ranks, fitted_here))
            creator = Creator(
                [list(range(dist.get_world_size()))],
                backend=dist.get_backend(groups["dp_cp"]),
                timeout=timeout or timeout_of(groups["dp_cp"]),
            )
            duplicate = creator.create("transport", sorted({tuple(view[0]) for view in views}))
            connected = creator.connect(duplicate, transport, peer_buffer_bytes)
        grids = {view[1] for view in views}
        fitted = grids.pop() if len(grids) == 1 else None
        return cls(
            groups,
            {**dict.fromkeys(groups, GIVEN), "transport": CREATED},
            connected,
            None if fitted is None else Grid(**dict(fitted), order=order),
            creator,
            collection,
            _find_levels(collection),
        )

    @classmethod
    def from_device_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        names: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
        transport: TransportName = "auto",
        peer_buffer_bytes: int = BUFFER_BYTES,
    ) -> ProcessGroups:
        """Take the job layout of a DeviceMesh, with the mesh's own groups for its dimensions. hcp
        creates the groups that span several dimensions. Every rank calls this.

        Args:
            mesh: covers the whole job, with its ranks in order.
            names: the mesh's names of the dimensions that it does not call tp, cp, dp or pp.
            timeout: of the groups that hcp creates; None: the job's.
            transport: as of `build_process_groups`.
            peer_buffer_bytes: as of `build_process_groups`.

        Returns:
            The groups.

        Raises:
            ValueError: the mesh does not cover the job, or has a dimension of an unknown name.
        """
        require_initialised("ProcessGroups.from_device_mesh")
        with tell_others_of_errors():
            expect_size("peer_buffer_bytes", peer_buffer_bytes)
            dimensions, grid = grid_of_mesh(mesh, names or {})
        with naming_silent_ranks("ProcessGroups.from_device_mesh"):
            creator = Creator(
                agree_on_layout(grid, list(range(dist.get_world_size()))),
                backend=None,
                timeout=timeout or timeout_of(dist.group.WORLD),
            )
            groups = {
                role: mesh.get_group(dimensions[role])
                if role in dimensions
                else creator.create_role(role, grid)
                for role in ROLES
            }
            duplicate = creator.create_role("transport", grid, "dp_cp")
            connected = creator.connect(duplicate, transport, peer_buffer_bytes)
        origins = {role: GIVEN if role in dimensions else CREATED for role in ROLES}
        return cls(
            groups,
            {**origins, "transport": CREATED},
            connected,
            grid,
            creator,
        )

    @property
    def source(self) -> object:
        """The collection that these groups were taken from, or None."""
        return self._source

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that are present."""
        return tuple(self._groups)

    @property
    def by_role(self) -> Mapping[str, dist.ProcessGroup]:
        """The groups by the roles that are present."""
        return self._groups

    @property
    def hierarchy(self) -> tuple[dist.ProcessGroup, ...]:
        """The hierarchical CP groups of this rank, one per level, the innermost first. Empty
        without hierarchical CP."""
        return self._hierarchy

    @property
    def grid(self) -> Grid:
        """The job layout as sizes and an order. Raises HcpError if given groups fit none."""
        if self._grid is None:
            raise HcpError(
                "the layout of these process groups is not known: they were taken from existing "
                "groups that do not fit a grid of tp, cp, dp and pp on all ranks; give the "
                "trainer's rank order to ProcessGroups.from_existing(order=...), or use "
                "build_process_groups",
                code="layout-unknown",
            )
        return self._grid

    def size(self, role: str) -> int:
        """Count the ranks of a group.

        Args:
            role: such as "cp" or "dp_cp".

        Returns:
            The number of ranks in this rank's group of the role.
        """
        return dist.get_world_size(self._group(role))

    def rank(self, role: str) -> int:
        """Find this rank in a group.

        Args:
            role: such as "cp" or "dp_cp".

        Returns:
            Its place in its group of the role.
        """
        return dist.get_rank(self._group(role))

    def ranks(self, role: str) -> list[int]:
        """List the ranks of a group.

        Args:
            role: such as "cp" or "dp_cp".

        Returns:
            The global ranks of this rank's group of the role.
        """
        return dist.get_process_group_ranks(self._group(role))

    def with_context_parallel(
        self, size: int, *, hierarchical: Sequence[int] | None = None
    ) -> ProcessGroups:
        """Make another job layout of the same ranks, with CP groups of one size and DP groups to
        fit.

        It creates the groups that differ (for the order tp-cp-dp-pp: cp, dp and tp_cp) and shares
        the others, and `transport`.

        Args:
            size: of the CP groups.
            hierarchical: sizes of the levels of hierarchical CP, the innermost first, whose product
                is `size`; their groups are `hierarchy`. By default the new layout has as many
                levels as this one. Each level takes the greatest common divisor of its old size and
                what is left, the last one the rest. So `eval_cp_context` can replace each level.

        Returns:
            The groups of the other layout.

        Raises:
            ValueError: dp * cp is not divisible by `size`, or a rank would change its place in tp
                or pp, since its weights would have to move.
        """
        with tell_others_of_errors():
            grid = resized(self.grid, size)
            if hierarchical is None:
                hierarchical = levels_within(size, [level.size() for level in self._hierarchy])
            check_levels(hierarchical, size)
        with naming_silent_ranks("with_context_parallel"):
            agree_on_layout(grid, self._creator.own_parent, tuple(hierarchical))
            shared = [role for role in self.roles if grid.shares(self.grid, ROLES[role])]
            creator = self._creator.again()
            groups = {
                role: self._groups[role] if role in shared else creator.create_role(role, grid)
                for role in self.roles
            }
            levels = creator.create_levels(grid, hierarchical)
        origins = {role: SHARED if role in shared else CREATED for role in self.roles}
        origins["transport"] = SHARED
        origins |= {f"hcp[{i}]": CREATED for i in range(len(levels))}
        return ProcessGroups(
            groups, origins, self.transport, grid, creator, None, levels, self._planning
        )

    def planning_thread(self) -> PlanningThread:
        """The group and the thread for plans that are made ahead: Gloo, of the `dp_cp` ranks.

        The first call creates them, for all layouts that share `transport`. Every rank of the job
        makes it, at the same place among collectives."""
        return self._planning.thread

    def warm_up(self) -> None:
        """Sum a number over every group, so that ranks connect now and not in the first step that
        is timed. Every rank of the job calls it."""
        device = self.transport.device
        for group in (*self._groups.values(), *self._hierarchy):
            expect_own(group)
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def report(self) -> dict[str, list[str]]:
        """List the roles that this collection created, shares with another, or was given."""
        return {
            origin: [role for role, its in self._origins.items() if its == origin]
            for origin in (CREATED, SHARED, GIVEN)
        }

    def close(self) -> None:
        """Destroy the groups that this collection created, and no others. A second call does
        nothing.

        Every rank calls it, after the last use of the groups and of collections that share them.
        """
        if self._planning.creator is self._creator:
            self._planning.close()
        self._creator.destroy()

    def _group(self, role: str) -> dist.ProcessGroup:
        if role not in self._groups:
            raise AttributeError(self._missing(role))
        return self._groups[role]

    def _missing(self, role: str) -> str:
        if role in ROLES:
            return f"these process groups have no role {role!r}, only {', '.join(self._groups)}"
        return f"ProcessGroups has no attribute {role!r}, expected a role: {', '.join(ROLES)}"

    def __getattr__(self, name: str) -> dist.ProcessGroup:
        groups = self.__dict__.get("_groups", {})
        if name in groups:
            return groups[name]  # type: ignore[no-any-return]
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(self._missing(name))

    def __repr__(self) -> str:
        sizes = ", ".join([f"{role}={group.size()}" for role, group in self._groups.items()])
        return f"ProcessGroups({sizes})"

    def _repr_html_(self) -> str:
        rows = ((role, self._sizes_text(role), self._groups[role].rank()) for role in self._groups)
        return table("ProcessGroups", ("role", "ranks", "this rank"), rows)

    def _sizes_text(self, role: str) -> str:
        return str(self._groups[role].size())


def _find_groups(collection: object) -> dict[str, dist.ProcessGroup]:
    """Find the groups of a collection, by role. Megatron's has None for roles that are not set."""
    if isinstance(collection, Mapping):
        found = {role: collection.get(role) for role in ROLES}
    else:
        found = {role: getattr(collection, role, None) for role in ROLES}
    groups = {role: group for role, group in found.items() if group is not None}
    kind = type(collection).__name__
    for role, group in groups.items():
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"{kind}.{role} is a {type(group).__name__}, expected a "
                "torch.distributed.ProcessGroup that this rank belongs to"
            )
    if "dp_cp" not in groups:
        raise ValueError(
            f"{kind} has no dp_cp, only {', '.join(groups) or 'none of ' + ', '.join(ROLES)}; "
            "expected the group of all ranks that data and context parallelism span"
        )
    return groups


def _find_levels(collection: object) -> tuple[dist.ProcessGroup, ...]:
    """Find the hierarchical CP groups of a collection, if any: Megatron's field `hcp`."""
    found = collection.get("hcp") if isinstance(collection, Mapping) else None
    levels = found or getattr(collection, "hcp", None)
    if not isinstance(levels, (list, tuple)):
        return ()
    return tuple(level for level in levels if isinstance(level, dist.ProcessGroup))
