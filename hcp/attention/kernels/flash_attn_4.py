"""The package flash-attn-4 (FlashAttention-4, 4.0.0b36) under hcp's schedules.

The package takes seconds to compile a kernel at the first use of a dtype, head sizes and kind of
mask. Other lengths and other numbers of sequences use the same kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from flash_attn.cute import interface  # type: ignore[import-not-found]
from torch import Tensor

from hcp.attention.kernels import Call, Kernel, Launch, in_packs, nan_for_infinity
from hcp.attention.kernels.flash_attn_4_compiled import (
    CAPABILITY,
    Backward,
    Caller,
    Forward,
    Pack,
    aligned,
)
from hcp.attention.kernels.shapes import narrowed, widened

CALLER = Caller(interface)


@dataclass(frozen=True)
class Flash4:
    """Computes whole packs in one launch, with values of their own head size and soft-capping.

    The library's log-sum-exp is -inf if scores are NaN, as it is in rows without keys. Such rows
    are the gaps of a pack, which no run of the merge names.
    """

    softcap: float = 0.0

    dtypes = (torch.bfloat16, torch.float16)

    launches = staticmethod(in_packs)

    def takes(self, call: Call) -> bool:
        """Not a backward that must be deterministic: it would take memory for each pair of a
        sequence and a tile of the longest."""
        if call.backward and torch.are_deterministic_algorithms_enabled():
            return False
        return _has_sizes(call.query, call.value)

    def capped(self, softcap: float) -> Flash4:
        return Flash4(softcap)

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        _check_sizes(query, value)
        rows = aligned(query), aligned(key), aligned(value)
        call = Forward(_pack(launch, query.device), *rows, scale, self.softcap)
        out, lse = CALLER(call, query.device)
        return out, nan_for_infinity(lse).transpose(0, 1)

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
        _check_sizes(query, value)
        call = Backward(
            _pack(launch, query.device),
            *_backward_rows(query, key, value, out, grad_out),
            _heads_first(lse),
            None if grad_lse is None else _heads_first(grad_lse.float()),
            scale,
            self.softcap,
        )
        return narrowed(CALLER(call, query.device), query, value)


def _backward_rows(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same rows in the head sizes of a backward.

    The package's backward is right for multiples of 32 alone: for 8 and 16 more than such a one its
    gradients are wrong, without an error. It also wants one size for all where several query heads
    share a head of keys and values.
    """
    size, value_size = (-(-x.shape[2] // 32) * 32 for x in (query, value))
    if query.shape[1] != key.shape[1]:
        size = value_size = max(size, value_size)
    query, key = (aligned(widened(x, size)) for x in (query, key))
    value, out, grad_out = (aligned(widened(x, value_size)) for x in (value, out, grad_out))
    return query, key, value, out, grad_out


def _has_sizes(query: Tensor, value: Tensor) -> bool:
    sizes = query.shape[2], value.shape[2]
    if sizes in _SIZES_EVERYWHERE:
        return True
    return all(size % 8 == 0 and 8 <= size <= _largest_size(query.device) for size in sizes)


_SIZES_EVERYWHERE = {(192, 128), (256, 256)}


@functools.cache
def _largest_size(device: torch.device) -> int:
    return 256 if torch.cuda.get_device_capability(device)[0] == CAPABILITY else 128


def _check_sizes(query: Tensor, value: Tensor) -> None:
    if not _has_sizes(query, value):
        raise ValueError(
            f"head sizes are {query.shape[2]} and {value.shape[2]}, expected multiples of 8 from 8 "
            f"to {_largest_size(query.device)}, or 192 and 128, or 256 and 256, for "
            "FlashAttention-4 on this GPU: use the backend 'torch'"
        )


def _heads_first(rows: Tensor) -> Tensor:
    """(n, H) as (H, n)."""
    return rows.transpose(0, 1).contiguous()


def _pack(launch: Launch, device: torch.device) -> Pack:
    """The launch as the package takes it, made once for all layers."""
    pack: Pack | None = launch.kept.get(__name__)
    if pack is None:
        sizes = launch.sizes()
        left, right = (None if limit < 0 else limit for limit in launch.window)
        longest = max(queries for queries, _ in sizes), max(keys for _, keys in sizes)
        bounds_q, bounds_k = map(_at_16_bytes, launch.bounds(device))
        pack = launch.kept[__name__] = Pack(bounds_q, bounds_k, *longest, left, right)
    return pack


def _at_16_bytes(bounds: Tensor) -> Tensor:
    """Bounds as the package wants them: it would copy others in every call."""
    return bounds if bounds.data_ptr() % 16 == 0 else bounds.clone()


def for_device(device: torch.device) -> Sequence[Kernel]:
    return (Flash4(),)
