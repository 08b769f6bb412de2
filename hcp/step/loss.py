"""One mean that does not depend on the plan.

A batch's loss is the mean over all its loss tokens, wherever they were computed. Their number is
summed over the whole batch before the first backward, so that every micro-batch knows its weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRAD_REDUCE = ("sum", "mean")


def mean_loss(losses: Tensor, loss_mask: Tensor, loss_tokens: Tensor, scale: float) -> Tensor:
    """scale * sum(losses * loss_mask) / loss_tokens over this rank's rows: a scalar, float32 or
    wider.

    A batch without loss tokens has loss 0. Rows that the mask leaves out do not count, whatever
    their loss holds.
    """
    total = masked_sum(losses, loss_mask)
    return total * (scale / loss_tokens.where(loss_tokens > 0, 1.0)).to(total.dtype)


def masked_sum(losses: Tensor, loss_mask: Tensor) -> Tensor:
    """sum(losses * loss_mask), where a mask of 0 silences even inf and nan."""
    wide = losses.to(torch.promote_types(losses.dtype, torch.float32))
    return (wide * loss_mask).where(loss_mask != 0, 0.0).sum()
