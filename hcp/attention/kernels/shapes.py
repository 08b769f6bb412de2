"""The shapes that libraries take: one head size for queries, keys and values.

FlashAttention wants one head size for queries, keys and values: columns of zeros make it so.

n rows, H heads, D head size, E head size of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hcp.attention.kernels import ResultGrads


def head_size(query: Tensor, value: Tensor, extra: int = 0) -> int:
    """The head size that holds both, and ``extra`` columns beyond those of the values. Rounded up
    unless it is D = E."""
    if query.shape[2] == value.shape[2] and extra == 0:
        return query.shape[2]
    return -(-max(query.shape[2], value.shape[2] + extra) // 8) * 8


def widened(rows: Tensor, size: int) -> Tensor:
    """Rows with columns of zeros up to a head size."""
    return (
        rows if rows.shape[2] == size else torch.nn.functional.pad(rows, (0, size - rows.shape[2]))
    )


LSE_COLUMNS = 3


def _with_grad_lse(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """The output's gradient and the output, (n, H, size), with grad_lse in added columns.

    A kernel subtracts sum(grad_out * out) from the gradient of every score. A gradient of 1 and an
    output of -grad_lse, in columns where the values are 0, make it subtract grad_lse less. Three
    columns hold -grad_lse as a sum: each holds what the ones before it lose in the dtype, so that
    nothing is lost in bfloat16.
    """
    first = size - LSE_COLUMNS
    grad_out, out = widened(grad_out, size).clone(), widened(out, size).clone()
    rest = -grad_lse
    grad_out[..., first:] = 1
    for column in range(first, size):
        out[..., column] = rest
        rest = rest - out[..., column].to(rest.dtype)
    return grad_out, out


def backward_columns(
    grads: ResultGrads, rows: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_out, query, key, value and out in one head size, for a backward. ``rows``: the last
    four."""
    (grad_out, grad_lse), (query, key, value, out) = grads, rows
    size = head_size(query, value, 0 if grad_lse is None else LSE_COLUMNS)
    if grad_lse is not None:
        grad_out, out = _with_grad_lse(grad_out, grad_lse, out, size)
    grad_out, query, key, value, out = (
        widened(x, size) for x in (grad_out, query, key, value, out)
    )
    return grad_out, query, key, value, out


def narrowed(
    grads: Sequence[Tensor], query: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values in the head sizes that were given."""
    grad_query, grad_key, grad_value = grads
    head_dim = query.shape[2]
    return grad_query[..., :head_dim], grad_key[..., :head_dim], grad_value[..., : value.shape[2]]
