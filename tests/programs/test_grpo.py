"""The GRPO example trains alike on one rank and on several."""

from __future__ import annotations

import pytest
import torch
from support.examples import example
from support.ranks import run_ranks

SMALL = [
    *("--steps", "2", "--prompts", "4", "--answers", "3", "--answer", "4"),
    *("--longest-prompt", "30", "--max-tokens-per-rank"),
]


def train(rank: int, size: int, options: list[str]) -> list[tuple[float, float]]:
    torch.set_default_dtype(torch.float64)
    try:
        module = example("grpo")
        done: list[tuple[float, float]] = module.train(module.parse_args([*SMALL, *options]))
    finally:
        torch.set_default_dtype(torch.float32)
    return done


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_rewards_and_losses_depend_on_neither_ranks_nor_packing(ratio: str) -> None:
    (alone,) = run_ranks(1, train, ["60", "--ratio", ratio, "--packing", "each"])
    assert all(loss != 0 for _, loss in alone)
    for together in run_ranks(2, train, ["30", "--ratio", ratio]):  # degrees 1 and 2
        for expected, found in zip(alone, together, strict=True):
            assert found == pytest.approx(expected, abs=1e-10)
