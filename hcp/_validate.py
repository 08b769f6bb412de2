"""Checks of arguments. Errors give the value, what was expected, and where."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class IntegerArray(Protocol):
    """A tensor of torch's, or an array of NumPy's, of integers. The planner needs neither."""

    def tolist(self) -> Any: ...


def plain(value: Any) -> Any:
    """Convert integer scalars, NumPy's and torch's too, to int. Everything else is returned
    unchanged: also bools and arrays of one integer."""
    if type(value) is int or isinstance(value, bool) or getattr(value, "ndim", False):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def is_finite(value: Any) -> bool:
    """Whether a value is a number, and neither infinite nor NaN."""
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def expect_items(name: str, values: Any, what: str) -> None:
    """Raise ValueError unless the values are a sequence. Text is refused, too: its items are
    letters."""
    if type(values) in (list, tuple):
        return
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__getitem__"):
        raise ValueError(f"{name} is {values!r:.60}, expected a sequence of {what}")


def expect_size(name: str, value: object, other: str = "", least: int = 1) -> int:
    """Return the value as an int. ValueError unless it is one, and at least ``least``."""
    size = plain(value)
    if type(size) is not int or size < least:
        raise ValueError(f"{name} is {value!r}, expected an integer >= {least} {other}".rstrip())
    return size


def expect_sizes(name: str, values: Sequence[Any], least: int = 1) -> tuple[int, ...]:
    """Return each item as an int: see ``expect_size``."""
    expect_items(name, values, "integers")
    if all(type(value) is int and value >= least for value in values):
        return tuple(values)
    return tuple(expect_size(f"{name}[{i}]", v, least=least) for i, v in enumerate(values))


def expect_groups(groups: object, name: str = "groups") -> None:
    """Raise ValueError unless these are process groups of hcp, which carry rows."""
    if not hasattr(groups, "transport"):
        raise ValueError(
            f"{name} is {groups!r:.60}, expected hcp.ProcessGroups: hcp.build_process_groups(), or "
            "hcp.ProcessGroups.from_existing(...) of a trainer's own"
        )


def expect_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def expect_names(place: str, data: Any, names: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raise ValueError unless data is an object with all of ``names``, and no others but
    ``optional``: a later version may have meant something by them."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{place or 'the data'} is {data!r:.60}, expected an object")
    required = tuple(names)
    expected = tuple(dict.fromkeys((*required, *optional)))
    for name in [*required, *data]:
        if name not in data or name not in expected:
            problem = "missing" if name not in data else "unknown"
            where = f"{place}.{name}" if place else name
            raise ValueError(f"{where} is {problem}, expected {', '.join(expected)}")


@contextmanager
def shallow(name: str) -> Iterator[None]:
    """Raise ValueError where data have objects in objects too deep for an error to show them."""
    try:
        yield
    except RecursionError:
        raise ValueError(
            f"{name} has lists or objects nested too deeply, expected what to_dict() gives"
        ) from None


def flag(name: str) -> str:
    """Spell a name as the command line does."""
    return "--" + name.replace("_", "-")
