"""Draw with matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from hcp._files import PathLike, write_file


def pyplot() -> Any:
    """Return matplotlib.pyplot, without a display. Raises ValueError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"{error}: python -m pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write_figure(figure: Any, path: PathLike) -> None:
    """Write a figure in the format that the name ends with. Raises OSError that names the path; a
    file that was there is kept."""
    memory = io.BytesIO()
    figure.savefig(memory, format=Path(path).suffix[1:] or "png", dpi=120)
    write_file(path, memory.getvalue())
