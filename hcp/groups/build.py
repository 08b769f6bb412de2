"""Which ranks form tp, pp, cp, dp, ... for a layout of the job, as torch process groups.

    train_pgs = hcp.build_process_groups(tp=2, pp=2)         # dp is what remains of the world
    eval_pgs = train_pgs.with_context_parallel(2)            # creates what differs: cp, dp, tp_cp
    train_pgs = hcp.ProcessGroups.from_existing(collection)  # the groups that a trainer has

All of these are collective: every rank of the job calls them, in the same order, with the same
arguments. Groups of one role are created in one order on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hcp._core import Grid
from hcp._this_process import OfThisProcess
from hcp._validate import expect_size, expect_sizes
from hcp.errors import HcpError
from hcp.exchange.connect import connect
from hcp.exchange.gather import all_gather_object
from hcp.exchange.peer import BUFFER_BYTES
from hcp.exchange.torch_p2p import TorchTransport

ROLES: Mapping[str, str] = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "dp": "dp",
    "dp_cp": "dp_cp",
    "tp_cp": "tp_cp",
    "tp_dp_cp": "tp_dp_cp",
    "mp": "tp_pp",
}
"""Roles under Megatron's names, and the dimensions in which the ranks of their groups differ."""

_T = TypeVar("_T")


class _Refusal(str):
    """Why a rank does not go on: in the place of what the others wait for."""


_CREATED, _SHARED, _GIVEN = "created", "shared", "given"


