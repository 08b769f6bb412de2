"""Prefix trees: rollouts that begin alike, as samples that have what they share once.

trees = hcp.prefix_trees(rollouts)              # tokens of each: tensors or lists
plan = hcp.plan(trees.lengths, masks=trees.masks, ranks=8, max_tokens_per_rank=8192)
rows = trees.first(tokens), trees.summed(weights)       # values of rollouts -> of trees
log_probs = trees.by_rollout(step.combine(...))         # values of trees -> of rollouts

Row j of a rollout holds its token j, and its target is token j + 1. Rollouts share it where they
have the same tokens up to j + 1. So a row has one target, and the row before a branch is there once
for each branch. The last row of a rollout has no target, and belongs to it alone: it is a leaf. A
part of a tree is a run of rows that the same rollouts share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from hcp import _core, ops
from hcp._validate import expect_items, expect_size
from hcp.exchange.layout import buffer_of, tensor_of
from hcp.exchange.tables import Sections, places
from hcp.exchange.transport import flat_rows
from hcp.planning.cost import CostModel
from hcp.planning.mask import Mask
from hcp.step.fields import PER_SEQUENCE, Payload, Rules

TREE_ROWS, TREE_SIZES, TREE_PATHS = "tree_rows", "tree_sizes", "tree_paths"


def prefix_trees(
    rollouts: Sequence[Tensor | Sequence[int]],
    *,
    max_tokens: int | None = None,
    min_shared: int = 1,
    cost: CostModel | None = None,
    max_tokens_per_rank: int | None = None,
    ranks_per_node: int = 0,
) -> Trees:
    """Make prefix trees of rollouts: answers to one prompt, or turns that branch.

    The same rollouts in the same order give the same trees. Rollouts that begin alike come side by
    side, else in the order in which they are given.

    Args:
        rollouts: the tokens of each, (tokens,) integers, whole: prompt and answer. Tensors are
            quicker than lists.
        max_tokens: the most rows of a tree. A larger one is divided into trees that repeat what
            they share. None: no limit.
        min_shared: rows that a part has at least, if several rollouts share it. Each part costs
            attention some slices, so that a few equal tokens may not be worth one.
        cost: rollouts stay alone where they cost less than their tree, by these prices. A sequence
            costs the time of all its ranks, at the least degree at which none holds more than
            ``max_tokens_per_rank``. None: trees always.
        max_tokens_per_rank: see ``cost``. None: one rank holds every sequence.
        ranks_per_node: of a node, for ``cost``; 0: one node has all.

    Returns:
        The trees. A rollout that shares nothing is a tree of its own.

    Raises:
        ValueError: a rollout that is no integers, is empty, or is longer than ``max_tokens``; a
            cost of times (``CostModel.from_function`` or a table), which has no prices of pairs.
    """
    prices = None if cost is None else _prices_of(cost)
    tokens, lengths = _joined(rollouts)
    words = _core.trees(
        buffer_of(tokens),
        tokens.itemsize,
        lengths,
        0 if max_tokens is None else expect_size("max_tokens", max_tokens),
        expect_size("min_shared", min_shared),
        0
        if max_tokens_per_rank is None
        else expect_size("max_tokens_per_rank", max_tokens_per_rank),
        ranks_per_node,
        prices,
    )
    return Trees(TreeTable(tensor_of(words, torch.int64)), tokens, lengths)


def _prices_of(cost: CostModel) -> tuple[int, ...]:
    if cost.table is not None or cost.function is not None:
        raise ValueError(
            "cost has times of whole sequences, expected prices: a tree's time depends on its "
            "pairs. Give a model of prices, such as hcp.CostModel() or what calibrate wrote"
        )
    return cost.prices


def _joined(rollouts: Sequence[Tensor | Sequence[int]]) -> tuple[Tensor, list[int]]:
    """All tokens end to end, of 4 or 8 bytes, and how many each rollout has."""
    expect_items("rollouts", rollouts, "tokens of each rollout")
    rows = [_tokens_of(rollout, i) for i, rollout in enumerate(rollouts)]
    joined = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    wide = joined.dtype in (torch.int32, torch.int64)
    return (joined if wide else joined.long()).cpu(), [len(row) for row in rows]


def _tokens_of(rollout: Any, i: int) -> Tensor:
    try:
        tokens = rollout if isinstance(rollout, Tensor) else torch.as_tensor(rollout)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"rollouts[{i}] is {rollout!r:.60}, expected tokens: {error}") from None
    kind = tokens.dtype
    if tokens.dim() != 1 or kind.is_floating_point or kind.is_complex or kind == torch.bool:
        if tokens.numel():
            raise ValueError(
                f"rollouts[{i}] is {tuple(tokens.shape)} of {kind}, expected (tokens,) integers"
            )
        return torch.empty(0, dtype=torch.int64)  # the core names what is empty
    return tokens


class TreeTable(Sections):
    """The trees as the core makes them: ``csrc/include/hcp/hcp.h`` says what each section has."""

    SECTIONS = _core.TREES_SECTIONS
    PLACES = places(SECTIONS)


class Trees:
    """Prefix trees of rollouts, made by :func:`hcp.prefix_trees`: each is one sequence of a plan.

    Values of rollouts are one tensor (tokens, ...) of each, in the order in which these were
    given; those of trees one tensor (rows, ...) of each.
    """

    RULES: ClassVar[Rules] = {TREE_SIZES: PER_SEQUENCE, TREE_PATHS: Payload("whole")}
    """The rules of the fields that ``fields`` gives."""

    def __init__(self, table: TreeTable, tokens: Tensor, lengths: Sequence[int]) -> None:
        """Name what the core has made.

        Args:
            table: the trees.
            tokens: of all rollouts end to end.
            lengths: tokens of each rollout.
        """
        self._table, self._joined = table, tokens
        self.rollout_lengths = tuple(lengths)
        """Tokens of each rollout."""
        ends = table.section("TREES")
        self.lengths: list[int] = ends[:, 3].tolist()
        """Rows of each tree, for :func:`hcp.plan`."""
        self.pairs: list[int] = ends[:, 4].tolist()
        """Query-key pairs of each tree."""
        self._ends = ends[:, :3].t().tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        rows, tokens = sum(self.lengths), sum(self.rollout_lengths)
        return (
            f"Trees(trees={len(self)}, rollouts={len(self.rollout_lengths)}, rows={rows} of "
            f"{tokens})"
        )

    def _records(self, name: str, ends: Sequence[int]) -> Iterable[Tensor]:
        """A section's records of each tree."""
        return self._table.section(name).tensor_split(list(ends)[:-1]) if ends else ()

    @cached_property
    def rollouts(self) -> list[tuple[int, ...]]:
        """Which rollouts each tree has, in its order."""
        leaves = self._records("LEAVES", self._ends[1])
        return [tuple(records[:, 0].tolist()) for records in leaves]

    @cached_property
    def masks(self) -> list[Mask | None]:
        """The mask of each tree, for :func:`hcp.plan`; None: of a single rollout, causal."""
        parts = self._records("PARTS", self._ends[0])
        return [
            None if len(records) == 1 else Mask.tree(*records[:, 1:3].t().tolist())
            for records in parts
        ]

    # ---- values ----

    @cached_property
    def tokens(self) -> list[Tensor]:
        """The tokens of each tree's rows."""
        return self._first(self._joined)

    @cached_property
    def labels(self) -> list[Tensor]:
        """The target of each row: the token after it; -100 where a rollout ends."""
        after = self._joined.roll(-1)
        ends = torch.tensor(self.rollout_lengths, dtype=torch.int64).cumsum(0) - 1
        after[ends] = -100
        return self._first(after)

    def first(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Give each row the value of the first rollout through it: for values that are the same
        in all of them.

        Args:
            values: of each rollout, (tokens, ...).

        Returns:
            Of each tree, (rows, ...).
        """
        return self._first(self._checked(values))

    def summed(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Give each row the sum over the rollouts through it: for weights of losses.

        Args:
            values: of each rollout, (tokens, ...), floats. Integers that sum below 2^53 stay exact
                as float64.

        Returns:
            Of each tree, (rows, ...).

        Raises:
            ValueError: values that are no floats, or of another shape.
        """
        joined = self._checked(values)
        if not joined.is_floating_point():
            raise ValueError(f"values are {joined.dtype}, expected floats: sums are rounded once")
        rows = sum(self.lengths)
        summed = ops.reduce([flat_rows(joined)], self._table.section("SUMS"), rows)
        return self._cut(summed.view(rows, *joined.shape[1:]))

    def by_rollout(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Give each rollout the values of its rows, with gradients: a row's is the sum over the
        rollouts through it.

        Args:
            rows: of each tree, (rows, ...), such as what ``step.combine`` gives.

        Returns:
            Of each rollout, (tokens, ...), in the order in which they were given.
        """
        _expect_lengths("rows", rows, self.lengths, "trees")
        joined = torch.cat(list(rows)) if rows else torch.empty(0)
        lengths = list(self.rollout_lengths)
        return list(torch.split(self._gather(joined, "BACK", sum(lengths)), lengths))

    def ends(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Give each rollout the value of its last row: what :meth:`TreeValues.at_ends` has put
        there.

        Args:
            rows: of each tree, (rows, ...).

        Returns:
            One of each rollout, (...).
        """
        return [values[-1] for values in self.by_rollout(rows)]

    def by_tree(self, values: Sequence[Any]) -> list[Any]:
        """Collect one value of each rollout by tree.

        Args:
            values: of each rollout: numbers, or tensors of one shape, for a payload "whole" (see
                :class:`TreeValues`); or other values of Python's, for the rule "value".

        Returns:
            Of each tree, a tensor (its rollouts, ...), or a tuple of its rollouts' values.
        """
        if len(values) != len(self.rollout_lengths):
            raise ValueError(
                f"values has {len(values)} items, expected {len(self.rollout_lengths)}: rollouts"
            )
        if any(value is None or isinstance(value, str | tuple) for value in values):
            return [tuple(values[i] for i in own) for own in self.rollouts]
        if not values:
            return []
        given = torch.stack([torch.as_tensor(value) for value in values])  # of one dtype
        return [given[list(own)] for own in self.rollouts]

    def fields(self) -> list[dict[str, Tensor]]:
        """Give fields of each tree's sample, which :class:`TreeValues` reads on the ranks that
        compute it. Dispatch them under ``RULES``."""
        parts = list(self._records("PARTS", self._ends[0]))
        leaves = list(self._records("LEAVES", self._ends[1]))
        paths = list(self._records("PATHS", self._ends[2]))
        return [_fields_of(*records) for records in zip(parts, leaves, paths, strict=True)]

    def _checked(self, values: Sequence[Tensor]) -> Tensor:
        _expect_lengths("values", values, self.rollout_lengths, "rollouts")
        return torch.cat(list(values)) if values else torch.empty(0)

    def _first(self, joined: Tensor) -> list[Tensor]:
        return self._cut(self._gather(joined, "FIRST", sum(self.lengths)))

    def _gather(self, joined: Tensor, section: str, rows: int) -> Tensor:
        packed = ops.pack([flat_rows(joined)], self._table.section(section), rows)
        return packed.view(rows, *joined.shape[1:])

    def _cut(self, joined: Tensor) -> list[Tensor]:
        return list(torch.split(joined, self.lengths))


def _expect_lengths(
    name: str, values: Sequence[Tensor], lengths: Sequence[int], whose: str
) -> None:
    found = [len(value) if value.dim() else -1 for value in values]
    if found == list(lengths):
        return
    if len(found) != len(lengths):
        raise ValueError(f"{name} has {len(found)} items, expected {len(lengths)}: {whose}")
    i = next(i for i, length in enumerate(lengths) if found[i] != length)
    raise ValueError(
        f"{name}[{i}] has shape {tuple(values[i].shape)}, expected {lengths[i]} rows: those of "
        f"{whose}[{i}]"
    )


def _fields_of(parts: Tensor, leaves: Tensor, paths: Tensor) -> dict[str, Tensor]:
    """``TREE_ROWS`` (rows, 2): the part of each row, and the leaf that ends there, or -1."""
    rows = parts[:, 1]
    part = torch.arange(len(parts)).repeat_interleave(rows)
    leaf = torch.full_like(part, -1)
    leaf[rows.cumsum(0)[leaves[:, 1]] - 1] = torch.arange(len(leaves))
    return {
        TREE_ROWS: torch.stack((part, leaf), 1),
        TREE_SIZES: torch.tensor([len(parts), len(leaves)]),
        TREE_PATHS: paths.clone(),
    }
