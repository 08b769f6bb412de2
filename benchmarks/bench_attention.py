"""Attention of one layer by each comm type.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/bench_attention.py

Packs of --tokens tokens are computed causally by the first d ranks, for every degree d up to the
number of ranks, forward and backward. Every rank checks its rows of the output and of all gradients
against PyTorch's attention over the whole sequences before anything is timed. Contestants then take
turns in one run: each time is the slowest rank's, and the median of --rounds counts, or, with
--take min for a machine that others use as well, the fastest. Columns:

    type        the comm type; in brackets what a group made of it (cp.comm_choices). a2a+p2p where
                both levels can work
    outside     1 - the kernel's time / ours: what exchange, packing, merging and Python take. The
                kernel's time is that of the same calls of the same kernel, by the same ranks at
                once, on buffers that are there
    of ideal    (one rank's kernel time for the whole pack, alone on the machine / d) / ours. With
                more ranks than cores (GPUs: never) 1 is out of reach
    vs torch    PyTorch's own ring attention's time / ours: _templated_ring_attention with the
                operator of this device; - where it cannot run: see the last lines
    spread      (slowest - fastest round) / median, forward and backward

fwd is the forward, f+b both.

--host prints another table, in one process without torchrun: see host_time.py.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common.flags import end_after, parser_of
from common.host_time import print_host_times
from common.machine import hardware
from torch import Tensor

import hcp
from hcp.attention import comm_types as comm
from hcp.attention.head_exchange import key_heads, split
from hcp.attention.kernels import Choice, Launch, kernel_for
from hcp.exchange.tables import Schedule, schedule_words
from hcp.planning.cost import PRICES

# B sequences, T rows on this rank, H query heads, G key-value heads, D head size

CAUSAL = (-1, 0)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Contestant(NamedTuple):
    """Something to time on the ranks of a group. ``forward`` gives what ``backward`` takes."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


