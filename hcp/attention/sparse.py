"""Sparse attention: each query attends to the keys that were chosen for it, all others are hidden.

DeepSeek sparse attention (DSA, https://arxiv.org/abs/2512.02556) chooses keys by a small indexer.
The indexer's keys are gathered by every rank whose queries may see them. Of the rows that attention
reads, a rank fetches those that any of its queries chose, each once: it tells the owners which.

T query rows on this rank, N rows that they may see (or M that were fetched), H heads, G key-value
heads, D head size, E head size of values, W elements of a fetched row, K chosen keys of a query,
n queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hcp import _core, ops
from hcp.attention.checks import as_autocast, check_heads, scale_of
from hcp.attention.cross import KeyRoute
from hcp.attention.kernels import wide
from hcp.attention.latent import Expand, check_expanded
from hcp.exchange.agreement import Stamp, refuse_transforms
from hcp.exchange.calls import Calls, HandlerPart
from hcp.exchange.layout import Layout, buffer_of
from hcp.exchange.move import copy_rows, exchange_rows
from hcp.exchange.tables import Move
from hcp.exchange.transport import Transport

_ELEMENTS = 2**24
"""Elements that a few queries read at a time. More queries wait."""

_CAUSAL = -1, 0


class SparseAttention(HandlerPart):
    """The keys that an indexer chooses, and attention to the chosen keys: ``cp.sparse``."""

    def __init__(self, layout: Layout, transport: Transport, calls: Calls) -> None:
        self._layout, self._transport, self._calls = layout, transport, calls

    def top_k(
        self, query: Tensor, key: Tensor, weights: Tensor, top_k: int, *, relu: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Choose, for each row, the keys of its sequence up to itself that an indexer scores
        highest (DeepSeek sparse attention, https://arxiv.org/abs/2512.02556).

        The score of key s for query t is the sum over the indexer's heads of weights[t, h] *
        relu(query[t, h] . key[s]), computed in float32 or wider. Of equal scores the first keys are
        chosen.

        Rows of ``key`` travel to the ranks whose rows may see them. Every rank of the group calls
        it. Not for compiled layers.

        Args:
            query: (T, heads, size), the indexer's.
            key: (T, size), the indexer's.
            weights: (T, heads), the indexer's.
            top_k: keys of a row.
            relu: False sums the products themselves.

        Returns:
            Indices, int64 (T, top_k): places of keys in the row's sequence, ascending, -1 where it
            has fewer; and their scores (T, top_k), -inf for none, with gradients, for the indexer's
            own loss.
        """

        def chosen(number: int) -> tuple[Tensor, Tensor]:
            refuse_transforms("sparse.top_k", query, key, weights)
            self._refuse_masks("sparse.top_k")
            self._check_indexer(query, key, weights, top_k)
            stamp = self._stamp("sparse.top_k", number, key, top_k=top_k, relu=int(relu))
            whole = copy_rows(self._transport, self._route, [key.contiguous()], stamp)
            with torch.no_grad():
                places = self._choose(query, whole, weights, top_k, relu)
            rows = _from(places, self._starts)
            return places, _IndexScores.apply(query, whole, weights, rows, relu)  # type: ignore[no-untyped-call]

        return self._calls.make("sparse.top_k", chosen)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        indices: Tensor,
        expand: Expand | None = None,
        softmax_scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute attention of each row to the keys that were chosen for it, with gradients.

        Each rank fetches the rows that its own rows chose, each once. It computes the formula, a
        few rows at a time. Every rank of the group calls it. Not for compiled layers.

        Args:
            query: (T, H, D).
            key: (T, G, D), or latent rows (T, W) with ``expand``.
            value: (T, G, E); left out with ``expand``.
            indices: what ``top_k`` gives, int64 (T, K), places of keys in the row's sequence,
                none after the row itself and none twice, -1 for none; all heads attend to the same
                keys.
            expand: as in ``cp.attention``; it may be any function here, and gets the rows that this
                rank fetched.
            softmax_scale: by default 1 / sqrt(D).

        Returns:
            The output (T, H, E), the log-sum-exp (T, H), and the softmax weights (T, K), means over
            the heads, without a gradient: the target of the indexer's loss. A row without keys
            gives 0, and -inf as its log-sum-exp.
        """

        def attended(number: int) -> tuple[Tensor, Tensor, Tensor]:
            tensors = [query, key] if value is None else [query, key, value]
            refuse_transforms("sparse.attention", *tensors)
            self._refuse_masks("sparse.attention")
            given = [as_autocast(x) for x in tensors]
            self._check_rows(given, indices, expand)
            queries, *keys = given
            rows = torch.cat([x.flatten(1) for x in keys], 1)
            scale = scale_of(queries, softmax_scale)
            options = {"top_k": indices.shape[1], "latent": int(expand is not None)}
            stamps = [
                self._stamp("sparse.attention", number, rows, **options, part=i) for i in (0, 1)
            ]
            fetched, chosen = self._fetch(rows, _from(indices, self._starts), stamps)
            if expand is None:
                sizes = [x.shape[1:].numel() for x in keys]
                parts = torch.split(fetched, sizes, 1)
                own = [p.view(-1, *x.shape[1:]) for p, x in zip(parts, keys, strict=True)]
            else:
                own = _expanded(expand, fetched, queries)
            result: tuple[Tensor, Tensor, Tensor] = _Chosen.apply(queries, *own, chosen, scale)  # type: ignore[no-untyped-call]
            return result

        return self._calls.make("sparse.attention", attended)

    # ---- checks ----

    def _refuse_masks(self, name: str) -> None:
        if self._layout.plan.masks:
            raise ValueError(
                f"cp.{name} is called in a plan with the masks {list(self._layout.plan.masks)}, "
                "expected none: keys are chosen among all that come before a row in its sequence; "
                "plan each document as a sequence of its own"
            )

    def _check_indexer(self, query: Tensor, key: Tensor, weights: Tensor, top_k: int) -> None:
        rows, device = self._layout.rows, self._transport.device
        if query.dim() != 3 or query.shape[0] != rows:
            raise ValueError(
                f"query has shape {tuple(query.shape)}, expected ({rows}, heads, size): this "
                "rank's rows"
            )
        wanted = {"key": (rows, query.shape[2]), "weights": (rows, query.shape[1])}
        for (name, shape), x in zip(wanted.items(), (key, weights), strict=True):
            if tuple(x.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {shape}")
        for name, x in (("query", query), ("key", key), ("weights", weights)):
            if x.device != device or x.dtype not in ops.FLOATS:
                raise ValueError(
                    f"{name} is {x.dtype} on {x.device}, expected one of {ops.FLOATS} on {device}"
                )
        if type(top_k) is not int or top_k < 1:
            raise ValueError(f"top_k is {top_k!r}, expected an integer >= 1")

    def _check_rows(self, given: Sequence[Tensor], places: Tensor, expand: Expand | None) -> None:
        """Raise ValueError unless tensors and places are of this rank's rows."""
        query, key = given[:2]
        rows, device = self._layout.rows, self._transport.device
        if expand is None:
            if len(given) == 2:
                raise ValueError("value is None, expected a tensor, or expand= with latent rows")
            check_heads(*given)
            if key.shape[2] != query.shape[2]:
                raise ValueError(f"key has head size {key.shape[2]}, expected {query.shape[2]}")
        elif len(given) == 3 or key.dim() != 2 or query.dim() != 3:
            raise ValueError(
                f"query has shape {tuple(query.shape)} and key {tuple(key.shape)} with expand=, "
                "expected (rows, heads, size), latent rows (rows, width), and no value"
            )
        for name, x in zip(("query", "key", "value"), given, strict=False):
            if (x.shape[0], x.device, x.dtype) != (rows, device, query.dtype):
                raise ValueError(
                    f"{name} has {x.shape[0]} rows of {x.dtype} on {x.device}, expected {rows} of "
                    f"{query.dtype} on {device}"
                )
        if places.dtype != torch.int64 or places.dim() != 2 or places.shape[0] != rows:
            raise ValueError(
                f"indices is {places.dtype} of shape {tuple(places.shape)}, expected int64 "
                f"({rows}, keys): each row's keys, as places in its sequence, -1 for none"
            )
        wrong = (places < -1) | (places > self._positions.unsqueeze(1))
        before, after = places[:, :-1], places[:, 1:]
        ascend = (after < 0) | ((before >= 0) & (before < after))  # as top_k gives them
        outside, unordered = torch.stack([wrong.any(), ~ascend.all()]).tolist()
        if unordered and not outside:
            _refuse_twice(places)
        if outside:
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"indices[{row}, {column}] is {int(places[row, column])}, expected -1 or a key up "
                f"to the row's own place, {int(self._positions[row])}"
            )

    def _stamp(self, operation: str, number: int, x: Tensor, **options: int) -> Stamp:
        stamp = self._calls.stamp(operation, number, x, x.dtype, **options)
        return self._calls.agree(self._route, stamp)

    # ---- tables ----

    @cached_property
    def _route(self) -> KeyRoute:
        """Rows to the ranks whose queries may see them: sequences up to the last query there."""
        return KeyRoute(self._layout, self._layout, _CAUSAL)

    def _by_row(self, values: Tensor, padding: int) -> Tensor:
        """Values of this rank's rows, and one for its padding."""
        own = values, torch.full((self._layout.padding,), padding, device="cpu")
        with torch.inference_mode(False):
            return torch.cat(own).to(self._transport.device)

    @cached_property
    def _starts(self) -> Tensor:
        """(T,) the first gathered row of each row's sequence."""
        _, rows, first, *_ = self._route.section("ENTRIES").unbind(1)
        return self._by_row(first.repeat_interleave(rows), 0)

    @cached_property
    def _positions(self) -> Tensor:
        """(T,) each row's place in its sequence; -1 in padding."""
        tokens = self._layout.rows - self._layout.padding
        return self._by_row(self._layout.positions[:tokens], -1)

    @cached_property
    def _output_rows(self) -> Tensor:
        """(N,) where each row of the wire lies among the gathered rows."""
        first, rows = self._route.section("PLACES").unbind(1)
        with torch.inference_mode(False):
            begins = (first - rows.cumsum(0) + rows).repeat_interleave(rows)
            return (begins + torch.arange(len(begins), device="cpu")).to(self._transport.device)

    # ---- choosing ----

    def _choose(
        self, query: Tensor, whole: Tensor, weights: Tensor, top_k: int, relu: bool
    ) -> Tensor:
        """(T, K): the places of the keys of the highest scores, ascending, -1 for none."""
        places = torch.full((query.shape[0], top_k), -1, device=query.device)
        for row, rows, first, seen_rows, *_ in self._route.entries:
            keys, place = whole[first : first + seen_rows], seen_rows - rows
            for part in _parts(rows, query.shape[1] * len(keys)):
                begin, end = part.start, part.stop
                own, seen = slice(row + begin, row + end), keys[: place + end]
                scores = _index_scores(query[own], seen, weights[own], relu)
                after = torch.arange(place + begin + 1, place + end + 1, device=query.device)
                columns = torch.arange(len(seen), device=query.device)
                scores = scores.masked_fill(columns >= after.unsqueeze(1), -torch.inf)
                found = _highest(scores, after, top_k)
                places[own, : found.shape[1]] = found
        return places

    # ---- fetching ----

    def _fetch(
        self, rows: Tensor, wanted: Tensor, stamps: Sequence[Stamp]
    ) -> tuple[Tensor, Tensor]:
        """Rows (M, W) that were chosen, of this rank and others; and which of them each query
        chose, (T, K), -1 for none."""
        route, transport = self._route, self._transport
        marked = torch.zeros(route.output_rows + 1, dtype=torch.bool, device=rows.device)
        marked[wanted.flatten()] = True  # -1 is the row beyond
        asked = marked[self._output_rows]
        given = torch.empty(route.sent_rows, 1, dtype=torch.uint8, device=rows.device)
        flags = asked.to(torch.uint8).unsqueeze(1)
        transport.start(flags, route.receives, given, route.sends, stamp=stamps[0]).wait()
        sent = given.squeeze(1).bool()
        both = torch.cat([sent, asked]).to("cpu")
        sends = _kept(route.section("SENDS"), both[: len(sent)])
        receives = _kept(route.section("RECEIVES"), both[len(sent) :])
        wire = ops.pack([rows], route.pack, route.sent_rows)[sent]
        count = sum(move.rows for move in receives)
        fetched = exchange_rows(transport, wire, sends, receives, count, stamps[1])
        lies = torch.full_like(marked, -1, dtype=torch.int64)
        lies[self._output_rows] = asked.cumsum(0) - 1
        lies[-1] = -1
        return fetched, lies[wanted]


