"""Libraries' attention kernels through hcp, against PyTorch's FlashAttention-2, on one GPU.

    python benchmarks/bench_attention_kernels.py [--heads 32 8]

Every family of kernels that is installed and runs on this GPU, one pack after the other, with the
host's time in it. Results are compared with FlashAttention-2's first, to what bfloat16 rounds.
Columns:

    torch     milliseconds of PyTorch's FlashAttention-2, forward and backward
    others    the same divided by those of the family: above 1 where it is faster; "first, ms": its
              first call of such a pack, forward and backward, in which a library compiles or plans
    keys      the keys that a query sees on average, by which ``hcp.attention.kernels.order`` goes
    auto      the families that the backend `auto` picks forward and backward, and their share of
              the fastest one's speed

A family that fails is named, and left out from there on.
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

from hcp.attention.kernels import FAMILIES, Kernel, KernelCall, Launch, auto, join, kernels_of
from hcp.attention.kernels.flash_attn_torch import Flash2
from hcp.exchange.tables import Entry

PACKS = [
    *[(65536,), (32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128), (8192,)],
    *[(4096, 2048, 1024, 512, 256, 128, 64, 64), (4096,) * 2, (4096,), (2048,) * 16, (2048,) * 4],
    *[(2048,), (1024,) * 64, (1024,) * 8, (512,) * 128, (512,) * 16, (256,) * 256],
    *[(128,) * 512, (128,) * 64],
]
REPEATS, ROUNDS = 3, 3
SCALE = 128**-0.5
TOLERANCE = 0.05


def main() -> None:
    parser = parser_of(__doc__, devices=("cuda",), device="cuda", rounds=ROUNDS)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KEY"))
    args = parser.parse_args()
    end_after(args.deadline)
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, heads {args.heads} of 128, bf16")
    kernels = found()
    print(f"{'':24}{'torch':>16}" + "".join(f"{name:>24}" for name in kernels))
    columns = f"{'fwd':>7}{'bwd':>7}{'first, ms':>10}" * len(kernels)
    print(f"{'pack':24}{'fwd, ms':>8}{'bwd, ms':>8}{columns}{'keys':>8}  auto picks")
    names = [*kernels]
    for lengths in PACKS:
        print_pack(lengths, kernels, names, args)


def found() -> dict[str, Kernel]:
    """Each family's kernel, where it is installed and this GPU runs it."""
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = {}
    for name, family in FAMILIES.items():
        missing = family.package is not None and family.version is None
        if name in ("torch", "auto") or missing:
            continue
        try:
            kernels[name] = kernels_of(name, device)[0]
            print(f"{name}: {family.package or 'of torch'} {family.version}")
        except Exception as error:  # whatever a broken package raises
            print(f"{name}: left out, {type(error).__name__}: {error}")
    return kernels


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
                launch, (self.grad[launch.queries], None), (*self._of(launch), *known), SCALE
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


def print_pack(
    lengths: tuple[int, ...],
    kernels: dict[str, Kernel],
    names: Sequence[str],
    args: argparse.Namespace,
) -> None:
    """``kernels``: those that did not fail, of ``names``."""
    heads, key_heads = args.heads
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    entries = [Entry(at, n, at, n, 1 - n, 0) for at, n in zip(starts, lengths, strict=True)]
    rows = sum(lengths)
    query, key, value, grad = (
        torch.randn(rows, count, 128, device="cuda", dtype=torch.bfloat16)
        for count in (heads, key_heads, key_heads, heads)
    )

    def pack(kernel: Kernel) -> Pack:
        return Pack(kernel, join(entries, packs=kernel.packs), (query, key, value), grad, [])

    flash2 = pack(Flash2())
    expected = flash2.results()
    same = len(set(lengths)) == 1
    name_of_pack = f"{len(lengths)} x {lengths[0]}" if same else f"{lengths[0]} ... {lengths[-1]}"
    alone = [1e3 * median for median, _ in medians(flash2, flash2, args.rounds)]
    row: dict[str, object] = {"pack": name_of_pack, "torch fwd, ms": alone[0]}
    row["torch bwd, ms"] = alone[1]
    line = f"{name_of_pack:24}{alone[0]:8.3f}{alone[1]:8.3f}"
    failed = []
    all_gains = {"torch": [1.0, 1.0]}
    for name in names:
        if name not in kernels:
            line += f"{'-':>7}{'-':>7}{'-':>10}"
            continue
        try:
            other = pack(kernels[name])
            first = 1e3 * compared(other, expected)
            gains = [one / found for one, found in medians(flash2, other, args.rounds)]
        except Exception as error:  # whatever a library raises: the others go on
            failed.append(f"{name} is left out from here on: {type(error).__name__}: {error}")
            line += f"{'-':>7}{'-':>7}{'-':>10}"
            del kernels[name]
            continue
        all_gains[name] = gains
        line += f"{gains[0]:7.2f}{gains[1]:7.2f}{first:10.0f}"
        row |= {f"{name} fwd": gains[0], f"{name} bwd": gains[1], f"{name} first, ms": first}
    call = KernelCall(flash2.launches[0], query, value, False, False)
    row |= {"keys": call.launch.pairs_of_a_query, "auto picks": picked(call, all_gains)}
    print("\n".join([f"{line}{row['keys']:8.0f}  {row['auto picks']}", *failed]), flush=True)
    args.json.add(row)


def picked(forward: KernelCall, gains: dict[str, list[float]]) -> str:
    """The families that `auto` picks forward and backward, and their share of the fastest's speed.
    ``gains``: of each family over torch's, forward and backward."""
    kernel = auto.for_device(forward.query.device)[0]
    if not isinstance(kernel, auto.Auto):
        return "torch, torch"
    shown = []
    for way, call in enumerate((forward, forward._replace(backward=True))):
        family = kernel.choose(call).family
        share = gains[family][way] / max(gain[way] for gain in gains.values())
        shown.append(f"{family} ({share:.2f})")
    return ", ".join(shown)


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
            raise ArithmeticError(
                f"{type(pack.kernel).__name__}: the {name} is off by {error:.3f} of its largest, "
                f"expected <= {TOLERANCE}"
            )
    return seconds


def medians(first: Pack, second: Pack, rounds: int) -> list[tuple[float, float]]:
    """Seconds of both, forward and backward: medians of rounds in which they take turns."""
    return [
        taking_turns(first.forward, second.forward, rounds),
        taking_turns(first.backward, second.backward, rounds),
    ]


def taking_turns(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[float, float]:
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for step, taken in zip((first, second), times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(REPEATS):
                step()
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - start) / REPEATS)
    # The first round warms up.
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


if __name__ == "__main__":
    main()
