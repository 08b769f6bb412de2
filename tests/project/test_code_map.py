"""docs/internals/code-map.md has one line for every source file, and names no other."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAP = ROOT / "docs" / "internals" / "code-map.md"
SOURCES = {".py", ".pyi", ".c", ".h", ".cpp", ".cu", ".cuh"}


def test_every_source_file_has_one_line_of_the_code_map() -> None:
    files = [
        str(path.relative_to(ROOT))
        for folder in ("hcp", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SOURCES
    ]
    lines = re.findall(r"^\| `([^`]+)` \| (\S.*) \|$", MAP.read_text(), re.MULTILINE)
    assert files
    named = Counter(path for path, _ in lines)
    assert sorted(set(files) - set(named)) == [], "files without a line"
    assert sorted(set(named) - set(files)) == [], "lines without a file"
    assert [path for path, times in named.items() if times > 1] == []