def _refuse_twice(places: Tensor) -> None:
    """Raise ValueError for a row that names a key twice."""
    ordered = places.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    for row, column in twice.nonzero()[:1].tolist():
        raise ValueError(
            f"indices[{row}] has key {int(ordered[row, column])} twice, expected each key once: it "
            "would count as two; fill rows of fewer keys with -1"
        )


def _expanded(expand: Expand, fetched: Tensor, queries: Tensor) -> list[Tensor]:
    """Keys and values of fetched rows. Models reshape them in ways that fail without any: then a
    row of zeros stands in."""
    count = len(fetched)
    rows = fetched if count else F.pad(fetched, (0, 0, 0, 1))
    return [x[:count] for x in check_expanded(expand(rows), rows, queries)]


def _from(places: Tensor, starts: Tensor) -> Tensor:
    """Places in sequences as gathered rows; -1 stays."""
    return torch.where(places < 0, places, places + starts.unsqueeze(1))


def _kept(moves: Tensor, kept: Tensor) -> list[Move]:
    """Moves of the rows that are kept, end to end."""
    return [Move(*move) for move in _core.keep_moves(buffer_of(moves), buffer_of(kept))]


def _highest(scores: Tensor, seen: Tensor, top_k: int) -> Tensor:
    """The columns of the highest scores of each row, ascending, -1 for none. Of equal scores the
    first columns count, so that no plan changes the choice. ``seen``: columns of each row that are
    not hidden."""
    columns = scores.shape[1]
    count = min(top_k, columns)
    least = scores.topk(count, dim=1).values[:, -1:]
    above = (scores > least) | scores.isnan()
    level = (scores == least) & (torch.arange(columns, device=scores.device) < seen.unsqueeze(1))
    room = count - above.sum(1, keepdim=True)
    chosen = above | (level & (level.cumsum(1) <= room))
    order = torch.where(chosen, torch.arange(columns, device=scores.device), columns)
    first = order.topk(count, dim=1, largest=False, sorted=True).values
    return first.masked_fill(first == columns, -1)


