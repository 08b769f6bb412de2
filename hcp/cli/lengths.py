"""Read lengths of sequences from the files that trainers have."""

from __future__ import annotations

import array
import itertools
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIELDS = ("length", "lengths", "num_tokens", "n_tokens", "input_ids", "tokens")
"""Fields of a record that tell its length, in the order in which they are looked for: a number of
tokens, or a list of them."""
IDX_MAGIC = b"MMIDIDX\x00\x00"
IDX_HEAD = struct.Struct("<9sQBQQ")

HELP = (
    "a file of lengths: numbers separated by spaces, commas or lines; JSON lines or Parquet with a "
    "field of lengths or of tokens; Megatron's .idx, whose documents count; - for standard input"
)


def read_lengths(source: str, field: str | None = None) -> list[int]:
    """Return the lengths that a file tells, in tokens.

    ``field``: that of a record in JSON lines or Parquet; by default the first of FIELDS that it
    has. Raises ValueError with the file and the place if it cannot be read so, and for a file of no
    lengths.
    """
    lengths = _read(source, field)
    if not lengths:
        raise ValueError(f"{source} has no lengths, expected some")
    return lengths


def _read(source: str, field: str | None) -> list[int]:
    try:
        if source.endswith(".idx"):
            return of_megatron(Path(source).read_bytes(), source)
        if source.endswith(".parquet"):
            return of_parquet(source, field)
        text = sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: {error}") from None
    text = text.removeprefix("\ufeff")
    if source.endswith(".jsonl") or text.lstrip().startswith("{"):
        return of_json_lines(text, source, field)
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
        if not word.isdecimal() or len(word) > 18 or int(word) == 0:
            raise ValueError(f"{source}: [{i}] is {word!r:.40}, expected lengths in tokens, >= 1")
    return [int(word) for word in words]


def of_json_lines(text: str, source: str, field: str | None) -> list[int]:
    # Text may hold what else splitlines takes for the end of a line.
    lines = ((n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip())
    return [of_record(line, f"{source}: line {n}", field) for n, line in lines]


def of_record(line: str, place: str, field: str | None) -> int:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {error}") from None
    if not isinstance(record, dict):
        return length_of(record, place)
    name = chosen(record, field, place)
    return length_of(record[name], place, name)


def of_parquet(source: str, field: str | None) -> list[int]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        advice = "python -m pip install pyarrow"
        raise ValueError(f"{source}: Parquet needs pyarrow: {advice}") from None
    try:
        file = parquet.ParquetFile(source)
        name = chosen(dict.fromkeys(file.schema_arrow.names), field, source)
        values = parquet.read_table(source, columns=[name]).column(name).to_pylist()
    except ArrowException as error:
        raise ValueError(f"{source}: {error}") from None
    return [length_of(value, f"{source}: row {i}", name) for i, value in enumerate(values)]


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


def chosen(record: dict[str, Any], field: str | None, place: str) -> str:
    """Return the field that tells a record's length."""
    names: Sequence[str] = FIELDS if field is None else (field,)
    for name in names:
        if name in record:
            return name
    expected = f"{field!r}" if field is not None else f"one of {', '.join(FIELDS)}, or --field NAME"
    raise ValueError(f"{place} has the fields {', '.join(record)}, expected {expected}")


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
