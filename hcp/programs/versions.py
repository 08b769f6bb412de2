"""Require the versions of a trainer that were tested.

Older ones are refused by name. A newer one is taken with a warning if what hcp calls of it (its
seams) is there:

    require("lightning", "2.6", "2.6", seams=["lightning.pytorch.strategies:DDPStrategy.setup"],
            check="Compare losses.")
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Sequence
from importlib import metadata

_log = logging.getLogger("hcp")


def require(
    package: str,
    first: str,
    last: str,
    *,
    seams: Sequence[str] = (),
    check: str = "",
    needed_by: str | None = None,
) -> None:
    """Raise ImportError unless `package` is installed, in a version from `first` to `last`.

    Both are "major.minor" and were tested. Any patch release of them is accepted. A newer version
    is accepted with `seams`, see `accept_untested`. `needed_by`: the package of hcp that cannot be
    imported without it; `python -m` then prints the error as one line.
    """
    version = installed(package)
    wanted = f'"{package}>={first},<{_next_minor(last)}"'
    expected = first if first == last else f"{first} to {last}"
    if version is not None and seams and _minor(version) > _minor(last):
        accept_untested(package, version, expected, seams, check, wanted)
    elif version is None or not _minor(first) <= _minor(version) <= _minor(last):
        raise _refused(package, version, expected, wanted, needed_by)


def require_one_of(
    package: str,
    version: str | None,
    tested: Sequence[str],
    *,
    seams: Sequence[str] = (),
    check: str = "",
    needed_by: str | None = None,
) -> str:
    """Return the `version` of a package, as one of those `tested`, in ascending order.

    Others that are newer than the first one tested are accepted with `seams`, see
    `accept_untested`. Raises ImportError for the rest, and for None (not installed). The error says
    to install the first one tested. `needed_by`: see `require`.
    """
    public = version and version.partition("+")[0]  # of 0.3.0+cu130
    wanted, expected = f"{package}=={tested[0]}", " or ".join(tested)
    if public in tested:
        return str(public)
    if not public or not seams or numbers(public) <= numbers(tested[0]):
        raise _refused(package, version, expected, wanted, needed_by)
    accept_untested(package, public, expected, seams, check, wanted)
    return str(public)


def installed(package: str) -> str | None:
    """Return the version of a package that pip has installed, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def accept_untested(
    package: str, version: str, expected: str, seams: Sequence[str], check: str, wanted: str
) -> None:
    """Warn, once, of a version that hcp was not tested with. `expected` names those that it was.

    `seams`: what hcp calls or overrides, each "module:name.name(argument, argument)"; the arguments
    in parentheses are those that hcp passes by name. `check`: a sentence that says what to check.
    `wanted`: what pip should install if a seam is missing, which raises ImportError.
    """
    lost = [seam for seam in seams if not has_seam(seam)]
    if lost:
        raise ImportError(
            f"{package} is {version}, expected {expected}, which hcp was tested with: it has no "
            f"{', '.join(lost)}, which hcp uses: pip install {wanted}"
        )
    _warn_of(package, version, expected, check)


def has_seam(seam: str) -> bool:
    """Whether "module:name.name(argument, ...)" can be imported and takes these arguments."""
    parts = re.fullmatch(r"([\w.]+):([\w.]+)(?:\(([\w, ]*)\))?", seam)
    if parts is None:
        raise ValueError(f"the seam is {seam!r}, expected 'module:name.name(argument, ...)'")
    module, names, arguments = parts.groups()
    try:
        found = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return not arguments or _takes(found, arguments.replace(" ", "").split(","))


def _takes(function: object, arguments: Sequence[str]) -> bool:
    if not callable(function):
        return False
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return True
    return set(arguments) <= set(parameters)


_warned: set[str] = set()


def _warn_of(package: str, version: str, expected: str, check: str) -> None:
    if package in _warned:
        return
    _warned.add(package)
    _log.warning(
        "hcp: %s is %s, and hcp was tested with %s. What hcp uses of it is there. %s",
        *(package, version, expected, check),
    )


def _refused(
    package: str, version: str | None, expected: str, wanted: str, needed_by: str | None
) -> ImportError:
    found = "is not installed" if version is None else f"is {version}"
    return ImportError(
        f"{package} {found}, expected {expected}, which hcp was tested with: pip install {wanted}",
        name=needed_by,
    )


def _minor(version: str) -> tuple[int, int]:
    release = re.match(r"(\d+)\.(\d+)", version)
    return (int(release[1]), int(release[2])) if release else (-1, -1)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, to compare versions: (0, 3, 0) of 0.3.0+cu130."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in release[0].split(".")) if release else (-1,)


def _next_minor(version: str) -> str:
    major, minor = _minor(version)
    return f"{major}.{minor + 1}"
