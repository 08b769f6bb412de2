"""Compare the transports' exchanges with a plain copy of the same bytes from a peer's memory.

    torchrun --nproc-per-node 8 benchmarks/bench_exchange.py
    torchrun --nproc-per-node 2 benchmarks/bench_exchange.py --device cpu --most-mib 1

There are four patterns, in rows of 4 KiB (keys and values of 8 heads of 128 in bfloat16, side by
side):

    ring     a rank receives all rows of the next one
    gather   a rank receives rows of all others, and lays them out as attention reads a pack of
             sequences: two pieces of each sequence from each rank
    heads    ranks exchange their rows of 16 heads of 128 for whole sequences of some heads, 16
             sequences in all, as before attention under "a2a": `cp.whole.sequence_to_head`
    back     the way back: `cp.whole.head_to_sequence`

and four contestants:

    copy     `copy_` from the next rank's memory, mapped by torch's symmetric memory, all ranks at
             once: nothing is staged, signalled, or laid out
    peer     PeerTransport's stage, write and read: rows are copied into symmetric memory first
    nccl     NcclTransport.start, and one more kernel that lays the rows out, but for the ring;
             heads are packed before
    torch    the same by torch's batch_isend_irecv

A share is the copy's time / the transport's: 1 is the limit. Bytes are those that each rank
receives from others: heads and their way back also copy the rows that stay on the rank. A time is
that of the slowest rank, the median of rounds in which all take turns. "host us" is the host's time
for one call. Received rows are compared with sent ones, bit for bit, before and after the timing.
CPU ranks have neither peer memory nor NCCL: `torch` runs alone, and the copy stays within a rank.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from common.flags import parser_of
from common.timing import by_turns, device_name, end_ranks, queued, start_ranks, timed, world
from torch import Tensor

import hcp
from hcp import ops
from hcp.attention.head_shares import split
from hcp.exchange.agreement import CallKind, Stamp
from hcp.exchange.connect import connect
from hcp.exchange.layout import Layout, rows_in_whole
from hcp.exchange.peer import PeerTransport
from hcp.exchange.tables import Move, PeerRead
from hcp.exchange.torch_p2p import TorchTransport
from hcp.exchange.transport import Share

WIDTH = 2048
DTYPE = torch.bfloat16
ROW_BYTES = WIDTH * DTYPE.itemsize
SEQUENCES = 16
PIECES = 2 * SEQUENCES
"""Pieces of each rank's rows in a gather: two of each sequence."""
HEADS = 16
"""Heads of a row that are exchanged."""
CALLS = 8
TIMEOUT = timedelta(seconds=30)
TRANSPORTS: dict[str, Any] = {"cuda": ("peer", "nccl", "torch"), "cpu": ("torch",)}


class Pattern(Protocol):
    """What one rank sends and receives."""

    @property
    def name(self) -> str: ...

    @property
    def received_bytes(self) -> int:
        """From others."""

    def step(self, transport: TorchTransport, device: torch.device) -> Callable[[], Tensor]:
        """One exchange by a transport, which gives the received rows."""

    def expected(self, device: torch.device) -> Tensor:
        """The received rows."""


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
    for make in (ring, gather, heads, back):
        for size in sizes(args.most_mib):
            compare(args, make(size // ROW_BYTES), transports, copies)
    end_ranks()
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=5, deadline=300)
    parser.add_argument("--most-mib", type=int, default=128, help="received by each rank (128)")
    args = parser.parse_args()
    if not 1 <= args.most_mib <= 512:
        parser.error(f"--most-mib is {args.most_mib}, expected 1 to 512")
    return args


def sizes(most_mib: int) -> list[int]:
    chosen = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**27, 2**28, 2**29)
    return [size for size in chosen if size <= most_mib * 2**20]


# ---- rows of others ------------------------------------------------------------------------------


@dataclass(frozen=True)
class OthersRows:
    """All rows of some ranks, which each give theirs to some."""

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
    def received_bytes(self) -> int:
        return self.rows * ROW_BYTES

    def step(self, transport: TorchTransport, device: torch.device) -> Callable[[], Tensor]:
        own = rows_of(dist.get_rank(), self.own_rows, device)
        if isinstance(transport, PeerTransport):
            return by_reading(transport, self, own)
        return by_sending(transport, self, own)

    def expected(self, device: torch.device) -> Tensor:
        sent = [rows_of(peer, self.own_rows, device) for peer in self.sources]
        return torch.cat(
            [sent[source][begin : begin + rows] for _, rows, source, begin in self.runs.tolist()]
        )


def ring(rows: int) -> OthersRows:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runs = torch.tensor([[0, rows, 0, 0]])
    return OthersRows("ring", rows, [(rank + 1) % ranks], [(rank - 1) % ranks], runs)


def gather(rows: int) -> OthersRows:
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
    return OthersRows("gather", own_rows, others, others, torch.tensor(runs))


def rows_of(rank: int, rows: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rank)
    return torch.randn(rows, WIDTH, dtype=DTYPE, device=device, generator=generator)


