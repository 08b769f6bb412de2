"""Which releases of Megatron-Core this was tested with; others are refused."""

from __future__ import annotations

from functools import cache
from importlib import metadata

TESTED = ("0.16.1", "0.19.2")


@cache
def require_megatron() -> str:
    """The version of Megatron-Core that is installed.

    Raises ImportError when there is none, or one that hcp was not tested with.
    """
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise ImportError(
            "Megatron-Core is not installed, expected megatron-core "
            f"{' or '.join(TESTED)}: python -m pip install megatron-core=={TESTED[0]}"
        ) from None
    if version not in TESTED:
        raise ImportError(
            f"megatron-core is {version}, expected {' or '.join(TESTED)}: hcp replaces layers of "
            f"Megatron-Core and was tested with these releases only"
        )
    return version
