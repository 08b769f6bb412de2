"""The parts of a handler that sum over ranks: ``cp.group`` and ``cp.sequences``.

Gradients of keys are summed in ``hcp.attention.key_transfer``.

T rows on this rank.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from hcp.exchange.agreement import refuse_transforms
from hcp.exchange.calls import Calls, HandlerPart
from hcp.exchange.layout import Layout
from hcp.exchange.move import AllPairs, check_rows, copy_rows_of, sum_by_sequence, sum_over
from hcp.exchange.routes import Routes
from hcp.exchange.transport import Transport


class HandlerGroup(HandlerPart):
    """The ranks that compute this micro-batch's sequences with this one: ``cp.group``."""

    def __init__(self, layout: Layout, transport: Transport, calls: Calls) -> None:
        self._layout, self._transport, self._calls = layout, transport, calls

    @property
    def rank(self) -> int:
        """This rank's place in the group, 0 on a rank without rows."""
        return self._transport.rank - self._layout.first_rank if self._layout.degree else 0

    @property
    def global_ranks(self) -> list[int]:
        """The group's ranks, as the job numbers them."""
        first = self._layout.first_rank
        return list(self._transport.global_ranks[first : first + self._layout.degree])

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over the ranks that compute these sequences: the same bits on each.

        For statistics of losses and auxiliary losses (tokens of each expert, a sequence's loss).
        With gradients: what the ranks make of the sum adds up, as for torch.distributed.nn's
        all_reduce. Every rank of the group calls it.

        Args:
            x: any shape, the same on these ranks; floats or int64 (other integers would wrap).

        Returns:
            x's shape.
        """

        return self._summed("group.sum", x)

    def sum_over_domain(self, x: Tensor) -> Tensor:
        """Sum x over all ranks of the domain, in this micro-batch: the same bits on each.

        For statistics of all of its sequences, such as the experts' load over the micro-batch. With
        gradients, as ``sum``. Every rank of the domain calls it, also one without rows, whose x is
        that of 0 rows; if x requires gradients on one rank it does on all.

        Args:
            x: any shape, the same on all ranks; floats or int64.

        Returns:
            x's shape.
        """
        return self._summed("group.sum_over_domain", x, everywhere=True)

    def _summed(self, operation: str, x: Tensor, *, everywhere: bool = False) -> Tensor:
        def summed(number: int) -> Tensor:
            if not x.is_floating_point() and x.dtype != torch.int64:
                raise ValueError(f"x is {x.dtype}, expected floats or int64: x.to(torch.int64)")
            refuse_transforms(operation, x)
            if not everywhere:
                return _sum(self._transport, self._calls, operation, x, number)
            stamp = self._calls.domain_stamp(operation, number, x.unsqueeze(0), x.dtype)
            return sum_over(self._transport, self._domain, x, stamp)

        return self._calls.make(operation, summed, everywhere=everywhere)

    @cached_property
    def _domain(self) -> AllPairs:
        return AllPairs(range(self._transport.size), self._transport.rank)


class SequenceValues(HandlerPart):
    """Values of whole sequences: ``cp.sequences``. They have the order of ``layout.sequences``."""

    def __init__(
        self, layout: Layout, transport: Transport, calls: Calls, routes: Routes, cu_seqlens: Tensor
    ) -> None:
        """``cu_seqlens``: local rows of each sequence, summed."""
        self._layout, self._transport = layout, transport
        self._calls, self._routes = calls, routes
        self._cu_seqlens = cu_seqlens

    def sum(self, x: Tensor) -> Tensor:
        """Sum rows over each whole sequence, on every rank of its group, with gradients.

        Padding does not count. Every rank of the group calls it.

        Args:
            x: (T, ...), floats.

        Returns:
            (sequences, ...), in the order of ``layout.sequences``.
        """

        def summed(number: int) -> Tensor:
            rows = self._layout.rows
            if x.dim() == 0 or x.shape[0] != rows:
                raise ValueError(f"x has shape {tuple(x.shape)}, expected {rows} rows")
            if not x.is_floating_point():
                raise ValueError(f"x is {x.dtype}, expected floats: counts as float64 stay exact")
            refuse_transforms("sequences.sum", x)
            own = x[: rows - self._layout.padding]
            sums = sum_by_sequence(own, self._cu_seqlens)
            return _sum(self._transport, self._calls, "sequences.sum", sums, number)

        return self._calls.make("sequences.sum", summed)

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat a value of each sequence for its rows here, with gradients.

        For advantages per token, for example.

        Nothing is exchanged. The gradient is that of this rank's rows.

        Args:
            x: (sequences, ...), in the order of ``layout.sequences``.

        Returns:
            (T, ...). Rows of padding are zeros.
        """
        sequences = len(self._layout.sequences)
        if x.dim() == 0 or x.shape[0] != sequences:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected {sequences} sequences")
        rows = self._layout.rows - self._layout.padding
        repeated = x.repeat_interleave(self._cu_seqlens.diff(), dim=0, output_size=rows)
        return torch.cat((repeated, x.new_zeros(self._layout.padding, *x.shape[1:])))

    def combine(self, x: Tensor) -> Tensor:
        """Bring a value of each sequence back to the rank that loaded it, with gradients.

        Every rank of the domain calls it.

        Args:
            x: (sequences, ...), in the order of ``layout.sequences``; that of the group's first
                rank is taken.

        Returns:
            (n, ...): of the sequences of this micro-batch that this rank loaded, by ascending
            index.
        """

        def combined(number: int) -> Tensor:
            path, sequences = self._routes.by_sequence(), len(self._layout.sequences)
            if x.dim() == 0 or x.shape[0] != sequences:
                raise ValueError(f"x has shape {tuple(x.shape)}, expected {sequences} sequences")
            check_rows(x, sequences, self._transport.device)
            refuse_transforms("sequences.combine", x)
            stamp = self._calls.domain_stamp("sequences.combine", number, x, x.dtype)
            return copy_rows_of(self._transport, path, x, self._calls.agree(path, stamp))

        return self._calls.make("sequences.combine", combined, everywhere=True)


def _sum(transport: Transport, calls: Calls, operation: str, x: Tensor, number: int) -> Tensor:
    stamp = calls.stamp(operation, number, x.unsqueeze(0), x.dtype)
    return sum_over(transport, calls.pairs, x, stamp)
