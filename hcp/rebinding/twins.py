"""Twins: the counterparts in one layout of the objects of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding import derived


class Twins:
    """The counterpart in another layout of each object of one layout, by identity."""

    def __init__(self, train: ProcessGroups, evaluation: ProcessGroups) -> None:
        self.layouts: tuple[ProcessGroups, ProcessGroups] | None = (train, evaluation)
        """(training, evaluation); None for the twins of a mapping."""
        self.kept: dict[Any, Any] = {}
        self.by_id: dict[int, dict[str, Any]] = {}
        """The twins by role of each object of the training layout, by its identity."""
        old, new = train.by_role, evaluation.by_role
        levels, new_levels = train.hierarchy, evaluation.hierarchy
        source, new_source = train.source, evaluation.source
        self.differing = [role for role in old if old[role] is not new.get(role)]
        """Roles whose groups change."""
        self._add("collection", train, evaluation)
        if source is not None and new_source is not None:
            self._add("collection", source, new_source)
        for role, group in old.items():
            self._add(role, group, new.get(role))
        for i, level in enumerate(levels):
            # The name of Megatron's field for hierarchical CP groups, a list of one per level.
            self._add(f"hcp[{i}]", level, new_levels[i] if i < len(new_levels) else None)
        self.groups = self._differing([*old.values(), *levels])
        """The groups of the training layout whose twin is another object."""
        own = set() if evaluation is train else {id(evaluation)}
        self.eval_only = set(map(id, new.values())) - set(map(id, old.values())) | own
        """Groups and collections that only the eval layout has, by identity."""
        # Where evaluation has none, nothing can replace the training collection, whose attributes
        # are slots.
        closed = () if new_source is None else (source, new_source)
        self.closed = {id(each) for each in closed if each is not None}
        """The trainer's collections that have a twin, by identity: the walk does not go into
        them."""
        self.known = set(map(id, derived.free_groups(source)))
        """Groups of the trainer's collection that are the same in every layout, by identity."""
        self.ranks = {role: train.ranks(role) for role in self.differing}
        self._derived: dict[tuple[str, str], tuple[Any, Any] | None] = {}
        self._names = {str(group.group_name): group for group in self.groups}

    @classmethod
    def of_mapping(cls, mapping: Mapping[Any, Any]) -> Twins:
        """Make twins of any objects. They have no roles, and no values are derived from them."""
        self = cls.__new__(cls)
        self.layouts = None
        self.by_id = {id(old): {f"group {i}": new} for i, (old, new) in enumerate(mapping.items())}
        self.kept = dict(mapping)
        self.differing = [f"group {i}" for i in range(len(mapping))]
        self.eval_only, self.closed, self.known = set(), set(), set()
        self.ranks, self._derived, self._names = {}, {}, {}
        self.groups = [old for old in mapping if isinstance(old, dist.ProcessGroup)]
        return self

    def _differing(self, every: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
        """Return those whose twin is another object, each once."""
        differing: dict[int, dist.ProcessGroup] = {}
        for group in every:
            for twin in self.by_id[id(group)].values():
                if twin is not group:
                    differing[id(group)] = group
        return list(differing.values())

    def named(self, name: str) -> dist.ProcessGroup | None:
        """The group of the training layout that torch knows by a name."""
        return self._names.get(name)

    def get(self, value: object) -> dict[str, Any] | None:
        """Return the twins of an object of the training layout by role; None for other objects."""
        return self.by_id.get(id(value))

    def choose(self, roles: Mapping[str, Any], name: object, path: str) -> tuple[str, Any]:
        """Return the role and twin of a slot. Its name decides between several roles."""
        role = derived.role_of_name(name) if isinstance(name, str) else None
        if role not in roles or role is None:
            twins = {id(twin) for twin in roles.values()}
            if len(twins) > 1:
                raise ValueError(_ambiguous(path, list(roles)))
            role = next(iter(roles))
        if roles[role] is None:
            raise ValueError(
                f"{path} holds the group {role!r}: eval_pgs has no role {role!r}; give it one, so "
                "that it can be swapped"
            )
        return role, roles[role]

    def derived(self, name: str) -> tuple[str, str, Any, Any] | None:
        """Return (role, kind, training value, eval value) of a derived value's name, or None."""
        known = derived.traits_of(name).derivation
        if known is None:
            return None
        if known not in self._derived:
            self._derived[known] = self._values(*known)
        values = self._derived[known]
        return None if values is None else (*known, *values)

    def _values(self, role: str, kind: str) -> tuple[Any, Any] | None:
        """The value of a role in both layouts, None if not both have the role."""
        if self.layouts is None or any(role not in groups.roles for groups in self.layouts):
            return None
        train, evaluation = self.layouts
        return derived.derived_value(train, role, kind), derived.derived_value(
            evaluation, role, kind
        )

    def _add(self, role: str, original: object, value: object | None) -> None:
        self.by_id.setdefault(id(original), {})[role] = value


def _ambiguous(path: str, roles: Sequence[str]) -> str:
    return (
        f"{path} holds the group {roles[0]!r}: in train_pgs {' and '.join(map(repr, roles))} are "
        "the same object, eval_pgs has different ones for them, and the name of the slot says none "
        "of them; give each role of train_pgs a group of its own, as build_process_groups does, or "
        f"name the slot {roles[0]}_group"
    )
