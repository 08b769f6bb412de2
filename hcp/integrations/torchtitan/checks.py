"""Refuse options of a torchtitan configuration that were not tested with hcp, or cannot work."""

from __future__ import annotations

from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.common.attention import BaseAttention

from hcp.integrations.loader import check_model_config
from hcp.integrations.torchtitan.attention import PackedAttention
from hcp.integrations.torchtitan.validator import ContextParallelValidator

_UNTESTED = "not supported together with hcp in torchtitan"

EXPECTED: tuple[tuple[str, object, str], ...] = (
    ("parallelism.spmd_backend", "partial_dtensor", "the others were not tested"),
    (
        "parallelism.context_parallel_degree",
        1,
        "hcp spreads documents over the data-parallel ranks; for one degree for all give "
        "hcp.Config(sequence_packing_scheduler='static_cp', context_parallel_size=...)",
    ),
    ("parallelism.tensor_parallel_degree", 1, _UNTESTED),
    ("parallelism.pipeline_parallel_degree", 1, _UNTESTED),
    ("parallelism.expert_parallel_degree", 1, _UNTESTED),
    ("training.disable_cuda_graphs", True, "rows differ from step to step"),
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
    if config.compile.enable and "model" in config.compile.components:
        raise ValueError(
            "compile.components has 'model', expected compile without it: not tested with hcp"
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


def _check_model(model: Any) -> None:
    for fqn, attention, _, _ in model.traverse(BaseAttention.Config):
        if not isinstance(attention.inner_attention, PackedAttention.Config):
            raise ValueError(
                f"{fqn}.inner_attention is {type(attention.inner_attention).__qualname__}, "
                "expected PackedAttention.Config: give converters=[PackedContextParallel.Config()] "
                "to model_registry"
            )
    for i, layer in enumerate(model.layers):
        if getattr(layer, "moe", None) is not None:
            raise ValueError(f"layers.{i}.moe is set, expected dense layers: experts not tested")