def packs(tokens: int) -> dict[str, list[int]]:
    """One sequence, halves of halves, and equal ones of two sizes."""
    halves = [tokens >> i for i in range(1, 10)]
    return {
        f"1 x {tokens}": [tokens],
        f"8 x {tokens // 8}": [tokens // 8] * 8,
        f"{halves[0]}, {halves[1]}, ... {halves[-1]}": [*halves, halves[-1]],
        f"64 x {tokens // 64}": [tokens // 64] * 64,
    }


# ---- data ----------------------------------------------------------------------------------------


class Data:
    """Queries, keys, values and a gradient of whole sequences, the same on every rank, with the
    answers: output and three gradients."""

    def __init__(self, lengths: list[int], sizes: Sizes) -> None:
        generator = torch.Generator().manual_seed(1)
        counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
        self.lengths, self.sizes = lengths, sizes
        self.whole = [
            torch.randn(sum(lengths), count, sizes.head_dim, generator=generator).to(
                sizes.device, sizes.dtype
            )
            for count in counts
        ]

    def answers(self) -> list[Tensor]:
        parts = []
        for sequence in zip(*(x.split(self.lengths) for x in self.whole), strict=True):
            q, k, v = (x.clone().requires_grad_() for x in sequence[:3])
            q_, k_, v_ = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=True)
            out = out.squeeze(0).transpose(0, 1)
            out.backward(sequence[3])
            parts.append((out.detach(), q.grad, k.grad, v.grad))
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    def local(self, layout: hcp.Layout, x: Tensor) -> Tensor:
        """This rank's rows."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0)[:-1]
        counts = layout.cu_seqlens.diff()
        rows = layout.positions + starts.repeat_interleave(counts)
        return x[rows.to(x.device)]


def check(name: str, found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for part, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        error = float((one - other).abs().max()) if one.numel() else 0.0
        assert error <= TOLERANCE[dtype], f"{name}: error of {part} is {error:.1e}"


# ---- contestants ---------------------------------------------------------------------------------


def one_group(lengths: list[int], degree: int, ranks: int, cost: hcp.CostModel) -> hcp.Plan:
    group = {"first_rank": 0, "degree": degree, "sequences": list(range(len(lengths)))}
    return hcp.Plan.from_dict(
        {
            "ranks": ranks,
            "max_tokens_per_rank": sum(lengths),
            "lengths": lengths,
            "cost": {name: getattr(cost, name) for name in PRICES},
            "micro_batches": [{"groups": [group]}],
        }
    )


def by_hcp(
    cp: hcp.ContextParallelHandler, data: Data, wanted: list[Tensor], comm_type: str
) -> Contestant:
    *inputs, grad = (data.local(cp.layout, x) for x in data.whole)
    leaves = [x.requires_grad_() for x in inputs]

    def forward() -> Tensor:
        out: Tensor = cp.attention(*leaves, comm_type=comm_type)
        return out

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad)

    out = forward()
    local = [data.local(cp.layout, x) for x in wanted]
    check(f"{comm_type} on {cp.degree}", [out.detach(), *backward(out)], local, data.sizes.dtype)
    return Contestant(forward, backward)


def kernel_alone(schedule: Schedule, rank: int, sizes: Sizes) -> Contestant:
    """A schedule's launches, with this rank's share of the heads, on buffers that are there."""
    kernel = kernel_for(sizes.device, sizes.dtype, Choice())
    heads, kv_heads = sizes.heads, sizes.kv_heads
    if schedule.trade is not None:
        members = [move.peer for move in schedule.trade.receives]
        own = split(heads, len(members))[members.index(rank)]
        keys = key_heads(own, heads // kv_heads)
        heads, kv_heads = own.stop - own.start, keys.stop - keys.start

    def buffer(rows: int, count: int) -> Tensor:
        shape = rows, count, sizes.head_dim
        return torch.randn(*shape, dtype=torch.float32, device=sizes.device).to(sizes.dtype)

    query, grad = (buffer(schedule.query_rows, heads) for _ in range(2))
    scale = sizes.head_dim**-0.5
    work: list[tuple[Launch, Tensor]] = []
    for stage in schedule.stages if heads else []:
        stage_keys = buffer(stage.key_rows, kv_heads)
        work += [(launch, stage_keys[launch.keys]) for launch in kernel.launches(stage.entries)]

    def forward() -> list[tuple[Tensor, Tensor]]:
        return [kernel.forward(launch, query[launch.queries], k, k, scale) for launch, k in work]

    def backward(results: list[tuple[Tensor, Tensor]]) -> None:
        for (launch, k), (out, lse) in zip(work, results, strict=True):
            rows = launch.queries
            kernel.backward(launch, grad[rows], None, query[rows], k, k, out, lse, scale)

    return Contestant(forward, backward)


class TorchRing:
    """PyTorch's ring attention: equal sequences, divisible by 2 d."""

    name = "torch"

    def __init__(self) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        self.ring = _attention
        self.ring._cp_options.enable_load_balance = True
        # float64 would fall to float32's rounding otherwise.
        self.ring._cp_options.convert_to_f32 = False

    def why_not(self, data: Data, degree: int) -> str:
        if data.sizes.device.type != "cpu":
            return "the operator for this device is not wired"
        if len(set(data.lengths)) > 1 or data.lengths[0] % (2 * degree):
            return "its sequences must be equally long, and divisible by 2 d"
        return "" if degree > 1 else "degree 1"

    def contestant(
        self, group: dist.ProcessGroup, layout: hcp.Layout, data: Data, wanted: list[Tensor]
    ) -> Contestant:
        def batched(x: Tensor) -> Tensor:
            """(B, H, T / B, D)"""
            return data.local(layout, x).unflatten(0, (len(data.lengths), -1)).transpose(1, 2)

        query, key, value, grad = (batched(x).contiguous() for x in data.whole)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

        def forward() -> tuple[Tensor, Tensor]:
            out, lse, *_ = self.ring._templated_ring_attention(
                group, 2, flash, query, key, value, is_causal=True
            )
            return out, lse

        def gradients(*, grad_out: Tensor, is_causal: bool, **given: Tensor) -> tuple[Tensor, ...]:
            names = ("query", "key", "value", "out", "logsumexp")
            found: tuple[Tensor, ...] = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad_out, *(given[name] for name in names), 0.0, is_causal
                )
            )
            return found

        def backward(result: tuple[Tensor, Tensor]) -> list[Tensor]:
            found = self.ring._templated_ring_attention_backward(
                group, 2, gradients, grad, "grad_out", query, key, value, *result, is_causal=True
            )
            return list(found[:3])

        result = forward()
        found = [x.transpose(1, 2).flatten(0, 1) for x in (result[0], *backward(result))]
        check("torch", found, [data.local(layout, x) for x in wanted], data.sizes.dtype)
        return Contestant(forward, backward)


