"""The transport over torch.distributed's point-to-point calls."""

from __future__ import annotations

import itertools
import json
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hcp._ranges import ranged
from hcp.errors import HcpError
from hcp.exchange.agreement import (
    Recent,
    Refusal,
    Stamp,
    differing,
    header_of,
    header_of_refusal,
    label,
    peers_of,
    read_header,
    refused,
    unlabel,
)
from hcp.exchange.gather import (
    NO_COUNT,
    Gathered,
    block_of,
    block_size,
    expect_own,
    inherited,
    read_blocks,
    size_needed,
)
from hcp.exchange.tables import Move
from hcp.exchange.transport import Pending, register


class TorchTransport:
    """Grouped point-to-point calls of torch.distributed.

    ``group`` is hcp's own: nobody else may use it, so that its exchanges never queue behind a
    trainer's collectives. On CPUs the stamp of a call goes ahead of its first rows to each peer,
    and is read before them. On GPUs its tag goes with them, and the device compares.
    """

    name = "torch"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.global_ranks: Sequence[int] = dist.get_process_group_ranks(group)
        # Of a group with several backends too: "cpu:gloo,cuda:nccl", or none named.
        nccl = "cuda:nccl" in str(dist.get_backend_config(group))
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else _CPU
        self.key = register(self)
        self.steps: Iterator[int] = itertools.count(1)
        self.stamps = Stamps(self.rank)
        self.failure_messages = FailureMessages(group, self.rank)

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
        if inherited:
            expect_own(self.group)
        copy_to_self(self.rank, sent, sends, received, receives)
        with _named(self, peers_of(self.rank, (*sends, *receives))):
            headers = self._headers(stamp, sends, receives)
            rows = [
                self._operation(dist.irecv, received[row : row + rows], peer, stamp.tag)
                for peer, row, rows in receives
                if peer != self.rank
            ] + [
                self._operation(dist.isend, sent[row : row + rows], peer, stamp.tag)
                for peer, row, rows in sends
                if peer != self.rank
            ]
            return _TorchPending(self, (sends, receives), headers, _start(rows), (sent, received))

    def _headers(
        self, stamp: Stamp, sends: Sequence[Move], receives: Sequence[Move]
    ) -> _Headers | _DeviceHeaders | None:
        if self.device.type == "cuda":
            to, back = self.stamps.meet(stamp, sends, receives)
            return _DeviceHeaders(self, stamp, to, back) if to or back else None
        moves = *sends, *receives, *self._callers(stamp)
        peers = self.stamps.meet_both_ways(stamp, moves)
        return _Headers(self, stamp, peers) if peers else None

    def _callers(self, stamp: Stamp) -> list[Move]:
        """The callers as peers to compare the call with, whether or not rows are sent."""
        callers = stamp.kind.callers if self.device.type == "cpu" else ()
        return [_to(peer) for peer in callers] if self.rank in callers else []

    def _operation(self, call: Any, rows: Tensor, peer: int, tag: int) -> dist.P2POp:
        return dist.P2POp(call, rows, group=self.group, tag=tag, group_peer=peer)

    def agree(self, stamp: Stamp, peers: Sequence[int]) -> None:
        expect_own(self.group)
        moves = [*map(_to, peers), *self._callers(stamp)]
        peers = self.meet_to_agree(stamp, peers_of(self.rank, moves))
        if peers:
            headers = _Headers(self, stamp, peers)
            with _named(self, peers, headers.messages):
                headers.wait()

    def meet_to_agree(self, stamp: Stamp, peers: Sequence[int]) -> list[int]:
        """Find the peers whose stamps are to be compared. The rows that follow need no stamp."""
        moves = [_to(peer) for peer in peers]
        self.stamps.meet(stamp, moves, moves)
        return self.stamps.meet_both_ways(stamp, moves)

    def compare(self, stamp: Stamp, peer: int, header: Tensor) -> None:
        """Raise HcpError unless a peer's header, on the CPU, is that of a call, or of one that both
        have refused."""
        said, own = read_header(header), stamp.fields
        if "refused" in said:
            if tuple(said["call"]) not in self.stamps.refused:
                raise refused(self.rank, own, peer, said["refused"])
        elif not torch.equal(header, header_of(stamp)):
            raise differing(self.rank, own, peer, said["fields"])

    def refuse(self, refusal: Refusal, peers: Sequence[int]) -> None:
        expect_own(self.group)
        self.stamps.refused.add(refusal.call)
        if self.device.type != "cpu":  # where nobody's host waits for this rank
            self.failure_messages.write(refusal.reason)
            return
        header = header_of_refusal(refusal)
        sends = [self._operation(dist.isend, header, peer, _HEADER_TAG) for peer in peers]
        with suppress(RuntimeError):  # of ranks that have ended
            self.leave((header, _start(sends)))

    def leave(self, messages: object) -> None:
        """Keep the messages that a failed call has under way. A message that is dropped before its
        peer asks for it never arrives, and the peer would wait instead of reading why."""
        _left.setdefault(self.group, []).append(messages)

    def all_gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        return self.all_gather_counted(payload, NO_COUNT, what).messages

    def all_gather_counted(self, payload: bytes, count: float, what: str) -> Gathered:
        given = label(what, payload)
        size = block_size(self.size)
        blocks = self._all_gather(block_of(given, count, size))
        needed = size_needed(blocks)
        if needed > size:
            blocks = self._all_gather(block_of(given, count, needed))
        return unlabel(self.rank, what, read_blocks(blocks, self.rank))

    def _all_gather(self, block: Tensor) -> Tensor:
        expect_own(self.group)
        own = block.to(self.device)
        blocks = own.new_empty(self.size * len(own))
        with _named(self, [r for r in range(self.size) if r != self.rank]):
            _gather_into(blocks, own, group=self.group)
        return blocks.view(self.size, len(own))


