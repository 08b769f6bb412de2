"""Keys and values on their way to the ranks that attend to them, and partial gradients on their way
home: sent by their owners, or read from where these staged them.

N rows, G key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hcp import ops
from hcp.attention.kernel_calls import Launches, home_of
from hcp.exchange.agreement import Stamp
from hcp.exchange.tables import Schedule
from hcp.exchange.transport import Share, Shared, SharingTransport, Transport, shares


class Turn(NamedTuple):
    """The rotary embedding of this rank's queries and keys, as `ops.rotate` takes it."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


NO_TURN = None, None, False
"""As operators take it."""


class Journey(Protocol):
    """How keys travel in the layers of one kind."""

    def keys(
        self, key: Tensor, value: Tensor, sent: Tensor | None, stamp: Stamp
    ) -> Iterator[list[Tensor]]:
        """Keys and values of each launch, stage by stage, while those of the next stage are on
        their way. ``sent``: what the first exchange sends, where it is packed already."""

    def home(
        self, grads: list[Tensor], turn: Turn | None, stamp: Stamp
    ) -> Callable[[], list[Tensor]]:
        """Bring partial gradients of keys and values, launch by launch, to their owners; what
        waits for those of this rank, summed and turned back: (T, G, D), (T, G, E), not
        contiguous."""


def journey_of(
    schedule: Schedule,
    launches: Launches,
    transport: Transport,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> Journey:
    """``sizes``: G, D, E."""
    if shares(transport) and len(schedule.stages) > 1:
        return _Read(schedule, launches, transport, sizes, dtype)
    return _Sent(schedule, launches, transport, sizes)


def cut(tensors: list[Tensor], cuts: Tensor | None, count: int) -> list[Tensor]:
    """Rows of all tensors for each of ``count`` launches, one after the other."""
    if cuts is None:
        return tensors * count
    views: list[Tensor] = torch.ops.hcp.cut.default(tensors, cuts)
    return views


def summed(
    grads: list[Tensor],
    home: Tensor | None,
    runs: Tensor,
    rows: int,
    columns: int,
    turn: Turn | None,
) -> list[Tensor]:
    """Partial gradients (N, heads, size) summed, those of the first column turned back; ``home``
    is one more part, its columns side by side."""
    sums: list[Tensor] = torch.ops.hcp.sum_gradients.default(
        grads, home, runs, rows, columns, *(turn or NO_TURN)
    )
    return sums


def turned_back(grad: Tensor, turn: Turn | None) -> Tensor:
    """A gradient (T, heads, D) that nothing sums."""
    if turn is None:
        return grad
    return ops.rotate(grad, turn.cos, turn.sin, interleaved=turn.interleaved, inverse=True)


_AS_THEY_ARE = torch.empty(0, 2, dtype=torch.int64, device="cpu")


class _Sent:
    """Peers send rows of keys beside values, and rows of their gradients."""

    def __init__(
        self,
        schedule: Schedule,
        launches: Launches,
        transport: Transport,
        sizes: tuple[int, int, int],
    ) -> None:
        self._schedule, self._launches, self._transport = schedule, launches, transport
        self._sizes = sizes

    def keys(
        self, key: Tensor, value: Tensor, sent: Tensor | None, stamp: Stamp
    ) -> Iterator[list[Tensor]]:
        stages, launches, own = self._schedule.stages, self._launches, [key, value]
        current = cut(own, launches.key_cuts[0], len(launches.stages[0]))
        before: Tensor | None = None
        for stage, cuts in zip(stages[1:], launches.key_cuts[1:], strict=True):
            if sent is None and stage.packs:
                sent, received = torch.ops.hcp.pack_to_send.default(
                    own, stage.pack, stage.sent_rows, stage.received_rows
                )
            else:
                groups, head_dim, value_dim = self._sizes
                received = key.new_empty((stage.received_rows, groups * (head_dim + value_dim)))
                if sent is None:  # nothing, or what the stage before has received
                    sent = received if before is None else before
            pending = self._transport.start(
                sent, stage.sends, received, stage.receives, stamp=stamp
            )
            yield current
            pending.wait()
            current = []
            if stage.entries:
                current = torch.ops.hcp.arrive.default(
                    received, stage.arrange, stage.key_rows, *self._sizes, cuts
                )
            before, sent = received, None
        yield current

    def home(
        self, grads: list[Tensor], turn: Turn | None, stamp: Stamp
    ) -> Callable[[], list[Tensor]]:
        schedule, launches = self._schedule, self._launches
        rows, own = schedule.query_rows, grads[: 2 * len(launches.stages[0])]
        if len(schedule.stages) == 1:
            return lambda: summed(own, None, launches.local_runs, rows, 2, turn)
        sent, home = torch.ops.hcp.reduce_to_send.default(
            grads, launches.home_runs, 2, schedule.home_sent_rows, schedule.home_received_rows
        )
        pending = self._transport.start(
            sent, schedule.home_sends, home, schedule.home_receives, stamp=stamp
        )

        def sums() -> list[Tensor]:
            pending.wait()
            return summed(own, home, launches.local_runs, rows, 2, turn)

        return sums


class _Read:
    """Ranks read rows of keys beside values where their owners staged them, and each owner reads
    and sums the gradients that the others staged for it."""

    def __init__(
        self,
        schedule: Schedule,
        launches: Launches,
        transport: SharingTransport,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self._schedule, self._launches, self._sizes = schedule, launches, sizes
        self._transport, self._dtype = transport, dtype
        groups, head_dim, value_dim = sizes
        self._widths = groups * head_dim, groups * value_dim
        rows, readers = schedule.query_rows, schedule.readers
        self._keys = transport.share(
            Share(rows, self._widths, dtype, schedule.whole_run, readers, schedule.reads)
        )
        self._whole = torch.tensor([[0, rows]], device="cpu")

    @cached_property
    def _grads(self) -> Shared:
        home = home_of(self._schedule, self._launches, self._transport.rank)
        like = self._widths, self._dtype
        return self._transport.share(
            Share(home.staged_rows, *like, home.staged_runs, home.readers, [home.read])
        )

    def keys(
        self, key: Tensor, value: Tensor, sent: Tensor | None, stamp: Stamp
    ) -> Iterator[list[Tensor]]:
        schedule, launches, own = self._schedule, self._launches, [key, value]
        staged = self._keys.stage(next(schedule.exchanges), own, stamp)
        current = cut(own, launches.key_cuts[0], len(launches.stages[0]))
        for number in range(1, len(schedule.stages)):
            if schedule.reads[number] is None:
                yield current
                current = []
                continue
            reading = staged.read(number)
            yield current
            current = self._columns(reading.wait(), launches.key_cuts[number])
        yield current

    def _columns(self, rows: Tensor, cuts: Tensor | None) -> list[Tensor]:
        views: list[Tensor] = torch.ops.hcp.arrive.default(
            rows, _AS_THEY_ARE, 0, *self._sizes, cuts
        )
        return views

    def home(
        self, grads: list[Tensor], turn: Turn | None, stamp: Stamp
    ) -> Callable[[], list[Tensor]]:
        own = grads[: 2 * len(self._launches.stages[0])]
        staged = self._grads.stage(next(self._schedule.exchanges), grads, stamp, own)
        reading = staged.read(0)

        def sums() -> list[Tensor]:
            # The kernel that reads and sums does not turn.
            grad_key, grad_value = self._columns(reading.wait(), self._whole)
            return [turned_back(grad_key, turn), grad_value]

        return sums
