"""Rotary embedding of Megatron's layers by hcp: in its attention, or in one pass before it.

T rows on this rank, H query heads, R elements of a head that are rotated, N that are not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

import hcp
from hcp.attention import rotary as rope
from hcp.attention.rotary import Rotary
from hcp.integrations.megatron.megatron_latent import Unprojected
from hcp.integrations.megatron.megatron_packed import with_padding
from hcp.integrations.megatron.twin import twin
from hcp.integrations.unrotated import once, place_of

# ---- self-attention ------------------------------------------------------------------------------


class Rotations(NamedTuple):
    """The rotations by which a layer's core attention rotates queries and keys. None: as they
    are."""

    query: Rotary | None
    key: Rotary | None

    def apply(
        self, cp: hcp.ContextParallelHandler, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, Rotary | None]:
        """Queries, keys, and what attention is to rotate both by: None where the two differ, which
        are rotated here."""
        if self.query is self.key:
            return query, key, self.query
        if self.query is not None:
            query = cp.apply_rotary_pos_emb(query, self.query)
        if self.key is not None:
            key = cp.apply_rotary_pos_emb(key, self.key)
        return query, key, None


def rotations_of(
    layer: Any,
    cp: hcp.ContextParallelHandler,
    rotary_pos_emb: Tensor | tuple[Tensor | None, Tensor | None] | None,
    angles: Tensor | None = None,
) -> Rotations | None:
    """The rotations of a layer, out of the tables of angles (positions, 1, 1, R) that Megatron's
    model gives it: one, or one for queries and one for keys. `angles` (T, 1, 1, R): those of its
    rows, in place of tables."""
    config = layer.config
    without = config.no_rope_freq and config.no_rope_freq[layer.layer_number - 1]
    if rotary_pos_emb is None or without:
        return None
    if config.multi_latent_attention:
        raise ValueError(
            "config.multi_latent_attention is True for a layer of plain self-attention, expected "
            "False: releases of Megatron differ in its pairs; give hcp_layer_spec fused_rope=False"
        )
    tables = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
    interleaved = config.rotary_interleaved
    mscale = _concentration_of(layer)
    if angles is not None:
        rows = angles.flatten(1)[: cp.rows]
        options = {"interleaved": interleaved, "mscale": mscale}
        of_rows = once(cp, place_of(angles), angles, lambda: rope.rotary_of(rows, **options))
        return Rotations(of_rows, of_rows)

    def made(table: Tensor | None) -> Rotary | None:
        if table is None:
            return None
        key = place_of(table), interleaved, mscale
        options = {"interleaved": interleaved, "mscale": mscale}
        return once(cp, key, table, lambda: cp.rotary(table, **options))

    return Rotations(*map(made, tables))


def _concentration_of(layer: Any) -> float:
    """YaRN's factor of a layer, which keeps it in newer releases. Megatron-Bridge's config has None
    without YaRN, which Megatron's function refuses."""
    kept = getattr(layer, "_yarn_concentration_factor", None)
    return _yarn_get_concentration_factor_from_config(layer.config) if kept is None else kept


# ---- latent attention ----------------------------------------------------------------------------
#
# Megatron rotates the last R elements of a query's heads, and R elements of a key that all heads
# share. It turns neighbours into halves first and leaves them there; neighbours that stay where
# they are give the same scores, as queries and keys have the same order.


class LatentRotary(NamedTuple):
    """The rotations of the rows of a model's latent attention."""

    query: Rotary
    """The rotation of whole heads (T, N + R), whose first N elements it leaves as they are."""
    key: Rotary
    """The rotation of the part of a key that is rotated (T, R)."""


class _NoTables:
    """Stands in for a rotary module in a layer whose rotation is hcp's: gives no table."""

    def get_rotary_seq_len(self, *args: Any, **options: Any) -> int:
        return 0

    def get_cached_cos_sin(self, *args: Any, **options: Any) -> tuple[None, None]:
        return None, None

    def __call__(self, *args: Any, **options: Any) -> None:
        return None


