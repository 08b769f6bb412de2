"""The bytes of a micro-batch on one rank, in integers, so that all ranks decide alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hcp._validate import expect_names, expect_size
from hcp.planning import saved


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes that a micro-batch takes on one rank, in addition to what the rank always holds::

        (rows + alignment - 1) * (activation + logit) + gathered * tokens

    ``rows`` are those of the fullest rank of the group. ``tokens`` are those of the group's
    sequences if its degree is more than 1, else 0. In a pipeline a stage keeps up to
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

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = expect_size(f"memory.{name}", getattr(self, name), "bytes", least=0)
            object.__setattr__(self, name, value)

    def bytes(self, rows: int, tokens: int, degree: int) -> int:
        """Return the bytes on a rank with so many rows of sequences of so many tokens."""
        return rows * (self.activation + self.logit) + (degree > 1) * tokens * self.gathered

    def save(self, path: str | os.PathLike[str], provenance: Mapping[str, Any]) -> None:
        """Write the integers as JSON, for :meth:`load`. ``provenance``: what they were measured on,
        as JSON values. Raises ValueError for a model that limits nothing."""
        expect_limiting(self)
        saved.write(path, FORMAT, {"memory": asdict(self)}, provenance)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MemoryModel:
        """Read a file of :meth:`save` or ``python -m hcp calibrate --memory``: equal integers on
        every rank.

        Raises ValueError that names the file and the entry that is not as expected.
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
    expect_names("memory", data["memory"], MemoryModel.__slots__)
    return expect_limiting(MemoryModel(**data["memory"]))
