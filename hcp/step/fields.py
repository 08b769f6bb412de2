"""Fields of samples that are not one row per token: values of a sequence, and payloads."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hcp import _core
from hcp._validate import expect_choice
from hcp._words import PayloadSplit
from hcp.exchange.payload_splits import SPLITS
from hcp.exchange.transport import flat_rows

Sample = Mapping[str, Tensor]
"""Tensors of one sequence by name: (tokens, ...), but for the fields that rules name."""

Given = Mapping[str, Tensor | float | str | tuple[Any, ...] | None]
"""A sample as it may be given: a field of PER_SEQUENCE may be a number, one of TEXT is a string,
one of VALUE any value of Python's that it names."""

PER_SEQUENCE: Final = "sequence"
"""The rule of a field that has one value, or one tensor of a fixed shape, per sequence."""

TEXT: Final = "text"
"""The rule of a field that has one string per sequence. It travels as a payload of UTF-8 bytes."""

VALUE: Final = "value"
"""The rule of a field that has one value of Python's per sequence: None, a bool, an int, a float, a
string, or a tuple of these. It arrives equal and of the same type. It travels as a payload of bytes
of JSON, whose lists are tuples."""

AS_BYTES: Final = (TEXT, VALUE)
"""The rules of fields that travel as bytes, and arrive as tuples of Python's values."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The rule of a field whose number of rows is its own: pixel values, audio frames.

    A sample without any has a tensor of 0 rows. The rows go to the ranks that compute the sequence,
    and these split them.
    """

    split: PayloadSplit = "whole"
    """"whole": every rank of the group gets all rows. "first": the group's first rank does. "even":
    each rank gets about as many rows of the group's, as whole units. "tokens": each rank gets the
    rows that its own tokens take."""
    units: str | Callable[[Sample], Tensor] | None = None
    """The units that "even" keeps whole, images or audio clips: a field with the rows of each, or a
    function of a sample that returns them, (units,) integers. None: every row is one."""
    tokens: str | Callable[[Sample], Tensor] | None = None
    """Which token takes each row. A field (tokens,) of bools: the tokens that it marks take the
    same number of rows each, in order, or as many tokens take each row. Or a function of a sample
    that returns the token of each row, (rows,) integers that do not descend. "tokens" and
    ``to_tokens`` need it."""
    per_unit_of: str | None = None
    """A payload whose units have one row each of this field, as sizes of images. The row goes where
    the unit goes."""

    def __post_init__(self) -> None:
        expect_choice("split", self.split, SPLITS)
        if self.per_unit_of is not None and (self.split, self.units, self.tokens) != (
            "whole",
            None,
            None,
        ):
            raise ValueError(
                f"per_unit_of is {self.per_unit_of!r} beside other options, expected none: rows go "
                "where the units go"
            )
        if self.split == "tokens" and self.tokens is None:
            raise ValueError('split is "tokens" without tokens=, expected the tokens of the rows')
        if self.split == "tokens" and self.units is not None:
            raise ValueError(
                'split is "tokens" and units= is given, expected one of them: tokens cut units'
            )


Rules = Mapping[str, str | Payload]
"""The rules of fields by name: PER_SEQUENCE, TEXT, VALUE, or a Payload. Others have a row per
token."""


def check_rules(fields: Rules | None, loss_mask: str) -> dict[str, str | Payload]:
    """Return the rules. ValueError where one is no rule, or names a field that has none."""
    rules = dict(fields or {})
    for name, rule in rules.items():
        if rule not in (PER_SEQUENCE, *AS_BYTES) and not isinstance(rule, Payload):
            raise ValueError(
                f"fields[{name!r}] is {rule!r}, expected {PER_SEQUENCE!r}, {TEXT!r}, "
                f"{VALUE!r} or an hcp.Payload: a field with one row per token needs no rule"
            )
        parent = rule.per_unit_of if isinstance(rule, Payload) else None
        if parent is not None:
            above = rules.get(parent)
            if not isinstance(above, Payload) or above.per_unit_of or above.split == "tokens":
                raise ValueError(
                    f"fields[{name!r}].per_unit_of is {parent!r}, expected a payload in fields "
                    'that is split by "whole", "first" or "even"'
                )
    if loss_mask in rules:
        raise ValueError(
            f"fields[{loss_mask!r}] is given, expected none: the loss mask has one row per token"
        )
    return {name: Payload() if rule in AS_BYTES else rule for name, rule in rules.items()}


