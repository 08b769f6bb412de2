"""Cross-attention: queries of one layout against the keys of another, of the same sequences.

In one exchange each rank receives the keys and values that its queries see. It attends to them in
one pass. Masks are aligned bottom right, as FlashAttention's: in a sequence with N queries and M
keys, query i stands at key i + M - N. Where a sequence has several documents, each of its queries
sees the keys of its own; N and M are then those of documents.

T query rows on this rank, K key rows on this rank, S keys that its queries see, H query heads, G
key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp import ops
from hcp.attention.checks import check, check_options, scale_of, window_of
from hcp.attention.kernels import Choice, Kernel, Launch, kernel_for, scores_of_sinks, wide
from hcp.attention.layer import as_kernels_take
from hcp.exchange.agreement import (
    Kind,
    LayerName,
    Stamp,
    agree_once,
    refuse_transforms,
    rows_like,
)
from hcp.exchange.calls import Calls
from hcp.exchange.layout import Layout, Span
from hcp.exchange.move import copy_rows
from hcp.exchange.tables import Entry, Move, Origin
from hcp.exchange.transport import Transport, rows_of


class TokenRun(NamedTuple):
    """Consecutive tokens of a document on one rank."""

    start: int
    """The first token, as the document counts."""
    row: int
    """Its row on the rank."""
    rows: int


class Visibility(NamedTuple):
    """Which keys the queries of one document see."""

    queries: int
    keys: int
    left: int
    right: int

    @property
    def ahead(self) -> int:
        """The key at which query 0 stands."""
        return self.keys - self.queries

    def keys_of(self, run: TokenRun) -> range:
        """Keys that some query of the run sees."""
        first, end = run.start + self.ahead, run.start + run.rows + self.ahead
        begin = 0 if self.left < 0 else max(0, first - self.left)
        return range(
            begin, max(begin, self.keys if self.right < 0 else min(self.keys, end + self.right))
        )

    def seeing(self, run: TokenRun) -> TokenRun:
        """The queries of the run that see any key. Those too far before the first key see none."""
        blind = 0 if self.right < 0 else min(run.rows, max(0, -self.ahead - self.right - run.start))
        return TokenRun(run.start + blind, run.row + blind, run.rows - blind)

    def entry(self, run: TokenRun, keys: range, key_row: int) -> Entry:
        """An entry of queries, each of which sees some key, and the keys that they see."""
        at = run.start + self.ahead - keys.start
        low = 1 - run.rows if self.left < 0 else max(1 - run.rows, at - self.left)
        high = len(keys) - 1 if self.right < 0 else min(len(keys) - 1, at + self.right)
        return Entry(run.row, run.rows, key_row, len(keys), low, high)


class RankSpans:
    """The tokens that each rank holds of each document of a micro-batch. A document has the number
    of its sequence, from the second of a sequence on plus 2^32 for each one before it."""

    def __init__(self, layout: Layout) -> None:
        self.documents: dict[int, list[int]] = {}
        """The documents of each rank's group, in order."""
        self.lengths: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        """How many documents each sequence has."""
        self._runs: dict[tuple[int, int], list[TokenRun]] = {}
        for group in layout.plan.micro_batches[layout.micro_batch]:
            ranks = range(group.first_rank, group.first_rank + group.degree)
            self._add([Layout(layout.plan, layout.micro_batch, rank) for rank in ranks])

    def _add(self, layouts: Sequence[Layout]) -> None:
        """The layouts of a group's ranks."""
        whole = layouts[0].documents
        own = [self._numbered(document) for document in whole]
        for layout in layouts:
            self.documents[layout.rank] = own
            row = 0
            for number, (_, start, rows) in zip(layout.span_documents, layout.spans, strict=True):
                runs = self._runs.setdefault((layout.rank, own[number]), [])
                runs.append(TokenRun(start - whole[number].start, row, rows))
                row += rows

    def _numbered(self, document: Span) -> int:
        before = self.counts.get(document.sequence, 0)
        self.counts[document.sequence] = before + 1
        number = document.sequence + (before << 32)
        self.lengths[number] = document.rows
        return number

    def of(self, rank: int, document: int) -> list[TokenRun]:
        return self._runs.get((rank, document), [])


