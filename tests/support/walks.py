"""Count the Python calls of hcp that something makes: never a time.

    walk = walk_of(lambda: model(rows))
    assert walk.calls <= 100, walk.most()

A call is a frame of a file of hcp that begins or goes on: comprehensions and resumed generators
count, too. Python 3.12 and later run comprehensions without a frame, and have fewer.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import hcp

_FOLDER = str(Path(hcp.__file__).parent)


@dataclass
class Walk:
    functions: Counter[str] = field(default_factory=Counter)
    """Calls by file and function."""
    files: set[str] = field(default_factory=set)
    switches: int = 0
    """How often the next call was in another file than the last one."""

    @property
    def calls(self) -> int:
        return self.functions.total()

    def most(self) -> str:
        """The counts, and the functions with the most calls, for a message."""
        shown = "\n".join(f"  {count:4} {name}" for name, count in self.functions.most_common(30))
        files = len(self.files)
        return f"{self.calls} calls, {files} files, {self.switches} switches\n{shown}"


def walk_of(action: Callable[[], object]) -> Walk:
    """Run the action on this thread, and return the calls that it made."""
    walk, last = Walk(), ""

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal last
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(_FOLDER):
            return
        walk.functions[f"{file[len(_FOLDER) + 1 :]}:{frame.f_code.co_name}"] += 1
        walk.files.add(file)
        walk.switches += file != last
        last = file

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return walk
