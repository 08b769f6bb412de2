"""Masks of torch's flex_attention as hcp's: cut into slices of consecutive queries and keys.

L tokens of the sequence, R rows of it that are looked at together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hcp._validate import expect_size
from hcp.planning.mask import BOTH, CAUSAL, FULL, INVERSE_CAUSAL, Mask, Slice

__all__ = ["mask_of_flex"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key: (batch, head, query, key) to a bool, as flex_attention takes it."""

_PAIRS = 2**24
"""Pairs that are looked at together, a byte each."""
_KINDS = {(0, 0): FULL, (0, 1): CAUSAL, (1, 0): INVERSE_CAUSAL, (1, 1): BOTH}
"""The kind of a slice by what its first key and its last key move with each query."""

Run = tuple[int, int]
"""Consecutive keys of one query: the first, and one after the last."""


def mask_of_flex(
    given: MaskMod | BlockMask, length: int, *, heads: int = 1, most_slices: int = 4096
) -> Mask:
    """Return the mask of one sequence of `length` tokens as slices, exactly.

    `given`: a `mask_mod`, which is asked for batch 0 and each of so many `heads`, or a BlockMask of
    one batch. Every pair of tokens is asked once for each head: make the mask of a length once, and
    keep it. Raises ValueError for a mask that differs between heads, is not square, or is cut into
    more than `most_slices` (strided and random patterns): kernels compute each slice by itself.
    """
    length, heads = expect_size("length", length), expect_size("heads", heads)
    seen = _of_blocks(given, length) if isinstance(given, BlockMask) else None
    mask_mod = given.mask_mod if isinstance(given, BlockMask) else given
    done: list[Slice] = []
    growing: list[_Growing] = []
    for first, rows in _rows(mask_mod, length, heads):
        visible = rows if seen is None else seen(first, rows)
        for query, runs in enumerate(_runs(visible, most_slices, first), first):
            growing = _grown(growing, runs, query, done)
            if len(done) + len(growing) > most_slices:
                raise _too_many(query, most_slices)
    return Mask(length, [*done, *(each.slice(length) for each in growing)])


def _rows(mask_mod: MaskMod, length: int, heads: int) -> Iterator[tuple[int, Tensor]]:
    """Yield rows of the mask, (R, L) bools, with the number of the first one."""
    ask = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    keys, batch = torch.arange(length), torch.tensor(0)
    step = max(1, _PAIRS // length)
    for first in range(0, length, step):
        queries = torch.arange(first, min(length, first + step))
        shape = len(queries), length
        rows = ask(batch, torch.tensor(0), queries, keys).expand(shape).bool()
        for head in range(1, heads):
            if not torch.equal(rows, ask(batch, torch.tensor(head), queries, keys).expand(shape)):
                raise ValueError(
                    f"mask_mod gives head {head} another mask than head 0, expected one for all: "
                    "make a mask of each, and name them: hcp.plan(masks={name: masks})"
                )
        yield first, rows


def _of_blocks(given: BlockMask, length: int) -> Callable[[int, Tensor], Tensor]:
    """Return what blocks make of rows of `mask_mod`: a full block is seen whole, and of an absent
    one nothing."""
    shape = tuple(given.shape)
    if shape != (1, 1, length, length):
        raise ValueError(
            f"the BlockMask has shape {shape}, expected {(1, 1, length, length)}: one mask of one "
            f"sequence of {length} tokens, for all heads"
        )
    some = given.to_dense()[0, 0].bool().cpu()
    full = torch.zeros_like(some)
    if given.full_kv_num_blocks is not None and given.full_kv_indices is not None:
        alone = BlockMask.from_kv_blocks(
            given.full_kv_num_blocks,
            given.full_kv_indices,
            BLOCK_SIZE=given.BLOCK_SIZE,
            seq_lengths=(length, length),
        )
        full = alone.to_dense()[0, 0].bool().cpu()
    height, width = given.BLOCK_SIZE

    def seen(first: int, rows: Tensor) -> Tensor:
        blocks = torch.arange(first, first + len(rows)) // height
        within = torch.arange(length) // width
        of_rows, whole = (x[blocks][:, within] for x in (some, full))
        return whole | (rows & of_rows)

    return seen


def _runs(rows: Tensor, most: int, first: int) -> Iterator[list[Run]]:
    """Yield the runs of keys that each row sees. `first`: the query of the first row."""
    padded = torch.nn.functional.pad(rows, (1, 1)).to(torch.int8)
    edges = padded.diff(dim=1)
    counts = (edges == 1).sum(1)
    if int(counts.max()) > most:
        raise _too_many(first + int(counts.argmax()), most)
    starts, ends = ((edges == step).nonzero()[:, 1].tolist() for step in (1, -1))
    every = zip(starts, ends, strict=True)
    for count in counts.tolist():
        yield list(itertools.islice(every, count))


def _too_many(query: int, most: int) -> ValueError:
    return ValueError(
        f"the mask is cut into more than {most} slices by query {query}, expected at most "
        "most_slices: consecutive queries that see consecutive keys. Strided and random patterns "
        "are none"
    )


class _Growing:
    """A slice that the next query may continue."""

    def __init__(self, query: int, run: Run) -> None:
        self._query, self._first, self.run = query, run, run
        self.steps: tuple[int, int] | None = None

    def next_runs(self) -> list[Run]:
        """The runs by which the next query would continue it."""
        steps: Any = _KINDS if self.steps is None else [self.steps]
        return [(self.run[0] + low, self.run[1] + high) for low, high in steps]

    def take(self, run: Run) -> None:
        self.steps, self.run = (run[0] - self.run[0], run[1] - self.run[1]), run

    def slice(self, end: int) -> Slice:
        """The slice of the queries up to `end`."""
        kind = _KINDS[self.steps or (0, 0)]
        return Slice((self._query, end), (self._first[0], self.run[1]), kind)


def _grown(
    growing: list[_Growing], runs: list[Run], query: int, done: list[Slice]
) -> list[_Growing]:
    """Continue slices by the runs of a query, and begin others. `done` gets those that end."""
    # Runs of a query lie apart, so that no two slices are continued by the same run.
    awaited = {run: each for each in growing for run in each.next_runs()}
    after: list[_Growing] = []
    for run in runs:
        each = awaited.get(run)
        if each is None or each in after:
            each = _Growing(query, run)
        else:
            each.take(run)
        after.append(each)
    kept = set(map(id, after))
    done += [each.slice(query) for each in growing if id(each) not in kept]
    return after
