"""Rotary embedding of rows, each by its own position (RoPE, https://arxiv.org/abs/2104.09864).

T rows on this rank, D head size, R <= D elements of a head that are rotated, A axes of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp import ops
from hcp.attention.functorch import is_transformed
from hcp.attention.kernels import wide


def angles_of(freqs: Tensor, positions: Tensor, axes: Sequence[int] | None) -> Tensor:
    """(T, R): the angles of each row, of a table (positions, ..., R).

    positions (T,), or (T, A) where ``axes`` says which of them each of the R / 2 frequencies
    follows.
    """
    if freqs.dim() < 2:
        raise ValueError(
            f"freqs has shape {tuple(freqs.shape)}, expected (positions, angles): one row each"
        )
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


class Rotary(NamedTuple):
    """The angles of this rank's rows, made once for all layers: see
    :meth:`hcp.ContextParallelHandler.rotary`."""

    cos: Tensor
    """(T, R), mscale included."""
    sin: Tensor
    interleaved: bool

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin as the kernels take them for rows of a dtype."""
        return self.cos.to(wide(dtype)).contiguous(), self.sin.to(wide(dtype)).contiguous()

    def fits(self, t: Tensor) -> bool:
        """Whether a kernel turns t (T, heads, D) by this: not where angles are learned, whose
        gradient it does not give, under transforms of torch.func, or for other types."""
        learned = torch.is_grad_enabled() and self.cos.requires_grad
        return t.dtype in ops.FLOATS and t.dim() == 3 and not learned and not is_transformed(t)


def rotary_of(angles: Tensor, *, interleaved: bool, mscale: float) -> Rotary:
    """Of angles (T, R): for each element that is rotated, in a head's order."""
    cos, sin = (mscale * f(angles) for f in (torch.cos, torch.sin))
    return Rotary(cos, sin, interleaved)


def as_configured(
    t: Tensor, freqs: Tensor | Rotary, config: Any, interleaved: bool
) -> tuple[Tensor, bool]:
    """(t, interleaved) as Megatron's config has them: its latent attention brings the first
    elements of all pairs before the second ones, and leaves them there."""
    said = bool(getattr(config, "rotary_interleaved", False))
    given = freqs.interleaved if isinstance(freqs, Rotary) else interleaved or said
    if given != said:
        raise ValueError(
            f"interleaved is {given} and config.rotary_interleaved {said}, expected the same"
        )
    if getattr(config, "multi_latent_attention", False):
        rotated = (freqs.cos if isinstance(freqs, Rotary) else freqs).shape[-1]
        turned, passed = t[..., :rotated], t[..., rotated:]
        t = torch.cat((turned[..., ::2], turned[..., 1::2], passed), dim=-1)
    return t, said and not isinstance(freqs, Rotary)


def check(t: Tensor, rotary: Rotary, name: str = "t") -> None:
    rows, rotated = rotary.cos.shape
    if not torch.compiler.is_compiling() and t.shape[:1] != (rows,):
        raise ValueError(
            f"{name} has shape {tuple(t.shape)}, expected {rows} rows: those that freqs turns"
        )
    if rotated % 2 or rotated > t.shape[-1]:
        raise ValueError(
            f"freqs has {rotated} angles, expected an even number up to the head size "
            f"{t.shape[-1]}: one for each element that is rotated"
        )


def rotate(t: Tensor, rotary: Rotary) -> Tensor:
    """t (T, heads, D) with the first R elements of each head rotated; in float32 or wider, and
    back.

    Pairs are (i, i + R / 2), or (2 i, 2 i + 1) when interleaved.
    """
    check(t, rotary)
    if not t.is_floating_point():
        raise ValueError(f"t is {t.dtype}, expected floats")
    if not rotary.fits(t):
        return rotate_by_torch(t, rotary)
    dense = t if t.stride(-1) == 1 else t.contiguous()
    return ops.rotate(dense, *rotary.tables(t.dtype), interleaved=rotary.interleaved)


def rotate_by_torch(t: Tensor, rotary: Rotary) -> Tensor:
    """The same in PyTorch's operators, a pass of memory each: what the kernel is checked against,
    and what stands in for it, see :meth:`Rotary.fits`."""
    cos, sin = rotary.cos.unsqueeze(1), rotary.sin.unsqueeze(1)
    rotated = cos.shape[-1]
    promoted = t.to(torch.promote_types(t.dtype, cos.dtype))
    turned, passed = promoted[..., :rotated], promoted[..., rotated:]
    turned = turned * cos + _quarter_turn(turned, rotary.interleaved) * sin
    return torch.cat((turned, passed), dim=-1).to(t.dtype)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """(a, b) of each pair as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
