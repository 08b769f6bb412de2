"""The package flash_attn (FlashAttention-2, 2.7 or later) under hcp's schedules.

It was not run on a GPU yet: the tests replace the package's two functions by the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from flash_attn import flash_attn_interface  # type: ignore[import-not-found]
from torch import Tensor

from hcp.attention.kernels import Kernel, KernelCall, Launch
from hcp.attention.kernels.flash_attn_torch import Flash2


@dataclass(frozen=True)
class FlashAttn(Flash2):
    """Computes whole packs in one launch, with soft-capping."""

    softcap: float = 0.0

    def capped(self, softcap: float) -> FlashAttn:
        return FlashAttn(softcap)

    def takes(self, call: KernelCall) -> bool:
        return all(x.shape[2] % 8 == 0 and x.shape[2] <= 256 for x in (call.query, call.value))

    def run(self, launch: Launch, rows: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        left, right = launch.window
        out, lse, *_ = flash_attn_interface._flash_attn_varlen_forward(
            *rows,
            *self.pack(launch, rows[0]),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=False,
            window_size_left=left,
            window_size_right=right,
            softcap=self.softcap,
        )
        return out, lse

    def run_backward(
        self, launch: Launch, grad_out: Tensor, rows: Sequence[Tensor], lse: Tensor, scale: float
    ) -> Sequence[Tensor]:
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in rows[:3]]
        left, right = launch.window
        flash_attn_interface._flash_attn_varlen_backward(
            grad_out,
            *rows,
            lse,
            *grads,
            *self.pack(launch, grad_out),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=False,
            window_size_left=left,
            window_size_right=right,
            softcap=self.softcap,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads


def for_device(device: torch.device) -> Sequence[Kernel]:
    return (FlashAttn(),)
