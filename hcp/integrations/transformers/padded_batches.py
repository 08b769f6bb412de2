"""What padded batches may be, of which hcp computes the tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor


def expect_batch_of_text(given: Mapping[str, Any], known: Collection[str], expected: str) -> None:
    """Raise ValueError for arguments of a model's call that are not among the known ones."""
    others = [
        name
        for name, value in given.items()
        if name not in known and value is not None and value is not False
    ]
    if others:
        raise ValueError(
            f"the model was called with {', '.join(sorted(others))}, expected {expected}"
        )


def kept_tokens(tokens: Tensor, mask: Tensor | None, advice: str = "") -> Tensor:
    """Return which tokens (B, L) are none of the padding, (B, L) bools. ``advice``: ends the error
    for a mask that is none of padding."""
    if mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    if mask.shape != tokens.shape or bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and values up to {mask.max().item()}, "
            f"expected {tuple(tokens.shape)} and 0 or 1: 0 is padding, and each row one sequence"
            f"{advice}"
        )
    return mask.bool()
