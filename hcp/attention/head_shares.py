"""Which heads each of several ranks computes, where they exchange rows for heads."""

from __future__ import annotations


def split(heads: int, ranks: int) -> list[slice]:
    """Consecutive heads for each rank, as evenly as possible: none for some if there are fewer than
    ranks."""
    return [slice(j * heads // ranks, (j + 1) * heads // ranks) for j in range(ranks)]


def key_heads(queries: slice, per_key: int) -> slice:
    """The key-value heads that these query heads attend to. ``per_key`` query heads share one."""
    if queries.start == queries.stop:
        return slice(0, 0)
    return slice(queries.start // per_key, -(-queries.stop // per_key))