_CPU = torch.device("cpu")
_HEADER_TAG = 1
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The collective has another name before torch 2.13."""

_left: weakref.WeakKeyDictionary[dist.ProcessGroup, list[object]] = weakref.WeakKeyDictionary()
"""Messages of failed calls, by group: a rank may drop its transport before it ends."""


def _to(peer: int) -> Move:
    """A move of no rows."""
    return Move(peer, 0, 0)


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


class FailureMessages:
    """Messages of ranks whose devices have stopped, in the job's store, by rank."""

    _PATIENCE = 2.0

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._name, self._rank = f"hcp/{group.group_name}", rank

    @property
    def _store(self) -> dist.Store:
        return dist.PrefixStore(self._name, dist.distributed_c10d._get_default_store())

    def write(self, words: str) -> None:
        with suppress(RuntimeError, ValueError):  # of a job that has ended
            self._store.set(str(self._rank), words)

    def read(self, rank: int, patience: float = 0.0) -> str | None:
        """Read a rank's message. None where there is none within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        with suppress(RuntimeError, ValueError):
            while not self._store.check([str(rank)]):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(0.05)
            return self._store.get(str(rank)).decode()
        return None

    def said(self, ranks: Sequence[int]) -> str:
        """Make the end of an error's text: the messages of these ranks so far."""
        words = ((rank, self.read(rank)) for rank in ranks)
        return "".join(f"; rank {rank} says: {said}" for rank, said in words if said)

    def differing(self, recent: Recent, peer: int, expected: int, found: int) -> HcpError:
        """Make the error of a rank whose device waited for one tag and found another. The peer's
        device has usually stopped too, and its host says why."""
        own = recent.of(expected)
        if own is not None:
            self.write(json.dumps(own))
            words = self.read(peer, self._PATIENCE)
            with suppress(ValueError):
                theirs = json.loads(words or "")
                if theirs != own:
                    return differing(self._rank, own, peer, theirs)
        return recent.differing(peer, expected, found)


