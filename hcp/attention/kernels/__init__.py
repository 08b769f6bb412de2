"""Library kernels of attention behind one interface.

A schedule has entries, each a dense block of queries and keys. A kernel computes calls: one entry
at a time, or as many as it can take in one launch. Every kernel gives (n, H, E) outputs and their
log-sum-exp (n, H), natural log, float32 (float64 for float64), and takes the merged output and
log-sum-exp in the backward.

Every query of an entry sees a key of it: what sees none is in no entry. A row whose scores have no
finite sum (NaN, or all of them infinite) must therefore have NaN for a log-sum-exp: the merge
leaves out what has -inf, as if it had seen nothing, and lets +inf outweigh all others.

n rows of a call, H query heads, G key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hcp.exchange.tables import Entry


class Call:
    """Entries that one launch computes. Their queries, and their keys, ascend without overlap."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        first, last = entries[0], entries[-1]
        self.entries = entries
        self.window = first.window
        self.queries = slice(first.query_row, last.query_row + last.query_rows)
        self.keys = slice(first.key_row, last.key_row + last.key_rows)
        self._bounds: tuple[Tensor, Tensor] | None = None

    def accepts(self, entry: Entry) -> bool:
        """Whether the entry can follow in the same launch."""
        return (
            entry.window == self.window
            and entry.query_row >= self.queries.stop
            and entry.key_row >= self.keys.stop
        )

    def sizes(self) -> list[tuple[int, int]]:
        """(queries, keys) of every sequence of a packed launch: the entries, and what lies between
        them, as queries without keys and keys without queries."""
        sizes = []
        query, key = self.queries.start, self.keys.start
        for entry in self.entries:
            sizes += [(entry.query_row - query, 0)] if entry.query_row > query else []
            sizes += [(0, entry.key_row - key)] if entry.key_row > key else []
            sizes.append((entry.query_rows, entry.key_rows))
            query, key = entry.query_row + entry.query_rows, entry.key_row + entry.key_rows
        return sizes

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Most queries, and most keys, of an entry."""
        rows = [(entry.query_rows, entry.key_rows) for entry in self.entries]
        return max(queries for queries, _ in rows), max(keys for _, keys in rows)

    @cached_property
    def pairs(self) -> int:
        """Of a query and a key that it sees."""
        return sum(
            _pairs_below(entry, entry.high + 1) - _pairs_below(entry, entry.low)
            for entry in self.entries
        )

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cu_seqlens of queries and of keys, int32, on the device; kept for the next layer."""
        if self._bounds is None:
            sizes = torch.tensor([(0, 0), *self.sizes()], dtype=torch.int32, device="cpu")
            queries, keys = sizes.cumsum(0, dtype=torch.int32).t().contiguous().to(device)
            self._bounds = queries, keys
        return self._bounds


def _pairs_below(entry: Entry, ahead: int) -> int:
    """Pairs whose key is less than ``ahead`` rows ahead of its query."""

    def first(queries: int) -> int:
        """Of as many queries, the first of which has one key, each other one more than the last."""
        rising = max(0, min(queries, entry.key_rows))
        return rising * (rising + 1) // 2 + max(0, queries - rising) * entry.key_rows

    return first(entry.query_rows + ahead - 1) - first(ahead - 1)


class Kernel(Protocol):
    """What attention needs of a kernel. Rows may have any stride, the elements of a head none."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...

    def capped(self, softcap: float) -> Kernel | None:
        """The kernel with scores s as softcap * tanh(s / softcap); None where it has none such."""

    def calls(self, entries: Sequence[Entry]) -> list[Call]:
        """The entries of one stage as calls, in any order."""

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the call's queries, the latter finite or NaN: see
        ``nan_for_infinity``."""

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
        """This call's share of the gradients of its queries, keys and values, shaped as they are.

        A gradient of the log-sum-exp adds to that of each score, times the score's weight. None: 0.
        """


