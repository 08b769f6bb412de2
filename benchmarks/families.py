"""Families of global batches, generated with seeds from published tables.

Every function gives lengths in tokens for a random.Random. The tables are histograms that papers
print; inside a bin lengths are log-uniform, since nothing more is published.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Family:
    name: str
    says: str
    ranks: int
    capacity: int
    draw: Callable[[Random], list[int]]
    stages: int = 1


def log_uniform(random: Random, low: int, high: int) -> int:
    return min(high, max(low, round(math.exp(random.uniform(math.log(low), math.log(high))))))


Bin = tuple[int, int, float]


def sampler(bins: list[Bin]) -> Callable[[Random], int]:
    """(low, high, share of samples) -> one length."""
    weights = [share for _, _, share in bins]

    def draw(random: Random) -> int:
        low, high, _ = random.choices(bins, weights)[0]
        return log_uniform(random, low, high)

    return draw


def octaves(first: int, shares: list[float]) -> list[Bin]:
    """Bins that end at first, 2 first, 4 first, ... and span one octave each."""
    return [(first * 2**i // 2 + 1, first * 2**i, share) for i, share in enumerate(shares)]


K = 1024
# FlexSP's Wikipedia file: samples by bin, in percent (arXiv 2412.01523, its artifact).
WIKIPEDIA = sampler(
    [
        (48, 256, 41.65),
        *octaves(512, [21.04, 16.12, 10.84, 5.96, 2.80, 1.122, 0.3465, 0.1027, 0.0228, 0.0042]),
        (256 * K, 384 * K, 0.0007),
    ]
)
# ByteScale's Figure 4: tokens by bin, in percent (arXiv 2502.21231); samples are tokens / length.
GITHUB_TOKENS = [34.0, 9.5, 10.4, 10.7, 10.2, 8.8, 6.4, 4.5, 3.0]
BYTED_TOKENS = [14.2, 11.4, 7.6, 7.6, 7.6, 7.6, 7.3, 7.6, 7.6, 9.7, 12.1]


def by_tokens(first: int, tokens: list[float], most: int) -> Callable[[Random], int]:
    bins = octaves(first, [share / 2**i for i, share in enumerate(tokens)])
    return sampler([(low, min(high, most), share) for low, high, share in bins if low < most])


GITHUB = by_tokens(2 * K, GITHUB_TOKENS, 384 * K)
BYTED = by_tokens(2 * K, BYTED_TOKENS, 2 * K * K)
# ChatQA2-Long-SFT, cumulative (Skrull, arXiv 2505.19609, Table 1).
CHATQA2 = sampler(
    [(64, K, 21.92), (K, 4 * K, 9.56), (4 * K, 8 * K, 8.95), (8 * K, 32 * K, 59.43),
     (32 * K, 99 * K, 0.14)]
)  # fmt: skip
# A file of WLB-LLM's shape: a uniform body and a tail (arXiv 2503.17924).
WLB = sampler(
    [(324, 2 * K, 31.75), (2 * K, 4 * K, 31.95), (4 * K, 6250, 33.93), (8 * K, 16 * K, 1.036),
     (16 * K, 32 * K, 0.451), (32 * K, 64 * K, 0.355), (64 * K, 122 * K, 0.531)]
)  # fmt: skip


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
    """2-22% above capacity * 2^k, in the proportions 8:4:2:1."""

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
