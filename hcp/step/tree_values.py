"""Values of the rollouts of prefix trees, on the ranks that compute them, at any degree.

T rows of this rank; R rollouts of this rank's group: those of each tree end to end, in the order of
``cp.layout.sequences``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcp.exchange.move import sum_by_sequence
from hcp.step.dispatch import LocalBatch
from hcp.step.handler import ContextParallelHandler
from hcp.step.trees import TREE_PATHS, TREE_ROWS, TREE_SIZES


class TreeValues:
    """What rollouts of a micro-batch's trees sum up to, and what rows get of them.

    A field of rollouts has the rule ``hcp.Payload("whole")`` and the rows of
    :meth:`hcp.Trees.by_tree`: then ``local[name]`` is (R, ...). Sums have the same bits on every
    run.
    """

    def __init__(self, cp: ContextParallelHandler, local: LocalBatch) -> None:
        """Read the fields of :meth:`hcp.Trees.fields`.

        Args:
            cp: the handler of the micro-batch.
            local: this rank's rows of it.

        Raises:
            ValueError: the samples lack these fields.
        """
        absent = [name for name in (TREE_ROWS, TREE_SIZES, TREE_PATHS) if name not in local]
        if absent:
            raise ValueError(
                f"the samples have no field {absent[0]!r}, expected those of trees.fields(): "
                "dispatch them with fields=hcp.Trees.RULES"
            )
        self._cp, self._own = cp, cp.rows - cp.layout.padding
        before = local[TREE_SIZES].cumsum(0) - local[TREE_SIZES]  # parts and leaves
        totals = local[TREE_SIZES].sum(0).tolist()
        self._parts, self.rollouts = totals
        """``rollouts``: how many this rank's group has, R."""
        rows = local[TREE_ROWS][: self._own]
        first = cp.sequences.repeat(before)[: self._own]
        self._part = rows[:, 0] + first[:, 0]
        self._ended = rows[:, 1] >= 0
        self._leaf = (rows[:, 1] + first[:, 1])[self._ended]
        bounds = cp.payloads[TREE_PATHS].cu_seqlens.to(rows.device)
        paths = local[TREE_PATHS] + before.flip(1).repeat_interleave(bounds.diff(), dim=0)
        self._path_leaf, self._path_part = paths.t().contiguous().unbind()

    def sum_over_paths(self, x: Tensor) -> Tensor:
        """Sum rows over each rollout, from its first token to its last, with gradients.

        Every rank of the group calls it.

        Args:
            x: (T, ...), floats.

        Returns:
            (R, ...), the same on each rank of the group.
        """
        own = self._checked(x, self._cp.rows, "rows")[: self._own]
        parts = sum_by_sequence(own, _bounds(self._part, self._parts))
        parts = self._cp.group.sum(parts)
        return sum_by_sequence(parts[self._path_part], _bounds(self._path_leaf, self.rollouts))

    def sum_over_leaves(self, y: Tensor) -> Tensor:
        """Give each row the sum of a value of each rollout through it, with gradients.

        Nothing is exchanged. A row of one rollout gets its value. It is the adjoint of
        ``sum_over_paths``.

        Args:
            y: (R, ...), floats.

        Returns:
            (T, ...). Rows of padding are zeros.
        """
        self._checked(y, self.rollouts, "rollouts")
        order = self._path_part.argsort(stable=True)
        bounds = _bounds(self._path_part[order], self._parts)
        parts = sum_by_sequence(y[self._path_leaf[order]], bounds)
        return self._padded(parts[self._part])

    def at_ends(self, y: Tensor) -> Tensor:
        """Put a value of each rollout on its last row, with gradients: ``step.combine`` brings it
        back to where the rollout was loaded, and :meth:`hcp.Trees.ends` takes it out.

        Args:
            y: (R, ...).

        Returns:
            (T, ...), zeros in all other rows.
        """
        self._checked(y, self.rollouts, "rollouts")
        rows = self._ended.nonzero()[:, 0]
        out = y.new_zeros(self._cp.rows, *y.shape[1:])
        return out.index_copy(0, rows, y[self._leaf])

    def _padded(self, x: Tensor) -> Tensor:
        return x if len(x) == self._cp.rows else _with_zeros(x, self._cp.rows)

    @staticmethod
    def _checked(x: Tensor, items: int, what: str) -> Tensor:
        if x.dim() == 0 or x.shape[0] != items:
            raise ValueError(f"the values have shape {tuple(x.shape)}, expected {items} {what}")
        return x


def _bounds(numbers: Tensor, end: int) -> Tensor:
    """Where each number from 0 to end - 1 begins among ascending ones, and where the last ends."""
    return torch.searchsorted(numbers.contiguous(), torch.arange(end + 1, device=numbers.device))


def _with_zeros(x: Tensor, rows: int) -> Tensor:
    out = x.new_zeros(rows, *x.shape[1:])
    out[: len(x)] = x
    return out
