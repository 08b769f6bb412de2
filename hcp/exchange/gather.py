"""Gather Python objects and messages from all ranks.

torch.distributed's own collectives of objects want numpy, which torch does not require.
"""

from __future__ import annotations

import math
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hcp._digest import bytes_of
from hcp._this_process import elsewhere

inherited: list[object] = []
"""The process groups of the process from which this one was forked."""


def _note_inherited() -> None:
    if dist.is_available() and dist.is_initialized():
        inherited.extend(dist.distributed_c10d._world.pg_map)


os.register_at_fork(after_in_child=_note_inherited)


def expect_own(group: dist.ProcessGroup | None) -> None:
    """Raise HcpError if a group (None: the default one) is that of this process's parent. Rows of
    two processes would mix on one connection, and the parent's ranks would end."""
    if any((group or dist.group.WORLD) is each for each in inherited):
        raise elsewhere("a process group")


if TYPE_CHECKING:
    from hcp.exchange.transport import Transport


def all_gather_object(own: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's object, by rank of the group (None: the default one). All its ranks call
    it."""
    expect_own(group)
    payload = pickle.dumps(own)
    device = dist.distributed_c10d._get_object_coll_device(group)
    lengths = [int(x) for x in _all_gather(torch.tensor([len(payload)], device=device), group)]
    block = torch.frombuffer(bytearray(payload.ljust(max(lengths))), dtype=torch.uint8)
    blocks = _all_gather(block.to(device), group)
    return [
        pickle.loads(bytes_of(block)[:length])
        for block, length in zip(blocks, lengths, strict=True)
    ]


def _all_gather(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return parts


def rank_in_messages(transport: Transport) -> int:
    """The rank that an error of this process names: of the job, or without one of the domain."""
    return dist.get_rank() if dist.is_initialized() else transport.rank


# ---- messages of many thousand ranks, most of which say the same ---------------------------------

NO_COUNT = math.nan
_HEAD = struct.Struct("<qd16s")
"""The head of a block, before the message: its length, a count, and a digest of the message."""


class Gathered(NamedTuple):
    """The messages of all ranks. Nothing here takes Python's time for each rank."""

    different: list[bytes]
    """The messages, this rank's first, each at least once."""
    which: Tensor
    """int64 (ranks,), on the CPU: which of these each rank sent."""
    counts: Tensor
    """float64 (ranks,), on the CPU: NaN of a rank that has none."""

    @property
    def messages(self) -> list[bytes]:
        """The message of each rank."""
        return [self.different[i] for i in self.which.tolist()]

    def map(self, function: Callable[[bytes], bytes]) -> Gathered:
        """Replace each message."""
        return self._replace(different=[function(message) for message in self.different])


def block_size(ranks: int) -> int:
    """Return the bytes of a block into which most messages fit: few, where there are many ranks."""
    return max(1024, min(4096, 2**24 // ranks // 8 * 8))


def block_of(message: bytes, count: float, size: int) -> Tensor:
    """Make a rank's block, uint8 (size,), cut or filled with zeros. ``size``: a multiple of 8."""
    digest = blake2b(message, digest_size=16).digest()
    data = _HEAD.pack(len(message), count, digest) + message
    return torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)


def size_needed(blocks: Tensor) -> int:
    """Return the bytes of a block into which the longest message of blocks (N, size) fits."""
    longest = int(blocks.view(torch.int64)[:, 0].max())
    return _HEAD.size + -(-longest // 8) * 8


def read_blocks(blocks: Tensor, rank: int) -> Gathered:
    """Read blocks (N, size), none of which was cut. Of messages that equal the one of ``rank``,
    only the heads are read."""
    words = blocks.view(torch.int64)
    heads = words[:, : _HEAD.size // 8].cpu()
    lengths, counts, *digest = heads.unbind(1)
    differs = torch.zeros(len(words), dtype=torch.bool, device="cpu")
    for column in (lengths, *digest):
        differs |= column != column[rank]
    others = differs.nonzero()[:, 0]
    chosen = torch.cat([torch.tensor([rank], device="cpu"), others])
    read = words[chosen.to(words.device), : size_needed(blocks) // 8].cpu()
    which = torch.zeros(len(words), dtype=torch.int64, device="cpu")
    which[others] = torch.arange(1, len(chosen), device="cpu")
    different = _messages_of(read, lengths[chosen].tolist())
    return Gathered(different, which, counts.contiguous().view(torch.float64))


def _messages_of(words: Tensor, lengths: Sequence[int]) -> list[bytes]:
    data, width = bytes_of(words), 8 * words.shape[1]
    starts = range(_HEAD.size, _HEAD.size + len(data), width)
    return [data[at : at + length] for at, length in zip(starts, lengths, strict=True)]
