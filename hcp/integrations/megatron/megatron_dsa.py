"""Megatron's DeepSeek sparse attention (DSA): keys are chosen and fetched under any degree.

T rows on this rank, H query heads, C elements of a latent row that are values, K chosen keys.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hcp.integrations.megatron.layers import OneRank, RowsOf
from hcp.integrations.megatron.megatron_packed import handler_of, with_padding
from hcp.integrations.megatron.twin import twin

_LEAST = 1e-10
"""The least weight whose logarithm Megatron's indexer loss takes."""


class _Choosing:
    """A mixin for Megatron's DSAttention: it sees the sequences of the plan."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        _refuse(config)
        super().__init__(config, *args, **options)  # type: ignore[call-arg]

    def forward(  # type: ignore[no-untyped-def]
        self,
        query,
        key,
        value,
        attention_mask,
        x,
        qr,
        *args,
        packed_seq_params=None,
        up_v_weight=None,
        **options,
    ):
        """Return (rows, 1, H * size of a value) for absorbed queries (rows, H, C + R) and latent
        rows (rows, 1, C + R)."""
        config: Any = self.config  # type: ignore[attr-defined]
        if value is not None or up_v_weight is None:
            raise ValueError(
                "DSAttention was called with values, expected latent rows and up_v_weight, as "
                "AbsorbedMLASelfAttention gives them"
            )
        cp = handler_of(packed_seq_params, self.pg_collection.cp, config)  # type: ignore[attr-defined]
        count, rows, values = query.shape[0], cp.rows, config.kv_lora_rank
        coefficient = config.dsa_indexer_loss_coeff or 0.0
        learns = self.training and torch.is_grad_enabled() and coefficient > 0  # type: ignore[attr-defined]
        indexer = self._indexer(cp, count)
        with torch.set_grad_enabled(learns):
            # The indexer learns from its own loss alone.
            made = indexer.forward_before_topk(x.detach(), qr.detach(), packed_seq_params)
            own_query, own_key, own_weights = (each[:rows, 0] for each in made)
            indices, scores = cp.sparse.top_k(
                own_query,
                own_key,
                own_weights,
                config.dsa_indexer_topk,
                relu=config.dsa_indexer_scoring_relu,
            )
        out, _, weights = cp.sparse.attention(
            query[:rows],
            key[:rows, 0],
            indices=indices,
            expand=lambda fetched: (fetched[:, None], fetched[:, None, :values]),
            softmax_scale=self.softmax_scale,  # type: ignore[attr-defined]
        )
        out = torch.einsum("thc,hvc->thv", out, up_v_weight.to(out.dtype)).flatten(1)
        if learns:
            out = self._with_loss(out, coefficient * _divergence(weights, scores, indices))
        return with_padding(out, count).unsqueeze(1)

    def _indexer(self, cp: Any, count: int) -> Any:
        """The indexer for one call, on whose rank rows have their own positions."""
        indexer = self.indexer  # type: ignore[attr-defined]
        groups = copy.copy(indexer.pg_collection)
        groups.cp = OneRank()
        positions = RowsOf(indexer.rotary_pos_emb, cp, count)
        return twin(indexer, pg_collection=groups, rotary_pos_emb=positions)

    @staticmethod
    def _with_loss(out: Tensor, loss: Tensor) -> Tensor:
        from megatron.core.transformer.experimental_attention_variant import dsa

        joined: Tensor = dsa.DSAIndexerLossAutoScaler.apply(out, loss)
        return joined


def _divergence(weights: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    """The indexer's loss, summed over rows: how far its scores are from the attention's weights."""
    own = scores.log_softmax(-1).masked_fill(indices < 0, 0)
    return (weights * (weights.clamp_min(_LEAST).log() - own)).sum()


def _refuse(config: Any) -> None:
    """Refuse, by its option's name, what hcp's sparse attention does not compute."""
    options = {
        "dsa_indexer_topk_freq": (config.dsa_indexer_topk_freq, 1),
        "dsa_kernel_backend": (config.dsa_kernel_backend, "none"),
        "tensor_model_parallel_size": (config.tensor_model_parallel_size, 1),
        "apply_rope_fusion": (config.apply_rope_fusion, False),
    }
    if config.dsa_indexer_loss_coeff:  # else a mean over a micro-batch, or over all keys
        options["dsa_indexer_use_sparse_loss"] = (config.dsa_indexer_use_sparse_loss, True)
        options["calculate_per_token_loss"] = (config.calculate_per_token_loss, True)
    for name, (given, expected) in options.items():
        if given != expected:
            raise ValueError(
                f"config.{name} is {given!r}, expected {expected!r} for DeepSeek sparse attention "
                "under plans: hcp does not do it"
            )


@cache
def choosing(attention: type) -> type:
    """Derive a class of DSAttention that sees the sequences of the plan."""
    return type(f"Hcp{attention.__name__}", (_Choosing, attention), {"__module__": __name__})
