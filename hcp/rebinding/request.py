"""One request for a switch, and the walk that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hcp.exchange.transport import Transport
from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding import packages
from hcp.rebinding.twins import Twins
from hcp.rebinding.walk import Walk


@dataclass(frozen=True, slots=True)
class Request:
    """The model of a switch, the groups to swap, and their replacements."""

    model: object
    old: Any
    """The layout to switch from, or a mapping of objects to their twins."""
    new: Any
    """The layout to switch to; None with a mapping."""
    exclude: tuple[Any, ...]
    strict: bool
    transport: Transport | None
    """The transport of the ranks that compare their slots first; None if nobody does."""

    def twins(self) -> Twins:
        """The twin of each object that the request is about."""
        return Twins.of_mapping(self.old) if self.new is None else Twins(self.old, self.new)

    def key(self) -> tuple[Any, ...]:
        """A key that is equal for requests of the same objects."""
        if self.new is None:
            old: Any = tuple((id(a), id(b)) for a, b in self.old.items())
        else:
            old = (id(self.old), id(self.new))
        model: Any = self.model
        chunks = model if issubclass(type(model), (list, tuple)) else (model,)
        return (
            old,
            tuple(map(id, chunks)),
            self.strict,
            *[x if issubclass(type(x), str) else id(x) for x in self.exclude],
        )

    def layouts(self) -> str:
        """Both layouts, for the comparison of ranks."""
        return "" if self.new is None else f"{self.old!r} to {self.new!r}"


def walk_for(request: Request, layout: ProcessGroups | None = None) -> Walk:
    """Walk through the model of a request. `layout`: the one that the model was switched to last.

    Raises ValueError if there is nothing to swap, or if an item of `exclude` covers nothing.
    """
    packages.load_imported()
    twins = request.twins()
    walk = Walk(twins, request.exclude)
    walk.run(request.model)
    if not request.strict:  # strict: after the search elsewhere
        walk.excluded.check_used()
    if not walk.groups_found and (twins.differing or not walk.shared):
        raise ValueError(_nothing_to_swap(walk, twins.differing))
    if not twins.differing:
        _check_nothing_left(walk, request, layout)
    return walk


def same_layout(a: ProcessGroups, b: ProcessGroups) -> bool:
    """Whether two layouts have equal roles and the same groups in them."""
    return a is b or (
        a.roles == b.roles and all(getattr(a, role) is getattr(b, role) for role in a.roles)
    )


def another_layout(layout: ProcessGroups, request: Request) -> str:
    """Return the error text for a model that is not in the layout to switch from."""
    return (
        f"the model is in the layout {layout!r}, to which a context or a rebinding has switched "
        f"it, expected {request.old!r}, the one to switch from: leave that context first, or "
        "switch from the layout that it gave"
    )


def _check_nothing_left(walk: Walk, request: Request, layout: ProcessGroups | None) -> None:
    """Check that a model with nothing to swap has one of the layouts, which share all groups."""
    if layout is None or same_layout(layout, request.old):
        return
    left = {r for r in request.old.roles if getattr(layout, r, None) is not getattr(request.old, r)}
    if not left & walk.shared_roles:
        raise ValueError(another_layout(layout, request))


def _nothing_to_swap(walk: Walk, differing: Sequence[str]) -> str:
    if walk.eval_held:
        return (
            "the model holds nothing of train_pgs that differs from eval_pgs, but holds eval_pgs "
            f"at {walk.eval_held[0]}: the arguments look swapped, expected "
            "eval_cp_context(model, train_pgs, eval_pgs); or the model is inside such a context"
        )
    found = f"; it holds only what both layouts share: {walk.shared[0]}" if walk.shared else ""
    return (
        f"the model holds none of train_pgs, expected the collection or one of its groups "
        f"{', '.join(differing)}{' ' if differing else ''}somewhere in its modules, attributes, "
        f"dictionaries, lists or tuples{found}; pass the collection that the model was built with"
    )
