"""Queries, keys and values as kernels of attention compute them right: in the dtype that autocast
asks for, and with heads that fit, which kernels do not check. G key-value heads."""

from __future__ import annotations

import torch
from torch import Tensor


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError unless key and value have G heads, and query a multiple of them:
    (..., heads, size) each."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 3:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected (..., heads, size)")
    heads, groups, value_groups = (tensor.shape[-2] for tensor in (query, key, value))
    if groups != value_groups:
        raise ValueError(f"value has {value_groups} heads, expected {groups}: those of key")
    if groups == 0 or heads % groups != 0:
        raise ValueError(f"query has {heads} heads, expected a multiple of the {groups} of key")


def autocast_to(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast asks for on a device; None outside of it."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def as_autocast(x: Tensor) -> Tensor:
    """As PyTorch's scaled_dot_product_attention takes its arguments under torch.autocast: floats
    but float64 in autocast's dtype."""
    dtype = autocast_to(x.device)
    casts = dtype is not None and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if casts else x


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    rows: int,
    device: torch.device,
) -> None:
    """Raise ValueError unless the tensors are this rank's, (rows, heads, head_dim)."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected (rows, heads, head_dim)"
            )
        if tensor.shape[0] != rows:
            raise ValueError(
                f"{name} has {tensor.shape[0]} rows, expected {rows}: "
                "this rank's rows of the micro-batch"
            )
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, expected {device}: the group's device")
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected {query.dtype} as query")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key has head_dim {key.shape[2]}, expected {query.shape[2]}: that of query"
        )
    check_heads(query, key, value)
    if sinks is not None:
        _check_sinks(sinks, query)


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    if sinks.shape != query.shape[1:2]:
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}, expected ({query.shape[1]},): one per head"
        )
    if sinks.device != query.device or not sinks.is_floating_point():
        raise ValueError(
            f"sinks is {sinks.dtype} on {sinks.device}, expected floats on {query.device}"
        )
