"""Draw timelines of plans with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hcp.planning.plan import Plan
from hcp.planning.timeline import timeline


def pyplot() -> Any:
    """Return matplotlib.pyplot, without a display. Raises ValueError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"{error}: python -m pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_plans(plans: Mapping[str, Plan], path: Path, title: str) -> None:
    """Draw plans below each other on one axis of time: a row per rank, a colour per sequence.

    In gaps ranks launch or wait. Of a pipeline one stage is drawn, without waiting for neighbours.
    A dotted line is the lower bound: no plan within the same limits ends earlier.
    """
    plt = pyplot()
    figure, axes = plt.subplots(
        len(plans), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(12, 1 + len(plans) * 3.2),
    )  # fmt: skip
    whole = max(1, *(plan.makespan for plan in plans.values()))
    for ax, (name, plan) in zip(axes[:, 0], plans.items(), strict=True):
        _draw(ax, plan, 100 / whole)
        ax.axvline(100 * plan.bound / whole, color="black", linestyle=":", linewidth=1)
        ax.set(ylabel="rank", ylim=(plan.ranks, 0), xlim=(0, 101))
        ax.set_title(f"{name}: idle {plan.report().idle_share:.0%}", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("percent of the longest makespan, by the cost model: not measured")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw(ax: Any, plan: Plan, scale: float) -> None:
    from matplotlib.collections import PolyCollection

    corners, colours = [], []
    for box in timeline(plan):
        start = box.start + plan.cost.launch
        low, high = box.first_rank, box.first_rank + box.degree
        for s, end in zip(box.sequences, box.ends, strict=True):
            left, right = start * scale, end * scale
            corners.append([(left, low), (right, low), (right, high), (left, high)])
            colours.append(f"C{s % 10}")
            start = end
    ax.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.3)
    )
