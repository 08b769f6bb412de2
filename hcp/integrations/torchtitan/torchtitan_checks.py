"""Refuse options of a torchtitan configuration that were not tested with hcp, or cannot work."""

from __future__ import annotations

from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
)

from hcp.integrations.loader import check_model_config
from hcp.integrations.torchtitan.torchtitan_attention import PackedAttention
from hcp.integrations.torchtitan.validator import ContextParallelValidator

EXPECTED: tuple[tuple[str, object, str], ...] = (
    ("parallelism.spmd_backend", "partial_dtensor", "the others were not tested"),
    (
        "parallelism.context_parallel_degree",
        1,
        "hcp spreads documents over the data-parallel ranks; for one degree for all give "
        "hcp.Config(sequence_packing_scheduler='static_cp', context_parallel_size=...)",
    ),
    (
        "parallelism.pipeline_parallel_degree",
        1,
        "a stage of torch.distributed.pipelining receives rows of one shape, and those of planned "
        "micro-batches differ",
    ),
    ("training.disable_cuda_graphs", True, "rows differ from step to step"),
    ("debug.moe_force_load_balance", False, "it chooses experts by the place of a row"),
)
"""(option, the value it must have, the reason)."""


def check_supported(config: Any) -> None:
    """Raise ValueError, before anything starts, for a `ContextParallelTrainer.Config` with options
    that hcp does not support."""
    check_model_config(config.context_parallel)
    for place, expected, reason in EXPECTED:
        section, name = place.split(".")
        value = getattr(getattr(config, section), name)
        if value != expected:
            raise ValueError(f"{place} is {value!r}, expected {expected!r}: {reason}")
    alignment, planner = alignment_of(config.parallelism), config.context_parallel
    if planner.max_seqlen_per_dp_cp_rank < alignment:
        raise ValueError(
            f"max_seqlen_per_dp_cp_rank is {planner.max_seqlen_per_dp_cp_rank}, expected >= "
            f"{alignment}: every rank's rows are a multiple of the tensor-parallel degree"
        )
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        raise ValueError(
            "loss is ChunkedLossWrapper.Config, expected one that takes any number of rows, as "
            "CrossEntropyLoss.Config: chunks of a rank without rows are none"
        )
    if config.model_spec is not None:
        _check_model(config.model_spec.model)
    validator = config.validator
    if validator.enable and not isinstance(validator, ContextParallelValidator.Config):
        raise ValueError(
            f"validator is {type(validator).__qualname__}, expected ContextParallelValidator.Config"
        )


def alignment_of(parallelism: Any) -> int:
    """The number that divides every rank's rows: tensor-parallel ranks share the rows of a sequence
    between them under sequence parallelism, and those of experts."""
    shared = parallelism.enable_sequence_parallel or parallelism.expert_parallel_degree > 1
    return int(parallelism.tensor_parallel_degree) if shared else 1


def _check_model(model: Any) -> None:
    if getattr(model, "mtp_layers", None):
        raise ValueError(
            f"mtp_layers has {len(model.mtp_layers)} layers, expected none: torchtitan rolls "
            "tokens along the rows of a rank, whose neighbours may be on other ranks"
        )
    for i, layer in enumerate(model.layers):
        inner = getattr(getattr(layer, "attention", None), "inner_attention", None)
        if not isinstance(inner, PackedAttention.Config):
            raise ValueError(
                f"layers.{i}.attention.inner_attention is {type(inner).__qualname__}, "
                "expected PackedAttention.Config: give converters=[PackedContextParallel.Config()] "
                "to model_registry"
            )
        if getattr(layer, "moe", None) is not None:
            _check_experts(f"layers.{i}.moe", layer.moe)


def _check_experts(place: str, moe: Any) -> None:
    dispatcher = type(moe.routed_experts.token_dispatcher)
    if dispatcher not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config):
        raise ValueError(
            f"{place}.routed_experts.token_dispatcher is {dispatcher.__qualname__}, expected "
            "AllToAllTokenDispatcher.Config (moe_comm_backend='standard'): the others hold buffers "
            "for training.local_batch_size * seq_len rows, and were not tested"
        )
