"""Which versions of a trainer an integration was tested with; others are refused by name."""

from __future__ import annotations

import re
from importlib import metadata


def require(package: str, first: str, last: str) -> None:
    """Raise ImportError unless `package` is installed, in a version from `first` to `last`.

    Both are "major.minor", both were tested with, and any patch release of theirs is taken.
    """
    expected = first if first == last else f"{first} to {last}"
    install = f'pip install "{package}>={first},<{_next_minor(last)}"'
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed, expected {expected}: {install}") from None
    if not _minor(first) <= _minor(installed) <= _minor(last):
        raise ImportError(
            f"{package} is {installed}, expected {expected}, which hcp was tested with: {install}"
        )


def _minor(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (-1, -1)


def _next_minor(version: str) -> str:
    major, minor = _minor(version)
    return f"{major}.{minor + 1}"
