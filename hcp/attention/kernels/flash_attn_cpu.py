"""PyTorch's flash attention for the CPU.

n rows of a launch, H query heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hcp.attention.kernels import Attended, Launch, ResultGrads
from hcp.attention.kernels.shapes import (
    backward_columns,
    head_size,
    narrowed,
    widened,
)
from hcp.exchange.tables import Entry


class CpuFlash:
    """Computes one entry a launch. No entry is empty: the kernel would end the process.

    The kernel knows no band but as a mask over all keys, so a band is cut into tiles along it.
    """

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    packs = False

    def capped(self, softcap: float) -> None:
        return None

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        width = value.shape[2]
        if query.shape[2] != width:
            size = head_size(query, value)
            query, key, value = (widened(x, size) for x in (query, key, value))
        parts = []
        for tile in _tiles(launch):
            rows = [query[tile.queries], key[tile.keys], value[tile.keys]]
            parts.append(_cpu_flash(rows, tile, scale))
        if len(parts) == 1:
            out, sums = parts[0]
        else:
            out, sums = map(torch.cat, zip(*parts, strict=True))
        return out[..., :width], sums

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (grad_out, grad_lse), (query, _, value, _, lse) = grads, attended
        if grad_lse is not None or query.shape[2] != value.shape[2]:
            grad_out, *wide = backward_columns(grads, attended[:4])
            own = wide[0], wide[1], wide[2], wide[3], lse
            return narrowed(self._grads(launch, grad_out, own, scale), query, value)
        return self._grads(launch, grad_out, attended, scale)

    def _grads(
        self, launch: Launch, grad_out: Tensor, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values, all of one head size."""
        query, key, value, out, lse = attended
        tiles = _tiles(launch)
        grads = []
        for tile in tiles:
            q, k = tile.queries, tile.keys
            rows = [grad_out[q], query[q], key[k], value[k], out[q]]
            tile_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *_batched(rows),
                lse[q].transpose(0, 1).unsqueeze(0),
                0.0,
                tile.causal,
                attn_mask=tile.mask(query) if tile.masked else None,
                scale=scale,
            )
            grads.append([grad.squeeze(0).transpose(0, 1) for grad in tile_grads])
        of_queries, of_keys, of_values = zip(*grads, strict=True)
        if len(tiles) == 1:
            return of_queries[0], of_keys[0], of_values[0]
        return (
            torch.cat(of_queries),
            _summed(tiles, of_keys, key),
            _summed(tiles, of_values, value),
        )


def _cpu_flash(rows: Sequence[Tensor], tile: _Tile, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries, keys and values. NaN if a score was not finite."""
    out, lse = _run_cpu_flash(rows, tile, scale)
    broken = ~lse.isfinite()
    if bool((zero := lse == 0).any()):
        # Where every score is -inf, or NaN in fewer keys than a vector has lanes, it writes 0 for
        # both. It does so whatever the values are, so that ones tell: their average is 1.
        query, key, value = rows
        ones, _ = _run_cpu_flash([query, key, torch.ones_like(value)], tile, scale)
        broken |= zero & (ones[..., 0] == 0)
    if bool(broken.any()):
        lse.masked_fill_(broken, math.nan)
        out.masked_fill_(broken.unsqueeze(-1), math.nan)
    return out, lse


def _run_cpu_flash(rows: Sequence[Tensor], tile: _Tile, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_batched(rows),
        0.0,
        tile.causal,
        attn_mask=tile.mask(rows[0]) if tile.masked else None,
        scale=scale,
    )
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def _batched(rows: Sequence[Tensor]) -> list[Tensor]:
    """(n, H, D) each as (1, H, n, D)."""
    return [x.unsqueeze(0).transpose(1, 2) for x in rows]


class _Tile(NamedTuple):
    """Consecutive queries of an entry, and the keys that they see. low, high: as in an entry."""

    queries: slice
    keys: slice
    low: int
    high: int
    causal: bool
    masked: bool
    """Whether the kernel needs a mask: they see not all of these keys, and are not causal."""

    def mask(self, like: Tensor) -> Tensor:
        """The mask to add to the scores, (queries, keys), in the dtype of ``like``."""
        queries = torch.arange(self.queries.stop - self.queries.start, device="cpu")
        keys = torch.arange(self.keys.stop - self.keys.start, device="cpu")
        ahead = keys - queries.unsqueeze(1)
        hidden = (ahead < self.low) | (ahead > self.high)
        return torch.zeros(hidden.shape, dtype=like.dtype, device="cpu").masked_fill_(
            hidden, -torch.inf
        )


_TILE_ROWS = 64, 1024


def _tiles(launch: Launch) -> list[_Tile]:
    """The tiles of a launch, kept for all layers and both passes."""
    tiles: list[_Tile] | None = launch.kept.get(__name__)
    if tiles is None:
        tiles = launch.kept[__name__] = _cut(launch)
    return tiles


def _cut(launch: Launch) -> list[_Tile]:
    """The whole entry if the kernel knows its mask, else tiles about as high as the band is wide.
    Lower tiles would be many, higher ones mostly masked."""
    (entry,) = launch.entries
    rows, keys = entry.query_rows, entry.key_rows
    full = launch.window == (-1, -1)
    # Its causal mask is aligned top left, ours bottom right: the same in a square.
    causal = launch.window == (-1, 0) and rows == keys
    if full or causal:
        return [_Tile(slice(0, rows), slice(0, keys), entry.low, entry.high, causal, False)]
    least, most = _TILE_ROWS
    step = max(least, min(entry.high - entry.low + 1, most))
    return [_tile(entry, row, min(row + step, rows)) for row in range(0, rows, step)]


def _tile(entry: Entry, begin: int, end: int) -> _Tile:
    keys = slice(max(0, begin + entry.low), min(entry.key_rows, end + entry.high))
    ahead = keys.start - begin
    low, high = entry.low - ahead, entry.high - ahead
    full = low <= begin + 1 - end and high >= keys.stop - keys.start - 1
    return _Tile(slice(begin, end), keys, low, high, False, not full)


def _summed(tiles: Sequence[_Tile], grads: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Gradients of keys that several tiles share, summed in float32 or wider."""
    total = torch.zeros_like(rows, dtype=torch.promote_types(rows.dtype, torch.float32))
    for tile, grad in zip(tiles, grads, strict=True):
        total[tile.keys] += grad
    return total.to(rows.dtype)


KERNEL = CpuFlash()
