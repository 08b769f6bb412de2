"""Rows of spans in pieces of one size, so that one launch computes all spans, however many.

T rows, S spans, M pieces of q rows, H heads, G groups of heads, P and N sizes of a state.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from hcp.exchange.layout import copied

ROWS = 256
"""The most rows of a piece where spans differ. A state for each piece then takes half of what the
rows of a head of 64 do, for states of 64 x 128 in float32."""


class SpanPieces:
    """The pieces of spans of so many rows each, on a device. Spans of equal size are one piece
    each; else the last piece of a span is filled up with rows of zeros."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self.rows, self.spans = sum(sizes), len(sizes)
        self.size = sizes[0] if len(set(sizes)) == 1 else min(ROWS, max(sizes))
        counts = [-(-rows // self.size) for rows in sizes]
        self.count, self._most = sum(counts), max(counts)
        self.counts = torch.tensor(counts, device="cpu")
        spans = torch.arange(self.spans, device="cpu").repeat_interleave(self.counts)
        place = (
            torch.arange(self.count, device="cpu") - (self.counts.cumsum(0) - self.counts)[spans]
        )
        rest = torch.tensor(sizes, device="cpu")[spans] - place * self.size
        self._is_full = self.count * self.size == self.rows
        filled = torch.arange(self.size, device="cpu") < rest[:, None]
        self._back = copied(filled.flatten().nonzero()[:, 0], device)
        """int64 (T,): the place of each row in the pieces."""
        self._grid = copied(spans * self._most + place, device)
        """int64 (M,): the place of each piece in (spans, most pieces of one)."""
        self.of_span = copied(spans, device)
        """int64 (M,): the span of each piece."""
        self.counts = copied(self.counts, device)

    def cut(self, x: Tensor) -> Tensor:
        """(T, ...) to (M, q, ...)."""
        if not self._is_full:
            x = x.new_zeros(self.count * self.size, *x.shape[1:]).index_copy(0, self._back, x)
        return x.reshape(self.count, self.size, *x.shape[1:])

    def joined(self, x: Tensor) -> Tensor:
        """(M, q, ...) to (T, ...)."""
        x = x.flatten(0, 1)
        return x if self._is_full else x[self._back]

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sum (T, H) along spans: of the rows of each span up to each row, (M, q, H), and of whole
        spans, (S, H)."""
        within = self.cut(x).cumsum(1)
        if self.count == self.spans:
            return within, within[:, -1]
        grid = within.new_zeros(self.spans * (self._most + 1), x.shape[1])
        places = self._grid + self.of_span + 1  # after the sum of none
        grid = grid.index_copy(0, places, within[:, -1])
        grid = grid.view(self.spans, self._most + 1, -1).cumsum(1)
        return within + grid.flatten(0, 1)[places - 1][:, None], grid[:, -1]

    def later(self, x: Tensor) -> Tensor:
        """Sum (T, H) along spans from their ends: of the rows after each row, (M, q, H). The sum of
        few rows is no difference of the sums of many, which would lose its digits."""
        x = self.cut(x)
        within = _from_end(F.pad(x[:, 1:], (0, 0, 0, 1)))
        if self.count == self.spans:
            return within
        grid = x.new_zeros(self.spans * (self._most + 1), x.shape[2])
        places = self._grid + self.of_span  # before the sum of none
        grid = grid.index_copy(0, places, x.sum(1)).view(self.spans, self._most + 1, -1)
        return within + _from_end(grid).flatten(0, 1)[places + 1][:, None]

    def of_states(self, states: Tensor) -> Tensor:
        """(S, ...) to (M, ...): the state of each piece's span."""
        return states if self.count == self.spans else states[self.of_span]

    def total(self, x: Tensor) -> Tensor:
        """(M, ...) to (S, ...): the sum over the pieces of each span, in their order."""
        if self.count == self.spans:
            return x
        rows, counts = x.flatten(1), self.counts
        sums: Tensor = torch.segment_reduce(rows, "sum", lengths=counts, axis=0, unsafe=True)
        return sums.view(self.spans, *x.shape[1:])


def _from_end(x: Tensor) -> Tensor:
    return x.flip(1).cumsum(1).flip(1)


@functools.lru_cache(maxsize=16)
def pieces_of(sizes: tuple[int, ...], device: torch.device) -> SpanPieces:
    """Those of a micro-batch, once for all of its layers, in evaluation and in training."""
    with torch.inference_mode(False):
        return SpanPieces(sizes, device)


def by_group(x: Tensor, groups: int) -> Tensor:
    """(M, q, H, P) to (M, q, G, heads of a group * P)."""
    return x.reshape(*x.shape[:2], groups, -1)


def read(pieces: SpanPieces, reads: Tensor, states: Tensor) -> Tensor:
    """What rows read of the state that enters their span: reads (T, G, N) and states (S, H, P, N)
    to (M, q, H, P). A group of heads reads alike."""
    groups, (heads, size) = reads.shape[1], states.shape[1:3]
    each = pieces.of_states(states)
    each = each.reshape(len(each), groups, -1, each.shape[3])
    found = (pieces.cut(reads).transpose(1, 2) @ each.mT).transpose(1, 2)
    return found.reshape(*found.shape[:2], heads, size)


def written(pieces: SpanPieces, x: Tensor, writes: Tensor) -> Tensor:
    """The sum of what the rows of each span write to a state: x (M, q, H, P) and writes (T, G, N)
    to (S, H, P, N). A group of heads writes alike."""
    heads, size, groups = *x.shape[2:], writes.shape[1]
    found = torch.einsum("mqgk,mqgn->mgkn", by_group(x, groups), pieces.cut(writes))
    return pieces.total(found.reshape(len(found), heads, size, -1))
