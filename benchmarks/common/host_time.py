"""Measure the host's time of an attention layer without its attention calls.

This is the time of Python, the dispatcher and hcp's tables around the work that they queue. It
needs one process, and at most one GPU.

    python benchmarks/bench_attention.py --host --device cpu

The process acts as a rank in the middle of d ranks. Its transport exchanges nothing and returns at
once, its kernel returns results that exist, and tensors are too small to take time. The rest of a
layer's time is the host's. All contestants take turns in one run, and the fastest round counts. On
the CPU the clock is that of the thread, which excludes other processes. Columns, in microseconds:

    rows      sent: an exchange is a list of sends and receives, as for the transports torch and
              nccl. read: rows are read from their owners' memory by the tables and signals of the
              transport peer, which on the CPU lie in this process's memory
    fwd, bwd  a layer without its attention calls, which are timed alone and subtracted; in
              brackets, over the time of the yardstick: an autograd.Function with these tensors that
              does nothing

A second table has the attention calls themselves, of the kernel that ``--backend`` names, on packs
of few rows: on a GPU what the host takes to queue one, on the CPU with its work.
"""

from __future__ import annotations

import gc
import itertools
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hcp
from common.flags import JsonFile
from hcp import _core
from hcp.attention import kernels
from hcp.attention.kernels import (
    Attended,
    Kernel,
    KernelChoice,
    Launch,
    ResultGrads,
    join,
    kernel_for,
)
from hcp.exchange.agreement import Refusal, Stamp
from hcp.exchange.gather import Gathered
from hcp.exchange.peer import PeerMemory, PeerShared
from hcp.exchange.signals import PIECES
from hcp.exchange.tables import Entry, Move
from hcp.exchange.torch_p2p import Stamps
from hcp.exchange.transport import Pending, Share, register
from hcp.tools.loopback import gathered_of

ROWS, HEADS, HEAD_DIM = 16, 8, 8
SIGNAL_BYTES = 8 * PIECES
CALLS = 10
FAMILY = "results that are there"

# ---- what stands in ------------------------------------------------------------------------------


class AtOnce:
    """The transport of one rank, which exchanges nothing and returns at once."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.global_ranks: Sequence[int] = range(size)
        self.key = register(self)
        self.steps: Iterator[int] = itertools.count(1)
        self.stamps = Stamps(rank)

    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        stamp: Stamp,
    ) -> Pending:
        self.stamps.meet(stamp, sends, receives)
        return _Ended()

    def agree(self, stamp: Stamp, peers: Sequence[int]) -> None:
        pass

    def refuse(self, refusal: Refusal, peers: Sequence[int]) -> None:
        pass

    def all_gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        return [payload] * self.size

    def all_gather_counted(self, payload: bytes, count: float, what: str) -> Gathered:
        return gathered_of([payload] * self.size, [count] * self.size, self.rank)


class _Ended:
    def wait(self) -> None:
        pass


class ReadAtOnce(AtOnce):
    """A transport that reads its own memory in place of the peers'.

    Bases are shifted, so that a word for a peer is the one that this rank waits for."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(rank, size, device)
        self.node = range(size)
        buffer_bytes = 2**24  # for all heads at once at any degree that is timed
        memory = torch.zeros(_core.link_bytes(size, buffer_bytes), dtype=torch.uint8, device=device)

        def view(rank: int, shape: tuple[int, int], dtype: torch.dtype, start: int) -> Tensor:
            return memory.view(dtype)[start : start + shape[0] * shape[1]].view(shape)

        failure = torch.zeros(4, dtype=torch.int64)
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if cuda else None
        self._peers_memory = PeerMemory(
            rank,
            [memory.data_ptr() + (peer - rank) * SIGNAL_BYTES for peer in range(size)],
            view,
            failure.pin_memory() if cuda else failure,
            device=device,
            stream=self._stream.cuda_stream if self._stream is not None else 0,
            buffer_bytes=buffer_bytes,
            timeout=60.0,
        )

    @property
    def half_bytes(self) -> int:
        return self._peers_memory.link.half_bytes

    def share(self, share: Share) -> PeerShared:
        return PeerShared(self._peers_memory, share)


