"""Show where the time of cut sequences goes, kernel by kernel.

    torchrun --nproc-per-node 2 benchmarks/studies/cut_profile.py [--packs one halves] [--out FILE]
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/studies/cut_profile.py --device cpu

`benchmarks/bench_attention.py` says which share of the ideal an attention layer reaches. This
program says what the rest is: torch.profiler records a few layers of a pack, all of whose sequences
are cut over all ranks, forward and forward with backward. A layer's wall is the time from its first
kernel to its last one, of --calls layers one after the other. Results are checked first. On the
CPU, which has no kernels, outermost operators take their place: it shows that the program works.

The first table has a rank's microseconds of one layer, and their share of the wall:

    forward   attention kernels, and those of a backward: its main kernel, and (around) what runs
    backward  before and after it
    pack      hcp's kernels that pack, rotate and stage rows;  merge: those that merge and sum
    read      its kernel that reads peers' rows, in which it also waits for them. copy: copy
              engines. nccl: NCCL's kernels, which wait inside, too
    wait      its kernels that wait for peers' signals, or set them
    fill      memory set to a value;  torch: all other kernels
    idle      nothing runs.  over: more than one runs
    began     when the rank's first kernel began, after the first rank's

The second one splits what the rank with the longest wall lost against the ideal, (one GPU over the
whole pack) / ranks, in microseconds of a layer. Its columns add up to wall - ideal; where several
kernels run at once, the time is attention's before others'.

    gpu       this GPU alone over the whole pack, against rank 0's: GPUs differ. All are recorded at
              once; "ideal ms" is rank 0's while the others rest, without the profiler
    pieces    (a) attention kernels of the cut sequences, run alone, against the whole's / ranks
    beside    the same kernels in the layer, where others run beside them, against those alone
    work      (b) pack, merge, fill and torch, while no attention runs
    exchange  read, copy and nccl, while neither runs. link: what the bytes that the rank receives
              take at the rate of a plain copy from a peer, hidden or not
    waits     (c) only kernels that wait run
    idle      (d) nothing runs; in brackets, how much of it the host had not queued what came next

"ms" is the slowest rank's time without the profiler, which slows hosts: where it is far from the
wall, mistrust idle. Then follow the longest gaps of that rank between two kernels: the longest, how
many there are in all recorded layers, and how much of the longest had not been queued.

--out (or --json) writes all of it, with every kernel's count and microseconds in all calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from common.flags import JsonFile, filled, parser_of
from common.layers import (
    PACKS,
    Layer,
    OwnCalls,
    Sizes,
    Whole,
    bytes_received,
    layer_of,
    rows_for,
    run_of,
)
from common.machine import hardware
from common.timing import Step, by_turns, copy_rate, end_ranks, start_ranks, timed
from common.trace import (
    ATTENTION,
    EXCHANGE,
    GROUPS,
    IDLE,
    WAITS,
    WORK,
    Profile,
    alike,
    profile_of,
    recorded,
    short,
)

import hcp
from hcp._words import CommType
from hcp.attention.comm_types import A2A, ALL_GATHER, P2P
from hcp.attention.kernels import KernelChoice

TYPES: tuple[CommType, ...] = (P2P, ALL_GATHER, A2A)
PASSES = ("f", "f+b")
T = TypeVar("T")
TIMEOUT = timedelta(seconds=60)
DEFAULTS = {
    "tokens": (4096, 65_536),
    "heads": ([8, 4], [32, 8]),
    "head_dim": (64, 128),
    "dtype": ("float32", "bfloat16"),
    "transport": ("torch", "peer"),
}
"""On a CPU, on GPUs."""


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=3, deadline=290)
    parser.add_argument("--tokens", type=int, help="of a pack (CPU: 4096, CUDA: 65536)")
    parser.add_argument(
        "--heads", type=int, nargs=2, metavar=("QUERY", "KEY"), help="(CPU: 8 4, CUDA: 32 8)"
    )
    parser.add_argument("--head-dim", type=int, help="(CPU: 64, CUDA: 128)")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"))
    parser.add_argument("--backend", default="auto", help="kernels, as of get_cp_handler_cls")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--transport", help="(CPU: torch, CUDA: peer)")
    parser.add_argument("--packs", nargs="+", choices=PACKS, default=["halves"])
    parser.add_argument("--calls", type=int, default=3, help="layers that are recorded (3)")
    parser.add_argument("--gaps", type=int, default=5, help="of each comm type (5)")
    parser.add_argument("--out", dest="json", type=JsonFile, metavar="FILE", help="as --json")
    return filled(parser.parse_args(), DEFAULTS)


def main() -> int:
    args = arguments()
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    sizes = Sizes.of(args, device)
    rate = copy_rate(device, args.rounds)
    groups = hcp.build_process_groups(transport=args.transport, timeout=TIMEOUT)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks on {hardware(args.device)}, torch {torch.__version__}, "
            f"hcp {hcp.__version__}; heads {sizes.heads}:{sizes.kv_heads} of {args.head_dim}, "
            f"{args.dtype}, causal, backend {args.backend}, transport {args.transport}; "
            f"{args.calls} layers recorded; copies at {rate / 1e9:.3g} GB/s"
        )
    for name in args.packs:
        show(name, args, sizes, groups, rate)
    groups.close()
    end_ranks()
    return 0


# ---- what is recorded ----------------------------------------------------------------------------


class Cut(NamedTuple):
    """The layers of a pack that is cut over all ranks, by micro-batch, and their calls alone."""

    layers: list[Layer]
    calls: list[OwnCalls]
    received: dict[str, int]
    """Bytes that this rank receives in a layer, by pass."""

    def step(self, part: str) -> Step:
        return _each([x.forward if part == "f" else x.both for x in self.layers])

    def calls_alone(self, part: str) -> Step:
        return _each([x.forward if part == "f" else x.both for x in self.calls])


class Found(NamedTuple):
    """What was recorded of one comm type and pass, by rank."""

    comm_type: str
    part: str
    layers: list[Profile]
    calls: list[Profile]
    received: list[int]
    seconds: float
    """Of a layer on the slowest rank, without the profiler."""

    @property
    def slowest(self) -> int:
        return max(range(len(self.layers)), key=lambda rank: self.layers[rank].wall)


class Ideal(NamedTuple):
    """What was recorded of the whole pack on each GPU alone."""

    profiles: list[Profile]
    seconds: float
    """Of rank 0, without the profiler."""


def _each(steps: Sequence[Callable[[], object]]) -> Step:
    def run() -> None:
        for step in steps:
            step()

    return run


def _nothing() -> None:
    """Do nothing, while one rank works alone."""


def show(
    pack: str, args: argparse.Namespace, sizes: Sizes, groups: hcp.ProcessGroups, rate: float
) -> None:
    """Record a pack, and print its tables on rank 0."""
    lengths = PACKS[pack](args.tokens)
    handler = hcp.get_cp_handler_cls(args.backend)
    whole = Whole(lengths, sizes, KernelChoice(handler.kernel_family))
    first = dist.get_rank() == 0
    wholes: dict[str, Step] = {"f": whole.forward, "f+b": whole.both}
    cuts = {name: cut_by(name, handler, whole, args.tokens, groups) for name in args.types}
    steps = {f"whole {part}": step if first else _nothing for part, step in wholes.items()}
    steps |= {f"{name} {part}": cut.step(part) for name, cut in cuts.items() for part in PASSES}
    clock = partial(timed, device=sizes.device, calls=args.calls)
    seconds = by_turns(steps, sizes.device, clock, args.rounds)

    def profiles(step: Step) -> list[Profile]:
        return _of_all(profile_of(recorded(step, sizes.device, args.calls)))

    ideals = {
        part: Ideal(profiles(step), seconds[f"whole {part}"]) for part, step in wholes.items()
    }
    found = [
        Found(
            name,
            part,
            profiles(cut.step(part)),
            profiles(cut.calls_alone(part)),
            _of_all(cut.received[part]),
            seconds[f"{name} {part}"],
        )
        for name, cut in cuts.items()
        for part in PASSES
    ]
    if first:
        count = len(next(iter(cuts.values())).layers)
        print(f"\n{pack}: {len(lengths)} sequences, {max(lengths)} at most, {count} micro-batches")
        print("\n".join(report(found, ideals, args.calls, args.gaps, rate)), flush=True)
        for row in summaries(pack, found, ideals, args.calls, rate):
            args.json.add(row)


def cut_by(
    comm_type: CommType,
    handler: type[hcp.ContextParallelHandler],
    whole: Whole,
    tokens: int,
    groups: hcp.ProcessGroups,
) -> Cut:
    """Cut all sequences over all ranks. The layers have been checked."""
    ranks, layers, runs = dist.get_world_size(), [], []
    plan = hcp.plan(
        whole.lengths,
        ranks=ranks,
        max_tokens_per_rank=rows_for(whole.lengths, tokens, ranks),
        min_degree=ranks,
    )
    for m in range(len(plan.micro_batches)):
        cp = handler(plan, m, groups.transport, comm_types=[comm_type])
        layers.append(layer_of(comm_type, whole, cp, cp.attention))
        runs.append(run_of(cp, comm_type, whole.sizes))
    received = [bytes_received(run, whole.sizes) for run in runs]
    sums = [sum(part) for part in zip(*received, strict=True)]
    calls = [OwnCalls(run, whole.sizes) for run in runs]
    return Cut(layers, calls, dict(zip(PASSES, sums, strict=True)))


def _of_all(own: T) -> list[T]:
    """Return what each rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


