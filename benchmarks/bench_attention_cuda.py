"""One attention layer on several GPUs, against its own kernels and the bytes that it moves.

    torchrun --nproc-per-node 8 benchmarks/bench_attention_cuda.py [--heads 32 8] [--backend auto]

Two yardsticks for each pack, both measured in the run:

    ideal   one GPU computes the whole pack in one call of the library's kernel; its time / GPUs
    bound   of the busiest rank, the larger of its own kernel calls alone, on keys that lie there,
            and of the bytes that it receives at the rate of a plain copy from a peer's memory

Shares are yardstick / time: 1 is the limit. A time is that of the slowest rank, the median over
rounds of several layers one after the other, as in a model; in each round a pack takes turns with
its bound. Every contestant's output is compared with the float32 formula on one sequence before it
is timed. `ring` is per-document splitting as in benchmarks/peers/ring.py, its sequences padded for
it, on torch's point-to-point calls. What others ship (benchmarks/peers/shipped.py) runs where it is
there and takes the pack, on its own kernels. `--backend` names the kernels of all else, yardsticks
included.
"cudnn" has none for `all_gather`, so that `p2p` stands there. P1, P2 and P4 are the first sequences
of a batch of these families, up to 16,384 tokens a rank twice over. With --device cpu, all of it
over Gloo, for --transports torch; bench_attention.py has every comm type and degree, on CPUs too.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from random import Random

import torch
import torch.distributed as dist
from common.families import BY_NAME
from common.flags import parser_of
from common.timing import (
    Step,
    by_turns,
    device_name,
    end_ranks,
    queued,
    slowest,
    start_ranks,
    timed,
    world,
)
from peers import shipped
from peers.ring import OnRing, padded
from torch import Tensor

import hcp
from hcp.attention.kernel_calls import launches_of
from hcp.attention.kernels import Choice, Launch, kernel_for
from hcp.exchange.tables import Entry, Schedule
from hcp.step.handler import ContextParallelHandler

HEAD_DIM = 128
PACKS = {
    "1 x 65536": [65536],
    "8 x 8192": [8192] * 8,
    "32768 ... 128": [32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128],
    "64 x 1024": [1024] * 64,
}
FAMILIES = ("P1", "P2", "P4")
LAYERS = 4
TIMEOUT = timedelta(seconds=60)
CAPACITY = 16384


@dataclass
class Layer:
    """One micro-batch of a plan on this rank, with inputs."""

    cp: ContextParallelHandler
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor


def main() -> int:
    args = arguments()
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    rate = copy_rate(device, args.rounds)
    if dist.get_rank() == 0:
        name = device_name(device)
        print(f"{dist.get_world_size()} x {name}, torch {torch.__version__}, hcp {hcp.__version__}")
        heads = f"heads {args.heads[0]}:{args.heads[1]} of {HEAD_DIM}"
        print(f"{heads}, bfloat16, causal, backend {args.backend}")
        print(f"peer copy {rate / 1e9:.0f} GB/s")
        for name in shipped.MODULES:
            if obstacle := shipped.obstacle(name):
                print(f"without {name}: {obstacle}")
        print(f"\n{HEADER}")
    everything = {
        name: hcp.build_process_groups(transport=name, timeout=TIMEOUT) for name in args.transports
    }
    packs = [(pack, lengths_of(pack, args.shrink)) for pack in args.packs]
    ideals = [ideal_of(args, lengths, device) for _, lengths in packs]
    for (pack, lengths), ideal in zip(packs, ideals, strict=True):
        for plan_name, comm_type in contestants(args.backend):
            for name, groups in everything.items():
                if comm_type in hcp.COMM_TYPES or name == "torch":
                    compare(args, groups, pack, lengths, plan_name, comm_type, rate, ideal)
    for comm_type in shipped.MODULES:  # last, since what others ship may end all
        for (pack, lengths), ideal in zip(packs, ideals, strict=True):
            if "torch" in everything and shipped.obstacle(comm_type) is None:
                compare_shipped(args, everything["torch"], pack, lengths, comm_type, rate, ideal)
    for groups in everything.values():
        groups.close()
    end_ranks()
    return 0


def contestants(backend: str) -> list[tuple[str, str]]:
    """Plan and comm type."""
    gathered = "p2p" if backend == "cudnn" else "all_gather"
    types = dict.fromkeys((gathered, "p2p", "ring"))
    return [*(("degree N", comm_type) for comm_type in types), ("dynamic", gathered)]


HEADER = (
    f"{'transport':9} {'pack':14} {'plan':9} {'comm type':16} "
    f"{'ms f':>7} {'ms f+b':>7} {'ideal f':>8} {'f+b':>5} {'bound f':>8} {'f+b':>5} "
    f"{'host us f':>9} {'b':>5}"
)

COLUMNS = (
    *("transport", "pack", "plan", "comm type", "ms f", "ms f+b", "ideal f", "ideal f+b"),
    *("bound f", "bound f+b", "host us f", "host us b"),
)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=5, deadline=590)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KEY"))
    parser.add_argument("--backend", default="torch", help="kernels, as of get_cp_handler_cls")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this")
    parser.add_argument("--transports", nargs="+", default=["peer", "nccl", "torch"])
    names = [*PACKS, *FAMILIES]
    parser.add_argument("--packs", nargs="+", choices=names, default=names, metavar="PACK")
    return parser.parse_args()


def lengths_of(pack: str, shrink: int) -> list[int]:
    lengths = PACKS[pack] if pack in PACKS else drawn(pack)
    return [max(1, length // shrink) for length in lengths]


def drawn(family: str) -> list[int]:
    """Sequences of a family, none longer than all ranks hold."""
    ranks = dist.get_world_size()
    lengths = [min(n, ranks * CAPACITY) for n in BY_NAME[family].draw(Random(1))]
    sums = itertools.accumulate(lengths)
    return lengths[: max(1, sum(total <= 2 * ranks * CAPACITY for total in sums))]


def choice_of(backend: str) -> Choice:
    return Choice(hcp.get_cp_handler_cls(backend).kernel_family)


def ideal_of(args: argparse.Namespace, lengths: list[int], device: torch.device) -> list[float]:
    whole = Alone(lengths, args.heads, device, choice_of(args.backend))
    times = times_of(
        {"forward": lambda: whole.run(False), "both": lambda: whole.run(True)},
        device,
        args.rounds,
        calls=1,
    )
    return [seconds / dist.get_world_size() for seconds in times]


def compare_shipped(
    args: argparse.Namespace,
    groups: hcp.ProcessGroups,
    pack: str,
    lengths: list[int],
    comm_type: str,
    rate: float,
    ideal: list[float],
) -> None:
    """Of what others ship, or what it says where it refuses, on all ranks alike."""
    if not shipped.takes(comm_type, lengths):
        return
    ranks, device = groups.size("dp_cp"), groups.transport.device
    try:
        with shipped.running(comm_type, padded(lengths[0], ranks), ranks, device):
            compare(args, groups, pack, lengths, "degree N", comm_type, rate, ideal)
    except Exception as error:
        if groups.transport.rank == 0:
            print(f"{comm_type}: {pack}: {type(error).__name__}: {str(error).splitlines()[:1]}")


def compare(
    args: argparse.Namespace,
    groups: hcp.ProcessGroups,
    pack: str,
    lengths: list[int],
    plan_name: str,
    comm_type: str,
    rate: float,
    ideal: list[float],
) -> None:
    ranks = groups.size("dp_cp")
    if comm_type not in hcp.COMM_TYPES:
        lengths = [padded(n, ranks) for n in lengths]
    capacity = max(CAPACITY, -(-max(lengths) // ranks) + 2)
    degree = ranks if plan_name == "degree N" else 1
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=capacity, min_degree=degree)
    make_subgroups(plan)
    layers = [make_layer(args, plan, m, groups, comm_type) for m in range(len(plan.micro_batches))]
    check(layers)
    own = [OwnCalls(layer, comm_type, choice_of(args.backend)) for layer in layers]
    device = groups.transport.device
    *times, alone, alone_both = times_of(
        {
            "forward": lambda: run(layers, False),
            "both": lambda: run(layers, True),
            "calls alone": lambda: run_alone(own, False),
            "both alone": lambda: run_alone(own, True),
        },
        device,
        args.rounds,
    )
    received = sum(bytes_received(layer, comm_type, args.heads[1]) for layer in layers)
    moved = slowest(received, device) / rate
    bounds = [max(alone, moved), max(alone_both, 3 * moved)]
    host = host_times(layers, device, args.rounds)
    if groups.transport.rank == 0:
        ratios = [a / b for a, b in zip((*ideal, *bounds), times * 2, strict=True)]
        shares = [f"{ratio:5.2f}" for ratio in ratios]
        names = (groups.transport.name, pack, plan_name, comm_type)
        numbers = (*(x * 1e3 for x in times), *ratios, *(x * 1e6 for x in host))
        args.json.add(dict(zip(COLUMNS, (*names, *numbers), strict=True)))
        print(
            f"{groups.transport.name:9} {pack:14} {plan_name:9} {comm_type:16} "
            f"{times[0] * 1e3:7.2f} {times[1] * 1e3:7.2f} {shares[0]:>8} {shares[1]} "
            f"{shares[2]:>8} {shares[3]} {host[0] * 1e6:9.0f} {host[1] * 1e6:5.0f}",
            flush=True,
        )


def make_layer(
    args: argparse.Namespace,
    plan: hcp.Plan,
    micro_batch: int,
    groups: hcp.ProcessGroups,
    comm_type: str,
) -> Layer:
    cls = hcp.get_cp_handler_cls(args.backend)
    cp = cls(plan, micro_batch, groups.transport, comm_types=[steps_of(comm_type)])
    queries, keys = args.heads
    query, key, value, grad = (
        randn(cp.rows, count, groups.transport.device) for count in (queries, keys, keys, queries)
    )
    for tensor in (query, key, value):
        tensor.requires_grad_()
    attention: shipped.Attention = cp.attention
    if comm_type == "ring":
        attention = OnRing(cp, torch.bfloat16, cls.kernel_family).attention
    elif comm_type in shipped.MODULES:
        attention = shipped.attention_of(comm_type, cp, args.backend)
    return Layer(cp, attention, query, key, value, grad)


def steps_of(comm_type: str) -> str:
    """hcp's comm type with the same exchanges."""
    return comm_type if comm_type in hcp.COMM_TYPES else "p2p"


