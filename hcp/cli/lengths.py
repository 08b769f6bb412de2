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
    "a file of lengths: numbers separated by spaces, commas or lines; CSV, JSON lines or Parquet "
    "(by the package datasets) with a column of lengths or of tokens; Megatron's .idx, whose "
    "documents count; - for standard input"
)


def read_lengths(source: str, column: str | None = None) -> list[int]:
    """Return the lengths that a file tells, in tokens.

    ``column``: that of CSV or Parquet, or the field of JSON lines; by default the first of FIELDS
    that there is. Rows and lines are read one after the other: only their lengths are kept. Raises
    ValueError with the file and the place if it cannot be read so, for a file of no lengths, and
    for Parquet where the package datasets, which reads it, is missing.
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
        return list(of_parquet(source, column))
    if source.endswith(".csv"):
        with Path(source).open(encoding="utf-8-sig", newline="") as lines:
            return list(of_csv(lines, source, column))
    if source.endswith(".jsonl"):
        # Text may hold what else Python takes for the end of a line.
        with Path(source).open(encoding="utf-8-sig", newline="\n") as lines:
            return list(of_json_lines(lines, source, column))
    text = sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        return list(of_json_lines(text.split("\n"), source, column))
    return of_words(text, source)


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


def of_csv(lines: Iterable[str], source: str, column: str | None) -> Iterator[int]:
    """Yield the lengths of CSV: those of a column, or, where no row names columns, of one row of
    lengths or of a row for each."""
    rows = cells(lines, source)
    names = next(rows, [])
    if column is None and all(word.strip().isdecimal() for word in names):
        yield from of_rows_without_names(itertools.chain([names], rows), source)
        return
    name = chosen(dict.fromkeys(names), column, source, "columns")
    if names.count(name) > 1:
        raise ValueError(f"{source} has {names.count(name)} columns {name}, expected one")
    at = names.index(name)
    for n, row in enumerate(rows):
        if len(row) != len(names):
            raise ValueError(
                f"{source}: row {n} has {len(row)} fields, expected {len(names)}: one a column"
            )
        yield length_of(value_of(row[at]), f"{source}: row {n}", name)


def cells(lines: Iterable[str], source: str) -> Iterator[list[str]]:
    """Yield the rows of CSV that are not empty. Cells may hold lists of millions of tokens."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield from filter(None, csv.reader(lines))
    except csv.Error as error:
        raise ValueError(f"{source}: {error}") from None
    finally:
        csv.field_size_limit(before)


def of_rows_without_names(rows: Iterator[list[str]], source: str) -> Iterator[int]:
    first, second = next(rows), next(rows, None)
    if second is not None and len(first) > 1:
        raise ValueError(
            f"{source} has {len(first)} columns and no names for them, expected names in its first "
            "row, or a column alone: lengths over several lines are read from a file whose name "
            "ends in .txt"
        )
    for n, row in enumerate(itertools.chain([first], filter(None, [second]), rows)):
        yield from of_words(",".join(row), f"{source}: row {n}")


def value_of(cell: str) -> Any:
    """The number or the list that a cell of CSV spells, or its text."""
    try:
        found = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    return found if isinstance(found, int | list) else cell


def of_parquet(source: str, column: str | None) -> Iterator[int]:
    """Yield the lengths that a column of Parquet tells."""
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(
            f"{source}: Parquet is read by the package datasets, which is not installed: "
            "python -m pip install datasets"
        )
    row = 0
    for name, values in columns_of(source, column):
        for value in lengths_in(values, f"{source}: row {row}", name):
            yield length_of(value, f"{source}: row {row}", name)
            row += 1


def columns_of(source: str, column: str | None) -> Iterator[tuple[str, Any]]:
    """Yield (its name, some rows of it as an array of Arrow's) of the column that tells lengths."""
    import datasets
    from datasets.exceptions import DatasetsError

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # the error says the same
    with Path(source).open("rb"):
        pass  # OSError where there is none: the package would take the name for a pattern

    def opened(**options: Any) -> Any:
        files = glob.escape(source)
        return datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=True, **options
        )

    try:
        name = chosen(dict.fromkeys(opened().column_names), column, source, "columns")
        read = opened(columns=[name], batch_size=ROWS).with_format("arrow")
        for some in read.iter(ROWS):
            yield name, some.column(name)
    except (ValueError, OverflowError, DatasetsError) as error:  # also Arrow's
        place = "" if str(error).startswith(source) else f"{source}: "
        raise ValueError(f"{place}{' '.join(str(error).split())}") from None


def lengths_in(values: Any, place: str, name: str) -> list[Any]:
    """The values of a column, lists as their lengths: a list of tokens need not be made for it."""
    from pyarrow import compute, types

    kind = values.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        first = values.slice(0, 1).to_pylist()[0]
        length_of([[]] if types.is_nested(kind.value_type) else first, place, name)
        counted: list[Any] = compute.list_value_length(values).to_pylist()
        return counted
    plain: list[Any] = values.to_pylist()
    return plain


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