class ProcessGroups(OfThisProcess):
    """The process groups of one layout of the job, seen from this rank.

    Each role that is present is an attribute that holds a ``torch.distributed.ProcessGroup``: `tp`,
    `pp`, `cp`, `dp`, `dp_cp`, `tp_cp`, `tp_dp_cp`, `mp` (tensor and pipeline ranks). Groups of
    different roles are different objects even where their ranks are the same, so that a model's
    slots can be told apart by what they hold. A role that is absent raises AttributeError.

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
        creator: _Creator,
        source: object = None,
        hierarchy: tuple[dist.ProcessGroup, ...] = (),
    ) -> None:
        """Made by `build_process_groups`, `with_context_parallel` and `from_existing`."""
        self._groups = dict(groups)
        self._origins = dict(origins)
        self._grid = grid
        self._creator = creator
        self._source = source
        self._hierarchy = hierarchy
        self.transport = transport

    @classmethod
    def from_existing(
        cls,
        collection: object,
        *,
        order: str = "tp-cp-dp-pp",
        timeout: timedelta | None = None,
        transport: str = "auto",
        peer_buffer_bytes: int = BUFFER_BYTES,
    ) -> ProcessGroups:
        """The groups that a trainer already has, from a mapping or from an object's attributes.

        Only `dp_cp` must be there. Roles that are missing or None stay absent. The groups remain
        the trainer's; hcp creates one, its duplicate of `dp_cp`. Every rank of the job calls this.

        `transport` and `peer_buffer_bytes`: see `build_process_groups`. hcp's own groups are
        returned as they are, and take no options.
        `order` is how the trainer lays out its ranks: where the groups fit a grid of that order,
        `grid` and `with_context_parallel` work. Raises ValueError for a missing `dp_cp` and for
        anything that is not a process group of this rank.
        """
        if isinstance(collection, ProcessGroups):
            if (timeout, transport, peer_buffer_bytes) != (None, "auto", BUFFER_BYTES):
                raise ValueError(
                    "from_existing was given hcp.ProcessGroups and options, expected groups of a "
                    "trainer: those of hcp keep the transport that they were built with"
                )
            return collection
        _check_initialised("ProcessGroups.from_existing")
        with _all_or_none():
            expect_size("peer_buffer_bytes", peer_buffer_bytes)
            Grid(order=order)  # refuses what is no order, also where no grid will have it
            groups = _find_groups(collection)
            ranks = dist.get_process_group_ranks(groups["dp_cp"])
            fitted_here = _fit_grid(groups, order)
        views = _views((ranks, fitted_here))
        creator = _Creator(
            [list(range(dist.get_world_size()))],
            backend=dist.get_backend(groups["dp_cp"]),
            timeout=timeout or _timeout_of(groups["dp_cp"]),
        )
        duplicate = creator.create("transport", sorted({tuple(view[0]) for view in views}))
        grids = {view[1] for view in views}
        fitted = grids.pop() if len(grids) == 1 else None
        return cls(
            groups,
            {**dict.fromkeys(groups, _GIVEN), "transport": _CREATED},
            creator.connect(duplicate, transport, peer_buffer_bytes),
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
        transport: str = "auto",
        peer_buffer_bytes: int = BUFFER_BYTES,
    ) -> ProcessGroups:
        """The layout of a DeviceMesh, with the mesh's own groups for its dimensions.

        `names` gives the mesh's name of a dimension where it is not tp, cp, dp or pp itself. hcp
        creates the groups that span several dimensions. The mesh covers the whole job with its
        ranks in order, and every rank calls this. `transport` and `peer_buffer_bytes`: see
        `build_process_groups`.
        """
        _check_initialised("ProcessGroups.from_device_mesh")
        with _all_or_none():
            expect_size("peer_buffer_bytes", peer_buffer_bytes)
            dimensions, grid = _grid_of_mesh(mesh, names or {})
        creator = _Creator(
            _agree(grid, list(range(dist.get_world_size()))),
            backend=None,
            timeout=timeout or _timeout_of(dist.group.WORLD),
        )
        groups = {
            role: mesh.get_group(dimensions[role])
            if role in dimensions
            else creator.create_role(role, grid)
            for role in ROLES
        }
        duplicate = creator.create_role("transport", grid, "dp_cp")
        origins = {role: _GIVEN if role in dimensions else _CREATED for role in ROLES}
        return cls(
            groups,
            {**origins, "transport": _CREATED},
            creator.connect(duplicate, transport, peer_buffer_bytes),
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
    def hierarchy(self) -> tuple[dist.ProcessGroup, ...]:
        """The hierarchical CP groups of this rank, one per level, the innermost first; often
        none."""
        return self._hierarchy

    @property
    def grid(self) -> Grid:
        """The layout as sizes and an order. HcpError when the groups were given and fit none."""
        if self._grid is None:
            raise HcpError(
                "the layout of these process groups is not known: they were taken from existing "
                "groups that do not fit a grid of tp, cp, dp and pp on all ranks; give the "
                "trainer's rank order to ProcessGroups.from_existing(order=...), or use "
                "build_process_groups"
            )
        return self._grid

    def size(self, role: str) -> int:
        """How many ranks this rank's group of a role has."""
        return dist.get_world_size(self._group(role))

    def rank(self, role: str) -> int:
        """This rank's place in its group of a role."""
        return dist.get_rank(self._group(role))

    def ranks(self, role: str) -> list[int]:
        """The global ranks of this rank's group of a role."""
        return dist.get_process_group_ranks(self._group(role))

    def with_context_parallel(
        self, size: int, *, hierarchical: Sequence[int] = ()
    ) -> ProcessGroups:
        """Another layout of the same ranks, with CP groups of `size` and DP groups to fit.

        `hierarchical`: sizes of the levels of hierarchical CP, the innermost first, whose product
        is `size`; their groups are `hierarchy`.

        Creates the groups that differ (for the order tp-cp-dp-pp: cp, dp and tp_cp) and shares the
        rest, `transport` included. Raises ValueError when dp * cp is not divisible by `size`, and
        when a rank would change its place in tp or pp, since its weights would have to move.
        """
        with _all_or_none():
            grid = _resize(self.grid, size)
            _check_levels(hierarchical, size)
        _agree(grid, self._creator.own_parent, tuple(hierarchical))
        shared = [role for role in self.roles if grid.shares(self.grid, ROLES[role])]
        creator = self._creator.again()
        groups = {
            role: self._groups[role] if role in shared else creator.create_role(role, grid)
            for role in self.roles
        }
        origins = {role: _SHARED if role in shared else _CREATED for role in self.roles}
        origins["transport"] = _SHARED
        levels = creator.create_levels(grid, hierarchical)
        origins |= {f"hcp[{i}]": _CREATED for i in range(len(levels))}
        return ProcessGroups(groups, origins, self.transport, grid, creator, None, levels)

    def warm_up(self) -> None:
        """One small sum over every group, so that connecting happens now and not in a timed or
        crowded place. Every rank of the job calls it."""
        device = self.transport.device
        for group in (*self._groups.values(), *self._hierarchy):
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def report(self) -> dict[str, list[str]]:
        """Which roles this collection created, shares with another, or was given."""
        return {
            origin: [role for role, its in self._origins.items() if its == origin]
            for origin in (_CREATED, _SHARED, _GIVEN)
        }

    def close(self) -> None:
        """Destroy the groups that this collection created, and no other. Twice does nothing.

        Every rank calls it, after the last use of the groups and of collections that share them.
        """
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
        sizes = ", ".join(f"{role}={self._sizes_text(role)}" for role in self._groups)
        return f"ProcessGroups({sizes})"

    def _sizes_text(self, role: str) -> str:
        return str(self._groups[role].size())