def randn(rows: int, heads: int, device: torch.device) -> Tensor:
    return torch.randn(rows, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)


def run(layers: list[Layer], backward: bool) -> None:
    for layer in layers:
        with torch.set_grad_enabled(backward):
            out = layer.attention(layer.query, layer.key, layer.value)
        if backward:
            torch.autograd.grad(out, (layer.query, layer.key, layer.value), layer.grad)


def check(layers: list[Layer]) -> None:
    """The rows that a rank has of the first sequence, against the formula over all of it."""
    for layer in layers:
        with torch.no_grad():
            out = layer.attention(layer.query, layer.key, layer.value)
        if layer.cp.degree == 0:
            continue
        whole = [gathered(layer.cp, x.detach()) for x in (layer.key, layer.value)]
        rows = slice(0, int(layer.cp.cu_seqlens[1]))
        positions = layer.cp.position_ids[rows][-64:]
        length = layer.cp.layout.lengths[0]
        query, (key, value) = layer.query.detach()[rows][-64:], (x[:length] for x in whole)
        groups = query.shape[1] // key.shape[1]
        scores = (
            torch.einsum("qhd,khd->hqk", query.float(), key.float().repeat_interleave(groups, 1))
            / HEAD_DIM**0.5
        )
        hidden = torch.arange(length, device=query.device) > positions.unsqueeze(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, value.float().repeat_interleave(groups, 1))
        error = float((out[rows][-64:].float() - expected).abs().max())
        if not error <= 0.02:
            raise SystemExit(
                f"rank {dist.get_rank()}: the output is off by {error}, expected <= 0.02"
            )


