"""docs/internals/code-map.md has one line for every folder of sources, and names no other. What a
file is for stands in its first line, which `house.py --files` prints."""

from __future__ import annotations

import re
from pathlib import Path

import house

MAP = house.ROOT / "docs" / "internals" / "code-map.md"


def test_every_folder_of_sources_has_one_line_of_the_code_map() -> None:
    folders = {f"{path.parent}/" for path, _ in house.first_lines(house.ROOT)}
    named = re.findall(r"^\| `([^`]+/)` \| \S.* \|$", MAP.read_text(), re.MULTILINE)
    assert len(folders) > 20
    assert sorted(named) == sorted(folders)


def test_every_file_says_in_its_first_line_what_it_is_for() -> None:
    silent = [str(path) for path, line in house.first_lines(house.ROOT) if len(line) < 10]
    assert silent == []


def test_first_lines_are_those_of_docstrings_and_comments(tmp_path: Path) -> None:
    folder = tmp_path / "csrc" / "core"
    folder.mkdir(parents=True)
    (tmp_path / "hcp").mkdir()
    (tmp_path / "hcp" / "a.py").write_text('"""Move rows.\n\nMore."""\n')
    (tmp_path / "hcp" / "b.py").write_text("import os\n")
    (folder / "c.c").write_text("/* c.c - cut sequences. */\n")
    (folder / "d.cpp").write_text("// d.cpp - sum rows.\n")
    assert [line for _, line in house.first_lines(tmp_path)] == [
        "Cut sequences",
        "Sum rows",
        "Move rows",
        "",
    ]
