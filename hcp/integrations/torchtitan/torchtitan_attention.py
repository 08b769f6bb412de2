"""hcp's attention in torchtitan's models.

T tokens on this rank, N query heads, G key-value heads, H head size, V that of values.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import (
    BaseAttention,
    FlexAttention,
    GQAttention,
    VarlenAttention,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.models.deepseek_v3.mtp import MTPDecoder
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

import hcp
from hcp.integrations.torchtitan.torchtitan_rotary import by_hcp
from hcp.integrations.unrotated import Unrotated, take_rotary

_numbers = itertools.count()
"""Numbers for the layers of this process, in the order in which they are built."""


class PackedAttention(Module):
    """Attention of one rank's rows over whole documents, whose other rows may be on other ranks.

    It replaces `VarlenAttention` and `FlexAttention`. `attention_masks` is the micro-batch's
    `hcp.ContextParallelHandler`, which `ContextParallelTrainer` gives to the model.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = (-1, 0)
        """(left, right): the tokens that a query sees before and after itself, as for
        `VarlenAttention`. -1 is no limit."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window_size = config.window_size
        # Alike on the ranks of a group, which build the same layers.
        self._number = next(_numbers)

    def forward(
        self,
        q_BLNH: Tensor | Unrotated,
        k_BLNH: Tensor | Unrotated,
        v_BLNH: Tensor,
        *,
        attention_masks: hcp.ContextParallelHandler,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return (1, T, N, V) for q (1, T, N, H), k (1, T, G, H) and v (1, T, G, V), N a multiple
        of G. Under tensor parallelism these are the heads of this rank.

        q and k are rotated here if the layer's rotary embedding hands them on unrotated.
        A rank without rows passes one that stands in. It attends to nothing, and its output is 0.
        """
        if not isinstance(attention_masks, hcp.ContextParallelHandler):
            raise ValueError(
                f"attention_masks is a {type(attention_masks).__name__}, expected a "
                "ContextParallelHandler: train with hcp.integrations.torchtitan."
                "ContextParallelTrainer"
            )
        cp = attention_masks
        q, k, rotary = take_rotary(q_BLNH, k_BLNH, cp)
        out = cp.attention(
            *(x.squeeze(0)[: cp.rows] for x in (q, k, v_BLNH)),
            causal=self.window_size[1] == 0,
            window_size=self.window_size,
            softmax_scale=scale,
            rotary_pos_emb=rotary,
            # A compiled model would be compiled anew for each number.
            layer=None if torch.compiler.is_dynamo_compiling() else self._number,
        )
        return nn.functional.pad(out, (0, 0, 0, 0, 0, v_BLNH.shape[1] - cp.rows)).unsqueeze(0)


class PackedContextParallel(ModelConfigConverter):
    """A converter, for `converters=` of torchtitan's `model_registry`, that puts `PackedAttention`
    into a model's configuration.

    Raises ValueError for a model whose attention is neither grouped-query nor multi-head latent
    attention, within each document, causal or with a sliding window.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        fused_rope: bool = True
        """Rotate queries and keys in hcp's attention, and those of latent attention by hcp's kernel
        before it, where the rotary embedding is one of torchtitan's two. False: by torchtitan."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Return the configuration with hcp's inner attention."""
        name = type(model_config).__qualname__
        if not isinstance(model_config, Decoder.Config):
            raise ValueError(f"the model's configuration is {name}, expected that of a Decoder")
        if model_config._owner.get_attention_masks is not Decoder.get_attention_masks:
            raise ValueError(
                f"{name}'s model makes attention masks of its own, expected those of Decoder: "
                "causal within each document"
            )
        if model_config._owner.forward not in (Decoder.forward, MTPDecoder.forward):
            raise ValueError(
                f"{name}'s model has a forward of its own, expected that of Decoder: what it does "
                "with rows of some tokens was not tested"
            )
        for fqn, attention, _, _ in model_config.traverse(BaseAttention.Config):
            attention.inner_attention = _packed(f"{name}.{fqn}", attention)
            if self.config.fused_rope:
                whole_heads = type(attention) is GQAttention.Config
                attention.rope = by_hcp(attention.rope, hands_on=whole_heads)
        return model_config


def _packed(place: str, attention: BaseAttention.Config) -> PackedAttention.Config:
    if type(attention) not in (GQAttention.Config, LatentAttention.Config):
        raise ValueError(
            f"{place} is {type(attention).__qualname__}, expected GQAttention.Config or that of "
            "DeepSeek-V3: other attention was not tested"
        )
    inner = attention.inner_attention
    if isinstance(inner, VarlenAttention.Config):
        return PackedAttention.Config(window_size=inner.window_size)
    if isinstance(inner, FlexAttention.Config):
        return PackedAttention.Config()
    raise ValueError(
        f"{place}.inner_attention is {type(inner).__qualname__}, expected that of "
        "attn_backend='varlen' or 'flex'"
    )
