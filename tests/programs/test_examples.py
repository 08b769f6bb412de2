"""The examples that need only PyTorch train alike on one rank and on several."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def train(rank: int, size: int, name: str) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))["train"](steps=3)
    finally:
        torch.set_default_dtype(torch.float32)


def by_ranks(name: str) -> tuple[Any, list[Any]]:
    (alone,) = run_ranks(1, train, name)
    return alone, run_ranks(2, train, name)  # degrees 1 and 2


def test_plain_pytorch_has_the_losses_of_one_rank_in_both_layouts() -> None:
    (losses, evaluations), together = by_ranks("plain")
    assert losses[2] < losses[0]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-10)
    for found, evaluated in together:
        assert found == pytest.approx(losses, abs=1e-10)
        assert evaluated == pytest.approx(evaluations, abs=1e-10)


def test_fsdp2_has_the_losses_of_one_rank() -> None:
    losses, together = by_ranks("fsdp2")
    assert losses[2] < losses[0]
    for found in together:
        assert found == pytest.approx(losses, abs=1e-10)
