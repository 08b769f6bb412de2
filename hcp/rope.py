"""Rotary embedding of rows, each by its own position (RoPE, https://arxiv.org/abs/2104.09864).

T rows on this rank, D head size, R <= D elements of a head that are rotated, A axes of a position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def angles_of(freqs: Tensor, positions: Tensor, axes: Sequence[int] | None) -> Tensor:
    """(T, R): the angles of each row, of a table (positions, ..., R).

    positions (T,), or (T, A) where ``axes`` says which of them each of the R / 2 frequencies
    follows.
    """
    table = freqs.flatten(1)
    if (axes is None) != (positions.dim() == 1) or positions.dim() > 2:
        raise ValueError(
            f"positions has shape {tuple(positions.shape)} and axes is {axes}, expected (rows,) "
            "and None, or (rows, axes) and the axis of each frequency"
        )
    if axes is None:
        return table[positions]
    half = table.shape[1] // 2
    if len(axes) != half or not all(0 <= axis < positions.shape[1] for axis in axes):
        raise ValueError(
            f"axes is {list(axes)}, expected {half} numbers from 0 to {positions.shape[1] - 1}: "
            "the axis of each frequency"
        )
    both = torch.tensor([*axes, *axes], device=positions.device)
    columns = torch.arange(len(both), device=positions.device)
    return table[positions[:, both], columns]


def rotate(t: Tensor, angles: Tensor, *, interleaved: bool, mscale: float) -> Tensor:
    """t (T, heads, D) with the first R elements of each head rotated by angles (T, R); in float32
    or wider, and back.

    Pairs are (i, i + R / 2), or (2 i, 2 i + 1) when ``interleaved``; angles come once for each
    element in this order.
    """
    rotated = angles.shape[-1]
    if rotated % 2 or rotated > t.shape[-1]:
        raise ValueError(
            f"freqs has {rotated} angles, expected an even number up to the head size "
            f"{t.shape[-1]}: one for each element that is rotated"
        )
    wide = t.to(torch.promote_types(t.dtype, angles.dtype))
    turned, passed = wide[..., :rotated], wide[..., rotated:]
    cos, sin = (mscale * f(angles).unsqueeze(1) for f in (torch.cos, torch.sin))
    turned = turned * cos + _quarter_turn(turned, interleaved) * sin
    return torch.cat((turned, passed), dim=-1).to(t.dtype)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """(a, b) of each pair as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
