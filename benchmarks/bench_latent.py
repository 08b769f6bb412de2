"""Latent attention whose rows travel compressed, against expanded keys and values.

    torchrun --nproc-per-node 8 benchmarks/bench_latent.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/bench_latent.py --device cpu

A layer as DeepSeek-V3's, from latent rows and queries on: a projection of --latent elements to the
keys and values of --heads heads, a rotated key of --shared elements that they share, and causal
attention. One sequence of --tokens tokens lies on all ranks. Two contestants of each comm type:

    expanded   projects this rank's rows; keys and values travel
    latent     `cp.attention(query, latent, expand=)`: latent rows travel, and are projected where
               they are received, in the backward once more

Columns: what a rank receives, in the forward and in both passes; the part of it that the formula of
docs/concepts/latent-attention.md says (1.000 is equal); memory that one layer keeps between its
passes, and its peak; milliseconds of both passes. Each is the largest of all ranks; times are the
median of rounds in which all take turns. Bytes are counted by the tables of moves and, on the
transport `torch`, also where they are received. Memory is that of PyTorch's allocator, beyond what
was there before the layer: inputs, weights and their gradients are not counted. On a CPU the
profiler's events give it.

Before anything is timed, output and gradients of queries, latent rows and the projection are
compared with one rank's over the whole sequence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common.flags import add_sizes, filled, parser_of
from common.layers import check
from common.machine import hardware
from common.memory import allocated, peak_bytes
from common.timing import by_turns, end_ranks, slowest, start_ranks, timed
from torch import Tensor, nn

import hcp
from hcp._words import CommType
from hcp.attention.prepared import prepared_of
from hcp.step.handler import ContextParallelHandler
from hcp.tools.loopback import one_rank

TYPES = ("p2p", "all_gather")
TIMEOUT = timedelta(seconds=60)
PASSES = {"p2p": (1, 11 / 4), "all_gather": (3 / 4, 9 / 4)}
"""Rows that all ranks receive, over (d - 1) L: forward, and both passes."""
DEFAULTS = {
    "tokens": (1024, 65_536),
    "heads": (8, 128),
    "latent": (64, 512),
    "shared": (16, 64),
    "head_dim": (32, 128),
    "dtype": ("float32", "bfloat16"),
    "transports": (["torch"], ["peer", "nccl", "torch"]),
}
"""On a CPU, on GPUs."""
MIB = 2**20


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=5, deadline=590)
    whats = {
        "tokens": "of the sequence",
        "heads": "of queries, keys and values",
        "latent": "elements of a latent row that are projected",
        "shared": "elements of the rotated key",
        "head-dim": "elements of a value, and of the projected part of a key",
    }
    add_sizes(parser, whats, DEFAULTS)
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--transports", nargs="+", help="(CPU: torch, CUDA: peer nccl torch)")
    return filled(parser.parse_args(), DEFAULTS)


def main() -> int:
    args = arguments()
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    layer = Layer(args, device)
    if dist.get_rank() == 0:
        print_head(args)
    whole = layer.whole()
    for transport in args.transports:
        groups = hcp.build_process_groups(transport=transport, timeout=TIMEOUT)
        for comm_type in args.types:
            compare(args, layer, whole, groups, transport, comm_type)
        groups.close()
    end_ranks()
    return 0


# ---- the layer -----------------------------------------------------------------------------------


class Up(nn.Module):
    """Expands latent rows (n, latent + shared) to keys and values of all heads."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        self.sizes = args.heads, args.head_dim, args.latent, args.shared
        shape = 2 * args.heads * args.head_dim, args.latent
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) / args.latent**0.5
        self.weight = nn.Parameter(drawn.to(device, getattr(torch, args.dtype)))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        heads, size, latent, shared = self.sizes
        own, rotated = torch.split(rows, [latent, shared], -1)
        up = nn.functional.linear(own, self.weight).view(-1, heads, 2 * size)
        key, value = torch.split(up, [size, size], -1)
        return torch.cat([key, rotated.unsqueeze(1).expand(-1, heads, -1)], -1), value