# ---- what the samples have -----------------------------------------------------------------------


def in_tensors(samples: Iterable[Given], rules: Rules) -> Iterator[Sample]:
    """Yield samples whose values of a sequence are all tensors. ValueError for what is none."""
    for i, sample in enumerate(samples):
        if not isinstance(sample, Mapping) or not sample:
            given = "empty" if isinstance(sample, Mapping) else type(sample).__name__
            raise ValueError(f"samples[{i}] is {given}, expected names and tensors, as a dict")
        others = {name: x for name, x in sample.items() if not isinstance(x, Tensor)}
        made = {name: _in_tensor(x, name, i, rules) for name, x in others.items()}
        for name, x in sample.items():
            if isinstance(x, Tensor) and rules.get(name) in AS_BYTES and not _are_bytes(x):
                raise ValueError(
                    f"samples[{i}][{name!r}] is a tensor {tuple(x.shape)} of {x.dtype}, expected "
                    f"{_FOR_BYTES[str(rules[name])]}"
                )
            if isinstance(x, Tensor) and not _has_rows(x):
                raise ValueError(
                    f"samples[{i}][{name!r}] is nested, sparse, quantized or without data "
                    f"({x.layout}), expected a dense tensor: give each sequence of a nested one a "
                    "sample (unbind)"
                )
        yield {**sample, **made} if made else sample  # type: ignore[dict-item, misc]


def _are_bytes(value: Tensor) -> bool:
    """Whether a value was made into bytes already: samples of ``gather_lengths`` are dispatched."""
    return value.dtype == torch.uint8 and value.dim() == 1


def _has_rows(value: Tensor) -> bool:
    dense = value.layout == torch.strided and not value.is_nested
    return dense and not value.is_meta and not value.is_quantized


def _in_tensor(value: Any, name: str, i: int, rules: Rules) -> Tensor:
    """Make a tensor of a number of Python's or numpy's, as torch.as_tensor does, or of the bytes of
    a string."""
    rule = rules.get(name)
    if rule == TEXT and isinstance(value, str):
        return _bytes_of(value.encode())
    if rule == VALUE and _is_plain(value):
        said = json.dumps(value, ensure_ascii=False)  # escapes would join lone surrogates
        return _bytes_of(said.encode(errors="surrogatepass"))
    number = isinstance(value, float | int) or getattr(value, "shape", None) == ()
    if number and rule == PER_SEQUENCE:
        try:
            return torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            pass  # a text or a date of numpy's, or an integer of more than 64 bits
    raise ValueError(
        f"samples[{i}][{name!r}] is {_shown(value)}, expected "
        + (_FOR_BYTES.get(str(rule)) or _EXPECTED[type(rule)])
        + (_FOR_NUMBERS.format(name) if number and rule is None else "")
    )


_EXPECTED: dict[type, str] = {
    type(None): "a tensor (tokens, ...)",
    str: "a number of at most 64 bits, or a tensor of a fixed shape: the rule of strings is "
    "'text', that of tuples and None 'value'; give other objects a number, such as an index into a "
    "list that every rank has",
    Payload: "a tensor (rows, ...)",
}
"""By the type of a field's rule."""

_FOR_BYTES = {
    TEXT: "a string",
    VALUE: "None, a bool, an int, a float, a string, or a tuple of these",
}

_FOR_NUMBERS = ", or for a value of the whole sequence fields={{{!r}: 'sequence'}}"


def _shown(value: Any) -> str:
    kind, text = type(value).__name__, repr(value)
    said = text if kind in text else f"{kind} {text}"
    return said if len(said) <= 60 else kind


def _bytes_of(given: bytes) -> Tensor:
    return torch.tensor(list(given), dtype=torch.uint8, device="cpu")


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _in_tuples(value: Any) -> Any:
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


def from_bytes(rule: object, rows: Tensor, cu_seqlens: Tensor) -> tuple[Any, ...]:
    """Return the value of each sequence, given the bytes of all of them and their bounds.
    ``rule``: one of AS_BYTES."""
    joined, bounds = bytes(rows.tolist()), cu_seqlens.tolist()
    texts = [
        joined[start:end].decode(errors="surrogatepass")
        for start, end in itertools.pairwise(bounds)
    ]
    return tuple(texts if rule == TEXT else (_in_tuples(json.loads(text)) for text in texts))


