"""A domain whose ranks are threads of one process.

Plans, tables and buffers are the same as over a network; rows travel as copies. It is for trying a
plan alone, and for testing many of them quickly.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from hcp import ops
from hcp._ranges import ranged
from hcp._this_process import expect_here
from hcp.errors import HcpError
from hcp.exchange.agreement import Refusal, Stamp, differing, label, refused, unlabel
from hcp.exchange.gather import NO_COUNT, Gathered
from hcp.exchange.tables import Move
from hcp.exchange.torch_p2p import copy_to_self
from hcp.exchange.transport import Blocks, Pending, Share, flat_rows, register
from hcp.groups.alone import this_thread

Result = TypeVar("Result")


class _World:
    """The state that the ranks share. Messages between two ranks arrive in the order of sending."""

    def __init__(self, size: int, timeout: float, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.timeout = timeout
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.messages: dict[tuple[int, int], deque[tuple[Stamp, Tensor] | Refusal]] = defaultdict(
            deque
        )
        self.gathered: dict[int, dict[int, tuple[bytes, float]]] = defaultdict(dict)
        self.failed: int | None = None
        self.process = os.getpid()

    def expect_here(self) -> None:
        """Raise HcpError in a forked process, which has none of the other ranks."""
        expect_here(self.process, "a rank of hcp.loopback")

    def wait_for(self, ready: Callable[[], bool], rank: int, what: str) -> None:
        """Wait, holding ``lock``, until ``ready()``. A rank that fails ends the wait at once."""
        done = self.changed.wait_for(lambda: ready() or self.failed is not None, self.timeout)
        if ready():
            return
        if done:
            raise HcpError(
                f"rank {rank}: {what} failed, because rank {self.failed} did", code="rank-failed"
            )
        raise HcpError(f"rank {rank}: {what} did not end within {self.timeout} s", code="rank-late")


class LoopbackTransport:
    """One rank's end of a domain whose ranks are threads of this process."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self._rounds = 0
        self.rank = rank
        self.size = world.size
        self.global_ranks: Sequence[int] = range(world.size)
        self.device = world.device
        self.key = register(self)
        self.steps: Iterator[int] = itertools.count(1)
        self._refused: set[tuple[Any, ...]] = set()
        self.bytes_sent = 0
        """Bytes sent to other ranks so far."""
        self.bytes_received = 0

    @ranged("hcp: exchange")
    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        stamp: Stamp,
    ) -> Pending:
        self._world.expect_here()
        copy_to_self(self.rank, sent, sends, received, receives)
        self.send(sent, sends, stamp)
        others = [m for m in receives if m.peer != self.rank]
        return _LoopbackPending(self, received, others, stamp)

    def agree(self, stamp: Stamp, peers: Sequence[int]) -> None:
        self._world.expect_here()
        nothing = torch.empty(0, 0, device=self.device)
        self.send(nothing, [Move(peer, 0, 0) for peer in peers], stamp)
        for peer in peers:
            self.receive(peer, nothing, stamp)

    def refuse(self, refusal: Refusal, peers: Sequence[int]) -> None:
        self._world.expect_here()
        self._refused.add(refusal.call)
        with self._world.lock:
            for peer in peers:
                self._world.messages[self.rank, peer].append(refusal)
            self._world.changed.notify_all()

    def send(self, sent: Tensor, sends: Sequence[Move], stamp: Stamp) -> None:
        with self._world.lock:
            for peer, row, rows in sends:
                if peer != self.rank:
                    copied = sent[row : row + rows].clone()
                    self._world.messages[self.rank, peer].append((stamp, copied))
                    self.bytes_sent += copied.nbytes
            self._world.changed.notify_all()

    def receive(self, peer: int, target: Tensor, stamp: Stamp) -> None:
        message = self._next(peer)
        while isinstance(message, Refusal):
            if message.call not in self._refused:  # else both have refused it, and go on
                raise refused(self.rank, stamp.fields, peer, message.reason)
            message = self._next(peer)
        theirs, rows = message
        if theirs.identity != stamp.identity:
            raise differing(self.rank, stamp.fields, peer, theirs.fields)
        if (rows.shape, rows.dtype) != (target.shape, target.dtype):
            raise HcpError(
                f"rank {self.rank}: rank {peer} sent {tuple(rows.shape)} of {rows.dtype}, "
                f"expected {tuple(target.shape)} of {target.dtype}",
                code="calls-differ",
            )
        target.copy_(rows)
        self.bytes_received += rows.nbytes

    def _next(self, peer: int) -> tuple[Stamp, Tensor] | Refusal:
        with self._world.lock:
            messages = self._world.messages[peer, self.rank]
            if not messages:
                what = f"the exchange with rank {peer}"
                self._world.wait_for(lambda: bool(messages), self.rank, what)
            return messages.popleft()

    def all_gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        return self.all_gather_counted(payload, NO_COUNT, what).messages

    def all_gather_counted(self, payload: bytes, count: float, what: str) -> Gathered:
        world = self._world
        world.expect_here()
        with world.lock:
            gathered = world.gathered[self._rounds]
            self._rounds += 1
            gathered[self.rank] = label(what, payload), count
            world.changed.notify_all()
            world.wait_for(lambda: len(gathered) == self.size, self.rank, "the gathering")
            # Whoever is in a round has left the one before it.
            world.gathered.pop(self._rounds - 3, None)
            parts, counts = zip(*map(gathered.__getitem__, range(self.size)), strict=True)
        return unlabel(self.rank, what, gathered_of(parts, counts, self.rank))


