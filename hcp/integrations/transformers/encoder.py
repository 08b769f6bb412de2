"""Attention of encoders, and of decoders to them, in Transformers' models of both.

T rows of the decoder on this rank, S rows of the encoder, H heads, G key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hcp.step.handler import ContextParallelHandler


@dataclass(frozen=True, slots=True, eq=False)
class EncoderMask:
    """Replaces the mask of an encoder's rows: in its own layers, and in the decoder's
    cross-attention."""

    keys: ContextParallelHandler
    """The handler of the encoder's micro-batch."""
    window: int = -1
    """Rows that a row of the encoder sees to either side; -1: all of them."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: EncoderMask,
    cp: ContextParallelHandler,
    **options: Any,
) -> Tensor:
    """Return (rows of the query, H, D) for query (1, H, T or S, D), key and value (1, G, S, D).
    A rank without rows has one that stands in. `options`: of `cp.attention`."""
    keys, config = mask.keys, module.config
    of_decoder = bool(getattr(config, "is_decoder", False))
    q, k, v = (
        x[0].transpose(0, 1)[: handler.rows]
        for x, handler in ((query, cp if of_decoder else keys), (key, keys), (value, keys))
    )
    out: Any
    if of_decoder:
        out = cp.cross_attention(q, k, v, keys, **options)
    else:
        window = mask.window, mask.window
        out = keys.attention(q, k, v, causal=False, window_size=window, **options)
    result: Tensor = out
    return result
