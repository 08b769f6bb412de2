"""Make a release: python .github/release.py 0.2.0

It writes the version to hcp/_version.py, CITATION.cff and docs/card.yaml, gives the unreleased
section of CHANGELOG.md that name and today's date, commits, and sets the tag v0.2.0. Nothing is
pushed: the workflow of releases builds and publishes what is pushed as a tag.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
UNRELEASED = "## [Unreleased]\n"


def main() -> None:
    if len(sys.argv) != 2 or not re.fullmatch(r"\d+\.\d+\.\d+", sys.argv[1]):
        raise SystemExit(f"the arguments are {sys.argv[1:]}, expected one version such as 0.2.0")
    version = sys.argv[1]
    if git("status", "--porcelain"):
        raise SystemExit("the tree has changes that are not committed, expected none: commit them")
    if f"v{version}" in git("tag").split():
        raise SystemExit(f"the tag v{version} exists, expected a new version")
    today = datetime.now(UTC).date().isoformat()
    texts = {
        "hcp/_version.py": replaced(
            "hcp/_version.py", r'__version__ = ".*"', f'__version__ = "{version}"'
        ),
        "CITATION.cff": replaced("CITATION.cff", r"(?m)^version: .*$", f"version: {version}"),
        "docs/card.yaml": replaced("docs/card.yaml", r"(?m)^version: .*$", f"version: {version}"),
        "CHANGELOG.md": released(f"## [{version}] - {today}\n"),
    }
    for name, text in texts.items():
        (TREE / name).write_text(text)
    git("commit", "--quiet", "--all", "--message", f"hcp {version}")
    git("tag", "--annotate", f"v{version}", "--message", f"hcp {version}")
    print(f"committed and tagged v{version}: git push --follow-tags")


def replaced(name: str, pattern: str, text: str) -> str:
    new, count = re.subn(pattern, text, (TREE / name).read_text())
    if count != 1:
        raise SystemExit(f"{name} has {pattern} {count} times, expected once")
    return new


def released(title: str) -> str:
    """The changes, with the unreleased ones under a title, and nothing unreleased."""
    before, found, after = (TREE / "CHANGELOG.md").read_text().partition(UNRELEASED)
    section = re.split(r"(?m)^## ", after)[0].strip()
    if not found or not section:
        raise SystemExit("CHANGELOG.md has nothing under [Unreleased], expected what changed")
    return f"{before}{UNRELEASED}\n{title}{after}"


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=TREE, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main()
