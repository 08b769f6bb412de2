"""Instances that are small enough to find their best plans, and columns of their ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from random import Random

from common import families
from hcp.tools.programs.families import CHATQA2, WIKIPEDIA, K, log_uniform


def instances(ranks: int, capacity: int, count: int) -> dict[str, Callable[[Random], list[int]]]:
    """Return the families, cut to the rows of these ranks."""
    most = ranks * (capacity - 2)

    def cut(draw: Callable[[Random], int]) -> Callable[[Random], list[int]]:
        return lambda random: [min(most, draw(random)) for _ in range(count)]

    above = families.just_above(capacity, count)
    return {
        "P1": cut(WIKIPEDIA),
        "P2": cut(families.GITHUB),
        "P3": cut(lambda random: log_uniform(random, 8 * K, 64 * K)),
        "P4": cut(CHATQA2),
        "X1": lambda random: [capacity * 9 // 10] * (3 * ranks // 2),
        "X2": lambda random: [min(most, length) for length in above(random)],
        "X3": lambda random: (
            [most // 4 + 17] * 3 + [log_uniform(random, 16, 1024) for _ in range(count - 3)]
        ),
        "X4": lambda random: [min(most, families.GITHUB(random)) for _ in range(ranks // 2)],
    }


def median_and_worst(values: list[float]) -> str:
    return f"{statistics.median(values):.4f} | {max(values):.4f}"