# ---- timing --------------------------------------------------------------------------------------


class Times(NamedTuple):
    forward: list[float]
    both: list[float]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(contestant: Contestant | None, device: torch.device) -> tuple[float, float]:
    """Seconds of the forward and of both, on the slowest rank. None: not this rank's."""
    dist.barrier()
    seconds = torch.zeros(2, dtype=torch.float64, device=device)
    if contestant is not None:
        wait(device)
        start = time.perf_counter()
        result = contestant.forward()
        wait(device)
        seconds[0] = time.perf_counter() - start
        contestant.backward(result)
        wait(device)
        seconds[1] = time.perf_counter() - start
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    forward, both = seconds.tolist()
    return forward, both


def compete(
    contestants: dict[str, Contestant | None], rounds: int, device: torch.device
) -> dict[str, Times]:
    """``rounds`` turns of each, after one that does not count."""
    times = {name: Times([], []) for name in contestants}
    for turn in range(rounds + 1):
        for name, contestant in contestants.items():
            forward, both = timed(contestant, device)
            if turn:
                times[name].forward.append(forward)
                times[name].both.append(both)
    return times


# ---- a degree of a pack --------------------------------------------------------------------------


def sizes_of_levels(degree: int) -> tuple[int, int]:
    """An inner level as near to the square root as a divisor is, so that both levels work."""
    inner = max(m for m in range(1, degree + 1) if degree % m == 0 and m * m <= degree)
    return inner, degree // inner


def contest(
    data: Data,
    wanted: list[Tensor],
    degree: int,
    args: argparse.Namespace,
    groups: hcp.ProcessGroups,
    peer: Peer,
) -> Iterator[list[str]]:
    """Rows of the table."""
    sizes, rank = data.sizes, dist.get_rank()
    plan = one_group(data.lengths, degree, dist.get_world_size(), cost_of(sizes))
    levels = sizes_of_levels(degree)
    cp = hcp.ContextParallelHandler(
        plan,
        0,
        groups.transport,
        comm_types=args.types,
        hierarchical_context_parallel_sizes=levels if comm.A2A_P2P in args.types else (),
    )
    mine = rank < degree
    contestants: dict[str, Contestant | None] = {
        "one rank": kernel_alone(schedule(data, 1, 0, comm.P2P, 1), 0, sizes) if rank == 0 else None
    }
    used = {}
    for name in args.types:
        # Rank 0 is in every group, and all ranks of a group choose alike.
        counts, packed = (sizes.heads, sizes.kv_heads), sizes.device.type == "cuda"
        layout = hcp.Layout(plan, 0, 0)
        choice = comm.choose(plan, layout, name, levels, CAUSAL, counts, packed)
        if name == comm.A2A_P2P and choice.used != name:
            continue
        used[name] = choice
        contestants[name] = by_hcp(cp, data, wanted, name) if mine else None
        kernel = schedule(data, degree, rank, choice.used, choice.inner) if mine else None
        contestants[f"kernel {name}"] = kernel_alone(kernel, rank, sizes) if kernel else None
    reason = peer.ring.why_not(data, degree)
    if not reason:
        group = peer.groups[degree]
        contestants["torch"] = (
            peer.ring.contestant(group, cp.layout, data, wanted) if mine else None
        )
    times = compete(contestants, args.rounds, sizes.device)
    for name, choice in used.items():
        yield row(name, choice, times, degree, args.take)


def schedule(data: Data, degree: int, rank: int, used: str, inner: int) -> Schedule:
    plan = one_group(data.lengths, degree, degree, hcp.CostModel())
    words = schedule_words(plan, 0, rank, used, inner=inner, window_size=CAUSAL, transport_key=0)
    return Schedule(words)


def cost_of(sizes: Sizes) -> hcp.CostModel:
    """Prices for "auto": a CPU core computes less per byte that it can send."""
    return hcp.CostModel.for_transformer(
        hidden_size=sizes.heads * sizes.head_dim,
        ffn_hidden_size=4 * sizes.heads * sizes.head_dim,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        bytes_per_element=sizes.dtype.itemsize,
        flops_per_byte=200 if sizes.device.type == "cpu" else 8_000,
    )


TAKE: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "min": min}


