"""Attention over two sets of keys, merged, is one softmax over both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hcp.attention.merge import merge_attention


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(T, H, E) and (T, H), as hcp gives them: 0 and -inf for a query that sees none."""
    scores = torch.einsum("qhd,khd->qhk", q, k).masked_fill(~seen[:, None], -torch.inf)
    blind = ~seen.any(1)
    weights = scores.masked_fill(blind[:, None, None], 0).softmax(-1)
    weights = weights.masked_fill(blind[:, None, None], 0)
    lse = scores.masked_fill(blind[:, None, None], 0).logsumexp(-1)
    return torch.einsum("qhk,khd->qhd", weights, v), lse.masked_fill(blind[:, None], -torch.inf)


def test_merged_parts_are_one_softmax_with_gradients() -> None:
    """Query 0 sees keys of the first set only, query 1 of the second, query 2 of both, 3 none."""
    draw = torch.Generator().manual_seed(1)
    shapes = (4, 2, 3), (7, 2, 3), (7, 2, 5)
    seen = torch.rand(4, 7, generator=draw) < 0.7
    seen[0, 3:], seen[1, :3], seen[3] = False, False, False
    seen[0, 0] = seen[1, 6] = seen[2, 0] = seen[2, 6] = True
    results = []
    for cuts in (
        [slice(0, 7)],
        [slice(0, 3), slice(3, 7)],
        [slice(0, 3), slice(3, 3), slice(3, 7)],
    ):
        own = torch.Generator().manual_seed(2)
        leaves = [
            torch.randn(*s, generator=own, dtype=torch.float64).requires_grad_() for s in shapes
        ]
        q, k, v = leaves
        out, lse = merge_attention([attended(q, k[c], v[c], seen[:, c]) for c in cuts])
        (out.square().sum() + lse.masked_fill(lse.isinf(), 0).sin().sum()).backward()
        results.append([out.detach(), lse.detach(), *(x.grad for x in leaves)])
    assert results[0][1].isinf().tolist() == [[False] * 2] * 3 + [[True] * 2]
    for found in results[1:]:
        for x, want in zip(found, results[0], strict=True):
            assert torch.allclose(x, want, rtol=0, atol=1e-12)


def test_the_result_has_the_dtype_of_the_parts() -> None:
    out, lse = torch.ones(2, 1, 4, dtype=torch.bfloat16), torch.zeros(2, 1)
    merged, both = merge_attention([(out, lse), (3 * out, lse)])
    assert merged.dtype == torch.bfloat16
    assert merged.eq(2).all()
    assert torch.allclose(both, torch.full((2, 1), 2.0).log())


def test_parts_of_different_shapes_are_refused() -> None:
    out, lse = torch.zeros(3, 2, 4), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"parts\[1\] has an output of shape \(2, 2, 4\)"):
        merge_attention([(out, lse), (out[:2], lse[:2])])
    with pytest.raises(ValueError, match="parts is empty"):
        merge_attention([])
