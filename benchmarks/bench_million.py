"""Attention of one very long sequence by each comm type, beside Transformer Engine's, and how long
a sequence each can hold.

    torchrun --nproc-per-node 2 benchmarks/bench_million.py [--tokens 1048576] [--heads 8 2]
    python benchmarks/bench_million.py --ladder [--memory-gib 8]
    torchrun --nproc-per-node 2 benchmarks/bench_million.py --device cpu

One causal sequence lies on all ranks, and no rank computes it alone. hcp's comm types, and
Transformer Engine's and what others ship (peers/one_sequence.py), where they are installed, compute
forward and backward in turns. Columns:

    ms            of both passes, on the slowest rank; the median of --rounds
    tokens/s      of the whole sequence
    of bound      on the busiest rank, the larger of two times, over ms: hcp's kernel calls of this
                  comm type alone, on keys that are there; the bytes that it receives, at the rate
                  of a plain copy from a peer's memory. For others: of the same comm type by hcp,
                  so that a faster kernel of its own may bring more than 1
    GiB           the most memory that torch's allocator held on a GPU in one pass of both, with
                  inputs, output and gradients
    outside GiB   what this contestant took beside: memory that peers read, buffers of NCCL. hcp's
                  is for all of its types together
    off           how far results are from the formula, see below

Before anything is timed, outputs and gradients are checked twice. At --check-tokens all rows are
compared with one rank's. At --tokens two queries of each chunk are computed by the formula over all
keys, in float32 (for float64 in float64), and the gradient of the output is 0 but for these: so
gradients of all keys and values on all ranks are known. Contestants of others that refuse or are
wrong are named, with the error, and left out.

--ladder starts torchrun for each contestant, which doubles --tokens up to --most-tokens, or until
its memory is used up, or until the next length would take more than --rung-seconds; "of bound" is
left out. --memory-gib lets a contestant have so much of each GPU, its context and buffers included:
all memory of a GPU takes many minutes to fill, since time grows with the square of the length.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common.flags import end_after, filled, parser_of
from common.host_time import AtOnce
from common.ladder import (
    add_ladder,
    check_ladder,
    climb,
    climb_all,
    is_full,
    leave_full,
    ranks_of,
)
from common.layers import (
    TOLERANCE,
    Attention,
    OwnCalls,
    Sizes,
    Whole,
    bytes_received,
    layer_of,
    prices_of,
    run_of,
)
from common.long import GRAD, KEY, QUERY, VALUE, Long
from common.machine import hardware, package_version
from common.memory import limit_memory, outside_torch, staged_bytes
from common.timing import copy_rate, end_ranks, slowest, start_ranks, synchronize, timed
from peers import one_sequence, shipped
from peers.dao import Calls
from peers.ring import padded
from torch import Tensor

import hcp
from hcp._words import CommType
from hcp.attention.kernels import KernelChoice
from hcp.attention.prepared import PreparedLayer

TYPES: tuple[CommType, ...] = ("p2p", "all_gather", "a2a", "auto")
OTHERS = (*shipped.TRANSFORMER_ENGINE, *one_sequence.PEERS)
WARM_TOKENS = 2048
DEFAULTS = {
    "tokens": (2048, 2**20),
    "check_tokens": (256, 16_384),
    "heads": ([4, 2], [8, 2]),
    "head_dim": (16, 128),
    "dtype": ("float32", "bfloat16"),
}
"""On a CPU, on GPUs."""


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=1, deadline=590)
    says = (
        "of the sequence (CPU: 2048, CUDA: 1048576); of the first rung with --ladder (CPU: 512, "
        "CUDA: 131072)"
    )
    parser.add_argument("--tokens", type=int, help=says)
    says = "of the sequence that is compared as a whole (CPU: 256, CUDA: 16384)"
    parser.add_argument("--check-tokens", type=int, help=says)
    parser.add_argument(
        "--heads", type=int, nargs=2, metavar=("QUERY", "KEY"), help="(CPU: 4 2, CUDA: 8 2)"
    )
    parser.add_argument("--head-dim", type=int, help="(CPU: 16, CUDA: 128)")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"))
    parser.add_argument("--backend", default="auto", help="kernels, as of get_cp_handler_cls")
    parser.add_argument("--transport", default="auto", help="of hcp (auto)")
    parser.add_argument("--types", nargs="*", choices=TYPES, default=TYPES, help="of hcp")
    others = shipped.TRANSFORMER_ENGINE
    parser.add_argument("--te", nargs="*", choices=others, default=others)
    peers = tuple(one_sequence.PEERS)
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers, help="of others")
    add_ladder(parser)
    args = parser.parse_args()
    if (args.ladder or args.climb) and args.tokens is None:
        args.tokens = (512, 2**17)[args.device == "cuda"]
    check_ladder(parser, args)
    return filled(args, DEFAULTS)


def main() -> int:
    args = arguments()
    if args.ladder:
        end_after(args.deadline)
        start_ladder(args)
        return 0
    device = start_ranks(args.device, args.deadline, timedelta(seconds=args.deadline))
    bench = Bench(args, device)
    try:
        if args.climb:
            bench.whole = None
            bench.rung(min(WARM_TOKENS, args.tokens), None)
            climb(
                args, device, lambda tokens: print_row(bench, bench.rung(tokens, args.memory_gib))
            )
        else:
            compare(bench)
    except RuntimeError as error:
        if is_full(error):
            leave_full(bench.at, bench.tokens, error)
        raise
    bench.close()
    end_ranks()
    return 0


def start_ladder(args: argparse.Namespace) -> None:
    limit = "all memory" if args.memory_gib is None else f"{args.memory_gib:g} GiB of memory"
    print(
        f"{hardware(args.device)}, torch {torch.__version__}, hcp {hcp.__version__}, Transformer "
        f"Engine {package_version('transformer-engine') or 'absent'}; heads {args.heads[0]}:"
        f"{args.heads[1]} of {args.head_dim}, {args.dtype}, causal; {limit} for each"
    )
    names = list(args.types)
    ranks = ranks_of(args)
    device = torch.device(args.device)
    family = hcp.get_cp_handler_cls(args.backend).kernel_family
    calls = Calls(device, getattr(torch, args.dtype), family)
    for name in (*args.te, *args.peers):
        if obstacle := obstacle_of(name, device, args, ranks, calls):
            print(f"without {name}: {obstacle}")
        else:
            names.append(name)
    print(f"\n{HEAD}", flush=True)
    climb_all(args, names)


# ---- contestants ---------------------------------------------------------------------------------


@dataclass
class Contestant:
    """One comm type of hcp's, or another's attention, on the sequence."""

    name: str
    cp: hcp.ContextParallelHandler
    attention: Attention
    run: PreparedLayer | None = None
    """hcp's preparation, after its first pass."""
    memory: float = 0.0
    outside: float = 0.0
    off: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def used(self) -> str:
        """The comm type that keys travelled by."""
        if self.name in one_sequence.PEERS:
            return one_sequence.PEERS[self.name].like
        return shipped.comm_type_of(self.name) if self.run is None else self.run.schedule.comm_type

    @property
    def contiguous(self) -> bool:
        return self.name in one_sequence.PEERS and one_sequence.PEERS[self.name].contiguous