def row(
    name: str, choice: hcp.CommChoice, times: dict[str, Times], degree: int, take: str
) -> list[str]:
    own, kernel, alone = times[name], times[f"kernel {name}"], times["one rank"]

    def both(other: Times, scale: float = 1.0) -> list[float]:
        forward = scale * TAKE[take](other.forward) / TAKE[take](own.forward)
        return [forward, scale * TAKE[take](other.both) / TAKE[take](own.both)]

    outside = [1 - share for share in both(kernel)]
    peer = [f"{r:.2f}" for r in both(times["torch"])] if "torch" in times else ["-", "-"]
    spread = (max(own.both) - min(own.both)) / statistics.median(own.both)
    made = f"{choice.used} {choice.inner}" if choice.used == comm.A2A_P2P else choice.used
    return [
        name if made == name else f"{name} ({made})",
        *(f"{share:.2f}" for share in outside),
        *(f"{share:.2f}" for share in both(alone, 1 / degree)),
        *peer,
        f"{spread:.2f}",
    ]


# ---- the run -------------------------------------------------------------------------------------


class Peer(NamedTuple):
    ring: TorchRing
    groups: dict[int, dist.ProcessGroup]
    """The first d ranks."""


COLUMNS = (
    "degree",
    "type",
    *("outside, fwd", "outside, f+b"),
    *("of ideal, fwd", "of ideal, f+b"),
    *("vs torch, fwd", "vs torch, f+b"),
    "spread",
)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cpu", rounds=None, rounds_help="(9; with --host 100)")
    parser.add_argument("--tokens", type=int, help="of a pack (default: 4096; CUDA: 65536)")
    parser.add_argument("--heads", type=int, help="(default: 8; CUDA: 32)")
    parser.add_argument("--kv-heads", type=int, help="(default: 4; CUDA: 8)")
    parser.add_argument("--head-dim", type=int, help="(default: 64; CUDA: 128)")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"))
    parser.add_argument("--types", nargs="+", choices=hcp.COMM_TYPES, default=hcp.COMM_TYPES)
    parser.add_argument("--degrees", nargs="+", type=int, help="(default: all)")
    parser.add_argument(
        "--host", action="store_true", help="print the host's time of a layer alone"
    )
    parser.add_argument("--take", choices=TAKE, default="median", help="of the rounds")
    args = parser.parse_args()
    args.rounds = args.rounds or (100 if args.host else 9)
    for name, cpu, cuda in (
        ("tokens", 4096, 65_536),
        ("heads", 8, 32),
        ("kv_heads", 4, 8),
        ("head_dim", 64, 128),
        ("dtype", "float32", "bfloat16"),
    ):
        if getattr(args, name) is None:
            setattr(args, name, cpu if args.device == "cpu" else cuda)
    return args


def main() -> None:
    args = parse_args()
    end_after(args.deadline)
    device = torch.device(args.device)
    if args.host:
        torch.set_num_threads(1)
        print_host_times(device, args.degrees or (1, 2, 4, 8), args.types, args.rounds, args.json)
        return
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    ranks = dist.get_world_size()
    sizes = Sizes(args.heads, args.kv_heads, args.head_dim, getattr(torch, args.dtype), device)
    groups = hcp.build_process_groups(cp=ranks)
    groups.warm_up()
    degrees = [d for d in args.degrees or range(1, ranks + 1) if d <= ranks]
    peer = Peer(TorchRing(), {d: dist.new_group(list(range(d))) for d in degrees})
    if dist.get_rank() == 0:
        print(
            f"{ranks} ranks on {hardware(args.device)}, torch {torch.__version__}, "
            f"Python {platform.python_version()}; {args.dtype}, {args.heads} query heads, "
            f"{args.kv_heads} key-value heads of {args.head_dim}, "
            f"{args.take} of {args.rounds} rounds\n"
        )
    for name, lengths in packs(args.tokens).items():
        data = Data(lengths, sizes)
        wanted = data.answers()
        if dist.get_rank() == 0:
            print(f"\n### {name}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for degree in degrees:
            for cells in contest(data, wanted, degree, args, groups, peer):
                if dist.get_rank() == 0:
                    print(f"| {degree} | {' | '.join(cells)} |", flush=True)
                    args.json.add(
                        {"pack": name, **dict(zip(COLUMNS, (degree, *cells), strict=True))}
                    )
            reason = peer.ring.why_not(data, degree)
            if dist.get_rank() == 0 and reason and degree > 1:
                print(f"\nPyTorch's ring was not run at degree {degree}: {reason}.\n")
    groups.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
