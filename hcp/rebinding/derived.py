"""Values that trainers derive from a group and keep: sizes, ranks and flags by name, and caches.

They cannot be found by identity. A place is a slot if its name is in DERIVED and it holds exactly
the value of the training layout. Inside the context it holds the value of the eval layout.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from hcp._words import DerivedKind
from hcp.groups.grids import ROLES
from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding import revision

SIZE, RANK, RANKS, FLAG = "size", "rank", "ranks", "flag"
KINDS = (SIZE, RANK, RANKS, FLAG)

DERIVED: dict[str, tuple[str, str]] = {
    "cp_size": ("cp", SIZE),
    "cp_world_size": ("cp", SIZE),
    "cp_degree": ("cp", SIZE),
    "context_parallel_size": ("cp", SIZE),
    "context_parallel_world_size": ("cp", SIZE),
    "context_parallel_degree": ("cp", SIZE),
    "context_parallel_lm": ("cp", SIZE),
    "cp_rank": ("cp", RANK),
    "context_parallel_rank": ("cp", RANK),
    "cp_ranks": ("cp", RANKS),
    "cp_global_ranks": ("cp", RANKS),
    "context_parallel_ranks": ("cp", RANKS),
    "context_parallel_global_ranks": ("cp", RANKS),
    "use_cp": ("cp", FLAG),
    "cp_enabled": ("cp", FLAG),
    "use_context_parallel": ("cp", FLAG),
    "context_parallel_enabled": ("cp", FLAG),
    "dp_size": ("dp", SIZE),
    "dp_world_size": ("dp", SIZE),
    "data_parallel_size": ("dp", SIZE),
    "data_parallel_world_size": ("dp", SIZE),
    "dp_rank": ("dp", RANK),
    "data_parallel_rank": ("dp", RANK),
    "dp_global_ranks": ("dp", RANKS),
    "data_parallel_global_ranks": ("dp", RANKS),
    "tp_cp_size": ("tp_cp", SIZE),
    "tp_cp_rank": ("tp_cp", RANK),
}
"""(role, kind) of the values, by name. Leading underscores and capitals do not count."""

CP_FREE = {
    "cp_comm_type",
    "eval_context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "max_seqlen_per_dp_cp_rank",
    "min_dynamic_context_parallel_size",
}
"""Names that look derived from a CP group and do not depend on the layout."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names that a package gives to values that the layout does not change."""

    free: frozenset[str] = frozenset()
    """Attributes that look derived from a CP group and do not depend on the layout."""

    free_groups: tuple[str, ...] = ()
    """Fields of the package's collection whose groups are the same in every layout."""

    sized_once: frozenset[str] = frozenset()
    """Flags of buffers that were allocated once, for the rows of a rank of the training layout."""


_SIZED_ONCE: set[str] = set()
_FREE_GROUPS: set[str] = set()

CACHE_TENSORS = ("cos_cached", "sin_cached", "cos_sin_cached", "freqs_cached", "emb_cached")
CACHE_LENGTHS = ("max_seq_len_cached", "seq_len_cached")
CACHE_TRAITS = ("offset_cached", "dtype_cached", "packed_seq_cached", "mscale_cached")
"""Names in a rotary cache: its tensors, the length for which they are valid, and the other options
that they were made with."""

CACHES = frozenset((*CACHE_TENSORS, *CACHE_LENGTHS, *CACHE_TRAITS))

_LOOKS = re.compile(r"(^|_)(cp|tpcp|context_parallel)(_|$)")
_GROUP_NAME = re.compile(r"(^|_)(group|pg)_?name$")
_ROLE_ALIASES = {
    "context_parallel": "cp",
    "data_parallel": "dp",
    "data_parallel_with_cp": "dp_cp",
    "data_parallel_group_with_cp": "dp_cp",
    "data_context_parallel": "dp_cp",
    "tensor_and_context_parallel": "tp_cp",
    "tensor_and_data_parallel_with_cp": "tp_dp_cp",
    "tensor_and_data_parallel_group_with_cp": "tp_dp_cp",
    "model_parallel": "mp",
    "tensor_model_parallel": "tp",
    "tensor_parallel": "tp",
    "pipeline_model_parallel": "pp",
    "pipeline_parallel": "pp",
}


