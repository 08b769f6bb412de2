"""A stand-in for the package flash-attn-4: the names, arguments and compile caches that hcp uses
are those of its version 4.0.0b36, and formulas take the place of its kernels."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
ROWS_PER_TILE, KEYS_PER_TILE = 8, 16


class AuxData(NamedTuple):
    tensors: Any = None
    scalars: Any = None


class Alone:
    """Fails if two threads are inside at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entered = 0

    def __enter__(self) -> None:
        assert self._lock.acquire(blocking=False), "two threads at once"
        self.entered += 1

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def scores_of(
    query: Tensor, key: Tensor, scale: float, softcap: float, window: tuple[Any, Any], causal: bool
) -> tuple[Tensor, Tensor]:
    """Scores (H, n, N) with -inf where a key is hidden, and what capping does to a gradient."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    slope = torch.ones_like(scores)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
        slope = 1 - (scores / softcap).square()
    ahead = torch.arange(len(key)) - torch.arange(len(query)).unsqueeze(1)
    ahead = ahead - (len(key) - len(query))
    left, right = (None, 0) if causal else window
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left is not None:
        hidden |= ahead < -left
    if right is not None:
        hidden |= ahead > right
    return scores.masked_fill(hidden, -math.inf), slope


def stand_in(*, calls_of_one_more: bool = False) -> ModuleType:
    """``flash_attn.cute.interface``. ``alone``, ``calls`` and ``counted``, the tiles of the packs
    whose blocks were counted, tell what happened.

    ``calls_of_one_more``: its compiled functions get one more argument than hcp knows.
    """
    module: Any = ModuleType("flash_attn.cute.interface")
    module.BIN_BATCH_SEARCH_THRESH, module.AuxData = 6, AuxData
    module.alone, module.calls, module.counted = Alone(), [], []
    more = (None,) if calls_of_one_more else ()

    def compiled(function: Callable[..., Any], key: Any, make: Callable[..., Any]) -> Any:
        """What the package does in each of its functions."""
        if key not in function.compile_cache:  # type: ignore[attr-defined]
            function.compile_cache[key] = make  # type: ignore[attr-defined]
        return function.compile_cache[key]  # type: ignore[attr-defined]

    def tile_size(
        head_dim: int, head_dim_v: int, causal: bool, local: bool, sparse_block_size_q: Any = None
    ) -> Any:
        swap = head_dim > 192
        return SimpleNamespace(
            m_block_size=ROWS_PER_TILE, n_block_size=KEYS_PER_TILE, dKV_swapAB=swap
        )

    def cumsum(*, cu_seqlens: Tensor, tile_size: int) -> Tensor:
        blocks = torch.empty(cu_seqlens.shape, dtype=torch.int32)

        def kernel(blocks: Tensor, splits: None, cu: Tensor, a: None, b: None, c: None) -> None:
            assert (splits, a, b, c) == (None,) * 4
            module.counted.append(tile_size)
            counts = -(-cu.diff() // tile_size)
            blocks.copy_(torch.cat([cu.new_zeros(1), counts.cumsum(0)]))

        compiled(cumsum, tile_size, kernel)(blocks, None, cu_seqlens, None, None, None)
        return blocks

    def sequences(cu_q: Tensor, cu_k: Tensor) -> list[tuple[slice, slice]]:
        bounds = cu_q.tolist(), cu_k.tolist()
        return [
            (slice(*rows), slice(*keys))
            for rows, keys in zip(*(itertools.pairwise(x) for x in bounds), strict=True)
        ]

    def forward(
        q: Tensor, k: Tensor, v: Tensor, qv: None = None, cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None, seqused_q: None = None, seqused_k: None = None,
        max_seqlen_q: int = 0, max_seqlen_k: int = 0, min_seqlen_k: None = None,
        page_table: None = None, softmax_scale: float = 0.0, causal: bool = False,
        softcap: float | None = None, window_size_left: int | None = None,
        window_size_right: int | None = None, learnable_sink: None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        module.calls.append("forward")
        assert return_lse
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
        lse = torch.empty(q.shape[1], q.shape[0])
        if len(q) == 0 or len(k) == 0:
            return out.zero_(), lse.fill_(-math.inf), None, None, None  # type: ignore[return-value]
        is_causal = window_size_left is None and window_size_right == 0
        left, right = (None, None) if is_causal else (window_size_left, window_size_right)
        many = len(cu_seqlens_q) - 1 > module.BIN_BATCH_SEARCH_THRESH
        blocks = cumsum(cu_seqlens=cu_seqlens_q, tile_size=128) if many else None
        cap = softcap or 0.0

        def kernel(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, cu_q: Tensor,
            cu_k: Tensor, used_q: None, used_k: None, pages: None, left: Any, right: Any,
            sink: None, sparse: None, aux: AuxData, blocks: Tensor | None, splits: None, *more: None
        ) -> None:  # fmt: skip
            assert (used_q, used_k, pages, sink, sparse, splits) == (None,) * 6
            assert (blocks is not None) == many
            with module.alone:
                for rows, keys in sequences(cu_q, cu_k):
                    scores, _ = scores_of(q[rows], k[keys], scale, cap, (left, right), is_causal)
                    sums = scores.logsumexp(-1)
                    weights = (scores - sums.unsqueeze(-1)).exp().nan_to_num(0.0)
                    values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1).float()
                    out[rows] = torch.einsum("hqk,khe->qhe", weights, values).to(q.dtype)
                    lse[:, rows] = sums

        key = (
            q.dtype, q.shape[2], v.shape[2], q.shape[1] // k.shape[1], is_causal, cap,
            left is None, right is None, many, max_seqlen_q,
        )  # fmt: skip
        compiled(forward, key, kernel)(
            q.detach(), k.detach(), v.detach(), out, lse, softmax_scale, cu_seqlens_q,
            cu_seqlens_k, None, None, None, left, right, None, None, AuxData(None, None), blocks,
            None, *more,
        )  # fmt: skip
        return out, lse, None, None, None  # type: ignore[return-value]

    def preprocess(
        out: Tensor, dout: Tensor, dpsum: Tensor, lse: Tensor, lse_log2: Tensor, dq_accum: Tensor,
        cu_seqlens_q: Tensor, seqused_q: None, dlse: Tensor | None, blocks: Tensor | None,
    ) -> None:  # fmt: skip
        def kernel(
            out: Tensor, dout: Tensor, dpsum: Tensor, lse: Tensor, lse_log2: Tensor,
            dq_accum: Tensor, cu_q: Tensor, used: None, dlse: Tensor | None, row_max: None,
            scale_p: None, scale: float, blocks: Tensor | None, o_lo: None,
        ) -> None:  # fmt: skip
            assert (used, row_max, scale_p, scale, o_lo) == (None, None, None, 1.0, None)
            with module.alone:
                n = len(out)
                sums = (out.float() * dout.float()).sum(-1).t()
                dpsum[:, :n] = sums if dlse is None else sums - dlse
                lse_log2[:, :n] = lse * LOG2_E
                dq_accum.zero_()

        compiled(preprocess, (out.dtype, dlse is None), kernel)(
            out, dout, dpsum, lse, lse_log2, dq_accum, cu_seqlens_q, None, dlse, None, None, 1.0,
            blocks, None,
        )  # fmt: skip

    def convert(
        accum: Tensor, output: Tensor, scale: float, cu_seqlens: Tensor, blocks: Tensor | None,
        unit: int,
    ) -> None:  # fmt: skip
        def kernel(
            accum: Tensor, output: Tensor, scale: float, cu: Tensor, used: None, sink: None,
            blocks: Tensor | None,
        ) -> None:  # fmt: skip
            with module.alone:
                n, heads, size = output.shape
                columns = -(-size // unit) * unit
                sums = accum.view(heads, -1, columns)[:, :n, :size]
                output.copy_(sums.transpose(0, 1) * scale)

        compiled(convert, (output.dtype, unit), kernel)(
            accum, output, scale, cu_seqlens, None, None, blocks
        )

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
        softmax_scale: float = 0.0, causal: bool = False, softcap: float = 0.0,
        window_size_left: int | None = None, window_size_right: int | None = None,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_q: None = None,
        seqused_k: None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
        deterministic: bool = False, dlse: Tensor | None = None, learnable_sink: None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        module.calls.append("backward")
        if q.numel() == 0 or k.numel() == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        is_causal = window_size_left is None and window_size_right == 0
        left, right = (None, None) if is_causal else (window_size_left, window_size_right)
        config = tile_size(q.shape[2], v.shape[2], is_causal, left is not None or right is not None)
        unit = 64 if config.dKV_swapAB else 32
        batch = len(cu_seqlens_q) - 1
        many = batch > module.BIN_BATCH_SEARCH_THRESH
        rounded = [
            (rows + (batch + 1) * tile - 1) // tile * tile
            for rows, tile in ((len(q), ROWS_PER_TILE), (len(k), KEYS_PER_TILE))
        ]
        columns = [-(-x.shape[2] // unit) * unit for x in (q, v)]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dq_accum = torch.empty(q.shape[1], rounded[0] * columns[0])
        dpsum, lse_log2 = torch.empty(q.shape[1], rounded[0]), torch.empty(q.shape[1], rounded[0])
        ratio = q.shape[1] // k.shape[1]
        assert ratio == 1 or q.shape[2] == v.shape[2], "GQA backward requires one head size"
        if ratio > 1:
            dk_accum, dv_accum = (torch.zeros(k.shape[1], rounded[1] * x) for x in columns)
        blocks_q = cumsum(cu_seqlens=cu_seqlens_q, tile_size=ROWS_PER_TILE) if many else None
        blocks_k = cumsum(cu_seqlens=cu_seqlens_k, tile_size=KEYS_PER_TILE) if many else None
        preprocess(out, dout, dpsum, lse, lse_log2, dq_accum, cu_seqlens_q, None, dlse, blocks_q)

        def kernel(
            q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse_log2: Tensor, dpsum: Tensor,
            dq_accum: Tensor, dk: Tensor, dv: Tensor, scale: float, cu_q: Tensor, cu_k: Tensor,
            used_q: None, used_k: None, left: Any, right: Any, a: None, b: None, c: None,
            aux: AuxData, sparse: None, blocks: Tensor | None, *more: None
        ) -> None:  # fmt: skip
            assert (used_q, used_k, a, b, c, sparse) == (None,) * 6
            assert (blocks is not None) == many
            with module.alone:
                heads, n, size = q.shape[1], len(q), columns[0]
                grads = [torch.zeros(len(x), heads, x.shape[2]) for x in (q, k, v)]
                for rows, keys in sequences(cu_q, cu_k):
                    window = left, right
                    scores, slope = scores_of(q[rows], k[keys], scale, softcap, window, is_causal)
                    weights = (scores - lse_log2[:, rows].unsqueeze(-1) / LOG2_E).exp()
                    weights = weights.nan_to_num(0.0)
                    values = v[keys].repeat_interleave(ratio, 1).float()
                    of_weights = torch.einsum("qhe,khe->hqk", dout[rows].float(), values)
                    of_scores = weights * (of_weights - dpsum[:, rows].unsqueeze(-1)) * slope
                    wide = k[keys].repeat_interleave(ratio, 1).float()
                    grads[0][rows] = torch.einsum("hqk,khd->qhd", of_scores, wide)
                    grads[1][keys] = torch.einsum("hqk,qhd->khd", of_scores, q[rows].float())
                    grads[2][keys] = torch.einsum("hqk,qhe->khe", weights, dout[rows].float())
                dq_accum.view(heads, -1, size)[:, :n, : q.shape[2]] = grads[0].transpose(0, 1)
                if ratio == 1:
                    dk.copy_(grads[1] * scale)
                    dv.copy_(grads[2])
                    return
                for target, grad, wide_size in zip((dk, dv), grads[1:], columns, strict=True):
                    shared = grad.unflatten(1, (-1, ratio)).sum(2)
                    part = target.view(shared.shape[1], -1, wide_size)
                    part[:, : len(shared), : shared.shape[2]] += shared.transpose(0, 1)

        one_block = max_seqlen_q <= ROWS_PER_TILE, max_seqlen_k <= KEYS_PER_TILE
        key = (
            q.dtype, q.shape[2], v.shape[2], ratio, is_causal, softcap, left is None,
            right is None, many, one_block,
        )  # fmt: skip
        compiled(backward, key, kernel)(
            q.detach(), k.detach(), v.detach(), dout, lse_log2, dpsum, dq_accum,
            dk if ratio == 1 else dk_accum, dv if ratio == 1 else dv_accum, softmax_scale,
            cu_seqlens_q, cu_seqlens_k, None, None, left, right, None, None, None,
            AuxData(None, None), None, blocks_k, *more,
        )  # fmt: skip
        convert(dq_accum, dq, softmax_scale, cu_seqlens_q, blocks_q, unit)
        if ratio > 1:
            convert(dk_accum, dk, softmax_scale, cu_seqlens_k, blocks_k, unit)
            convert(dv_accum, dv, 1.0, cu_seqlens_k, blocks_k, unit)
        return dq, dk, dv

    functions = {
        "_flash_attn_fwd": forward,
        "_flash_attn_bwd": backward,
        "_bwd_preprocess": preprocess,
        "_bwd_postprocess_convert": convert,
        "_compute_tile_cumsum": cumsum,
    }
    for name, function in functions.items():
        function.compile_cache = {}  # type: ignore[attr-defined]
        setattr(module, name, function)
    module._tile_size_bwd_sm90 = tile_size
    made: ModuleType = module
    return made
