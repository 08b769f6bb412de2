"""Attention over local and arriving keys, forward and backward.

The schedule (see ``hcp.exchange.tables``) says everything: which keys arrive when, and which dense
blocks of queries and keys are computed, by library kernels (``hcp.attention.kernels``). The partial
outputs are merged once by log-sum-exp. The backward fetches the keys again, gives the kernel the
merged output and log-sum-exp, brings partial gradients of keys and values to their owners, and sums
them once.

T rows on this rank, H query heads, G key-value heads, D head size, E head size of values, N rows of
a launch.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from hcp import ops
from hcp.attention.checks import check
from hcp.attention.head_exchange import HeadExchange
from hcp.attention.kernel_calls import Launches, launches_of
from hcp.attention.kernels import Choice, Kernel, kernel_for, scores_of_sinks, wide
from hcp.attention.key_transfer import Journey, Turn, cut, journey_of, summed, turned_back
from hcp.exchange.agreement import (
    BACKWARD,
    BACKWARD_WITH_LSE,
    Kind,
    LayerName,
    Stamp,
    agree_once,
    rows_like,
)
from hcp.exchange.tables import Schedule
from hcp.exchange.transport import Transport, shares, transport_of


class Run(NamedTuple):
    """How attention of one kind is computed under a schedule; made at the first of its calls."""

    schedule: Schedule
    kernel: Kernel
    launches: Launches
    journey: Journey
    scale: float
    kind: Kind
    heads: HeadExchange | None
    """None where rows stay: nobody to trade with."""
    packs: bool
    """Whether what the first exchange sends can be packed while keys are turned."""


def run_of(
    schedule: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    choice: Choice,
    turned: bool,
    number: int = 0,
    layer: LayerName = None,
) -> Run:
    """The run of a call, which is checked when its like is first seen: here, and with the peers
    unless it is a backward's, which has no ``number``."""
    like = (
        *(query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype),
        *(query.device, key.device, value.device, scale, choice, turned),
        None if sinks is None else (sinks.shape, sinks.dtype, sinks.device),
    )
    run = schedule.runs.get(like)
    if run is None:
        given = query, key, value, sinks, scale, choice, turned
        run = schedule.runs[like] = _make_run(schedule, *given, number, layer)
    return cast(Run, run)


def _make_run(
    schedule: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    choice: Choice,
    turned: bool,
    number: int,
    layer: LayerName,
) -> Run:
    transport = transport_of(schedule.transport_key)
    check(query, key, value, sinks, schedule.rows, transport.device)
    kind = Kind(
        "attention",
        schedule.origin,
        query=rows_like(query),
        key=rows_like(key),
        value=rows_like(value),
        causal=schedule.window[1] == 0,
        window_size=schedule.window,
        softmax_scale=scale,
        softcap=choice.softcap,
        sinks=sinks is not None,
        rotary_pos_emb=turned,
        comm_type=schedule.comm_type,
        neighbours=schedule.inner,
    )
    kind.callers = schedule.callers
    # Signals between GPUs carry the stamp themselves.
    signalled = shares(transport) and schedule.trade is None
    if number and not signalled:
        agree_once(transport, schedule, Stamp(kind, number, layer=layer))
    kernel = kernel_for(query.device, query.dtype, choice)
    launches, groups, heads = (
        launches_of(schedule, kernel),
        key.shape[1],
        _heads_of(schedule, transport, query.shape[1], key.shape[1]),
    )
    if heads is not None:
        kernel, groups = heads.kernel(kernel), heads.key_count
    sizes = groups, key.shape[2], value.shape[2]
    journey = journey_of(schedule, launches, transport, sizes, key.dtype)
    packs = heads is None and len(schedule.stages) > 1 and not shares(transport)
    return Run(schedule, kernel, launches, journey, scale, kind, heads, packs)


def _heads_of(
    schedule: Schedule, transport: Transport, queries: int, keys: int
) -> HeadExchange | None:
    trade = schedule.trade
    if trade is None or len(trade.receives) == 1:
        return None
    return HeadExchange(transport, trade, queries, keys)


# ---- forward -------------------------------------------------------------------------------------


