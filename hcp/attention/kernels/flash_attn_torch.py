"""PyTorch's own kernels, the family "torch": FlashAttention-2 on CUDA in here, its flash attention
for the CPU in ``flash_attn_cpu``, and the formula for the dtypes that these lack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hcp.attention.kernels import (
    Attended,
    Kernel,
    KernelCall,
    Launch,
    ResultGrads,
    flash_attn_cpu,
    formula,
    nan_for_infinity,
)
from hcp.attention.kernels.shapes import (
    LSE_COLUMNS,
    backward_columns,
    head_size,
    narrowed,
    widened,
)

MOST_HEAD_SIZE = 256
"""The largest head size of FlashAttention-2."""


class Flash2:
    """Computes whole packs in one launch, by PyTorch's FlashAttention-2 on CUDA."""

    dtypes = (torch.bfloat16, torch.float16)

    def capped(self, softcap: float) -> Kernel | None:
        return None

    packs = True

    def takes(self, call: KernelCall) -> bool:
        return True

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        size = head_size(query, value)
        out, lse = self.run(launch, [widened(x, size) for x in (query, key, value)], scale)
        # Gaps of the pack, which have no keys and which no run names, become NaN with the rest.
        return out[..., : value.shape[2]], nan_for_infinity(lse).transpose(0, 1)

    def run(self, launch: Launch, rows: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp (H, n) of queries, keys and values of one head size."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *rows, *self.pack(launch, rows[0]), 0.0, False, False, scale=scale, **_window_of(launch)
        )
        return out, lse

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, _, value, _, lse = attended
        if grads[1] is not None and head_size(query, value, LSE_COLUMNS) > MOST_HEAD_SIZE:
            return self._in_two(launch, grads, attended, scale)
        grad_out, *rows = backward_columns(grads, attended[:4])
        heads_first = lse.transpose(0, 1).contiguous()
        found = self.run_backward(launch, grad_out.contiguous(), rows, heads_first, scale)
        return narrowed(found, query, value)

    def _in_two(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients where values leave no columns for grad_lse: those of the output, and those
        of the log-sum-exp with values that are 0 and narrow."""
        (grad_out, grad_lse), (query, key, value, out, lse) = grads, attended
        of_out = self.backward(launch, (grad_out, None), attended, scale)
        values, outs = (x.new_zeros(*x.shape[:2], 8) for x in (value, out))
        narrow = query, key, values, outs, lse
        of_lse = self.backward(launch, (outs, grad_lse), narrow, scale)
        return of_out[0] + of_lse[0], of_out[1] + of_lse[1], of_out[2]

    def run_backward(
        self, launch: Launch, grad_out: Tensor, rows: Sequence[Tensor], lse: Tensor, scale: float
    ) -> Sequence[Tensor]:
        """Gradients of queries, keys and values. ``rows``: these and the output, of one head size.
        ``lse``: (H, n)."""
        no_dropout = torch.empty(2, dtype=torch.uint64, device=lse.device)
        grads: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
            grad_out,
            *rows,
            lse,
            *self.pack(launch, grad_out),
            0.0,
            False,
            no_dropout,
            no_dropout,
            scale=scale,
            **_window_of(launch),
        )
        return grads

    @staticmethod
    def pack(launch: Launch, query: Tensor) -> tuple[Tensor, Tensor, int, int]:
        """cu_seqlens of queries and keys, and the longest of each."""
        longest_query, longest_key = launch.longest
        # For a longest of one query it would fold the heads of a group into rows, and expect a
        # query of each sequence: a pack has sequences without any.
        longest_query = max(longest_query, 2)
        left, right = launch.window
        if left >= 0 or right > 0:
            # It takes the longest keys for a bound that nothing passes, though with more queries
            # than keys the first queries would pass it: the longest keys must look longer.
            longest_key = max(longest_key, longest_query, right + 1)
        return *launch.bounds(query.device), longest_query, longest_key


def _window_of(launch: Launch) -> dict[str, int]:
    left, right = launch.window
    return {"window_size_left": left, "window_size_right": right}


_KERNEL = Flash2()


def for_device(device: torch.device) -> Sequence[Kernel]:
    return (flash_attn_cpu.KERNEL if device.type == "cpu" else _KERNEL), formula.KERNEL
