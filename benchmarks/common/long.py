"""One long sequence that no rank holds as a whole, and results of a few of its queries by formula.

Every rank draws any chunk of the inputs from a seed of its own. The gradient of the output that the
check takes is 0 but for a few queries: then the gradients of all keys and values, on all ranks, are
sums over these queries, and cost little.

S sampled queries, H query heads, G key-value heads, M = S * H / G rows that read one of these, D
head size, n rows of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.layers import Sizes

QUERY, KEY, VALUE, GRAD = range(4)


class Sampled(NamedTuple):
    """Results of the sampled queries by formula, in float32 (for float64 in float64), on the host
    but for those of the queries."""

    out: Tensor
    """(S, H, D)"""
    grad_query: Tensor
    """(S, H, D)"""
    grads: list[tuple[Tensor, Tensor]]
    """The gradients of keys and values of each of the rank's chunks, (n, G, D)."""


class Long:
    """A causal sequence in 2 * ranks equal chunks, of which each rank has one from the front and
    one from the back."""

    def __init__(
        self, tokens: int, rank: int, ranks: int, sizes: Sizes, *, contiguous: bool = False
    ) -> None:
        """``tokens``: a multiple of 2 * ranks. ``contiguous``: the rank's two chunks are
        neighbours."""
        self.sizes, self.count = sizes, 2 * ranks
        self.rows = tokens // self.count
        self.chunks = (2 * rank, 2 * rank + 1) if contiguous else (rank, self.count - 1 - rank)
        self.places = [
            chunk * self.rows + at
            for chunk in range(self.count)
            for at in sorted({self.rows // 2, self.rows - 1})
        ]
        """The sampled queries: the middle one and the last one of each chunk."""
        wide = torch.float64 if sizes.dtype == torch.float64 else torch.float32
        self._wide = wide
        self.sampled = self._by_formula()

    def drawn(self, what: int, chunks: Sequence[int]) -> Tensor:
        """Draw the rows of some chunks, one after the other."""
        heads = self.sizes.heads if what in (QUERY, GRAD) else self.sizes.kv_heads
        rows = torch.empty(
            *(len(chunks) * self.rows, heads, self.sizes.head_dim),
            dtype=self.sizes.dtype,
            device=self.sizes.device,
        )
        generator = torch.Generator(self.sizes.device)
        for part, chunk in zip(rows.split(self.rows), chunks, strict=True):
            part.normal_(generator=generator.manual_seed(4 * chunk + what))
        return rows

    def own(self) -> list[tuple[int, int]]:
        """Return (sample, its row on this rank) of the sampled queries that this rank has."""
        return [
            (sample, self.chunks.index(chunk) * self.rows + at)
            for sample, (chunk, at) in enumerate(divmod(x, self.rows) for x in self.places)
            if chunk in self.chunks
        ]

    def sparse(self, grad: Tensor) -> None:
        """Set all rows of the output's gradient to 0 but those of the sampled queries."""
        rows = [row for _, row in self.own()]
        kept = grad[rows]
        grad.zero_()[rows] = kept

    def errors(self, out: Tensor, grads: Sequence[Tensor]) -> dict[str, float]:
        """Return how far results under the sparse gradient are from the formula's: the norm of the
        difference over that of the expected, chunk by chunk for keys and values.

        The gradient of the sampled queries is set to 0."""
        samples, rows = (list(x) for x in zip(*self.own(), strict=True))
        grad_query, *others = grads
        wanted = self.sampled.grad_query[samples]
        found = {
            "output": _distance(out[rows], self.sampled.out[samples]),
            "sampled queries' gradient": _distance(grad_query[rows], wanted),
        }
        grad_query[rows] = 0
        found["other queries' gradient"] = float(grad_query.norm(dtype=self._wide) / wanted.norm())
        for i, name in enumerate(("keys' gradient", "values' gradient")):
            parts = others[i].split(self.rows)
            found[name] = max(
                _distance(part, own[i].to(part.device))
                for part, own in zip(parts, self.sampled.grads, strict=True)
            )
        return found

    def _by_formula(self) -> Sampled:
        """Compute the sampled queries' attention, chunk of keys by chunk, and its gradients."""
        query, grad = (self._samples_of(what) for what in (QUERY, GRAD))
        lse = torch.full((*query.shape[:2], 1), -torch.inf, dtype=self._wide, device=query.device)
        out = torch.zeros_like(query)
        for chunk in range(self.count):  # each query sees keys of the first one
            key, value = self._keys(chunk)
            scores = self._scores(query, key, chunk)
            total = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
            out = out * (lse - total).exp() + scores.sub_(total).exp_() @ value
            lse = total
        across = (out * grad).sum(-1, keepdim=True)
        grad_query = torch.zeros_like(query)
        grads: dict[int, tuple[Tensor, Tensor]] = {}
        for chunk in range(self.count):
            key, value = self._keys(chunk)
            weights = self._scores(query, key, chunk).sub_(lse).exp_()
            by_score = (grad @ value.mT).sub_(across).mul_(weights).mul_(self._scale)
            grad_query += by_score @ key
            if chunk in self.chunks:
                grad_key, grad_value = by_score.mT @ query, weights.mT @ grad
                grads[chunk] = grad_key.transpose(0, 1).cpu(), grad_value.transpose(0, 1).cpu()
        out, grad_query = (
            x.unflatten(1, (-1, len(self.places))).flatten(0, 1).transpose(0, 1)
            for x in (out, grad_query)
        )
        return Sampled(out, grad_query, [grads[chunk] for chunk in self.chunks])

    @property
    def _scale(self) -> float:
        return 1 / math.sqrt(self.sizes.head_dim)

    def _samples_of(self, what: int) -> Tensor:
        """Return rows of the sampled queries, (G, M, D), those of one head one after the other."""
        rows = []
        for chunk in range(self.count):
            own = [x % self.rows for x in self.places if x // self.rows == chunk]
            rows.append(self.drawn(what, [chunk])[own].to(self._wide))
        heads = torch.cat(rows).transpose(0, 1)
        return heads.reshape(self.sizes.kv_heads, -1, self.sizes.head_dim)

    def _keys(self, chunk: int) -> list[Tensor]:
        """Return a chunk's keys and values, (G, n, D)."""
        rows = (self.drawn(what, [chunk]) for what in (KEY, VALUE))
        return [x.to(self._wide).transpose(0, 1) for x in rows]

    def _scores(self, query: Tensor, key: Tensor, chunk: int) -> Tensor:
        """Return (G, M, n), -inf where a key comes after the query."""
        scores = (query @ key.mT).mul_(self._scale)
        keys = torch.arange(self.rows, device=key.device) + chunk * self.rows
        places = torch.tensor(self.places, device=key.device)
        per_head = query.shape[1] // len(self.places)
        return scores.masked_fill_(keys > places.repeat(per_head)[:, None], -torch.inf)


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.to(wanted.dtype) - wanted).norm() / wanted.norm())
