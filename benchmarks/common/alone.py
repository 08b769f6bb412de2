"""Time each rank's part of a cut pack on one device, without an exchange.

    python benchmarks/bench_attention.py --alone --degrees 4 [--device cpu]

One process acts as each of d ranks in turn. Its transport exchanges nothing and returns at once, so
that what remains of a layer is its kernel calls, and what packs, merges and sums rows around them.
All take turns in one run. Columns:

    ms        of the slowest rank: forward, forward and backward
    calls     one rank computes the whole pack alone; its time / d, over the slowest rank's kernel
              calls alone. What 1 lacks is lost by cutting sequences
    layer     the same over the slowest rank's layer. What it lacks more is the work around calls
    even      the mean of the ranks' layers over the slowest one's

On several GPUs an exchange may take time that kernels do not hide; `bench_attention.py` without
this flag has it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import hcp
from common.flags import JsonFile
from common.host_time import AtOnce
from common.layers import OwnCalls, Sizes, Whole, run_of
from common.timing import Step, synchronize
from hcp._words import CommType
from hcp.attention.kernels import KernelChoice

CALLS = 3


class Part(NamedTuple):
    """One rank's layer of a pack that is cut for d ranks."""

    inputs: list[Tensor]
    grad: Tensor
    cp: hcp.ContextParallelHandler
    calls: OwnCalls

    def forward(self) -> None:
        with torch.no_grad():
            self.cp.attention(*self.inputs)

    def both(self) -> None:
        out = self.cp.attention(*self.inputs)
        torch.autograd.grad(out, self.inputs, self.grad)


def print_alone(
    packs: Mapping[str, Sequence[int]],
    degrees: Sequence[int],
    types: Sequence[CommType],
    sizes: Sizes,
    backend: str,
    rounds: int,
    json: JsonFile,
) -> None:
    """Print the table in Markdown, and add its rows to the file."""
    print(
        "| pack | degree | comm type | ms | calls | layer | even |\n|---|---|---|---|---|---|---|"
    )
    handler = hcp.get_cp_handler_cls(backend)
    for pack, lengths in packs.items():
        whole = Whole(lengths, sizes, KernelChoice(handler.kernel_family))
        for degree in degrees:
            for comm_type in types:
                parts = [
                    _part(handler, lengths, degree, rank, comm_type, sizes)
                    for rank in range(degree)
                ]
                _print_row(pack, degree, comm_type, whole, parts, rounds, json)


def _part(
    handler: type[hcp.ContextParallelHandler],
    lengths: Sequence[int],
    degree: int,
    rank: int,
    comm_type: CommType,
    sizes: Sizes,
) -> Part:
    plan = hcp.plan(
        lengths,
        ranks=degree,
        max_tokens_per_rank=-(-sum(lengths) // degree) + 2 * len(lengths),
        min_degree=degree,
    )
    transport = AtOnce(rank, degree, sizes.device)
    cp = handler(plan, 0, transport, comm_types=[comm_type])
    counts = sizes.heads, sizes.kv_heads, sizes.kv_heads
    inputs = [sizes.randn(cp.rows, count).requires_grad_() for count in counts]
    cp.attention(*inputs)
    calls = OwnCalls(run_of(cp, comm_type, sizes), sizes)
    return Part(inputs, sizes.randn(cp.rows, sizes.heads), cp, calls)


def _print_row(
    pack: str,
    degree: int,
    comm_type: CommType,
    whole: Whole,
    parts: Sequence[Part],
    rounds: int,
    json: JsonFile,
) -> None:
    steps: list[Step] = [whole.forward, whole.both]
    for part in parts:
        steps += [part.calls.forward, part.calls.both, part.forward, part.both]
    seconds = _by_turns(steps, whole.sizes.device, rounds)
    ideal, each = [time / degree for time in seconds[:2]], seconds[2:]
    calls = [max(each[i::4]) for i in (0, 1)]
    layers = [max(each[i::4]) for i in (2, 3)]
    of_calls = [best / own for best, own in zip(ideal, calls, strict=True)]
    of_layers = [best / own for best, own in zip(ideal, layers, strict=True)]
    even = [statistics.mean(each[i::4]) / max(each[i::4]) for i in (2, 3)]
    numbers = [time * 1e3 for time in layers], of_calls, of_layers, even
    cells = [f"{forward:.2f} / {both:.2f}" for forward, both in numbers]
    print(f"| {' | '.join((pack, str(degree), comm_type, *cells))} |", flush=True)
    titles = ("ms", "calls", "layer", "even")
    row = {
        f"{title} {name}": value
        for title, pair in zip(titles, numbers, strict=True)
        for name, value in zip(("f", "f+b"), pair, strict=True)
    }
    json.add({"pack": pack, "degree": degree, "comm type": comm_type, **row})


def _by_turns(steps: Sequence[Step], device: torch.device, rounds: int) -> list[float]:
    """Return the seconds of one call of each step, the median of rounds through all of them."""
    taken: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step()
    for _ in range(rounds):
        for times, step in zip(taken, steps, strict=True):
            times.append(_timed(step, device))
    return [statistics.median(times) for times in taken]


def _timed(step: Step, device: torch.device) -> float:
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(CALLS):
        step()
    synchronize(device)
    return (time.perf_counter() - begun) / CALLS
