"""Cross-attention: queries of one layout against the keys of another, of the same sequences.

Each rank gets the whole keys and values of its own sequences, in one exchange, and attends to them
in one pass. T query rows on this rank, K key rows on this rank, S keys of its sequences, H query
heads, G key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp import ops
from hcp.attention import check
from hcp.exchange import Transport, agree_once, signature
from hcp.halo import carry_with_gradients
from hcp.kernels import Call, Choice, Kernel, kernel_for
from hcp.layout import Entry, Layout, Move


class Reads:
    """Whole keys to the ranks whose queries want them: a route between two layouts."""

    def __init__(self, queries: Layout, keys: Layout) -> None:
        """``queries``, ``keys``: this rank's layouts in the two plans."""
        rank = queries.rank
        _check_sequences(queries, keys)
        owned = _Spans(keys)
        starts = dict(zip(queries.sequences, _starts(queries, keys), strict=True))
        self.source_rows = keys.rows
        self.output_rows = sum(keys.plan.lengths[s] for s in queries.sequences)
        self.sends: list[Move] = []
        self.receives: list[Move] = []
        pack: list[tuple[int, int]] = []
        stores: list[tuple[int, int, int]] = []  # output row, wire row, rows
        sent = received = 0
        for peer in range(keys.plan.ranks):
            first = sent
            for sequence in _sequences_of(queries, peer):
                for _, row, rows in owned.of(rank, sequence):
                    pack.append((row, rows))
                    sent += rows
            self.sends += [Move(peer, first, sent - first)] if sent > first else []
            first = received
            for sequence in queries.sequences:
                for start, _, rows in owned.of(peer, sequence):
                    stores.append((starts[sequence] + start, received, rows))
                    received += rows
            self.receives += [Move(peer, first, received - first)] if received > first else []
        self.sent_rows, self.received_rows = sent, received
        self.pack = torch.tensor(pack, dtype=torch.int64, device="cpu").view(-1, 2)
        arrange = [(wire, rows) for _, wire, rows in sorted(stores)]
        self.arrange = torch.tensor(arrange, dtype=torch.int64, device="cpu").view(-1, 2)
        self.agreed: set[tuple[int, ...]] = set()
        self.blocks: dict[Kernel, Blocks] = {}
        self._layouts = queries, keys

    def blocks_of(self, kernel: Kernel) -> Blocks:
        """The work of a kernel; made once for all layers."""
        if kernel not in self.blocks:
            self.blocks[kernel] = _blocks(kernel, *self._layouts)
        return self.blocks[kernel]


class _Spans:
    """What each rank holds of each sequence of a micro-batch."""

    def __init__(self, layout: Layout) -> None:
        self._held: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for group in layout.plan.micro_batches[layout.micro_batch]:
            for rank in range(group.first_rank, group.first_rank + group.degree):
                row = 0
                for sequence, start, rows in Layout(layout.plan, layout.micro_batch, rank).spans:
                    held = self._held.setdefault((rank, sequence), [])
                    held.append((start, row, rows))
                    row += rows

    def of(self, rank: int, sequence: int) -> list[tuple[int, int, int]]:
        """(first token, local row, rows) of each."""
        return self._held.get((rank, sequence), [])


def _sequences_of(layout: Layout, rank: int) -> tuple[int, ...]:
    for group in layout.plan.micro_batches[layout.micro_batch]:
        if group.first_rank <= rank < group.first_rank + group.degree:
            return tuple(group.sequences)
    return ()


def _check_sequences(queries: Layout, keys: Layout) -> None:
    wanted, there = (
        {s for group in layout.plan.micro_batches[layout.micro_batch] for s in group.sequences}
        for layout in (queries, keys)
    )
    if queries.plan.ranks != keys.plan.ranks or not wanted <= there:
        raise ValueError(
            f"the queries' micro-batch has sequences {sorted(wanted)} on {queries.plan.ranks} "
            f"ranks, the keys' {sorted(there)} on {keys.plan.ranks}, expected the same ranks and "
            "the keys of every sequence: plan both so that their micro-batches belong together"
        )


def _starts(queries: Layout, keys: Layout) -> list[int]:
    lengths = (keys.plan.lengths[s] for s in queries.sequences)
    return list(itertools.accumulate(lengths, initial=0))[:-1]


# ---- blocks --------------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """A kernel's calls, and where their rows belong: (row, rows, call, row of the call)."""

    calls: list[Call]
    query_runs: Tensor
    key_runs: Tensor
    query_rows: int
    key_rows: int


