"""Domains whose ranks have mapped each other's memory, as GPUs of a node do.

Halves, mailboxes, counts and signals are those of the transports between GPUs. Here signals and
rows lie in CPU memory, and a thread waits in place of a stream.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hcp import _core
from hcp.exchange.mixed import NodeMemory
from hcp.exchange.peer import PeerMemory, PeerShared
from hcp.exchange.tables import Move
from hcp.exchange.torch_p2p import FailureMessages, TorchTransport
from hcp.exchange.transport import Pending, Share
from hcp.tools.loopback import LoopbackTransport

_creation = threading.Lock()


def memory_of(
    memories: Sequence[torch.Tensor],
    rank: int,
    *,
    buffer_bytes: int,
    timeout: float,
    failure_messages: FailureMessages | None,
    node: Sequence[int],
) -> PeerMemory:
    """One rank's end of memory. ``memories``: that of each rank, as bytes, of which the node's are
    mapped."""

    def view(rank: int, shape: tuple[int, int], dtype: torch.dtype, start: int) -> torch.Tensor:
        return memories[rank].view(dtype)[start : start + shape[0] * shape[1]].view(shape)

    return PeerMemory(
        rank,
        [memory.data_ptr() * (peer in node) for peer, memory in enumerate(memories)],
        view,
        torch.zeros(4, dtype=torch.int64),
        device=torch.device("cpu"),
        stream=0,
        buffer_bytes=buffer_bytes,
        timeout=timeout,
        failure_messages=failure_messages,
    )


class MappedTransport(LoopbackTransport):
    """One whose ranks read each other's memory as GPUs do, through halves and signals."""

    buffer_bytes = 2**20
    timeout = 60.0
    failure_messages = staticmethod(lambda rank: None)

    def __init__(self, world: Any, rank: int) -> None:
        super().__init__(world, rank)
        self.node: Sequence[int] = range(self.size)
        self._peers_memory = self._mapped("memories")

    def _mapped(self, name: str) -> PeerMemory:
        with _creation:
            if not hasattr(self._world, name):
                size = _core.link_bytes(self.size, self.buffer_bytes)
                made = [torch.zeros(size, dtype=torch.uint8) for _ in range(self.size)]
                setattr(self._world, name, made)
        return memory_of(
            getattr(self._world, name),
            self.rank,
            buffer_bytes=self.buffer_bytes,
            timeout=self.timeout,
            failure_messages=type(self).failure_messages(self.rank),
            node=self.node,
        )

    @property
    def half_bytes(self) -> int:
        return self._peers_memory.link.half_bytes

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


class MixedGloo(TorchTransport):
    """One of several nodes of processes: it reads inside a node, and sends between nodes by Gloo.

    ``folder``: the same on all ranks, where files of theirs are mapped.
    """

    BUFFER_BYTES = 2**18
    buffer_bytes = 2 * BUFFER_BYTES

    def __init__(self, folder: str, node: int, timeout: float) -> None:
        super().__init__(dist.new_group(timeout=timedelta(seconds=timeout)))
        first = self.rank - self.rank % node
        self.node = range(first, first + node)
        keys, messages = (
            memory_of(
                [self._file(folder, name, rank) for rank in range(self.size)],
                self.rank,
                buffer_bytes=self.BUFFER_BYTES,
                timeout=timeout,
                failure_messages=self.failure_messages,
                node=self.node,
            )
            for name in ("keys", "messages")
        )
        self.near = NodeMemory(self.node, keys, messages)
        self.all_gather_bytes(b"", "mapped")

    def _file(self, folder: str, name: str, rank: int) -> torch.Tensor:
        size = _core.link_bytes(self.size, self.BUFFER_BYTES)
        path = Path(folder, f"{name} {rank}")
        with path.open("ab") as file:  # whoever is first makes it
            os.truncate(file.fileno(), size)
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def start(
        self,
        sent: torch.Tensor,
        sends: Sequence[Move],
        received: torch.Tensor,
        receives: Sequence[Move],
        *,
        stamp: Any,
    ) -> Pending:
        return self.near.start(super().start, sent, sends, received, receives, stamp)

    @property
    def half_bytes(self) -> int:
        return self.near.half_bytes

    def share(self, share: Share) -> PeerShared:
        return self.near.share(share)
