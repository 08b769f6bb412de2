"""Random masks, and attention by a dense mask on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from hcp import Mask
from hcp.planning.mask import Slice
from support import slices


def _spans(r: Random, length: int) -> list[tuple[int, int]]:
    edges = sorted(r.sample(range(length + 1), min(length + 1, 4) // 2 * 2))
    return list(zip(edges[::2], edges[1::2], strict=True))


def _parts(r: Random, length: int) -> list[int]:
    parts = []
    while length:
        parts.append(r.randint(1, length))
        length -= parts[-1]
    return parts


def _holes(r: Random, length: int) -> Mask:
    """Rectangles of a grid, some of which are left out: queries that see nothing, keys that nobody
    sees."""
    kinds = ("full", "causal", "inverse_causal", "both")
    queries, keys = (
        list(itertools.pairwise(itertools.accumulate(_parts(r, length), initial=0)))
        for _ in range(2)
    )
    grid = [Slice(q, k, r.choice(kinds)) for q in queries for k in keys if r.random() < 0.4]
    return Mask(length, [part for part in grid if slices.pairs_of(part)])


def _positions(r: Random, length: int) -> Mask:
    """Positions of a user's own: runs that go on, jump, come back or say a position again."""
    starts = sorted({0, *(r.randrange(length) for _ in range(r.randint(0, 6)))})
    runs = [(start, r.randint(0, 2 * length)) for start in starts]
    return Mask(length, _holes(r, length).slices, runs)


KINDS: dict[str, Callable[[Random, int], Mask | None]] = {
    "causal": lambda r, n: None,
    "full": lambda r, n: Mask.full(n),
    "window": lambda r, n: Mask.window(n, r.choice([-1, 0, 2, 7]), r.choice([-1, 0, 1, 5])),
    "prefix": lambda r, n: Mask.prefix_lm(n, r.randint(0, n)),
    "spans": lambda r, n: Mask.bidirectional_spans(n, _spans(r, n), left=r.choice([-1, 0, 3, 10])),
    "chunked": lambda r, n: Mask.chunked(n, r.randint(1, n)),
    "streaming": lambda r, n: Mask.streaming(n, r.randint(0, 5), r.randint(0, 9)),
    "documents": lambda r, n: Mask.documents(
        [size if r.random() < 0.5 else Mask.full(size) for size in _parts(r, n)]
    ),
    "tree": lambda r, n: tree(r, _parts(r, n)),
    "holes": _holes,
    "positions": _positions,
    "restarts": lambda r, n: Mask.from_positions([i for k in _parts(r, n) for i in range(k)]),
    "nothing": lambda r, n: Mask(n, []),
    "next": lambda r, n: Mask(n, [((0, n // 2), (n - n // 2, n))] if n > 1 else []),
}
"""Draws of a mask of n tokens, by the name of its constructor."""


def tree(r: Random, sizes: list[int]) -> Mask:
    return Mask.tree(sizes, [r.randint(-1, i - 1) for i in range(len(sizes))])


def joined() -> Mask:
    """A text that goes on from the ends of two others: no tree."""
    tree = Mask.tree([2, 2, 2, 2], [-1, 0, 0, 1])
    return Mask(8, [*tree.slices, ((6, 8), (4, 6))], tree.runs)


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output (T, H, E) and log-sum-exp (T, H) of (T, H, D), (S, G, D), (S, G, E) under a dense mask
    (T, S). A query that sees nothing gives 0 and -inf."""
    per_key = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(per_key, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[2] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    some = seen.any(1)[:, None]
    weights = torch.softmax(scores.masked_fill(~some, 0), -1) * some
    return torch.einsum("hqk,khe->qhe", weights, values), scores.logsumexp(-1).t()
