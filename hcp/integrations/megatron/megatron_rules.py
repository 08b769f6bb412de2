"""Rules for rebinding Megatron-Core's and Megatron-Bridge's classes. No Megatron is imported."""

from __future__ import annotations

from typing import Any

import torch

from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding.derived import Names
from hcp.rebinding.packages import PackageRules
from hcp.rebinding.rules import Rule
from hcp.rebinding.safe_access import has, is_a, own_attributes

_DELTA_METHOD = "_setup_variant_attrs"


def _local_attention_only(attention: Any, pgs: ProcessGroups) -> str | None:
    if pgs.size("cp") == 1:
        return None
    return (
        f"it computes attention over this rank's own tokens and would be wrong with CP = "
        f"{pgs.size('cp')}, which its constructor refuses"
    )


# ---- gated delta nets ----------------------------------------------------------------------------


def _is_delta_net(holder: Any) -> bool:
    """Whether a module is a gated delta net, by its method and its cp_size. KDA is one. Versions of
    Megatron-Core keep the classes in different places."""
    return (
        is_a(holder, torch.nn.Module)
        and has(holder, _DELTA_METHOD)
        and type((own_attributes(holder) or {}).get("cp_size")) is int
    )


def _delta_attributes(module: Any, pgs: ProcessGroups) -> dict[str, Any]:
    """Derive the numbers that depend on the CP size, by the module's own method on a copy."""
    copy = object.__new__(type(module))
    vars(copy).update(vars(module), cp_size=pgs.size("cp"))
    getattr(copy, _DELTA_METHOD)()
    held = vars(module)
    return {
        name: value
        for name, value in vars(copy).items()
        if value is not held.get(name) and type(value) in (int, tuple, list)
    }


def _delta_heads(module: Any, pgs: ProcessGroups) -> str | None:
    """Refuse numbers of heads that the constructor refuses."""
    cp, tp = pgs.size("cp"), getattr(module, "tp_size", 1)
    for name in ("num_key_heads", "num_value_heads"):
        heads = getattr(module, name, 0)
        if heads % (tp * cp):
            return f"it has {name} {heads}, expected a multiple of tp * cp = {tp} * {cp}"
    return None


def _without_context_parallelism(module: Any, pgs: ProcessGroups) -> str | None:
    """Refuse the gated delta net of Megatron-Core 0.16.1, which does not refuse CP itself."""
    if pgs.size("cp") == 1 or hasattr(module, _DELTA_METHOD) or hasattr(module, "cp_size"):
        return None
    return (
        f"it runs its recurrence over this rank's own tokens and would be wrong with CP = "
        f"{pgs.size('cp')}"
    )


# ---- Mamba ---------------------------------------------------------------------------------------


def _mamba_heads(context: Any, pgs: ProcessGroups) -> str | None:
    """Refuse numbers of heads and groups that fail the constructor's assertions."""
    cp, tp = pgs.size("cp"), pgs.size("tp") if "tp" in pgs.roles else 1
    heads = getattr(context, "nheads_local_tp", 0)
    groups = getattr(context, "ngroups_local_tp", 1)
    if heads % cp:
        return f"it has {heads} heads on each of tp = {tp} ranks, expected a multiple of CP = {cp}"
    if groups % cp and cp % groups:
        return (
            f"it has {groups} groups on each of tp = {tp} ranks, expected a divisor or a multiple "
            f"of CP = {cp}"
        )
    return None


# ---- the package ---------------------------------------------------------------------------------

_LOCAL_ATTENTION = (
    "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "megatron.bridge.models.gemma.gemma2_provider.Gemma2DotProductAttention",
    "megatron.bridge.models.gemma.modeling_gemma2.Gemma2DotProductAttention",
)

RULES = PackageRules(
    classes={
        **dict.fromkeys(_LOCAL_ATTENTION, Rule(refuse=_local_attention_only)),
        "megatron.core.ssm.mamba_context_parallel.MambaContextParallel": Rule(
            rebuild=True, refuse=_mamba_heads
        ),
        "megatron.core.ssm.gated_delta_product.GDPContextParallel": Rule(rebuild=True),
        "megatron.core.ssm.gated_delta_net.GatedDeltaNet": Rule(
            refuse=_without_context_parallelism
        ),
    },
    shapes=(
        (
            _is_delta_net,
            Rule(
                attributes=_delta_attributes,
                caches=("_chunkwise_cp_context_cache",),
                refuse=_delta_heads,
            ),
        ),
    ),
    sharders=("megatron.core.distributed", "megatron.core.optimizer", "megatron_fsdp"),
    modules={
        "megatron.core.parallel_state": (
            "_global_process_group_list",  # for destroying them
            "_HYBRID_DP_CP_GROUPS",  # of each size, by ranks of dp_cp
            "_TENSOR_AND_DATA_PARALLEL_GROUP",  # read nowhere without CP
            "_DATA_PARALLEL_GROUP_GLOO",  # of checkpoints and optimizers, as those that follow
            "_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
            "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
            "_EXPERT_DATA_PARALLEL_GROUP_GLOO",
            "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO",
        ),
    },
    names=Names(
        free=frozenset(
            {"dynamic_context_parallel", "hybrid_context_parallel", "max_seqlen_per_cp_rank"}
        ),
        # The expert grid has no CP in it, and what the optimizer shards over spans dp_cp.
        free_groups=(
            *("ep", "expt_tp", "tp_ep", "tp_ep_pp", "expt_dp", "intra_expt_dp", "embd", "pos_embd"),
            *("tp_ep_pp_with_egtp_remat", "expt_dp_gtp_remat", "expt_gtp_remat"),
            *("intra_dp_cp", "intra_dist_opt", "inter_dist_opt"),
        ),
        sized_once=frozenset({"tp_comm_overlap"}),  # buffers for tensor parallelism
    ),
)
