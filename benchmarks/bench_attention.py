"""One attention layer of every comm type and transport, against its own kernels and its bytes.

    torchrun --nproc-per-node 8 benchmarks/bench_attention.py [--heads 32 8] [--backend torch]
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/bench_attention.py --device cpu

A pack of sequences is computed causally, forward and backward, by a plan of each fixed CP degree of
--degrees and by hcp's own plan ("dynamic"). These plans price attention alone, at the rates of the
kernel and of copies that this run measures. Two yardsticks are also measured in the run:

    ideal   one rank computes the whole pack, alone, in one call where the kernel takes packs; its
            time / ranks
    bound   on the busiest rank, the larger of two times: its kernel calls alone, on keys that are
            there; and the bytes that it receives, at the rate of a plain copy from a peer's memory

A share is yardstick / time: 1 is the limit. With more ranks than cores, as on many a CPU, no share
of the ideal reaches 1. A time is the slowest rank's, of several layers one after the other as in a
model; of --rounds, in which all contestants of a pack take turns, the median counts, or, with
--take min on a machine that others use as well, the fastest. "host us" is the host's time to queue
one layer on a GPU. Every contestant's output and gradients are compared with one rank's before it
is timed.

Contestants are named by their comm type, and in brackets by what a group made of it. The others:

    ring    ring attention with per-document splitting, on torch's point-to-point calls: see
            benchmarks/peers/ring.py. Its sequences are padded for it
    te_*    Transformer Engine's context parallelism by this comm type over all ranks, with cuDNN's
            attention, and te_*_fa4 with FlashAttention-4 (mended: see peers/te_kernels.py), where
            they are installed. Its sequences are padded too
    shipped what others ship (benchmarks/peers/shipped.py), where it is installed and takes the pack

Below the table a line for each pack compares hcp's dynamic plan with its best forced degree, over
all comm types and transports, and with the fastest of Transformer Engine: their ms f+b over its.

--backend names the kernels of all, yardsticks included; "cudnn" has none for `all_gather`. The
packs P1, P2 and P4 are the first sequences of a batch of these families, half of --tokens for each
rank. --host and --alone print other tables, in one process without torchrun: see
common/host_time.py and common/alone.py.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist
from common.alone import print_alone
from common.families import BY_NAME
from common.flags import end_after, filled, parser_of
from common.host_time import print_call_times, print_host_times
from common.layers import (
    PACKS,
    Attention,
    Layer,
    OwnCalls,
    Sizes,
    Whole,
    bytes_received,
    layer_of,
    prices_of,
    rows_for,
    run_of,
)
from common.machine import hardware
from common.timing import (
    Step,
    by_turns,
    copy_rate,
    device_of,
    end_ranks,
    queued,
    slowest,
    start_ranks,
    timed,
)
from peers import shipped
from peers.ring import OnRing, padded
from torch import Tensor

import hcp
from hcp._words import CommType
from hcp.attention.comm_types import A2A_P2P, ALL_GATHER, AUTO, P2P
from hcp.attention.kernels import KernelChoice
from hcp.step.handler import ContextParallelHandler

FAMILIES = ("P1", "P2", "P4")
PEERS = ("ring", *shipped.MODULES)
CALLS = 4
TIMEOUT = timedelta(seconds=60)
TAKE: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "min": min}
DEFAULTS = {
    "tokens": (4096, 65_536),
    "heads": ([8, 4], [32, 8]),
    "head_dim": (64, 128),
    "dtype": ("float32", "bfloat16"),
    "transports": (["torch"], ["peer", "nccl", "torch"]),
}
"""On a CPU, on GPUs."""


def arguments() -> argparse.Namespace:
    parser = parser_of(
        __doc__, device="cuda", rounds=None, rounds_help="(5; with --host 100)", deadline=590
    )
    parser.add_argument("--tokens", type=int, help="of a pack (CPU: 4096, CUDA: 65536)")
    parser.add_argument(
        "--heads",
        type=int,
        nargs=2,
        metavar=("QUERY", "KEY"),
        help="(CPU: 8 4, CUDA: 32 8)",
    )
    parser.add_argument("--head-dim", type=int, help="(CPU: 64, CUDA: 128)")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"))
    parser.add_argument("--backend", default="auto", help="kernels, as of get_cp_handler_cls")
    parser.add_argument("--types", nargs="+", choices=hcp.COMM_TYPES, default=hcp.COMM_TYPES)
    parser.add_argument("--degrees", nargs="+", type=int, help="(that of all ranks)")
    parser.add_argument("--transports", nargs="+", help="(CPU: torch, CUDA: peer nccl torch)")
    names = [*PACKS, *FAMILIES]
    parser.add_argument("--packs", nargs="+", choices=names, default=names, metavar="PACK")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=PEERS, help="others to compare with (all)"
    )
    parser.add_argument("--take", choices=TAKE, default="median", help="of the rounds")
    parser.add_argument(
        "--host", action="store_true", help="print the host's time of a layer and of a call alone"
    )
    parser.add_argument(
        "--alone", action="store_true", help="print each rank's time without an exchange"
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (100 if args.host else 5)
    return filled(args, DEFAULTS)


def main() -> int:
    args = arguments()
    if args.host:
        end_after(args.deadline)
        torch.set_num_threads(1)
        device = device_of(args.device)
        print_host_times(device, args.degrees or (1, 2, 4, 8), args.types, args.rounds, args.json)
        print_call_times(device, args.backend, getattr(torch, args.dtype), args.rounds, args.json)
        return 0
    sizes = partial(Sizes.of, args)
    if args.alone:
        end_after(args.deadline)
        packs = {name: PACKS[name](args.tokens) for name in args.packs if name in PACKS}
        types = [name for name in args.types if name in (P2P, ALL_GATHER)]
        given = packs, args.degrees or [4], types, sizes(device_of(args.device))
        print_alone(*given, args.backend, args.rounds, args.json)
        return 0
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    ranks = dist.get_world_size()
    args.degrees = args.degrees or [ranks]
    rate = copy_rate(device, args.rounds)
    domains = {
        name: hcp.build_process_groups(transport=name, timeout=TIMEOUT) for name in args.transports
    }
    packs = {name: lengths_of(name, args.tokens) for name in args.packs}
    bench = Bench(args, sizes(device), domains, rate, next(iter(packs.values())))
    if dist.get_rank() == 0:
        print_head(bench, packs)
    for name, lengths in packs.items():
        own = list(bench.contestants(lengths))
        bench.compare(name, [*own, *bench.engines(name, own[0].whole)])
    last = [peer for peer in shipped.MODULES if peer not in shipped.TRANSFORMER_ENGINE]
    for peer in last:  # since what others ship may end all
        for name, lengths in packs.items() if peer in args.peers else ():
            bench.compare_shipped(name, lengths, peer)
    if dist.get_rank() == 0:
        print("\n" + "\n".join(bench.notes))
    for groups in domains.values():
        groups.close()
    end_ranks()
    return 0


# ---- packs ---------------------------------------------------------------------------------------


def lengths_of(pack: str, tokens: int) -> list[int]:
    return PACKS[pack](tokens) if pack in PACKS else drawn(pack, tokens)


def drawn(family: str, tokens: int) -> list[int]:
    """Sequences of a family, none longer than all ranks hold at a quarter of the tokens each."""
    ranks, capacity = dist.get_world_size(), tokens // 4
    scale = max(1, 65_536 // tokens)
    scaled = (max(1, length // scale) for length in BY_NAME[family].draw(Random(1)))
    lengths = [min(length, ranks * capacity) for length in scaled]
    sums = itertools.accumulate(lengths)
    return lengths[: max(1, sum(total <= 2 * ranks * capacity for total in sums))]


def brief(lengths: Sequence[int]) -> str:
    same = len(set(lengths)) == 1
    return f"{len(lengths)} x {lengths[0]}" if same else f"{len(lengths)}, {max(lengths)} at most"


# ---- contestants ---------------------------------------------------------------------------------


class Contestant(NamedTuple):
    """The layers of a plan's micro-batches, with their yardsticks."""

    transport: str
    plan: str
    name: str
    whole: Whole
    layers: list[Layer]
    calls: list[OwnCalls]
    received: tuple[int, int]
    """Bytes that this rank receives, forward and in both passes."""

    @property
    def is_hcp(self) -> bool:
        return self.name not in PEERS


