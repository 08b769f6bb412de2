"""Lengths of sequences from the files that trainers have."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import re
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hcp.cli import lengths
from hcp.cli.commands import main
from hcp.cli.lengths import read_lengths

Capture = pytest.CaptureFixture[str]


def index_of(documents: Sequence[Sequence[int]]) -> bytes:
    """An index of Megatron's IndexedDataset: documents of sequences."""
    lengths = [length for document in documents for length in document]
    bounds = [0, *itertools.accumulate(map(len, documents))]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(bounds))
    pointers = [0] * len(lengths)
    return head + struct.pack(
        f"<{len(lengths)}i{len(lengths)}q{len(bounds)}q", *lengths, *pointers, *bounds
    )


@pytest.mark.parametrize(
    ("name", "content", "field", "expected"),
    [
        ("l.txt", b"3, 1\n[2]", None, [3, 1, 2]),
        ("l.jsonl", b'{"length": 3}\n\n{"length": 1}', None, [3, 1]),
        ("l.jsonl", b'{"input_ids": [5, 6, 7], "text": "x"}', None, [3]),
        ("l.jsonl", b"3\n[4, 4]\n", None, [3, 2]),
        ("l.jsonl", b'{"length": 3, "own": [1]}', "own", [1]),
        ("l.jsonl", '{"length": 3, "text": "\u2028\x85"}\r\n[1]\n'.encode(), None, [3, 1]),
        ("l.idx", index_of([[3], [4, 5], []]), None, [3, 9]),
        ("l.csv", b"\xef\xbb\xbf3\r\n1\r\n", None, [3, 1]),
        ("l.csv", b"3,1\r\n", None, [3, 1]),
        ("l.csv", b"\xef\xbb\xbfid,length\n1,3\n\n2,1\n", None, [3, 1]),
        ("l.jsonl", b'\xef\xbb\xbf{"length": 3}\r\n', None, [3]),
        ("l.json", b'\xef\xbb\xbf{"length": 3}', None, [3]),
        ("l.jsonl", b'{"tokens": ["a", "b"]}', None, [2]),
    ],
)
def test_lengths_are_read(
    name: str, content: bytes, field: str | None, expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_lengths(str(tmp_path / name), field) == expected


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("l.txt", b"3 -1", "[1] is '-1', expected lengths in tokens"),
        ("l.jsonl", b'{"length": 3}\n{"text": "x"}', "line 2 has the fields text, expected one of"),
        ("l.jsonl", b'{"length": 0}', "line 1 is '0', expected a number of tokens >= 1"),
        ("l.jsonl", b'{"tokens": "some text"}', "text has no length before a tokenizer"),
        ("l.jsonl", b"{", "line 1: Expecting"),
        ("l.json", b"[[1, 2, 3], [4, 5]]", "has 3 lists, expected one list of lengths"),
        ("l.json", b"[1, 2, 3]\n[4, 5]", "has 2 lists, expected one list of lengths"),
        ("l.txt", b"3 0 1", "[1] is '0', expected lengths in tokens, >= 1"),
        ("l.jsonl", b'{"lengths": [100, 200]}', "line 1 is '[100, 200]', expected a number of tok"),
        ("l.jsonl", b'{"num_tokens": [1]}', "line 1 is '[1]', expected a number of tokens"),
        ("l.jsonl", b'{"input_ids": [[1, 2, 3]]}', "line 1 is a list of lists or objects"),
        ("l.jsonl", b"1" * 30, "line 1 is '111111"),
        ("l.jsonl", b"[" * 100_000, "line 1: maximum recursion depth exceeded"),
        ("l.jsonl", b'{"length":' + b'{"a":' * 980 + b"1" + b"}" * 981, "line 1"),
        ("l.jsonl", b"1" * 5000, "line 1: Exceeds the limit"),
        ("l.txt", b"3 " + b"1" * 5000, "[1] is '111111"),
        ("l.idx", b"x", "does not begin as an index"),
        ("l.idx", index_of([[3], [4]])[:-1], "expected at least"),
        ("l.idx", index_of([[3], [4]])[:-8] + struct.pack("<q", 1), "is damaged: lengths from 3"),
        (
            "l.idx",
            index_of([[3], [4]])[:-16] + struct.pack("<2q", 2, 1),
            "is damaged: lengths from",
        ),
        ("l.idx", index_of([[3], [-4]]), "is damaged: lengths from -4"),
    ],
)
def test_what_has_no_lengths_is_refused_with_its_place(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        read_lengths(str(tmp_path / name))
    assert name in str(error.value)


def test_lengths_of_an_index_that_megatron_writes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = datasets.IndexedDatasetBuilder(str(tmp_path / "data.bin"))
    builder.add_document(torch.arange(9), [4, 5])
    builder.add_document(torch.arange(2), [2])
    builder.finalize(str(tmp_path / "data.idx"))
    assert read_lengths(str(tmp_path / "data.idx")) == [9, 2]


# ---- columns of tables ---------------------------------------------------------------------------

COLUMNS: dict[str, list[Any]] = {
    "text": ["a", "b, c", "d"],
    "input_ids": [[1, 2, 3], [4], [5, 6]],
    "n": [7, 8, 9],
    "pairs": [[[1], [2]], [[3]], [[4]]],
    "length": [[1], [2], [3]],
    "gaps": [[1], None, [2]],
}


def write_table(path: Path, columns: dict[str, list[Any]], **options: Any) -> str:
    """Write columns as the file's name ends. Lists in CSV are spelled as JSON."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            rows = zip(*columns.values(), strict=True)
            writer.writerows([json.dumps(x) if isinstance(x, list) else x for x in r] for r in rows)
        return str(path)
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path, **options)
    return str(path)


def needs_datasets(name: str) -> None:
    """CSV needs nothing but Python."""
    if name.endswith("parquet"):
        pytest.importorskip("datasets")


def without(*names: str) -> dict[str, list[Any]]:
    return {name: column for name, column in COLUMNS.items() if name not in names}


@pytest.mark.parametrize("name", ["data.csv", "data.parquet", "of [some] kind*.parquet"])
def test_lengths_of_a_column_of_a_table(name: str, tmp_path: Path) -> None:
    needs_datasets(name)
    file = write_table(tmp_path / name, without("length"))
    assert read_lengths(file) == [3, 1, 2]
    assert read_lengths(file, "n") == [7, 8, 9]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("tokens", "has the columns text, input_ids, n, pairs, length, gaps, expected 'tokens'"),
        ("text", "row 0 is 'a', expected a number of tokens >= 1 or a list of tokens (text has no"),
        ("pairs", "row 0 is a list of lists or objects, expected a list of tokens"),
        ("length", "row 0 is '[1]', expected a number of tokens, as a record is one sequence"),
        ("gaps", "row 1 is '"),
    ],
)
def test_a_column_without_lengths_is_refused_with_its_row(
    suffix: str, column: str, said: str, tmp_path: Path
) -> None:
    needs_datasets(suffix)
    file = write_table(tmp_path / f"data.{suffix}", COLUMNS)
    with pytest.raises(ValueError, match=re.escape(f"data.{suffix}") + ".*" + re.escape(said)):
        read_lengths(file, column)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_that_has_no_column_of_that_name_lists_those_that_it_has(
    suffix: str, tmp_path: Path, capsys: Capture
) -> None:
    needs_datasets(suffix)
    file = write_table(tmp_path / f"data.{suffix}", {"text": ["a"], "n": [7]})
    given = ["--ranks", "2", "--max-tokens-per-rank", "1K"]
    assert main(["simulate", "--lengths", file, *given]) == 1
    expected = "has the columns text, n, expected one of length, lengths, num_tokens, n_tokens, "
    assert f"{expected}input_ids, tokens, or --column NAME\n" in capsys.readouterr().err
    for option in ("--column", "--field"):
        assert main(["plan", file, option, "n", *given]) == 0
        assert "1 sequences, 7 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ragged.csv", b"n,m\n1,2\n3,4,5,6\n"),
        ("more.csv", b"n,m\n1,2,3\n4,5,6\n"),
        ("latin.csv", b"n,m\n1,\xe4\n"),
        ("nul.csv", b"\xff\xfe\x00"),
        ("empty.csv", b""),
        ("empty.parquet", b""),
        ("cut.parquet", None),
    ],
)
def test_a_damaged_table_is_refused_with_its_path(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    needs_datasets(name)
    if content is None:
        content = Path(write_table(tmp_path / name, COLUMNS)).read_bytes()[:-4]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))):
        read_lengths(str(tmp_path / name), "n")


@pytest.mark.parametrize("name", ["none.parquet", "none.csv"])
def test_a_table_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    needs_datasets(name)
    with pytest.raises(ValueError, match=f"{name}: .*No such file or directory"):
        read_lengths(str(tmp_path / name))


def test_a_table_without_rows_has_no_lengths(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("n\n")
    with pytest.raises(ValueError, match=r"rows\.csv has no lengths"):
        read_lengths(str(tmp_path / "rows.csv"), "n")


def test_parquet_needs_the_package_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name)
    )
    file = tmp_path / "data.parquet"
    file.write_bytes(b"n\n7\n")
    given = ["--ranks", "2", "--max-tokens-per-rank", "99"]
    assert main(["plan", str(file), "--column", "n", *given]) == 1
    assert capsys.readouterr().err == (
        f"hcp plan: error: {file}: Parquet is read by the package datasets, "
        "which is not installed: python -m pip install datasets\n"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("512,128\n256,64\n", "has 2 columns and no names for them, expected names in its first"),
        ("length,length\n1,2\n", "has 2 columns length, expected one"),
        ("id,length\n" + "1,5\n" * 1500 + "1,x\n", "row 1500 is 'x', expected a number of tokens"),
        ("id,length\n1,5,6\n", "row 0 has 3 fields, expected 2: one a column"),
        ("id,length\n1\n", "row 0 has 1 fields, expected 2: one a column"),
        ("3\n4,5\n007\n", "row 2: [0] is '007', expected lengths in tokens"),
    ],
)
def test_csv_that_tells_no_lengths_is_refused_with_its_row(
    content: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "data.csv"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"data\.csv:? .*" + re.escape(said)):
        read_lengths(str(file))


def test_a_nested_list_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    file = write_table(tmp_path / "data.parquet", {"tokens": [[], [[1], [2]]]})
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="is a list of lists or objects"):
        read_lengths(file)


def test_a_cell_of_csv_may_be_long(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    file = write_table(tmp_path / "data.csv", {"tokens": [[1] * 90_000]})
    assert read_lengths(file) == [90_000]
    assert csv.field_size_limit() == limit


def test_only_a_part_of_a_big_table_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come in parts, and their tokens never become Python's."""
    pytest.importorskip("datasets")
    rows = 400
    tokens: list[Any] = [[1] * (1 + i) for i in range(rows)]
    columns = {"input_ids": tokens, "text": ["x" * 9000] * rows}
    file = write_table(tmp_path / "data.parquet", columns, row_group_size=rows)
    monkeypatch.setattr(lengths, "ROWS", 7)
    parts = [(name, len(some)) for name, some in lengths.columns_of(file, None)]
    assert {name for name, _ in parts} == {"input_ids"}
    assert max(count for _, count in parts) <= 7
    tracemalloc.start()
    assert read_lengths(file) == [1 + i for i in range(rows)]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000, most


def test_json_lines_are_read_one_after_the_other(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    line = json.dumps({"input_ids": list(range(5000))}) + "\n"
    file.write_text(line * 60)
    read_lengths(str(file))  # imports what it needs
    tracemalloc.start()
    assert read_lengths(str(file)) == [5000] * 60
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < file.stat().st_size / 4, most


# ---- commands ------------------------------------------------------------------------------------


def test_simulate_takes_lengths_of_ones_own(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "own.txt"
    file.write_text(" ".join(str(1 + 37 * i % 900) for i in range(50)))
    given = ["--lengths", str(file), "--ranks", "4", "--max-tokens-per-rank", "512"]
    assert main(["simulate", *given, "--sequences", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "2 batches of 20 own.txt sequences" in found["says"]
    assert found["results"]["hcp"]["speedup"] > found["results"]["static CP"]["speedup"] == 1.0
    file.write_text("")
    assert main(["simulate", *given]) == 1
    assert "own.txt has no lengths" in capsys.readouterr().err
    assert main(["plan", str(file), *given[2:]]) == 1
    assert "own.txt has no lengths" in capsys.readouterr().err
