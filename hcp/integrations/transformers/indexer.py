"""Sparse attention of Transformers' models whose indexer chooses keys (DSA): DeepSeek-V3.2, GLM-5.

The model's indexer takes a mask of all keys. Under hcp it computes its queries, keys and weights,
and attention, which has the handler, lets them choose.

T rows of this rank, I heads of the indexer, D their size.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from hcp.step.handler import ContextParallelHandler

MODEL_TYPES = {"deepseek_v32", "glm_moe_dsa"}
LAYER = "indexed_attention"
"""The kind of their layers, by its name in configurations."""

_MADE_BY_HCP = "_hcp_lets_attention_choose"


class ChosenKeys:
    """The keys of a layer, which are chosen when attention asks for them. Layers that share them
    hand it on."""

    def __init__(self, query: Tensor, key: Tensor, weights: Tensor, top_k: int) -> None:
        """query (1, T, I, D), key (1, T, D), weights (1, T, I)."""
        self._given, self._top_k = (query, key, weights), top_k
        self._chosen: Tensor | None = None

    def indices(self, cp: ContextParallelHandler) -> Tensor:
        """Places of the chosen keys in each row's sequence, (T, top_k)."""
        if self._chosen is None:
            query, key, weights = (x[0, : cp.rows] for x in self._given)
            with torch.no_grad():
                self._chosen, _ = cp.sparse.top_k(query, key, weights, self._top_k)
        return self._chosen


def is_indexed(config: Any) -> bool:
    """Whether a configuration is of a model whose indexer hcp knows."""
    return getattr(config, "model_type", None) in MODEL_TYPES


def hand_choices_on(model: nn.Module) -> None:
    """Let the indexers of a model leave the choice to hcp's attention."""
    for module in model.modules():
        if is_indexer(module):
            _install(type(module))


def is_indexer(module: nn.Module) -> bool:
    return hasattr(module, "index_topk") and is_indexed(getattr(module, "config", None))


def _install(cls: type) -> None:
    """Replace the forward of an indexer's class, once in a process."""
    own = cls.forward  # type: ignore[attr-defined]
    if hasattr(own, _MADE_BY_HCP):
        return

    @functools.wraps(own)
    def forward(
        self: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        *positional: Any,
        **keywords: Any,
    ) -> Any:
        if isinstance(attention_mask, Tensor):  # another attention than hcp's
            given = hidden_states, q_resid, position_embeddings, attention_mask
            return own(self, *given, *positional, **keywords)
        return _choice(self, hidden_states, q_resid, position_embeddings)

    vars(forward)[_MADE_BY_HCP] = True
    cls.forward = forward  # type: ignore[attr-defined]


@torch.no_grad()
def _choice(
    indexer: Any, hidden: Tensor, q_resid: Tensor, rotary: tuple[Tensor, Tensor]
) -> ChosenKeys:
    """Compute what an indexer scores keys by: the model's own indexer has no gradient either."""
    rotated, passed = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
    query = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    parts = [x.split([rotated, passed], dim=-1) for x in (query, key)]
    turned = _rotate_of(indexer)(*(part[0] for part in parts), *rotary, unsqueeze_dim=2)
    query, key = (
        torch.cat([first, part[1]], dim=-1) for first, part in zip(turned, parts, strict=True)
    )
    scale = indexer.softmax_scale * indexer.n_heads**-0.5
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float() * scale
    return ChosenKeys(query, key.squeeze(2), weights, indexer.index_topk)


def _rotate_of(indexer: nn.Module) -> Any:
    """The rotary embedding of an indexer: in halves, or interleaved where there is no other."""
    module = sys.modules[type(indexer).__module__]
    halves = getattr(module, "apply_rotary_pos_emb", None)
    return halves or vars(module)["apply_rotary_pos_emb_interleave"]