class Bench:
    """State that the measurements of all packs share."""

    def __init__(
        self,
        args: argparse.Namespace,
        sizes: Sizes,
        domains: dict[str, hcp.ProcessGroups],
        rate: float,
        first: Sequence[int],
    ) -> None:
        """``first``: the pack that measures how fast a rank computes, for the plans' prices."""
        self.args, self.sizes, self.domains, self.rate = args, sizes, domains, rate
        self.ranks = dist.get_world_size()
        self.notes: list[str] = []
        """Lines below the table."""
        self.handler = hcp.get_cp_handler_cls(args.backend)
        prices = prices_of(sizes, self._flops(first), rate)
        self.cost = replace(prices, token=0)  # nothing but attention is computed here

    def contestants(self, lengths: list[int]) -> Iterator[Contestant]:
        whole = self._whole(lengths)
        for name, groups in self.domains.items():
            for degree in self.args.degrees:
                plan = self._plan(lengths, degree)
                for comm_type in filter(partial(takes, degree), self.args.types):
                    levels = levels_of(degree) if comm_type == A2A_P2P else ()
                    yield self._contestant(groups, whole, plan, comm_type, degree, levels)
            comm_type = AUTO if AUTO in self.args.types else self.args.types[0]
            yield self._contestant(groups, whole, self._plan(lengths), comm_type)
            if name == "torch" and "ring" in self.args.peers:
                cut = [padded(n, self.ranks) for n in lengths]
                yield self._peer(groups, whole if cut == lengths else self._whole(cut), "ring")

    def engines(self, pack: str, whole: Whole) -> Iterator[Contestant]:
        """Transformer Engine's contestants. One that refuses the pack, or is wrong, is noted."""
        cut = [padded(n, self.ranks) for n in whole.lengths]
        groups, device = next(iter(self.domains.values())), self.sizes.device
        names = [
            name
            for name in shipped.TRANSFORMER_ENGINE
            if name in self.args.peers and shipped.takes(name, cut, device)
        ]
        if names and cut != whole.lengths:
            whole = self._whole(cut)
        for name in names:
            failed, one = "", None
            try:
                one = self._peer(groups, whole, name)
            except (Exception, SystemExit) as error:
                failed = f"{type(error).__name__}: {str(error)[:300]}"
            if slowest(float(one is None), device):
                self.notes.append(f"{pack}: without {name}, {failed or 'which failed on a rank'}")
            elif one is not None:
                yield one._replace(transport="its own")

    def compare(self, pack: str, given: Iterable[Contestant]) -> None:
        """Let contestants take turns, and print a row of each."""
        contestants = list(given)
        wholes = {id(one.whole): one.whole for one in contestants}
        steps: dict[str, Step] = {}
        for key, whole in wholes.items():
            steps[f"{key} f"] = whole.forward if dist.get_rank() == 0 else nothing
            steps[f"{key} f+b"] = whole.both if dist.get_rank() == 0 else nothing
        for i, one in enumerate(contestants):
            for what, work in (("layers", one.layers), ("calls", one.calls)):
                steps[f"{i} {what} f"] = partial(each, [step.forward for step in work])
                steps[f"{i} {what} f+b"] = partial(each, [step.both for step in work])
        device = self.sizes.device
        clock = partial(timed, device=device, calls=CALLS)
        times = by_turns(steps, device, clock, self.args.rounds, take=TAKE[self.args.take])
        for i, one in enumerate(contestants):
            moved = [slowest(count, device) / self.rate for count in one.received]
            taken, alone, ideal = (
                [times[f"{key} {part}"] for part in ("f", "f+b")]
                for key in (f"{i} layers", f"{i} calls", id(one.whole))
            )
            shares = [t / self.ranks / own for t, own in zip(ideal, taken, strict=True)]
            shares += [
                max(calls, copies) / own
                for calls, copies, own in zip(alone, moved, taken, strict=True)
            ]
            self._print(pack, one, taken, shares, host_times(one.layers, device, self.args.rounds))
        both = [(one, times[f"{i} layers f+b"]) for i, one in enumerate(contestants)]
        self._note_verdict(pack, both)

    def _note_verdict(self, pack: str, taken: Sequence[tuple[Contestant, float]]) -> None:
        """Note how the dynamic plan does beside the best forced degree and the best of Transformer
        Engine, by their seconds of both passes."""
        own = [(one, seconds) for one, seconds in taken if one.is_hcp]
        dynamic = [pair for pair in own if pair[0].plan == "dynamic"]
        others = {
            "best forced": [pair for pair in own if pair[0].plan != "dynamic"],
            "best of Transformer Engine": [
                pair for pair in taken if pair[0].name in shipped.TRANSFORMER_ENGINE
            ],
        }
        if not dynamic:
            return
        best, seconds = min(dynamic, key=lambda pair: pair[1])
        text = f"{pack}: dynamic {seconds * 1e3:.2f} ms on {best.transport}"
        row: dict[str, object] = {"pack": pack, "dynamic ms f+b": seconds * 1e3}
        for what, pairs in others.items():
            if pairs:
                one, theirs = min(pairs, key=lambda pair: pair[1])
                name = f"{one.name}, {one.plan}, {one.transport}"
                text += f"; {what} {theirs * 1e3:.2f} ({name}): {theirs / seconds:.3f} x"
                row |= {what: name, f"{what} over dynamic": theirs / seconds}
        self.notes.append(text)
        if dist.get_rank() == 0:
            self.args.json.add(row)

    def compare_shipped(self, pack: str, lengths: list[int], peer: str) -> None:
        """Compare what others ship. Print why, where it does not run, on all ranks alike."""
        groups, device = self.domains.get("torch"), self.sizes.device
        cut = [padded(n, self.ranks) for n in lengths]
        if groups is None or not shipped.takes(peer, cut, device):
            return
        try:
            with shipped.running(peer, cut[0], self.ranks, device):
                self.compare(pack, [self._peer(groups, self._whole(cut), peer)])
        except Exception as error:
            if dist.get_rank() == 0:
                print(f"{peer}: {pack}: {type(error).__name__}: {str(error).splitlines()[:1]}")

    def _flops(self, lengths: Sequence[int]) -> float:
        """Operations that one rank's kernel computes in a second, forward and backward."""
        whole, device = self._whole(lengths), self.sizes.device
        clock = partial(timed, device=device, calls=1)
        seconds = by_turns({"both": whole.both}, device, clock, self.args.rounds)["both"]
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return 3.5 * 4 * pairs * self.sizes.heads * self.sizes.head_dim / seconds

    def _whole(self, lengths: Sequence[int]) -> Whole:
        return Whole(lengths, self.sizes, KernelChoice(self.handler.kernel_family))

    def _plan(self, lengths: Sequence[int], degree: int | None = None) -> hcp.Plan:
        return hcp.plan(
            lengths,
            ranks=self.ranks,
            max_tokens_per_rank=rows_for(lengths, self.args.tokens, degree or self.ranks),
            min_degree=degree or 1,
            max_degree=degree,
            cost=self.cost,
        )

    def _contestant(
        self,
        groups: hcp.ProcessGroups,
        whole: Whole,
        plan: hcp.Plan,
        comm_type: CommType,
        degree: int | None = None,
        levels: Sequence[int] = (),
        attention_of: Callable[[ContextParallelHandler], Attention] | None = None,
        name: str | None = None,
    ) -> Contestant:
        """A contestant, whose layers have been checked. ``attention_of``: in place of hcp's."""
        layers, runs = [], []
        for m in range(len(plan.micro_batches)):
            cp = self.handler(
                plan,
                m,
                groups.transport,
                comm_types=[comm_type],
                hierarchical_context_parallel_sizes=levels,
            )
            what = f"{name or comm_type} on {groups.transport.name}"
            own = layer_of(what, whole, cp, cp.attention)
            runs.append(run_of(cp, comm_type, self.sizes))
            layers.append(layer_of(what, whole, cp, attention_of(cp)) if attention_of else own)
        used = runs[0].schedule.comm_type
        received = [bytes_received(run, self.sizes) for run in runs]
        return Contestant(
            groups.transport.name,
            f"degree {degree}" if degree else "dynamic",
            name or (comm_type if comm_type == used else f"{comm_type} ({used})"),
            whole,
            layers,
            [OwnCalls(run, self.sizes) for run in runs],
            (sum(forward for forward, _ in received), sum(both for _, both in received)),
        )

    def _peer(self, groups: hcp.ProcessGroups, whole: Whole, name: str) -> Contestant:
        """Attention of others, whose sequences fill their chunks, with hcp's ring as the bound."""
        plan = self._plan(whole.lengths, self.ranks)

        def attention_of(cp: ContextParallelHandler) -> Attention:
            if name == "ring":
                return OnRing(cp, self.sizes.dtype, self.handler.kernel_family).attention
            return shipped.attention_of(name, cp, self.args.backend)

        given = groups, whole, plan, P2P, self.ranks
        return self._contestant(*given, attention_of=attention_of, name=name)

    def _print(
        self,
        pack: str,
        one: Contestant,
        taken: Sequence[float],
        shares: Sequence[float],
        host: Sequence[float],
    ) -> None:
        if dist.get_rank() > 0:
            return
        names = pack, one.transport, one.plan, one.name
        numbers = *(t * 1e3 for t in taken), *shares, *(t * 1e6 for t in host)
        self.args.json.add(dict(zip(COLUMNS, (*names, *numbers), strict=False)))
        cells = *(f"{t * 1e3:.2f}" for t in taken), *(f"{share:.2f}" for share in shares)
        cells += tuple(f"{t * 1e6:.0f}" for t in host) or ("-", "-")
        print(f"| {' | '.join((*names, *cells))} |", flush=True)


