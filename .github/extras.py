"""Print what extras of pyproject.toml require, one line each, without building hcp.

python .github/extras.py demo test | python -m pip install --requirement /dev/stdin
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

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


if __name__ == "__main__":
    print(*dict.fromkeys(line for extra in sys.argv[1:] for line in required(extra)), sep="\n")