def register_derived(name: str, role: str = "cp", kind: DerivedKind = "size") -> None:
    """Treat places called `name` as derived from the group of a role.

    A place is swapped if it holds the value of the training layout.

    Args:
        name: of an attribute.
        role: of the group: "cp", "dp", "tp" and so on.
        kind: "size" or "rank" (an int), "ranks" (a list or tuple of global ranks), "flag" (a bool:
            more than one rank).
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    if role not in ROLES:
        raise ValueError(f"role is {role!r}, expected one of {', '.join(ROLES)}")
    if not name.isidentifier() or not name.lstrip("_"):
        raise ValueError(f"name is {name!r}, expected the name of an attribute")
    DERIVED[name.lstrip("_")] = (role, kind)
    _names_changed()


def add_names(names: Names) -> None:
    """Add the names of a package."""
    CP_FREE.update(names.free)
    _FREE_GROUPS.update(names.free_groups)
    _SIZED_ONCE.update(names.sized_once)
    _names_changed()


def _names_changed() -> None:
    traits_of.cache_clear()
    revision.advance()


def free_groups(source: object) -> list[object]:
    """Return the groups of a trainer's collection that are the same in every layout."""
    fields = source if isinstance(source, Mapping) else getattr(source, "__dict__", {})
    return [group for name, group in fields.items() if name in _FREE_GROUPS]


def is_sized_once(name: str) -> bool:
    """Whether a name is that of a flag of buffers that were allocated once, for the rows of the
    training layout."""
    return name in _SIZED_ONCE


def derivation(name: str) -> tuple[str, str] | None:
    """Return (role, kind) of a name in the table, or None. Globals are written in capitals."""
    if name in DERIVED:
        return DERIVED[name]
    if name[:1] != "_" and not name.isupper():
        return None
    bare = name.lstrip("_")
    return DERIVED.get(bare.lower() if bare.isupper() else bare)


def derived_value(groups: ProcessGroups, role: str, kind: str) -> Any:
    """Return the size, rank, ranks (a list) or flag of a role in a layout."""
    if kind == SIZE:
        return groups.size(role)
    if kind == RANK:
        return groups.rank(role)
    if kind == RANKS:
        return groups.ranks(role)
    return groups.size(role) > 1


def holds_derived(value: object, expected: object, kind: str) -> bool:
    """Whether a place holds a derived value. Types must also match, since True == 1."""
    held = _ranks(value) if kind == RANKS else scalar(value)
    return type(held) is type(expected) and held == expected


def in_form_of(value: Any, new: Any) -> Any:
    """Convert a derived value to the type of the old one: int, NumPy integer, tensor or tuple."""
    options = {"dtype": value.dtype} if hasattr(value, "dtype") else {}
    if isinstance(value, torch.Tensor):
        options["device"] = value.device
        many = isinstance(new, list)
        return torch.tensor(new, **options) if many else torch.full(value.shape, new, **options)
    if is_numpy(value):
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.generic):
            return value.dtype.type(new)
        return numpy.array(new, **options) if isinstance(new, list) else numpy.full_like(value, new)
    return list(new) if type(value) is range else type(value)(new)


def scalar(value: Any) -> int | float | bool | None:
    """Return the number that a place holds, in any form, or None if it holds none."""
    if type(value) in TENSORS:
        value = value.item() if value.numel() == 1 and not value.is_meta else None
    elif is_numpy(value):
        value = value.item() if getattr(value, "size", 0) == 1 else None
    if type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) in (int, float, bool) else None


def is_numpy(value: object) -> bool:
    """Whether a value is a number or an array of NumPy, which is not imported for this."""
    return type(value).__module__ == "numpy" and hasattr(type(value), "dtype")


def _ranks(value: Any) -> list[Any] | None:
    if type(value) in TENSORS:
        return None if value.is_meta or value.dim() != 1 else value.tolist()
    if is_numpy(value):
        return value.tolist() if value.ndim == 1 else None
    return list(value) if type(value) in (list, tuple, range) else None


TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Traits(NamedTuple):
    """What the name of a place says of the values in it."""

    derivation: tuple[str, str] | None
    """(role, kind) of a value that is derived from a group."""
    names_a_group: bool
    """Whether it is torch's `group_name` of a group."""
    watched: bool
    """Whether another number, text or tensor there changes the slots: either of these."""
    looks_dependent: bool
    """Whether it is one of values that depend on context parallelism."""


@cache
def traits_of(name: str) -> Traits:
    bare, known = name.strip("_").lower(), derivation(name)
    names_a_group = _GROUP_NAME.search(name.lower()) is not None
    looks = bare not in CP_FREE and (bare in DERIVED or _LOOKS.search(bare) is not None)
    return Traits(known, names_a_group, known is not None or names_a_group, looks)


def is_watched(name: str, strict: bool) -> bool:
    """Whether another number, text or tensor in a place of this name changes the slots, or, if
    `strict`, what looks dependent."""
    traits = traits_of(name)
    return traits.watched or (strict and (traits.looks_dependent or name in _SIZED_ONCE))


@cache
def role_of_name(name: str) -> str | None:
    """Return the role in a slot's name: cp for "cp", "cp_group" and "context_parallel_group"."""
    bare = name.strip("_").lower()
    bare = bare.removesuffix("name").rstrip("_") if traits_of(name).names_a_group else bare
    for ending in ("_process_group", "_groups", "_group", "_pg"):
        bare = bare.removesuffix(ending)
    return _ROLE_ALIASES.get(bare, bare)