def check_latent(layer: type, config: Any) -> None:
    """Raise ValueError for a latent attention whose rotation hcp cannot take over."""
    if layer.get_query_key_value_tensors is not _OWN:  # type: ignore[attr-defined]
        raise ValueError(
            f"{layer.__name__} has a get_query_key_value_tensors of its own, expected Megatron's, "
            "whose rotation hcp takes over: give hcp_layer_spec fused_rope=False"
        )
    if config.qk_head_dim % 2:
        raise ValueError(
            f"config.qk_head_dim is {config.qk_head_dim}, expected an even number: hcp rotates "
            "pairs of a head's elements; give hcp_layer_spec fused_rope=False"
        )


_OWN = MLASelfAttention.get_query_key_value_tensors


def latent_twin(layer: Any, cp: hcp.ContextParallelHandler, rows: int, **changes: Any) -> Any:
    """A twin of a latent attention that takes Megatron's fused path, in which hcp rotates.
    `rows`: of the layer's input, at least `cp.rows`."""
    config = copy.copy(layer.config)
    config.apply_rope_fusion = True
    made = twin(layer, config=config, rotary_pos_emb=_NoTables(), **changes)
    project = _with_names(_OWN, _fused_functions(_latent_rotary(layer, cp, rows)))
    made.__dict__["get_query_key_value_tensors"] = MethodType(project, made)
    return made


def _fused_functions(rotary: LatentRotary) -> dict[str, Callable[..., Any]]:
    """By the names and with the arguments of Megatron's own."""

    def for_query(query: Tensor, cos: None, sin: None, *sizes: Any) -> Tensor:
        return rope.rotate(query, rotary.query)

    def for_key_and_value(
        key_value: Tensor | Unprojected,  # (T, H, N + size of a value)
        shared: Tensor,  # (T, 1, R)
        cos: None,
        sin: None,
        rotated: int,
        passed: int,
        value: int,
        *more: Any,
    ) -> tuple[Tensor, Tensor]:
        shared = rope.rotate(shared, rotary.key)
        if isinstance(key_value, Unprojected):
            return key_value.with_shared(shared, passed + rotated)
        own, values = key_value.split([passed, value], dim=-1)
        shared = shared.expand(-1, key_value.shape[1], -1)
        return torch.cat([own, shared], dim=-1), values

    return {
        "fused_apply_mla_rope_for_q": for_query,
        "fused_apply_mla_rope_for_kv": for_key_and_value,
    }


def _with_names(function: Any, names: dict[str, Any]) -> FunctionType:
    """A copy of a function that finds these names instead of its module's. The module, which other
    layers use, stays as it is."""
    made = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _latent_rotary(layer: Any, cp: hcp.ContextParallelHandler, rows: int) -> LatentRotary:
    own, config = layer.rotary_pos_emb, layer.config
    # Each layer has a module of its own; Megatron's depend on the config alone.
    source = config if type(own) in (RotaryEmbedding, YarnRotaryEmbedding) else own

    def make() -> LatentRotary:
        # Rounded up, as Megatron keeps a table for each length.
        table = own(1 << max(0, cp.get_rotary_seq_len() - 1).bit_length(), packed_seq=True)
        angles, mscale = table if isinstance(table, tuple) else (table, 1.0)
        angles = with_padding(cp.get_emb_on_this_cp_rank(angles).flatten(1), rows)
        of_pairs = angles[:, : angles.shape[1] // 2].repeat_interleave(2, dim=1)
        key = rope.rotary_of(of_pairs, interleaved=True, mscale=mscale)
        still = key.cos.new_ones(rows, config.qk_head_dim)
        cos, sin = torch.cat([still, key.cos], 1), torch.cat([0 * still, key.sin], 1)
        return LatentRotary(Rotary(cos, sin, True), key)

    return once(cp, ("latent attention", id(source), rows), source, make)
