"""Read lengths of sequences from the files that trainers have."""

from __future__ import annotations

import array
import csv
import glob
import importlib.util
import itertools
import json
import logging
import struct
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FIELDS = ("length", "lengths", "num_tokens", "n_tokens", "input_ids", "tokens")
"""Columns, or fields of a record, that tell its length, in the order in which they are looked for:
a number of tokens, or a list of them."""
ROWS = 1000
"""Rows of a table that are in memory at once."""
IDX_MAGIC = b"MMIDIDX\x00\x00"
IDX_HEAD = struct.Struct("<9sQBQQ")

HELP = (
    "a file of lengths: numbers separated by spaces, commas or lines; CSV, Parquet or JSON lines "
    "with a column of lengths or of tokens; Megatron's .idx, whose documents count; - for standard "
    "input"
)


def read_lengths(source: str, column: str | None = None) -> list[int]:
    """Return the lengths that a file tells, in tokens.

    ``column``: that of CSV or Parquet, or the field of JSON lines; by default the first of FIELDS
    that there is. Rows and lines are read one after the other: only their lengths are kept. Raises
    ValueError with the file and the place if it cannot be read so, for a file of no lengths, and
    for CSV with columns and Parquet where the package datasets, which reads them, is missing.
    """
    try:
        lengths = _read(source, column)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: {error}") from None
    if not lengths:
        raise ValueError(f"{source} has no lengths, expected some")
    return lengths


def _read(source: str, column: str | None) -> list[int]:
    if source.endswith(".idx"):
        return of_megatron(Path(source).read_bytes(), source)
    if source.endswith(".parquet"):
        return list(of_table("parquet", source, column))
    if source.endswith(".csv") and (column is not None or has_header(source)):
        return list(of_table("csv", source, column))
    if source.endswith(".jsonl"):
        # Text may hold what else Python takes for the end of a line.
        with Path(source).open(encoding="utf-8-sig", newline="\n") as lines:
            return list(of_json_lines(lines, source, column))
    text = sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        return list(of_json_lines(text.split("\n"), source, column))
    return of_words(text, source)


def has_header(source: str) -> bool:
    """Whether the first line of CSV has something else than numbers."""
    return not all(word.strip().isdecimal() for word in header_of(source))


def header_of(source: str) -> list[str]:
    with Path(source).open(encoding="utf-8-sig", newline="") as file:
        try:
            return next(csv.reader(file), [])
        except csv.Error as error:
            raise ValueError(f"{source}: {error}") from None


def of_words(text: str, source: str) -> list[int]:
    if text.count("[") > 1:
        raise ValueError(
            f"{source} has {text.count('[')} lists, expected one list of lengths: lists of tokens, "
            "one a line, are read from a file whose name ends in .jsonl"
        )
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    for i, word in enumerate(words):
        # Python makes no int of thousands of digits.
        if not word.isdecimal() or len(word) > 18 or word.startswith("0"):
            raise ValueError(
                f"{source}: [{i}] is {word!r:.40}, expected lengths in tokens, >= 1, without "
                "commas in them or zeros before them"
            )
    return [int(word) for word in words]


def of_json_lines(lines: Iterable[str], source: str, field: str | None) -> Iterator[int]:
    for n, line in enumerate(lines, 1):
        if line.strip():
            yield of_record(line, f"{source}: line {n}", field)


def of_record(line: str, place: str, field: str | None) -> int:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {error}") from None
    if not isinstance(record, dict):
        return length_of(record, place)
    name = chosen(record, field, place)
    return length_of(record[name], place, name)


# ---- tables --------------------------------------------------------------------------------------


def of_table(kind: str, source: str, column: str | None) -> Iterator[int]:
    """Yield the lengths that a column tells. ``kind``: "csv" or "parquet"."""
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(
            f"{source}: columns of CSV and Parquet are read by the package datasets, which is not "
            "installed: python -m pip install datasets"
        )
    row = 0
    for name, values in columns_of(kind, source, column):
        for value in lengths_in(values, f"{source}: row {row}", name):
            yield length_of(value, f"{source}: row {row}", name)
            row += 1


