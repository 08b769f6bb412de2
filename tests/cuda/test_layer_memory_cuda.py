"""The bytes of a layer on a GPU are those that docs/internals/schedule.md gives.

One rank runs alone: its peers are not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import FAMILY, Layer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "internals" / "schedule.md"
ROWS, HEADS, SIZES = 4096, (32, 8), (128, 128)


def formulas() -> Any:
    (code,) = re.findall(r"```python\n(def ring_forward.*?)```", PAGE.read_text(), re.S)
    namespace: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), namespace)
    return namespace["layer_bytes"]


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
    wanted = formulas()(comm_type, ROWS, *HEADS, *SIZES, 2, degree, inner, chunks)
    made: list[torch.Tensor] = []
    forward = peak_of(lambda: made.append(layer.forward()))
    backward, _ = peak_of(lambda: layer.backward(made.pop()))
    print(f"{comm_type} on {degree}, {chunks}, {family}: {forward} {backward}, expected {wanted}")
    assert forward == pytest.approx(wanted[:2], rel=0.1)
    if family == FAMILY:  # others have a workspace
        assert backward == pytest.approx(wanted[2], rel=0.1)