def gathered(cp: ContextParallelHandler, x: Tensor) -> Tensor:
    """Whole sequences of the group, all heads: by heads for sequence, one head after the other."""
    own = cp.sequence_to_head(x)
    if cp.degree == 1:
        return own
    rows = int(cp.whole_cu_seqlens[-1])
    parts = [torch.zeros(rows, x.shape[1], HEAD_DIM, device=x.device, dtype=x.dtype)]
    parts[0][:, cp.head_slice(x.shape[1])] = own
    ranks = range(cp.layout.first_rank, cp.layout.first_rank + cp.degree)
    group = subgroup(tuple(ranks))
    dist.all_reduce(parts[0], group=group)
    return parts[0]


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def make_subgroups(plan: hcp.Plan) -> None:
    """The process groups of a plan's groups, on every rank, in the plan's order.

    Also those that this rank is no part of: an NCCL group that was bound to its device is split
    from its parent, for which it waits for every rank of the parent.
    """
    for groups in plan.micro_batches:
        for first, degree in ((group.first_rank, group.degree) for group in groups):
            ranks = tuple(range(first, first + degree))
            if 1 < degree < dist.get_world_size() and ranks not in _groups:
                _groups[ranks] = dist.new_group(list(ranks), timeout=TIMEOUT)


def subgroup(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    return world() if len(ranks) == dist.get_world_size() else _groups[ranks]


# ---- yardsticks ----------------------------------------------------------------------------------


class Alone:
    """The whole pack on one GPU, by one call where a kernel takes packs."""

    def __init__(
        self, lengths: list[int], heads: list[int], device: torch.device, choice: Choice
    ) -> None:
        rows = sum(lengths)
        self.query, self.grad = (randn(rows, heads[0], device) for _ in range(2))
        self.key, self.value = (randn(rows, heads[1], device) for _ in range(2))
        self.kernel = kernel_for(device, torch.bfloat16, choice)
        entries, row = [], 0
        for length in lengths:
            entries.append(Entry(row, length, row, length, 1 - length, 0))
            row += length
        self.launches = self.kernel.launches(entries)

    def run(self, backward: bool) -> None:
        for launch in self.launches:
            q, k = launch.queries, launch.keys
            rows = self.query[q], self.key[k], self.value[k]
            out, lse = self.kernel.forward(launch, *rows, HEAD_DIM**-0.5)
            if backward:
                tensors = (*rows, out, lse)
                self.kernel.backward(launch, self.grad[q], None, *tensors, HEAD_DIM**-0.5)


class OwnCalls:
    """A rank's kernel calls alone, on keys that lie there."""

    def __init__(self, layer: Layer, comm_type: str, choice: Choice) -> None:
        self.layer = layer
        self.kernel = kernel_for(layer.query.device, layer.query.dtype, choice)
        schedule = Schedule(
            layer.cp._schedules.words_of(
                steps_of(comm_type), -1, 0, (layer.query.shape[1], layer.key.shape[1])
            )
        )
        self.launches: list[tuple[Launch, Tensor, Tensor]] = []
        with torch.no_grad():
            key, value = layer.key.detach(), layer.value.detach()
            for stage, launches in zip(
                schedule.stages, launches_of(schedule, self.kernel).stages, strict=True
            ):
                if stage.first_entry > 0:
                    key, value = (
                        torch.randn(stage.key_rows, *x.shape[1:], dtype=x.dtype, device=x.device)
                        for x in (key, value)
                    )
                self.launches += [
                    (launch, key[launch.keys], value[launch.keys]) for launch in launches
                ]

    def run(self, backward: bool) -> None:
        query, grad = self.layer.query.detach(), self.layer.grad
        for launch, key, value in self.launches:
            rows = query[launch.queries]
            out, lse = self.kernel.forward(launch, rows, key, value, HEAD_DIM**-0.5)
            if backward:
                tensors = (rows, key, value, out, lse)
                self.kernel.backward(launch, grad[launch.queries], None, *tensors, HEAD_DIM**-0.5)


def run_alone(layers: list[OwnCalls], backward: bool) -> None:
    for layer in layers:
        layer.run(backward)


def bytes_received(layer: Layer, comm_type: str, kv_heads: int) -> int:
    schedule = Schedule(
        layer.cp._schedules.words_of(
            steps_of(comm_type), -1, 0, (layer.query.shape[1], layer.key.shape[1])
        )
    )
    rows = sum(move.rows for move in schedule.receives)
    return rows * 2 * kv_heads * HEAD_DIM * 2


def copy_rate(device: torch.device, rounds: int) -> float:
    """Bytes per second that each GPU copies from the next one's memory, all at once; a CPU from its
    own."""
    size = 2**22 if device.type == "cpu" else 2**27
    if device.type == "cpu":
        source = torch.empty(size, dtype=torch.uint8)
    else:
        from torch.distributed import _symmetric_memory as symmetric

        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, world())
        peer = (dist.get_rank() + 1) % dist.get_world_size()
        source = handle.get_buffer(peer, (size,), torch.uint8)
    target = torch.empty_like(source, device=device)
    return size / times_of({"copy": lambda: target.copy_(source)}, device, rounds)[0]


# ---- times ---------------------------------------------------------------------------------------


def times_of(
    steps: dict[str, Step], device: torch.device, rounds: int, calls: int = LAYERS
) -> list[float]:
    """Seconds of one of several calls of each."""
    clock = partial(timed, device=device, calls=calls)
    return list(by_turns(steps, device, clock, rounds).values())


def host_times(layers: list[Layer], device: torch.device, rounds: int) -> list[float]:
    """Seconds that the host needs to queue one layer, forward and backward."""
    taken = [host_time(layer, device) for _ in range(rounds) for layer in layers]
    return [slowest(statistics.median(times), device) for times in zip(*taken, strict=True)]


def host_time(layer: Layer, device: torch.device) -> tuple[float, float]:
    out: list[Tensor] = []
    inputs = (layer.query, layer.key, layer.value)
    forward = queued(lambda: out.append(layer.attention(*inputs)), device)
    return forward, queued(lambda: torch.autograd.grad(out, inputs, [layer.grad]), device)


if __name__ == "__main__":
    sys.exit(main())
