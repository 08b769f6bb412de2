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

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from hcp import _core, ops
from hcp._validate import expect_items, expect_size, expect_sizes
from hcp.exchange.layout import buffer_of, tensor_of
from hcp.exchange.tables import Sections, places
from hcp.exchange.transport import flat_rows
from hcp.planning.cost import CostModel
from hcp.planning.mask import Mask
from hcp.step.fields import PER_SEQUENCE, Payload, Rules

_OF_TREES = ("PARTS", "LEAVES", "PATHS", "SLICES", "POSITIONS")
"""Sections of which each tree has records."""

TREE_ROWS, TREE_SIZES, TREE_PATHS = "tree_rows", "tree_sizes", "tree_paths"


def prefix_trees(
    rollouts: Tensor | Sequence[Tensor | Sequence[int]],
    lengths: Tensor | Sequence[int] | None = None,
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
        rollouts: the tokens of each, (tokens,) integers, whole: prompt and answer. Quicker than
            lists are tensors, and quickest one tensor of all: end to end, (all tokens,), or padded
            at the end, (rollouts, most tokens).
        lengths: tokens of each rollout, where ``rollouts`` is one tensor: ``cu_seqlens.diff()``, or
            the sums of an attention mask's rows.
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
        ValueError: a rollout that is no integers, is empty, or is longer than ``max_tokens``;
            lengths that are not those of one tensor; a cost of times
            (``CostModel.from_function`` or a table), which has no prices of pairs.
    """
    prices = None if cost is None else _prices_of(cost)
    padded = isinstance(rollouts, Tensor) and rollouts.dim() == 2
    tokens, sizes = _joined(rollouts, lengths)
    words = _core.trees(
        buffer_of(tokens),
        tokens.itemsize,
        sizes,
        0 if max_tokens is None else expect_size("max_tokens", max_tokens),
        expect_size("min_shared", min_shared),
        0
        if max_tokens_per_rank is None
        else expect_size("max_tokens_per_rank", max_tokens_per_rank),
        ranks_per_node,
        prices,
    )
    return Trees(TreeTable(tensor_of(words, torch.int64)), tokens, sizes, padded=padded)


def _prices_of(cost: CostModel) -> tuple[int, ...]:
    if cost.table is not None or cost.function is not None:
        raise ValueError(
            "cost has times of whole sequences, expected prices: a tree's time depends on its "
            "pairs. Give a model of prices, such as hcp.CostModel() or what calibrate wrote"
        )
    return cost.prices


def _joined(
    rollouts: Tensor | Sequence[Tensor | Sequence[int]], lengths: Tensor | Sequence[int] | None
) -> tuple[Tensor, list[int]]:
    """All tokens end to end, of 4 or 8 bytes, and how many each rollout has."""
    if (lengths is not None) != isinstance(rollouts, Tensor):
        raise ValueError(
            f"rollouts is a {type(rollouts).__name__} and lengths {lengths!r:.60}, expected one "
            "tensor of all rollouts and their lengths, or a tensor or list of each, and none"
        )
    if isinstance(rollouts, Tensor):
        assert lengths is not None
        given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        sizes = list(expect_sizes("lengths", given, least=0))
        _expect_integers("rollouts", rollouts, 1, 2)
        joined = _end_to_end("rollouts", rollouts, sizes, rollouts.dim() == 2)
    else:
        expect_items("rollouts", rollouts, "tokens of each rollout")
        rows = [_tokens_of(rollout, i) for i, rollout in enumerate(rollouts)]
        joined = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        sizes = [row.numel() for row in rows]
    dtype = joined.dtype if joined.dtype in (torch.int32, torch.int64) else torch.int64
    # The trees read tokens later, when a caller may have overwritten its tensor.
    return joined.to("cpu", dtype, copy=isinstance(rollouts, Tensor)), sizes


def _end_to_end(name: str, x: Tensor, lengths: Sequence[int], padded: bool) -> Tensor:
    """Values of all rollouts (tokens, ...), given so, or ``padded``: (rollouts, most, ...)."""
    count, total, most = len(lengths), sum(lengths), max(lengths, default=0)
    least = (count, most) if padded else (total,)
    if x.dim() < len(least) or len(x) != least[0] or (padded and x.shape[1] < most):
        form = f"{count}, {most} or more" if padded else f"{total}"
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, expected ({form}, ...): {count} rollouts of "
            f"{total} tokens and at most {most}"
        )
    if not padded:
        return x
    flat = x.flatten(0, 1)
    if len(flat) == total:
        return flat
    records = torch.stack((torch.arange(count) * x.shape[1], torch.tensor(lengths)), 1)
    return ops.pack([flat_rows(flat)], records, total).view(total, *x.shape[2:])


def _tokens_of(rollout: Any, i: int) -> Tensor:
    tokens = _tensor_of(f"rollouts[{i}]", rollout, "tokens")
    if not tokens.numel():
        return torch.empty(0, dtype=torch.int64)  # the core names what is empty
    _expect_integers(f"rollouts[{i}]", tokens, 1)
    return tokens


def _tensor_of(name: str, items: Any, what: str) -> Tensor:
    try:
        return items if isinstance(items, Tensor) else torch.as_tensor(items)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is {items!r:.60}, expected {what}: {error}") from None


def _expect_integers(name: str, tokens: Tensor, *dims: int) -> None:
    kind = tokens.dtype
    floats = kind.is_floating_point or kind.is_complex or kind == torch.bool
    if tokens.dim() in dims and not floats:
        return
    padded = " or (rollouts, tokens)" if 2 in dims else ""
    raise ValueError(
        f"{name} is {tuple(tokens.shape)} of {kind}, expected (tokens,){padded} integers"
    )


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

    def __init__(
        self, table: TreeTable, tokens: Tensor, lengths: Sequence[int], *, padded: bool = False
    ) -> None:
        """Name what the core has made.

        Args:
            table: the trees.
            tokens: of all rollouts end to end.
            lengths: tokens of each rollout.
            padded: whether one tensor of all rollouts' values is padded.
        """
        self._table, self._joined, self._padded = table, tokens, padded
        self.rollout_lengths = tuple(lengths)
        """Tokens of each rollout."""
        trees = table.section("TREES")
        self.lengths: list[int] = trees[:, 3].tolist()
        """Rows of each tree, for :func:`hcp.plan`."""
        self.pairs: list[int] = trees[:, 4].tolist()
        """Query-key pairs of each tree."""
        ends = F.pad(trees[:, [0, 1, 2, 5, 6]], (0, 0, 1, 0))
        self._counts = dict(zip(_OF_TREES, ends.diff(dim=0).unbind(1), strict=True))
        """Records of each tree, by section, and before each tree."""
        self._before = dict(zip(_OF_TREES, ends[:-1].unbind(1), strict=True))

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        rows, tokens = sum(self.lengths), sum(self.rollout_lengths)
        return (
            f"Trees(trees={len(self)}, rollouts={len(self.rollout_lengths)}, rows={rows} of "
            f"{tokens})"
        )

    @cached_property
    def rollouts(self) -> list[tuple[int, ...]]:
        """Which rollouts each tree has, in its order."""
        leaves = self._split("LEAVES", self._table.section("LEAVES")[:, 0].tolist())
        return [tuple(own) for own in leaves]

    @cached_property
    def masks(self) -> list[Mask | None]:
        """The mask of each tree, for :func:`hcp.plan`; None: of a single rollout, causal."""
        words = memoryview(buffer_of(self._table.section("SLICES"))).cast("B")
        slices = self._split("SLICES", words, 48)
        runs = self._split("POSITIONS", [(*run,) for run in self._table.records("POSITIONS")])
        each = zip(self.lengths, slices, runs, strict=True)
        return [Mask.of_core(*own) if own[2] else None for own in each]

    def _split(self, name: str, records: Any, size: int = 1) -> Iterable[Any]:
        """Divide records of a section, of so many items each, among the trees."""
        bounds = (0, *(size * self._counts[name].cumsum(0)).tolist())
        return (records[start:end] for start, end in itertools.pairwise(bounds))

    def _places(self, name: str) -> Tensor:
        """The number in its tree of each record of a section."""
        first = self._before[name].repeat_interleave(self._counts[name])
        return torch.arange(len(first)) - first

    @cached_property
    def _leaf_rows(self) -> Tensor:
        """The last row of each leaf's rollout, of all trees' rows end to end."""
        part = self._table.section("LEAVES")[:, 1]
        part = part + self._before["PARTS"].repeat_interleave(self._counts["LEAVES"])
        return self._table.section("PARTS")[:, 1].cumsum(0)[part] - 1

    # ---- values ----

    @cached_property
    def tokens(self) -> list[Tensor]:
        """The tokens of each tree's rows."""
        return self._cut(self._tokens)

    @cached_property
    def _tokens(self) -> Tensor:
        return self._gather(self._joined, "FIRST", sum(self.lengths))

    @cached_property
    def labels(self) -> list[Tensor]:
        """The target of each row: the token after it; -100 where a rollout ends."""
        targets = self._tokens.roll(-1)
        first, rows = self._table.section("FIRST").unbind(1)
        after = (first + rows).clamp(max=len(self._joined) - 1)
        targets[rows.cumsum(0) - 1] = self._joined[after]
        targets[self._leaf_rows] = -100
        return self._cut(targets)

    def first(self, values: Tensor | Sequence[Any]) -> list[Tensor]:
        """Give each row the value of the first rollout through it: for values that are the same
        in all of them.

        Args:
            values: of each rollout, (tokens, ...), a tensor or a list of numbers; or one tensor,
                padded if ``rollouts`` was, or end to end.

        Returns:
            Of each tree, (rows, ...).
        """
        return self._first(self._checked(values))

    def summed(self, values: Tensor | Sequence[Any]) -> list[Tensor]:
        """Give each row the sum over the rollouts through it: for weights of losses.

        Args:
            values: of each rollout, (tokens, ...), a tensor or a list of numbers; or one tensor,
                padded if ``rollouts`` was, or end to end. Floats; integers that sum below 2^53 stay
                exact as float64.

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
        joined = _cat("rows", rows, self.lengths, "trees")
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

    def by_tree(self, values: Tensor | Sequence[Any]) -> list[Any]:
        """Collect one value of each rollout by tree.

        Args:
            values: of each rollout: numbers, or tensors of one shape, or one tensor of all, for a
                payload "whole" (see :class:`TreeValues`); or other values of Python's, for the rule
                "value".

        Returns:
            Of each tree, a tensor (its rollouts, ...), or a tuple of its rollouts' values.
        """
        if len(values) != len(self.rollout_lengths):
            raise ValueError(
                f"values has {len(values)} items, expected {len(self.rollout_lengths)}: rollouts"
            )
        tensor = isinstance(values, Tensor)
        if not tensor and any(value is None or isinstance(value, str | tuple) for value in values):
            return [tuple(values[i] for i in own) for own in self.rollouts]
        if not len(values):
            return []
        given = values if isinstance(values, Tensor) else _stacked(values)
        order = self._table.section("LEAVES")[:, 0]
        return list(torch.split(given[order], self._counts["LEAVES"].tolist()))

    def fields(self) -> list[dict[str, Tensor]]:
        """Give fields of each tree's sample, which :class:`TreeValues` reads on the ranks that
        compute it. Dispatch them under ``RULES``."""
        # Of each row its part, and its leaf, if one ends there, or -1.
        part = F.pad(self._places("PARTS").int()[:, None], (0, 1), value=-1)
        rows = part.repeat_interleave(self._table.section("PARTS")[:, 1], 0)
        rows[self._leaf_rows, 1] = self._places("LEAVES").int()
        sizes = torch.stack((self._counts["PARTS"], self._counts["LEAVES"]), 1)
        paths = self._split("PATHS", self._table.section("PATHS").clone())
        columns = self._cut(rows), sizes.unbind(), paths
        names = TREE_ROWS, TREE_SIZES, TREE_PATHS
        return [dict(zip(names, own, strict=True)) for own in zip(*columns, strict=True)]

    def _checked(self, values: Tensor | Sequence[Any]) -> Tensor:
        if isinstance(values, Tensor):
            return _end_to_end("values", values, self.rollout_lengths, self._padded)
        return _cat("values", values, self.rollout_lengths, "rollouts")

    def _first(self, joined: Tensor) -> list[Tensor]:
        return self._cut(self._gather(joined, "FIRST", sum(self.lengths)))

    def _gather(self, joined: Tensor, section: str, rows: int) -> Tensor:
        packed = ops.pack([flat_rows(joined)], self._table.section(section), rows)
        return packed.view(rows, *joined.shape[1:])

    def _cut(self, joined: Tensor) -> list[Tensor]:
        return list(torch.split(joined, self.lengths))


def _stacked(values: Sequence[Any]) -> Tensor:
    """One tensor of one dtype."""
    if all(isinstance(value, int | float) for value in values):
        return torch.tensor(values)
    return torch.stack([torch.as_tensor(value) for value in values])


def _cat(name: str, values: Sequence[Any], lengths: Sequence[int], whose: str) -> Tensor:
    """All values end to end, so many of each."""
    each = []
    for i, own in enumerate(values):
        if _has_tensors(own):
            raise ValueError(
                f"{name}[{i}] is a {type(own).__name__} with tensors, whose gradients it would "
                "lose, expected one tensor or numbers: torch.stack them"
            )
        each.append(_tensor_of(f"{name}[{i}]", own, "numbers"))
    if len(each) != len(lengths):
        raise ValueError(f"{name} has {len(each)} items, expected {len(lengths)}: {whose}")
    for i, (own, length) in enumerate(zip(each, lengths, strict=True)):
        if own.dim() == 0 or own.shape[0] != length:
            raise ValueError(
                f"{name}[{i}] has shape {tuple(own.shape)}, expected {length} rows: those of "
                f"{whose}[{i}]"
            )
    return torch.cat(each) if each else torch.empty(0)


def _has_tensors(items: Any) -> bool:
    return isinstance(items, list | tuple) and any(
        isinstance(item, Tensor) or _has_tensors(item) for item in items
    )
