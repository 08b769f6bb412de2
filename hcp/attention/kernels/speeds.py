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
    # NVIDIA H200, torch 2.11.0 with CUDA 13.0, flash-attn-4 4.0.0b36, nvidia-cudnn-frontend 1.32.0
    # on cuDNN 9.19: bfloat16, host time included; all kernels in one run of
    # benchmarks/bench_attention_kernels.py, 2026-11-23.
    (9, 0): {
        "cudnn": (
            Speed((65536,), 1.63, 1.57),
            Speed((32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128), 1.82, 1.64),
            Speed((8192,), 1.75, 1.71),
            Speed((4096, 2048, 1024, 512, 256, 128, 64, 64), 1.79, 1.69),
            Speed((1024,) * 64, 1.88, 1.48),
            Speed((1024,) * 8, 1.62, 1.38),
            Speed((512,) * 16, 1.62, 1.25),
            Speed((128,) * 512, 1.09, 0.93),
            Speed((128,) * 64, 0.80, 0.96),
            Speed((2048,), 1.16, 1.35),
            Speed((4096,), 1.61, 1.59),
            Speed((4096,) * 2, 1.65, 1.62),
            Speed((2048,) * 4, 1.57, 1.51),
            Speed((2048,) * 16, 1.61, 1.56),
            Speed((512,) * 128, 2.13, 1.32),
            Speed((256,) * 256, 2.04, 1.16),
        ),
        "flash_attn_4": (
            Speed((65536,), 1.96, 1.87),
            Speed((32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128), 2.15, 1.97),
            Speed((8192,), 2.22, 2.07),
            Speed((4096, 2048, 1024, 512, 256, 128, 64, 64), 2.01, 2.01),
            Speed((1024,) * 64, 1.66, 1.65),
            Speed((1024,) * 8, 1.74, 1.59),
            Speed((512,) * 16, 1.68, 1.37),
            Speed((128,) * 512, 0.69, 0.99),
            Speed((128,) * 64, 0.90, 1.03),
            Speed((2048,), 2.02, 1.53),
            Speed((4096,), 2.19, 1.90),
            Speed((4096,) * 2, 2.01, 1.93),
            Speed((2048,) * 4, 1.82, 1.79),
            Speed((2048,) * 16, 1.77, 1.84),
            Speed((512,) * 128, 1.53, 1.39),
            Speed((256,) * 256, 1.07, 1.10),
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
