"""Job layouts: sizes of tp, cp, dp and pp, and the ranks of each role's groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hcp._core import Grid
from hcp._validate import expect_size, expect_sizes

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


def data_parallel_size(tp: int, cp: int, dp: int | None, pp: int, world: int) -> int:
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


def resized(grid: Grid, size: int) -> Grid:
    """Give the grid CP groups of another size. Raises ValueError if weights would have to move to
    another rank."""
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


def check_levels(sizes: Sequence[int], cp: int) -> None:
    expect_sizes("hierarchical", sizes)
    if sizes and math.prod(sizes) != cp:
        raise ValueError(
            f"hierarchical is {list(sizes)}, whose product is {math.prod(sizes)}, expected cp = "
            f"{cp}"
        )


def levels_within(cp: int, sizes: Sequence[int]) -> list[int]:
    """Sizes of as many levels of `cp` ranks. The last level has what the others leave."""
    found = []
    for size in sizes[:-1]:
        found.append(math.gcd(size, cp))
        cp //= found[-1]
    return [*found, cp][: len(sizes)]


def groups_of_level(group: Sequence[int], size: int, inner: int) -> list[list[int]]:
    """Split a CP group into parts of `size` ranks that are `inner` places apart."""
    return [
        [group[first + k * inner + low] for k in range(size)]
        for first in range(0, len(group), size * inner)
        for low in range(inner)
    ]


def fit_grid(groups: Mapping[str, dist.ProcessGroup], order: str) -> tuple[Any, ...] | None:
    """Find the grid that has these groups: (name, size) of each dimension. None if there is
    none."""
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


def grid_of_mesh(mesh: DeviceMesh, names: Mapping[str, str]) -> tuple[dict[str, str], Grid]:
    """Read a mesh: its name for each dimension that it has, and its job layout."""
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
