"""The versions of other packages that hcp was tested with, and what it does with others.

    require("lightning", ["lightning.pytorch:LightningModule.log"], check="Compare losses.")

One that is older than all of them is refused by name. Any other is taken, with one warning, if what
hcp calls of it (its seams) is there. If not, it is refused by what it lacks.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Sequence
from importlib import metadata

TESTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    "transformers": ("5.6.2", "5.12.1", "5.17.0", "5.23.0", "5.24.0"),
    "accelerate": ("1.11.0", "1.15.0"),
    "trl": ("0.24.0", "1.16.0"),
    "peft": ("0.18.1", "0.21.2"),
    "deepspeed": ("0.19.8",),
    "lightning": ("2.6.6",),
    "megatron-core": ("0.16.1", "0.19.2"),
    "torchtitan": ("0.3.0",),
    "nvidia-cudnn-frontend": ("1.32.0",),
}
"""Releases of each package, oldest first. Each stands for all patch releases of its minor version:
the first one's is the oldest that hcp takes. The Makefile pins the last, but an earlier torch.
docs/reference/support.md says how each was tested."""

_log = logging.getLogger("hcp")


def require(
    package: str, seams: Sequence[str] = (), *, check: str, needed_by: str | None = None
) -> None:
    """Raise ImportError unless `package` is installed, in a version that hcp takes.

    See `check_version`. `needed_by`: the package of hcp that cannot be imported without it;
    `python -m` then prints the error as one line.
    """
    check_version(package, installed(package), seams, check=check, needed_by=needed_by)


def require_seams(package: str, seams: Sequence[str], *, since: str, needed_by: str) -> None:
    """Raise ImportError if the installed version of a package lacks what a part of hcp needs.

    `since`: the first version that has all of it. `needed_by`: that part of hcp, in words."""
    lost = [seam for seam in seams if not has_seam(seam)]
    if lost:
        raise ImportError(
            f"{package} is {installed(package)}, which has no {', '.join(lost)}, which hcp's "
            f'{needed_by} uses: expected {since} or later: pip install "{package}>={since}"'
        )


def check_if_installed(package: str, *, check: str) -> None:
    """Check the version of a package that hcp also works without, or that pip may not know."""
    version = installed(package)
    if version is not None:
        check_version(package, version, check=check)


def check_version(
    package: str,
    version: str | None,
    seams: Sequence[str] = (),
    *,
    check: str,
    needed_by: str | None = None,
) -> None:
    """Raise ImportError for a version that is older than those tested, and for None (not there).

    Any other that was not tested gets a warning, once in a process. `seams`: what hcp calls
    or overrides, each "module:name.name(argument, argument)"; the arguments in parentheses are
    those that hcp passes by name. ImportError if one is missing. `check`: a sentence that says what
    the user should check.
    """
    if version is None or _minor(version) < _minor(TESTED[package][0]):
        raise _refused(package, version, needed_by)
    if _minor(version) in map(_minor, TESTED[package]):
        return
    lost = [seam for seam in seams if not has_seam(seam)]
    if lost:
        raise _lacking(package, version, lost)
    _warn_of(package, version, "What hcp uses of it is there. " * bool(seams) + check)


def installed(package: str) -> str | None:
    """Return the version of a package that pip has installed, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
    except Exception:  # a package that is broken on this machine may raise what it likes
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


def _warn_of(package: str, version: str, advice: str) -> None:
    if package in _warned:
        return
    _warned.add(package)
    _log.warning(
        "hcp was tested with %s %s; this is %s. %s",
        *(package, _listed(package, "and"), version, advice),
    )


def _refused(package: str, version: str | None, needed_by: str | None) -> ImportError:
    found = "is not installed" if version is None else f"is {version}"
    return ImportError(f"{package} {found}, {_expected(package)}", name=needed_by)


def _lacking(package: str, version: str, lost: Sequence[str]) -> ImportError:
    newest = TESTED[package][-1]
    return ImportError(
        f"{package} is {version}, which has no {', '.join(lost)}, which hcp uses: "
        f"expected {_listed(package, 'or')}, which hcp was tested with: "
        f"pip install {package}=={newest}"
    )


def _expected(package: str) -> str:
    oldest = ".".join(map(str, _minor(TESTED[package][0])))
    return (
        f"expected {_listed(package, 'or')}, which hcp was tested with: "
        f'pip install "{package}>={oldest}"'
    )


def _listed(package: str, word: str) -> str:
    *others, last = TESTED[package]
    return f"{', '.join(others)} {word} {last}" if others else last


def _minor(version: str) -> tuple[int, ...]:
    return (*numbers(version), 0)[:2]


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, to compare versions: (0, 3, 0) of 0.3.0+cu130."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in release[0].split(".")) if release else (-1,)