def build_process_groups(
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    pp: int = 1,
    order: str = "tp-cp-dp-pp",
    hierarchical: Sequence[int] = (),
    parent: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    transport: str = "auto",
    peer_buffer_bytes: int = BUFFER_BYTES,
) -> ProcessGroups:
    """Create the process groups of a layout. Every rank of the job calls this with the same sizes.

    `dp` is, unless given, what remains of the parent. `order` names the dimensions, the one whose
    neighbours have adjacent ranks first. `parent` is the whole job unless given; the layout's rank
    i is its i-th lowest rank. Ranks may pass different parents, of one size, that share no rank:
    each gets the layout within its own. `timeout` is that of the parent unless given.
    `hierarchical`: sizes of the levels of hierarchical CP, the innermost first (Megatron's a2a
    before its p2p), whose product is `cp`; their groups are `hierarchy`. `transport`: what carries
    keys and values, one of TRANSPORTS in hcp.exchange.connect; the first rank of each dp_cp group
    logs what
    "auto" picks, and why (logger "hcp", INFO). `peer_buffer_bytes`: what "peer" takes of
    each GPU's memory, twice what one layer exchanges at most.

    Raises HcpError when torch.distributed is not initialised, ValueError when the product is not
    the parent's size or the ranks call with different values.
    """
    _check_initialised("build_process_groups")
    with _all_or_none():
        if parent is not None and not isinstance(parent, dist.ProcessGroup):
            raise ValueError(f"parent is {parent!r}, expected a process group of this rank")
        ranks = sorted(dist.get_process_group_ranks(parent or dist.group.WORLD))
        if dist.get_rank() not in ranks:
            raise ValueError(f"rank {dist.get_rank()} is not in parent, whose ranks are {ranks}")
        expect_size("peer_buffer_bytes", peer_buffer_bytes)
        dp = _data_parallel(tp, cp, dp, pp, len(ranks))
        grid = Grid(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
        _check_levels(hierarchical, cp)
    creator = _Creator(
        _agree(grid, ranks, tuple(hierarchical)),
        backend=None if parent is None else dist.get_backend(parent),
        timeout=timeout or _timeout_of(parent or dist.group.WORLD),
    )
    groups = {role: creator.create_role(role, grid) for role in ROLES}
    levels = creator.create_levels(grid, hierarchical)
    duplicate = creator.create_role("transport", grid, "dp_cp")
    level_names = [f"hcp[{i}]" for i in range(len(levels))]
    return ProcessGroups(
        groups,
        dict.fromkeys((*groups, *level_names, "transport"), _CREATED),
        creator.connect(duplicate, transport, peer_buffer_bytes),
        grid,
        creator,
        None,
        levels,
    )


class _Creator:
    """Creates groups with the same options, and destroys what it has created.

    torch.distributed numbers groups as they are created, on every rank of the job whether it is in
    the group or not; so every rank goes through the groups of all parents in one order.
    """

    def __init__(
        self, parents: list[list[int]], backend: str | None, timeout: timedelta | None
    ) -> None:
        self._parents = parents
        self._backend = backend
        self._timeout = timeout
        self._created: list[dist.ProcessGroup] = []

    def again(self) -> _Creator:
        return _Creator(self._parents, self._backend, self._timeout)

    @property
    def own_parent(self) -> list[int]:
        return next(ranks for ranks in self._parents if dist.get_rank() in ranks)

    def create_role(self, name: str, grid: Grid, role: str | None = None) -> dist.ProcessGroup:
        """This rank's group of a role; all groups of the role are created, in the grid's order."""
        groups = grid.groups(role or ROLES[name])
        return self.create(
            name, [[ranks[i] for i in group] for ranks in self._parents for group in groups]
        )

    def create_levels(self, grid: Grid, sizes: Sequence[int]) -> tuple[dist.ProcessGroup, ...]:
        """This rank's group of every level of hierarchical CP, the innermost first."""
        levels, inner = [], 1
        for i, size in enumerate(sizes):
            groups = [
                [ranks[r] for r in members]
                for ranks in self._parents
                for group in grid.groups("cp")
                for members in _level_of(group, size, inner)
            ]
            levels.append(self.create(f"hcp[{i}]", groups))
            inner *= size
        return tuple(levels)

    def create(self, name: str, groups: Iterable[Iterable[int]]) -> dist.ProcessGroup:
        own = [self.undo_unless(partial(self._new, name, list(ranks))) for ranks in groups]
        return next(group for group in own if group is not None)

    def _new(self, name: str, ranks: list[int]) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=self._timeout,
            backend=self._backend,
            group_desc=f"hcp:{name}",
        )
        if dist.get_rank() not in ranks:
            return None
        self._created.append(group)
        return group

    def connect(
        self, duplicate: dist.ProcessGroup, transport: str, peer_buffer_bytes: int
    ) -> TorchTransport:
        """The transport over hcp's own group."""
        return self.undo_unless(
            lambda: connect(
                duplicate, transport, timeout=self._timeout, peer_buffer_bytes=peer_buffer_bytes
            )
        )

    def undo_unless(self, step: Callable[[], _T]) -> _T:
        """Run a step; when it fails, destroy what was created before it."""
        try:
            return step()
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        while self._created:
            group = self._created.pop()
            # The default group's end is the end of all others.
            if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)


