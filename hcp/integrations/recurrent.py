"""Recurrent layers of trainers over this rank's rows: convolutions, Mamba-2 and the delta rule.

A kernel computes each span by itself. What precedes the span comes from other ranks: rows for a
convolution, a state for a scan.

T rows, H heads, P and N sizes of Mamba's state, K and V of the delta rule's.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hcp.attention.scan_types import SEQUENCE_TO_HEAD
from hcp.exchange.layout import copied, span_rows, stretch_rows
from hcp.integrations.span_pieces import pieces_of, read, written
from hcp.step.handler import ContextParallelHandler


def convolve(
    cp: ContextParallelHandler, x: Tensor, taps: int, convolution: Callable[[Tensor], Tensor]
) -> Tensor:
    """Convolve x (T, channels) along its documents, in a tree along each text.

    `convolution`: (rows, channels) to the same, as if zeros came before its first row; a row sees
    itself and `taps - 1` rows before it.
    """
    near = cp.scan.halo(x, taps - 1)
    if len(near) == 0:  # no convolution takes it, and weights want gradients
        return convolution(F.pad(near, (0, 0, 0, 1)))[:0]
    return convolution(near)[cp.scan.halo_rows(taps - 1)]


def scan_mamba(
    cp: ContextParallelHandler,
    x: Tensor,
    logs: Tensor,
    reads: Tensor,
    scan: Callable[[list[slice]], tuple[Tensor, Tensor]],
    *beside: Tensor,
) -> Tensor:
    """Scan x (T, H, P) by Mamba-2, along its documents, and pass states.

    `logs`: (T, H), logarithms of the decays. `reads`: (T, G, N), what each row reads of the state,
    of each group of heads; G may be H. `scan`: of the spans of these rows, each from zeros, gives
    (T, H, P) and the states at their ends (spans, H, P, N). It is not called without spans.
    `beside`: other tensors with gradients that it uses.
    """
    sizes = span_rows(cp.layout)
    wide = _wide(x, logs, reads)
    if not sizes:
        each = reads.repeat_interleave(x.shape[1] // reads.shape[1], 1)
        none = _no_states(x, each, wide)
        return _touched(x, cp.scan.pass_states(none, none[..., :1, :1]), logs, *beside)
    out, states = scan(_slices(sizes))
    if not cp.layout.spans_continue:  # nothing enters
        cp.plan.core.expect_trees("cp.scan.pass_states")
        return out
    pieces = pieces_of(tuple(sizes), x.device)
    since, whole = pieces.sums(logs)
    entering = cp.scan.pass_states(states.to(wide), whole.exp()[:, :, None, None])
    with _without_autocast(x):
        added = read(pieces, reads, entering.to(reads.dtype)) * since.exp()[..., None]
    return out + pieces.joined(added).to(out.dtype)


def mamba_work(heads: int, size: int, states: int, products: int = 1) -> int:
    """Give `row_work` of `cp.scan.choose`, of Mamba-2: `products` of rows and states in PyTorch."""
    return products * _product_work(heads * size, states)


def delta_work(heads: int, keys: int, size: int, element_bytes: int) -> int:
    """Give it of the delta rule: the rule on K columns more, and a product of rows and states,
    K x V, of elements of so many bytes."""
    columns = heads * keys * (3 * keys + 2 * CHUNK)
    products = 2 * (columns + heads * keys * size) // OPERATIONS_OF_KERNELS
    return products + element_bytes * heads * size * PASSES // LOCAL_BYTES


def _product_work(rows: int, states: int) -> int:
    return 2 * rows * states // OPERATIONS_OF_TORCH + 4 * rows * PASSES // LOCAL_BYTES


OPERATIONS_OF_KERNELS = 300
"""Operations of fused scans in the time in which a link carries a byte: 73 TFLOP/s, from times of
gated delta nets that the package fla has published for H100s, over 250 GB/s."""
OPERATIONS_OF_TORCH = 160
"""The same for products in float32: an assumed 40 TFLOP/s."""
LOCAL_BYTES = 16
"""Bytes that a GPU reads or writes in its own memory in that time: 4 TB/s over 250 GB/s."""
PASSES = 6
"""Over rows, beside a product: they are cast, scaled, added and joined."""
CHUNK = 64
"""Rows of a chunk in fla's kernels."""


