"""Copies of the next step run while this one computes, and are there when they are read. The
threads of hcp.loopback compute on the GPU that they are given, and on no other."""

from __future__ import annotations

import pytest
import torch

import hcp
from hcp.step.device_copies import DeviceCopies

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CYCLES = 200_000_000
"""About 0.1 seconds of a GPU."""


def device_here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_copies_do_not_wait_for_what_computes() -> None:
    device = device_here()
    rows = torch.arange(1 << 20).pin_memory()
    with DeviceCopies(device) as first:
        first.copy(rows)  # the allocator and the stream are there
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    computed = torch.cuda.Event()
    computed.record()
    with DeviceCopies(device) as copies:
        moved = copies.copy(rows)
        assert copies._copies is not None
        copies._copies.synchronize()
        assert not computed.query(), "the copy waited for the stream that computes"
    total = moved.sum()  # on the stream that computes, which waits for the copy
    assert total.item() == rows.sum().item()
    with DeviceCopies(device) as again:
        assert again.copy(moved) is moved


def test_what_comes_next_reads_the_rows_and_no_later_ones() -> None:
    """Each copy would take the memory of the one before it, if nothing said that it is read."""
    device = device_here()
    steps = [torch.full((1 << 20,), i, dtype=torch.int64).pin_memory() for i in range(16)]
    read = []
    for rows in steps:
        with DeviceCopies(device) as copies:
            moved = copies.copy(rows)
        torch.cuda._sleep(CYCLES // 50)
        read.append(torch.stack([moved.min(), moved.max()]))
        del moved
    assert [each.tolist() for each in read] == [[i, i] for i in range(len(steps))]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_that_are_threads_begin_on_the_gpu_of_their_tensors() -> None:
    def device_of_a_rank(groups: object) -> int:
        return torch.cuda.current_device()

    assert hcp.loopback(2, device_of_a_rank, device="cuda:1") == [1, 1]
