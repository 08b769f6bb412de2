"""Print the notes of a release: python .github/notes.py v0.2.0

They are the section of CHANGELOG.md that has its version. Ends with an error unless the tag is the
version of hcp/_version.py, and the section says something.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(f"the arguments are {sys.argv[1:]}, expected one tag such as v0.2.0")
    print(notes(sys.argv[1]))


def notes(tag: str) -> str:
    found = re.findall(r'__version__ = "(.*)"', (TREE / "hcp/_version.py").read_text())
    if [tag] != [f"v{version}" for version in found]:
        raise SystemExit(
            f"the tag is {tag}, and hcp/_version.py has {found}, expected the same version: make "
            "the tag by .github/release.py"
        )
    title = rf"(?m)^## \[{re.escape(found[0])}\].*\n((?:(?!## ).*\n?)*)"
    sections = re.findall(title, (TREE / "CHANGELOG.md").read_text())
    if len(sections) != 1 or not sections[0].strip():
        raise SystemExit(f"CHANGELOG.md has {len(sections)} sections [{found[0]}], expected one")
    return str(sections[0]).strip()


if __name__ == "__main__":
    main()