def mamba_states(x: Tensor, logs: Tensor, writes: Tensor, spans: list[slice]) -> Tensor:
    """Compute the state at the end of each span of x (T, H, P), from zeros: (spans, H, P, N).

    `x`: by its step. `writes`: (T, G, N), what each row adds to the state, of each group of heads;
    G may be H. For kernels that scan a pack in one call, and give no states of it.
    """
    pieces = pieces_of(tuple(span.stop - span.start for span in spans), x.device)
    later = pieces.later(logs)
    with _without_autocast(x):
        scaled = pieces.cut(x).to(writes.dtype) * later.exp()[..., None].to(writes.dtype)
        return written(pieces, scaled, writes)


def delta_rule(
    cp: ContextParallelHandler,
    rule: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: dict[str, Tensor],
    **options: Any,
) -> Tensor:
    """Compute a gated delta rule along documents, in a tree along each text: (T, H, V).

    `rule`: a function as `fla.ops.gated_delta_rule.chunk_gated_delta_rule`. `gates`: its `g` and
    `beta`, (T, H, ...). Passes states or exchanges rows for heads, as `cp.scan.choose` says.
    """
    (heads, width), keys = value.shape[1:], key.shape[2]
    wide = max(4, value.element_size())
    rows = sum(math.prod(x.shape[1:]) * x.element_size() for x in gates.values())
    choice = cp.scan.choose(
        heads,
        row_bytes=heads * (2 * keys + 2 * width) * value.element_size() + rows,
        state_bytes=heads * keys * (keys + width) * wide,
        exchanges=3,
        row_work=delta_work(heads, keys, width, value.element_size()),
    )
    given = rule, query, key, value, gates, options
    if cp.degree <= 1:  # spans are stretches
        return _delta_of_trees(span_rows(cp.layout), cp.layout.parents, *given)
    if choice.used == SEQUENCE_TO_HEAD:
        return _delta_by_heads(cp, *given)
    return _delta_by_states(cp, *given)


Gates = dict[str, Tensor]
Rule = Callable[..., tuple[Tensor, Any]]