def _check_initialised(what: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise HcpError(
            f"torch.distributed is not initialised, expected it to be before {what}: "
            "call torch.distributed.init_process_group() first"
        )


def _data_parallel(tp: int, cp: int, dp: int | None, pp: int, world: int) -> int:
    for name, value in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)):
        if value is not None:
            expect_size(name, value)
    rest = tp * cp * pp
    if dp is None:
        if world % rest:
            raise ValueError(
                f"tp * cp * pp = {tp} * {cp} * {pp} = {rest}, "
                f"expected a divisor of the {world} ranks"
            )
        return world // rest
    if rest * dp != world:
        raise ValueError(
            f"tp * cp * dp * pp = {tp} * {cp} * {dp} * {pp} = {rest * dp}, "
            f"expected the {world} ranks"
        )
    return dp


def _check_levels(sizes: Sequence[int], cp: int) -> None:
    expect_sizes("hierarchical", sizes)
    if sizes and math.prod(sizes) != cp:
        raise ValueError(
            f"hierarchical is {list(sizes)}, whose product is {math.prod(sizes)}, expected cp = "
            f"{cp}"
        )


def _level_of(group: Sequence[int], size: int, inner: int) -> list[list[int]]:
    """The ranks of a CP group in parts of `size`, whose neighbours are `inner` places apart."""
    return [
        [group[first + k * inner + low] for k in range(size)]
        for first in range(0, len(group), size * inner)
        for low in range(inner)
    ]


def _grid_of_mesh(mesh: DeviceMesh, names: Mapping[str, str]) -> tuple[dict[str, str], Grid]:
    """The mesh's name of each dimension that it has, and its layout."""
    own = mesh.mesh_dim_names or ()
    dimensions = {
        role: names.get(role, role)
        for role in ("tp", "cp", "dp", "pp")
        if names.get(role, role) in own
    }
    other = [name for name in own if name not in dimensions.values()]
    if other or not own:
        raise ValueError(
            f"the mesh has the dimensions {own}, expected tp, cp, dp and pp, or names= of them"
        )
    if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise ValueError("the mesh does not have all ranks of the job in ascending order")
    roles = {name: role for role, name in dimensions.items()}
    order = [roles[name] for name in reversed(own)]
    order += [role for role in ("tp", "cp", "dp", "pp") if role not in dimensions]
    sizes = {role: mesh.size(own.index(name)) for role, name in dimensions.items()}
    return dimensions, Grid(**sizes, order="-".join(order))


