"""Whether hcp was built. A source folder that Python finds first may hold no libraries."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent
LIBRARIES = ("_core.abi3.so", "_ops.abi3.so")


def require_built(folder: Path = _FOLDER) -> None:
    """Raise ImportError unless the libraries that a build makes are in the package's folder."""
    missing = [name for name in LIBRARIES if not (folder / name).exists()]
    if not missing:
        return
    if not (folder.parent / "setup.py").exists():
        raise ImportError(
            f"{folder} lacks {' and '.join(missing)}, expected the libraries of an installed hcp: "
            "install it again",
            name="hcp",
        )
    raise ImportError(
        f"{folder} is the source of hcp without {' and '.join(missing)}, expected a build: run "
        f"`python -m pip install -e {folder.parent}`, or start Python in another folder, where "
        "this one does not hide the hcp that is installed",
        name="hcp",
    )