class Layer:
    """Inputs of the whole sequence, alike on every rank, and the projection."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.up, self.device, self.tokens = Up(args, device), device, args.tokens
        self.dtype = getattr(torch, args.dtype)
        generator = torch.Generator(device).manual_seed(2)
        key_size = args.head_dim + args.shared
        shapes = [(args.heads, key_size), (args.latent + args.shared,), (args.heads, args.head_dim)]
        self.inputs = [
            torch.randn(self.tokens, *shape, generator=generator, device=device).to(self.dtype)
            for shape in shapes
        ]
        """Queries, latent rows, and the gradient of the output."""
        self.widths = {
            "latent": args.latent + args.shared,
            "expanded": args.heads * (key_size + args.head_dim),
        }

    def local(self, cp: ContextParallelHandler, tensors: Sequence[Tensor]) -> list[Tensor]:
        rows = cp.layout.positions.to(self.device)
        return [x[rows] for x in tensors]

    def whole(self) -> list[Tensor]:
        """Output and gradients of queries, latent rows and the projection, on one rank."""
        plan = hcp.plan([self.tokens], ranks=1, max_tokens_per_rank=self.tokens)
        cp = ContextParallelHandler(plan, 0, one_rank(self.device))
        return Contestant("expanded", "p2p", cp, self).results()


class Contestant:
    """One layer's call on this rank."""

    def __init__(
        self, name: str, comm_type: CommType, cp: ContextParallelHandler, layer: Layer
    ) -> None:
        self.name, self.comm_type, self.cp, self.layer = name, comm_type, cp, layer
        query, rows, self.grad = layer.local(cp, layer.inputs)
        self.leaves = [query.requires_grad_(), rows.requires_grad_(), layer.up.weight]

    def forward(self) -> Tensor:
        query, rows, _ = self.leaves
        if self.name == "latent":
            return self.cp.attention(query, rows, expand=self.layer.up, comm_type=self.comm_type)
        return self.cp.attention(query, *self.layer.up(rows), comm_type=self.comm_type)

    def results(self) -> list[Tensor]:
        out = self.forward()
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)]

    def checked(self, whole: Sequence[Tensor]) -> Contestant:
        """End the run unless the results are those of one rank, to rounding."""
        out, grad_query, grad_rows, grad_weight = self.results()
        total = grad_weight.to(torch.promote_types(grad_weight.dtype, torch.float32))
        dist.all_reduce(total)
        wanted = [*self.layer.local(self.cp, whole[:3]), whole[3]]
        largest = [float(x.abs().max()) for x in whole]
        names = ("output", "queries' gradient", "latent rows' gradient", "projection's gradient")
        found = [out, grad_query, grad_rows, total.to(grad_weight.dtype)]
        check(f"{self.name} {self.comm_type}", names, found, wanted, largest, self.layer.dtype)
        return self

    def bytes_received(self) -> tuple[int, int]:
        """By the tables, in the forward and in both passes."""
        schedule = prepared_of(self._words()).schedule
        arriving = sum(move.rows for stage in schedule.stages for move in stage.receives)
        home = sum(move.rows for move in schedule.return_receives)
        size = self.layer.widths[self.name] * self.layer.dtype.itemsize
        return arriving * size, (2 * arriving + home) * size

    def _words(self) -> Tensor:
        return self.cp._schedules.words_of(self.comm_type, -1, 0, (1, 1))


# ---- measurements --------------------------------------------------------------------------------


class Row(NamedTuple):
    received: tuple[int, int]
    kept: float
    peak: float