def length_of(sample: Sample, i: int, rules: Rules) -> int:
    """Return the number of tokens of ``samples[i]``. ValueError where its fields differ in it."""
    for name in rules:
        if name not in sample:
            raise ValueError(
                f"samples[{i}] has no field {name!r}, expected one as fields= has a rule for it"
            )
    lengths = {
        name: value.shape[0] if value.dim() else 0
        for name, value in sample.items()
        if name not in rules
    }
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"samples[{i}] has fields of {lengths} tokens, expected as many in each: name a field "
            "of another number of rows in fields="
        )
    if not lengths:
        raise ValueError(f"samples[{i}] has no field with a row per token, expected one")
    length = next(iter(lengths.values()))
    if length < 1:
        raise ValueError(f"samples[{i}] has {length} tokens, expected >= 1")
    return length


def tokens_of(samples: Iterable[Given], rules: Rules) -> list[int]:
    """Return the number of tokens of each sample. ValueError for one that is none."""
    return [length_of(sample, i, rules) for i, sample in enumerate(in_tensors(samples, rules))]


def describe(samples: Sequence[Sample], rules: Rules) -> list[list[Any]]:
    """Describe each field: (name, dtype, shape of a row, or of a sequence's value). ValueError
    where samples differ."""
    first: list[list[Any]] = []
    seen: dict[str, Any] = {}
    for i, sample in enumerate(samples):
        for name, value in sample.items():
            if value.requires_grad:
                raise ValueError(
                    f"samples[{i}][{name!r}] requires gradients, expected data: hcp.dispatch gives "
                    "none; carry it by cp.dispatch, which does, or detach it"
                )
        signature = {name: _signature(name, value, rules) for name, value in sample.items()}
        if i > 0 and signature == seen:
            continue
        fields = [_described(name, sample[name], rules.get(name), i) for name in sorted(sample)]
        if i == 0:
            first, seen = fields, signature
        elif fields != first:
            raise ValueError(
                f"samples[{i}] has fields {fields}, expected {first} as samples[0]: a name, a "
                "dtype, and the sizes after the first, which is that of tokens"
            )
    return first


def _signature(name: str, value: Tensor, rules: Rules) -> Any:
    """The parts of a field's description as torch has them, which are quick to compare."""
    first = 0 if rules.get(name) == PER_SEQUENCE else 1
    return value.dtype, value.dim(), value.shape[first:]


def _described(name: str, value: Tensor, rule: str | Payload | None, i: int) -> list[Any]:
    dtype = str(value.dtype).removeprefix("torch.")
    if rule == PER_SEQUENCE:
        return [name, dtype, list(value.shape)]
    if value.dim() == 0:
        raise ValueError(f"samples[{i}][{name!r}] has no dimension, expected a payload (rows, ...)")
    return [name, dtype, list(value.shape[1:])]


def said_of(rule: str | Payload) -> Any:
    """Return a rule in words that JSON can hold."""
    if not isinstance(rule, Payload):
        return rule
    units, tokens = (
        getattr(x, "__qualname__", type(x).__name__) if callable(x) else x
        for x in (rule.units, rule.tokens)
    )
    given = rule.per_unit_of
    return {"split": rule.split, "units": units, "tokens": tokens, "per_unit_of": given}


# ---- payloads ------------------------------------------------------------------------------------


def units_of(sample: Sample, i: int, name: str, rule: Payload) -> list[int] | int:
    """Return the rows of each unit of a payload, or its rows where each is a unit. ValueError
    unless the units are all rows."""
    place, rows = f"samples[{i}][{name!r}]", sample[name].shape[0]
    if rule.units is None:
        return rows
    given = _field_or_result(sample, rule.units, f"fields[{name!r}].units")
    if given.dim() != 1 or given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(
            f"the units of {place} are {tuple(given.shape)} of {given.dtype}, expected (units,) "
            "integers"
        )
    units: list[int] = given.tolist()
    if sum(units) != rows or min(units, default=1) < 1:
        raise ValueError(
            f"{place} has {rows} rows and units of {units[:20]}, expected units of at least one "
            f"row that sum to {rows}"
        )
    return units