def takes(degree: int, comm_type: str) -> bool:
    """Whether both levels of "a2a+p2p" have something to do."""
    return comm_type != A2A_P2P or min(levels_of(degree)) > 1


def levels_of(degree: int) -> tuple[int, int]:
    """An inner level as near to the square root as a divisor is."""
    inner = max(m for m in range(1, degree + 1) if degree % m == 0 and m * m <= degree)
    return inner, degree // inner


def nothing() -> None:
    """Do nothing, while one rank works alone."""


def each(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()


def host_times(layers: list[Layer], device: torch.device, rounds: int) -> list[float]:
    """Seconds that the host needs to queue one layer, forward and backward; on a CPU, nothing."""
    if device.type == "cpu":
        return []
    taken = [host_time(layer, device) for _ in range(rounds) for layer in layers]
    return [slowest(statistics.median(times), device) for times in zip(*taken, strict=True)]


def host_time(layer: Layer, device: torch.device) -> tuple[float, float]:
    out: list[Tensor] = []
    forward = queued(lambda: out.append(layer.attention(*layer.inputs)), device)
    backward = queued(lambda: torch.autograd.grad(out, layer.inputs, [layer.grad]), device)
    return forward, backward


# ---- the table -----------------------------------------------------------------------------------

COLUMNS = (
    *("pack", "transport", "plan", "comm type", "ms f", "ms f+b", "of ideal f", "of ideal f+b"),
    *("of bound f", "of bound f+b", "host us f", "host us b"),
)


def print_head(bench: Bench, packs: dict[str, list[int]]) -> None:
    args = bench.args
    print(
        f"{bench.ranks} ranks on {hardware(args.device)}, torch {torch.__version__}, hcp "
        f"{hcp.__version__}; heads {args.heads[0]}:{args.heads[1]} of {args.head_dim}, "
        f"{args.dtype}, causal, backend {args.backend}; {args.take} of {args.rounds} rounds; "
        f"{'copy' if args.device == 'cpu' else 'peer copy'} {bench.rate / 1e9:.3g} GB/s"
    )
    for name, lengths in packs.items():
        print(f"{name}: {brief(lengths)}")
    for peer in shipped.MODULES:
        if obstacle := shipped.obstacle(peer, bench.sizes.device):
            print(f"without {peer}: {obstacle}")
    print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
