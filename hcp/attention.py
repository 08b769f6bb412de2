"""Packed attention over local and received rows, forward and backward.

The schedule (see ``hcp.layout``) says everything: which keys arrive when, and which dense blocks of
queries and keys are computed, by library kernels (``hcp.kernels``). The partial outputs are merged
once by log-sum-exp. The backward fetches the keys again, gives the kernel the merged output and
log-sum-exp, sends partial gradients of keys and values to their owners, and sums them once.

T rows on this rank, H query heads, G key-value heads, D head size, E head size of values, N rows of
a buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hcp import heads, ops
from hcp.exchange import Pending, Transport, agree_once, signature, tag_of, transport_of
from hcp.kernels import Call, Kernel, kernel_for
from hcp.layout import Entry, Schedule, Stage, schedule_of

# ---- stages: keys as they arrive -----------------------------------------------------------------


class _Fetch(NamedTuple):
    """A stage whose keys are on their way."""

    stage: Stage
    received: Tensor
    pending: Pending

    def rows(self) -> Tensor:
        """Keys beside values, (key_rows, G * (D + E)), once they are there."""
        self.pending.wait()
        if len(self.stage.arrange) == 0:
            return self.received
        return ops.pack([self.received], self.stage.arrange, self.stage.key_rows)


def _fetch(
    transport: Transport, stage: Stage, local: list[Tensor], forwarded: Tensor, tag: int
) -> _Fetch:
    packed = len(stage.pack) > 0
    sent = ops.pack(local, stage.pack, stage.sent_rows) if packed else forwarded
    received = local[0].new_empty(stage.received_rows, sum(rows.shape[1] for rows in local))
    pending = transport.start(sent, stage.sends, received, stage.receives, tag=tag)
    return _Fetch(stage, received, pending)


def _arrivals(
    transport: Transport, schedule: Schedule, key: Tensor, value: Tensor, tag: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each stage, while those of the next are on their way."""
    local = [key.flatten(1), value.flatten(1)]
    width = key.shape[1] * key.shape[2]
    stages = schedule.stages
    received = local[0].new_empty(0, 0)
    stage_key, stage_value = key, value
    for following in [*stages[1:], None]:
        fetch = _fetch(transport, following, local, received, tag) if following else None
        yield stage_key, stage_value
        if fetch is not None:
            received = fetch.rows()
            stage_rows = len(received)
            stage_key = received[:, :width].view(stage_rows, *key.shape[1:])
            stage_value = received[:, width:].view(stage_rows, *value.shape[1:])


# ---- calls: what a kernel computes at once -------------------------------------------------------


class _Calls(NamedTuple):
    """A schedule in terms of a kernel's calls instead of its entries."""

    stages: list[list[Call]]
    output_runs: Tensor
    sunk_runs: Tensor
    """The same, with the sinks as one more part behind the calls."""
    home_runs: Tensor
    local_runs: Tensor


def _calls_of(schedule: Schedule, kernel: Kernel) -> _Calls:
    """Made once for a schedule and kernel; every layer uses it."""
    made = schedule.calls.get(kernel)
    if made is None:
        made = schedule.calls[kernel] = _make_calls(schedule, kernel)
    return cast(_Calls, made)


def _make_calls(schedule: Schedule, kernel: Kernel) -> _Calls:
    stages = [kernel.calls(stage.entries) for stage in schedule.stages]
    # Of each entry: its call, and where its queries and its keys start there.
    places: list[tuple[int, int, int]] = []
    number = 0
    for stage, calls in zip(schedule.stages, stages, strict=True):
        found: dict[Entry, tuple[int, int, int]] = {}
        for call in calls:
            for entry in call.entries:
                query, key = entry.query_row - call.queries.start, entry.key_row - call.keys.start
                found[entry] = (number, query, key)
            number += 1
        places += [found[entry] for entry in stage.entries]
    # What comes home is one more part behind the entries, and behind the calls, of stage 0.
    local = [*places[: len(schedule.stages[0].entries)], (len(stages[0]), 0, 0)]
    output_runs = _renumber(schedule.output_runs, places, 1)
    return _Calls(
        stages,
        output_runs,
        _with_sinks(output_runs, number, schedule.query_rows),
        _renumber(schedule.home_runs, places, 2),
        _renumber(schedule.local_runs, local, 2),
    )