# ---- what is printed -----------------------------------------------------------------------------


def losses(
    rank: int, layer: Profile, calls: Profile, wholes: Sequence[Profile]
) -> dict[str, float]:
    """Split what a rank's layer takes longer than rank 0's whole / ranks: nanoseconds that add up
    to that. ``wholes``: of all ranks."""
    whole, ranks = wholes[rank], len(wholes)

    def beyond(kind: str) -> float:
        return layer.shares[kind] - whole.shares[kind] / ranks

    alone = calls.shares[ATTENTION]
    return {
        "gpu": (whole.wall - wholes[0].wall) / ranks,
        "pieces": alone - whole.shares[ATTENTION] / ranks,
        "beside": layer.shares[ATTENTION] - alone,
        **{kind: beyond(kind) for kind in (WORK, EXCHANGE, WAITS, IDLE)},
    }


def report(
    found: Sequence[Found], ideals: Mapping[str, Ideal], calls: int, gaps: int, rate: float
) -> list[str]:
    """Return the lines of the three tables. ``calls``: layers of each profile. ``gaps``: the most
    of a comm type. ``rate``: bytes per second."""
    return [
        *_table_of_ranks(found, calls),
        "",
        *_table_of_losses(found, ideals, calls, rate),
        "",
        *_table_of_gaps(found, calls, gaps),
    ]


