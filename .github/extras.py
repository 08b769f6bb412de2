"""Print what extras of pyproject.toml require, one line each, without building hcp.

python .github/extras.py demo test | python -m pip install --requirement /dev/stdin
python .github/extras.py --package torch --edge oldest

--edge says in which version: the oldest that hcp was tested with, the last one (pinned), or the
newest that pip finds. Packages that hcp/_versions.py does not name have no edge.
"""

from __future__ import annotations

import argparse
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path

TESTED: dict[str, tuple[str, ...]] = runpy.run_path("hcp/_versions.py")["TESTED"]
EXTRAS = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]


def required(extra: str) -> Iterator[str]:
    """The requirements of an extra, and of those that it names."""
    for line in EXTRAS[extra]:
        own = re.fullmatch(r"hcp-torch\[(.+)\]", line)
        if own is None:
            yield line
        else:
            for name in own[1].split(","):
                yield from required(name)


def at(edge: str, line: str) -> str:
    """A requirement in the version of an edge."""
    name = re.match(r"[\w-]+", line)
    if edge == "newest" or name is None or name[0] not in TESTED:
        return line
    _, semicolon, marker = line.partition(";")
    return f"{name[0]}=={TESTED[name[0]][0 if edge == 'oldest' else -1]}{semicolon}{marker}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=", ".join(EXTRAS))
    parser.add_argument("--package", nargs="+", default=[], choices=[*TESTED], metavar="NAME")
    parser.add_argument("--edge", default="pinned", choices=["oldest", "pinned", "newest"])
    args = parser.parse_args()
    if unknown := [extra for extra in args.extras if extra not in EXTRAS]:
        parser.error(f"pyproject.toml has no extra {unknown}, expected some of {[*EXTRAS]}")
    lines = [line for extra in args.extras for line in required(extra)]
    print(*dict.fromkeys(at(args.edge, line) for line in [*lines, *args.package]), sep="\n")


if __name__ == "__main__":
    main()
