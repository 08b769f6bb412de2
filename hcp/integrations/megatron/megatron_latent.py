"""Megatron's latent attention, whose keys and values travel compressed.

A layer projects latent rows up to keys and values, and rotates what all heads share, before its
core attention. In a twin for one call the projection hands its input on, and the core attention
projects the rows that it receives.

T rows on this rank, n rows of a launch, H query heads, C elements of a latent row that are
projected, R of a key that is rotated, N of a head's key that are not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import hcp
from hcp.attention.comm_types import exchanges_heads


class Expansion(NamedTuple):
    """How a core attention gets keys and values of latent rows (n, C + R)."""

    project: Any
    """The layer's projection, a module."""
    sizes: tuple[int, int, int]
    """C, N, and the size of a value."""

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.project.parameters())

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        compressed, passed, value = self.sizes
        latent, shared = rows.split([compressed, rows.shape[1] - compressed], dim=-1)
        projected, _ = self.project(latent)
        both = projected.view(rows.shape[0], -1, passed + value)
        own, values = both.split([passed, value], dim=-1)
        shared = shared.unsqueeze(1).expand(-1, both.shape[1], -1)
        return torch.cat([own, shared], dim=-1), values


class Unprojected(NamedTuple):
    """Latent rows (T, C) in the place of keys and values that were projected from them."""

    rows: Tensor

    def size(self) -> torch.Size:
        return self.rows.size()

    def view(self, *sizes: int) -> Unprojected:
        return self

    def with_shared(self, shared: Tensor, query_size: int) -> tuple[Tensor, Tensor]:
        """A key (T, 1, C + R) of the rows and what heads share (T, 1, R), and a value of no head.
        Megatron pads values of another size than queries have, and where it recomputes them it asks
        for their gradient."""
        key = torch.cat([self.rows.unsqueeze(1), shared], dim=-1)
        return key, key[:, :0, :1].expand(-1, -1, query_size).clone()


class _HandOn:
    """Stands in for a projection, and gives its input."""

    def __call__(self, rows: Tensor) -> tuple[Unprojected, None]:
        return Unprojected(rows), None


def sends_latents(layer: Any, cp: hcp.ContextParallelHandler) -> bool:
    """Whether a layer's rows can travel before they are projected, under its comm type."""
    config, comm_type = layer.config, layer.core_attention.cp_comm_type or cp.comm.default_type
    # A share of the rows on each tensor-parallel rank; and projections of any number of rows, or of
    # several numbers in one pass.
    shares_rows = config.sequence_parallel and layer.pg_collection.tp.size() > 1
    others = config.fp8, getattr(config, "fp4", None), getattr(config, "delay_wgrad_compute", False)
    return not (exchanges_heads(comm_type) or shares_rows or any(others))


def hand_on(made: Any) -> Expansion:
    """Let a twin of a latent attention hand its latent rows on to its core attention. Returns what
    the core attention expands them by."""
    config, project = made.config, made.linear_kv_up_proj
    del made._modules["linear_kv_up_proj"]  # the twin's own mapping
    made.__dict__["linear_kv_up_proj"] = _HandOn()
    return Expansion(project, (config.kv_lora_rank, config.qk_head_dim, config.v_head_dim))
