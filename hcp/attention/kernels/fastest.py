"""The family "auto": for every launch the faster of two kernels, by measurements.

A rank decides from its own launches, because nothing that is exchanged depends on the kernel. Each
kernel takes the other's log-sum-exp, so forward and backward may use different ones.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hcp.attention.kernels import Kernel, Launch, in_packs, kernels_of
from hcp.errors import HcpError


class Measured(NamedTuple):
    """How many times as fast FlashAttention-4 is as PyTorch's FlashAttention-2 on a pack."""

    lengths: tuple[int, ...]
    forward: float
    backward: float


# NVIDIA H200, torch 2.11.0 with CUDA 13.0, flash-attn-4 4.0.0b36: causal, bfloat16, 32 query heads
# and 8 of keys, of 128; host time included; both kernels in one run of
# benchmarks/bench_attention_kernels.py, 2026-11-21.
MEASURED_CAPABILITY = 9, 0
MEASURED_HEADS, MEASURED_SIZE = 32, 128
MEASURED = (
    Measured((65536,), 2.01, 1.84),
    Measured((32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128), 2.15, 1.97),
    Measured((8192,), 2.21, 2.10),
    Measured((4096, 2048, 1024, 512, 256, 128, 64, 64), 1.93, 2.02),
    Measured((1024,) * 64, 1.61, 1.67),
    Measured((1024,) * 8, 1.61, 1.57),
    Measured((512,) * 16, 1.53, 1.35),
    Measured((128,) * 512, 0.64, 0.97),
)


def _place(pairs: int, queries: int, columns: int) -> tuple[float, float]:
    """The place of a launch among others, both numbers in doublings: its work (pairs of a query and
    a key that it sees, times the heads' columns of keys and values), and the keys that a query sees
    on average."""
    return math.log2(pairs * columns), math.log2(pairs / queries)


def _place_of(measured: Measured) -> tuple[float, float]:
    pairs = sum(length * (length + 1) // 2 for length in measured.lengths)
    return _place(pairs, sum(measured.lengths), 2 * MEASURED_HEADS * MEASURED_SIZE)


_PLACES = {measured: _place_of(measured) for measured in MEASURED}


def nearest(launch: Launch, query: Tensor, value: Tensor) -> Measured:
    """The measured pack that is most like the launch."""
    columns = query.shape[1] * (query.shape[2] + value.shape[2])
    queries = sum(entry.query_rows for entry in launch.entries)
    place = _place(max(launch.pairs, 1), queries, columns)
    return min(MEASURED, key=lambda measured: math.dist(place, _PLACES[measured]))


class _Flash4(Kernel, Protocol):
    """FlashAttention-4's kernel, whose library may be missing."""

    def takes(self, query: Tensor, value: Tensor) -> bool: ...


@dataclass(frozen=True)
class Faster:
    """Computes each launch by FlashAttention-4 or -2, as the measured pack most like it says."""

    flash4: _Flash4
    flash2: Kernel

    dtypes = (torch.bfloat16, torch.float16)

    launches = staticmethod(in_packs)

    def capped(self, softcap: float) -> Kernel | None:
        return self.flash4.capped(softcap)

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        gain = nearest(launch, query, value).forward
        return self._chosen(gain, query, value).forward(launch, query, key, value, scale)

    def backward(
        self,
        launch: Launch,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gain = nearest(launch, query, value).backward
        return self._chosen(gain, query, value).backward(
            launch, grad_out, grad_lse, query, key, value, out, lse, scale
        )

    def _chosen(self, gain: float, query: Tensor, value: Tensor) -> Kernel:
        return self.flash4 if gain > 1.0 and self.flash4.takes(query, value) else self.flash2


def installed() -> str | None:
    """The version of flash-attn-4, found without importing it."""
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None


def for_device(device: torch.device) -> Sequence[Kernel]:
    known = kernels_of("torch", device)
    if device.type != "cuda" or installed() is None:
        return known
    if torch.cuda.get_device_capability(device) != MEASURED_CAPABILITY:
        return known
    try:
        module = importlib.import_module("hcp.attention.kernels.flash_attn_4")
    except ImportError as error:
        raise HcpError(
            f"flash-attn-4 is installed and cannot be imported ({error}): install what it needs, "
            "or use the backend 'torch'"
        ) from error
    return Faster(module.Flash4(), known[0]), *known
