"""What a plan must keep: degrees, rows, bytes, and the speeds of its ranks as integers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hcp import _core
from hcp.expect import expect_items, expect_size, is_finite


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes that a micro-batch takes on one rank, beside what the rank always holds::

        (rows + alignment - 1) * (activation + logit) + gathered * tokens

    where rows are those of the fullest rank of the group and tokens those of the group's sequences
    when its degree is more than 1. In a pipeline a stage keeps up to ``pipeline_stages``
    micro-batches at once: divide its memory by that.
    """

    activation: int = 0
    """What one row leaves for the backward, in all layers of the rank."""
    logit: int = 0
    """One row's logits and their gradient."""
    gathered: int = 0
    """Keys and values of one token in one layer, while a rank has those of whole sequences: with
    "all_gather"; 0 for rings, which never do."""
    limit: int = 0
    """Most bytes of one rank in one micro-batch; 0: no limit."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = expect_size(f"memory.{name}", getattr(self, name), "bytes", least=0)
            object.__setattr__(self, name, value)

    def bytes(self, rows: int, tokens: int, degree: int) -> int:
        """Of a rank with so many rows of sequences of so many tokens."""
        return rows * (self.activation + self.logit) + (degree > 1) * tokens * self.gathered


def slowness_of(speeds: Sequence[float]) -> list[int]:
    """Speeds as the core's integers: how much longer each rank takes than the fastest. Where speeds
    were measured, one rank makes these and sends them to the others, since floats may differ."""
    expect_items("speeds", speeds, "numbers")
    for rank, speed in enumerate(speeds):
        if not (is_finite(speed) and speed > 0):
            raise ValueError(f"speeds[{rank}] is {speed!r}, expected a finite number > 0")
    fastest = max(speeds, default=1.0)
    return [round(_core.FULL_SPEED * fastest / speed) for speed in speeds]


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def rows_up_to(longest: int, degree: int) -> int:
    """Rows of the fullest rank, at most, when degree ranks share up to longest tokens zigzag.

    A shorter sequence may need a row more than the longest: on 4 ranks 11 tokens put 4 on one of
    them, and 12 tokens 3 on each.
    """
    whole, rest = divmod(longest, 2 * degree)
    # A rank holds two of 2 * degree chunks. The least remainder that rounds up both of them on some
    # rank is the least one above 2 that does not divide the number of chunks.
    both = next(r for r in itertools.count(3) if 2 * degree % r != 0)
    return 2 * whole + min(rest, 1) + (rest >= both)
