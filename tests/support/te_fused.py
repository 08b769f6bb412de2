"""A stand-in for Transformer Engine's fused attention: signatures of its versions 2.20.2 and 2.13,
formulas in place of cuDNN."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hcp.attention.kernels import Launch
from hcp.attention.kernels.formula import Formula
from hcp.exchange.tables import Entry


def fused_attn_fwd(
    is_training: bool, max_seqlen_q: int, max_seqlen_kv: int, cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor, q: Tensor, k: Tensor, v: Tensor, fake_dtype: torch.dtype,
    fused_attention_backend: Any, attn_bias: Any = None, cu_seqlens_q_padded: Any = None,
    cu_seqlens_kv_padded: Any = None, page_table_k: Any = None, page_table_v: Any = None,
    s_quantizer: Any = None, o_quantizer: Any = None, attn_scale: float = 0.0, dropout: float = 0.0,
    fast_zero_fill: bool = True, qkv_layout: str = "sbh3d", o_format: str = "sbhd",
    qkv_scale_inv_format: Any = None, attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding", softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1), bottom_right_diagonal: Any = None, rng_gen: Any = None,
    softmax_offset: Any = None, return_max_logit: bool = False, cuda_graph: bool = False,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    assert is_training
    assert o_format == "thd"
    assert isinstance(rng_gen, torch.Generator), "it would draw from the trainer's numbers"
    out, sums = q.new_zeros(*q.shape[:2], v.shape[2]), torch.full((*q.shape[:2], 1), math.nan)
    for launch, rows, keys in _sequences(locals()):
        own = q[rows].float(), k[keys].float(), v[keys].float()
        found, lse = Formula().forward(launch, *own, attn_scale)
        out[rows], sums[rows] = found.to(q.dtype), lse.unsqueeze(2)
    return out, [sums, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, q: Tensor,
    k: Tensor, v: Tensor, o: Tensor, d_o: Tensor, fake_dtype: torch.dtype,
    aux_ctx_tensors: list[Tensor], fused_attention_backend: Any, cu_seqlens_q_padded: Any = None,
    cu_seqlens_kv_padded: Any = None, s_quantizer: Any = None, dp_quantizer: Any = None,
    dqkv_quantizer: Any = None, attn_scale: float = 0.0, dropout: float = 0.0,
    fast_zero_fill: bool = True, qkv_layout: str = "sbh3d", o_format: str = "sbhd",
    do_format: str = "sbhd", dqkv_layout: str = "sbh3d", qkv_scale_inv_format: Any = None,
    do_scale_inv_format: Any = None, attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding", softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1), bottom_right_diagonal: Any = None,
    deterministic: bool = False, cuda_graph: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    assert (o_format, do_format, dqkv_layout) == ("thd", "thd", "thd_thd_thd")
    assert o.is_contiguous()
    assert d_o.is_contiguous()
    assert o.shape == d_o.shape
    lse, state = aux_ctx_tensors
    assert lse.shape == (*q.shape[:2], 1)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert state.shape == (2,)
    assert state.dtype == torch.int64
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for launch, rows, keys in _sequences(locals()):
        own = q[rows].float(), k[keys].float(), v[keys].float(), o[rows].float()
        given = d_o[rows].float(), None, *own, lse[rows, :, 0], attn_scale
        for grad, at, found in zip(
            grads, (rows, keys, keys), Formula().backward(launch, *given), strict=True
        ):
            grad[at] = found.to(q.dtype)
    return [*grads, None, None]


def backward_of_2_13(
    max_seqlen_q: int, max_seqlen_kv: int, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, q: Tensor,
    k: Tensor, v: Tensor, o: Tensor, d_o: Tensor, fake_dtype: torch.dtype, dqkv_dtype: Any,
    aux_ctx_tensors: list[Tensor], fused_attention_backend: Any, cu_seqlens_q_padded: Any = None,
    cu_seqlens_kv_padded: Any = None, s_quantizer: Any = None, dp_quantizer: Any = None,
    dqkv_quantizer: Any = None, attn_scale: float = 0.0, dropout: float = 0.0,
    fast_zero_fill: bool = True, qkv_layout: str = "sbh3d", attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding", softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1), bottom_right_diagonal: Any = None,
    deterministic: bool = False, cuda_graph: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    given: dict[str, Any] = dict(locals())
    assert given.pop("dqkv_dtype") == f"the type of {q.dtype}"
    formats: dict[str, Any] = {"o_format": "thd", "do_format": "thd", "dqkv_layout": "thd_thd_thd"}
    return fused_attn_bwd(**given, **formats)


def _sequences(given: dict[str, Any]) -> list[tuple[Launch, slice, slice]]:
    """Of each sequence its mask and its rows, as the arguments say it."""
    q, k, v = (given[name] for name in "qkv")
    assert given["fused_attention_backend"] == "the backend"
    assert given["fake_dtype"] == q.dtype
    assert given["qkv_layout"] == "thd_thd_thd"
    assert given["dropout"] == 0.0
    assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v))
    mask, (left, right) = given["attn_mask_type"], given["window_size"]
    names = [f"cu_seqlens_{side}{end}" for end in ("", "_padded") for side in ("q", "kv")]
    bounds = [given[name] for name in names]
    assert all(x.dtype == torch.int32 and x.data_ptr() % 16 == 0 for x in bounds)
    lengths_q, lengths_kv = (x.diff().tolist() for x in bounds[:2])
    longest = given["max_seqlen_q"], given["max_seqlen_kv"]
    assert longest[0] >= max(lengths_q)
    assert longest[1] >= max(lengths_kv)
    assert bounds[2][-1] == len(q)
    assert bounds[3][-1] == len(k)
    causal = {"padding": None, "padding_causal": False, "padding_causal_bottom_right": True}[mask]
    diagonal = given["bottom_right_diagonal"]
    if causal is not None:
        assert right == 0
        assert causal == diagonal
    if causal or (left, right) != (-1, -1):
        assert longest[0] <= longest[1]
    found = []
    starts = bounds[2].tolist(), bounds[3].tolist()
    for i, (queries, keys) in enumerate(zip(lengths_q, lengths_kv, strict=True)):
        ahead = keys - queries if diagonal else 0
        low = -queries if left < 0 else ahead - left
        high = keys if right < 0 else ahead + right
        rows, own = (
            slice(starts[0][i], starts[0][i] + queries),
            slice(starts[1][i], starts[1][i] + keys),
        )
        found.append((Launch([Entry(0, queries, 0, keys, low, high)]), rows, own))
    return found


def modules(
    backward: Callable[..., Any] = fused_attn_bwd,
    forward: Callable[..., Any] = fused_attn_fwd,
    cudnn: tuple[int, int, int] = (9, 19, 0),
) -> dict[str, ModuleType]:
    """What ``sys.modules`` has to hold."""
    made = {
        name: ModuleType(f"transformer_engine{name}")
        for name in (
            "",
            ".pytorch",
            ".pytorch.cpp_extensions",
            ".pytorch.cpp_extensions.fused_attn",
        )
    }
    fused: Any = made[".pytorch.cpp_extensions.fused_attn"]
    fused.fused_attn_fwd, fused.fused_attn_bwd = forward, backward
    fused.FusedAttnBackend = {"F16_arbitrary_seqlen": "the backend"}
    utils, constants = (
        made.setdefault(f".pytorch.{name}", ModuleType(name)) for name in ("utils", "constants")
    )
    utils.get_cudnn_version = lambda: cudnn  # type: ignore[attr-defined]
    types = {x: f"the type of {x}" for x in (torch.bfloat16, torch.float16)}
    constants.TE_DType = types  # type: ignore[attr-defined]
    return {f"transformer_engine{name}": module for name, module in made.items()}
