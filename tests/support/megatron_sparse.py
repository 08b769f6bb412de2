"""Megatron's DeepSeek sparse attention of parts that a CPU has, for Megatron-Core 0.19.2."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear


class Duplicated(torch.nn.Linear):
    """Stands in for Transformer Engine's linear layer that every tensor-parallel rank has."""

    def __init__(self, size: int, output: int, *, config: Any, init_method: Any, **options: Any):
        super().__init__(size, output, bias=options["bias"], dtype=config.params_dtype)
        init_method(self.weight)

    def forward(self, rows: torch.Tensor) -> Any:
        return super().forward(rows), None


class Provider(LocalSpecProvider):  # type: ignore[misc]
    def linear(self) -> type:
        return Duplicated


def sparse_attention_spec(config: Any) -> Any:
    """The specification of a latent attention whose keys an indexer chooses."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    attention = specs.get_dsa_module_spec_for_backend(config, Provider())
    down = dict.fromkeys(("linear_q_down_proj", "linear_kv_down_proj"), ColumnParallelLinear)
    for name, linear in down.items():
        setattr(attention.submodules, name, linear)
    return attention
