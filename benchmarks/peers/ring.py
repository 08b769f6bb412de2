"""Ring attention with per-document splitting, today's usual scheme, re-implemented here.

Rank r of N holds chunks r and 2N - 1 - r of the 2N equal chunks of every sequence. Lengths are
padded to a multiple of 2N. Keys and values go once around the ring by torch's point-to-point calls,
while kernels run. Step 0 is causal over the rank's own rows. With keys of an earlier rank, only the
first half of every sequence's keys is used. With keys of a later rank, only the second half of its
queries is used. In the backward the gradients of keys and values follow them around the ring, and
go one rank further.

The kernel is hcp's, with one launch per step. So are the merge of partial outputs and the sum of
gradients, with one launch for all steps. This is faster than the pairwise corrections of today's
rings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import hcp
from hcp import ops
from hcp.attention.kernels import Kernel, KernelChoice, Launch, join, kernel_for
from hcp.attention.rotary import Rotary
from hcp.exchange.tables import Entry


def padded(length: int, degree: int) -> int:
    """Return the tokens of a sequence, padded to full chunks."""
    return -(-length // (2 * degree)) * 2 * degree


class Part(NamedTuple):
    """One step's work: rows of queries against rows of the received keys; None: all rows."""

    queries: Tensor | None
    keys: Tensor | None
    launches: list[Launch]