class _LoopbackPending:
    def __init__(
        self, transport: LoopbackTransport, received: Tensor, receives: Sequence[Move], stamp: Stamp
    ) -> None:
        self._transport, self._received = transport, received
        self._receives, self._stamp = receives, stamp

    def wait(self) -> None:
        for peer, row, rows in self._receives:
            self._transport.receive(peer, self._received[row : row + rows], self._stamp)


class SharingLoopbackTransport(LoopbackTransport):
    """A transport whose ranks also read rows from each other's memory, as over NVLink."""

    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(world, rank)
        self.node: Sequence[int] = range(self.size)

    half_bytes, buffer_bytes = sys.maxsize, 0
    """Nothing is staged in memory of its own."""

    def share(self, share: Share) -> _LoopbackShared:
        return _LoopbackShared(self, share)


class _LoopbackShared:
    def __init__(self, transport: SharingLoopbackTransport, share: Share) -> None:
        self._transport, self._share = transport, share

    @ranged("hcp: exchange")
    def stage(
        self, exchange: int, parts: Sequence[Tensor], stamp: Stamp, own: Sequence[Tensor] = ()
    ) -> _LoopbackStaged:
        share = self._share
        if share.readers:
            columns = [flat_rows(part) for part in parts]
            staged = ops.reduce(columns, share.runs, share.rows, len(share.widths))
            moves = [Move(peer, 0, share.rows) for peer in share.readers]
            self._transport.send(staged, moves, stamp)
        return _LoopbackStaged(self._transport, share, stamp, own)

    def blocks(self, blocks: Blocks) -> _LoopbackBlocks:
        return _LoopbackBlocks(self, self._share, blocks)


class _LoopbackBlocks:
    def __init__(self, shared: _LoopbackShared, share: Share, blocks: Blocks) -> None:
        self._shared, self._share, self._blocks = shared, share, blocks

    def exchange(
        self, exchange: int, columns: Sequence[Tensor], stamp: Stamp
    ) -> _LoopbackReading | None:
        share, blocks = self._share, self._blocks
        first = 2 * blocks.first
        parts = [
            part[:, first : first + share.widths[0]].contiguous()
            for part in _parts_of(columns, blocks)
        ]
        staged = self._shared.stage(exchange, parts, stamp)
        if share.reads[0] is None and not len(blocks.own_runs):
            return None
        rows = columns[0].new_empty(blocks.rows, share.widths[0], dtype=share.dtype)
        torch.ops.hcp.place.default(rows, [parts[blocks.own]], blocks.own_runs, 1)
        if share.reads[0] is not None:
            staged.read(0, into=rows)
        return _LoopbackReading(rows.view(columns[0].dtype))


def _parts_of(columns: Sequence[Tensor], blocks: Blocks) -> list[Tensor]:
    """Each block, (N, words)."""
    records = blocks.heads.tolist()
    count = len(records) // 2
    return [
        torch.cat(
            [
                _words(column, *records[block if i < blocks.by_query else count + block])
                for i, column in enumerate(columns)
            ],
            1,
        )
        for block in range(count)
    ]