class KeyRoute:
    """The route of keys to the ranks whose queries see them, between two layouts; and the entries
    that are computed there."""

    def __init__(self, queries: Layout, keys: Layout, window: tuple[int, int]) -> None:
        """``queries``, ``keys``: this rank's layouts in the two plans. ``window``: as
        FlashAttention has it, (-1, 0) being causal."""
        self._queries, self._keys, self.window = queries, keys, window
        _check_sequences(queries, keys)
        self._query_spans, self._key_spans = RankSpans(queries), RankSpans(keys)
        _check_documents(self._query_spans, self._key_spans)
        self.agreed: set[int] = set()
        self.blocks: dict[Kernel, Blocks] = {}
        rank = queries.rank
        documents = self._query_spans.documents.get(rank, [])
        self.key_starts = list(
            itertools.accumulate(
                (sum(map(len, self._seen(rank, document))) for document in documents), initial=0
            )
        )
        """The first key row of each document on this rank, then the number of all key rows."""
        self.source_rows, self.output_rows = keys.rows, self.key_starts[-1]
        starts = dict(zip(documents, self.key_starts, strict=False))
        self.sends: list[Move] = []
        self.receives: list[Move] = []
        pack: list[tuple[int, int]] = []
        stores: list[tuple[int, int, int]] = []  # output row, wire row, rows
        sent = received = 0
        for peer in range(keys.plan.ranks):
            first = sent
            for _, _, row, rows in self._carried(rank, peer):
                pack.append((row, rows))
                sent += rows
            self.sends += [Move(peer, first, sent - first)] if sent > first else []
            first = received
            for document, place, _, rows in self._carried(peer, rank):
                stores.append((starts[document] + place, received, rows))
                received += rows
            self.receives += [Move(peer, first, received - first)] if received > first else []
        self.sent_rows, self.received_rows = sent, received
        self.pack = _table(pack, 2)
        self.arrange = _table([(wire, rows) for _, wire, rows in sorted(stores)], 2)

    def _visibility(self, document: int) -> Visibility:
        queries, keys = self._query_spans.lengths, self._key_spans.lengths
        return Visibility(queries[document], keys[document], *self.window)

    def _query_runs(self, rank: int, document: int) -> list[TokenRun]:
        """A rank's queries of a document; all as one run where no window tells them apart."""
        runs = self._query_spans.of(rank, document)
        if self.window != (-1, -1) or not runs:
            return runs
        return [TokenRun(0, runs[0].row, sum(run.rows for run in runs))]

    def _seen(self, rank: int, document: int) -> list[range]:
        """Keys of a document that queries of a rank see: ascending ranges with gaps between."""
        visibility = self._visibility(document)
        seen: list[range] = []
        for run in self._query_runs(rank, document):
            keys = visibility.keys_of(run)
            if seen and keys and keys.start <= seen[-1].stop:
                seen[-1] = range(seen[-1].start, max(seen[-1].stop, keys.stop))
            elif keys:
                seen.append(keys)
        return seen

    def _carried(self, owner: int, reader: int) -> Iterator[tuple[int, int, int, int]]:
        """Keys of an owner that a reader sees, in the order of the wire: (document, place among all
        that the reader sees of it, the owner's row, rows)."""
        for document in self._query_spans.documents.get(reader, ()):
            place = 0
            for seen in self._seen(reader, document):
                for start, row, rows in self._key_spans.of(owner, document):
                    begin, end = max(start, seen.start), min(start + rows, seen.stop)
                    if begin < end:
                        yield document, place + begin - seen.start, row + begin - start, end - begin
                place += len(seen)

    def blocks_of(self, kernel: Kernel) -> Blocks:
        """The launches of a kernel; made once for all layers."""
        if kernel not in self.blocks:
            self.blocks[kernel] = _blocks(
                kernel, list(self._entries()), self._queries.rows, self.output_rows
            )
        return self.blocks[kernel]

    def _entries(self) -> Iterator[Entry]:
        rank = self._queries.rank
        documents = self._query_spans.documents.get(rank, [])
        for document, key_row in zip(documents, self.key_starts, strict=False):
            visibility, seen = self._visibility(document), self._seen(rank, document)
            for whole in self._query_runs(rank, document):
                keys, run = visibility.keys_of(whole), visibility.seeing(whole)
                if keys and run.rows > 0:
                    yield visibility.entry(run, keys, key_row + _place_in(seen, keys.start))


