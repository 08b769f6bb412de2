"""The sizes of torchtitan's models, by which plans are priced."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hcp.integrations.model_cost import Sizes


def sizes_of_decoder(config: Any) -> Sizes:
    """Read the sizes from the configuration of a decoder: means over its layers, which may be of
    several kinds."""
    layers = list(config.layers)
    widths = [_feed_forward(layer) for layer in layers]
    attention = layers[0].attention
    nope = getattr(attention, "qk_nope_head_dim", 0)
    heads = attention.n_heads
    head_dim = getattr(attention, "head_dim", None) or config.dim // heads
    windows = [_window(layer.attention) for layer in layers]
    sliding = [window for window in windows if window]
    return Sizes(
        config.dim,
        sum(widths) // len(widths),
        heads,
        heads if nope else getattr(attention, "n_kv_heads", None) or heads,
        nope + attention.qk_rope_head_dim if nope else head_dim,
        Fraction(len(layers) - len(sliding), len(layers)),
        Fraction(len(sliding), len(layers)),
        sliding[0] if sliding else 0,
    )


def _feed_forward(layer: Any) -> int:
    """Values of a token inside the feed-forward layer, or inside the experts that it uses."""
    if layer.moe is None:
        return int(layer.feed_forward.w1.out_features)
    experts, shared = layer.moe.routed_experts.inner_experts, layer.moe.shared_experts
    own = 0 if shared is None else shared.w1.out_features
    return int(layer.moe.router.top_k * experts.hidden_dim + own)


def _window(attention: Any) -> int:
    """The keys that a query sees; 0: all before it."""
    left = getattr(attention.inner_attention, "window_size", (-1, 0))[0]
    return int(left) + 1 if left >= 0 else 0
