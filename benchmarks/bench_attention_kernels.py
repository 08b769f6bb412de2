"""Libraries' attention kernels through hcp, against PyTorch's FlashAttention-2, on one GPU.

    python benchmarks/bench_attention_kernels.py [--heads 32 8]

A ratio is the time of FlashAttention-2 over that of the other kernel: above 1 the other is faster.
Packs are timed one after the other, with the host's time. First, results are compared with those
of FlashAttention-2, to the rounding of bfloat16. Columns:

    cuDNN     one call for each sequence; "first, ms": its first call with these lengths, forward
              and backward, in which it builds its plans
    FA4       FlashAttention-4, one call for the pack, if flash-attn-4 is installed; then the kernel
              that the backend `auto` picks in each direction, and the measured pack it goes by

The packs are those of ``hcp.attention.kernels.fastest.MEASURED`` and others between them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from common.flags import end_after, parser_of
from torch import Tensor

from hcp.attention.kernels import Kernel, Launch
from hcp.attention.kernels.cudnn import Cudnn
from hcp.attention.kernels.fastest import MEASURED, Faster, installed, nearest
from hcp.attention.kernels.flash_attn_torch import Flash2
from hcp.exchange.tables import Entry

BETWEEN = [(2048,), (4096,), (4096,) * 2, (2048,) * 4, (2048,) * 16, (512,) * 128, (256,) * 256]
MOST_CALLS = 64
"""The most calls of cuDNN for one pack. More would measure the host."""
REPEATS, ROUNDS = 3, 3
SCALE = 128**-0.5
TOLERANCE = 0.05


def main() -> None:
    parser = parser_of(__doc__, devices=("cuda",), device="cuda", rounds=ROUNDS)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KEY"))
    args = parser.parse_args()
    end_after(args.deadline)
    heads = args.heads
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, heads {heads} of 128, bf16")
    print(f"{'':24}{'cuDNN':>6}{'':16}{'FA4':>6}")
    print(f"{'pack':24}{'fwd':>6}{'bwd':>6}{'first, ms':>10}{'fwd':>6}{'bwd':>6}  auto picks, as")
    for lengths in [*(m.lengths for m in MEASURED), *BETWEEN]:
        print_pack(lengths, args)


class Pack(NamedTuple):
    """The launches of one kernel over the pack's rows."""

    kernel: Kernel
    launches: Sequence[Launch]
    rows: tuple[Tensor, Tensor, Tensor]
    grad: Tensor
    known: list[tuple[Tensor, Tensor]]
    """Output and log-sum-exp of each launch, for the backward."""

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        return [self.kernel.forward(launch, *self._of(launch), SCALE) for launch in self.launches]

    def backward(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [
            self.kernel.backward(
                launch, self.grad[launch.queries], None, *self._of(launch), *known, SCALE
            )
            for launch, known in zip(self.launches, self.known, strict=True)
        ]

    def results(self) -> list[Tensor]:
        self.known[:] = self.forward()
        outs = torch.cat([out for out, _ in self.known])
        return [outs, *(torch.cat(parts) for parts in zip(*self.backward(), strict=True))]

    def _of(self, launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.rows
        return query[launch.queries], key[launch.keys], value[launch.keys]


def print_pack(lengths: tuple[int, ...], args: argparse.Namespace) -> None:
    heads, key_heads = args.heads
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    entries = [Entry(at, n, at, n, 1 - n, 0) for at, n in zip(starts, lengths, strict=True)]
    rows = sum(lengths)
    query, key, value, grad = (
        torch.randn(rows, count, 128, device="cuda", dtype=torch.bfloat16)
        for count in (heads, key_heads, key_heads, heads)
    )

    def pack(kernel: Kernel) -> Pack:
        return Pack(kernel, kernel.launches(entries), (query, key, value), grad, [])

    flash2 = pack(Flash2())
    expected = flash2.results()
    same = len(set(lengths)) == 1
    line = f"{len(lengths)} x {lengths[0]}" if same else f"{lengths[0]} ... {lengths[-1]}"
    row: dict[str, object] = {"pack": line}
    line = f"{line:24}"
    if len(lengths) <= MOST_CALLS:
        cudnn = pack(Cudnn())
        first = 1e3 * compared(cudnn, expected)
        gains = ratios(flash2, cudnn, args.rounds)
        line += f"{gains[0]:6.2f}{gains[1]:6.2f}{first:10.0f}"
        row |= {"cuDNN fwd": gains[0], "cuDNN bwd": gains[1], "first, ms": first}
    else:
        line += f"{'-':>6}{'-':>6}{'-':>10}"
    if installed() is not None:
        gains, picked = against_flash4(pack, flash2, expected, args.rounds)
        line += f"{gains[0]:6.2f}{gains[1]:6.2f}  {picked}"
        row |= {"FA4 fwd": gains[0], "FA4 bwd": gains[1], "auto picks, as": picked}
    print(line, flush=True)
    args.json.add(row)


def against_flash4(
    make: Callable[[Kernel], Pack], flash2: Pack, expected: list[Tensor], rounds: int
) -> tuple[tuple[float, float], str]:
    """Return the ratios forward and backward, and the choice of `auto`."""
    from hcp.attention.kernels.flash_attn_4 import Flash4

    kernel = Flash4()
    flash4 = make(kernel)
    compared(flash4, expected)
    query, _, value = flash4.rows
    like = nearest(flash4.launches[0], query, value)
    chosen = [
        "4" if Faster(kernel, flash2.kernel)._chosen(gain, query, value) is kernel else "2"
        for gain in (like.forward, like.backward)
    ]
    first = f"{len(like.lengths)} of {like.lengths[0]} first"
    return ratios(flash2, flash4, rounds), f"{'/'.join(chosen)}, {first}"


def compared(pack: Pack, expected: list[Tensor]) -> float:
    """Check the results of the first run, and return its seconds."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    found = pack.results()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    names = ("output", "queries' gradient", "keys' gradient", "values' gradient")
    for name, got, want in zip(names, found, expected, strict=True):
        error = float((got - want).abs().max()) / float(want.abs().max())
        if not error <= TOLERANCE:
            raise SystemExit(
                f"{type(pack.kernel).__name__}: the {name} is off by {error:.3f} of its largest, "
                f"expected <= {TOLERANCE}"
            )
    return seconds


def ratios(first: Pack, second: Pack, rounds: int) -> tuple[float, float]:
    """Return the first's time over the second's, forward and backward."""
    return (
        ratio(first.forward, second.forward, rounds),
        ratio(first.backward, second.backward, rounds),
    )


def ratio(first: Callable[[], object], second: Callable[[], object], rounds: int) -> float:
    """Return the ratio of the medians. The two take turns in every round."""
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for step, taken in zip((first, second), times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(REPEATS):
                step()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    # The first round warms up.
    return statistics.median(times[0][1:]) / statistics.median(times[1][1:])


if __name__ == "__main__":
    main()
