"""The package flash-attn-3 (FlashAttention-3, for Hopper) under hcp's schedules.

It was not run on a GPU yet: the tests replace the package's two functions by the formula. These
have the arguments of August 2026, in the folder ``hopper`` of Dao-AILab/flash-attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flash_attn_interface  # type: ignore[import-not-found]
import torch
from torch import Tensor

from hcp.attention.kernels import Kernel, KernelCall, Launch, is_ordered
from hcp.attention.kernels.flash_attn_torch import Flash2
from hcp.attention.kernels.shapes import LSE_COLUMNS, head_size


@dataclass(frozen=True)
class Flash3(Flash2):
    """Computes whole packs in one launch, with soft-capping. Queries, keys and values get one head
    size, as for FlashAttention-2."""

    softcap: float = 0.0

    def takes(self, call: KernelCall) -> bool:
        size = head_size(call.query, call.value, LSE_COLUMNS if call.grad_lse else 0)
        return _has_size(size) and not (is_ordered(call.backward) and size > _LARGEST_DETERMINISTIC)

    def capped(self, softcap: float) -> Flash3:
        return Flash3(softcap)

    def run(self, launch: Launch, rows: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        _check_size(rows)
        # After these two come sums of parts, which it does not make here.
        out, lse, *_ = flash_attn_interface._flash_attn_forward(
            *rows, softmax_scale=scale, **self._options(launch, rows[0])
        )
        return out, lse

    def run_backward(
        self, launch: Launch, grad_out: Tensor, rows: Sequence[Tensor], lse: Tensor, scale: float
    ) -> Sequence[Tensor]:
        _check_size(rows)
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in rows[:3]]
        flash_attn_interface._flash_attn_backward(
            grad_out,
            *rows,
            lse,
            **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
            softmax_scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._options(launch, grad_out),
        )
        return grads

    def _options(self, launch: Launch, query: Tensor) -> dict[str, Any]:
        """The arguments that describe a launch, for forward and backward."""
        cu_seqlens_q, cu_seqlens_k = launch.bounds(query.device)
        longest_query, longest_key = launch.longest_bounds
        left, right = launch.window
        return {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": longest_query,
            "max_seqlen_k": longest_key,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": self.softcap,
        }


_LARGEST_DETERMINISTIC = 192
"""The largest head size whose backward can be deterministic."""


def _has_size(size: int) -> bool:
    return size % 8 == 0 and 8 <= size <= 256


def _check_size(rows: Sequence[Tensor]) -> None:
    size = rows[0].shape[2]
    if not _has_size(size):
        raise ValueError(
            f"the head size is {size}, expected a multiple of 8 up to 256 for FlashAttention-3: "
            "use the backend 'torch'"
        )


def for_device(device: torch.device) -> Sequence[Kernel]:
    return (Flash3(),)