def _renumber(runs: Tensor, places: list[tuple[int, int, int]], offset: int) -> Tensor:
    """Runs over entries as runs over calls: the part, and where it starts in there."""
    if len(runs) == 0:
        return runs
    table = torch.tensor(places)[runs[:, 2]]
    return torch.stack([runs[:, 0], runs[:, 1], table[:, 0], runs[:, 3] + table[:, offset]], 1)


def _with_sinks(runs: Tensor, part: int, rows: int) -> Tensor:
    """One more part, of ``rows`` rows, in every run, and for the rows that no run names."""
    starts = runs[torch.cat([runs.new_ones(1).bool(), runs[1:, 0] != runs[:-1, 0]])[: len(runs)]]
    begins = torch.cat([runs.new_zeros(1), starts[:, 0] + starts[:, 1]])
    ends = torch.cat([starts[:, 0], runs.new_full((1,), rows)])
    gaps = torch.stack([begins, ends - begins], 1)[ends > begins]
    own = torch.cat([starts[:, :2], gaps])
    extra = torch.stack([own[:, 0], own[:, 1], torch.full_like(own[:, 0], part), own[:, 0]], 1)
    both = torch.cat([runs, extra])
    return both[both[:, 0].sort(stable=True).indices]


# ---- heads for sequence --------------------------------------------------------------------------
#
# Each rank has whole sequences of some heads, and nothing is merged but sinks.


