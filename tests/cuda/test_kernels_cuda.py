"""What only a GPU shows of the kernels: CUDA graphs. Their results: tests/test_ops.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hcp import ops

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROWS, HEADS, HEAD_DIM = 300, 4, 64


def inputs(seed: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(ROWS, HEADS, HEAD_DIM, device="cuda", generator=generator) for _ in range(3)
    ]


def packed(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    segments = torch.tensor([[200, 100], [-1, 7], [0, 200]])
    return (ops.pack([x.flatten(1) for x in tensors], segments, 307),)


def merged(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    runs = torch.tensor([[0, ROWS, part, 0] for part in range(len(tensors))])
    return ops.merge(tensors, [x.sum(-1) for x in tensors], runs, ROWS)


def summed(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    runs = torch.tensor([[0, ROWS, part, 0] for part in range(len(tensors))])
    return (ops.reduce([x.flatten(1) for x in tensors], runs, ROWS),)


@pytest.mark.parametrize("call", [packed, merged, summed])
def test_a_captured_kernel_computes_the_inputs_of_each_replay(
    call: Callable[[list[Tensor]], tuple[Tensor, ...]],
) -> None:
    tensors = inputs(0)
    call(tensors)  # what is loaded at the first call is not captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(tensors)
    for seed in (1, 2):
        for tensor, fresh in zip(tensors, inputs(seed), strict=True):
            tensor.copy_(fresh)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        for result, expected in zip(results, call(inputs(seed)), strict=True):
            assert torch.equal(result, expected)