# ---- the indexer's scores ------------------------------------------------------------------------


def _without_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


def _index_scores(query: Tensor, key: Tensor, weights: Tensor, relu: bool) -> Tensor:
    """(n, N), in float32 or wider."""
    dtype = wide(query.dtype)
    with _without_autocast(query):
        dots = torch.einsum("nhd,sd->nhs", query.to(dtype), key.to(dtype))
        dots = dots.relu() if relu else dots
        return torch.einsum("nhs,nh->ns", dots, weights.to(dtype))


def _parts(rows: int, elements: int) -> Iterator[slice]:
    """Queries in parts that read ``elements`` each."""
    step = max(1, _ELEMENTS // max(1, elements))
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def _rows_of(whole: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, K, ...): chosen rows, any row for -1."""
    if len(whole) == 0:
        return whole.new_zeros(*chosen.shape, *whole.shape[1:], dtype=dtype)
    return whole[chosen.clamp(min=0)].to(dtype)


def _add(total: Tensor, chosen: Tensor, grads: Tensor) -> None:
    """Add gradients (n, K, ...) of chosen rows to those of all rows."""
    kept = chosen >= 0
    total.index_add_(0, chosen[kept], grads[kept])


class _IndexScores(torch.autograd.Function):
    """(T, H, D), (N, D), (T, H) and chosen rows (T, K) to the scores (T, K), -inf for none."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, weights: Tensor, chosen: Tensor, relu: bool
    ) -> Tensor:
        dtype = wide(query.dtype)
        scores = torch.empty(chosen.shape, dtype=dtype, device=query.device)
        with _without_autocast(query):
            for part in _parts(len(query), chosen.shape[1] * (query.shape[1] + query.shape[2])):
                dots, _ = _IndexScores._dots(query[part], key, chosen[part], relu)
                scores[part] = torch.einsum("nhk,nh->nk", dots, weights[part].to(dtype))
        ctx.save_for_backward(query, key, weights, chosen)
        ctx.relu = relu
        return scores.masked_fill_(chosen < 0, -torch.inf)

    @staticmethod
    def _dots(query: Tensor, key: Tensor, chosen: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
        rows = _rows_of(key, chosen, wide(query.dtype))
        dots = torch.einsum("nhd,nkd->nhk", query.to(rows.dtype), rows)
        return dots.relu() if relu else dots, rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, weights, chosen = ctx.saved_tensors
        dtype = wide(query.dtype)
        totals = [torch.zeros_like(x, dtype=dtype) for x in (query, key, weights)]
        grad = grad.to(dtype).masked_fill(chosen < 0, 0)
        with _without_autocast(query):
            for part in _parts(len(query), chosen.shape[1] * (query.shape[1] + query.shape[2])):
                dots, rows = _IndexScores._dots(query[part], key, chosen[part], ctx.relu)
                totals[2][part] = torch.einsum("nhk,nk->nh", dots, grad[part])
                of_dots = torch.einsum("nh,nk->nhk", weights[part].to(dtype), grad[part])
                if ctx.relu:
                    of_dots = of_dots * (dots > 0)
                totals[0][part] = torch.einsum("nhk,nkd->nhd", of_dots, rows)
                of_rows = torch.einsum("nhk,nhd->nkd", of_dots, query[part].to(dtype))
                _add(totals[1], chosen[part], of_rows)
        grads = [x.to(y.dtype) for x, y in zip(totals, (query, key, weights), strict=True)]
        return *grads, None, None


# ---- attention to chosen keys --------------------------------------------------------------------


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """(n, H, size) as (n, G, H / G, size), of G key-value heads."""
    return rows.view(rows.shape[0], heads, -1, rows.shape[2])


class _Chosen(torch.autograd.Function):
    """(T, H, D), (M, G, D), (M, G, E) and chosen rows (T, K) to the output (T, H, E), the
    log-sum-exp (T, H), and the weights (T, K), means over the heads."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (rows, heads, _), dtype = query.shape, wide(query.dtype)
        out = query.new_empty(rows, heads, value.shape[2])
        lse = torch.empty(rows, heads, dtype=dtype, device=query.device)
        means = torch.empty(chosen.shape, dtype=dtype, device=query.device)
        with _without_autocast(query):
            for part in _parts(rows, _Chosen._elements(query, key, value, chosen)):
                scores, *_ = _Chosen._scores(query[part], key, chosen[part], scale)
                sums = scores.logsumexp(-1, keepdim=True)
                weights = (scores - sums).exp().masked_fill(scores == -torch.inf, 0)
                values = _rows_of(value, chosen[part], dtype)
                out[part] = torch.einsum("ngrk,nkge->ngre", weights, values).flatten(1, 2)
                lse[part] = sums.flatten(1)
                means[part] = weights.flatten(1, 2).mean(1)
        ctx.save_for_backward(query, key, value, chosen, out, lse)
        ctx.scale = scale
        ctx.mark_non_differentiable(means)
        ctx.set_materialize_grads(False)
        return out, lse, means

    @staticmethod
    def _elements(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> int:
        """Elements that one query reads."""
        read = key.shape[1] * (key.shape[2] + value.shape[2]) + query.shape[1]
        return int(chosen.shape[1] * read)

    @staticmethod
    def _scores(
        query: Tensor, key: Tensor, chosen: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (n, G, H / G, K), -inf for none; queries (n, G, H / G, D), and keys."""
        keys = _rows_of(key, chosen, wide(query.dtype))
        queries = _by_head(query.to(keys.dtype), key.shape[1])
        scores = torch.einsum("ngrd,nkgd->ngrk", queries, keys) * scale
        return scores.masked_fill((chosen < 0)[:, None, None], -torch.inf), queries, keys

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, chosen, out, lse = ctx.saved_tensors
        dtype, scale = wide(query.dtype), ctx.scale
        totals = [torch.zeros_like(x, dtype=dtype) for x in (query, key, value)]
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        with _without_autocast(query):
            delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)
            delta = delta if grad_lse is None else delta - grad_lse
            for part in _parts(len(query), _Chosen._elements(query, key, value, chosen)):
                scores, queries, keys = _Chosen._scores(query[part], key, chosen[part], scale)
                heads = key.shape[1]
                sums, lost = (_by_head(x[part].unsqueeze(-1), heads) for x in (lse, delta))
                weights = (scores - sums).exp().masked_fill(scores == -torch.inf, 0)
                grads = _by_head(grad_out[part].to(dtype), heads)
                values = _rows_of(value, chosen[part], dtype)
                of_weights = torch.einsum("ngre,nkge->ngrk", grads, values)
                of_scores = weights * (of_weights - lost) * scale
                totals[0][part] = torch.einsum("ngrk,nkgd->ngrd", of_scores, keys).flatten(1, 2)
                _add(totals[1], chosen[part], torch.einsum("ngrk,ngrd->nkgd", of_scores, queries))
                _add(totals[2], chosen[part], torch.einsum("ngrk,ngre->nkge", weights, grads))
        grads_ = [x.to(y.dtype) for x, y in zip(totals, (query, key, value), strict=True)]
        return *grads_, None, None
