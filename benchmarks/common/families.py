"""Families of global batches: the published tables that commands know, and the stress pack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from hcp.tools.programs.families import (
    CHATQA2,
    GITHUB_TOKENS,
    WIKIPEDIA,
    WLB,
    K,
    by_tokens,
    log_uniform,
)
from hcp.tools.programs.families import FAMILIES as PUBLISHED

GITHUB = PUBLISHED["github"].draw
BYTED = PUBLISHED["byted"].draw


@dataclass(frozen=True)
class Family:
    name: str
    says: str
    ranks: int
    capacity: int
    draw: Callable[[Random], list[int]]
    stages: int = 1


def count(draw: Callable[[Random], int], n: int) -> Callable[[Random], list[int]]:
    return lambda random: [draw(random) for _ in range(n)]


def tokens(draw: Callable[[Random], int], most: int) -> Callable[[Random], list[int]]:
    def fill(random: Random) -> list[int]:
        lengths: list[int] = []
        left = most
        while left > 0:
            lengths.append(min(left, draw(random)))
            left -= lengths[-1]
        return lengths

    return fill


def just_above(capacity: int, n: int) -> Callable[[Random], list[int]]:
    """Draw lengths 2-22% above capacity * 2^k, for k = 0 to 3 in the proportions 8:4:2:1."""

    def draw(random: Random) -> list[int]:
        powers = random.choices([1, 2, 4, 8], [8, 4, 2, 1], k=n)
        return [round(capacity * power * random.uniform(1.02, 1.22)) for power in powers]

    return draw


def giants_and_dust(ranks: int, capacity: int) -> Callable[[Random], list[int]]:
    giant = ranks * capacity // 4 + 17
    return lambda random: [giant] * 3 + [log_uniform(random, 16, 1024) for _ in range(2000)]


FAMILIES = [
    Family("P1", "Wikipedia, 512 sequences to 384K", 64, 6144, count(WIKIPEDIA, 512)),
    Family("P2", "GitHub, 512 sequences to 384K", 64, 8192, count(GITHUB, 512)),
    Family("P3", "LongAlign, 128 of 8-64K", 32, 8192,
           count(lambda r: log_uniform(r, 8 * K, 64 * K), 128)),
    Family("P4", "ChatQA2, 256 to 99K", 32, 13312, count(CHATQA2, 256)),
    Family("P5", "WLB shape, 4.2M tokens to 128K, 4 stages", 64, 16384,
           tokens(WLB, 4_200_000), stages=4),
    Family("P6", "Byted, 32M tokens to 2M", 1024, 8192, tokens(BYTED, 32_000_000)),
    Family("X1", "1.5 N equal sequences of 0.9 C", 64, 8192, lambda r: [7372] * 96),
    Family("X2", "2-22% above C 2^k, 8:4:2:1", 64, 8192, just_above(8192, 128)),
    Family("X3", "three giants of N C / 4 + 17, 2000 dust", 64, 8192, giants_and_dust(64, 8192)),
    Family("X4", "K = N / 2", 64, 8192, count(GITHUB, 32)),
    Family("X5a", "GitHub, N = 31", 31, 8192,
           count(by_tokens(2 * K, GITHUB_TOKENS, 240 * K), 248)),
    Family("X5b", "GitHub, N = 60", 60, 8192, count(GITHUB, 480)),
    Family("X5c", "GitHub, N = 1000", 1000, 8192, count(GITHUB, 8000)),
    Family("X6", "one sequence that needs all N", 64, 8192, lambda r: [64 * 8192 - 100]),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}
