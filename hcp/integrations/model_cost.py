"""Prices of a plan from the sizes of a trainer's model, which its configuration names."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from hcp.groups.process_groups import ProcessGroups
from hcp.planning.cost import CostModel
from hcp.tools.rates import machine_cost

_log = logging.getLogger("hcp")


class Sizes(NamedTuple):
    """The sizes of a decoder's layers, as a plan needs them."""

    hidden: int
    """Values of a token between layers."""
    feed_forward: int
    """Values of a token inside the feed-forward layer; of experts, those that a token uses."""
    heads: int
    """Query heads."""
    key_heads: int
    """Key-value heads; of latent attention, those to which keys are expanded."""
    head_dim: int
    """Values of a query head."""
    attending: Fraction = Fraction(1)
    """Layers whose queries see all keys before them, of all layers."""
    sliding: Fraction = Fraction(0)
    """Layers with a sliding window, of all layers."""
    window: int = 0
    """The keys that a query of a sliding layer sees."""


def cost_of_model(
    model: Any, groups: ProcessGroups, ranks_per_node: int | None = None
) -> CostModel | None:
    """Return prices by the sizes of a model of Transformers', equal on all ranks.

    Args:
        model: has a ``config``, itself or the model that it wraps. None: nothing is known.
        groups: those whose ranks compute it; their device gives the machine's rates.
        ranks_per_node: ranks of a node, which exchange faster; None: not known.

    Returns:
        The prices; None if the configuration does not name the sizes, which the log then says.
    """
    if model is None:
        return None
    config = _config_of(model)
    sizes = None if config is None else sizes_of(config)
    if sizes is None:
        _log.info(
            "hcp: %s has no config with hidden_size and num_attention_heads: plans use the default "
            "prices. Give cost=: hcp.CostModel.for_transformer(...), or what `python -m "
            "hcp calibrate` wrote",
            type(model).__name__,
        )
        return None
    return cost_of_sizes(sizes, groups.transport.device, ranks_per_node)


def cost_of_sizes(
    sizes: Sizes, device: torch.device, ranks_per_node: int | None = None
) -> CostModel:
    """Return prices of one layer, the mean over those of a model with these sizes."""
    of_all = machine_cost(
        device,
        ranks_per_node,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.feed_forward,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.key_heads,
        head_dim=sizes.head_dim,
        bytes_per_element=4 if device.type == "cpu" else 2,
    )
    if sizes.sliding == 1:
        return replace(of_all, window=sizes.window)
    exchanging = sizes.attending + sizes.sliding
    return replace(
        of_all,
        pair=int(of_all.pair * sizes.attending),
        token=of_all.token + int(of_all.pair * sizes.sliding * sizes.window),
        exchange=int(of_all.exchange * exchanging),
        exchange_far=int(of_all.exchange_far * exchanging),
    )


def _config_of(model: Any) -> Any:
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return config if text is None else text()


def sizes_of(config: Any) -> Sizes | None:
    """Read the sizes from a configuration of Transformers'. None if it names no hidden size, no
    heads, or no size of the feed-forward layer."""

    def named(name: str) -> int | None:
        value = getattr(config, name, None)
        return value if isinstance(value, int) and value > 0 else None

    hidden, heads = named("hidden_size"), named("num_attention_heads")
    if hidden is None or heads is None:
        return None
    dense = named("intermediate_size") or named("n_inner") or 4 * hidden
    used, of_expert = named("num_experts_per_tok"), named("moe_intermediate_size") or dense
    shared = named("shared_expert_intermediate_size") or of_expert * (
        named("n_shared_experts") or 0
    )
    nope, rope = named("qk_nope_head_dim"), named("qk_rope_head_dim")
    window = named("sliding_window") or 0
    attending, sliding = _shares(getattr(config, "layer_types", None), window)
    return Sizes(
        hidden,
        dense if used is None else used * of_expert + shared,
        heads,
        heads if nope else named("num_key_value_heads") or heads,
        nope + (rope or 0) if nope else named("head_dim") or hidden // heads,
        attending,
        sliding,
        window,
    )


def _shares(kinds: Any, window: int) -> tuple[Fraction, Fraction]:
    """Return how many of the layers attend to all keys, and how many within a window. Where no kind
    is named, a window is that of all layers."""
    kinds = kinds or ["sliding_attention" if window else "full_attention"]
    sliding = sum(kind == "sliding_attention" for kind in kinds) if window else 0
    full = sum(kind in _FULL or (kind == "sliding_attention" and not window) for kind in kinds)
    if full + sliding == 0:
        return Fraction(1), Fraction(0)
    return Fraction(full, len(kinds)), Fraction(sliding, len(kinds))


_FULL = ("full_attention", "attention")
"""Transformers' names of layers whose queries see all keys before them."""
