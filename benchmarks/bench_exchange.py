"""Compare the transports' exchanges with a plain copy of the same bytes from a peer's memory.

    torchrun --nproc-per-node 8 benchmarks/bench_exchange.py
    torchrun --nproc-per-node 2 benchmarks/bench_exchange.py --device cpu --most-mib 1

There are two patterns, in rows of 4 KiB (keys and values of 8 heads of 128 in bfloat16, side by
side):

    ring     a rank receives all rows of the next one
    gather   a rank receives rows of all others, and lays them out as attention reads a pack of
             sequences: two pieces of each sequence from each rank

and four contestants:

    copy     `copy_` from the next rank's memory, mapped by torch's symmetric memory, all ranks at
             once: nothing is staged, signalled, or laid out
    peer     PeerTransport's stage, write and read: rows are copied into symmetric memory first
    nccl     NcclTransport.start, and for the gather one more kernel that lays the rows out
    torch    torch's batch_isend_irecv, and for the gather the kernel that lays the rows out

A share is the copy's time / the transport's: 1 is the limit. Bytes are those that each rank
receives. A time is that of the slowest rank, the median of rounds in which all take turns. "host
us" is the host's time for one call. Received rows are compared with sent ones, bit for bit, before
and after the timing. CPU ranks have neither peer memory nor NCCL: `torch` runs alone, and the copy
stays within a rank.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common.flags import parser_of
from common.timing import by_turns, device_name, end_ranks, queued, start_ranks, timed, world
from torch import Tensor

import hcp
from hcp import ops
from hcp.exchange.agreement import CallKind, Stamp
from hcp.exchange.connect import connect
from hcp.exchange.peer import PeerTransport
from hcp.exchange.tables import Move, PeerRead
from hcp.exchange.torch_p2p import TorchTransport
from hcp.exchange.transport import Share

WIDTH = 2048
DTYPE = torch.bfloat16
ROW_BYTES = WIDTH * DTYPE.itemsize
PIECES = 32
"""Pieces of each rank's rows in a gather: two of each of 16 sequences."""
CALLS = 8
TIMEOUT = timedelta(seconds=30)
TRANSPORTS: dict[str, Any] = {"cuda": ("peer", "nccl", "torch"), "cpu": ("torch",)}


@dataclass(frozen=True)
class Pattern:
    """The rows that one rank sends and receives."""

    name: str
    own_rows: int
    sources: list[int]
    readers: list[int]
    runs: Tensor
    """(runs, 4) of (row, rows, source, the source's row): the places of received rows."""

    @property
    def rows(self) -> int:
        return self.own_rows * len(self.sources)

    @property
    def arranged(self) -> bool:
        return len(self.runs) > len(self.sources)


def main() -> int:
    args = arguments()
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    transports = {
        name: connect(
            dist.new_group(timeout=TIMEOUT),
            name,
            timeout=TIMEOUT,
            peer_buffer_bytes=2 * (args.most_mib + 1) * 2**20,
        )
        for name in TRANSPORTS[device.type]
    }
    copies = Copies(device, args.most_mib * 2**20)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} x {device_name(device)}, torch {torch.__version__}, ", end=""
        )
        print(f"hcp {hcp.__version__}, rows of {ROW_BYTES} bytes")
        print(f"{'':7} {'':>9} {'copy':>6}" + "".join(f"{name:>16}" for name in transports))
        titles = f"{'share':>8} {'host us':>7}" * len(transports)
        print(f"{'pattern':7} {'KiB':>9} {'GB/s':>6}{titles} {'peer : torch':>13}", flush=True)
    for make in (ring, gather):
        for size in sizes(args.most_mib):
            compare(args, make(size // ROW_BYTES), transports, copies)
    end_ranks()
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=5, deadline=150)
    parser.add_argument("--most-mib", type=int, default=128, help="received by each rank (128)")
    args = parser.parse_args()
    if args.most_mib < 1:
        parser.error(f"--most-mib is {args.most_mib}, expected >= 1")
    return args


def sizes(most_mib: int) -> list[int]:
    chosen = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**27)
    return [size for size in chosen if size <= most_mib * 2**20]


def ring(rows: int) -> Pattern:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runs = torch.tensor([[0, rows, 0, 0]])
    return Pattern("ring", rows, [(rank + 1) % ranks], [(rank - 1) % ranks], runs)