def _table_of_ranks(found: Sequence[Found], calls: int) -> list[str]:
    titles = *GROUPS, "idle", "over"
    lines = _head("type", "pass", "rank", "wall", *titles, "began")
    for one in found:
        begun = min(profile.begin for profile in one.layers)
        for rank, profile in enumerate(one.layers):
            values = *profile.busy.values(), profile.shares[IDLE], profile.overlap
            cells = [
                f"{_us(x) / calls:.0f} {x / max(1, profile.wall):.0%}" if x else "-" for x in values
            ]
            wall, began = _us(profile.wall) / calls, _us(profile.begin - begun)
            lines.append(_row(one.comm_type, one.part, rank, f"{wall:.0f}", *cells, f"{began:.0f}"))
    return lines


def _table_of_losses(
    found: Sequence[Found], ideals: Mapping[str, Ideal], calls: int, rate: float
) -> list[str]:
    titles = "gpu", "pieces", "beside", WORK, EXCHANGE, WAITS, IDLE
    times = "ms", "ideal ms", "wall", "ideal", "share"
    lines = _head("type", "pass", "rank", *times, *titles, "link")
    for one in found:
        ranks, rank, ideal = len(one.layers), one.slowest, ideals[one.part]
        layer = one.layers[rank]
        best = ideal.profiles[0].wall / ranks
        lost = losses(rank, layer, one.calls[rank], ideal.profiles)
        cells = {name: f"{_us(x) / calls:.0f} {x / max(1, best):.0%}" for name, x in lost.items()}
        cells[IDLE] += f" ({_us(layer.unqueued) / calls:.0f})"
        names = one.comm_type, one.part, rank
        seconds = f"{one.seconds * 1e3:.2f}", f"{ideal.seconds / ranks * 1e3:.2f}"
        walls = f"{_us(layer.wall) / calls:.0f}", f"{_us(best) / calls:.0f}"
        share = f"{best / max(1, layer.wall):.2f}"
        link = f"{one.received[rank] / rate * 1e6:.0f}"
        lines.append(_row(*names, *seconds, *walls, share, *(cells[x] for x in titles), link))
    return lines