def compare(
    args: argparse.Namespace,
    layer: Layer,
    whole: Sequence[Tensor],
    groups: hcp.ProcessGroups,
    transport: str,
    comm_type: CommType,
) -> None:
    ranks = dist.get_world_size()
    plan = hcp.plan([args.tokens], ranks=ranks, max_tokens_per_rank=args.tokens, min_degree=ranks)
    contestants = []
    for name in ("expanded", "latent"):
        cp = ContextParallelHandler(plan, 0, groups.transport, comm_types=[comm_type])
        contestants.append(Contestant(name, comm_type, cp, layer).checked(whole))
    rows = [
        measured(one, groups.transport if transport == "torch" else None) for one in contestants
    ]
    steps = {one.name: one.results for one in contestants}
    times = by_turns(steps, layer.device, partial(timed, device=layer.device), args.rounds)
    for one, row in zip(contestants, rows, strict=True):
        print_row(args, one, row, transport, times[one.name])


def measured(one: Contestant, transport: Any) -> Row:
    received = one.bytes_received()
    with counted(transport) as count:
        one.results()
    if transport is not None and count[0] != received[1]:
        raise SystemExit(f"{one.name}: {count[0]} bytes arrived, expected {received[1]}")
    kept, peak = memory_of(one)
    return Row(received, kept, peak)


@contextmanager
def counted(transport: Any) -> Iterator[list[int]]:
    """Count the bytes of the rows that a transport's exchanges receive from other ranks."""
    count = [0]
    if transport is None:
        yield count
        return
    own = transport.start

    def start(sent: Tensor, sends: Any, received: Tensor, receives: Any, **options: Any) -> Any:
        rows = sum(move.rows for move in receives if move.peer != transport.rank)
        count[0] += rows * received.shape[1] * received.itemsize
        return own(sent, sends, received, receives, **options)

    transport.start = start
    try:
        yield count
    finally:
        del transport.start


def memory_of(one: Contestant) -> tuple[float, float]:
    """Bytes that a layer keeps between its passes, and its peak, beyond what was there before."""
    device = one.layer.device
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        out = one.forward()
        kept = torch.cuda.memory_allocated() - before
        del out
        return kept, peak_bytes(one.results, device)
    forward, _ = allocated(lambda: one.forward())  # its result lives until the next statement
    return forward, peak_bytes(one.results, device)


def print_head(args: argparse.Namespace) -> None:
    ranks = dist.get_world_size()
    print(
        f"{ranks} x {hardware(args.device)}, torch {torch.__version__}, hcp {hcp.__version__}, "
        f"{args.tokens} tokens, {args.heads} heads of {args.head_dim} + {args.shared}, latent rows "
        f"of {args.latent} + {args.shared}, {args.dtype}"
    )
    print(
        f"{'transport':9} {'type':10} {'rows':8} {'MiB f':>9} {'MiB f+b':>9} {'formula':>8} "
        f"{'kept MiB':>9} {'peak MiB':>9} {'ms f+b':>9}",
        flush=True,
    )


def print_row(
    args: argparse.Namespace, one: Contestant, row: Row, transport: str, seconds: float
) -> None:
    device, ranks = one.layer.device, dist.get_world_size()
    forward, both = (slowest(count, device) / MIB for count in row.received)
    total = torch.tensor(row.received[1], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    size = one.layer.widths[one.name] * one.layer.dtype.itemsize
    said = (ranks - 1) * args.tokens * PASSES[one.comm_type][1] * size
    formula = f"{float(total) / said:.3f}" if said else "-"
    kept, peak = (slowest(count, device) / MIB for count in (row.kept, row.peak))
    cells = {
        "transport": transport,
        "type": one.comm_type,
        "rows": one.name,
        "MiB f": f"{forward:.2f}",
        "MiB f+b": f"{both:.2f}",
        "formula": formula,
        "kept MiB": f"{kept:.2f}",
        "peak MiB": f"{peak:.2f}",
        "ms f+b": f"{seconds * 1e3:.2f}",
    }
    if dist.get_rank() == 0:
        widths = 9, 10, 8, -9, -9, -8, -9, -9, -9
        text = (
            f"{cell:<{w}}" if w > 0 else f"{cell:>{-w}}"
            for cell, w in zip(cells.values(), widths, strict=True)
        )
        print(" ".join(text), flush=True)
        args.json.add(cells)


if __name__ == "__main__":
    sys.exit(main())
