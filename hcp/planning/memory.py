"""The bytes of a micro-batch on one rank, in integers, so that all ranks decide alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hcp import _core
from hcp._validate import expect_names, expect_size
from hcp.planning import saved


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes that a micro-batch takes on one rank, in addition to what the rank always holds::

        rows * (activation + logit) + (attention * rows + gathered * tokens) / head_chunks

    ``rows`` are those of the fullest rank of the group, and ``tokens`` those of its sequences. The
    second term is 0 for a group of one rank, and otherwise rounded up for each sequence. Alignment
    may add ``alignment - 1`` rows, which count as a sequence of as many tokens on that rank. The
    limit holds these bytes and the ``buffer``. In a pipeline a stage keeps up to
    ``pipeline_stages`` micro-batches at once: divide its memory by that.
    """

    activation: int = 0
    """Bytes that one row keeps for the backward, in all layers of the rank."""
    logit: int = 0
    """One row's logits and their gradient."""
    gathered: int = 0
    """Bytes of one token's keys and values in one layer, where a rank holds those of whole
    sequences: "all_gather" does in both passes, and "p2p" holds their gradients in the backward. 0
    for "a2a"."""
    limit: int = 0
    """The most bytes of one rank in one micro-batch; 0: no limit."""
    attention: int = 0
    """Bytes of one row in attention's own buffers, in one layer of a group of several ranks: blocks
    of a ring, rows exchanged for heads, partial outputs."""
    head_chunks: int = 1
    """The most chunks in which attention may compute its heads, one after the other: its buffers
    then take a fraction of the bytes. A group takes as few as fit."""
    buffer: int = 0
    """Bytes of the limit that exchanges hold on each GPU, whatever its rows: what the process
    groups' ``transport.buffer_bytes`` says. 0: the limit leaves them out."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            unit, least = ("chunks", 1) if name == "head_chunks" else ("bytes", 0)
            value = expect_size(f"memory.{name}", getattr(self, name), unit, least=least)
            object.__setattr__(self, name, value)

    def bytes(self, rows: int, tokens: int, degree: int, chunks: int | None = None) -> int:
        """Count the bytes of a micro-batch on one rank, without ``buffer``.

        Args:
            rows: of the rank.
            tokens: of the sequences of its group.
            degree: ranks of the group.
            chunks: of heads; None: ``head_chunks``.

        Returns:
            The bytes; 2^63 - 1 where they are more.
        """
        model = self if chunks is None else replace(self, head_chunks=chunks)
        return _core.memory_bytes(model.numbers(), rows, tokens, degree)

    def numbers(self) -> tuple[int, ...]:
        """Return the core's integers, in its order."""
        return tuple(getattr(self, name) for name in self.__slots__)

    def save(self, path: str | os.PathLike[str], provenance: Mapping[str, Any]) -> None:
        """Write the integers as JSON, for :meth:`load`.

        Args:
            path: of the file.
            provenance: what they were measured on, as JSON values.

        Raises:
            ValueError: the model limits nothing.
        """
        expect_limiting(self)
        saved.write(path, FORMAT, {"memory": asdict(self)}, provenance)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MemoryModel:
        """Read a file of :meth:`save` or ``hcp calibrate --memory``: equal integers on
        every rank.

        Args:
            path: of the file.

        Returns:
            The model.

        Raises:
            ValueError: an entry that is not as expected; the file and the entry are named.
        """
        return saved.read(path, FORMAT, ("memory",), _from_entries)


FORMAT = "hcp memory model, version 1"
"""The first entry of a saved model."""


def expect_limiting(memory: MemoryModel) -> MemoryModel:
    """Return the model. ValueError for one under which every micro-batch fits: a plan would keep to
    no limit, and say nothing."""
    if memory.limit == 0:
        raise ValueError("memory.limit is 0, expected the bytes that a micro-batch may take, > 0")
    if memory.activation == memory.logit == 0:
        raise ValueError(
            "memory.activation and memory.logit are 0, expected one of them > 0: the bytes of a row"
        )
    return memory


def _from_entries(data: dict[str, Any]) -> MemoryModel:
    names = MemoryModel.__slots__
    expect_names("memory", data["memory"], names[:-1], names[-1:])  # older files have no buffer
    return expect_limiting(MemoryModel(**data["memory"]))