def gather(rows: int) -> Pattern:
    """Receive rows of all other ranks, piece by piece, and within a piece rank by rank."""
    others = [peer for peer in range(dist.get_world_size()) if peer != dist.get_rank()]
    own_rows = max(1, rows // len(others))
    pieces = min(PIECES, own_rows)
    ends = [own_rows * piece // pieces for piece in range(pieces + 1)]
    runs, row = [], 0
    for begin, end in itertools.pairwise(ends):
        for source in range(len(others)):
            runs.append([row, end - begin, source, begin])
            row += end - begin
    return Pattern("gather", own_rows, others, others, torch.tensor(runs))


# ---- contestants ---------------------------------------------------------------------------------


def compare(
    args: argparse.Namespace,
    pattern: Pattern,
    transports: dict[str, TorchTransport],
    copies: Copies,
) -> None:
    """Check the contestants, time them, check them again and print their rows."""
    own = rows_of(dist.get_rank(), pattern.own_rows, copies.device)
    steps: dict[str, Callable[[], Tensor]] = {"copy": copies.step(pattern.rows)}
    for name, transport in transports.items():
        if isinstance(transport, PeerTransport):
            steps[name] = by_reading(transport, pattern, own)
        else:
            steps[name] = by_sending(transport, pattern, own)
    expected = expected_rows(pattern, copies.device)
    check(pattern, steps, transports, expected)
    times = by_turns(
        steps, copies.device, partial(timed, device=copies.device, calls=CALLS), args.rounds
    )
    host = by_turns(steps, copies.device, partial(queued, device=copies.device), args.rounds)
    check(pattern, steps, transports, expected)
    if dist.get_rank() == 0:
        size = pattern.rows * ROW_BYTES
        shares = "".join(
            f"{times['copy'] / times[name]:8.2f} {host[name] * 1e6:7.0f}" for name in transports
        )
        faster = f"{times['torch'] / times['peer']:12.2f}x" if "peer" in times else f"{'-':>13}"
        rate = size / times["copy"] / 1e9
        print(f"{pattern.name:7} {size / 2**10:9.0f} {rate:6.0f}{shares} {faster}", flush=True)
        row = {"pattern": pattern.name, "KiB": size / 2**10, "copy GB/s": rate}
        for name in transports:
            row |= {f"{name} share": times["copy"] / times[name]}
            row |= {f"{name} host us": host[name] * 1e6}
        args.json.add(row)


class Copies:
    """Plain copies of the next rank's memory; on CPU ranks, of this one's."""

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self.device = device
        rows = most_bytes // ROW_BYTES
        if device.type == "cpu":
            self._source = torch.zeros(rows, WIDTH, dtype=DTYPE)
            return
        from torch.distributed import _symmetric_memory as symmetric

        self._memory = symmetric.empty(rows, WIDTH, dtype=DTYPE, device=device)
        self._memory.zero_()
        handle = symmetric.rendezvous(self._memory, world())
        torch.cuda.synchronize(device)
        peer = (dist.get_rank() + 1) % dist.get_world_size()
        self._source = handle.get_buffer(peer, (rows, WIDTH), DTYPE)

    def step(self, rows: int) -> Callable[[], Tensor]:
        source = self._source[:rows]
        target = torch.empty(rows, WIDTH, dtype=DTYPE, device=self.device)
        return lambda: target.copy_(source)


_exchanges = itertools.count()
_STAMP = Stamp(CallKind("benchmark"))


def by_reading(transport: PeerTransport, pattern: Pattern, own: Tensor) -> Callable[[], Tensor]:
    rows, whole = pattern.own_rows, torch.tensor([[0, pattern.own_rows, 0, 0]])
    read = PeerRead(
        [(p, rows) for p in pattern.sources], pattern.runs, pattern.rows, pattern.sources
    )
    shared = transport.share(Share(rows, (WIDTH,), DTYPE, whole, pattern.readers, [read]))

    def step() -> Tensor:
        return shared.stage(next(_exchanges), [own], _STAMP).read(0).wait()

    return step


def by_sending(transport: TorchTransport, pattern: Pattern, own: Tensor) -> Callable[[], Tensor]:
    rows = pattern.own_rows
    received = torch.empty(pattern.rows, WIDTH, dtype=DTYPE, device=own.device)
    sends = [Move(peer, 0, rows) for peer in pattern.readers]
    receives = [Move(peer, i * rows, rows) for i, peer in enumerate(pattern.sources)]
    places = torch.stack([pattern.runs[:, 2] * rows + pattern.runs[:, 3], pattern.runs[:, 1]], 1)

    def step() -> Tensor:
        transport.start(own, sends, received, receives, stamp=_STAMP).wait()
        return ops.pack([received], places, pattern.rows) if pattern.arranged else received

    return step


# ---- what must arrive ----------------------------------------------------------------------------


def rows_of(rank: int, rows: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rank)
    return torch.randn(rows, WIDTH, dtype=DTYPE, device=device, generator=generator)


def expected_rows(pattern: Pattern, device: torch.device) -> Tensor:
    sent = [rows_of(peer, pattern.own_rows, device) for peer in pattern.sources]
    return torch.cat(
        [sent[source][begin : begin + rows] for _, rows, source, begin in pattern.runs.tolist()]
    )


def check(
    pattern: Pattern,
    steps: dict[str, Callable[[], Tensor]],
    transports: dict[str, TorchTransport],
    expected: Tensor,
) -> None:
    for name in transports:
        wrong = int((steps[name]().view(torch.int16) != expected.view(torch.int16)).any(1).sum())
        if wrong:
            raise SystemExit(
                f"rank {dist.get_rank()}: {wrong} of {pattern.rows} rows of a {pattern.name} by "
                f"{name} differ from what was sent"
            )


if __name__ == "__main__":
    sys.exit(main())
