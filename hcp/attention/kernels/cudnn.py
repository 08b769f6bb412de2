"""cuDNN's attention, as PyTorch has it, under hcp's schedules: dense blocks of one sequence.

A block is a causal square or has no mask. So this serves whole sequences (degree 1, ``a2a``) and
``p2p``, but not ``all_gather``, whose blocks end at the diagonal. cuDNN builds a plan for each pair
of lengths when it first meets them: it pays if the same lengths come again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hcp.attention.kernels import Kernel, Launch, each_alone, nan_for_infinity
from hcp.attention.kernels.shapes import batched, unbatched
from hcp.exchange.tables import Entry


class Cudnn:
    """Computes one entry a launch. cuDNN's packed kernels are no use: they are slow, and their
    backward ended in an illegal memory access (torch 2.11, cuDNN 9.19)."""

    dtypes = (torch.bfloat16, torch.float16)

    launches = staticmethod(each_alone)

    def capped(self, softcap: float) -> None:
        return None

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        causal = _is_causal(launch.entries[0], query, value)
        if _is_single(launch):
            query, key, value = map(_and_nothing, (query, key, value))
            out, lse = self.forward(_TWO, query, key, value, scale)
            return out[:1], lse[:1]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *map(batched, (query, key, value)), None, True, 0.0, causal, False, scale=scale
        )
        return unbatched(out), nan_for_infinity(lse.view(query.shape[1], -1)).transpose(0, 1)

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
        causal = _is_causal(launch.entries[0], query, value)
        if grad_lse is not None:
            raise ValueError(
                "the log-sum-exp has a gradient, for which the backend 'cudnn' has no kernel: use "
                "'torch'"
            )
        if _is_single(launch):
            query, key, value = map(_and_nothing, (query, key, value))
            grad_out, out, lse = map(_and_nothing, (grad_out, out, lse))
            pairs = self.backward(_TWO, grad_out, None, query, key, value, out, lse, scale)
            grad_query, grad_key, grad_value = (pair[:1] for pair in pairs)
            return grad_query, grad_key, grad_value
        rows = [batched(x) for x in (grad_out.contiguous(), query, key, value, out)]
        no_dropout = torch.empty((), dtype=torch.int64, device=lse.device)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *rows,
            _statistics(lse),
            no_dropout,
            no_dropout,
            None,  # neither a bias nor bounds of a pack
            None,
            None,
            len(query),
            len(key),
            0.0,
            causal,
            scale=scale,
        )
        grad_query, grad_key, grad_value = map(unbatched, grads)
        return grad_query, grad_key, grad_value


# cuDNN has no kernel for one query and one key. With a second row of each, which is zero, the first
# query sees its own key alone under the causal mask, and the second has no gradient.
(_TWO,) = each_alone([Entry(0, 2, 0, 2, -1, 0)])


def _is_single(launch: Launch) -> bool:
    return launch.entries[0].query_rows == launch.entries[0].key_rows == 1


def _and_nothing(rows: Tensor) -> Tensor:
    return torch.cat([rows, torch.zeros_like(rows)])


def _statistics(lse: Tensor) -> Tensor:
    """(n, H) as (1, H, n, 1), with the strides of such a tensor even if n or H is 1. There PyTorch
    sees no difference, but cuDNN does."""
    rows, heads = lse.shape
    return lse.new_empty(1, heads, rows, 1).copy_(lse.t().view(1, heads, rows, 1))


def _is_causal(entry: Entry, query: Tensor, value: Tensor) -> bool:
    """Whether a block is causal. Raises ValueError if cuDNN has no kernel for the block."""
    sizes = query.shape[2], value.shape[2]
    if sizes[0] != sizes[1] or sizes[0] % 8 or sizes[0] > 128:
        raise ValueError(
            f"head sizes are {sizes[0]} and {sizes[1]}, expected one multiple of 8 up to 128 for "
            "the backend 'cudnn': use 'torch'"
        )
    if entry.window == (-1, -1):
        return False
    if entry.window == (-1, 0) and entry.query_rows == entry.key_rows:
        return True
    raise ValueError(
        f"a block of {entry.query_rows} queries and {entry.key_rows} keys has the window "
        f"{entry.window}, expected a causal square or no mask for the backend 'cudnn': use "
        "cp_comm_type 'p2p' or 'a2a' without window_size, or the backend 'torch'"
    )


def for_device(device: torch.device) -> Sequence[Kernel]:
    return (Cudnn(),)
