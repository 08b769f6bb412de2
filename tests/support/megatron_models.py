"""Small models of Megatron-Core: options, and a hybrid with Mamba layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

YARN = dict(
    rotary_scaling_factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=0.0,
    correction_range_round_to_int=True,
)
"""Options of a config. Megatron reads them with the prefix `yarn_`."""


def config_of(num_layers: int = 2, **options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        context_parallel_size=1,
        **options,
    )


def mamba_hybrid(
    collection: Any,
    core_attention: Any,
    config: Any = None,
    wrap: Callable[[Any], Any] = lambda spec: spec,
) -> Any:
    """Build Mamba, attention, Mamba, MLP of Megatron's local layers, not Transformer Engine's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    attention, mlp = get_gpt_layer_local_spec(), get_gpt_layer_local_spec()
    mlp.module, mlp.submodules.self_attention = MLPLayer, IdentityOp
    mlp.submodules.input_layernorm, mlp.submodules.self_attn_bda = IdentityOp, IdentityFuncOp
    if core_attention is not None:
        attention.submodules.self_attention.submodules.core_attention = core_attention
    linears = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixer = ModuleSpec(module=MambaMixer, submodules=linears)
    parts = MambaLayerSubmodules(
        norm=torch.nn.Identity, mixer=mixer, mamba_bda=get_bias_dropout_add
    )
    # Taken from Transformer Engine, whatever the specification says.
    bases = {base.__module__ for base in mamba_block.MambaStack.__mro__}
    for home in (name for name in bases if "core" in name):  # another one since 0.19
        vars(sys.modules[home])["TENorm"] = lambda config, hidden_size, eps: torch.nn.LayerNorm(
            hidden_size, eps
        )
    layers = mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=parts),
        attention_layer=attention,
        mlp_layer=mlp,
    )
    return MambaModel(
        config=config
        or config_of(
            4, mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2, add_bias_linear=False
        ),
        mamba_stack_spec=wrap(ModuleSpec(module=mamba_block.MambaStack, submodules=layers)),
        vocab_size=264,
        max_sequence_length=64,
        hybrid_override_pattern="M*M-",
        position_embedding_type="rope",
        pg_collection=collection,
    )
