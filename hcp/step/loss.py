"""The loss: one mean that does not depend on the plan.

A batch's loss is the mean over all its loss tokens, wherever they were computed. Their number is
summed over the whole batch before the first backward, so that every micro-batch knows its weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRAD_REDUCE = ("sum", "mean")


class LossTokens:
    """The number of loss tokens of a batch, which all handlers of the batch share.

    ``hcp.dispatch`` makes the handlers first. The number is known when all ranks have told theirs.
    """

    def __init__(self, count: float | None = None) -> None:
        self.set(count)

    def set(self, count: float | None) -> None:
        """``count``: None if nobody counted them."""
        self.count = count
        self._tensor = (
            None if count is None else torch.tensor(count, dtype=torch.float64, device="cpu")
        )

    def known(self) -> Tensor:
        """The number as a float64 scalar on the CPU. ValueError if nobody counted them."""
        if self._tensor is None:
            raise ValueError(
                "the batch's loss tokens are not known, expected samples with a 'loss_mask' in "
                "hcp.dispatch, or use loss_sum"
            )
        return self._tensor


def check_grad_reduce(given: object) -> None:
    """Raise ValueError unless the caller says what becomes of gradients. Nobody else knows: with
    the wrong one they are the domain's size too large, or too small."""
    if given not in GRAD_REDUCE:
        raise ValueError(
            f"grad_reduce is {given!r}, expected one of {GRAD_REDUCE}: 'sum' where gradients are "
            "summed over the ranks (all_reduce, or one rank alone), 'mean' where the trainer "
            "averages them (DDP, FSDP, ZeRO)"
        )


def check_losses(losses: Tensor, loss_mask: Tensor, rows: int) -> None:
    """Raise ValueError unless both are (rows,)."""
    if losses.dim() != 1 or losses.shape != loss_mask.shape:
        raise ValueError(
            f"losses has shape {tuple(losses.shape)} and loss_mask {tuple(loss_mask.shape)}, "
            "expected both (rows,)"
        )
    if not torch.compiler.is_compiling() and losses.shape[0] != rows:
        raise ValueError(f"losses has {losses.shape[0]} rows, expected {rows}")


def mean_loss(losses: Tensor, loss_mask: Tensor, loss_tokens: Tensor, scale: float) -> Tensor:
    """scale * sum(losses * loss_mask) / loss_tokens over this rank's rows: a scalar, float32 or
    wider.

    A batch without loss tokens has loss 0. Rows that the mask leaves out do not count, even
    if their loss is NaN.
    """
    total = masked_sum(losses, loss_mask)
    return total * (scale / loss_tokens.where(loss_tokens > 0, 1.0)).to(total.dtype)


def masked_sum(losses: Tensor, loss_mask: Tensor) -> Tensor:
    """sum(losses * loss_mask), where a mask of 0 silences even inf and nan."""
    wide = losses.to(torch.promote_types(losses.dtype, torch.float32))
    return (wide * loss_mask).where(loss_mask != 0, 0.0).sum()