def _place_in(ranges: Sequence[range], key: int) -> int:
    """The place of a key among the keys of all ranges, end to end."""
    return sum(min(key, r.stop) - r.start for r in ranges if r.start <= key)


def _table(records: Sequence[tuple[int, ...]], width: int) -> Tensor:
    return torch.tensor(records, dtype=torch.int64, device="cpu").view(-1, width)


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


def _check_documents(queries: RankSpans, keys: RankSpans) -> None:
    """Raise ValueError unless sequences have as many documents of queries as of keys."""
    for sequence, count in queries.counts.items():
        if keys.counts[sequence] != count:
            raise ValueError(
                f"sequence {sequence} has {count} documents in the queries' plan and "
                f"{keys.counts[sequence]} in the keys', expected as many: queries see the keys of "
                "the document of their own's number"
            )


# ---- blocks --------------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """A kernel's launches, and runs that say where their rows belong: (row, rows, launch, row of
    the launch)."""

    launches: list[Launch]
    query_runs: Tensor
    key_runs: Tensor
    query_rows: int
    key_rows: int


def _blocks(kernel: Kernel, entries: Sequence[Entry], query_rows: int, key_rows: int) -> Blocks:
    launches = kernel.launches(entries) if entries else []
    places = [(entry, i, launch) for i, launch in enumerate(launches) for entry in launch.entries]
    by_query = [(e.query_row, e.query_rows, i, e.query_row - c.queries.start) for e, i, c in places]
    by_key = [(e.key_row, e.key_rows, i, e.key_row - c.keys.start) for e, i, c in places]
    return Blocks(launches, _runs(by_query), _runs(by_key), query_rows, key_rows)


def _runs(records: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Cut records where any of them begins or ends, so that records of the same rows are one
    run."""
    edges = sorted({edge for row, rows, *_ in records for edge in (row, row + rows)})
    cut = []
    for row, rows, part, part_row in records:
        own = edges[bisect_left(edges, row) : bisect_left(edges, row + rows) + 1]
        cut += [(a, b - a, part, part_row + a - row) for a, b in itertools.pairwise(own)]
    return _table(sorted(cut), 4)


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
            kernel.forward(
                launch, query[launch.queries], key[launch.keys], value[launch.keys], scale
            )
            for launch in blocks.launches
        ]
        if parts:
            outs, lses = ([part[i] for part in parts] for i in range(2))
            out, lse = ops.merge(outs, lses, blocks.query_runs, blocks.query_rows)
        else:
            out = query.new_zeros(*query.shape[:2], value.shape[2])
            lse = query.new_full(query.shape[:2], -torch.inf, dtype=wide(query.dtype))
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        if not blocks.launches:
            return *(torch.zeros_like(x) for x in (query, key, value)), None, None, None
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
        parts = [
            ctx.kernel.backward(
                launch,
                grad_out[launch.queries],
                None if grad_lse is None else grad_lse[launch.queries],
                query[launch.queries],
                key[launch.keys],
                value[launch.keys],
                out[launch.queries],
                lse[launch.queries],
                ctx.scale,
            )
            for launch in blocks.launches
        ]
        placed = (
            (query, blocks.query_runs, blocks.query_rows),
            (key, blocks.key_runs, blocks.key_rows),
            (value, blocks.key_runs, blocks.key_rows),
        )
        grads = [
            ops.reduce([rows_of(part[i]) for part in parts], runs, rows).view_as(whole)
            for i, (whole, runs, rows) in enumerate(placed)
        ]
        return *grads, None, None, None


# ---- the call ------------------------------------------------------------------------------------


