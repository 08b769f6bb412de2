"""Rules for classes whose state depends on the layout, which no identity and no name shows.

    hcp.register_rebind(Mixer, attributes=lambda mixer, pgs: {"share": mixer.n // pgs.size("cp")})
    hcp.register_rebind(Sharder, rebuild=True)
    hcp.register_rebind(Attention, method="set_context_parallel_group", arguments=...)

A rule gives the values that an object holds in a layout. The walk turns them into slots, so that
changes by a rule are undone like all others. hcp's own rules for trainers' classes are in
``hcp/integrations``: see ``packages``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding import revision

Attributes = Callable[[Any, ProcessGroups], Mapping[str, Any]]
Arguments = Callable[[Any, ProcessGroups], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for objects of a class. `register_rebind` explains the fields."""

    attributes: Attributes | None = None
    rebuild: bool = False
    caches: tuple[str, ...] = ()
    method: str | None = None
    arguments: Arguments | None = None
    held: tuple[str, ...] = ()
    refuse: Callable[[Any, ProcessGroups], str | None] | None = None


REGISTERED: dict[type | str, list[Rule]] = {}
"""The rules for each class, or "module.Name" of one, in the order in which they were given."""


def register_rebind(
    cls: type | str,
    *,
    attributes: Attributes | None = None,
    rebuild: bool = False,
    caches: tuple[str, ...] = (),
    method: str | None = None,
    arguments: Arguments | None = None,
    held: tuple[str, ...] = (),
    refuse: Callable[[Any, ProcessGroups], str | None] | None = None,
) -> None:
    """Add a rule for a class and its subclasses, which the walk through a model cannot see through.

    Args:
        cls: the class, or its "module.Name", not imported.
        attributes: ``attributes(obj, pgs)`` gives values by attribute name that the object has in a
            layout. It is called for both layouts. An object that does not hold the training
            layout's values does not change.
        rebuild: take the attributes from a new object. The constructor is called with the
            attributes that have its parameters' names, groups replaced. For plain objects: its
            checks run again.
        caches: attributes that are None inside the context, or empty if they are dictionaries.
        method: the name of a method that switches the object.
        arguments: ``arguments(obj, pgs)`` gives the method's arguments in a layout.
        held: the attributes that keep the arguments of the last call, which undo the switch.
        refuse: ``refuse(obj, eval_pgs)`` gives a reason why the object cannot work in that layout,
            or None.
    """
    if (method is None) != (arguments is None):
        raise ValueError("method and arguments go together: give both or neither")
    if not (attributes or rebuild or caches or method or refuse):
        raise ValueError(f"the rule for {cls} says nothing, expected one of its arguments")
    if rebuild and attributes is not None:
        raise ValueError(f"the rule for {cls} has rebuild and attributes, expected one of them")
    for name, given in (("caches", caches), ("held", held)):
        if isinstance(given, str):
            raise ValueError(f"{name} is {given!r}, expected a tuple of names: ({given!r},)")
    rule = Rule(attributes, rebuild, tuple(caches), method, arguments, tuple(held), refuse)
    REGISTERED.setdefault(cls, []).append(rule)
    revision.advance()


def attributes_of(
    rule: Rule, obj: Any, train: ProcessGroups, target: ProcessGroups
) -> dict[str, Any]:
    """Return the attributes that an object is to hold in the target layout; empty if it is not in
    the training layout."""
    if rule.rebuild:
        if not any(value is train.cp for value in list(vars(obj).values())):
            return {}
        fresh = vars(_constructed_again(obj, train, target))
        return {name: v for name, v in fresh.items() if vars(obj).get(name, _NOTHING) is not v}
    assert rule.attributes is not None
    for name, value in rule.attributes(obj, train).items():
        if getattr(obj, name, _NOTHING) != value:
            return {}
    return dict(rule.attributes(obj, target))


_NOTHING = object()


def _constructed_again(obj: Any, train: ProcessGroups, target: ProcessGroups) -> Any:
    twins = {
        id(getattr(train, role)): getattr(target, role)
        for role in target.roles
        if role in train.roles
    }
    arguments = {}
    for name in _parameters(type(obj)):
        value = vars(obj)[name]
        arguments[name] = twins.get(id(value), value)
    return type(obj)(**arguments)


def _parameters(cls: type) -> Iterator[str]:
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        yield name
