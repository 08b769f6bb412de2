"""Rotary embedding of rows, each by its own position (RoPE, https://arxiv.org/abs/2104.09864).

T rows on this rank, D head size, R <= D elements of a head that are rotated, A axes of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp import ops
from hcp.attention.checks import as_autocast
from hcp.exchange.agreement import is_transformed


class Rotary(NamedTuple):
    """The rotary embedding of this rank's rows, made once for all layers: see
    :meth:`hcp.ContextParallelHandler.rotary`."""

    cos: Tensor
    """(T, R), mscale included."""
    sin: Tensor
    interleaved: bool

    def check(self, t: Tensor, name: str = "t") -> None:
        """Raise ValueError unless t (T, heads, D) has these rows and heads large enough."""
        rows, rotated = self.cos.shape
        if not torch.compiler.is_compiling() and t.shape[:1] != (rows,):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, expected {rows} rows: those that freqs turns"
            )
        if rotated % 2 or rotated > t.shape[-1]:
            raise ValueError(
                f"freqs has {rotated} angles, expected an even number up to the head size "
                f"{t.shape[-1]}: one for each element that is rotated"
            )

    def fits(self, t: Tensor) -> bool:
        """Whether a kernel rotates t (T, heads, D) by this: not where angles are learned, whose
        gradient it does not give, under transforms of torch.func, or for other types."""
        learned = torch.is_grad_enabled() and self.cos.requires_grad
        return t.dtype in ops.FLOATS and t.dim() == 3 and not learned and not is_transformed(t)

    def for_kernels(self, dtype: torch.dtype) -> Rotary:
        """The same rotation with the tables that kernels take for rows of a dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = self.cos.to(wide), self.sin.to(wide)
        return Rotary(cos.contiguous(), sin.contiguous(), self.interleaved)

    def rotate(self, t: Tensor) -> Tensor:
        """Rotate rows (T, heads, D) that fit, in one pass. This is as ``for_kernels`` gives it."""
        rotated: Tensor = torch.ops.hcp.rotate.default(t, *self, False)
        return rotated

    def rotate_back(self, grad: Tensor) -> Tensor:
        """Gradients of what was rotated, from gradients (T, heads, D) of what ``rotate`` gave."""
        rotated: Tensor = torch.ops.hcp.rotate.default(grad, *self, True)
        return rotated


NO_ROTATION = None, None, False
"""A rotary embedding that is not there, as operators take it."""


def rotary_of(angles: Tensor, *, interleaved: bool, mscale: float) -> Rotary:
    """The rotary embedding of angles (T, R): one for each element that is rotated, in a head's
    order."""
    cos, sin = (mscale * f(angles) for f in (torch.cos, torch.sin))
    return Rotary(cos, sin, interleaved)


def check_positions(name: str, table: Tensor, least: int) -> None:
    """Raise ValueError unless a table (positions, ...) has as many positions as the longest
    sequence has tokens."""
    positions = table.shape[0] if table.dim() else 0
    if not torch.compiler.is_compiling() and positions < least:
        raise ValueError(
            f"{name} has {positions} positions, expected >= {least} (get_rotary_seq_len())"
        )


def angles_of(
    freqs: Tensor, positions: Tensor, axes: Sequence[int] | None, interleaved: bool
) -> Tensor:
    """(T, R): the angles of each row, of a table (positions, ..., R).

    positions (T,), or (T, A) where ``axes`` says which of them each of the R / 2 frequencies
    follows. ``interleaved``: a frequency's two elements are neighbours.
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
    _expect_places(positions, len(table))
    if axes is None:
        return table[positions]
    half = table.shape[1] // 2
    if len(axes) != half or not all(0 <= axis < positions.shape[1] for axis in axes):
        raise ValueError(
            f"axes is {list(axes)}, expected {half} numbers from 0 to {positions.shape[1] - 1}: "
            "the axis of each frequency"
        )
    own = torch.tensor(axes, dtype=torch.int64, device=positions.device)
    both = own.repeat_interleave(2) if interleaved else own.repeat(2)
    columns = torch.arange(len(both), device=positions.device)
    return table[positions[:, both], columns]


def _expect_places(positions: Tensor, count: int) -> None:
    """Raise ValueError for positions that a table of so many has not: a negative one would be
    counted from its end. On GPUs the host would have to wait for them."""
    if positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"positions is {positions.dtype}, expected int64")
    if torch.compiler.is_compiling() or positions.device.type != "cpu" or not positions.numel():
        return
    least, most = (int(x) for x in positions.aminmax())
    if least < 0 or most >= count:
        raise ValueError(
            f"positions has {least if least < 0 else most}, expected 0 to {count - 1}: freqs has "
            f"{count} positions"
        )


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
        count = (freqs.cos if isinstance(freqs, Rotary) else freqs).shape[-1]
        t = firsts_before_seconds(t, count)
    return t, said and not isinstance(freqs, Rotary)


def firsts_before_seconds(t: Tensor, count: int) -> Tensor:
    """Rows (T, heads, D) whose first `count` elements are neighbouring pairs, with the first
    elements of all pairs before the second ones."""
    rotated, passed = t[..., :count], t[..., count:]
    return torch.cat((rotated[..., ::2], rotated[..., 1::2], passed), dim=-1)


def rotate(t: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the first R elements of each head of t (T, heads, D), in float32 or wider.

    Pairs are (i, i + R / 2), or (2 i, 2 i + 1) when interleaved. Returns t's dtype.
    """
    rotary.check(t)
    if not t.is_floating_point():
        raise ValueError(f"t is {t.dtype}, expected floats")
    if not rotary.fits(t):
        return rotate_by_torch(t, rotary)
    dense = t if t.stride(-1) == 1 else t.contiguous()
    return rotary.for_kernels(t.dtype).rotate(dense)


def for_attention(
    query: Tensor, key: Tensor, rotary: Rotary
) -> tuple[Tensor, Tensor, Rotary | None]:
    """Queries and keys, and what attention is to rotate them by: None where its kernels do not take
    them, which are then rotated here."""
    rotary.check(query, "query")
    # What autocast narrows is rotated first, as it would be outside of attention.
    casts = torch.is_autocast_enabled(query.device.type) and (
        as_autocast(query) is not query or as_autocast(key) is not key
    )
    if not casts and rotary.fits(query) and rotary.fits(key):
        return query, key, rotary.for_kernels(query.dtype)
    return rotate(query, rotary), rotate(key, rotary), None


def rotate_by_torch(t: Tensor, rotary: Rotary) -> Tensor:
    """``rotate`` in PyTorch's operators, a pass of memory each: the reference of the kernel, and
    its stand-in where :meth:`Rotary.fits` is false."""
    cos, sin = rotary.cos.unsqueeze(1), rotary.sin.unsqueeze(1)
    count = cos.shape[-1]
    promoted = t.to(torch.promote_types(t.dtype, cos.dtype))
    rotated, passed = promoted[..., :count], promoted[..., count:]
    rotated = rotated * cos + _quarter_turn(rotated, rotary.interleaved) * sin
    return torch.cat((rotated, passed), dim=-1).to(t.dtype)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """(a, b) of each pair as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
