"""Attention over sets of keys that have no key in common, put together as if it were one set.

T rows of this rank, H heads, E head size of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge what the same queries have of several sets of keys, by log-sum-exp, with gradients.

    The result is that of one softmax over all keys (Rabe and Staats,
    https://arxiv.org/abs/2112.05682). No rank exchanges anything.

    Args:
        parts: (T, H, E) and (T, H) of each set, as ``cp.attention`` and ``cp.cross_attention`` give
            them with ``return_lse=True``. A log-sum-exp of -inf says that a query sees no key of
            the set; its output is 0.

    Returns:
        (T, H, E) in the dtype of the first, and the log-sum-exp (T, H). A query that sees no key
        of any set has 0 and -inf, and no gradient.

    Raises:
        ValueError: no part, or parts of different shapes.
    """
    _check(parts)
    seen = torch.stack([lse for _, lse in parts])
    blind = (seen == -torch.inf).all(0)
    seen = seen.masked_fill(blind, 0)  # differences of -inf would be NaN
    lse = seen.logsumexp(0)
    weights = (seen - lse).exp().unsqueeze(-1)
    dtype = parts[0][0].dtype
    out = torch.zeros_like(parts[0][0], dtype=lse.dtype)
    for weight, (part, _) in zip(weights, parts, strict=True):
        out = out + weight * part
    return out.masked_fill(blind.unsqueeze(-1), 0).to(dtype), lse.masked_fill(blind, -torch.inf)


def _check(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    if not parts:
        raise ValueError(
            "parts is empty, expected the output and the log-sum-exp of one set of keys or more"
        )
    shape = parts[0][0].shape
    for i, (out, lse) in enumerate(parts):
        if out.dim() != 3 or out.shape != shape or lse.shape != shape[:2]:
            raise ValueError(
                f"parts[{i}] has an output of shape {tuple(out.shape)} and a log-sum-exp of shape "
                f"{tuple(lse.shape)}, expected (T, H, E) and (T, H), equal in all parts"
            )
