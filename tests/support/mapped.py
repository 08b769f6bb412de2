"""Domains in a process whose ranks have mapped each other's memory, as GPUs of a node do.

Halves, slots, counts and signals are those of the transports between GPUs. Here signals and rows
lie in CPU memory, and a thread waits in place of a stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from hcp.exchange.loopback import LoopbackTransport
from hcp.exchange.mixed import NodeMemory
from hcp.exchange.peer import PeerMemory, PeerShared, memory_bytes
from hcp.exchange.tables import Move
from hcp.exchange.torch_p2p import Board
from hcp.exchange.transport import Pending, Share

_creation = threading.Lock()


def memory_of(
    world: Any, name: str, rank: int, *, buffer_bytes: int, timeout: float, board: Board | None
) -> PeerMemory:
    """One rank's end of memory of a name that all ranks of a loopback have mapped."""
    with _creation:
        if not hasattr(world, name):
            size = memory_bytes(world.size, buffer_bytes)
            made = [torch.zeros(size, dtype=torch.uint8) for _ in range(world.size)]
            setattr(world, name, made)
    memories = getattr(world, name)

    def view(rank: int, shape: tuple[int, int], dtype: torch.dtype, start: int) -> torch.Tensor:
        return memories[rank].view(dtype)[start : start + shape[0] * shape[1]].view(shape)

    return PeerMemory(
        rank,
        [memory.data_ptr() for memory in memories],
        view,
        torch.zeros(4, dtype=torch.int64),
        device=torch.device("cpu"),
        stream=0,
        buffer_bytes=buffer_bytes,
        timeout=timeout,
        board=board,
    )


class MappedTransport(LoopbackTransport):
    """One whose ranks read each other's memory as GPUs do, through halves and signals."""

    buffer_bytes = 2**20
    timeout = 60.0
    board = staticmethod(lambda rank: None)

    def __init__(self, world: Any, rank: int) -> None:
        super().__init__(world, rank)
        self.node: Sequence[int] = range(self.size)
        self._peers_memory = self._mapped("memories")

    def _mapped(self, name: str) -> PeerMemory:
        return memory_of(
            self._world,
            name,
            self.rank,
            buffer_bytes=self.buffer_bytes,
            timeout=self.timeout,
            board=type(self).board(self.rank),
        )

    def share(self, share: Share) -> PeerShared:
        return PeerShared(self._peers_memory, share)


class MixedLoopback(MappedTransport):
    """One of several nodes: it reads inside a node, and sends between nodes."""

    ranks_per_node = 2

    def __init__(self, world: Any, rank: int) -> None:
        super().__init__(world, rank)
        first = rank - rank % self.ranks_per_node
        self.node = range(first, min(first + self.ranks_per_node, self.size))
        self.near: NodeMemory | None = None
        if len(self.node) > 1:
            self.near = NodeMemory(self.node, self._peers_memory, self._mapped("mailboxes"))

    def start(
        self,
        sent: torch.Tensor,
        sends: Sequence[Move],
        received: torch.Tensor,
        receives: Sequence[Move],
        *,
        stamp: Any,
    ) -> Pending:
        if self.near is None:
            return super().start(sent, sends, received, receives, stamp=stamp)
        return self.near.start(super().start, sent, sends, received, receives, stamp)
