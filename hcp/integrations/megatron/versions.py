"""Require a release of Megatron-Core that was tested; refuse others."""

from __future__ import annotations

import runpy
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hcp.programs.versions import require_one_of

TESTED = ("0.16.1", "0.19.2")


@cache
def require_megatron() -> str:
    """Return the version of the Megatron-Core that is, or would be, imported.

    Raises ImportError if there is none, or one that hcp was not tested with.
    """
    return require_one_of("megatron-core", _version(), TESTED)


def _version() -> str | None:
    """Read the release from Megatron's own file; None without that file.

    pip does not know a checkout of Megatron-LM, and importing it takes long."""
    package = find_spec("megatron")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder, "core", "package_info.py")
        if file.exists():
            return str(runpy.run_path(str(file))["__version__"])
    return None
