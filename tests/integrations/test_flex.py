"""Masks of flex_attention become slices, pair by pair the same, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    or_masks,
)

import hcp
from hcp.integrations import flex
from hcp.integrations.flex import mask_of_flex

LENGTH = 40
DOCUMENTS = torch.tensor([0] * 7 + [1] * 20 + [2] + [3] * 12)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def full(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= 0


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k <= 5


def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < 6


def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return DOCUMENTS[q] == DOCUMENTS[k]


def dilated(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k) % 3 == 0


def nothing(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q < 0


MODS = {
    "causal": (causal, 1),
    "full": (full, 1),
    "nothing": (nothing, 0),
    "a causal window": (and_masks(causal, window), 2),
    "a prefix": (or_masks(causal, prefix), 3),
    "documents": (and_masks(causal, same_document), 4),
    "documents, both ways": (same_document, 4),
    "windows of documents": (and_masks(causal, window, same_document), None),
    "first tokens and a window": (or_masks(and_masks(causal, window), prefix), None),
    "every third": (dilated, None),
}


@pytest.mark.parametrize("what", MODS)
@pytest.mark.parametrize("together", [1, 3 * LENGTH, 2**24])
def test_a_mask_is_the_same_pair_by_pair(
    what: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_PAIRS", together)
    mod, slices = MODS[what]
    found = mask_of_flex(mod, LENGTH)
    expected = create_mask(mod, 1, 1, LENGTH, LENGTH, device="cpu")[0, 0]
    assert torch.equal(found.dense(), expected)
    if slices is not None:
        assert len(found.slices) <= slices, found.slices


@given(st.integers(1, 12), st.integers(0, 2**20))
def test_any_mask_is_cut_exactly(length: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    seen = torch.rand(length, length, generator=draw) < 0.6
    assert torch.equal(mask_of_flex(lambda b, h, q, k: seen[q, k], length).dense(), seen)


@pytest.mark.parametrize("what", MODS)
def test_a_block_mask_is_that_of_its_mod(what: str) -> None:
    mod, _ = MODS[what]
    blocks = create_block_mask(mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    expected = create_mask(mod, 1, 1, LENGTH, LENGTH, device="cpu")[0, 0]
    assert torch.equal(mask_of_flex(blocks, LENGTH).dense(), expected)


def test_blocks_that_were_made_by_hand_count() -> None:
    """The second block of queries sees the first block of keys whole, and of its own what is
    causal."""
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    own = torch.tensor([[[[0, 0], [1, 0]]]], dtype=torch.int32)
    before = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.zeros_like(own)
    blocks = BlockMask.from_kv_blocks(
        *(counts, own, *before), BLOCK_SIZE=4, mask_mod=causal, seq_lengths=(8, 8)
    )
    assert torch.equal(mask_of_flex(blocks, 8).dense(), hcp.Mask.causal(8).dense())
    without = BlockMask.from_kv_blocks(
        counts, own, BLOCK_SIZE=4, mask_mod=causal, seq_lengths=(8, 8)
    )
    assert torch.equal(mask_of_flex(without, 8).dense(), hcp.Mask.documents([4, 4]).dense())


def test_attention_under_a_mask_of_flex_is_that_of_the_dense_mask() -> None:
    mod = MODS["first tokens and a window"][0]
    seen = create_mask(mod, 1, 1, LENGTH, LENGTH, device="cpu")[0, 0]
    draw = torch.Generator().manual_seed(1)
    whole = torch.randn(3, LENGTH, 2, 8, generator=draw, dtype=torch.float64)
    alone = whole.clone().requires_grad_()
    query, key, value = (x.transpose(0, 1) for x in alone)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    weight = torch.randn(LENGTH, 2, 8, generator=draw, dtype=torch.float64)
    (out.transpose(0, 1) * weight).sum().backward()
    assert alone.grad is not None

    def check(groups: Any) -> None:
        mask = mask_of_flex(mod, LENGTH)
        plan = hcp.plan([LENGTH], ranks=3, max_tokens_per_rank=16, min_degree=3, masks=[mask])
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport, sources=[0])
        places = [t for _, start, rows in cp.layout.spans for t in range(start, start + rows)]
        own = whole[:, places].clone().requires_grad_()
        found = cp.attention(*own)
        (found * weight[places]).sum().backward()
        assert (found - out.transpose(0, 1)[places]).abs().max() < 1e-10
        assert own.grad is not None
        assert (own.grad - alone.grad[:, places]).abs().max() < 1e-10

    hcp.loopback(3, check)


# ---- what is refused -----------------------------------------------------------------------------


def test_a_mask_of_too_many_slices_is_refused() -> None:
    with pytest.raises(ValueError, match="cut into more than 20 slices by query"):
        mask_of_flex(dilated, LENGTH, most_slices=20)
    with pytest.raises(ValueError, match="cut into more than 5 slices by query"):
        mask_of_flex(dilated, LENGTH, most_slices=5)


def test_a_mask_that_differs_between_heads_is_refused() -> None:
    def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k >= h

    with pytest.raises(ValueError, match="mask_mod gives head 1 another mask than head 0"):
        mask_of_flex(by_head, 8, heads=2)
    assert mask_of_flex(causal, 8, heads=2) == hcp.Mask.causal(8)


def test_a_block_mask_of_another_shape_is_refused() -> None:
    blocks = create_block_mask(causal, 2, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    with pytest.raises(ValueError, match=r"shape \(2, 1, 8, 8\), expected \(1, 1, 8, 8\)"):
        mask_of_flex(blocks, 8)