class _Heads:
    """Who computes which heads of one call. A key-value head is on every rank whose query heads
    attend to it."""

    def __init__(self, transport: Transport, schedule: Schedule, query: Tensor, key: Tensor):
        self.transport, self.schedule = transport, schedule
        self.members = heads.members(schedule)
        per_key = query.shape[1] // key.shape[1]
        self.queries = heads.split(query.shape[1], len(self.members))
        self.keys = [heads.key_heads(own, per_key) for own in self.queries]
        if self.members:
            j = self.members.index(transport.rank)
            self.own, self.own_keys = self.queries[j], self.keys[j]
            self.key_of = [i // per_key - self.own_keys.start for i in _numbers(self.own)]

    @property
    def even(self) -> bool:
        """Whether as many of the rank's query heads attend to each of its key-value heads."""
        queries, keys = len(self.key_of), len(_numbers(self.own_keys))
        return queries % keys == 0 and self.key_of == [i * keys // queries for i in range(queries)]

    def expand(self, key: Tensor) -> Tensor:
        """Key-value heads as a kernel wants them: one for each query head, where groups differ."""
        return key if self.even else key[:, self.key_of]

    def collapse(self, grad: Tensor) -> Tensor:
        """The adjoint of expand, summed in float32 (float64 for float64)."""
        if self.even:
            return grad
        wide = _wide(grad.dtype)
        index = torch.tensor(self.key_of, device=grad.device)
        total = grad.new_zeros(
            grad.shape[0], len(_numbers(self.own_keys)), grad.shape[2], dtype=wide
        )
        return total.index_add_(1, index, grad.to(wide)).to(grad.dtype)

    def bring(self, by_query: list[Tensor], by_key: list[Tensor], tag: int) -> list[Tensor]:
        columns = [
            [x[:, q] for x in by_query] + [x[:, k] for x in by_key]
            for q, k in zip(self.queries, self.keys, strict=True)
        ]
        return heads.bring(self.transport, self.schedule, columns, tag)

    def take_back(
        self, by_query: list[Tensor], by_key: list[Tensor], key_count: int, tag: int
    ) -> list[Tensor]:
        shapes = [
            [(len(_numbers(q)), *x.shape[2:]) for x in by_query]
            + [(len(_numbers(k)), *x.shape[2:]) for x in by_key]
            for q, k in zip(self.queries, self.keys, strict=True)
        ]
        columns = [*by_query, *by_key]
        back = heads.take_back(self.transport, self.schedule, columns, shapes, tag)
        parts = list(zip(*back, strict=True))
        queries, keys = parts[: len(by_query)], parts[len(by_query) :]
        return [torch.cat(part, 1) for part in queries] + [
            self._sum_keys(part, key_count) for part in keys
        ]

    def _sum_keys(self, parts: Sequence[Tensor], count: int) -> Tensor:
        """Gradients of key-value heads from every rank that had them, summed once."""
        total = parts[0].new_zeros(
            parts[0].shape[0], count, *parts[0].shape[2:], dtype=_wide(parts[0].dtype)
        )
        for own, part in zip(self.keys, parts, strict=True):
            total[:, own] += part
        return total.to(parts[0].dtype)


def _numbers(chosen: slice) -> range:
    return range(chosen.start, chosen.stop)


def _attention_of_heads(
    given: _Heads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    tag: int,
) -> tuple[Tensor, Tensor]:
    if not given.members:
        return _attention_fake(query, key, value, sinks, given.schedule.words, scale)
    whole_query, whole_key, whole_value = given.bring([query], [key, value], tag)
    out, lse = _attention_fake(whole_query, whole_key, whole_value, sinks, query, scale)
    if whole_query.shape[1] > 0:
        kernel = kernel_for(query.device, query.dtype)
        calls = _calls_of(given.schedule, kernel)
        keys, values = given.expand(whole_key), given.expand(whole_value)
        parts = [
            kernel.forward(c, whole_query[c.queries], keys[c.keys], values[c.keys], scale)
            for c in calls.stages[0]
        ]
        outs, lses = ([part[i] for part in parts] for i in range(2))
        own_sinks = None if sinks is None else sinks[given.own]
        out, lse = _merge(outs, lses, calls, own_sinks, given.schedule.query_rows)
    out, lse = given.take_back([out, lse], [], 0, tag)
    return out, lse


def _backward_of_heads(
    given: _Heads, tensors: tuple[Any, ...], scale: float, tag: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, grad_lse, query, key, value, out, lse = tensors
    if not given.members:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    # What travels depends on it: ranks that differ must not read each other's rows.
    tag = tag_of((tag, int(grad_lse is not None)))
    by_query = [query, grad_out, out, lse, *([] if grad_lse is None else [grad_lse])]
    *wholes, whole_key, whole_value = given.bring(by_query, [key, value], tag)
    grads = [torch.zeros_like(x) for x in (wholes[0], whole_key, whole_value)]
    if wholes[0].shape[1] > 0:
        grads = _gradients_of_heads(given, wholes, whole_key, whole_value, scale)
    grad_query, grad_key, grad_value = given.take_back(grads[:1], grads[1:], key.shape[1], tag)
    return grad_query, grad_key, grad_value


def _gradients_of_heads(
    given: _Heads, by_query: list[Tensor], key: Tensor, value: Tensor, scale: float
) -> list[Tensor]:
    query, grad_out, out, lse, *grad_lses = by_query
    kernel = kernel_for(query.device, query.dtype)
    calls = _calls_of(given.schedule, kernel)
    keys, values = given.expand(key), given.expand(value)
    parts = [
        kernel.backward(
            c,
            grad_out[c.queries],
            grad_lses[0][c.queries] if grad_lses else None,
            query[c.queries],
            keys[c.keys],
            values[c.keys],
            out[c.queries],
            lse[c.queries],
            scale,
        )
        for c in calls.stages[0]
    ]
    # An entry's queries and keys are the same rows, so that one table serves all three.
    grads = [
        ops.reduce(
            [part[i].flatten(1) for part in parts], calls.output_runs, given.schedule.query_rows
        ).view_as(whole)
        for i, whole in enumerate((query, keys, values))
    ]
    return [grads[0], given.collapse(grads[1]), given.collapse(grads[2])]


# ---- operators -----------------------------------------------------------------------------------


def _call_traits(
    schedule: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
) -> tuple[int, ...]:
    (scale_bits,) = struct.unpack("<q", struct.pack("<d", scale))
    sunk = int(sinks is not None)
    return (*signature(query, key, value), *schedule.kind, scale_bits, sunk)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, words: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    schedule = schedule_of(words)
    transport = transport_of(schedule.transport_key)
    check(query, key, value, sinks, schedule.rows, transport.device)
    tag = agree_once(transport, schedule, _call_traits(schedule, query, key, value, sinks, scale))
    kernel = kernel_for(query.device, query.dtype)
    calls = _calls_of(schedule, kernel)
    if schedule.trades_heads:
        return _attention_of_heads(
            _Heads(transport, schedule, query, key), query, key, value, sinks, scale, tag
        )
    outs, lses = [], []
    arrivals = _arrivals(transport, schedule, key, value, tag)
    for stage_calls, (stage_key, stage_value) in zip(calls.stages, arrivals, strict=True):
        for call in stage_calls:
            keys, values = stage_key[call.keys], stage_value[call.keys]
            out, lse = kernel.forward(call, query[call.queries], keys, values, scale)
            outs.append(out)
            lses.append(lse)
    if not outs:  # no rows: a query sees at least its own key
        return _attention_fake(query, key, value, sinks, words, scale)
    return _merge(outs, lses, calls, sinks, schedule.rows)


def _merge(
    outs: list[Tensor], lses: list[Tensor], calls: _Calls, sinks: Tensor | None, rows: int
) -> tuple[Tensor, Tensor]:
    if sinks is None:
        return ops.merge(outs, lses, calls.output_runs, rows)
    # A sink is a key that every query of its head sees, whose value is 0.
    _, query_heads, head_size = outs[0].shape
    sink_out = outs[0].new_zeros(head_size).expand(rows, query_heads, -1)
    sink_lse = sinks.to(lses[0].dtype).expand(rows, -1)
    return ops.merge([*outs, sink_out], [*lses, sink_lse], calls.sunk_runs, rows)


def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, words: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    dtype = _wide(query.dtype)
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    return out, query.new_empty((query.shape[0], query.shape[1]), dtype=dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    schedule = schedule_of(words)
    transport = transport_of(schedule.transport_key)
    tag = tag_of(_call_traits(schedule, query, key, value, sinks, scale))
    kernel = kernel_for(query.device, query.dtype)
    calls = _calls_of(schedule, kernel)
    grad_out = _innermost_contiguous(grad_out)
    if schedule.trades_heads:
        grads_of_heads = _backward_of_heads(
            _Heads(transport, schedule, query, key),
            (grad_out, grad_lse, query, key, value, out, lse),
            scale,
            tag,
        )
        return *grads_of_heads, _sinks_backward(grad_out, grad_lse, sinks, out, lse)
    grad_queries: list[Tensor] = []
    grad_keys: list[Tensor] = []
    grad_values: list[Tensor] = []
    arrivals = _arrivals(transport, schedule, key, value, tag)
    for stage_calls, (stage_key, stage_value) in zip(calls.stages, arrivals, strict=True):
        for call in stage_calls:
            rows = call.queries
            keys, values = stage_key[call.keys], stage_value[call.keys]
            grads = kernel.backward(
                call,
                grad_out[rows],
                None if grad_lse is None else grad_lse[rows],
                query[rows],
                keys,
                values,
                out[rows],
                lse[rows],
                scale,
            )
            for parts, grad in zip((grad_queries, grad_keys, grad_values), grads, strict=True):
                parts.append(grad.flatten(1))
    grad_sinks = _sinks_backward(grad_out, grad_lse, sinks, out, lse)
    if not grad_queries:
        zeros = (torch.zeros_like(x) for x in (query, key, value))
        return *zeros, grad_sinks  # type: ignore[return-value]
    home = _bring_home(transport, schedule, calls, grad_keys, grad_values, tag)
    local = len(calls.stages[0])
    width = grad_keys[0].shape[1]
    parts_of_keys = [*grad_keys[:local], home[:, :width]]
    parts_of_values = [*grad_values[:local], home[:, width:]]
    return (
        ops.reduce(grad_queries, calls.output_runs, schedule.rows).view_as(query),
        ops.reduce(parts_of_keys, calls.local_runs, schedule.rows).view_as(key),
        ops.reduce(parts_of_values, calls.local_runs, schedule.rows).view_as(value),
        grad_sinks,
    )


def _sinks_backward(
    grad_out: Tensor, grad_lse: Tensor | None, sinks: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """This rank's share: a sink's weight in a row is exp(sink - lse), and its value is 0."""
    if sinks is None:
        return out.new_empty(0)
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    weights = (sinks.to(lse.dtype) - lse).exp().masked_fill(lse == -torch.inf, 0)
    return -(weights * delta).sum(0).to(sinks.dtype)


def _attention_backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        out.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _innermost_contiguous(rows: Tensor) -> Tensor:
    # The kernel ignores the innermost stride, and a gradient may come expanded from a sum.
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _bring_home(
    transport: Transport,
    schedule: Schedule,
    calls: _Calls,
    grad_keys: list[Tensor],
    grad_values: list[Tensor],
    tag: int,
) -> Tensor:
    """Partial gradients of other ranks' keys to their owners; what comes home, part by part."""
    columns = [grad for pair in zip(grad_keys, grad_values, strict=True) for grad in pair]
    sent = ops.reduce(columns, calls.home_runs, schedule.home_sent_rows, columns=2)
    received = sent.new_empty(schedule.home_received_rows, sent.shape[1])
    transport.start(sent, schedule.home_sends, received, schedule.home_receives, tag=tag).wait()
    return received


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, words, scale = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, words)
    ctx.scale = scale
    ctx.set_materialize_grads(False)  # most calls do not use the log-sum-exp


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, sinks, out, lse, words = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    *grads, grad_sinks = torch.ops.hcp.attention_backward(
        grad_out, grad_lse, query, key, value, sinks, out, lse, words, ctx.scale
    )
    return *grads, None if sinks is None else grad_sinks, None, None


def _refuse_second_derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "hcp attention was differentiated twice, expected once: it has no second derivative"
    )


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


# Registered by hand: torch.library.custom_op would import the compiler at the first eager call.
_SCHEMAS = {
    "hcp::attention": "(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor words,"
    " float scale) -> (Tensor, Tensor)",
    "hcp::attention_backward": "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key,"
    " Tensor value, Tensor? sinks, Tensor out, Tensor lse, Tensor words, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
}
for _name, _run, _shapes, _gradient, _keep in (
    ("hcp::attention", _attention, _attention_fake, _backward, _save),
    (
        "hcp::attention_backward",
        _attention_backward,
        _attention_backward_fake,
        _refuse_second_derivative,
        _save_nothing,
    ),
):
    torch.library.define(_name, _SCHEMAS[_name])
    torch.library.impl(_name, ("cpu", "cuda"), _run)
    torch.library.register_fake(_name, _shapes)
    torch.library.register_autograd(_name, _gradient, setup_context=_keep)


# ---- the call ------------------------------------------------------------------------------------


def attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, words: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows over the whole sequences: (T, H, D), (T, G, D), (T, G, E) to
    (T, H, E), under the schedule in ``words``; and its log-sum-exp (T, H), sinks included.

    Differentiable once, see :meth:`hcp.ContextParallelHandler.attention`.
    """
    out, lse = torch.ops.hcp.attention(query, key, value, sinks, words, scale)
    return out, lse


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    rows: int,
    device: torch.device,
) -> None:
    """Raise ValueError unless the tensors are what a kernel computes right.

    Kernels do not check head counts, and compute nonsense from wrong ones.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected (rows, heads, head_dim)"
            )
        if tensor.shape[0] != rows:
            raise ValueError(
                f"{name} has {tensor.shape[0]} rows, expected {rows}: "
                "this rank's rows of the micro-batch"
            )
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, expected {device}: the group's device")
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected {query.dtype} as query")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key has head_dim {key.shape[2]}, expected {query.shape[2]}: that of query"
        )
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"value has {value.shape[1]} heads, expected {key.shape[1]}: those of key")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"query has {query.shape[1]} heads, expected a multiple of the {key.shape[1]} of key"
        )
    if sinks is not None:
        _check_sinks(sinks, query)
    kernel_for(query.device, query.dtype)


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    if sinks.shape != query.shape[1:2]:
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}, expected ({query.shape[1]},): one per head"
        )
    if sinks.device != query.device or not sinks.is_floating_point():
        raise ValueError(
            f"sinks is {sinks.dtype} on {sinks.device}, expected floats on {query.device}"
        )
