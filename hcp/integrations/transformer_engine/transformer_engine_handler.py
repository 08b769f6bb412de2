"""Attention by Transformer Engine's DotProductAttention, which exchanges keys and values itself.

`tests/cuda/check_transformer_engine.py` runs it with Transformer Engine. The other tests replace it
by a module with the same arguments.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Unpack

import torch
from torch import Tensor

from hcp.attention.checks import as_autocast
from hcp.attention.options import AttentionOptions, expect_known
from hcp.attention.rotary import Rotary
from hcp.step.backends import INSTALL_TE
from hcp.step.handler import ContextParallelHandler

try:
    from transformer_engine.pytorch import DotProductAttention
except ImportError as error:
    raise type(error)(
        f"transformer_engine cannot be imported ({error}), expected Transformer Engine 2: "
        f"{INSTALL_TE}"
    ) from None


class TransformerEngineHandler(ContextParallelHandler):
    """A handler whose attention is Transformer Engine's.

    Transformer Engine exchanges rows over a process group of the plan's ranks: give it as
    ``cp_group=`` if the degree is more than 1. Lengths must be divisible by 2 * degree. The meaning
    of the comm types and the errors are Transformer Engine's own.
    """

    def attention(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        return_lse: bool = False,
        cp_group: Any = None,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """Like :meth:`hcp.ContextParallelHandler.attention`, but refuses options that Transformer
        Engine does not have here: sinks, soft-capping, dropout, log-sum-exp, formats, masks and
        latent rows. Ranks do not compare ``layer``, since Transformer Engine exchanges rows itself.
        """
        expect_known("attention", options, AttentionOptions)
        given: dict[str, Any] = {**_DEFAULTS, **options, "return_lse": return_lse}
        _refuse_others(given)
        emb = given["rotary_pos_emb"]
        if emb is not None:
            rotary = emb if isinstance(emb, Rotary) else self.rotary(emb)
            query, key = (self.apply_rotary_pos_emb(x, rotary) for x in (query, key))
        query, key, value = map(as_autocast, (query, key, value))
        module = _module(
            query.shape[1], key.shape[1], query.shape[2], value.shape[2], given["softmax_scale"]
        )
        out = self.core_attn(
            attn_mod=_Adapted(module, given["window_size"]),
            query=query,
            key=key,
            value=value,
            attn_mask_type="padding_causal" if given["causal"] else "padding",
            cp_group=cp_group,
            comm_type=given["comm_type"],
        )
        return out.view(query.shape[0], query.shape[1], value.shape[2])


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(ContextParallelHandler.attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
_TAKEN = {"causal", "window_size", "softmax_scale", "comm_type", "rotary_pos_emb", "layer"}


def _refuse_others(given: dict[str, Any]) -> None:
    """Raise ValueError for an option that is not taken here, unless it has its default."""
    for name in sorted(_DEFAULTS.keys() - _TAKEN):
        value, default = given[name], _DEFAULTS[name]
        if value is not default and value != default:
            raise ValueError(
                f"{name} is {value}, expected {default} with the backend 'transformer_engine': "
                "use 'torch'"
            )


class _Adapted:
    """Adapts Transformer Engine's module to the call of a Megatron-style core attention."""

    def __init__(self, module: Any, window_size: tuple[int, int]) -> None:
        self._module, self._window_size = module, window_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask_type: str,
        packed_seq_params: Any,
        **_: Any,
    ) -> Tensor:
        params = packed_seq_params
        left, right = self._window_size
        out: Tensor = self._module(
            query,
            key,
            value,
            qkv_format="thd",
            cu_seqlens_q=params.cu_seqlens_q,
            cu_seqlens_kv=params.cu_seqlens_kv,
            cu_seqlens_q_padded=params.cu_seqlens_q_padded,
            cu_seqlens_kv_padded=params.cu_seqlens_kv_padded,
            max_seqlen_q=params.max_seqlen_q,
            max_seqlen_kv=params.max_seqlen_kv,
            attn_mask_type=attn_mask_type,
            window_size=(left, 0 if "causal" in attn_mask_type else right),
        )
        return out


@functools.cache
def _module(
    heads: int, groups: int, size: int, value_size: int, softmax_scale: float | None
) -> torch.nn.Module:
    """Return the module for all layers of a shape. It has no parameters, and each call sets its
    group."""
    module: torch.nn.Module = DotProductAttention(
        heads,
        size if size == value_size else (size, value_size),
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=softmax_scale,
    )
    return module
