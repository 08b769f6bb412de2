"""Checks of what a call of attention is given, and autocast.

T rows on this rank, H query heads, G key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from hcp._validate import is_finite, plain

Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, "Tensor | None"]
"""Query, key, value and sinks that a layer's call is given: (T, H, D), (T, G, D), (T, G, E), (H,).
A plain tuple: each layer makes some."""


def window_of(given: tuple[int, int], causal: bool, name: str = "window_size") -> tuple[int, int]:
    """(left, right) under a mask. Raises ValueError for what is no window."""
    try:
        left, right = given
        left, right = plain(left), plain(right)
        if type(left) is int and type(right) is int and left >= -1 and right >= -1:
            return left, 0 if causal else right
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name} is {given!r}, expected (left, right) in tokens, -1: no limit")


def scale_of(query: Tensor, given: float | None) -> float:
    """The softmax scale that is given, or 1 / sqrt(head size)."""
    if given is not None:
        known = torch.compiler.is_compiling() or is_finite(given)
        if not (known and given > 0.0):
            raise ValueError(
                f"softmax_scale is {given!r}, expected a finite number > 0.0: for another sign, "
                "multiply the queries by -1"
            )
        return given
    if query.dim() == 0 or query.shape[-1] == 0:
        raise ValueError(f"query has shape {tuple(query.shape)}, expected a head size >= 1")
    scale: float = query.shape[-1] ** -0.5
    return scale


def check_options(softcap: float, dropout_p: float) -> None:
    """Raise ValueError for a cap that is none, and for dropout."""
    known = torch.compiler.is_compiling() or is_finite(softcap)
    if not (known and 0.0 <= softcap < math.inf):
        raise ValueError(
            f"softcap is {softcap!r}, expected a finite number >= 0.0, where 0.0 caps nothing"
        )
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p is {dropout_p}, expected 0.0: no kernel gives the same dropout under every "
            "layout; drop out after the attention instead"
        )


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


def as_autocast(x: Tensor) -> Tensor:
    """Cast as PyTorch's scaled_dot_product_attention casts its arguments under torch.autocast:
    floats, except float64, to autocast's dtype."""
    if not torch.is_autocast_enabled(x.device.type):
        return x
    casts = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if casts else x


def check(inputs: Inputs, rows: int, device: torch.device) -> None:
    """Raise ValueError unless the tensors are this rank's, (rows, heads, head_dim)."""
    query, key, value, sinks = inputs
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected (rows, heads, head_dim): the "
                "rows of all sequences end to end, no dimension of the batch"
            )
        _check_rows(name, tensor, query, rows, device)
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key has head_dim {key.shape[2]}, expected {query.shape[2]}: that of query"
        )
    check_heads(query, key, value)
    if sinks is not None:
        _check_sinks(sinks, query)


def check_latent(inputs: Inputs, rows: int, device: torch.device) -> None:
    """Raise ValueError unless the tensors are this rank's: queries (rows, heads, head_dim), and
    latent rows as keys (rows, 1, width) with values of no elements."""
    query, key, _, sinks = inputs
    if query.dim() != 3 or query.shape[1] < 1:
        raise ValueError(f"query has shape {tuple(query.shape)}, expected (rows, heads, head_dim)")
    if key.dim() != 3 or key.shape[2] < 1:
        shape = key.shape[0], *key.shape[2:]
        raise ValueError(f"key has shape {tuple(shape)}, expected latent rows (rows, width)")
    for name, tensor in (("query", query), ("key", key)):
        _check_rows(name, tensor, query, rows, device)
    if sinks is not None:
        _check_sinks(sinks, query)


def _check_rows(name: str, tensor: Tensor, query: Tensor, rows: int, device: torch.device) -> None:
    if tensor.shape[0] != rows:
        raise ValueError(
            f"{name} has {tensor.shape[0]} rows, expected {rows}: this rank's rows of the "
            "micro-batch"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}: the group's device")
    if tensor.dtype != query.dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}, expected {query.dtype} as query")


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    if sinks.shape != query.shape[1:2]:
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}, expected ({query.shape[1]},): one per head"
        )
    if sinks.device != query.device or not sinks.is_floating_point():
        raise ValueError(
            f"sinks is {sinks.dtype} on {sinks.device}, expected floats on {query.device}"
        )
