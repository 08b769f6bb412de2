"""Require the versions of a trainer that were tested; refuse others by name, or warn of them."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import Any

_log = logging.getLogger("hcp")


def require(
    package: str, first: str, last: str, *, seams: Sequence[str] = (), check: str = ""
) -> None:
    """Raise ImportError unless `package` is installed, in a version from `first` to `last`.

    Both are "major.minor" and were tested. Any patch release of them is accepted. With `seams`, a
    later version is accepted where all of them are there, and warned of once.

    `seams`: what hcp uses of the package, as "module:name.name", or "module:name(parameter, ...)"
    for a function that must take these parameters. `check`: what the warning tells to do.
    """
    version = installed(package)
    if version is not None and _minor(first) <= _minor(version) <= _minor(last):
        return
    expected = first if first == last else f"{first} to {last}"
    wanted = f'"{package}>={first},<{_next_minor(last)}"'
    if version is None or not seams or _minor(version) < _minor(first):
        raise _refused(package, version, expected, wanted)
    missing = [seam for seam in seams if not _is_there(seam)]
    if missing:
        raise ImportError(
            f"{package} is {version}, expected {expected}, which hcp was tested with: it has no "
            f"{', '.join(missing)}, which hcp uses: pip install {wanted}"
        )
    _warn_of_a_later(package, version, last, check)


@cache
def _warn_of_a_later(package: str, version: str, last: str, check: str) -> None:
    _log.warning(
        "hcp: %s %s is newer than %s, the last version that hcp was tested with. What hcp uses of "
        "it is there. %s",
        *(package, version, last, check),
    )


def _is_there(seam: str) -> bool:
    module, _, path = seam.partition(":")
    name, _, parameters = path.rstrip(")").partition("(")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    wanted = {parameter.strip() for parameter in parameters.split(",") if parameter.strip()}
    return not wanted or wanted <= set(inspect.signature(found).parameters)


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
