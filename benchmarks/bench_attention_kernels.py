"""Libraries' attention kernels through hcp, against PyTorch's FlashAttention-2, on one GPU.

    python benchmarks/bench_attention_kernels.py [--heads 32 8]

Every family of kernels that is installed and runs on this GPU, one pack after the other, with the
host's time in it. Results are compared with FlashAttention-2's first, to what bfloat16 rounds.
Columns:

    torch     milliseconds of PyTorch's FlashAttention-2, forward and backward
    others    the same divided by those of the family: above 1 where it is faster; "first, ms": its
              first call of such a pack, forward and backward, in which a library compiles or plans
    auto      the families that the backend `auto` picks forward and backward by its table, without
              a measurement

Last come the ratios as rows of ``hcp.attention.kernels.speeds.MEASURED``. The packs are those of
that table, those of ``trial.PACKS``, and others between them. A family that fails is named, and
left out from there on.
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

from hcp.attention.kernels import FAMILIES, Call, Kernel, Launch, fastest, kernels_of
from hcp.attention.kernels.flash_attn_torch import Flash2
from hcp.attention.kernels.present import CHOOSING
from hcp.attention.kernels.speeds import MEASURED, Speed
from hcp.attention.kernels.trial import PACKS
from hcp.exchange.tables import Entry

BETWEEN = [(2048,), (4096,), (4096,) * 2, (2048,) * 4, (2048,) * 16, (512,) * 128, (256,) * 256]
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
    print(f"{'pack':24}{'fwd, ms':>8}{'bwd, ms':>8}{columns}  auto picks")
    tables = (speed.lengths for of in MEASURED.values() for rows in of.values() for speed in rows)
    speeds: dict[str, list[Speed]] = {name: [] for name in kernels}
    for lengths in dict.fromkeys([*tables, *PACKS, *BETWEEN]):
        print_pack(lengths, kernels, speeds, args)
    print_rows(speeds)


def found() -> dict[str, Kernel]:
    """Each family's kernel, where it is installed and this GPU runs it."""
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = {}
    for name, family in FAMILIES.items():
        missing = family.package is not None and family.version is None
        if name == "torch" or name in CHOOSING or missing:
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


def print_pack(
    lengths: tuple[int, ...],
    kernels: dict[str, Kernel],
    speeds: dict[str, list[Speed]],
    args: argparse.Namespace,
) -> None:
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
    name_of_pack = f"{len(lengths)} x {lengths[0]}" if same else f"{lengths[0]} ... {lengths[-1]}"
    alone = [1e3 * median for median, _ in medians(flash2, flash2, args.rounds)]
    row: dict[str, object] = {"pack": name_of_pack, "torch fwd, ms": alone[0]}
    row["torch bwd, ms"] = alone[1]
    line = f"{name_of_pack:24}{alone[0]:8.3f}{alone[1]:8.3f}"
    failed = []
    for name in speeds:
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
        speeds[name].append(Speed(lengths, *gains))
        line += f"{gains[0]:7.2f}{gains[1]:7.2f}{first:10.0f}"
        row |= {f"{name} fwd": gains[0], f"{name} bwd": gains[1], f"{name} first, ms": first}
    row["auto picks"] = picked(flash2.launches[0], query, value)
    print("\n".join([f"{line}  {row['auto picks']}", *failed]), flush=True)
    args.json.add(row)


def print_rows(speeds: dict[str, list[Speed]]) -> None:
    """Ratios as Python, to paste into ``speeds.MEASURED``."""
    capability = torch.cuda.get_device_capability()
    print(f"\nRows of hcp/attention/kernels/speeds.py for {capability}:")
    for name, measured in speeds.items():
        print(f'        "{name}": (')
        for speed in measured:
            lengths = speed.lengths
            same = len(lengths) > 1 and len(set(lengths)) == 1
            shown = f"({lengths[0]},) * {len(lengths)}" if same else repr(lengths)
            print(f"            Speed({shown}, {speed.forward:.2f}, {speed.backward:.2f}),")
        print("        ),")


def picked(launch: Launch, query: Tensor, value: Tensor) -> str:
    """The families that `auto` picks forward and backward."""
    kernel = fastest.for_device(query.device)[0]
    if not isinstance(kernel, fastest.Fastest):
        return "torch, torch"
    calls = (Call(launch, query, value, backward, False) for backward in (False, True))
    return ", ".join(kernel.choose(call).family for call in calls)


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
