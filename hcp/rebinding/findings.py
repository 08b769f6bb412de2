"""Findings: places that look as if they depended on the layout, and that nothing covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hcp.rebinding import derived
from hcp.rebinding.twins import Twins


@dataclass(frozen=True, slots=True)
class Finding:
    """A place that looks as if it depended on the layout, and that nothing covers."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def doubt_about_value(name: str, value: Any, twins: Twins) -> str | None:
    """Return the reason why a number, a flag or None of this name looks dependent on the layout, or
    None if it does not."""
    if derived.traits_of(name).looks_dependent:
        return _doubt_about_name(name, value, twins)
    if value is True and derived.is_sized_once(name):
        return _doubt_about_size(twins)
    return None


def _doubt_about_name(name: str, value: Any, twins: Twins) -> str | None:
    known = twins.derived(name)
    number = derived.scalar(value)
    if known is not None and type(number) is type(known[2]):
        role, what, now, new = known
        if now == new:
            return None
        return (
            f"is {value!r}, and the {role} {what} of train_pgs is {now!r}: exclude the object that "
            "holds it if it is meant to differ"
        )
    if value is None and name.endswith(("cp_group", "context_parallel_group")):
        return "is None, and would stay so: torch takes None for the whole world"
    if known is None and type(number) is int:
        return (
            f"is {value}, by its name derived from a CP group: "
            "hcp.rebinding.derived.register_derived or hcp.register_rebind say how, exclude= says "
            "that it is not"
        )
    return None


def _doubt_about_size(twins: Twins) -> str | None:
    now, new = (twins.derived("cp_size") or (None, None, 0, 0))[2:]
    if new >= now:
        return None
    return (
        f"says that buffers were made for the rows of CP = {now}, and a rank has more of them "
        f"under CP = {new}"
    )


def doubt_about_group(group: dist.ProcessGroup, name: object, twins: Twins) -> str | None:
    """Return the reason why a group of neither layout looks like one that changes, or None."""
    if not twins.ranks or id(group) in twins.known:
        return None
    if isinstance(name, str) and derived.role_of_name(name) in twins.differing:
        return (
            "is a group by that name which train_pgs does not have: exclude it if it is meant to "
            "stay"
        )
    if group.size() <= 1:
        return None
    ranks = dist.get_process_group_ranks(group)
    role = next((r for r, its in twins.ranks.items() if its == ranks), None)
    if role is None:
        return None
    return (
        f"is another group of the same ranks as {role!r} of train_pgs: exclude it if it is meant "
        "to stay"
    )


def doubt_about_mesh(mesh: DeviceMesh, twins: Twins) -> str | None:
    """Return the reason why a mesh would still return groups of the training layout, or None if it
    has none."""
    for name in mesh.mesh_dim_names or ():
        roles = twins.get(mesh.get_group(name)) or {}
        if any(role in twins.differing for role in roles):
            return f"is a DeviceMesh, which goes on handing out its group {name!r}"
    return None