class Prepared:
    """A kernel that returns the results of its first launch."""

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    packs = True

    def __init__(self) -> None:
        self.given = Ways({}, {})
        """The arguments that each launch first came with."""
        self._forward: dict[Launch, tuple[Tensor, Tensor]] = {}
        self._backward: dict[Launch, tuple[Tensor, Tensor, Tensor]] = {}

    def capped(self, softcap: float) -> None:
        return None

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        if launch not in self._forward:
            self.given.forward[launch] = launch, query, key, value, scale
            out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
            self._forward[launch] = out, out.new_zeros(out.shape[:2], dtype=torch.float32)
        out, lse = self._forward[launch]
        return out.detach(), lse.detach()  # of this launch alone, as autograd wants a result

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if launch not in self._backward:
            query, key, value, *_ = attended
            self.given.backward[launch] = launch, grads, attended, scale
            self._backward[launch] = (
                torch.zeros_like(query),
                torch.zeros_like(key, memory_format=torch.contiguous_format),
                torch.zeros_like(value, memory_format=torch.contiguous_format),
            )
        return self._backward[launch]


class Empty(torch.autograd.Function):
    """The yardstick: an autograd.Function that does nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, result: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        return query, key, value, None


# ---- timing --------------------------------------------------------------------------------------

Step = Callable[[], object]


class Ways(NamedTuple):
    """A pair of values for forward and backward: functions, or their microseconds."""

    forward: Any
    backward: Any


def both_ways(forward: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor) -> Ways:
    out = forward()
    return Ways(forward, lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))


def yardstick(device: torch.device) -> Ways:
    leaves, grad = tensors(ROWS, device)
    result = torch.zeros_like(grad)
    return both_ways(lambda: Empty.apply(*leaves, result), leaves, grad)


def tensors(rows: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    made = [torch.randn(rows, HEADS, HEAD_DIM, device=device) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def layer(
    comm_type: Any, degree: int, device: torch.device, kind: type[AtOnce], kernel: Prepared
) -> tuple[Ways, Ways]:
    """Return a layer, and its attention calls alone."""
    transport = kind(degree // 2, degree, device)
    tokens = ROWS * degree
    plan = hcp.plan([tokens], ranks=degree, max_tokens_per_rank=tokens, min_degree=degree)
    levels = [2, degree // 2] if comm_type == "a2a+p2p" else ()
    cp = Handler(
        plan, 0, transport, comm_types=[comm_type], hierarchical_context_parallel_sizes=levels
    )
    leaves, grad = tensors(cp.rows, device)
    kernel.given = Ways({}, {})
    attend = both_ways(lambda: cp.attention(*leaves), leaves, grad)
    attend.backward()
    given = kernel.given

    def forward() -> None:
        for arguments in given.forward.values():
            kernel.forward(*arguments)

    def backward() -> None:
        for arguments in given.backward.values():
            kernel.backward(*arguments)

    return attend, Ways(forward, backward)


def by_turns(steps: Sequence[Step], rounds: int) -> list[float]:
    """Return the microseconds of one call of each step, in its fastest round."""
    clock = time.perf_counter if torch.cuda.is_available() else time.thread_time
    best = [float("inf")] * len(steps)
    for _ in range(rounds):
        for i, step in enumerate(steps):
            begun = clock()
            for _ in range(CALLS):
                step()
            best[i] = min(best[i], (clock() - begun) / CALLS * 1e6)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    return best


class Handler(hcp.ContextParallelHandler):
    kernel_family = FAMILY


def print_host_times(
    device: torch.device, degrees: Sequence[int], types: Sequence[str], rounds: int, json: JsonFile
) -> None:
    """Print the table in Markdown, and add its rows to the file."""
    kernel = Prepared()
    kernels.FAMILIES[FAMILY] = kernels.KernelFamily(lambda: lambda device: [kernel])
    gc.disable()
    names, contestants = [], [yardstick(device)]
    for degree in degrees:
        for comm_type in types:
            if comm_type == "auto" or (comm_type == "a2a+p2p" and (degree < 4 or degree % 2)):
                continue
            kinds = {"sent": AtOnce, "read": ReadAtOnce}
            for rows in ["-"] if degree == 1 else kinds:
                names.append((degree, comm_type, rows))
                kind = kinds.get(rows, AtOnce)
                contestants += layer(comm_type, degree, device, kind, kernel)
    times = by_turns([step for ways in contestants for step in ways], rounds)
    gc.enable()
    empty, *layers = (Ways(*pair) for pair in zip(times[::2], times[1::2], strict=True))
    print(
        f"{device.type}, torch {torch.__version__}, Python {platform.python_version()}; float32, "
        f"{ROWS} rows a rank, {HEADS} heads of {HEAD_DIM}; fastest of {rounds} rounds of {CALLS} "
        f"calls; the yardstick takes {empty.forward:.1f} and {empty.backward:.1f} us\n\n"
        "| degree | type | rows | fwd, us | bwd, us |\n|---|---|---|---|---|"
    )
    for name, own, calls in zip(names, layers[::2], layers[1::2], strict=True):
        beyond = [whole - part for whole, part in zip(own, calls, strict=True)]
        cells = [f"{x:.0f} ({x / y:.1f})" for x, y in zip(beyond, empty, strict=True)]
        print(f"| {' | '.join(map(str, (*name, *cells)))} |")
        ratios = [x / y for x, y in zip(beyond, empty, strict=True)]
        titles = ("degree", "type", "rows", "fwd, us", "bwd, us", "fwd ratio", "bwd ratio")
        json.add(dict(zip(titles, (*name, *beyond, *ratios), strict=True)))


# ---- attention calls -----------------------------------------------------------------------------

PACKS = (64,), (8,) * 8, (2,) * 32
CALL_HEADS, CALL_SIZE = (8, 2), 64


def print_call_times(
    device: torch.device, backend: str, dtype: torch.dtype, rounds: int, json: JsonFile
) -> None:
    """Print the table in Markdown, and add its rows to the file."""
    kernel = kernel_for(device, dtype, KernelChoice(backend))
    gc.disable()
    calls = [call_of(kernel, lengths, device, dtype) for lengths in PACKS]
    times = by_turns([step for ways in calls for step in ways], rounds)
    gc.enable()
    print(
        f"\n{backend!r} by itself: {dtype}, heads {CALL_HEADS[0]} and {CALL_HEADS[1]} of "
        f"{CALL_SIZE}\n\n| pack | fwd, us | bwd, us |\n|---|---|---|"
    )
    for lengths, pair in zip(PACKS, zip(times[::2], times[1::2], strict=True), strict=True):
        pack = f"{len(lengths)} x {lengths[0]}"
        print(f"| {pack} | {pair[0]:.0f} | {pair[1]:.0f} |")
        json.add({"pack": pack, "fwd, us": pair[0], "bwd, us": pair[1]})


def call_of(
    kernel: Kernel, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Ways:
    """Causal attention over a pack, by as many calls as the kernel takes for it."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    entries = [Entry(at, n, at, n, 1 - n, 0) for at, n in zip(starts, lengths, strict=True)]
    launches = join(entries, packs=kernel.packs)
    query, key, value, grad = (
        torch.randn(sum(lengths), heads, CALL_SIZE, device=device, dtype=dtype)
        for heads in (CALL_HEADS[0], CALL_HEADS[1], CALL_HEADS[1], CALL_HEADS[0])
    )
    scale = CALL_SIZE**-0.5
    rows = [(x, (query[x.queries], key[x.keys], value[x.keys]), grad[x.queries]) for x in launches]

    def forward() -> list[tuple[Tensor, Tensor]]:
        return [kernel.forward(launch, *qkv, scale) for launch, qkv, _ in rows]

    results = forward()

    def backward() -> None:
        for (launch, qkv, own), known in zip(rows, results, strict=True):
            kernel.backward(launch, (own, None), (*qkv, *known), scale)

    backward()
    return Ways(forward, backward)