class Bench:
    """State that all measurements share."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sizes = Sizes.of(args, device)
        self.handler = hcp.get_cp_handler_cls(args.backend)
        self.calls = Calls(device, self.sizes.dtype, self.handler.kernel_family)
        self.tokens, self.at = 0, "the start"
        self.groups: hcp.ProcessGroups | None = None
        dist.all_reduce(torch.zeros(1, device=device))
        self.rate = copy_rate(device, 3)
        lengths = [padded(args.check_tokens, self.ranks)]
        self.whole: Whole | None = Whole(
            lengths, self.sizes, KernelChoice(self.handler.kernel_family)
        )
        self._cost = self._prices(self.whole)
        self._outside: dict[str, float] = {}
        self._mark = slowest(outside_torch(device), device)

    def tell(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def connect(self, tokens: int) -> None:
        """Connect hcp's ranks anew, with memory for a sequence of so many tokens."""
        self.close()
        self.groups = hcp.build_process_groups(
            transport=self.args.transport,
            timeout=timedelta(seconds=self.args.deadline),
            peer_buffer_bytes=staged_bytes(
                tokens,
                self.ranks,
                2 * self.sizes.kv_heads * self.sizes.head_dim,
                self.sizes.dtype.itemsize,
            ),
        )

    def close(self) -> None:
        if self.groups is not None:
            self.groups.close()
            self.groups = None

    def contestant(self, name: str, tokens: int) -> Contestant:
        """``name``: a comm type of hcp, or one of ``OTHERS``."""
        plan = hcp.plan(
            [tokens],
            ranks=self.ranks,
            max_tokens_per_rank=tokens // self.ranks,
            min_degree=self.ranks,
            cost=self._cost,
        )
        if name in OTHERS:  # which exchange rows themselves
            cp = self.handler(plan, 0, AtOnce(self.rank, self.ranks, self.device))
            if name in one_sequence.PEERS:
                made = one_sequence.attention_of(name, self.calls, self.args.backend)
                return Contestant(name, cp, made)
            return Contestant(name, cp, shipped.attention_of(name, cp, self.args.backend))
        assert self.groups is not None
        types = [x for x in TYPES if x == name]
        cp = self.handler(plan, 0, self.groups.transport, comm_types=types)
        return Contestant(name, cp, cp.attention)

    def short(self, name: str) -> None:
        """Compare all rows of a short sequence with one rank's."""
        assert self.whole is not None
        one, (tokens,) = self.contestant(name, self.whole.lengths[0]), self.whole.lengths
        rows = tokens // self.ranks
        own = slice(self.rank * rows, (self.rank + 1) * rows) if one.contiguous else None
        with self.region(one, tokens):
            layer_of(name, self.whole, one.cp, one.attention, own)

    def region(self, one: Contestant, tokens: int) -> AbstractContextManager[None]:
        """Return the context that both passes run in."""
        return one_sequence.region(one.name, tokens, self.ranks, self.device)

    def first_pass(
        self, one: Contestant, long: Long, inputs: Sequence[Tensor], beside: int = 0
    ) -> None:
        """Run both passes once, under the sparse gradient. Note memory and error. ``beside``: bytes
        that are held for others."""
        self.at = one.name
        grad = long.drawn(GRAD, long.chunks)
        long.sparse(grad)
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with self.region(one, self.tokens):
            out, grads = both(one.attention, inputs, grad)
        synchronize(self.device)
        if self.device.type == "cuda":
            held = torch.cuda.max_memory_allocated() - beside
            one.memory = slowest(held / 2**30, self.device)
        one.outside = self._taken_outside(one)
        if is_own(one):
            one.run = run_of(one.cp, one.name, self.sizes)
        errors = {what: slowest(x, self.device) for what, x in long.errors(out, grads).items()}
        worst = max(errors, key=lambda what: errors[what])
        one.off = errors[worst]
        if not one.off <= TOLERANCE[self.sizes.dtype]:
            raise ValueError(
                f"{one.name}: at {self.tokens} tokens the {worst} is off by {one.off:.2g}, "
                f"expected <= {TOLERANCE[self.sizes.dtype]}"
            )

    def _taken_outside(self, one: Contestant) -> float:
        """Add what was taken outside torch's allocator since the last call to this contestant's, or
        to that of all of hcp."""
        key = "hcp" if is_own(one) else one.name
        now = slowest(outside_torch(self.device), self.device)
        self._outside[key] = self._outside.get(key, 0.0) + now - self._mark
        self._mark = now
        return self._outside[key]

    def time_pass(self, one: Contestant, inputs: Sequence[Tensor], grad: Tensor) -> None:
        self.at = one.name
        step = partial(both, one.attention, inputs, grad)
        with self.region(one, self.tokens):
            one.seconds.append(slowest(timed(step, self.device), self.device))

    def rung(self, tokens: int, memory_gib: float | None) -> Contestant:
        """Check and time the contestant of --climb once at a length, in so much memory."""
        name = self.args.climb
        self.at, self.tokens = name, padded(tokens, self.ranks)
        if name not in OTHERS:
            self.connect(self.tokens)
        elif obstacle := obstacle_of(name, self.device, self.args, self.ranks, self.calls):
            raise SystemExit(f"{name}: {obstacle}")
        if memory_gib is not None:
            limit_memory(self.device, memory_gib)
        one = self.contestant(name, self.tokens)
        place = self.rank, self.ranks
        long = Long(self.tokens, *place, self.sizes, contiguous=one.contiguous)
        inputs = inputs_of(long)
        self.first_pass(one, long, inputs)
        self.time_pass(one, inputs, long.drawn(GRAD, long.chunks))
        return one

    def _prices(self, whole: Whole) -> hcp.CostModel:
        """Return prices at the rates of the kernel, which computes a whole sequence, and of copies:
        what "auto" goes by."""
        sizes, (length,) = self.sizes, whole.lengths
        whole.both()
        seconds = slowest(timed(whole.both, self.device), self.device)
        flops = 3.5 * 4 * (length * (length + 1) // 2) * sizes.heads * sizes.head_dim / seconds
        return prices_of(sizes, flops, self.rate)


def both(
    attention: Attention, inputs: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output and the gradients of queries, keys and values."""
    out = attention(*inputs)
    return out.detach(), torch.autograd.grad(out, list(inputs), grad)


def inputs_of(long: Long) -> list[Tensor]:
    return [long.drawn(what, long.chunks).requires_grad_() for what in (QUERY, KEY, VALUE)]


# ---- one length ----------------------------------------------------------------------------------

COLUMNS = {
    "tokens": "d",
    "contestant": "",
    "ms": ".1f",
    "tokens/s": ",.0f",
    "of bound": ".3f",
    "GiB": ".2f",
    "outside GiB": ".2f",
    "off": ".1e",
}
"""How each is printed."""
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def compare(bench: Bench) -> None:
    """Check all contestants, let them take turns, and print a row of each."""
    args = bench.args
    names = [*args.types, *(name for name in (*args.te, *args.peers) if is_here(bench, name))]
    tokens = bench.tokens = padded(args.tokens, bench.ranks)
    bench.connect(max(tokens, padded(args.check_tokens, bench.ranks)))
    print_head(bench)
    names = [name for name in names if tried(bench, name, partial(bench.short, name))]
    bench.whole = None
    laid = laid_out(bench, names, tokens)
    contestants = []
    for name in names:
        one = bench.contestant(name, tokens)
        long, inputs, _ = laid[one.contiguous]
        beside = sum(bytes_of(held) for way, held in laid.items() if way != one.contiguous)
        if tried(bench, name, partial(bench.first_pass, one, long, inputs, beside)):
            contestants.append(one)
    runs = {one.used: one.run for one in contestants if one.run is not None}
    bounds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for one in contestants:
            bench.time_pass(one, *laid[one.contiguous][1:])
        for name, run in runs.items():
            bounds[name].append(bound_of(bench, run))
    bench.tell(f"\n{HEAD}")
    for one in contestants:
        print_row(bench, one, bounds.get(one.used))


Laid = tuple[Long, list[Tensor], Tensor]
"""A sequence, this rank's inputs, and its gradient of the output."""


def laid_out(bench: Bench, names: Sequence[str], tokens: int) -> dict[bool, Laid]:
    """Return the sequence by whether a rank's rows are contiguous, as far as somebody asks."""
    peers = [one_sequence.PEERS.get(name) for name in names]
    ways = sorted({peer is not None and peer.contiguous for peer in peers})
    made = {}
    for way in ways:
        long = Long(tokens, bench.rank, bench.ranks, bench.sizes, contiguous=way)
        made[way] = long, inputs_of(long), long.drawn(GRAD, long.chunks)
    return made


def bytes_of(laid: Laid) -> int:
    return sum(x.numel() * x.itemsize for x in (*laid[1], laid[2]))


def is_own(one: Contestant) -> bool:
    """Whether it is hcp's."""
    return one.name not in OTHERS


def is_here(bench: Bench, name: str) -> bool:
    """Whether a contestant of others can run here. Tell why not."""
    obstacle = obstacle_of(name, bench.device, bench.args, bench.ranks, bench.calls)
    if obstacle is not None:
        bench.tell(f"without {name}: {obstacle}")
    return obstacle is None


def obstacle_of(
    name: str, device: torch.device, args: argparse.Namespace, ranks: int, calls: Calls
) -> str | None:
    """Return the reason why a contestant of others cannot run here, or None."""
    if name in one_sequence.PEERS:
        heads, kv_heads = args.heads
        return one_sequence.obstacle(name, device, (heads, kv_heads), ranks, calls)
    return shipped.obstacle(name, device) or shipped.heads_obstacle(name, args.heads, ranks)


def tried(bench: Bench, name: str, step: Callable[[], object]) -> bool:
    """Run a step. Where another's fails, tell why and go on without it."""
    if name not in OTHERS:
        step()
        return True
    failed = ""
    try:
        step()
    except (Exception, SystemExit) as error:
        if is_full(error):
            raise
        failed = f"{type(error).__name__}: {str(error)[:300]}"
    if slowest(float(bool(failed)), bench.device):
        bench.tell(f"{name}: left out, {failed or 'it failed on another rank'}")
        return False
    return True


def bound_of(bench: Bench, run: PreparedLayer) -> float:
    """Return the seconds that no layer of this type can be faster than, on the busiest rank."""
    bench.at = "the kernel's calls alone"
    calls = OwnCalls(run, bench.sizes)
    alone = slowest(timed(calls.both, bench.device), bench.device)
    return max(alone, slowest(bytes_received(run, bench.sizes)[1] / bench.rate, bench.device))


def print_head(bench: Bench) -> None:
    args = bench.args
    engine = package_version("transformer-engine")
    transport = "none" if bench.groups is None else bench.groups.transport.name
    bench.tell(
        f"{bench.ranks} ranks on {hardware(args.device)}, torch {torch.__version__}, hcp "
        f"{hcp.__version__}, Transformer Engine {engine or 'absent'}; one sequence of "
        f"{bench.tokens} tokens, heads {args.heads[0]}:{args.heads[1]} of {args.head_dim}, "
        f"{args.dtype}, causal, backend {args.backend}, transport {transport}; median of "
        f"{args.rounds}; {'copy' if args.device == 'cpu' else 'peer copy'} "
        f"{bench.rate / 1e9:.3g} GB/s"
    )


def print_row(bench: Bench, one: Contestant, bounds: Sequence[float] | None = None) -> None:
    """``bounds``: seconds of each round that no layer of this type can be faster than."""
    if bench.rank > 0:
        return
    seconds = statistics.median(one.seconds)
    on_gpu = bench.device.type == "cuda"
    row = {
        "tokens": bench.tokens,
        "contestant": one.name if one.used in one.name else f"{one.name} ({one.used})",
        "ms": seconds * 1e3,
        "tokens/s": bench.tokens / seconds,
        "of bound": None if bounds is None else statistics.median(bounds) / seconds,
        "GiB": one.memory if on_gpu else None,
        "outside GiB": one.outside if on_gpu else None,
        "off": one.off,
    }
    bench.args.json.add(row)
    print(line_of(row), flush=True)


def line_of(row: Mapping[str, Any]) -> str:
    cells = (
        "-" if row[name] is None else format(row[name], form) for name, form in COLUMNS.items()
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
