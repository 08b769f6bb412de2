"""Megatron's values of `--attention-backend`, and the backends of hcp that do what they ask for."""

from __future__ import annotations

from typing import Any

import torch

from hcp.attention.kernels.present import survey

BACKENDS = "auto", "flash", "fused"
"""Values of Megatron's that hcp has a backend for. Every backend of hcp's is also its own name."""

FLASH_VERSIONS = {2: "torch", 3: "flash_attn_3", 4: "flash_attn_4"}
"""Where Megatron's `--flash-attention-version` pins one; PyTorch's kernels are version 2."""

REFUSED = {
    "unfused": "for bfloat16 and float16 hcp has fused kernels alone",
    "local": "it asks for Megatron's own core attention, in whose place hcp's is",
}


def backend_of(value: Any, flash_attention_version: int | None = None) -> str:
    """hcp's backend for a value of Megatron's, an AttnBackend or its name; None is "auto".

    Raises ValueError for those that hcp has no counterpart of.
    """
    name = "auto" if value is None else str(getattr(value, "name", value))
    if name in REFUSED:
        raise ValueError(
            f"attention_backend is {name!r}, expected one of {', '.join(BACKENDS)}: {REFUSED[name]}"
        )
    if flash_attention_version is not None and name in ("auto", "flash"):
        return FLASH_VERSIONS[flash_attention_version]
    if name == "flash":
        return newest_flash_attention()
    return "cudnn" if name == "fused" else name


def newest_flash_attention() -> str:
    """The newest FlashAttention that is installed for this GPU; on CPUs and otherwise PyTorch's."""
    if not torch.cuda.is_available():
        return "torch"
    found = survey(torch.cuda.get_device_capability())
    there = [each.family for each in found if each.lacks is None]
    return next(name for name in ("flash_attn_4", "flash_attn_3", "torch") if name in there)


def backend_of_config(config: Any) -> str:
    """hcp's backend for a model's config."""
    version = getattr(config, "flash_attention_version", None)
    return backend_of(getattr(config, "attention_backend", None), version)
