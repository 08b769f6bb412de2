"""Rules for the classes of trainers' packages, each in ``hcp/integrations``.

The rules for a package are loaded when a switch starts in a process that has imported the package,
or when the walk meets a class of it. They import nothing of the package.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from hcp.rebinding import derived, revision, rules
from hcp.rebinding.rules import Rule
from hcp.rebinding.safe_access import is_a, own_attributes

_DEEPSPEED = "hcp.integrations.deepspeed.deepspeed_rules"
_MEGATRON = "hcp.integrations.megatron.megatron_rules"
_TRANSFORMER_ENGINE = "hcp.integrations.transformer_engine.transformer_engine_rules"

_PACKAGES = {
    "deepspeed": _DEEPSPEED,
    "megatron": _MEGATRON,
    "megatron_fsdp": _MEGATRON,
    "transformer_engine": _TRANSFORMER_ENGINE,
}
"""The module of rules for each package."""

_METHODS = {
    "_setup_variant_attrs": _MEGATRON,
    "set_context_parallel_group": _TRANSFORMER_ENGINE,
}
"""The module of rules for classes that have a method, in any package."""


@dataclass(frozen=True, slots=True)
class PackageRules:
    """The rules for one package. Its module of rules has an object of this class named
    ``RULES``."""

    classes: Mapping[str, Rule] = field(default_factory=dict)
    """Rules by "module.Name" of a class."""

    shapes: tuple[tuple[Callable[[Any], bool], Rule], ...] = ()
    """(test, rule): the rule is for every object of any class that passes the test."""

    sharders: tuple[str, ...] = ()
    """Prefixes of the names of modules that shard and reduce over groups of their own."""

    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules whose globals the package's code reads, each with the globals that stay as they are
    in every layout. The walk of a model whose groups a module holds also visits its other
    globals."""

    names: derived.Names = field(default_factory=derived.Names)
    """Names that the package gives to values that do not depend on the layout."""


_loaded: dict[str, PackageRules] = {}
"""The rules that are loaded, by their module."""


def load_imported() -> None:
    """Load the rules for every package that this process has imported."""
    for package, module in _PACKAGES.items():
        if package in sys.modules:
            _load(module)


def rules_for(holder: Any, known: dict[type, list[Rule]]) -> list[Rule]:
    """Return the rules for an object: those for its class before those for the bases, then those
    whose test it passes. ``known``: the rules for classes, which is added to."""
    cls = type(holder)
    if cls not in known:
        known[cls] = [rule for base in cls.__mro__ for rule in _own_rules(base)]
    shapes = [shape for package in _loaded.values() for shape in package.shapes]
    return known[cls] + [rule for fits, rule in shapes if fits(holder)]


def _own_rules(cls: type) -> list[Rule]:
    """Return the rules for one class alone: a user's, its package's, and a user's by its name.
    Loads the rules of its package."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    _meet(name)
    for method, module in _METHODS.items():
        if method in vars(cls):
            _load(module)
    packages = [package.classes[name] for package in _loaded.values() if name in package.classes]
    return [*rules.REGISTERED.get(cls, ()), *packages[:1], *rules.REGISTERED.get(name, ())]


@cache
def is_sharder(module: str) -> bool:
    """Whether the classes of a module keep groups of their own, to shard and reduce over."""
    _meet(module)
    return any(module.startswith(package.sharders) for package in _loaded.values())


def imported_globals() -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """Yield (path, globals, names that stay) of each imported one of the packages' `modules`."""
    for package in _loaded.values():
        for name, stay in package.modules.items():
            namespace = own_attributes(sys.modules.get(name))
            if namespace is not None:
                code: Any = (types.FunctionType, types.ModuleType, type)
                defined = (key for key, value in list(namespace.items()) if is_a(value, code))
                yield name.rpartition(".")[2], namespace, (*stay, *defined)


def _meet(name: str) -> None:
    """Load the rules of the package that has a module, or a class, of this name."""
    module = _PACKAGES.get(name.partition(".")[0])
    if module is not None:
        _load(module)


def _load(module: str) -> None:
    if module not in _loaded:
        package: PackageRules = import_module(module).RULES
        derived.add_names(package.names)
        _loaded[module] = package
        revision.advance()
