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

from hcp.attention.kernels import (
    Attended,
    Kernel,
    KernelCall,
    Launch,
    ResultGrads,
    is_ordered,
    nan_for_infinity,
    refuse_order,
)
from hcp.attention.kernels.flash_attn_4_compiled import (
    CAPABILITY,
    Backwards,
    Caller,
    Forwards,
    PackedLaunch,
    Shapes,
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

    packs = True

    def takes(self, call: KernelCall) -> bool:
        """Not a backward that must be deterministic: it would take memory for each pair of a
        sequence and a tile of the longest."""
        if is_ordered(call.backward):
            return False
        return _has_sizes(call.query, call.value)

    def capped(self, softcap: float) -> Flash4:
        return Flash4(softcap)

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        like = query.dtype, query.shape, key.shape, value.shape, scale, self.softcap
        known = _known(launch, query.device)
        calls = known.forwards.get(like)
        if calls is None:
            _check_sizes(query, value)
            shapes = Shapes.of(query, key, value)
            calls = known.forwards[like] = Forwards(known.pack, shapes, scale, self.softcap)
        out, lse = CALLER(calls, [query, key, value], [])
        return out, nan_for_infinity(lse).transpose(0, 1)

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        refuse_order("flash_attn_4")
        (grad_out, grad_lse), (query, key, value, out, lse) = grads, attended
        rows, sums = [query, key, value, out, grad_out], [lse]
        if grad_lse is not None:
            sums.append(grad_lse.float())
        like = query.dtype, query.shape, key.shape, value.shape, scale, self.softcap, len(sums)
        known = _known(launch, query.device)
        calls = known.backwards.get(like)
        sizes = _backward_sizes(query, key, value)
        if sizes is not None:
            rows = _widened(rows, *sizes)
        if calls is None:
            _check_sizes(query, value)
            given = known.pack, Shapes.of(*rows[:3]), scale, self.softcap, grad_lse is not None
            calls = known.backwards[like] = Backwards(*given)
        grad_query, grad_key, grad_value = CALLER(calls, rows, sums)
        if sizes is None:
            return grad_query, grad_key, grad_value
        return narrowed((grad_query, grad_key, grad_value), query, value)


def _backward_sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int] | None:
    """The head sizes that a backward computes in. None: those of the rows.

    The package's backward is right for multiples of 32 alone: for 8 and 16 more than such a one its
    gradients are wrong, without an error. It also wants one size for all where several query heads
    share a head of keys and values.
    """
    size, value_size = query.shape[2], value.shape[2]
    shared = query.shape[1] != key.shape[1]
    if size % 32 == value_size % 32 == 0 and not (shared and size != value_size):
        return None
    size, value_size = (-(-x // 32) * 32 for x in (size, value_size))
    return (max(size, value_size),) * 2 if shared else (size, value_size)


def _widened(rows: list[Tensor], size: int, value_size: int) -> list[Tensor]:
    query, key, *others = rows
    return [*(widened(x, size) for x in (query, key)), *(widened(x, value_size) for x in others)]


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


class _Known:
    """A launch as the package takes it, and its calls, made once for all layers."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        left, right = (None if limit < 0 else limit for limit in launch.window)
        bounds_q, bounds_k = map(_at_16_bytes, launch.bounds(device))
        self.pack = PackedLaunch(bounds_q, bounds_k, *launch.longest_bounds, left, right)
        self.forwards: dict[tuple[object, ...], Forwards] = {}
        self.backwards: dict[tuple[object, ...], Backwards] = {}


def _known(launch: Launch, device: torch.device) -> _Known:
    known: _Known | None = launch.kept.get(__name__)
    if known is None:
        known = _Known(launch, device)
        if not launch.bounds_change:  # tiles are counted by bounds
            launch.kept[__name__] = known
    return known


def _at_16_bytes(bounds: Tensor) -> Tensor:
    """Bounds as the package wants them: it would copy others in every call."""
    return bounds if bounds.data_ptr() % 16 == 0 else bounds.clone()


def for_device(device: torch.device) -> Sequence[Kernel]:
    return (Flash4(),)
