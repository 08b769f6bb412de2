"""The bytes of a layer on a GPU are those that support/layer_bytes.py gives.

One rank runs alone: its peers are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.layer_bytes import layer_bytes
from support.memory import FAMILY, Layer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROWS, HEADS, SIZES = 4096, (32, 8), (128, 128)


def peak_of(call: Callable[[], object]) -> tuple[int, int]:
    """The most that a call allocates, and what it leaves."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak, left = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del result
    return peak - before, left - before


@pytest.mark.parametrize("family", [FAMILY, "torch"])
@pytest.mark.parametrize(
    ("comm_type", "degree", "levels", "chunks"),
    [
        ("p2p", 2, (), 1),
        ("p2p", 8, (), 1),
        ("p2p", 16, (), 1),
        ("p2p", 16, (), 4),
        ("all_gather", 8, (), 1),
        ("all_gather", 8, (), 8),
        ("a2a", 8, (), 1),
        ("a2a", 4, (), 2),
        ("a2a+p2p", 16, (2, 8), 1),
        ("a2a+p2p", 16, (2, 8), 4),
    ],
)
def test_a_layer_takes_the_bytes_of_the_formulas(
    comm_type: str, degree: int, levels: tuple[int, ...], chunks: int, family: str
) -> None:
    options: Any = {"device": "cuda:0", "levels": levels, "family": family, "chunks": chunks}
    layer = Layer(comm_type, degree, ROWS, HEADS, SIZES, torch.bfloat16, **options)
    layer.backward(layer.forward())
    inner = levels[0] if levels else 1
    wanted = layer_bytes(comm_type, ROWS, *HEADS, *SIZES, 2, degree, inner, chunks)
    made: list[torch.Tensor] = []
    forward = peak_of(lambda: made.append(layer.forward()))
    backward, _ = peak_of(lambda: layer.backward(made.pop()))
    print(f"{comm_type} on {degree}, {chunks}, {family}: {forward} {backward}, expected {wanted}")
    assert forward == pytest.approx(wanted[:2], rel=0.1)
    if family == FAMILY:  # others have a workspace
        assert backward == pytest.approx(wanted[2], rel=0.1)
