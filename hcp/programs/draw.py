"""Draw with matplotlib."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """Return matplotlib.pyplot, without a display. Raises ValueError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"{error}: python -m pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