def runs_of(sample: Sample, i: int, name: str, rule: Payload, length: int) -> Tensor:
    """Return the tokens that take a payload's rows, as `Takers` has them: int64 (runs, 3) on the
    CPU."""
    assert rule.tokens is not None
    place, rows = f"samples[{i}][{name!r}]", sample[name].shape[0]
    given = _field_or_result(sample, rule.tokens, f"fields[{name!r}].tokens").cpu()
    if given.dtype == torch.bool and given.shape == (length,):
        tokens = given.nonzero()[:, 0]
        counts = torch.full_like(tokens, _each(rows, len(tokens), place, rule))
    else:
        tokens, counts = _counted(given, place, rows, length)
    return _as_runs(tokens, counts)


def _each(rows: int, tokens: int, place: str, rule: Payload) -> int:
    """Return the rows that each token takes, or minus the tokens that take each row."""
    if rows == tokens == 0:
        return 1
    if rows and rows < tokens and tokens % rows == 0:
        if rule.split == "tokens":
            raise ValueError(
                f"{place} has {rows} rows and {tokens} tokens that take them, expected at least "
                'one row for each token under "tokens": use "even", "whole" or "first"'
            )
        return -(tokens // rows)
    if rows == 0 or tokens == 0 or rows % tokens:
        raise ValueError(
            f"{place} has {rows} rows and {tokens} tokens that take them, expected as many rows "
            "for each token, or as many tokens for each row"
        )
    return rows // tokens


def _counted(given: Tensor, place: str, rows: int, length: int) -> tuple[Tensor, Tensor]:
    if given.shape != (rows,) or given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(
            f"the tokens of {place} are {tuple(given.shape)} of {given.dtype}, expected bools "
            f"({length},), or the token of each row: integers ({rows},)"
        )
    given = given.long()
    if rows and (bool((given.diff() < 0).any()) or given[0] < 0 or given[-1] >= length):
        raise ValueError(
            f"the tokens of {place} descend or lie outside of the sequence, expected 0 to "
            f"{length - 1}, none before the one of the row before"
        )
    tokens, counts = torch.unique_consecutive(given, return_counts=True)
    return tokens, counts


def _as_runs(tokens: Tensor, counts: Tensor) -> Tensor:
    if len(tokens) == 0:
        return torch.empty(0, 3, dtype=torch.int64)
    breaks = (tokens.diff() != 1) | (counts.diff() != 0)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), breaks.nonzero()[:, 0] + 1))
    sizes = torch.cat((starts, torch.tensor([len(tokens)]))).diff()
    return torch.stack((tokens[starts], sizes, counts[starts]), 1)


def check_units(runs: Tensor, units: Sequence[int] | int, place: str) -> None:
    """Raise ValueError where a token takes rows of two units."""
    if isinstance(units, int):
        return
    try:
        _core.check_units(units, runs.flatten().tolist())
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _field_or_result(sample: Sample, given: str | Callable[[Sample], Tensor], place: str) -> Tensor:
    if callable(given):
        result = given(sample)
        if not isinstance(result, Tensor):
            raise ValueError(f"{place} returned {type(result).__name__}, expected a tensor")
        return result
    if given not in sample:
        raise ValueError(f"{place} is {given!r}, expected one of {sorted(sample)} or a function")
    return sample[given]


# ---- fields as rows of bytes ---------------------------------------------------------------------


class Field:
    """A field of the samples: one tensor of each."""

    def __init__(self, name: str, dtype: str, shape: Sequence[int], rule: object = None) -> None:
        self.name, self.dtype, self.shape = name, getattr(torch, dtype), tuple(shape)
        self.per_sequence, self.per_token = rule == PER_SEQUENCE, rule is None
        self.row_bytes = math.prod(self.shape) * self.dtype.itemsize

    def to_rows(self, samples: Sequence[Sample], device: torch.device) -> Tensor:
        """Join all samples' rows as bytes: (rows, row_bytes) of uint8."""
        if not samples:
            return torch.empty(0, self.row_bytes, dtype=torch.uint8, device=device)
        values = [sample[self.name] for sample in samples]
        joined = torch.stack(values) if self.per_sequence else torch.cat(values)
        return flat_rows(joined.to(device)).contiguous().view(torch.uint8)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Undo ``to_rows``, for as many rows as there are: (rows, ...)."""
        if self.row_bytes == 0:
            return rows.new_empty(rows.shape[0], *self.shape, dtype=self.dtype)
        return rows.view(self.dtype).reshape(rows.shape[0], *self.shape)
