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
    # NVIDIA H100, torch 2.11.0 with CUDA 13.0, flash-attn-4 4.0.0b36, nvidia-cudnn-frontend 1.32.0
    # and Transformer Engine 2.20.2 on cuDNN 9.19: bfloat16, host time included; all kernels in one
    # run of benchmarks/bench_attention_kernels.py, 2026-11-25.
    (9, 0): {
        "cudnn": (
            Speed((65536,), 1.63, 1.57),
            Speed((32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128), 1.83, 1.63),
            Speed((8192,), 1.66, 1.64),
            Speed((4096, 2048, 1024, 512, 256, 128, 64, 64), 1.76, 1.61),
            Speed((1024,) * 64, 1.82, 1.42),
            Speed((1024,) * 8, 1.59, 1.30),
            Speed((512,) * 16, 1.39, 1.14),
            Speed((128,) * 512, 1.22, 0.94),
            Speed((128,) * 64, 0.69, 0.95),
            Speed((2048,), 0.66, 1.20),
            Speed((4096,), 1.41, 1.48),
            Speed((4096,) * 2, 1.64, 1.59),
            Speed((2048,) * 4, 1.55, 1.47),
            Speed((2048,) * 16, 1.64, 1.55),
            Speed((512,) * 128, 2.11, 1.19),
            Speed((256,) * 256, 1.97, 1.06),
        ),
        "flash_attn_4": (
            Speed((65536,), 1.88, 1.88),
            Speed((32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128), 2.17, 1.84),
            Speed((8192,), 2.04, 2.04),
            Speed((4096, 2048, 1024, 512, 256, 128, 64, 64), 1.97, 1.94),
            Speed((1024,) * 64, 1.61, 1.49),
            Speed((1024,) * 8, 1.71, 1.47),
            Speed((512,) * 16, 1.65, 1.20),
            Speed((128,) * 512, 0.81, 0.94),
            Speed((128,) * 64, 0.98, 1.00),
            Speed((2048,), 1.71, 1.58),
            Speed((4096,), 2.00, 1.89),
            Speed((4096,) * 2, 1.98, 1.90),
            Speed((2048,) * 4, 1.80, 1.73),
            Speed((2048,) * 16, 1.70, 1.76),
            Speed((512,) * 128, 1.52, 1.17),
            Speed((256,) * 256, 1.06, 0.99),
        ),
        "te_fused": (
            Speed((65536,), 1.73, 1.56),
            Speed((32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128), 1.77, 1.59),
            Speed((8192,), 1.67, 1.64),
            Speed((4096, 2048, 1024, 512, 256, 128, 64, 64), 1.75, 1.58),
            Speed((1024,) * 64, 1.66, 1.37),
            Speed((1024,) * 8, 1.44, 1.26),
            Speed((512,) * 16, 1.43, 1.09),
            Speed((128,) * 512, 1.17, 0.95),
            Speed((128,) * 64, 0.92, 0.90),
            Speed((2048,), 0.72, 1.15),
            Speed((4096,), 1.56, 1.50),
            Speed((4096,) * 2, 1.62, 1.56),
            Speed((2048,) * 4, 1.50, 1.43),
            Speed((2048,) * 16, 1.60, 1.51),
            Speed((512,) * 128, 1.84, 1.15),
            Speed((256,) * 256, 1.65, 1.01),
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