class Ring:
    """The ranks of a micro-batch as a ring, and the work of each step."""

    def __init__(
        self, cp: hcp.ContextParallelHandler, dtype: torch.dtype, family: str = "torch"
    ) -> None:
        lengths = cp.layout.lengths
        uneven = [n for n in lengths if n % (2 * cp.degree)]
        if uneven:
            raise ValueError(f"lengths {uneven} expected to be multiples of {2 * cp.degree}")
        self.size, self.place, self.ranks = cp.degree, cp.group.rank, cp.group.global_ranks
        device = cp.cu_seqlens.device
        self.kernel: Kernel = kernel_for(device, dtype, KernelChoice(family))
        own = [n // self.size for n in lengths]
        starts = [sum(own[:i]) for i in range(len(own))]
        self.rows = sum(own)
        first, second = (
            torch.cat([torch.arange(s + part * n // 2, s + (part + 1) * n // 2)
                       for s, n in zip(starts, own, strict=True)]).to(device)
            for part in (0, 1)
        )  # fmt: skip
        whole = [*zip(starts, own, strict=True)]
        halves = [(s // 2, n // 2) for s, n in whole]
        square = [Entry(s, n, s, n, 1 - n, 0) for s, n in whole]
        packs = self.kernel.packs
        self._parts = {
            "own": Part(None, None, join(square, packs=packs)),
            "earlier": Part(None, first, join([*map(_block, whole, halves)], packs=packs)),
            "later": Part(second, None, join([*map(_block, halves, whole)], packs=packs)),
        }
        self.runs = self._runs(whole)

    def sources(self) -> Iterator[int]:
        """Yield the ranks whose keys are here, step by step."""
        return ((self.place - step) % self.size for step in range(self.size))

    def part(self, source: int) -> Part:
        if source == self.place:
            return self._parts["own"]
        return self._parts["earlier" if source < self.place else "later"]

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Send to the next rank. The returned function waits for the previous rank's tensor."""
        received = torch.empty_like(tensor)
        after = self.ranks[(self.place + 1) % self.size]
        before = self.ranks[(self.place - 1) % self.size]
        both = [dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, received, before)]
        works = dist.batch_isend_irecv(both)

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    def _runs(self, whole: list[tuple[int, int]]) -> Tensor:
        """Return the records of merge and reduce: rows of queries and of every step's results."""
        sources = list(self.sources())
        records = []
        for start, rows in whole:
            half = rows // 2
            for second in (0, 1):
                row = start + second * half
                for step, source in enumerate(sources):
                    if source <= self.place:
                        records.append((row, half, step, row))
                    elif second:
                        records.append((row, half, step, start // 2))
        return torch.tensor(records, dtype=torch.int64).view(-1, 4)


def _block(queries: tuple[int, int], keys: tuple[int, int]) -> Entry:
    """Return a block in which all queries see all keys."""
    return Entry(queries[0], queries[1], keys[0], keys[1], -queries[1], keys[1])


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float
    ) -> Tensor:
        kv = torch.stack((key, value))
        outs, lses = [], []
        for step, source in enumerate(ring.sources()):
            arriving = ring.pass_on(kv) if step + 1 < ring.size else None
            out, lse = _forward(ring, ring.part(source), query, kv[0], kv[1], scale)
            outs.append(out)
            lses.append(lse)
            if arriving is not None:
                kv = arriving()
        if ring.size > 1:
            out, lse = ops.merge(outs, lses, ring.runs, ring.rows)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        ring, scale = ctx.ring, ctx.scale
        kv, grad_out = torch.stack((key, value)), grad_out.contiguous()
        queries, sums = [], None
        for step, source in enumerate(ring.sources()):
            arriving = ring.pass_on(kv) if step + 1 < ring.size else None
            part = ring.part(source)
            *grads, grad_query = _backward(
                ring, part, grad_out, query, kv[0], kv[1], out, lse, scale
            )
            queries.append(grad_query)
            if sums is None:
                total = torch.stack(grads)
            else:
                total = sums()
                for into, grad in zip(total, grads, strict=True):
                    if part.keys is None:
                        into += grad
                    else:
                        into.index_add_(0, part.keys, grad)
            sums = ring.pass_on(total) if ring.size > 1 else None
            if arriving is not None:
                kv = arriving()
        if sums is not None:
            total = sums()
            grad_query = ops.reduce([q.flatten(1) for q in queries], ring.runs, ring.rows)
        return grad_query.view_as(query), total[0], total[1], None, None


def _forward(
    ring: Ring, part: Part, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = _taken(part, query, key, value)
    results = [
        ring.kernel.forward(
            launch, query[launch.queries], key[launch.keys], value[launch.keys], scale
        )
        for launch in part.launches
    ]
    outs, lses = zip(*results, strict=True)
    return (outs[0], lses[0]) if len(results) == 1 else (torch.cat(outs), torch.cat(lses))


def _backward(
    ring: Ring,
    part: Part,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of keys, values and queries."""
    if part.queries is not None:
        grad_out, out, lse = (x[part.queries] for x in (grad_out, out, lse))
    query, key, value = _taken(part, query, key, value)
    results = []
    for launch in part.launches:
        q, k = launch.queries, launch.keys
        tensors = (query[q], key[k], value[k], out[q], lse[q])
        results.append(ring.kernel.backward(launch, (grad_out[q], None), tensors, scale))
    queries, keys, values = zip(*results, strict=True)
    if len(results) == 1:
        return keys[0], values[0], queries[0]
    return torch.cat(keys), torch.cat(values), torch.cat(queries)


def _taken(part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if part.queries is not None:
        query = query[part.queries]
    if part.keys is not None:
        key, value = key[part.keys], value[part.keys]
    return query, key, value


class OnRing:
    """A micro-batch's handler, whose attention is the ring's."""

    def __init__(
        self, cp: hcp.ContextParallelHandler, dtype: torch.dtype, family: str = "torch"
    ) -> None:
        self._cp = cp
        self._ring = Ring(cp, dtype, family) if cp.degree else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cp, name)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        rotary_pos_emb: Rotary | None = None,
        **options: object,
    ) -> Tensor:
        """Compute causal attention. The ring has none of the other options of hcp's layers."""
        if rotary_pos_emb is not None:
            query, key = (self._cp.apply_rotary_pos_emb(x, rotary_pos_emb) for x in (query, key))
        if self._ring is None:
            return query * 0
        scale = query.shape[-1] ** -0.5
        out: Tensor = RingAttention.apply(query, key, value, self._ring, scale)
        return out