def _find_levels(collection: object) -> tuple[dist.ProcessGroup, ...]:
    """Megatron's field `hcp`: the hierarchical CP groups that it has, if any."""
    found = collection.get("hcp") if isinstance(collection, Mapping) else None
    levels = found or getattr(collection, "hcp", None)
    if not isinstance(levels, (list, tuple)):
        return ()
    return tuple(level for level in levels if isinstance(level, dist.ProcessGroup))


@contextmanager
def _all_or_none() -> Iterator[None]:
    """Tell the other ranks, which wait for this one's view in `_views`, what it refuses."""
    try:
        yield
    except Exception as error:
        with suppress(RuntimeError):  # of ranks that do not come: what is refused says more
            all_gather_object(_Refusal(error))
        raise


def _views(own: object) -> list[Any]:
    """Every rank's view, unless one of them refuses."""
    views = all_gather_object(own)
    for rank, view in enumerate(views):
        if isinstance(view, _Refusal):
            raise ValueError(
                f"rank {dist.get_rank()}: rank {rank} refuses the layout, expected one that all "
                f"ranks can have; it says: {view}"
            )
    return views


def _agree(grid: Grid, ranks: list[int], levels: tuple[int, ...] = ()) -> list[list[int]]:
    """The ranks of every parent, ascending.

    Ranks that create different groups would wait for each other until the timeout.
    """
    layout = f"{grid!r}, levels {list(levels)}" if levels else repr(grid)
    views = _views((layout, tuple(ranks)))
    for rank, (other, _) in enumerate(views):
        if other != layout:
            raise ValueError(
                f"rank {dist.get_rank()}: the ranks want different layouts: {layout} here, {other} "
                f"on rank {rank}; expected the same sizes and order on every rank"
            )
    parents = sorted({parent for _, parent in views})
    for rank, (_, parent) in enumerate(views):
        if parent != tuple(ranks) and set(parent) & set(ranks):
            raise ValueError(
                f"rank {dist.get_rank()}: the parents overlap: {ranks} here, {list(parent)} on "
                f"rank {rank}; expected the same parent on all of its ranks"
            )
    return [list(parent) for parent in parents]


def _resize(grid: Grid, size: int) -> Grid:
    """The grid with CP groups of another size, if no rank has to change its weights for it."""
    now = grid.sizes
    domain = now["dp"] * now["cp"]
    size = expect_size("context parallel size", size)
    if domain % size:
        raise ValueError(
            f"context parallel size is {size}, expected a divisor of dp * cp = "
            f"{now['dp']} * {now['cp']} = {domain}"
        )
    resized = Grid(**{**now, "cp": size, "dp": domain // size}, order=grid.order)
    for role in ("tp", "pp"):
        if not resized.shares(grid, role):
            raise ValueError(
                f"context parallel size {size} instead of {now['cp']} in the order {grid.order} "
                f"gives ranks another place in {role}, and their weights would have to move; "
                "expected an order in which cp and dp are neighbours, such as tp-cp-dp-pp"
            )
    return resized


def _find_groups(collection: object) -> dict[str, dist.ProcessGroup]:
    """The roles that a collection has. Megatron's gives None for a role that is not set."""
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


def _fit_grid(groups: Mapping[str, dist.ProcessGroup], order: str) -> tuple[Any, ...] | None:
    """(name, size) of each dimension of the grid whose groups are these; None without one."""
    dimensions = ("tp", "cp", "dp", "pp")
    if any(name not in groups for name in dimensions):
        return None
    sizes = {name: groups[name].size() for name in dimensions}
    grid = Grid(**sizes, order=order)
    if grid.ranks != dist.get_world_size():
        return None
    for role, group in groups.items():
        if dist.get_process_group_ranks(group) not in grid.groups(ROLES[role]):
            return None
    return tuple(sizes.items())


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """A group's own timeout, or None, torch's default, where this torch does not tell."""
    assert group is not None
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None
