"""Multimodal rotary embedding (mRoPE): rows whose positions have three axes, those of images."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from hcp.integrations.megatron.layers import OneRank
from hcp.integrations.megatron.megatron_packed import handler_of


class OfAxes:
    """A mixin for GPTModel: with `position_embedding_type="mrope"`, the model's rotary embedding
    makes the angles of this rank's rows, out of their positions (3, 1, T).

    The layers of `hcp_layer_spec` take the angles from the micro-batch's PackedSeqParams. Megatron
    alone would cut them once more, by the ranks of its CP group.
    """

    def _preprocess(
        self, *args: Any, position_ids: Tensor, packed_seq_params: Any = None, **options: Any
    ) -> Any:
        of_axes = self.position_embedding_type == "mrope"  # type: ignore[attr-defined]
        params = packed_seq_params
        if of_axes:
            group, config = self.pg_collection.cp, self.config  # type: ignore[attr-defined]
            handler_of(packed_seq_params, group, config)
            expected = 3, 1, packed_seq_params.rows
            if tuple(position_ids.shape) != expected:
                raise ValueError(
                    f"position_ids has shape {tuple(position_ids.shape)}, expected {expected}: the "
                    "time, height and width of this rank's rows; give every sample position_ids "
                    "(3, length), in which text counts its tokens on all three axes"
                )
            params = copy.copy(packed_seq_params)
            params.cp_group = OneRank()
        made = super()._preprocess(  # type: ignore[misc]
            *args, position_ids=position_ids, packed_seq_params=params, **options
        )
        if of_axes:
            packed_seq_params.angles = made[1]
        return made
