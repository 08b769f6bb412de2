"""Measure what the steps of a model take on this GPU, and fit a memory model to it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hcp._validate import expect_items, expect_sizes
from hcp.planning.memory import MemoryModel
from hcp.tools.memory_fit import Peak, Shared, expect_close, fit_peaks

Work = Callable[[int], object]
"""Computes so many rows of one rank."""
Allocated = Callable[[Callable[[], object]], tuple[int, int]]
"""Runs a call. Returns the most bytes at once, and those that its result keeps, both in addition to
what was there before."""


def fit_memory(
    step: Work,
    rows: Sequence[int],
    *,
    forward: Work | None = None,
    limit: int | None = None,
    share: float = 0.95,
    gathered: int = 0,
    attention: int = 0,
    head_chunks: int = 1,
    buffer: int = 0,
    tolerance: float = 0.1,
    allocated: Allocated | None = None,
) -> MemoryModel:
    """Measure a model's steps on this GPU, and fit the bytes of a row to them.

    No measured step takes more than the model says. Run an update of the optimizer first:
    parameters, gradients and its state belong to what the GPU holds anyway. So do whole gradients
    that FSDP2 accumulates where a step of training has several micro-batches: then let ``step`` run
    inside of ``no_sync``, as these do.

    Args:
        step: ``step(rows)`` runs forward, loss and backward over so many rows of one rank, as one
            micro-batch does. It is called twice for each of ``rows``; the second call counts.
        rows: three numbers of rows or more.
        forward: ``forward(rows)`` runs the layers alone and returns their result; it tells
            ``activation`` from ``logit``, of which only the sum decides.
        limit: the most bytes of a micro-batch. None: of what this GPU has for torch a ``share``,
            less what is held.
        share: the part of the GPU; the rest is for fragments and for what is allocated later.
        gathered: see :class:`hcp.MemoryModel`; without it the model is for plans of degree 1.
        attention: see :class:`hcp.MemoryModel`; without it the model is for plans of degree 1.
        head_chunks: see :class:`hcp.MemoryModel`.
        buffer: see :class:`hcp.MemoryModel`; ``limit`` holds it too. Give what training's groups
            will hold, and measure without groups.
        tolerance: how far below the line a peak may lie.
        allocated: in place of the allocator of the current GPU, runs a call and returns its bytes:
            the most at once, and those that its result keeps.

    Returns:
        The model, in bytes.

    Raises:
        ValueError: there is no GPU and ``allocated`` or ``limit`` is missing; or the peaks do not
            grow with the rows, or lie further than ``tolerance`` below the line.
    """
    expect_share("share", share)
    if (allocated is None or limit is None) and not torch.cuda.is_available():
        raise ValueError(
            "torch sees no GPU, whose allocator counts bytes, expected one, or allocated= and "
            "limit= of your own"
        )
    peaks = measure_peaks(step, rows, forward, allocated or allocated_on_gpu)
    shared = Shared(gathered, attention, head_chunks)
    found = fit_peaks(peaks, room_on_gpu(share) if limit is None else limit, shared, buffer)
    expect_close(found, tolerance)
    return found.model


def expect_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"{name} is {share!r}, expected a part of the memory, > 0 and <= 1")


def measure_peaks(
    step: Work, rows: Sequence[int], forward: Work | None, allocated: Allocated
) -> list[Peak]:
    """Return the bytes of a step of each number of rows, fewest first."""
    expect_items("rows", rows, "integers")
    counts = sorted(set(expect_sizes("rows", rows)))
    if len(counts) < 3:
        raise ValueError(
            f"rows is {rows!r:.60}, expected three different numbers or more: two lie on a line "
            "whatever a step takes"
        )
    return [_measure(step, count, forward, allocated) for count in counts]


def _measure(step: Work, rows: int, forward: Work | None, allocated: Allocated) -> Peak:
    """The first call makes what later ones find: gradients, workspaces, choices of kernels."""
    step(rows)
    kept = 0 if forward is None else allocated(lambda: forward(rows))[1]
    most, _ = allocated(lambda: step(rows))
    return Peak(rows, most, max(0, kept))


def allocated_on_gpu(call: Callable[[], object]) -> tuple[int, int]:
    """Return the most bytes that a call allocates at once on the current GPU, and those that its
    result keeps."""
    _collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result: Any = call()
    torch.cuda.synchronize()
    most, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del result
    return most - before, after - before


def room_on_gpu(share: float) -> int:
    """Return the bytes of the current GPU that a micro-batch may take: a share of what others, as
    the CUDA context and NCCL, leave to torch, less what torch holds now."""
    _collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    others = max(0, total - free - torch.cuda.memory_reserved())
    return int(share * (total - others)) - torch.cuda.memory_allocated()


def _collect() -> None:
    torch.cuda.synchronize()
    gc.collect()