def _words(column: Tensor, first: int, heads: int, most: int) -> Tensor:
    """Some heads as words, and zeros up to whole vectors of 16 bytes."""
    flat = column[:, first : first + heads].flatten(1).contiguous().resolve_conj()
    row_bytes = most * column.shape[2:].numel() * column.element_size()
    words = flat.new_zeros(len(flat), 2 * -(-row_bytes // 16), dtype=torch.float64)
    words.view(flat.dtype)[:, : flat.shape[1]] = flat
    return words


class _LoopbackStaged:
    def __init__(
        self,
        transport: SharingLoopbackTransport,
        share: Share,
        stamp: Stamp,
        own: Sequence[Tensor],
    ) -> None:
        self._transport, self._share, self._stamp = transport, share, stamp
        self._own = [flat_rows(part) for part in own]
        self._arrived: dict[int, Tensor] = {}

    def read(self, number: int, into: Tensor | None = None) -> _LoopbackReading:
        """``into``: whose other rows keep what they hold."""
        read = self._share.reads[number]
        assert read is not None
        columns, self._own = self._own, []
        for peer, count in read.owners:
            if peer not in self._arrived:
                self._arrived[peer] = self._receive(peer, count)
            columns += self._arrived[peer].split_with_sizes(self._share.widths, 1)
        for peer in read.done:
            del self._arrived[peer]  # whoever reads on would wait for the next exchange
        widths = len(self._share.widths)
        if into is None:
            return _LoopbackReading(ops.reduce(columns, read.runs, read.rows, widths))
        torch.ops.hcp.place.default(into, columns, read.runs, widths)
        return _LoopbackReading(into)

    def _receive(self, peer: int, rows: int) -> Tensor:
        shape = rows, sum(self._share.widths)
        staged = torch.empty(shape, dtype=self._share.dtype, device=self._transport.device)
        self._transport.receive(peer, staged, self._stamp)
        return staged


class _LoopbackReading:
    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def wait(self) -> Tensor:
        return self._rows


def gathered_of(messages: Sequence[bytes], counts: Sequence[float], rank: int) -> Gathered:
    """Make the value of all ranks' messages and counts."""
    numbers = {message: i for i, message in enumerate(dict.fromkeys([messages[rank], *messages]))}
    which = [numbers[message] for message in messages]
    return Gathered(
        list(numbers),
        torch.tensor(which, dtype=torch.int64, device="cpu"),
        torch.tensor(counts, dtype=torch.float64, device="cpu"),
    )


def one_rank(device: torch.device) -> LoopbackTransport:
    """The transport of a domain of one rank, which exchanges nothing with others."""
    return LoopbackTransport(_World(1, 60.0, device), 0)


class LoopbackGroups:
    """Stands for :class:`hcp.ProcessGroups` of a pure CP x DP domain in :func:`loopback`."""

    roles = ("dp_cp",)

    def __init__(self, transport: LoopbackTransport) -> None:
        self.transport = transport

    def size(self, role: str) -> int:
        return self.transport.size if role == "dp_cp" else self._unknown(role)

    def rank(self, role: str) -> int:
        return self.transport.rank if role == "dp_cp" else self._unknown(role)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the groups of hcp.loopback have no {name!r}, only size, rank and transport of the "
            "domain: for process groups start processes, by torchrun, and take those of "
            "hcp.build_process_groups()"
        )

    def planning_thread(self) -> NoReturn:
        raise ValueError(
            "hcp.loopback has no group of its own for plans that are made ahead: "
            "expected a config with plan_ahead=0"
        )

    def _unknown(self, role: str) -> int:
        raise ValueError(f"role is {role!r}, expected 'dp_cp': loopback has the domain only")


def _full_name(device: torch.device) -> torch.device:
    """Name a device as tensors do: cuda as cuda:0."""
    return torch.empty(0, device=device).device


def loopback(
    ranks: int,
    function: Callable[[Any], Result],
    *,
    timeout: float = 60.0,
    device: torch.device | str = "cpu",
    sharing: bool = False,
) -> list[Result]:
    """Call ``function(groups)`` once per rank, each in a thread.

    A rank that raises ends the others, and its exception is raised here.

    Args:
        ranks: how many there are.
        function: gets that rank's end of the domain, for :func:`hcp.dispatch` and the like.
        timeout: seconds that one exchange may take.
        device: where all ranks' tensors lie, the CPU or one GPU.
        sharing: whether the ranks read keys and values from each other's memory, as over NVLink, or
            send them.

    Returns:
        The results, by rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, expected >= 1")
    world = _World(ranks, timeout, _full_name(torch.device(device)))
    kind = SharingLoopbackTransport if sharing else LoopbackTransport
    results: list[Any] = [None] * ranks
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        this_thread.ranks = ranks
        try:
            if world.device.index is not None:  # a thread begins on the first GPU, whatever this is
                torch.accelerator.set_device_index(world.device.index)
            # One thread serves all backwards of a GPU otherwise, and would wait for itself.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(LoopbackGroups(kind(world, rank)))
        except BaseException as error:
            with world.lock:
                errors[rank] = error
                if world.failed is None:
                    world.failed = rank
                world.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failed is not None:
        raise errors[world.failed]
    return results
