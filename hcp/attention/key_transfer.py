"""Transfer of keys and values to the ranks that attend to them, and of partial gradients back.

Owners send rows, or stage them where others read them.

The gradients of keys and values, from ``cp.attention`` back to the tensors that it was given:

- The **handler** gave the call of a **layer** a number. The **stamp** of its backward has it too:
  ranks whose stamps differ get an error instead of each other's rows.
- The **schedule** says which keys meet which queries, in stages. Each stage has **launches** of the
  **kernel**, and each launch gives partial gradients (N, G, D) and (N, G, E) of its own keys.
- ``return_gradients`` of the **transfer** takes them, launch by launch. Those of this rank's keys,
  the launches of the first stage, wait here. Those of others' keys travel by the **transport**.
- Before gradients travel, their rank sums those of a row, and rounds the sum to the keys' dtype. A
  relay between nodes sums and rounds again.
- The owner sums its own and those that came. ``sum_gradients`` rotates the sum of rows that were
  sent back, and then rounds it. Where the owner reads, the transport's kernel rounds the sum, and
  ``rotated_back`` rounds once more.

Sums here are in float32 (float64 for float64). docs/internals/schedule.md, "Where key gradients are
summed", has the order and the roundings of each, and the sums that other files take.

Tables of runs say which rows are added: (row, rows, part, part_row) adds rows of a part, which is a
launch or what came from others, to rows of the sum.

N rows, G key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp.attention.kernel_calls import Launches
from hcp.attention.rotary import NO_ROTATION, Rotary
from hcp.exchange.agreement import Stamp
from hcp.exchange.tables import Relay, Schedule
from hcp.exchange.transport import Pending, Share, Shared, SharingTransport, Transport, shares


class KeyTransfer(Protocol):
    """Moves keys to their readers, and their gradients back, in the layers of one kind."""

    def keys(
        self, key: Tensor, value: Tensor, sent: Tensor | None, stamp: Stamp
    ) -> Iterator[list[Tensor]]:
        """Yield keys and values of each launch, stage by stage, while those of the next stage
        arrive. ``sent``: what the first exchange sends, where it is packed already.

        Whoever has used a list clears it, so that its keys leave before more are asked for."""

    def return_gradients(
        self, grads: list[Tensor], rotary: Rotary | None, stamp: Stamp
    ) -> Callable[[], list[Tensor]]:
        """Begin to bring partial gradients of keys and values, launch by launch, to their owners.
        Those of others' keys leave the list when they are sent or staged.

        Returns a function that waits for the gradients of this rank's own, summed and rotated
        back: (T, G, D), (T, G, E), perhaps not contiguous.
        """


def transfer_of(
    schedule: Schedule,
    launches: Launches,
    transport: Transport,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    exchanges: Iterator[int],
) -> KeyTransfer:
    """``sizes``: G, D, E. ``exchanges``: numbers of exchanges through shared memory."""
    if schedule.header.in_place and len(schedule.stages) > 1:
        assert shares(transport)
        return ReadKeys(schedule, launches, transport, sizes, dtype, exchanges)
    return SentKeys(schedule, launches, transport, sizes)


def cut(tensors: list[Tensor], cuts: Tensor | None, count: int) -> list[Tensor]:
    """Cut the rows of all tensors for each of ``count`` launches, one launch after the other."""
    if cuts is None:
        return tensors * count
    views: list[Tensor] = torch.ops.hcp.cut.default(tensors, cuts)
    return views


def sum_gradients(
    grads: list[Tensor],
    home: Tensor | None,
    runs: Tensor,
    rows: int,
    columns: int,
    rotary: Rotary | None,
) -> list[Tensor]:
    """Sum partial gradients (N, heads, size), launch by launch. ``columns``: the tensors of each
    launch, such as keys and values; the sum of the first is rotated back. ``home``: what others
    sent, whose rows have the columns side by side; one more part."""
    sums: list[Tensor] = torch.ops.hcp.sum_gradients.default(
        grads, home, runs, rows, columns, *(rotary or NO_ROTATION)
    )
    return sums


def rotated_back(grad: Tensor, rotary: Rotary | None) -> Tensor:
    """Rotate back a gradient (T, heads, D) that is summed and rounded: this rounds once more."""
    return grad if rotary is None else rotary.rotate_back(grad)


_AS_THEY_ARE = torch.empty(0, 2, dtype=torch.int64, device="cpu")


def keys_and_values(rows: Tensor, cuts: Tensor | None, sizes: tuple[int, int, int]) -> list[Tensor]:
    """Views of rows that have keys and values side by side: (n, G, D) and (n, G, E) of each cut."""
    views: list[Tensor] = torch.ops.hcp.arrive.default(rows, _AS_THEY_ARE, 0, *sizes, cuts)
    return views


def whole_cut(rows: int) -> Tensor:
    return torch.tensor([[0, rows]], device="cpu")


class SentKeys:
    """A transfer in which ranks send rows: keys and values side by side, then their gradients."""

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
        passes_on = [not stage.packs for stage in stages[2:]] + [False]
        for stage, cuts, passes in zip(stages[1:], launches.key_cuts[1:], passes_on, strict=False):
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
            if stage.relay is not None:
                pending = self._relay(stage.relay, received, stamp)
                pending.wait()
            del pending  # and what was sent
            sent = before = None
            current = []
            if stage.attends:
                current = torch.ops.hcp.arrive.default(
                    received, stage.arrange, stage.key_rows, *self._sizes, cuts
                )
            if passes:
                before = received
            del received  # unless they are passed on, or in use as they are
        yield current

    def _relay(self, relay: Relay, received: Tensor, stamp: Stamp) -> Pending:
        """Pass on keys that came from another node."""
        rows = torch.ops.hcp.pack.default([received], relay.table, relay.sent_rows)
        return self._transport.start(rows, relay.sends, received, relay.receives, stamp=stamp)

    def return_gradients(
        self, grads: list[Tensor], rotary: Rotary | None, stamp: Stamp
    ) -> Callable[[], list[Tensor]]:
        schedule, launches = self._schedule, self._launches
        rows, own = schedule.query_rows, grads[: 2 * len(launches.stages[0])]
        if len(schedule.stages) == 1:
            return lambda: sum_gradients(own, None, launches.local_runs, rows, 2, rotary)
        sent = torch.ops.hcp.reduce_to_send.default(
            grads, launches.return_runs, 2, schedule.return_sent_rows
        )
        del grads[len(own) :]
        returned = sent.new_empty((schedule.return_received_rows, sent.shape[1]))
        pending = self._transport.start(
            sent, schedule.return_sends, returned, schedule.return_receives, stamp=stamp
        )

        def sums() -> list[Tensor]:
            nonlocal pending, sent
            pending.wait()
            if schedule.return_relay is not None:
                pending = self._relay_back(schedule.return_relay, returned, sent, stamp)
                pending.wait()
            del pending, sent
            if own:
                return sum_gradients(own, returned, launches.local_runs, rows, 2, rotary)
            parts = keys_and_values(returned, whole_cut(returned.shape[0]), self._sizes)
            return sum_gradients(parts, None, launches.local_runs, rows, 2, rotary)

        return sums

    def _relay_back(self, relay: Relay, returned: Tensor, sent: Tensor, stamp: Stamp) -> Pending:
        """Send to owners in other nodes what all ranks of this one have for them."""
        parts = [returned, sent]
        sums = torch.ops.hcp.reduce_to_send.default(parts, relay.table, 1, relay.sent_rows)
        return self._transport.start(sums, relay.sends, returned, relay.receives, stamp=stamp)


AT_ONCE_BYTES = 2**23
"""The most bytes of keys that all stages read at once. A link brings so many before the host has
queued the attention over local keys, and each read takes the host longer than a link."""


class ReadKeys:
    """A transfer in which ranks read rows: keys and values where their owners staged them, then
    each owner the gradients that the others staged for it, which it sums."""

    def __init__(
        self,
        schedule: Schedule,
        launches: Launches,
        transport: SharingTransport,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        exchanges: Iterator[int],
    ) -> None:
        self._schedule, self._launches, self._sizes = schedule, launches, sizes
        self._transport, self._dtype, self._exchanges = transport, dtype, exchanges
        groups, head_dim, value_dim = sizes
        self._widths = groups * head_dim, groups * value_dim
        rows, readers = schedule.query_rows, schedule.readers
        self._reads = launches.reads
        self._all_cuts: Tensor | None = None
        """The keys of the launches of all stages but the first, where they are read at once."""
        found = [read for read in self._reads if read is not None]
        row_bytes = sum(self._widths) * dtype.itemsize
        if len(found) > 1 and sum(read.rows for read in found) * row_bytes <= AT_ONCE_BYTES:
            self._all_cuts = launches.key_cuts_of_all
            self._reads = [launches.read_of_all]
        self._keys = transport.share(
            Share(rows, self._widths, dtype, schedule.whole_run, readers, self._reads)
        )
        self._whole = whole_cut(rows)

    @property
    def _has_gradients(self) -> bool:
        """Whether any query sees this rank's keys."""
        return bool(self._launches.stages[0] or self._schedule.return_receives)

    @cached_property
    def _grads(self) -> Shared:
        back = self._launches.gradient_return
        like = self._widths, self._dtype
        return self._transport.share(
            Share(
                back.staged_rows,
                *like,
                back.staged_runs,
                back.readers,
                [back.read if self._has_gradients else None],
            )
        )

    def keys(
        self, key: Tensor, value: Tensor, sent: Tensor | None, stamp: Stamp
    ) -> Iterator[list[Tensor]]:
        schedule, launches, own = self._schedule, self._launches, [key, value]
        staged = self._keys.stage(next(self._exchanges), own, stamp)
        current = cut(own, launches.key_cuts[0], len(launches.stages[0]))
        if self._all_cuts is not None:
            reading = staged.read(0)
            yield current
            views = keys_and_values(reading.wait(), self._all_cuts, self._sizes)
            for stage in launches.stages[1:]:
                yield views[: 2 * len(stage)]
                del views[: 2 * len(stage)]
            return
        for number in range(1, len(schedule.stages)):
            if self._reads[number] is None:
                yield current
                current = []
                continue
            reading = staged.read(number)
            yield current
            current = keys_and_values(reading.wait(), launches.key_cuts[number], self._sizes)
        yield current

    def return_gradients(
        self, grads: list[Tensor], rotary: Rotary | None, stamp: Stamp
    ) -> Callable[[], list[Tensor]]:
        own = grads[: 2 * len(self._launches.stages[0])]
        staged = self._grads.stage(next(self._exchanges), grads, stamp, own)
        if not self._has_gradients:
            rows = self._schedule.query_rows
            zeros = [grad.new_zeros(rows, *grad.shape[1:]) for grad in grads[:2]]
            grads.clear()
            return lambda: zeros
        del grads[len(own) :]
        reading = staged.read(0)

        def sums() -> list[Tensor]:
            # The kernel that reads sums and rounds. It does not rotate: the rotation rounds again.
            grad_key, grad_value = keys_and_values(reading.wait(), self._whole, self._sizes)
            return [rotated_back(grad_key, rotary), grad_value]

        return sums