def forward(
    run: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    turn: Turn | None,
    number: int,
    layer: LayerName,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and the queries and keys that attention saw: turned."""
    stamp = Stamp(run.kind, number, layer=layer)
    sent: Tensor | None = None
    if turn is not None:
        cos, sin, interleaved = turn
        query = ops.rotate(query, cos, sin, interleaved=interleaved)
        if run.packs:
            stage = run.schedule.stages[1]
            given = [value.flatten(1)], stage.pack, stage.sent_rows
            key, sent = ops.rotate_pack(key, cos, sin, *given, interleaved=interleaved)
        else:
            key = ops.rotate(key, cos, sin, interleaved=interleaved)
    if run.heads is None:
        out, lse = _forward_rows(run, stamp, query, key, value, sinks, sent)
    else:
        out, lse = _forward_heads(run, run.heads, stamp, query, key, value, sinks)
    return out, lse, query, key


def _forward_rows(
    run: Run,
    stamp: Stamp,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    sent: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries against keys as they arrive, merged."""
    kernel, launches, scale = run.kernel, run.launches, run.scale
    queries = iter(cut([query], launches.query_cuts, launches.number))
    outs, lses = [], []
    arriving = run.journey.keys(key, value, sent, stamp)
    for stage, keys in zip(launches.stages, arriving, strict=True):
        for i, launch in enumerate(stage):
            out, lse = kernel.forward(launch, next(queries), keys[2 * i], keys[2 * i + 1], scale)
            outs.append(out)
            lses.append(lse)
    if not outs:  # no rows: a query sees at least its own key
        return empty_result(query, value)
    if sinks is not None:
        return _merge_with_sinks(outs, lses, launches.sunk_runs, sinks, run.schedule.query_rows)
    if launches.one_launch:
        return outs[0], lses[0]
    return ops.merge(outs, lses, launches.output_runs, run.schedule.query_rows)


def _merge_with_sinks(
    outs: list[Tensor], lses: list[Tensor], runs: Tensor, sinks: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """A sink is a key that every query of its head sees, whose value is 0."""
    _, query_heads, head_size = outs[0].shape
    sink_out = outs[0].new_zeros(head_size).expand(rows, query_heads, -1)
    sink_lse = scores_of_sinks(sinks, lses[0].dtype).expand(rows, -1)
    return ops.merge([*outs, sink_out], [*lses, sink_lse], runs, rows)


def empty_result(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, not yet computed."""
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    return out, query.new_empty(query.shape[:2], dtype=wide(query.dtype))


# ---- backward ------------------------------------------------------------------------------------


def backward(
    run: Run,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    turn: Turn | None,
    number: int,
    layer: LayerName,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """For queries and keys that attention saw, the gradients of those that were given, and of the
    sinks."""
    if grad_out.stride(-1) != 1:  # kernels ignore it, and a gradient may come expanded from a sum
        grad_out = grad_out.contiguous()
    # What travels depends on it.
    passed = BACKWARD if grad_lse is None else BACKWARD_WITH_LSE
    stamp = Stamp(run.kind, number, passed, layer)
    by_query = (
        [grad_out, query, out, lse] if grad_lse is None else [grad_out, query, out, lse, grad_lse]
    )
    if run.heads is None:
        grads = _backward_rows(run, stamp, by_query, key, value, turn)
    else:
        given = stamp, by_query, key, value
        grad_query, grad_key, grad_value = _backward_heads(run, run.heads, *given)
        grads = turned_back(grad_query, turn), turned_back(grad_key, turn), grad_value
    if sinks is None:
        return *grads, None
    return *grads, _sinks_backward(grad_out, grad_lse, sinks, out, lse)


def _backward_rows(
    run: Run,
    stamp: Stamp,
    by_query: list[Tensor],
    key: Tensor,
    value: Tensor,
    turn: Turn | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, those of others' keys sent home.

    ``by_query``: grad_out, query, out, lse and, where there is one, grad_lse.
    """
    kernel, launches, scale = run.kernel, run.launches, run.scale
    rows = iter(cut(by_query, launches.query_cuts, launches.number))
    grad_queries: list[Tensor] = []
    grads: list[Tensor] = []
    arriving = run.journey.keys(key, value, None, stamp)
    for stage, keys in zip(launches.stages, arriving, strict=True):
        for i, launch in enumerate(stage):
            grad_out, query, out, lse = next(rows), next(rows), next(rows), next(rows)
            grad_lse = next(rows) if len(by_query) == 5 else None
            given = grad_out, grad_lse, query, keys[2 * i], keys[2 * i + 1], out, lse, scale
            grad_query, *others = kernel.backward(launch, *given)
            grad_queries.append(grad_query)
            grads += others
    if not grads:
        return torch.zeros_like(by_query[1]), torch.zeros_like(key), torch.zeros_like(value)
    if launches.one_launch:
        return turned_back(grad_queries[0], turn), turned_back(grads[0], turn), grads[1]
    home = run.journey.home(grads, turn, stamp)
    # Meanwhile:
    (grad_query,) = summed(
        grad_queries, None, launches.output_runs, run.schedule.query_rows, 1, turn
    )
    grad_key, grad_value = home()
    return grad_query, grad_key, grad_value


def _sinks_backward(
    grad_out: Tensor, grad_lse: Tensor | None, sinks: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
    """This rank's share: a sink's weight in a row is exp(sink - lse), and its value is 0."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    weights = (sinks.to(lse.dtype) - lse).exp().masked_fill(lse == -torch.inf, 0)
    return -(weights * delta).sum(0).to(sinks.dtype)


# ---- heads for sequence --------------------------------------------------------------------------
#
# Neighbours trade their rows for heads, and each computes its own heads of all their rows.


def _forward_heads(
    run: Run,
    heads: HeadExchange,
    stamp: Stamp,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    whole_query, whole_key, whole_value = heads.to_heads([query], [key, value], stamp)
    if whole_query.shape[1] > 0:
        own_sinks = None if sinks is None else sinks[heads.own]
        result = _forward_rows(run, stamp, whole_query, whole_key, whole_value, own_sinks)
    else:  # nor has any rank of the ring
        result = empty_result(whole_query, whole_value)
    out, lse = heads.to_rows([*result], [], 0, stamp)
    return out, lse


def _backward_heads(
    run: Run, heads: HeadExchange, stamp: Stamp, by_query: list[Tensor], key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    *wholes, whole_key, whole_value = heads.to_heads(by_query, [key, value], stamp)
    grads = wholes[1], whole_key, whole_value  # without heads, hence empty
    if wholes[1].shape[1] > 0:
        grads = _backward_rows(run, stamp, wholes, whole_key, whole_value, None)
    by_key = [*grads[1:]]
    grad_query, grad_key, grad_value = heads.to_rows([grads[0]], by_key, key.shape[1], stamp)
    return grad_query, grad_key, grad_value
