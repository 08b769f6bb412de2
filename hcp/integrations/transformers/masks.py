"""The masks that models of Transformers need, by the names of their kinds of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hcp.planning.mask import Mask, MasksLike

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LAYERS = {FULL, SLIDING, CHUNKED}
"""Kinds of layers, by their names in configurations, in which only attention mixes rows. A plan may
have masks of these names."""


def masks_of(model: nn.Module, lengths: Sequence[int]) -> MasksLike | None:
    """Return the masks that causal sequences of these lengths need under a model, for
    `hcp.plan(masks=)`: those of layers that attend in chunks (Llama 4). None: it has none."""
    config: Any = model.config
    text = config.get_text_config()
    if CHUNKED not in (getattr(text, "layer_types", None) or ()):
        return None
    chunk = text.attention_chunk_size
    return {
        FULL: [None] * len(lengths),
        CHUNKED: [Mask.chunked(length, chunk) for length in lengths],
    }
