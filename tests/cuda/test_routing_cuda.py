"""Sums that balance experts wait for no work of the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.trees import Tree

import hcp
from hcp.integrations import routing

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS, EXPERTS, CHOSEN, STANDING_IN = (40, 7, 1, 19), 6, 2, 3


def balanced(
    cp: hcp.ContextParallelHandler, chosen: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    counts = routing.part_counts(cp, chosen, EXPERTS)
    weights = routing.text_means(cp, counts, 2)
    sums = routing.part_sums(cp, scores)
    return counts, weights, sums, routing.batch_sum(cp, sums)


@pytest.mark.parametrize("tree", [False, True], ids=["sequences", "tree"])
def test_sums_over_sequences_do_not_wait_and_are_those_of_the_cpu(tree: bool) -> None:
    masks = [Tree((4, 30, 6), (-1, 0, 0)).mask, None, None, None] if tree else None
    generator = torch.Generator().manual_seed(3)
    rows = sum(LENGTHS) + STANDING_IN
    chosen = torch.randint(EXPERTS, (rows, CHOSEN), generator=generator)
    scores = torch.rand(rows, EXPERTS, generator=generator, dtype=torch.float64)

    def on(device: str, mode: str) -> list[torch.Tensor]:
        def work(groups: Any) -> tuple[torch.Tensor, ...]:
            plan = hcp.plan(LENGTHS, ranks=1, max_tokens_per_rank=rows, masks=masks)
            cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
            given = chosen.to(device), scores.to(device)
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                return balanced(cp, *given)
            finally:
                torch.cuda.set_sync_debug_mode(before)

        return [x.cpu() for x in hcp.loopback(1, work, device=device)[0]]

    for mine, wanted in zip(on("cuda", "error"), on("cpu", "default"), strict=True):
        torch.testing.assert_close(mine, wanted)
