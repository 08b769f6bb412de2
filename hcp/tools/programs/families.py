"""Families of sequence lengths, drawn with seeds from published tables.

The tables are histograms from papers. Inside a bin lengths are log-uniform, since nothing more is
published. Each family draws the length of one sequence, in tokens, from a random.Random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple

Draw = Callable[[Random], int]
Bin = tuple[int, int, float]
"""(least tokens, most tokens, share of the samples)."""

K = 1024


class Family(NamedTuple):
    draw: Draw
    says: str


def log_uniform(random: Random, low: int, high: int) -> int:
    return min(high, max(low, round(math.exp(random.uniform(math.log(low), math.log(high))))))


def sampler(bins: list[Bin]) -> Draw:
    weights = [share for _, _, share in bins]

    def draw(random: Random) -> int:
        low, high, _ = random.choices(bins, weights)[0]
        return log_uniform(random, low, high)

    return draw


def octaves(first: int, shares: list[float]) -> list[Bin]:
    """Return bins of one octave each, which end at `first`, 2 `first`, 4 `first`, ..."""
    return [(first * 2**i // 2 + 1, first * 2**i, share) for i, share in enumerate(shares)]


def by_tokens(first: int, tokens: list[float], most: int) -> Draw:
    """Return a family by the share of the tokens in each octave. No length exceeds `most`.

    An octave's share of the samples is that of the tokens over the length.
    """
    bins = octaves(first, [share / 2**i for i, share in enumerate(tokens)])
    return sampler([(low, min(high, most), share) for low, high, share in bins if low < most])


def lognormal(mean: float, sigma: float, low: int, high: int) -> Draw:
    mu = math.log(mean) - sigma**2 / 2
    return lambda random: min(high, max(low, round(random.lognormvariate(mu, sigma))))


WIKIPEDIA = sampler(
    [
        (48, 256, 41.65),
        *octaves(512, [21.04, 16.12, 10.84, 5.96, 2.80, 1.122, 0.3465, 0.1027, 0.0228, 0.0042]),
        (256 * K, 384 * K, 0.0007),
    ]
)
GITHUB_TOKENS = [34.0, 9.5, 10.4, 10.7, 10.2, 8.8, 6.4, 4.5, 3.0]
"""Percent of tokens by octave, the first one ending at 2K."""
BYTED_TOKENS = [14.2, 11.4, 7.6, 7.6, 7.6, 7.6, 7.3, 7.6, 7.6, 9.7, 12.1]
CHATQA2 = sampler(
    [(64, K, 21.92), (K, 4 * K, 9.56), (4 * K, 8 * K, 8.95), (8 * K, 32 * K, 59.43),
     (32 * K, 99 * K, 0.14)]
)  # fmt: skip
WLB = sampler(
    [(324, 2 * K, 31.75), (2 * K, 4 * K, 31.95), (4 * K, 6250, 33.93), (8 * K, 16 * K, 1.036),
     (16 * K, 32 * K, 0.451), (32 * K, 64 * K, 0.355), (64 * K, 122 * K, 0.531)]
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "wikipedia": Family(WIKIPEDIA, "Wikipedia as in FlexSP's artifact, to 384K (arXiv 2412.01523)"),
    "github": Family(
        by_tokens(2 * K, GITHUB_TOKENS, 384 * K),
        "GitHub, ByteScale's Figure 4, to 384K (arXiv 2502.21231)",
    ),
    "byted": Family(
        by_tokens(2 * K, BYTED_TOKENS, 2 * K * K),
        "Byted, ByteScale's Figure 4, to 2M (arXiv 2502.21231)",
    ),
    "longalign": Family(
        lambda random: log_uniform(random, 8 * K, 64 * K), "LongAlign-10k, taken as log-uniform"
    ),
    "chatqa2": Family(CHATQA2, "ChatQA2-Long-SFT, Skrull's Table 1, to 99K (arXiv 2505.19609)"),
    "wlb": Family(WLB, "WLB-LLM's shape: uniform with a tail to 122K (arXiv 2503.17924)"),
    "mock": Family(
        lognormal(1024, 1.5, 128, 8192), "log-normal, Megatron's mock data: 128 to 8192"
    ),
}


def describe() -> str:
    """Describe each family in a line, for --help."""
    return "\n".join(f"  {name:11}{family.says}" for name, family in FAMILIES.items())
