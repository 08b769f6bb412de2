"""Measured speeds of kernels, and which of them tell most about a launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hcp.attention.kernels import Call

HEADS, KEY_HEADS, SIZE = 32, 8, 128
"""Heads of all measured packs, and their size."""

Place = tuple[float, float]
"""Where a launch stands among others, both numbers in doublings: its work (pairs of a query and a
key that it sees, times the heads' columns of keys and values), and the keys that a query sees on
average."""


def _place(pairs: int, queries: int, columns: int) -> Place:
    return math.log2(pairs * columns), math.log2(pairs / queries)


@dataclass(frozen=True)
class Speed:
    """How many times as fast as PyTorch's FlashAttention-2 a kernel is on a causal pack."""

    lengths: tuple[int, ...]
    forward: float
    backward: float

    @cached_property
    def place(self) -> Place:
        """The place of the pack."""
        pairs = sum(length * (length + 1) // 2 for length in self.lengths)
        return _place(pairs, sum(self.lengths), 2 * HEADS * SIZE)

    def gain(self, *, backward: bool) -> float:
        """The number of a direction."""
        return self.backward if backward else self.forward


Capability = tuple[int, int]
Speeds = dict[str, tuple[Speed, ...]]
"""By family."""

MEASURED: dict[Capability, Speeds] = {
    # NVIDIA H200, torch 2.11.0 with CUDA 13.0, flash-attn-4 4.0.0b36: bfloat16, host time included;
    # both kernels in one run of benchmarks/bench_attention_kernels.py, 2026-11-21.
    (9, 0): {
        "flash_attn_4": (
            Speed((65536,), 2.01, 1.84),
            Speed((32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128), 2.15, 1.97),
            Speed((8192,), 2.21, 2.10),
            Speed((4096, 2048, 1024, 512, 256, 128, 64, 64), 1.93, 2.02),
            Speed((1024,) * 64, 1.61, 1.67),
            Speed((1024,) * 8, 1.61, 1.57),
            Speed((512,) * 16, 1.53, 1.35),
            Speed((128,) * 512, 0.64, 0.97),
        ),
    },
}
"""By compute capability and family. A family without a row is measured where it is first used."""


def place_of_call(call: Call) -> Place:
    """The place of a launch."""
    launch, query, value = call.launch, call.query, call.value
    columns = query.shape[1] * (query.shape[2] + value.shape[2])
    queries = sum(entry.query_rows for entry in launch.entries)
    return _place(max(launch.pairs, 1), queries, columns)


def nearest(speeds: Sequence[Speed], place: Place) -> Speed:
    """The measured pack that is most like a place."""
    return min(speeds, key=lambda speed: math.dist(place, speed.place))


def gain_of(family: str, speeds: Sequence[Speed], place: Place, *, backward: bool) -> float:
    """How many times as fast as "torch" a family is, as far as is known; 0: nothing is known."""
    if family == "torch":
        return 1.0
    return nearest(speeds, place).gain(backward=backward) if speeds else 0.0