def _delta_by_states(
    cp: ContextParallelHandler,
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Gates,
    options: dict[str, Any],
) -> Tensor:
    """State and output are linear in the state that enters a span. So where one may enter, the rule
    runs on values followed by K zeros, from zeros followed by the identity. What it makes of the
    identity is the span's transition, and what its rows read from a state that enters. A span that
    begins a document is computed from zeros alone."""
    (heads, width), keys = value.shape[1:], key.shape[2]
    dtype, sizes = _wide(value), span_rows(cp.layout)
    if not sizes:
        wide = F.pad(value, (0, keys))
        none = _no_states(key.repeat_interleave(heads // key.shape[1], 1), wide, dtype)
        states, transitions = torch.split(none, [width, keys], -1)
        entering = cp.scan.pass_states(states, transition=transitions)
        return _touched(value, query, key, entering, *gates.values())
    turns = _turns_of(tuple(sizes), tuple(_begin_documents(cp)))
    inputs = [_parted(x, turns.rows) for x in (query, key, value, *gates.values())]
    outs, ends = [], []
    for turn, within in enumerate(turns.within):
        q, k, v, *own = (x[turn] for x in inputs)
        start = None
        if turn == turns.entered:
            v = torch.cat([v, v.new_zeros(()).expand(*v.shape[:2], keys)], 2)
            start = v.new_zeros(len(within), heads, keys, width + keys, dtype=dtype)
            start[..., width:].diagonal(dim1=2, dim2=3).fill_(1)
        given = rule, q, k, v, dict(zip(gates, own, strict=True)), options
        out, end = _delta_of(within, *given, start, ends=True)
        outs.append(out)
        ends.append(end.to(dtype) if start is not None else F.pad(end.to(dtype), (0, keys)))
    states, transitions = torch.split(_in_turns(ends, turns.spans), [width, keys], -1)
    entering = cp.scan.pass_states(states, transition=transitions)
    if turns.entered == len(outs):  # gradients of what others took come this way
        return _touched(*outs, entering[:0])
    entered = _parted(entering, turns.spans)[turns.entered].transpose(2, 3)
    out, reads = torch.split(outs[turns.entered], [width, keys], -1)
    pieces = pieces_of(tuple(turns.within[turns.entered]), value.device)
    with _without_autocast(value):
        added = read(pieces, reads, entered.to(out.dtype))  # as kernels read states
    outs[turns.entered] = out + pieces.joined(added)
    return _in_turns(outs, turns.rows)


def _delta_by_heads(
    cp: ContextParallelHandler,
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Gates,
    options: dict[str, Any],
) -> Tensor:
    """Each rank computes whole sequences of some value heads."""
    heads, keys = value.shape[1], key.shape[2]
    if key.shape[1] != heads:
        query, key = (x.repeat_interleave(heads // x.shape[1], 1) for x in (query, key))
    mixed = cp.whole.sequence_to_head(torch.cat([query, key, value], 2), branches=True)
    parts = [x if x.dim() == 3 else x.unsqueeze(2) for x in gates.values()]
    widths = [x.shape[2] for x in parts]
    gated = cp.whole.sequence_to_head(torch.cat(parts, 2), branches=True)
    own = torch.split(gated, widths, 2)
    mine = {  # gates of several dtypes travelled in the widest
        name: (x if gate.dim() == 3 else x.squeeze(2)).to(gate.dtype)
        for (name, gate), x in zip(gates.items(), own, strict=True)
    }
    query, key, value = torch.split(mixed, [keys, keys, mixed.shape[2] - 2 * keys], 2)
    given = rule, query, key, value, mine, options
    out = _delta_of_trees(stretch_rows(cp.layout), cp.whole.parents, *given)
    return cp.whole.head_to_sequence(out, heads)


def _delta_of_trees(
    sizes: list[int],
    parents: tuple[int, ...],
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Gates,
    options: dict[str, Any],
) -> Tensor:
    """Output (T, H, V) of stretches, each from the state at the end of its parent. `parents`: of
    the first stretches; the others have none. One call for all stretches of a depth."""
    levels = levels_of(parents, len(sizes))
    if len(levels) <= 1:
        return _delta_of(sizes, rule, query, key, value, gates, options)[0]
    inputs = [torch.split(x, sizes) for x in (query, key, value, *gates.values())]
    outs, ends = [value] * len(sizes), [value] * len(sizes)
    for number, level in enumerate(levels):
        within = [sizes[i] for i in level]
        q, k, v, *mine = (_end_to_end([x[i] for i in level]) for x in inputs)
        own = dict(zip(gates, mine, strict=True))
        start = _end_to_end([ends[parents[i]] for i in level]) if number else None
        out, made = _delta_of(within, rule, q, k, v, own, options, start, ends=True)
        for i, part, end in zip(level, torch.split(out, within), torch.split(made, 1), strict=True):
            outs[i], ends[i] = part, end
    return torch.cat(outs)


@functools.lru_cache(maxsize=64)  # one for all layers of a micro-batch
def levels_of(parents: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """The stretches of each depth, of `count` whose first ones have these parents, -1: none."""
    depths: list[int] = []
    for parent in (*parents, *[-1] * (count - len(parents))):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    levels: list[list[int]] = [[] for _ in range(max(depths, default=-1) + 1)]
    for i, depth in enumerate(depths):
        levels[depth].append(i)
    return tuple(map(tuple, levels))


class _Turns(NamedTuple):
    """Spans in turns, those that begin documents and those that states enter: consecutive ones of a
    kind are a run, and runs of both kinds take turns."""

    entered: int
    """The turn whose spans states enter, of the first (0) and the second (1): which may be none."""
    rows: list[int]
    """Of each run."""
    spans: list[int]
    """Of each run."""
    within: list[list[int]]
    """The rows of each span of a turn."""


@functools.lru_cache(maxsize=64)  # one for all layers of a micro-batch
def _turns_of(sizes: tuple[int, ...], begins: tuple[bool, ...]) -> _Turns:
    runs = [
        [size for size, _ in run]
        for _, run in itertools.groupby(zip(sizes, begins, strict=True), lambda span: span[1])
    ]
    within = [list(itertools.chain(*runs[turn::2])) for turn in range(min(2, len(runs)))]
    return _Turns(int(begins[0]), [*map(sum, runs)], [*map(len, runs)], within)


def _parted(x: Tensor, runs: list[int]) -> list[Tensor]:
    """The rows of each turn, of which `runs` says how many each run has."""
    if len(runs) == 1:
        return [x]
    parts = torch.split(x, runs)
    return [_end_to_end(parts[turn::2]) for turn in range(2)]


def _in_turns(turns: list[Tensor], runs: list[int]) -> Tensor:
    """Undo `_parted`."""
    if len(runs) <= 2:
        return _end_to_end(turns)
    parts = [iter(torch.split(x, runs[turn::2])) for turn, x in enumerate(turns)]
    return torch.cat([next(parts[i % 2]) for i in range(len(runs))])


def _end_to_end(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _begin_documents(cp: ContextParallelHandler) -> list[bool]:
    """Whether each span of this rank's rows begins a document, so that no state enters it. Padding
    is one more."""
    layout = cp.layout
    firsts = [layout.documents[i].start for i in layout.span_documents]
    begun = [span.start == first for span, first in zip(layout.spans, firsts, strict=True)]
    return [*begun, *[True] * (layout.padding > 0)]


def _delta_of(
    sizes: list[int],
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Gates,
    options: dict[str, Any],
    start: Tensor | None = None,
    *,
    ends: bool = False,
) -> tuple[Tensor, Any]:
    """Output (T, H, V) of runs of rows, from the states `start`, one of each, or zeros; and the
    states at their ends, if asked. One call, where the rule takes the bounds of a pack."""
    if not sizes:
        return _touched(value, query, key, *gates.values()), None
    pack = [x.unsqueeze(0) for x in (query, key, value, *gates.values())]
    runs: Iterable[Sequence[Tensor]] = [pack]
    starts: Sequence[Tensor | None] = [start]
    if takes_packs(rule):
        options = {**options, "cu_seqlens": _bounds_of(tuple(sizes), value.device)}
    elif len(sizes) > 1:
        runs = zip(*(torch.split(x, sizes, 1) for x in pack), strict=True)
        starts = [None] * len(sizes) if start is None else torch.split(start, 1)
    if ends:
        options = {**options, "output_final_state": True}
    found = []
    for rows, first in zip(runs, starts, strict=True):
        state = {} if first is None else {"initial_state": first}
        own = dict(zip(gates, rows[3:], strict=True))
        found.append(rule(*rows[:3], **own, **state, **options))
    made = _end_to_end([end for _, end in found]) if ends else None
    return _end_to_end([out.squeeze(0) for out, _ in found]), made


@functools.lru_cache(maxsize=64)
def _bounds_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Those of a pack, int64. One tensor for all layers: what fla derives from it, on the host too,
    it keeps by its identity."""
    with torch.inference_mode(False):
        return copied(torch.tensor([0, *sizes], device="cpu").cumsum(0), device)


def takes_packs(rule: Rule) -> bool:
    """Whether a rule computes a pack in one call, given `cu_seqlens`: those of the package fla do.
    Functions in PyTorch of the same names have the argument and refuse it."""
    home: str = getattr(inspect.unwrap(rule), "__module__", None) or ""
    return home.split(".")[0] == "fla"


def _without_autocast(x: Tensor) -> torch.autocast:
    """It would round states, which kernels keep wide."""
    return torch.autocast(x.device.type, enabled=False)


def _slices(sizes: list[int]) -> list[slice]:
    ends = itertools.accumulate(sizes, initial=0)
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


# ---- a rank without rows -------------------------------------------------------------------------
#
# It takes part in exchanges, forward and backward, and gives its weights gradients of zeros.


def _wide(*tensors: Tensor) -> torch.dtype:
    """The dtype in which all ranks pass states, whatever a kernel gives where there are rows."""
    return functools.reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)


def _no_states(rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """No state (0, H, A, B), made of no row (0, H, A) and no row (0, H, B)."""
    return rows[..., :, None].to(dtype) * columns[..., None, :].to(dtype)


def _touched(x: Tensor, *others: Tensor) -> Tensor:
    """No row x, which depends on others of no element."""
    return x + sum(other.sum().to(x.dtype) for other in others)
