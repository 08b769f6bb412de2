"""The cross-entropy of hidden states and a head, in chunks, so that logits are never in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hcp._versions import installed, numbers

LIGER = "0.8.5"
"""The first version whose gradient of each row's loss is right."""

Losses = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    summed: bool = False,
) -> Tensor:
    """Return the cross-entropy of each row, (T,), or with `summed` their sum, a scalar; float32 or
    wider.

    `hidden`: (T, hidden). `weight`, `bias`: of the head, (vocabulary, hidden) and (vocabulary,).
    `labels`: (T,), -100 for a loss of 0. Liger's kernel computes it on GPUs if it is installed, and
    otherwise torch's. Raises ImportError where there is neither: see `check_linear_cross_entropy`.

    Liger computes gradients of a sum in the forward. Those of losses row by row wait for the
    backward, which computes all logits a second time.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        narrow = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(narrow), weight.to(narrow)
        bias = None if bias is None else bias.to(narrow)
    if weight.dtype != hidden.dtype:
        raise ValueError(
            f"the head's rows are {hidden.dtype} and its weight is {weight.dtype}, expected one "
            "dtype: losses would be rounded without a word. A policy of FSDP2 whose output_dtype "
            "rounds rows wants it as param_dtype, too"
        )
    losses = _library(device)(hidden, weight, labels, bias, summed)
    return losses.to(torch.promote_types(losses.dtype, torch.float32))


def check_linear_cross_entropy(device: torch.device) -> None:
    """Raise ImportError unless a library that is installed computes it on this device."""
    _library(device.type)


@functools.cache
def _library(device: str) -> Losses:
    liger = installed("liger-kernel") if device == "cuda" else None
    if liger is not None and numbers(liger) >= numbers(LIGER):
        return _of_liger
    if hasattr(nn, "LinearCrossEntropyOptions"):
        return _of_torch
    found = f"liger-kernel is {liger or 'absent'}, " if device == "cuda" else ""
    wanted = f"liger-kernel {LIGER} or torch 2.13" if device == "cuda" else "torch 2.13"
    raise ImportError(
        f"{found}torch is {torch.__version__}, expected {wanted} or newer for a linear "
        "cross-entropy: install one, or leave linear_cross_entropy=False"
    )


def _of_liger(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, summed: bool
) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    losses: Tensor = liger_fused_linear_cross_entropy(
        hidden, weight, labels, bias, reduction="sum" if summed else "none"
    )
    return losses


def _of_torch(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, summed: bool
) -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    losses = F.linear_cross_entropy(
        hidden, weight, labels, linear_bias=bias, reduction="none", options=options
    )
    # Its own sum would be rounded to 16 bits where they are.
    return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)) if summed else losses
