"""Require the versions of a trainer that were tested; refuse others by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata


def require(package: str, first: str, last: str) -> None:
    """Raise ImportError unless `package` is installed, in a version from `first` to `last`.

    Both are "major.minor" and were tested. Any patch release of them is accepted.
    """
    version = installed(package)
    if version is None or not _minor(first) <= _minor(version) <= _minor(last):
        expected = first if first == last else f"{first} to {last}"
        wanted = f'"{package}>={first},<{_next_minor(last)}"'
        raise _refused(package, version, expected, wanted)


def require_one_of(package: str, version: str | None, tested: Sequence[str]) -> str:
    """Return the `version` of a package, as one of those `tested`.

    Raises ImportError for any other, and for None (not installed). The error says to install the
    first one tested.
    """
    public = version and version.partition("+")[0]  # of 0.3.0+cu130
    if public not in tested:
        raise _refused(package, version, " or ".join(tested), f"{package}=={tested[0]}")
    return str(public)


def installed(package: str) -> str | None:
    """Return the version of a package that pip has installed, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _refused(package: str, version: str | None, expected: str, wanted: str) -> ImportError:
    found = "is not installed" if version is None else f"is {version}"
    return ImportError(
        f"{package} {found}, expected {expected}, which hcp was tested with: pip install {wanted}"
    )


def _minor(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (-1, -1)


def _next_minor(version: str) -> str:
    major, minor = _minor(version)
    return f"{major}.{minor + 1}"
