"""Losses that balance experts, over sequences or over a whole batch, whatever the plan.

Both are sums over experts of (how often a row chooses it) times (its score), each a mean over rows.
The first factor has no gradient, so that only counts travel, and the backward exchanges nothing.

In a tree of texts, such as rollouts that begin alike, each text is a sequence, and a row counts
once for each text through it. So rows are summed over parts first: a part is a sequence, or a
stretch of a tree.

T rows on this rank, P parts of its group, K experts of a row, E experts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hcp.exchange.layout import Layout, copied
from hcp.planning.plan import Plan
from hcp.step.handler import ContextParallelHandler

CPU = torch.device("cpu")


def part_of_rows(cp: ContextParallelHandler, rows: int) -> Tensor:
    """Number the part of each of a model's rows on this rank, int64 (rows,): P for padding and for
    rows that stand in, which come last."""
    return _part_of_rows(cp.layout, rows, cp.cu_seqlens.device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _part_of_rows(layout: Layout, rows: int, device: torch.device) -> Tensor:
    if layout.has_branches:
        texts = _texts_of(layout)
        numbers, sizes = texts.of_spans, [span.rows for span in layout.spans]
    else:
        sizes = layout.cu_seqlens.diff().tolist()
        numbers = list(range(len(sizes)))
    padding = rows - (layout.rows - layout.padding)
    each = torch.tensor([*sizes, padding], device=CPU)
    parts = torch.tensor([*numbers, _part_count(layout)], device=CPU)
    return copied(parts.repeat_interleave(each, output_size=rows), device)


def part_count(cp: ContextParallelHandler) -> int:
    """Return P."""
    return _part_count(cp.layout)


def _part_count(layout: Layout) -> int:
    return len(_texts_of(layout).rows if layout.has_branches else layout.sequences)


def part_sums(cp: ContextParallelHandler, x: Tensor, places: Tensor | None = None) -> Tensor:
    """Sum rows of x (rows, W) on this rank over each part, with gradients: (P, W).
    `places`: the part of each row (default: `part_of_rows` of all)."""
    places = part_of_rows(cp, len(x)) if places is None else places
    parts = part_count(cp)
    return x.new_zeros(parts + 1, x.shape[1]).index_add(0, places, x)[:parts]


def part_counts(cp: ContextParallelHandler, chosen: Tensor, experts: int) -> Tensor:
    """Count this rank's rows of each part that choose each expert: float64 (P, E).
    `chosen`: int64 (rows, K)."""
    ones = chosen.new_ones(chosen.shape, dtype=torch.float64)
    rows = ones.new_zeros(len(chosen), experts).scatter_add_(1, chosen, ones)
    return part_sums(cp, rows)


def batch_sum(cp: ContextParallelHandler, sums: Tensor) -> Tensor:
    """Sum over parts (P, W), each once for each text through it: (W,), with gradients."""
    if cp.layout.has_branches:
        texts = _texts_on(cp.layout, sums.device)
        sums = sums * texts.through(texts.ends.unsqueeze(1)).to(sums.dtype)
    return sums.sum(0)


def expert_counts(cp: ContextParallelHandler, chosen: Tensor, experts: int) -> Tensor:
    """Count this rank's rows that choose each expert: int64 (E,). `chosen`: int64 (rows, K).

    Padding does not count, and a row of a tree once for each text through it. The sum over the
    micro-batches and ranks of a step is that of the batch.
    """
    return batch_sum(cp, part_counts(cp, chosen, experts)).long()


def text_means(cp: ContextParallelHandler, counts: Tensor, power: int) -> Tensor:
    """Return, for each part, the sum over the texts through it of the texts' counts, divided by
    their rows to some power: (P, W). `counts` (P, W): of all ranks of the group."""
    layout = cp.layout
    if not layout.has_branches:
        return counts / _lengths_of(layout, counts.device).pow(power).unsqueeze(1)
    texts = _texts_on(layout, counts.device)
    shares = (texts.ends / texts.along(texts.rows).pow(power)).unsqueeze(1)
    return texts.through(texts.along(counts) * shares)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _lengths_of(layout: Layout, device: torch.device) -> Tensor:
    return copied(torch.tensor(layout.lengths, dtype=torch.float64, device=CPU), device)


def sequence_balance(cp: ContextParallelHandler, counts: Tensor, sums: Tensor) -> Tensor:
    """Return this rank's share of the mean, over all sequences of the batch, of sums over W of
    mean(chosen) * mean(score), which are means over the rows of a sequence.

    `counts` (P, W): of `part_counts`. `sums` (P, W), with gradients: of `part_sums`. Every rank of
    the group calls it. The shares of all micro-batches and ranks add up to the mean.
    """
    weights = text_means(cp, cp.group.sum(counts), 2)
    return (weights.to(sums.dtype) * sums).sum() / _size_of(cp.plan).texts


def batch_balance(cp: ContextParallelHandler, counts: Tensor, sums: Tensor) -> Tensor:
    """Return this rank's share of the sum over W of mean(chosen) * mean(score), which are means
    over the rows of the whole batch. Nothing is exchanged.

    `counts` (W,): those of `expert_counts`, summed over the whole batch. `sums` (P, W), with
    gradients: of `part_sums`.
    """
    weights = counts.double() / batch_tokens(cp) ** 2
    return (weights.to(sums.dtype) * batch_sum(cp, sums)).sum()


def group_tokens(cp: ContextParallelHandler) -> int:
    """The tokens of the group's sequences."""
    return _size_of_group(cp.layout).tokens


