"""The GRPO example trains alike on one rank and on several."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch
from support.examples import example
from support.ranks import run_ranks

SMALL = [
    *("--steps", "2", "--prompts", "4", "--answers", "3", "--answer", "8"),
    *("--longest-prompt", "30"),
]


def train(rank: int, size: int, options: list[str]) -> tuple[list[tuple[float, float]], str]:
    torch.set_default_dtype(torch.float64)
    printed = io.StringIO()
    try:
        module = example("grpo")
        with contextlib.redirect_stdout(printed):
            done: list[tuple[float, float]] = module.train(module.parse_args([*SMALL, *options]))
    finally:
        torch.set_default_dtype(torch.float32)
    return done, printed.getvalue()


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_rewards_and_losses_depend_on_neither_ranks_nor_packing(ratio: str) -> None:
    ((alone, said),) = run_ranks(1, train, ["--ratio", ratio, "--packing", "each"])
    assert all(loss != 0 for _, loss in alone)
    assert re.findall(r"at CP (\d)", said) == ["1", "1"]
    together = run_ranks(2, train, ["--ratio", ratio])
    for found, _ in together:
        for one, other in zip(alone, found, strict=True):
            assert other == pytest.approx(one, abs=1e-10)
    said = together[0][1]
    assert set(re.findall(r"at CP (\d)", said)) == {"1", "2"}, said
