"""FlashAttention-4 against PyTorch's FlashAttention-2 through hcp's kernels, on one GPU.

    python benchmarks/bench_attention_kernels.py [--heads 32 8]

Times of FlashAttention-2 / those of FlashAttention-4, above 1 where the latter is faster, of one
call after the other with the host's time in it; and which of the two the backend `auto` picks in
each direction, by which measured pack. The packs are those of ``hcp.auto_backend.MEASURED`` and
others between them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from hcp.auto_backend import MEASURED, Faster, nearest
from hcp.flash_attn_4_backend import Flash4
from hcp.kernels import Flash2, Kernel
from hcp.layout import Entry

BETWEEN = [(2048,), (4096,), (4096,) * 2, (2048,) * 4, (2048,) * 16, (512,) * 128, (256,) * 256]
REPEATS, ROUNDS = 3, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KEY"))
    heads = parser.parse_args().heads
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, heads {heads} of 128, bf16")
    print(f"{'pack':24}{'fwd':>6}{'bwd':>6}{'auto picks, as the measured pack':>36}")
    for lengths in [*(m.lengths for m in MEASURED), *BETWEEN]:
        print_pack(lengths, *heads)


def print_pack(lengths: tuple[int, ...], heads: int, key_heads: int) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    entries = [Entry(at, n, at, n, -n, 0) for at, n in zip(starts, lengths, strict=True)]
    (call,) = Flash2.calls(entries)
    rows = sum(lengths)
    query, key, value, grad = (
        torch.randn(rows, count, 128, device="cuda", dtype=torch.bfloat16)
        for count in (heads, key_heads, key_heads, heads)
    )
    flash4, flash2 = Flash4(), Flash2()

    def forward(kernel: Kernel) -> None:
        kernel.forward(call, query, key, value, 0.088)

    out, lse = flash2.forward(call, query, key, value, 0.088)

    def backward(kernel: Kernel) -> None:
        kernel.backward(call, grad, None, query, key, value, out, lse, 0.088)

    ratios = [ratio(step, flash2, flash4) for step in (forward, backward)]
    like = nearest(call, query, value)
    chosen = [
        "4" if Faster(flash4, flash2)._chosen(gain, query, value) is flash4 else "2"
        for gain in (like.forward, like.backward)
    ]
    same = len(set(lengths)) == 1
    name = f"{len(lengths)} x {lengths[0]}" if same else f"{lengths[0]} ... {lengths[-1]}"
    picks = f"{'/'.join(chosen)}, {len(like.lengths)} of {like.lengths[0]} first"
    print(f"{name:24}{ratios[0]:6.2f}{ratios[1]:6.2f}{picks:>36}", flush=True)


def ratio(step: Callable[[Kernel], None], first: Kernel, second: Kernel) -> float:
    """Of medians of rounds that take turns."""
    times: dict[Kernel, list[float]] = {first: [], second: []}
    for _ in range(ROUNDS + 1):
        for kernel in (first, second):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(REPEATS):
                step(kernel)
            torch.cuda.synchronize()
            times[kernel].append(time.perf_counter() - start)
    # The first round compiles.
    return statistics.median(times[first][1:]) / statistics.median(times[second][1:])


if __name__ == "__main__":
    main()