def _table_of_gaps(found: Sequence[Found], calls: int, most: int) -> list[str]:
    lines = _head("type", "pass", "longest", "unqueued", "count", "after", "before")
    for one in found:
        if one.part == PASSES[0]:  # its gaps are in both passes, too
            continue
        for gap, count, _ in alike(one.layers[one.slowest].gaps)[:most]:
            unqueued = "-" if gap.unqueued is None else f"{_us(gap.unqueued):.0f}"
            numbers = f"{_us(gap.duration):.0f}", unqueued, f"{count} in {calls}"
            names = short(gap.before), short(gap.after)
            lines.append(_row(one.comm_type, one.part, *numbers, *names))
    return lines


def summaries(
    pack: str, found: Sequence[Found], ideals: Mapping[str, Ideal], calls: int, rate: float
) -> list[dict[str, object]]:
    """Return all that was recorded, a row for each comm type and pass, in microseconds."""
    rows: list[dict[str, object]] = [
        {
            "pack": pack,
            "type": "whole",
            "pass": part,
            "calls": calls,
            "us without profiler": ideal.seconds * 1e6,
            "ranks": [{"layer": _summary(profile)} for profile in ideal.profiles],
        }
        for part, ideal in ideals.items()
    ]
    for one in found:
        wholes = ideals[one.part].profiles
        rows.append(
            {
                "pack": pack,
                "type": one.comm_type,
                "pass": one.part,
                "calls": calls,
                "us without profiler": one.seconds * 1e6,
                "ranks": [
                    {
                        "layer": _summary(layer),
                        "attention calls alone": _summary(alone),
                        "lost": {
                            name: _us(x) / calls
                            for name, x in losses(rank, layer, alone, wholes).items()
                        },
                        "us of the bytes received": received / rate * 1e6,
                    }
                    for rank, (layer, alone, received) in enumerate(
                        zip(one.layers, one.calls, one.received, strict=True)
                    )
                ],
            }
        )
    return rows


def _summary(profile: Profile) -> dict[str, object]:
    """Everything but single events. Sums are of all calls."""
    return {
        "begin ns": profile.begin,
        "wall": _us(profile.wall),
        "busy": {group: _us(x) for group, x in profile.busy.items()},
        "shares": {kind: _us(x) for kind, x in profile.shares.items()},
        "overlap": _us(profile.overlap),
        "unqueued": _us(profile.unqueued),
        "gaps": [
            {
                "after": gap.before,
                "before": gap.after,
                "longest": _us(gap.duration),
                "unqueued": None if gap.unqueued is None else _us(gap.unqueued),
                "count": count,
                "sum": _us(total),
            }
            for gap, count, total in alike(profile.gaps)
        ],
        "kernels": {
            name: {"count": count, "sum": _us(total)}
            for name, (count, total) in profile.kernels.items()
        },
    }


def _us(nanoseconds: float) -> float:
    return nanoseconds / 1e3


def _head(*titles: str) -> list[str]:
    return [_row(*titles), f"|{'---|' * len(titles)}"]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