def each_alone(entries: Sequence[Entry]) -> list[Call]:
    return [Call([entry]) for entry in entries]


def nan_for_infinity(lse: Tensor) -> Tensor:
    """A kernel's log-sum-exp with NaN for infinity, in place, in one launch.

    Libraries write infinity where the sum over a row's scores is NaN, as they do where it is 0:
    FlashAttention-2 +inf, FlashAttention-4 -inf.
    """
    return torch.nan_to_num_(lse, math.nan, math.nan, math.nan)


def scores_of_sinks(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Sinks as log-sum-exps of their own: NaN for +inf, which a softmax makes NaN too."""
    return torch.nan_to_num(sinks.to(dtype), math.nan, math.nan, -math.inf)


# ---- columns -------------------------------------------------------------------------------------
#
# FlashAttention wants one head size for queries, keys and values: columns of zeros make it so.


def _head_size(query: Tensor, value: Tensor, extra: int = 0) -> int:
    """The head size that holds both, and `extra` columns more, rounded up where it is not D = E."""
    size = max(query.shape[2], value.shape[2])
    if query.shape[2] == value.shape[2] and extra == 0:
        return size
    return -(-(size + extra) // 8) * 8


def _widened(rows: Tensor, size: int) -> Tensor:
    return (
        rows if rows.shape[2] == size else torch.nn.functional.pad(rows, (0, size - rows.shape[2]))
    )


_LSE_COLUMNS = 3


def _with_grad_lse(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Output and its gradient, (n, H, size), such that the kernel, which subtracts
    sum(grad_out * out) from the gradient of every score, subtracts grad_lse less: in columns where
    the values are 0, a gradient of 1 and an output of -grad_lse.

    Three columns hold it as a sum, each what the others leave in the dtype, so that nothing is lost
    in bfloat16.
    """
    first = size - _LSE_COLUMNS
    grad_out, out = _widened(grad_out, size).clone(), _widened(out, size).clone()
    rest = -grad_lse
    grad_out[..., first:] = 1
    for column in range(first, size):
        out[..., column] = rest
        rest = rest - out[..., column].to(rest.dtype)
    return grad_out, out


def _backward_columns(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_out, query, key, value, out of one head size, for a backward."""
    size = _head_size(query, value, 0 if grad_lse is None else _LSE_COLUMNS)
    if grad_lse is not None:
        grad_out, out = _with_grad_lse(grad_out, grad_lse, out, size)
    grad_out, query, key, value, out = (
        _widened(rows, size) for rows in (grad_out, query, key, value, out)
    )
    return grad_out, query, key, value, out


# ---- kernels -------------------------------------------------------------------------------------


class CpuFlash:
    """PyTorch's flash attention for the CPU, one entry a call. No entry is empty: the kernel would
    end the process. It takes a band as a mask, so a band goes through it in tiles along itself."""

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    calls = staticmethod(each_alone)

    def capped(self, softcap: float) -> None:
        return None

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        size = _head_size(query, value)
        query, key, wide_value = (_widened(x, size) for x in (query, key, value))
        parts = []
        for tile in _tiles(call.entries[0]):
            rows = [query[tile.queries], key[tile.keys], wide_value[tile.keys]]
            parts.append(_cpu_flash(rows, tile, scale))
        out = _end_to_end([out for out, _ in parts])[..., : value.shape[2]]
        return out, _end_to_end([lse for _, lse in parts])

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
        grad_out, wide_query, wide_key, wide_value, out = _backward_columns(
            grad_out, grad_lse, query, key, value, out
        )
        tiles = _tiles(call.entries[0])
        grads = []
        for tile in tiles:
            q, k = tile.queries, tile.keys
            rows = [grad_out[q], wide_query[q], wide_key[k], wide_value[k], out[q]]
            tile_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *map(batched, rows),
                lse[q].transpose(0, 1).unsqueeze(0),
                0.0,
                tile.causal,
                attn_mask=tile.mask(query),
                scale=scale,
            )
            grads.append([unbatched(grad) for grad in tile_grads])
        summed = (
            _end_to_end([grad[0] for grad in grads]),
            _summed(tiles, [grad[1] for grad in grads], wide_key),
            _summed(tiles, [grad[2] for grad in grads], wide_value),
        )
        return _narrowed(summed, query, value)


def _cpu_flash(rows: Sequence[Tensor], tile: _Tile, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries, keys and values, NaN where a score was not finite."""
    out, lse = _run_cpu_flash(rows, tile, scale)
    broken = ~lse.isfinite()
    if bool((zero := lse == 0).any()):
        # Where every score is -inf, or NaN in fewer keys than a vector has lanes, it writes 0 for
        # both. It does so whatever the values are, so that ones tell: their average is 1.
        query, key, value = rows
        ones, _ = _run_cpu_flash([query, key, torch.ones_like(value)], tile, scale)
        broken |= zero & (ones[..., 0] == 0)
    if bool(broken.any()):
        lse.masked_fill_(broken, math.nan)
        out.masked_fill_(broken.unsqueeze(-1), math.nan)
    return out, lse


def _run_cpu_flash(rows: Sequence[Tensor], tile: _Tile, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(batched, rows), 0.0, tile.causal, attn_mask=tile.mask(rows[0]), scale=scale
    )
    return unbatched(out), lse.squeeze(0).transpose(0, 1)


class _Tile(NamedTuple):
    """Consecutive queries of an entry, and the keys that they see; low and high as in an entry."""

    queries: slice
    keys: slice
    low: int
    high: int
    causal: bool
    full: bool

    def mask(self, like: Tensor) -> Tensor | None:
        """What is added to the scores, (queries, keys), in the dtype of ``like``."""
        if self.causal or self.full:
            return None
        queries = torch.arange(self.queries.stop - self.queries.start, device="cpu")
        keys = torch.arange(self.keys.stop - self.keys.start, device="cpu")
        ahead = keys - queries.unsqueeze(1)
        hidden = (ahead < self.low) | (ahead > self.high)
        return torch.zeros(hidden.shape, dtype=like.dtype, device="cpu").masked_fill_(
            hidden, -torch.inf
        )


_TILE_ROWS = 64, 1024


def _tiles(entry: Entry) -> list[_Tile]:
    """The whole entry when the kernel knows its mask, else tiles about as high as the band is wide:
    lower ones would be many, higher ones mostly masked."""
    rows, keys = entry.query_rows, entry.key_rows
    full = entry.window == (-1, -1)
    # Its causal mask is aligned top left, ours bottom right: the same in a square.
    causal = entry.window == (-1, 0) and rows == keys
    if full or causal:
        return [_Tile(slice(0, rows), slice(0, keys), entry.low, entry.high, causal, full)]
    least, most = _TILE_ROWS
    step = max(least, min(entry.high - entry.low + 1, most))
    return [_tile(entry, row, min(row + step, rows)) for row in range(0, rows, step)]


def _tile(entry: Entry, begin: int, end: int) -> _Tile:
    keys = slice(max(0, begin + entry.low), min(entry.key_rows, end + entry.high))
    ahead = keys.start - begin
    low, high = entry.low - ahead, entry.high - ahead
    full = low <= begin + 1 - end and high >= keys.stop - keys.start - 1
    return _Tile(slice(begin, end), keys, low, high, False, full)


def _end_to_end(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _summed(tiles: Sequence[_Tile], grads: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Gradients of keys that several tiles share, summed in float32 or wider."""
    if len(tiles) == 1:
        return grads[0]
    total = torch.zeros_like(rows, dtype=torch.promote_types(rows.dtype, torch.float32))
    for tile, grad in zip(tiles, grads, strict=True):
        total[tile.keys] += grad
    return total.to(rows.dtype)


def _narrowed(
    grads: Sequence[Tensor], query: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = grads
    head_dim = query.shape[2]
    return grad_query[..., :head_dim], grad_key[..., :head_dim], grad_value[..., : value.shape[2]]


def batched(rows: Tensor) -> Tensor:
    return rows.unsqueeze(0).transpose(1, 2)


def unbatched(batch: Tensor) -> Tensor:
    return batch.squeeze(0).transpose(0, 1)


class Flash2:
    """PyTorch's FlashAttention-2 on CUDA, whole packs in one launch."""

    dtypes = (torch.bfloat16, torch.float16)

    def capped(self, softcap: float) -> Kernel | None:
        return None

    @staticmethod
    def calls(entries: Sequence[Entry]) -> list[Call]:
        packs: list[list[Entry]] = []
        made: list[Call] = []
        for entry in entries:
            fitting = next((i for i, call in enumerate(made) if call.accepts(entry)), None)
            if fitting is None:
                packs.append([entry])
                made.append(Call(packs[-1]))
            else:
                packs[fitting].append(entry)
                made[fitting] = Call(packs[fitting])
        return made

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        size = _head_size(query, value)
        out, lse = self.run(call, [_widened(x, size) for x in (query, key, value)], scale)
        # Gaps of the pack, which have no keys and which no run names, become NaN with the rest.
        return out[..., : value.shape[2]], nan_for_infinity(lse).transpose(0, 1)

    def run(self, call: Call, rows: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp (H, n) for queries, keys and values of one head size."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *rows, *self.pack(call, rows[0]), 0.0, False, False, scale=scale, **_window_of(call)
        )
        return out, lse

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
        grad_out, *rows = _backward_columns(grad_out, grad_lse, query, key, value, out)
        heads_first = lse.transpose(0, 1).contiguous()
        grads = self.run_backward(call, grad_out.contiguous(), rows, heads_first, scale)
        return _narrowed(grads, query, value)

    def run_backward(
        self, call: Call, grad_out: Tensor, rows: Sequence[Tensor], lse: Tensor, scale: float
    ) -> Sequence[Tensor]:
        """Gradients of queries, keys and values, for rows of these and of the output, of one head
        size, and the log-sum-exp (H, n)."""
        no_dropout = torch.empty(2, dtype=torch.uint64, device=lse.device)
        grads: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
            grad_out,
            *rows,
            lse,
            *self.pack(call, grad_out),
            0.0,
            False,
            no_dropout,
            no_dropout,
            scale=scale,
            **_window_of(call),
        )
        return grads

    @staticmethod
    def pack(call: Call, query: Tensor) -> tuple[Tensor, Tensor, int, int]:
        """cu_seqlens of queries and keys, and the longest of each."""
        longest_query, longest_key = call.longest
        left, right = call.window
        if left >= 0 or right > 0:
            # It takes the longest keys for a bound that nothing passes, though with more queries
            # than keys the first queries would pass it: the longest keys must look longer.
            longest_key = max(longest_key, longest_query, right + 1)
        return *call.bounds(query.device), longest_query, longest_key


def _window_of(call: Call) -> dict[str, int]:
    left, right = call.window
    return {"window_size_left": left, "window_size_right": right}


@dataclass(frozen=True)
class Plain:
    """Attention as its formula, one entry a call: for types that FlashAttention does not have, and
    for soft-capping."""

    softcap: float = 0.0

    dtypes = (torch.float64, torch.float32)

    calls = staticmethod(each_alone)

    def capped(self, softcap: float) -> Plain:
        return Plain(softcap)

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = _masked(call, self._scores(query, key, scale))
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        out = weights @ _per_query_head(value, query)
        return out.transpose(0, 1).contiguous(), nan_for_infinity(lse).transpose(0, 1)

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
        scores = self._scores(query, key, scale)
        weights = (_masked(call, scores) - lse.transpose(0, 1).unsqueeze(-1)).exp()
        grad = grad_out.transpose(0, 1)
        delta = (grad_out * out).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse
        delta = delta.transpose(0, 1).unsqueeze(-1)
        grad_scores = weights * (grad @ _per_query_head(value, query).transpose(1, 2) - delta)
        if self.softcap:
            grad_scores = grad_scores * (1 - (scores / self.softcap).square())
        grad_query = grad_scores @ _per_query_head(key, query) * scale
        grad_key = grad_scores.transpose(1, 2) @ query.transpose(0, 1) * scale
        grad_value = weights.transpose(1, 2) @ grad
        return (
            grad_query.transpose(0, 1),
            _per_key_head(grad_key, key),
            _per_key_head(grad_value, value),
        )

    def _scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """(H, queries, keys), capped."""
        scores = query.transpose(0, 1) @ _per_query_head(key, query).transpose(1, 2) * scale
        return self.softcap * (scores / self.softcap).tanh() if self.softcap else scores


def _masked(call: Call, scores: Tensor) -> Tensor:
    """-inf where a key is hidden."""
    (entry,) = call.entries
    if entry.window == (-1, -1):
        return scores
    keys = torch.arange(entry.key_rows, device=scores.device)
    ahead = keys - torch.arange(entry.query_rows, device=scores.device).unsqueeze(1)
    return scores.masked_fill((ahead < entry.low) | (ahead > entry.high), -torch.inf)


def _per_query_head(rows: Tensor, query: Tensor) -> Tensor:
    """(n, G, D) as (H, n, D)."""
    return rows.transpose(0, 1).repeat_interleave(query.shape[1] // rows.shape[1], 0)


def _per_key_head(grad: Tensor, rows: Tensor) -> Tensor:
    """(H, n, D) summed to (n, G, D)."""
    groups = rows.shape[1]
    by_group = grad.view(groups, grad.shape[0] // groups, *grad.shape[1:])
    return by_group.sum(1).transpose(0, 1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a kernel sums in, and the type of its log-sum-exp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- choice --------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """What a layer wants of a kernel beside device and type."""

    family: str = "torch"
    softcap: float = 0.0


_CPU, _FLASH2, _PLAIN = CpuFlash(), Flash2(), Plain()


def torch_kernels(device: torch.device) -> Sequence[Kernel]:
    """PyTorch's own for a device, FlashAttention first."""
    return (_CPU, _PLAIN) if device.type == "cpu" else (_FLASH2, _PLAIN)


_families: dict[str, Callable[[torch.device], Sequence[Kernel]]] = {"torch": torch_kernels}


def add_family(name: str, kernels: Callable[[torch.device], Sequence[Kernel]]) -> None:
    """Kernels of a library for a device, the preferred first."""
    _families[name] = kernels


def families() -> list[str]:
    """Of all kernels there are: a layer's table names its own by the place in here."""
    return list(_families)


def kernel_for(device: torch.device, dtype: torch.dtype, choice: Choice) -> Kernel:
    """FlashAttention where there is one for the device and type, else the formula.

    Raises ValueError for what no kernel of the family takes.
    """
    family, softcap = choice
    candidates = _families[family](device)
    fitting = [kernel for kernel in candidates if dtype in kernel.dtypes]
    if not fitting:
        raise ValueError(
            f"dtype is {dtype} on {device.type}, expected one of "
            f"{[t for k in candidates for t in k.dtypes]} for {family!r}"
        )
    if softcap == 0.0:
        return fitting[0]
    for kernel in fitting:
        capped = kernel.capped(softcap)
        if capped is not None:
            return capped
    raise ValueError(
        f"softcap is {softcap} for {dtype} on {device.type}, expected 0.0: PyTorch's "
        "FlashAttention caps no scores; the formula does, for float32 and float64, and the "
        "backends 'flash_attn' and 'flash_attn_4', for CUDA (hcp.get_cp_handler_cls)"
    )
