"""FlashAttention's packed functions, by the formula: what stand-ins for its packages call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from support.features import scores_of


def sequences(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    bounds = zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist(), strict=False)
    for q_start, q_end, k_start, k_end in bounds:
        yield slice(q_start, q_end), slice(k_start, k_end)


def scores_between(q: Tensor, k: Tensor, kw: Any) -> Tensor:
    left, right = kw["window_size_left"], kw["window_size_right"]
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    return scores_of(q, k, kw["softmax_scale"], kw["softcap"], hidden)


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **kw: Any
) -> tuple[Tensor, Tensor, None, None]:
    assert (kw["dropout_p"], kw["causal"]) == (0.0, False)
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan)
    for queries, keys in sequences(cu_q, cu_k):
        if keys.start == keys.stop or queries.start == queries.stop:
            continue  # rows that nobody reads
        assert queries.stop - queries.start <= max_q
        assert keys.stop - keys.start <= max_k
        scores = scores_between(q[queries], k[keys], kw)
        seen = scores.logsumexp(-1)
        weights = (scores - seen.unsqueeze(-1)).exp().nan_to_num(0.0)
        wide = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, wide)
        lse[:, queries] = seen.masked_fill(seen == -torch.inf, torch.inf)
    return out, lse, None, None


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    **kw: Any,
) -> None:
    for grad in (dq, dk, dv):
        grad.fill_(torch.nan)  # where there is nothing to compute
    groups, per_group = k.shape[1], q.shape[1] // k.shape[1]
    for queries, keys in sequences(cu_q, cu_k):
        if keys.start == keys.stop or queries.start == queries.stop:
            continue
        scores = scores_between(q[queries], k[keys], kw)
        weights = (scores - lse[:, queries].unsqueeze(-1)).exp()
        wide = v[keys].repeat_interleave(per_group, 1)
        delta = (dout[queries] * out[queries]).sum(-1).t().unsqueeze(-1)
        dscores = weights * (torch.einsum("qhd,khd->hqk", dout[queries], wide) - delta)
        if kw["softcap"]:
            steep = 1 - (scores / kw["softcap"]).square()
            dscores = dscores * steep.masked_fill(scores == -torch.inf, 0)
        dscores = dscores * kw["softmax_scale"]
        wide = k[keys].repeat_interleave(per_group, 1)
        dq[queries] = torch.einsum("hqk,khd->qhd", dscores, wide)
        for target, of in ((dk, (dscores, q[queries])), (dv, (weights, dout[queries]))):
            dwide = torch.einsum("hqk,qhd->khd", *of)
            target[keys] = dwide.unflatten(1, (groups, per_group)).sum(2)