def _blocks(kernel: Kernel, queries: Layout, keys: Layout) -> Blocks:
    bounds = queries.cu_seqlens.tolist()
    rows = [end - start for start, end in itertools.pairwise(bounds)]
    starts = _starts(queries, keys)
    lengths = [keys.plan.lengths[s] for s in queries.sequences]
    entries = [
        Entry(q, n, k, m, 1 - n, m - 1)
        for q, n, k, m in zip(bounds, rows, starts, lengths, strict=False)
        if n > 0
    ]
    calls = kernel.calls(entries) if entries else []
    places = [(entry, i, call) for i, call in enumerate(calls) for entry in call.entries]
    by_query = [(e.query_row, e.query_rows, i, e.query_row - c.queries.start) for e, i, c in places]
    by_key = [(e.key_row, e.key_rows, i, e.key_row - c.keys.start) for e, i, c in places]
    return Blocks(calls, _runs(by_query), _runs(by_key), queries.rows, sum(lengths))


def _runs(records: list[tuple[int, int, int, int]]) -> Tensor:
    return torch.tensor(sorted(records), dtype=torch.int64, device="cpu").view(-1, 4)


class _Attend(torch.autograd.Function):
    """(T, H, D), (S, G, D), (S, G, E) to (T, H, E) and the log-sum-exp (T, H)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        blocks: Blocks,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.kernel, ctx.blocks, ctx.scale = kernel, blocks, scale
        ctx.set_materialize_grads(False)
        parts = [
            kernel.forward(call, query[call.queries], key[call.keys], value[call.keys], scale)
            for call in blocks.calls
        ]
        if parts:
            outs, lses = ([part[i] for part in parts] for i in range(2))
            out, lse = ops.merge(outs, lses, blocks.query_runs, blocks.query_rows)
        else:
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            out = query.new_zeros(*query.shape[:2], value.shape[2])
            lse = query.new_full(query.shape[:2], -torch.inf, dtype=wide)
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        if not blocks.calls:
            return *(torch.zeros_like(x) for x in (query, key, value)), None, None, None
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
        parts = [
            ctx.kernel.backward(
                call,
                grad_out[call.queries],
                None if grad_lse is None else grad_lse[call.queries],
                query[call.queries],
                key[call.keys],
                value[call.keys],
                out[call.queries],
                lse[call.queries],
                ctx.scale,
            )
            for call in blocks.calls
        ]
        placed = (
            (query, blocks.query_runs, blocks.query_rows),
            (key, blocks.key_runs, blocks.key_rows),
            (value, blocks.key_runs, blocks.key_rows),
        )
        grads = [
            ops.reduce([part[i].flatten(1) for part in parts], runs, rows).view_as(whole)
            for i, (whole, runs, rows) in enumerate(placed)
        ]
        return *grads, None, None, None


# ---- the call ------------------------------------------------------------------------------------


def cross_attention(
    transport: Transport,
    reads: Reads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    choice: Choice,
) -> tuple[Tensor, Tensor]:
    """See :meth:`hcp.ContextParallelHandler.cross_attention`."""
    check(query[:0], key[:0], value[:0], sinks, 0, transport.device)
    for name, x, rows in (("key", key, reads.source_rows), ("value", value, reads.source_rows)):
        if x.shape[0] != rows:
            raise ValueError(
                f"{name} has {x.shape[0]} rows, expected {rows}: this rank's rows in keys="
            )
    kernel = kernel_for(query.device, query.dtype, choice)
    tag = agree_once(transport, reads, signature(key, value))
    whole = carry_with_gradients(transport, reads, [key.flatten(1), value.flatten(1)], tag)
    whole_key, whole_value = torch.split(whole, [key.shape[1:].numel(), value.shape[1:].numel()], 1)
    out: Tensor
    lse: Tensor
    out, lse = _Attend.apply(  # type: ignore[no-untyped-call]
        query,
        whole_key.view(-1, *key.shape[1:]),
        whole_value.view(-1, *value.shape[1:]),
        kernel,
        reads.blocks_of(kernel),
        scale,
    )
    return (out, lse) if sinks is None else _with_sinks(out, lse, sinks)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A sink is one more score, whose value is 0."""
    both = torch.logaddexp(lse, sinks.to(lse.dtype).expand_as(lse))
    return (out * (lse - both).exp().unsqueeze(-1)).to(out.dtype), both
