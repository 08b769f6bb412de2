"""What type checkers and tools see of hcp's public names. `make check` runs mypy and pyright on
support/typed_user.py."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hcp
from hcp import _words
from hcp.attention.options import AttentionOptions
from hcp.attention.qkv_format import QKV_FORMATS
from hcp.attention.scan_types import SCAN_TYPES
from hcp.exchange.connect import TRANSPORTS
from hcp.exchange.payload_splits import SPLITS
from hcp.planning import limits
from hcp.rebinding.derived import KINDS
from hcp.step import backends, config
from hcp.step.loss import GRAD_REDUCE
from hcp.tools import presets

WORDS = {
    "Backend": tuple(backends.BACKENDS),
    "CommType": hcp.COMM_TYPES,
    "Degrees": limits.DEGREES,
    "DerivedKind": KINDS,
    "GradReduce": GRAD_REDUCE,
    "PayloadSplit": SPLITS,
    "Preset": tuple(presets.PRESETS),
    "QkvFormat": QKV_FORMATS,
    "ScanType": SCAN_TYPES,
    "Scheduler": (*config.SCHEDULERS, *config.MEGATRON_SCHEDULERS),
    "Sync": limits.SYNCS,
    "SyncOption": config.SYNCS,
    "TooLong": config.TOO_LONG,
    "TransportName": TRANSPORTS,
}


@pytest.mark.parametrize("name", WORDS)
def test_a_type_of_words_has_the_words_that_are_taken(name: str) -> None:
    assert typing.get_args(getattr(_words, name)) == WORDS[name]


def test_every_type_of_words_is_compared() -> None:
    made = {name for name, value in vars(_words).items() if typing.get_args(value)}
    assert made == WORDS.keys()


def functions_of(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions in a class's body, behind whatever wraps them."""
    for name, value in vars(cls).items():
        found = value
        for wrapped in ("__func__", "fget", "func"):
            found = getattr(found, wrapped, found)
        if inspect.isfunction(found):
            yield f"{cls.__name__}.{name}", found


def public() -> Iterator[tuple[str, Any]]:
    """Every public class and function, with what is in the classes."""
    for name in hcp.__all__:
        value = getattr(hcp, name)
        if callable(value):
            yield name, value
        if inspect.isclass(value):
            yield from functions_of(value)


def test_type_hints_of_all_public_names_resolve_without_torch_in_the_planner() -> None:
    failed: dict[str, str] = {}
    for name, value in public():
        try:
            typing.get_type_hints(value)
        except NameError as error:
            failed[name] = str(error)
    # It returns a tensor, and the planner does not import torch before.
    assert failed == {"Mask.dense": "name 'Tensor' is not defined"}


def test_attention_takes_the_options_that_its_type_has() -> None:
    """The overloads, and whoever passes options on, take them from the type."""
    taken = inspect.signature(hcp.ContextParallelHandler.attention).parameters.values()
    options = {p.name for p in taken if p.kind is p.KEYWORD_ONLY} - {"return_lse"}
    hints = typing.get_type_hints(hcp.ContextParallelHandler.attention)
    assert {name: hints[name] for name in options} == typing.get_type_hints(AttentionOptions)


def test_all_public_names_are_documented() -> None:
    documents = {name: value.__doc__ or "" for name, value in public() if name in hcp.__all__}
    assert documents.keys() == {*hcp.__all__} - {"COMM_TYPES"}
    # A dataclass or a tuple without one gets its signature.
    assert [name for name, text in documents.items() if not text or text.startswith(name)] == []


def test_public_names_stand_in_order() -> None:
    constants_classes_functions = sorted(
        hcp.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    assert hcp.__all__ == constants_classes_functions
