"""Bytes of attention's own buffers on one rank, measured beside those of hcp.MemoryModel.

    python tests/cuda/check_attention_bytes.py [--device cpu]

Each rank of a group in turn computes one layer forward and backward, alone: its peers are not
there, and what they would send is memory as it was. So all bytes on the GPU are those of this rank.
The model's `gathered` and `attention` are fitted to single sequences without alignment, as
`hcp calibrate --memory` does. Then groups of one and of several sequences, padded to
alignments, are measured. "measured": bytes of the busiest rank beyond those of as many rows on one
rank alone. `--device cpu` counts by torch's profiler, with kernels that compute nothing. Exit code
1: a group takes 2% and 64 KiB more than the formula.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from support import memory as alone
from support.planning import fullest

import hcp
from hcp.attention import kernels
from hcp.exchange.layout import Layout
from hcp.tools.memory import allocated_on_gpu
from hcp.tools.memory_fit import Peak, fit_shared

HEADS, GROUPS, SIZE = 32, 8, 128
COMM_TYPES = (("p2p", ()), ("all_gather", ()), ("a2a", ()), ("a2a+p2p", (2, 2)))
DEGREES, ALIGNMENTS = (2, 4), (1, 8, 64, 512)
SLACK = 64 * 1024


def layer(
    plan: hcp.Plan, rank: int, comm_type: str, levels: Sequence[int], device: str
) -> Callable[[], None]:
    """Return forward and backward of the plan's group on a rank."""
    family = alone.FAMILY if device == "cpu" else hcp.ContextParallelHandler.kernel_family
    handler = type("Handler", (hcp.ContextParallelHandler,), {"kernel_family": family})
    options: Any = {"comm_types": [comm_type], "hierarchical_context_parallel_sizes": levels}
    cp: Any = handler(plan, 0, alone.Alone(rank, plan.ranks, device), **options)
    query, key, value = (
        torch.zeros(cp.rows, n, SIZE, dtype=torch.bfloat16, device=device, requires_grad=True)
        for n in (HEADS, GROUPS, GROUPS)
    )

    def both() -> None:
        out = cp.attention(query, key, value, causal=True)
        torch.autograd.grad(out, (query, key, value), torch.zeros_like(out))

    return both


def peak(plan: hcp.Plan, comm_type: str, levels: Sequence[int], device: str) -> int:
    """Return the bytes of the busiest rank, less what a group of one rank takes for its rows."""
    return max(
        _peak(layer(plan, rank, comm_type, levels, device), device)
        - _alone(Layout(plan, 0, rank).rows, device)
        for rank in range(plan.ranks)
    )


def _peak(call: Callable[[], None], device: str) -> int:
    call()  # makes tables and workspaces
    return alone.allocated(call).peak if device == "cpu" else allocated_on_gpu(call)[0]


@functools.cache
def _alone(rows: int, device: str) -> int:
    return _peak(layer(plan_of([rows], 1), 0, "p2p", (), device), device)


def plan_of(lengths: Sequence[int], degree: int, alignment: int = 1) -> hcp.Plan:
    limits: Any = {"ranks": degree, "min_degree": degree, "alignment": alignment}
    rows = sum(fullest(n, degree) for n in lengths) + alignment
    plan = hcp.plan(lengths, max_tokens_per_rank=-(-rows // alignment) * alignment, **limits)
    assert len(plan.micro_batches) == 1, "expected one group"
    return plan


def fitted(comm_type: str, levels: Sequence[int], device: str) -> hcp.MemoryModel:
    counts = 1024, 2048, 4096
    by_degree = {1: [Peak(n, 0) for n in counts]}
    for degree in DEGREES:
        own = (2, degree // 2) if levels else ()
        by_degree[degree] = [
            Peak(n, peak(plan_of([n * degree], degree), comm_type, own, device)) for n in counts
        ]
    return hcp.MemoryModel(**fit_shared(by_degree)._asdict())


def predicted(model: hcp.MemoryModel, plan: hcp.Plan, degree: int, alignment: int) -> int:
    sequences = sum(model.bytes(fullest(n, degree), n, degree) for n in plan.lengths)
    return sequences + model.bytes(alignment - 1, alignment - 1, degree)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    kernels.FAMILIES.setdefault(
        alone.FAMILY, kernels.KernelFamily(lambda: lambda device: [alone.Shapes()])
    )
    r, over = Random(0), 0
    for comm_type, levels in COMM_TYPES:
        model = fitted(comm_type, levels, device)
        print(f"{comm_type}: gathered {model.gathered}, attention {model.attention} bytes")
        for degree in DEGREES:
            own = (2, degree // 2) if levels else ()
            for alignment in ALIGNMENTS:
                for count in (1, 3, 10):
                    lengths = [r.randint(1, 2048 * degree // count) for _ in range(count)]
                    plan = plan_of(lengths, degree, alignment)
                    rows = max(Layout(plan, 0, rank).rows for rank in range(degree))
                    found = peak(plan, comm_type, own, device)
                    said = predicted(model, plan, degree, alignment)
                    padding = max(Layout(plan, 0, rank).padding for rank in range(degree))
                    bad = found > 1.02 * said + SLACK
                    over += bad
                    case = (
                        f"degree {degree} alignment {alignment:3} sequences {count:2} rows {rows:5}"
                    )
                    sizes = f"padding {padding:3}: measured {found:11,} predicted {said:11,}"
                    ratio = f"ratio {found / max(1, said):.3f}{' ABOVE' if bad else ''}"
                    print(f"  {case} {sizes} {ratio}", flush=True)
    print(f"{over} groups above the formula")
    return over > 0


if __name__ == "__main__":
    sys.exit(main())