_exchanges = itertools.count()
_STAMP = Stamp(CallKind("benchmark"))


def by_reading(transport: PeerTransport, pattern: OthersRows, own: Tensor) -> Callable[[], Tensor]:
    rows, whole = pattern.own_rows, torch.tensor([[0, pattern.own_rows, 0, 0]])
    read = PeerRead(
        [(p, rows) for p in pattern.sources], pattern.runs, pattern.rows, pattern.sources
    )
    shared = transport.share(Share(rows, (WIDTH,), DTYPE, whole, pattern.readers, [read]))

    def step() -> Tensor:
        return shared.stage(next(_exchanges), [own], _STAMP).read(0).wait()

    return step


def by_sending(transport: TorchTransport, pattern: OthersRows, own: Tensor) -> Callable[[], Tensor]:
    rows = pattern.own_rows
    received = torch.empty(pattern.rows, WIDTH, dtype=DTYPE, device=own.device)
    sends = [Move(peer, 0, rows) for peer in pattern.readers]
    receives = [Move(peer, i * rows, rows) for i, peer in enumerate(pattern.sources)]
    places = torch.stack([pattern.runs[:, 2] * rows + pattern.runs[:, 3], pattern.runs[:, 1]], 1)
    arranged = len(pattern.runs) > len(pattern.sources)

    def step() -> Tensor:
        transport.start(own, sends, received, receives, stamp=_STAMP).wait()
        return ops.pack([received], places, pattern.rows) if arranged else received

    return step


# ---- rows for heads ------------------------------------------------------------------------------


class HeadRows:
    """Rows of all heads for whole sequences of some, or back."""

    def __init__(self, name: str, rows: int) -> None:
        """``rows``: about as many rows of all heads come from others."""
        self.name, self._ranks = name, dist.get_world_size()
        whole = rows * self._ranks**2 // max(1, self._ranks - 1)
        self._lengths = [max(1, whole // SEQUENCES)] * SEQUENCES
        self._plan = hcp.plan(
            self._lengths,
            ranks=self._ranks,
            max_tokens_per_rank=SEQUENCES * (self._lengths[0] // self._ranks + 2),
            min_degree=self._ranks,
        )
        self._layout = Layout(self._plan, 0, dist.get_rank())
        others = sum(self._lengths) - self._layout.rows
        self.received_bytes = others * ROW_BYTES // self._ranks

    def step(self, transport: TorchTransport, device: torch.device) -> Callable[[], Tensor]:
        exchange = hcp.ContextParallelHandler(self._plan, 0, transport, comm_types=["a2a"]).whole
        own, heads = self._rows_and_heads(device)
        if self.name == "heads":
            return lambda: exchange.sequence_to_head(own)
        return lambda: exchange.head_to_sequence(heads, HEADS)

    def expected(self, device: torch.device) -> Tensor:
        own, heads = self._rows_and_heads(device)
        return heads if self.name == "heads" else own

    def _rows_and_heads(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """This rank's rows of all heads, and all rows of its heads."""
        whole = rows_of(0, sum(self._lengths), device).view(-1, HEADS, WIDTH // HEADS)
        shares = split(HEADS, self._ranks)
        heads = whole[:, shares[dist.get_rank()]]
        return whole[rows_in_whole(self._layout).to(device)], heads.contiguous()


def heads(rows: int) -> HeadRows:
    return HeadRows("heads", rows)


def back(rows: int) -> HeadRows:
    return HeadRows("back", rows)


# ---- contestants ---------------------------------------------------------------------------------


def compare(
    args: argparse.Namespace,
    pattern: Pattern,
    transports: dict[str, TorchTransport],
    copies: Copies,
) -> None:
    """Check the contestants, time them, check them again and print their rows."""
    copied = copies.step(pattern.received_bytes // ROW_BYTES)
    steps: dict[str, Callable[[], Tensor]] = {"copy": copied} | {
        name: pattern.step(transport, copies.device) for name, transport in transports.items()
    }
    expected = pattern.expected(copies.device)
    check(pattern, steps, transports, expected)
    times = by_turns(
        steps, copies.device, partial(timed, device=copies.device, calls=CALLS), args.rounds
    )
    host = by_turns(steps, copies.device, partial(queued, device=copies.device), args.rounds)
    check(pattern, steps, transports, expected)
    if dist.get_rank() == 0:
        size = pattern.received_bytes
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


# ---- what must arrive ----------------------------------------------------------------------------


def check(
    pattern: Pattern,
    steps: dict[str, Callable[[], Tensor]],
    transports: dict[str, TorchTransport],
    expected: Tensor,
) -> None:
    for name in transports:
        differ = steps[name]().view(torch.int16) != expected.view(torch.int16)
        wrong = int(differ.flatten(1).any(1).sum())
        if wrong:
            raise SystemExit(
                f"rank {dist.get_rank()}: {wrong} of {len(expected)} rows of a {pattern.name} by "
                f"{name} differ from what was sent"
            )


if __name__ == "__main__":
    sys.exit(main())
