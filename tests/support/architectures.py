"""Causal language models of the installed Transformers, as small as their configurations allow."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers

SIZES = (
    (
        32,
        "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size "
        "encoder_hidden_size lru_width cross_attention_hidden_size",
    ),
    (
        48,
        "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim "
        "shared_expert_intermediate_size expert_ffn_hidden_size mlp_hidden_size dff "
        "moe_shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp "
        "dense_intermediate_size",
    ),
    (16, "moe_intermediate_size q_lora_rank kv_lora_rank moe_latent_size"),
    (
        8,
        "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim sliding_window "
        "attention_head_dim d_kv index_head_dim",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "num_local_experts num_experts n_routed_experts moe_num_experts num_experts_total",
    ),
    (
        2,
        "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers "
        "num_decoder_layers num_encoder_layers num_key_value_heads n_head_kv num_kv_heads "
        "num_global_key_value_heads num_experts_per_tok top_k moe_topk moe_k num_experts_per_token "
        "moe_top_k eos_token_id",
    ),
    (1, "n_group topk_group n_groups first_k_dense_replace pad_token_id"),
    (0, "bos_token_id"),
    (64, "vocab_size"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (0.2, "initializer_range init_std initializer_std"),
    (
        0.0,
        "attention_dropout attention_probs_dropout_prob attn_pdrop hidden_dropout_prob "
        "resid_pdrop embd_pdrop dropout activation_dropout hidden_dropout",
    ),
)
SMALL = {name: value for value, names in SIZES for name in names.split()}
BOTH = ["sliding_attention", "full_attention"]
LATENT = {"num_key_value_heads": 4}
CHOSEN = {"index_head_dim": 16, "index_topk": 6}
ROTARY = {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
PER_LAYER = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "layer_types": BOTH,
    "num_kv_shared_layers": 0,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = LINEAR | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MORE: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT | {"qk_rope_head_dim": 4},
    "bailing_hybrid": LATENT | LINEAR,
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT | EXPERTS,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | CHOSEN,
    "dots1": EXPERTS | {"n_shared_experts": 1, "layer_types": BOTH},
    "dots3_note_text": LATENT,
    "gemma3n_text": PER_LAYER | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4_text": PER_LAYER,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT | CHOSEN | {"indexer_types": ["full", "shared"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": ROTARY,
    "hunyuan_v1_moe": ROTARY,
    "kimi_linear": LATENT | LINEAR | {"linear_num_heads": 4, "linear_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "minicpm3": LATENT,
    "ministral": ROTARY,
    "moshi": {"audio_vocab_size": 64},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "olmo_hybrid": DELTA,
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "youtu": LATENT,
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further options that some configurations need."""

LARGEST = 60e6
"""The most parameters of a model. Models that are larger in spite of small options are left out."""


def build(kind: str) -> torch.nn.Module | None:
    """Build a decoder with random weights. None if these options do not make it small, or if the
    environment cannot build it."""
    cls = transformers.CONFIG_MAPPING[kind]
    try:
        config = cls(**small(cls) | MORE.get(kind, {}))
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        with torch.device("meta"):
            size = sum(p.numel() for p in made(config).parameters())
        if size > LARGEST:
            return None
        torch.manual_seed(7)
        model = made(config).eval()
        if kind == "xmod":
            model.set_default_language("en_XX")
        with torch.no_grad():
            model(torch.arange(3, 9)[None], use_cache=False)
    except Exception:
        return None
    return model


def made(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def small(cls: Any) -> dict[str, Any]:
    """Return the small options that a configuration and its parts have, and that are not None by
    default."""
    names = set(inspect.signature(cls.__init__).parameters)
    try:
        default = cls()
        names |= set(default.to_dict())
    except Exception:  # one that needs options
        default = None
    options: dict[str, Any] = {name: value for name, value in SMALL.items() if name in names}
    for name in list(options):
        none = _default(default, name) is None
        if none and name != "num_key_value_heads" and not name.endswith("token_id"):
            del options[name]
    for name, part in getattr(cls, "sub_configs", {}).items():
        if part is not transformers.AutoConfig:
            options[name] = small(part) | MORE.get(part.model_type, {})
    return options


def _default(config: Any, name: str) -> Any:
    """Return an option's default value, 0 if there is none for all layers together."""
    try:
        return getattr(config, name, 0)
    except Exception:  # Transformers' own, of options that each layer has
        return 0
