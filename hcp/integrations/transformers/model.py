"""Pass a micro-batch to a model, and compute its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from hcp._words import GradReduce
from hcp.integrations.loader import warn_of_the_barrier
from hcp.step.dispatch import LocalBatch
from hcp.step.handler import ContextParallelHandler


def model_inputs(cp: ContextParallelHandler, local: LocalBatch) -> dict[str, Any]:
    """Return the arguments of a model with hcp attention: `model(**model_inputs(cp, local))`.

    `local.input_ids`: (T,). Models of Transformers cannot compute zero rows, so a rank without rows
    gets one that stands in. No other row sees it, and `causal_lm_losses` leaves it out.
    """
    return {
        "input_ids": cp.at_least_one_row(local.input_ids).unsqueeze(0),
        "position_ids": cp.at_least_one_row(cp.position_ids).unsqueeze(0),
        "use_cache": False,
        "cp": cp,
    }


def causal_lm_logits(
    model: nn.Module,
    cp: ContextParallelHandler,
    local: LocalBatch,
    inputs: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return the logits of each row of this rank, (T, vocabulary). `inputs`: the model's arguments,
    by default `model_inputs`."""
    if isinstance(model, FSDPModule):
        warn_of_the_barrier(model, cp.plan)
    given = model_inputs(cp, local) if inputs is None else inputs
    logits: Tensor = model(**given).logits[0, : cp.rows]
    return logits


def causal_lm_losses(
    model: nn.Module,
    cp: ContextParallelHandler,
    local: LocalBatch,
    inputs: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return the cross-entropy of each row of this rank, (T,), float32 or wider. `inputs`: see
    `causal_lm_logits`."""
    return losses_of(causal_lm_logits(model, cp, local, inputs), local.labels)


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row, (T,), float32 or wider, of (T, vocabulary), (T,)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="none")


def causal_lm_loss(
    model: nn.Module,
    cp: ContextParallelHandler,
    local: LocalBatch,
    *,
    grad_reduce: GradReduce = "mean",
    inputs: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return this micro-batch's share of the mean loss over the whole batch, a scalar to call
    `backward` on.

    `grad_reduce`: "mean" if gradients are averaged over the ranks, as DDP and FSDP do. `inputs`:
    the model's arguments, by default `model_inputs`; `image_inputs` makes others.
    """
    losses = causal_lm_losses(model, cp, local, inputs)
    return cp.loss(losses, local.loss_mask, grad_reduce=grad_reduce)
