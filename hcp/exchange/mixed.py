"""Rows inside a node through memory that its ranks have mapped, and between nodes by NCCL.

One exchange does both: it is split by the node of each peer. Groups that lie in one node read keys
and values where their owners staged them, as under ``peer``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hcp.errors import HcpError
from hcp.exchange.agreement import Stamp
from hcp.exchange.mailbox import Mailboxes
from hcp.exchange.nccl import NcclTransport
from hcp.exchange.peer import (
    BUFFER_BYTES,
    PeerMemory,
    PeerShared,
    refuse_in_graphs,
    symmetric_memory,
)
from hcp.exchange.tables import Move
from hcp.exchange.transport import Pending, Share


class NodeMemory:
    """One rank's end of what the ranks of its node share: memory for keys that are read in place,
    and memory for messages."""

    def __init__(
        self,
        node: Sequence[int],
        keys: PeerMemory,
        messages: PeerMemory,
    ) -> None:
        """``node``: its ranks, two or more, which have mapped both."""
        self._inside = frozenset(node) - {keys.rank}
        self._keys, self._messages = keys, messages
        self._mailboxes = Mailboxes(messages)

    def start(
        self,
        far: Callable[..., Pending],
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        stamp: Stamp,
    ) -> Pending:
        """Begin both parts of an exchange. ``far``: ``Transport.start`` for ranks of other nodes,
        and for what this rank sends to itself."""
        near_sends, far_sends = self._split(sent, sends)
        near_receives, far_receives = self._split(received, receives)
        pending = far(sent, far_sends, received, far_receives, stamp=stamp)
        if not near_sends and not near_receives:
            return pending
        near = self._mailboxes.start(sent, near_sends, received, near_receives, stamp)
        return _Both(near, pending)

    def _split(self, buffer: Tensor, moves: Sequence[Move]) -> tuple[list[Move], list[Move]]:
        near = self._inside if self._mailboxes.take(buffer) else ()
        return (
            [move for move in moves if move.peer in near],
            [move for move in moves if move.peer not in near],
        )

    @property
    def half_bytes(self) -> int:
        """See :class:`hcp.exchange.transport.SharingTransport`."""
        return self._keys.link.half_bytes

    def share(self, share: Share) -> PeerShared:
        """See :class:`hcp.exchange.transport.SharingTransport`."""
        return PeerShared(self._keys, share)

    def failure(self) -> HcpError | None:
        """The error of an exchange inside the node that has failed."""
        return self._keys.failure() or self._messages.failure()

    def check(self) -> None:
        """Raise HcpError when an exchange inside the node has failed."""
        error = self.failure()
        if error is not None:
            raise error


class _Both:
    def __init__(self, near: Pending, far: Pending) -> None:
        self._near, self._far = near, far

    def wait(self) -> None:
        self._near.wait()
        self._far.wait()


class MixedTransport(NcclTransport):
    """Reads inside a node, and sends by NCCL between nodes.

    ``nodes``: the ranks of each node, ascending; in each of them all GPUs reach each other.
    ``buffer_bytes``: memory of each rank for staged rows, and as much for messages. Every rank of
    the group makes it together.
    """

    name = "mixed"
    grace = 2.0
    """Seconds that an exchange between nodes waits beyond the timeout. A wait inside the node has
    the timeout itself, and names the rank that did not come. Behind it, an exchange between nodes
    is late through no fault of its peers."""

    _near: NodeMemory | None = None
    """None where a rank is alone in its node."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        nodes: Sequence[Sequence[int]],
        *,
        buffer_bytes: int = BUFFER_BYTES,
        timeout: float = 600.0,
    ) -> None:
        super().__init__(group, timeout=timeout)
        self.buffer_bytes = 2 * buffer_bytes  # of every rank's: one alone in its node needs none
        self.node: Sequence[int] = next(node for node in nodes if self.rank in node)
        if len(self.node) > 1:
            self._near = self._map(buffer_bytes, timeout)

    def _map(self, buffer_bytes: int, timeout: float) -> NodeMemory:
        """Map the memory of the node's other ranks. Only these ranks call it.

        Their group stays: torch names such a group by its ranks and those that there are, and a
        later one of the same name would find the addresses of this one."""
        ranks = [self.global_ranks[rank] for rank in self.node]
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        # One for both: launches that wait for peers leave room for one of their kind.
        stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        mapped = [
            symmetric_memory(self, group, stream, buffer_bytes=buffer_bytes, timeout=timeout)
            for _ in range(2)
        ]
        self.streams.append(stream)
        self._memory = [tensor for tensor, _ in mapped]  # alive as long as it is mapped
        (_, keys), (_, messages) = mapped
        return NodeMemory(self.node, keys, messages)

    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        stamp: Stamp,
    ) -> Pending:
        refuse_in_graphs(self.rank, stamp)  # on a rank that is alone in its node too
        if self._near is None:
            return super().start(sent, sends, received, receives, stamp=stamp)
        return self._near.start(super().start, sent, sends, received, receives, stamp)

    @property
    def half_bytes(self) -> int:
        """See :class:`hcp.exchange.transport.SharingTransport`."""
        return 0 if self._near is None else self._near.half_bytes

    def share(self, share: Share) -> PeerShared:
        """See :class:`hcp.exchange.transport.SharingTransport`."""
        assert self._near is not None, f"rank {self.rank} is alone in its node"
        return self._near.share(share)

    def failed_elsewhere(self) -> HcpError | None:
        return None if self._near is None else self._near.failure()

    def check(self) -> None:
        super().check()
        if self._near is not None:
            self._near.check()
