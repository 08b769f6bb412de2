"""Gated delta nets of the real Megatron-Core without the kernels for GPUs that it imports.

fla cannot run on a CPU. Its rule is replaced here by the recurrence, token by token
(https://arxiv.org/abs/2412.06464).
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    return x * (x.square().sum(dim, keepdim=True) + eps).rsqrt()


def slow_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: None = None,
) -> tuple[Tensor, Tensor | None]:
    """(batch, rows, heads, size) of one sequence each."""
    assert not use_qk_l2norm_in_kernel
    assert cu_seqlens is None
    shape = *key.shape[:1], *key.shape[2:], value.shape[-1]
    state = value.new_zeros(shape) if initial_state is None else initial_state.to(value.dtype)
    outs = []
    for t in range(key.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        told = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        new = beta[:, t, :, None] * (value[:, t] - told)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], new)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * key.shape[-1] ** -0.5)
    return torch.stack(outs, 1), state if output_final_state else None


def with_delta_net(spec: Any) -> Any:
    """A block of two layers: the first with a gated delta net in place of attention."""
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    net = gated_delta_net.GatedDeltaNet
    for base in net.__mro__:  # in several modules since 0.19
        if base.__module__.startswith(gated_delta_net.__name__):
            names = vars(sys.modules[base.__module__])
            names |= {"HAVE_FLA": True, "l2norm": l2norm, "torch_chunk_gated_delta_rule": slow_rule}
    parts = gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear,
        out_norm=spec.submodules.input_layernorm,
        out_proj=RowParallelLinear,
    )
    first = copy.deepcopy(spec)
    first.submodules.self_attention = ModuleSpec(module=net, submodules=parts)
    return TransformerBlockSubmodules(
        layer_specs=[first, spec], layer_norm=spec.submodules.input_layernorm
    )
