"""The releases of Megatron-Core that were tested. Others are refused."""

from __future__ import annotations

import runpy
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hcp.programs.versions import require_one_of

TESTED = ("0.16.1", "0.19.2")


@cache
def require_megatron() -> str:
    """The version of the Megatron-Core that is, or would be, imported.

    Raises ImportError when there is none, or one that hcp was not tested with.
    """
    return require_one_of("megatron-core", _version(), TESTED)


def _version() -> str | None:
    """The release that Megatron's own file names; None: no file.

    pip knows nothing of a checkout of Megatron-LM, and importing it takes long."""
    package = find_spec("megatron")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder, "core", "package_info.py")
        if file.exists():
            return str(runpy.run_path(str(file))["__version__"])
    return None