def columns_of(kind: str, source: str, column: str | None) -> Iterator[tuple[str, Any]]:
    """Yield (its name, some rows of it as an array of Arrow's) of the column that tells lengths."""
    import datasets
    from datasets.exceptions import DatasetsError

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # the error says the same
    with Path(source).open("rb"):
        pass  # OSError where there is none: the package would take the name for a pattern

    def opened(**options: Any) -> Any:
        files = glob.escape(source)
        return datasets.load_dataset(
            kind, data_files=files, split="train", streaming=True, **options
        )

    try:
        names = header_of(source) if kind == "csv" else opened().column_names
        name = chosen(dict.fromkeys(names), column, source, "columns")
        options: dict[str, Any] = {"columns": [name], "batch_size": ROWS}
        if kind == "csv":
            options = {"index_col": False, "chunksize": ROWS}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header")  # rows with more fields than that
            for some in opened(**options).with_format("arrow").iter(ROWS):
                yield name, some.column(name)
    except (ValueError, OverflowError, DatasetsError, Warning) as error:  # also pandas' and Arrow's
        place = "" if str(error).startswith(source) else f"{source}: "
        raise ValueError(f"{place}{' '.join(str(error).split())}") from None


def lengths_in(values: Any, place: str, name: str) -> list[Any]:
    """The values of a column, lists as their lengths: a list of tokens need not be made for it."""
    from pyarrow import compute, types

    kind = values.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        length_of(values.slice(0, 1).to_pylist()[0], place, name)
        counted: list[Any] = compute.list_value_length(values).to_pylist()
        return counted
    found = values.to_pylist()
    return [as_list(value) if isinstance(value, str) else value for value in found]


def as_list(text: str) -> Any:
    """The list that a cell of CSV spells, or the text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, list) else text


# ---- Megatron's index ----------------------------------------------------------------------------


def of_megatron(data: bytes, source: str) -> list[int]:
    """Return the lengths of the documents in an index of Megatron-Core's IndexedDataset."""
    head = data[: IDX_HEAD.size]
    if len(head) < IDX_HEAD.size or not head.startswith(IDX_MAGIC):
        raise ValueError(f"{source} does not begin as an index of Megatron's IndexedDataset")
    _, version, _, sequences, bounds = IDX_HEAD.unpack(head)
    if version != 1:
        raise ValueError(f"{source} has version {version}, expected 1")
    of_bounds = IDX_HEAD.size + (4 + 8) * sequences
    if len(data) < of_bounds + 8 * bounds:
        expected = of_bounds + 8 * bounds
        raise ValueError(f"{source} has {len(data)} bytes, expected at least {expected}")
    own = array.array("i", data[IDX_HEAD.size : IDX_HEAD.size + 4 * sequences])
    ends = array.array("q", data[of_bounds : of_bounds + 8 * bounds])
    if sys.byteorder == "big":
        own.byteswap()
        ends.byteswap()
    in_order = list(ends) == sorted(ends) and [*ends[:1], *ends[-1:]] == [0, sequences]
    if min(own, default=0) < 0 or not in_order:
        raise ValueError(
            f"{source} is damaged: lengths from {min(own, default=0)}, bounds of documents from "
            f"{min(ends, default=0)} to {max(ends, default=0)}, expected lengths >= 0 and bounds "
            f"that go up from 0 to its {sequences} sequences"
        )
    documents = (sum(own[a:b]) for a, b in itertools.pairwise(ends))
    return [length for length in documents if length > 0]


# ---- values --------------------------------------------------------------------------------------


def chosen(record: dict[str, Any], field: str | None, place: str, what: str = "fields") -> str:
    """Return the field of a record, or the column of a table, that tells lengths."""
    names: Sequence[str] = FIELDS if field is None else (field,)
    for name in names:
        if name in record:
            return name
    expected = (
        f"{field!r}" if field is not None else f"one of {', '.join(FIELDS)}, or --column NAME"
    )
    raise ValueError(f"{place} has the {what} {', '.join(record)}, expected {expected}")


def shown(value: Any) -> str:
    """A value in a message. Objects in objects may be too deep to be written."""
    return "an object" if isinstance(value, dict) else repr(str(value)[:40])


def length_of(value: Any, place: str, name: str = "") -> int:
    """`name`: of the field."""
    if isinstance(value, list):
        if "len" in name or name.startswith(("n_", "num_")):
            raise ValueError(
                f"{place} is {shown(value)}, expected a number of tokens, as a record is one "
                "sequence: write a line for each"
            )
        if any(isinstance(token, list | dict) for token in value):
            raise ValueError(f"{place} is a list of lists or objects, expected a list of tokens")
        value = len(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 10**18:
        raise ValueError(
            f"{place} is {shown(value)}, expected a number of tokens >= 1 or a list of tokens "
            "(text has no length before a tokenizer)"
        )
    return value
