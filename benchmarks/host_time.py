"""Host time of one attention layer beyond its attention calls: what Python, the dispatcher and hcp's
tables take before and after the work that they queue.

    python benchmarks/bench_attention.py --host

One process plays rank 1 of d. Its transport carries nothing and returns at once, and its kernel
gives results that are there, so that a layer's time is the host's; the kernel's own calls are timed
alone and taken off. No tensor is large enough to be felt, on the CPU as on a GPU. Columns, in
microseconds, the fastest of the rounds:

    carried   rows are sent and received, as over the transports torch and nccl
    read      rows are read from the memory of their owners, as over the transport peer
    calls     attention calls of a layer
    fwd, bwd  the layer without them; in brackets, over the yardstick's time
    empty     the yardstick: an autograd.Function with the same tensors that does nothing
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import hcp
from hcp import kernels
from hcp.exchange import Pending, Reading, Staged, register
from hcp.kernels import Call, Flash2
from hcp.layout import Move, schedule_of

ROWS, HEADS, HEAD_DIM = 64, 2, 8
ROUNDS, CALLS = 100, 10
FAMILY = "results that are there"

# ---- what stands in ------------------------------------------------------------------------------


class AtOnce:
    """One rank's end of a domain in which nothing travels."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.global_ranks: Sequence[int] = range(size)
        self.key = register(self)

    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        tag: int = 0,
    ) -> Pending:
        if sent.dtype == torch.int64 and len(sent) == 1:  # an agreement: the peers agree
            received.copy_(sent.expand_as(received))
        return _Ended()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload] * self.size


class _Ended:
    def wait(self) -> None:
        pass


class ReadAtOnce(AtOnce):
    """One whose peers have staged their rows long ago."""

    def stage(
        self, exchange: int, rows: int, width: int, dtype: torch.dtype, readers: Iterable[int]
    ) -> Staged:
        return _Staged(torch.empty(ROWS * self.size, width, dtype=dtype, device=self.device))


class _Staged:
    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def write(self, parts: Sequence[Tensor], runs: Tensor, columns: int, tag: int) -> None:
        pass

    def read(
        self,
        parts: Sequence[tuple[int, int]],
        runs: Tensor,
        rows: int,
        tag: int,
        done: Sequence[int],
        own: Sequence[Sequence[Tensor]] = (),
    ) -> Reading:
        return _Read(self._memory[:rows])


class _Read:
    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def wait(self) -> Tensor:
        return self._rows


class Prepared:
    """A kernel whose results were made at its first call."""

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    calls = staticmethod(Flash2.calls)

    def __init__(self) -> None:
        self._forward: dict[Call, tuple[Tensor, Tensor]] = {}
        self._backward: dict[Call, tuple[Tensor, Tensor, Tensor]] = {}

    def capped(self, softcap: float) -> None:
        return None

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        if call not in self._forward:
            out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
            self._forward[call] = out, out.new_zeros(out.shape[:2], dtype=torch.float32)
        out, lse = self._forward[call]
        return out.detach(), lse.detach()  # of this call alone, as autograd wants a result

    def backward(
        self,
        call: Call,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if call not in self._backward:
            self._backward[call] = (
                torch.zeros_like(query),
                torch.zeros_like(key, memory_format=torch.contiguous_format),
                torch.zeros_like(value, memory_format=torch.contiguous_format),
            )
        return self._backward[call]


class Empty(torch.autograd.Function):
    """What no layer can do without."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, result: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        return query, key, value, None


# ---- timing --------------------------------------------------------------------------------------


def fastest(step: Callable[[], object]) -> float:
    """Microseconds of a call, in the fastest of the rounds: this thread's own, which nobody else on
    the machine adds to, where it is the one that works."""
    clock = time.perf_counter if torch.cuda.is_initialized() else time.thread_time
    times = []
    for _ in range(ROUNDS):
        begun = clock()
        for _ in range(CALLS):
            step()
        times.append((clock() - begun) / CALLS)
    return min(times) * 1e6


def both_ways(
    forward: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor
) -> tuple[float, float]:
    """Microseconds of a forward, and of its backward."""
    out = forward()
    return fastest(forward), fastest(
        lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
    )


def empty(device: torch.device) -> tuple[float, float]:
    leaves, grad = _tensors(ROWS, device)
    result = torch.zeros_like(grad)
    return both_ways(lambda: Empty.apply(*leaves, result), leaves, grad)  # type: ignore[no-untyped-call]


def _tensors(rows: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    made = [torch.randn(rows, HEADS, HEAD_DIM, device=device) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def layer(
    comm_type: str, degree: int, device: torch.device, kind: type[AtOnce]
) -> tuple[float, float, float, float]:
    """Microseconds of a forward and of a backward beyond the attention calls, and of those."""
    transport = kind(min(1, degree - 1), degree, device)
    plan = hcp.plan(
        [ROWS * degree], ranks=degree, max_tokens_per_rank=ROWS * degree, min_degree=degree
    )
    cp = Handler(
        plan,
        0,
        transport,
        comm_types=[comm_type],
        hierarchical_context_parallel_sizes=[2, degree // 2] if comm_type == "a2a+p2p" else (),
    )
    leaves, grad = _tensors(cp.rows, device)
    forward, backward = both_ways(lambda: cp.attention(*leaves), leaves, grad)
    schedule = schedule_of(cp._words_of(comm_type, -1, 0, (HEADS, HEADS)))
    calls = [call for stage in schedule.stages for call in PREPARED.calls(stage.entries)]
    for call in calls:
        PREPARED.forward(call, *leaves, 1.0)
        PREPARED.backward(call, grad, None, *leaves, grad, grad, 1.0)
    calls_forward = fastest(lambda: [PREPARED.forward(call, *leaves, 1.0) for call in calls])
    calls_backward = fastest(
        lambda: [PREPARED.backward(call, grad, None, *leaves, grad, grad, 1.0) for call in calls]
    )
    return forward - calls_forward, backward - calls_backward, calls_forward, calls_backward


PREPARED = Prepared()


class Handler(hcp.ContextParallelHandler):
    kernel_family = FAMILY


def print_host_times(device: torch.device, degrees: Sequence[int], types: Sequence[str]) -> None:
    kernels.add_family(FAMILY, lambda device: [PREPARED])
    torch.set_num_threads(1)
    gc.disable()
    base = empty(device)
    print(
        f"{device.type}, torch {torch.__version__}, Python {platform.python_version()}; float32, "
        f"{ROWS} rows a rank, {HEADS} heads of {HEAD_DIM}; fastest of {ROUNDS} rounds of {CALLS} "
        f"calls\n\nempty: fwd {base[0]:.1f} us, bwd {base[1]:.1f} us\n\n"
        "| degree | type | rows | fwd us | bwd us | calls, fwd | bwd |\n|---|---|---|---|---|---|---|"
    )
    for degree in degrees:
        for comm_type in types:
            if comm_type == "auto" or (comm_type == "a2a+p2p" and (degree < 4 or degree % 2)):
                continue
            for name, kind in (("carried", AtOnce), ("read", ReadAtOnce)):
                *own, calls_forward, calls_backward = layer(comm_type, degree, device, kind)
                cells = [f"{x:.1f} ({x / y:.1f})" for x, y in zip(own, base, strict=True)]
                print(
                    f"| {degree} | {comm_type} | {name} | {' | '.join(cells)} "
                    f"| {calls_forward:.1f} | {calls_backward:.1f} |",
                    flush=True,
                )