class Stamps:
    """The stamps that each peer was last sent, and last sent itself.

    The first rows of a pass to a peer carry the stamp. Later rows of the same stamp need not.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._met: dict[int, Stamp] = {}
        self.refused: set[tuple[Any, ...]] = set()
        """Calls that this rank has refused itself."""

    def meet(
        self, stamp: Stamp, sends: Sequence[Move], receives: Sequence[Move]
    ) -> tuple[list[int], list[int]]:
        """Find the peers that are to be sent the stamp, and those that it is to come from."""
        return self._new(self._sent, stamp.tag, sends), self._new(
            self._received, stamp.tag, receives
        )

    def meet_both_ways(self, stamp: Stamp, moves: Sequence[Move]) -> list[int]:
        """Find the peers to exchange the stamp with in both directions, whichever way rows go.
        Every rank that differs gets an error."""
        # By object, which each pass has anew: a backward that one rank runs twice differs too.
        new = []
        for peer, _, _ in moves:
            if self._met.get(peer) is not stamp and peer != self._rank:
                self._met[peer] = stamp
                new.append(peer)
        return new

    def _new(self, last: dict[int, int], tag: int, moves: Sequence[Move]) -> list[int]:
        new = []
        for peer, _, _ in moves:
            if last.get(peer) != tag and peer != self._rank:
                last[peer] = tag
                new.append(peer)
        return new


class _Headers:
    """Stamps in words, sent ahead of rows and read on the host."""

    def __init__(self, transport: TorchTransport, stamp: Stamp, peers: Sequence[int]) -> None:
        self._transport, self._stamp, self.peers = transport, stamp, peers
        self._own = header_of(stamp).to(transport.device)
        self._received = [torch.empty_like(self._own) for _ in peers]
        self._works = _start(
            [self._receive(peer, header) for peer, header in self._from_peers()]
            + [transport._operation(dist.isend, self._own, peer, _HEADER_TAG) for peer in peers]
        )

    @property
    def messages(self) -> object:
        return self._own, self._received, self._works

    def _from_peers(self) -> Iterator[tuple[int, Tensor]]:
        return zip(self.peers, self._received, strict=True)

    def _receive(self, peer: int, header: Tensor) -> dist.P2POp:
        return self._transport._operation(dist.irecv, header, peer, _HEADER_TAG)

    def wait(self) -> None:
        # What has come first: a peer that refuses its call does not receive.
        for work, (peer, header) in zip(self._works, self._from_peers(), strict=False):
            work.wait()
            while not torch.equal(header, self._own):
                self._transport.compare(self._stamp, peer, header.cpu())
                # A call that this rank has refused too: the next header is that of this one.
                for again in _start([self._receive(peer, header)]):
                    again.wait()
        for work in self._works[len(self.peers) :]:
            work.wait()


class _DeviceHeaders:
    """Tags of stamps, sent with the rows and compared on the device. The host does not wait."""

    def __init__(
        self, transport: TorchTransport, stamp: Stamp, to: Sequence[int], back: Sequence[int]
    ) -> None:
        device = transport.device
        self._own = torch.full((1,), stamp.tag, dtype=torch.int64, device=device)
        self._received = torch.empty(len(back), dtype=torch.int64, device=device)
        operation = transport._operation
        self._works = _start(
            [operation(dist.irecv, self._received[i : i + 1], p, 0) for i, p in enumerate(back)]
            + [operation(dist.isend, self._own, peer, 0) for peer in to]
        )

    @property
    def messages(self) -> object:
        return self._own, self._received, self._works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        torch._assert_async((self._received == self._own).all())


class _TorchPending:
    def __init__(
        self,
        transport: TorchTransport,
        moves: tuple[Sequence[Move], Sequence[Move]],
        headers: _Headers | _DeviceHeaders | None,
        works: list[dist.Work],
        buffers: tuple[Tensor, ...],
    ) -> None:
        self._transport, self._moves = transport, moves
        self._headers, self._works = headers, works
        self._buffers = buffers  # alive until the exchange is over

    def wait(self) -> None:
        messages = self._headers and self._headers.messages, self._works, self._buffers
        with _named(self._transport, self._peers(), messages):
            if self._headers is not None:
                self._headers.wait()
            for work in self._works:
                work.wait()

    def _peers(self) -> list[int]:
        compared = self._headers.peers if isinstance(self._headers, _Headers) else []
        moves = itertools.chain(*self._moves, map(_to, compared))
        return peers_of(self._transport.rank, moves)


class _named:
    """Adds to a failure of torch.distributed the ranks between which it happened, and keeps the
    messages under way after any failure."""

    def __init__(
        self, transport: TorchTransport, peers: Sequence[int], messages: object = None
    ) -> None:
        self._transport, self._peers, self._messages = transport, peers, messages

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._messages is not None:
            self._transport.leave(self._messages)
        if isinstance(error, RuntimeError) and not isinstance(error, HcpError):
            raise HcpError(
                f"rank {self._transport.rank}: the exchange with ranks {list(self._peers)} failed; "
                f"one of them has ended or is late, and its own message says why: {error}",
                code="rank-late",
            ) from error


def copy_to_self(
    rank: int, sent: Tensor, sends: Sequence[Move], received: Tensor, receives: Sequence[Move]
) -> None:
    """Copy the rows that a rank sends to itself."""
    for move in sends:
        if move.peer == rank:
            target = next(own for own in receives if own.peer == rank)
            received[target.row : target.row + target.rows].copy_(
                sent[move.row : move.row + move.rows]
            )