def batch_tokens(cp: ContextParallelHandler) -> int:
    """The tokens of all sequences of the batch."""
    return _size_of(cp.plan).tokens


# ---- trees ---------------------------------------------------------------------------------------


class _Texts(NamedTuple):
    """The texts of a group with trees, each a path of parts from a root to an end."""

    rows: Tensor
    """float64 (P,): those of each part."""
    ends: Tensor
    """float64 (P,): 1 where a text ends, so that no other part continues this one."""
    levels: list[tuple[Tensor, Tensor]]
    """Parts of the same depth, from 1 on, and the one that each continues."""
    of_spans: list[int]
    """The part of each span of this rank."""

    def along(self, x: Tensor) -> Tensor:
        """Sum parts (P, ...) from the root of each to itself."""
        x = x.clone()
        for own, parents in self.levels:
            x[own] += x[parents]
        return x

    def through(self, x: Tensor) -> Tensor:
        """Sum each part (P, ...) and all that go on from it."""
        x = x.clone()
        for own, parents in reversed(self.levels):
            x.index_add_(0, parents, x[own])
        return x


@lru_cache(maxsize=8)
def _texts_on(layout: Layout, device: torch.device) -> _Texts:
    """Those of the host, copied, which no layer waits for."""
    texts = _texts_of(layout)
    levels = [(copied(own, device), copied(above, device)) for own, above in texts.levels]
    rows, ends = copied(texts.rows, device), copied(texts.ends, device)
    return texts._replace(rows=rows, ends=ends, levels=levels)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _texts_of(layout: Layout) -> _Texts:
    layout.plan.core.expect_trees("a loss or count of routers")
    starts, rows, parents, depths = list[tuple[int, int]](), list[int](), list[int](), list[int]()
    number: list[int] = []  # the part of each stretch
    both = zip(layout.stretches, layout.parents, strict=True)
    for place, (_, own) in enumerate(itertools.groupby(both, lambda pair: pair[0].sequence)):
        stretches = list(own)
        whole = all(parent < 0 for _, parent in stretches)  # no tree, and one part
        for i, (stretch, parent) in enumerate(stretches):
            if whole and i:
                rows[-1] += stretch.rows
            else:
                above = number[parent] if parent >= 0 else -1
                starts.append((place, stretch.start))
                rows.append(stretch.rows)
                parents.append(above)
                depths.append(depths[above] + 1 if above >= 0 else 0)
            number.append(len(rows) - 1)
    levels: list[list[int]] = [[] for _ in range(max(depths))]
    for part, depth in enumerate(depths):
        if depth:
            levels[depth - 1].append(part)
    ends = torch.ones(len(rows), dtype=torch.float64, device=CPU)
    ends[[part for part in set(parents) if part >= 0]] = 0
    places = {sequence: place for place, sequence in enumerate(layout.sequences)}
    return _Texts(
        torch.tensor(rows, dtype=torch.float64, device=CPU),
        ends,
        [
            (torch.tensor(own, device=CPU), torch.tensor([parents[i] for i in own], device=CPU))
            for own in levels
        ],
        [bisect_right(starts, (places[span.sequence], span.start)) - 1 for span in layout.spans],
    )


class _Size(NamedTuple):
    """Numbers of sequences and their tokens; of trees those of texts, each with all its tokens."""

    texts: int
    tokens: int


def _size_of_group(layout: Layout) -> _Size:
    if not layout.has_branches:
        return _Size(len(layout.lengths), sum(layout.lengths))
    texts = _texts_of(layout)
    tokens = (texts.along(texts.rows) * texts.ends).sum()
    return _Size(int(texts.ends.sum()), int(tokens))


@lru_cache(maxsize=8)
def _size_of(plan: Plan) -> _Size:
    """Of the whole batch."""
    if not plan.core.has_branches():
        return _Size(len(plan.lengths), sum(plan.lengths))
    sizes = [
        _size_of_group(Layout(plan, micro_batch, group.first_rank))
        for micro_batch, groups in enumerate(plan.micro_batches)
        for group in groups
    ]
    return _Size(*map(sum, zip(*sizes, strict=True)))
