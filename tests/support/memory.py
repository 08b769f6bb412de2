"""Measure the memory of one rank's attention layer, alone: peers send nothing, kernels compute
nothing, and results are of the shapes that they would have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import hcp
from hcp.attention import kernels
from hcp.attention.kernels import Launch, wide
from hcp.exchange.agreement import Refusal, Stamp
from hcp.exchange.gather import Gathered
from hcp.exchange.tables import Move
from hcp.exchange.transport import Pending, register
from hcp.tools.loopback import gathered_of


class Alone:
    """The transport of one rank whose peers are not there."""

    def __init__(self, rank: int, size: int, device: str) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.global_ranks: Sequence[int] = range(size)
        self.key = register(self)
        self.steps: Iterator[int] = itertools.count(1)

    def start(
        self,
        sent: Tensor,
        sends: Sequence[Move],
        received: Tensor,
        receives: Sequence[Move],
        *,
        stamp: Stamp,
    ) -> Pending:
        return _UnderWay(sent, received)

    def agree(self, stamp: Stamp, peers: Sequence[int]) -> None:
        pass

    def refuse(self, refusal: Refusal, peers: Sequence[int]) -> None:
        pass

    def all_gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        return [payload] * self.size

    def all_gather_counted(self, payload: bytes, count: float, what: str) -> Gathered:
        return gathered_of([payload] * self.size, [count] * self.size, self.rank)


class _UnderWay:
    """An exchange, which keeps its buffers as long as others do."""

    def __init__(self, *buffers: Tensor) -> None:
        self._buffers = buffers

    def wait(self) -> None:
        pass


class Shapes:
    """A kernel that takes packs and computes nothing."""

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    packs = True

    def capped(self, softcap: float) -> None:
        return None

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = query.new_empty(*query.shape[:2], value.shape[2])
        return out, out.new_empty(out.shape[:2], dtype=wide(query.dtype))

    def backward(
        self, launch: Launch, grads: Any, attended: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = attended[:3]
        return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


FAMILY = "shapes of results"


class Bytes(NamedTuple):
    peak: int
    """The most that was there at once and was not before."""
    left: int
    """What is there at the end and was not before."""


def allocated(call: Callable[[], object]) -> Bytes:
    """Run a call on CPU tensors and add up what this thread allocates and frees."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as seen:
        result = call()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    levels = [
        0,
        *itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())),
    ]
    del result
    return Bytes(max(levels), levels[-1])


class Layer:
    """One rank's attention over a sequence of rows * degree tokens, and ``padding`` rows more."""

    def __init__(
        self,
        comm_type: str,
        degree: int,
        rows: int,
        heads: tuple[int, int],
        sizes: tuple[int, int],
        dtype: torch.dtype,
        *,
        device: str = "cpu",
        levels: Sequence[int] = (),
        causal: bool = False,
        rank: int = 0,
        family: str = FAMILY,
        chunks: int = 1,
        padding: int = 0,
    ) -> None:
        kernels.FAMILIES.setdefault(FAMILY, kernels.KernelFamily(lambda: lambda device: [Shapes()]))
        tokens = rows * degree
        limits = {"max_tokens_per_rank": tokens + padding, "min_degree": degree}
        limits["alignment"] = rows + padding if padding else 1
        memory = hcp.MemoryModel(
            attention=chunks, head_chunks=chunks, limit=rows if not padding else 0
        )
        plan = hcp.plan([tokens], ranks=degree, memory=memory, **limits)  # type: ignore[arg-type]
        options: Any = {"comm_types": [comm_type], "hierarchical_context_parallel_sizes": levels}
        handler = type("Handler", (hcp.ContextParallelHandler,), {"kernel_family": family})
        self.cp = handler(plan, 0, Alone(rank, degree, device), **options)
        (queries, keys), (size, value_size) = heads, sizes

        def made(count: int, elements: int) -> Tensor:
            return torch.zeros(rows + padding, count, elements, dtype=dtype, device=device)

        self.inputs = [made(queries, size), made(keys, size), made(keys, value_size)]
        for x in self.inputs:
            x.requires_grad_()
        self.grad = made(queries, value_size)
        self.causal = causal

    def forward(self) -> Tensor:
        out: Tensor = self.cp.attention(*self.inputs, causal=self.causal)
        return out

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.grad)