class CrossAttention:
    """Makes the calls of cross-attention of a handler. Each route is made once, for all layers."""

    def __init__(
        self, layout: Layout, transport: Transport, calls: Calls, origin: Origin, kernel_family: str
    ) -> None:
        """``layout``, ``origin``: of the queries. ``kernel_family``: whose kernels compute it."""
        self._layout, self._transport, self._calls = layout, transport, calls
        self._origin, self._kernel_family = origin, kernel_family
        self._routes: dict[tuple[object, ...], KeyRoute] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        keys: tuple[Layout, Origin],
        *,
        causal: bool,
        window_size: tuple[int, int],
        softmax_scale: float | None,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`hcp.ContextParallelHandler.cross_attention`."""

        def attended(number: int) -> tuple[Tensor, Tensor]:
            refuse_transforms("cross_attention", query, key, value)
            check_options(softcap, 0.0)
            if query.shape[0] != self._layout.rows:
                raise ValueError(f"query has {query.shape[0]} rows, expected {self._layout.rows}")
            layout, origin = keys
            for plan in (self._layout.plan, layout.plan):
                plan.core.expect_no_branches("cp.cross_attention")
            return _cross_attention(
                self._transport,
                self._route(layout, window_of(window_size, causal)),
                *as_kernels_take(query, key, value),
                sinks,
                scale_of(query, softmax_scale),
                Choice(self._kernel_family, softcap),
                (self._origin, origin),
                number,
                self._calls.layer(),
            )

        return self._calls.make("cross_attention", attended, everywhere=True)

    def _route(self, keys: Layout, window: tuple[int, int]) -> KeyRoute:
        place = keys.plan.checksum, keys.micro_batch, window
        if place not in self._routes:
            self._routes[place] = KeyRoute(self._layout, keys, window)
        return self._routes[place]


def _cross_attention(
    transport: Transport,
    route: KeyRoute,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    choice: Choice,
    origins: tuple[Origin, Origin],
    number: int,
    layer: LayerName,
) -> tuple[Tensor, Tensor]:
    check(query[:0], key[:0], value[:0], sinks, 0, transport.device)
    for name, x, rows in (("key", key, route.source_rows), ("value", value, route.source_rows)):
        if x.shape[0] != rows:
            raise ValueError(
                f"{name} has {x.shape[0]} rows, expected {rows}: this rank's rows in keys="
            )
    kernel = kernel_for(query.device, query.dtype, choice)
    queries, keys = origins
    kind = Kind(
        "cross_attention",
        queries,
        keys_of=[f"{keys.plan:016x}", keys.step, keys.micro_batch],
        query=rows_like(query),
        key=rows_like(key),
        value=rows_like(value),
        window_size=route.window,
        softmax_scale=scale,
        softcap=choice.softcap,
        sinks=sinks is not None,
    )
    stamp = Stamp(kind, number, layer=layer)
    agree_once(transport, route, stamp)
    whole = copy_rows(transport, route, [rows_of(key), rows_of(value)], stamp)
    whole_key, whole_value = torch.split(whole, [key.shape[1:].numel(), value.shape[1:].numel()], 1)
    out: Tensor
    lse: Tensor
    out, lse = _Attend.apply(  # type: ignore[no-untyped-call]
        query,
        whole_key.view(-1, *key.shape[1:]),
        whole_value.view(-1, *value.shape[1:]),
        kernel,
        route.blocks_of(kernel),
        scale,
    )
    return (out, lse) if sinks is None else _with_sinks(out, lse, sinks)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A sink is one more score, whose value is 0. A sink of -inf is none."""
    scores = scores_of_sinks(sinks, lse.dtype).expand_as(lse)
    blind = (lse == -torch.inf) & (scores == -torch.inf)  # their difference would be NaN
    own, scores = lse.masked_fill(blind, 0), scores.masked_fill(blind, 0)
    both = torch.logaddexp(own, scores)
    seen = (out * (own - both).exp().unsqueeze(-1)).to(out.dtype)
    return seen, both.masked_fill(blind, -torch.inf)
