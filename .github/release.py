"""Make a release: python .github/release.py 0.2.0

It writes the version to hcp/_version.py, CITATION.cff, docs/card.yaml, and the minor version to
SECURITY.md, docs/reference/support.md and csrc/include/hcp/hcp.h. CITATION.cff also gets today's
date, and the address of the repository where the remote `origin` has one. It gives the unreleased
section of CHANGELOG.md that name and date, commits, and sets the tag v0.2.0. Nothing is pushed: the
workflow of releases builds and publishes what is pushed as a tag.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
UNRELEASED = "## [Unreleased]\n"
HEADER = "csrc/include/hcp/hcp.h"
NEWEST = r"newest release, \d+\.\d+"


def main() -> None:
    if len(sys.argv) != 2 or not re.fullmatch(r"\d+\.\d+\.\d+", sys.argv[1]):
        raise SystemExit(f"the arguments are {sys.argv[1:]}, expected one version such as 0.2.0")
    version = sys.argv[1]
    if git("status", "--porcelain"):
        raise SystemExit("the tree has changes that are not committed, expected none: commit them")
    if f"v{version}" in git("tag").split():
        raise SystemExit(f"the tag v{version} exists, expected a new version")
    today = datetime.now(UTC).date().isoformat()
    minor = version.rpartition(".")[0]
    major, _, of_major = minor.partition(".")
    texts = {
        "hcp/_version.py": replaced(
            "hcp/_version.py", r'__version__ = ".*"', f'__version__ = "{version}"'
        ),
        "CITATION.cff": replaced(
            "CITATION.cff",
            r"(?m)^version: .*\n(?:(?:date-released|repository-code): .*\n)*",
            f"version: {version}\ndate-released: {today}\n{repository()}",
        ),
        "docs/card.yaml": replaced("docs/card.yaml", r"(?m)^version: .*$", f"version: {version}"),
        "SECURITY.md": replaced("SECURITY.md", NEWEST, f"newest release, {minor}"),
        "docs/reference/support.md": replaced(
            "docs/reference/support.md", NEWEST, f"newest release, {minor}"
        ),
        HEADER: replaced(
            HEADER,
            r"(?m)^#define HCP_VERSION_MAJOR \d+\n#define HCP_VERSION_MINOR \d+$",
            f"#define HCP_VERSION_MAJOR {major}\n#define HCP_VERSION_MINOR {of_major}",
        ),
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


def repository() -> str:
    """CITATION.cff's line of the address, or nothing where the tree has no remote on the web."""
    if "origin" not in git("remote").split():
        return ""
    remote = git("remote", "get-url", "origin").strip()
    host = re.fullmatch(r"(?:https://(?:[^@/]+@)?|(?:ssh://)?git@)([^/:]+)[:/](.+)", remote)
    if host is None:
        return ""
    return f'repository-code: "https://{host[1]}/{host[2].removesuffix(".git")}"\n'


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
