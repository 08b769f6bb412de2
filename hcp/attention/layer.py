"""Attention of a layer over local and arriving keys, forward and backward.

The schedule (see ``hcp.exchange.tables``) says everything: which keys arrive when, and which dense
blocks of queries and keys library kernels (``hcp.attention.kernels``) compute. Partial outputs are
merged by log-sum-exp, those of many stages in turns: into a total in float32, while later stages
run. The backward fetches the keys again, gives the kernel the merged output and log-sum-exp, and
sums partial gradients of keys and values: on each rank, then at their owners (``key_transfer``).

Compilers see one operator instead: ``hcp.attention.operator``.

T rows on this rank, H query heads, G key-value heads, D head size, E head size of values, N rows of
a launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp._ranges import ranged
from hcp.attention.checks import Inputs, as_autocast
from hcp.attention.head_exchange import HeadExchange
from hcp.attention.kept import current
from hcp.attention.kernels import Attended, Launch, ResultGrads, scores_of_sinks, wide
from hcp.attention.key_transfer import cut, rotated_back, sum_gradients
from hcp.attention.prepared import LayerCall, LayerOptions, PreparedLayer, make_layer
from hcp.attention.rotary import NO_ROTATION, Rotary
from hcp.exchange.agreement import BACKWARD, BACKWARD_WITH_LSE, LayerName, Stamp


def attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: LayerCall
) -> tuple[Tensor, Tensor]:
    """Attend from this rank's rows to the whole sequences: (T, H, D), (T, G, D), (T, G, E) to
    (T, H, E), under the schedule of the layer; and its log-sum-exp (T, H), sinks included.

    With ``call.rotary``, queries and keys are rotated first, in fewer passes: keys on their way
    into what is sent, and, where rows are sent, summed gradients back before they are rounded.

    Differentiable once, see :meth:`hcp.ContextParallelHandler.attention`.
    """
    out, lse = _Attention.apply(query, key, value, sinks, call)  # type: ignore[no-untyped-call]
    return out, lse


def layer_of(call: LayerCall, inputs: Inputs, *, latent: bool = False) -> PreparedLayer:
    """Return the layer of a call. The first call of a kind is checked here, and compared with the
    peers. ``latent``: whether keys are latent rows, see ``hcp.attention.latent``."""
    (query, key, value, sinks), options = inputs, call.options
    like = (
        *(query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype),
        *(query.device, key.device, value.device),
        *(options.scale, options.choice, call.rotary is not None, latent),
        None if sinks is None else (sinks.shape, sinks.dtype, sinks.device),
    )
    layer = call.prepared.layers.get(like)
    if layer is None:
        layer = call.prepared.layers[like] = make_layer(call, inputs, latent)
    return layer


def as_kernels_take(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as autocast and kernels want them."""
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = as_autocast(query), as_autocast(key), as_autocast(value)
    return dense_heads(query), dense_heads(key), dense_heads(value)


def dense_heads(rows: Tensor) -> Tensor:
    """Rows whose heads lie dense: kernels take any stride of rows and heads, but read the elements
    of a head side by side."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def without_others(rows: Tensor) -> Tensor:
    """Rows that keep no memory of other tensors alive until the backward. A projection to queries,
    keys and values at once gives three views of one memory, and those of queries and keys are not
    needed any more once they are rotated."""
    shared = rows.untyped_storage().nbytes() > 2 * rows.nbytes
    return rows.clone(memory_format=torch.contiguous_format) if shared else rows


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_watched(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a compiler, a mode or a kind of tensor is there that must see an operator."""
    return (
        type(query) not in _PLAIN
        or type(key) not in _PLAIN
        or type(value) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.compiler.is_compiling()
    )


class _Attention(torch.autograd.Function):
    """The operator without its dispatch, which would take longer than all else in here."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        call: LayerCall,
    ) -> tuple[Tensor, Tensor]:
        inputs = (query, key, value, sinks)
        with torch._C._AutoDispatchBelowAutograd():
            layer = layer_of(call, inputs)
            kept = current.results
            recalled = None if kept is None else kept.next()
            if recalled is None:
                out, lse, query, key = forward(layer, call, inputs)
                if kept is not None:
                    kept.add(out, lse)
            else:
                out, lse = recalled
                query, key = _rotated(call.rotary, query, key)
            if call.rotary is not None and any(ctx.needs_input_grad):
                value = without_others(value)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.layer, ctx.call = layer, call
        ctx.set_materialize_grads(False)  # most calls do not use the log-sum-exp
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        call: LayerCall = ctx.call
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if torch.is_grad_enabled() or is_watched(query, key, value):  # no second derivative
            given = grad_out, grad_lse, query, key, value, sinks, out, lse, call.options.words
            number = torch.tensor([call.number], device="cpu")
            *grads, grad_sinks = torch.ops.hcp.attention_backward(
                *given, number, *flat_options(call.options, call.rotary), flat_name(call.name)
            )
            return *grads, None if sinks is None else grad_sinks, None
        attended = query, key, value, out, lse
        with torch._C._AutoDispatchBelowAutograd():
            return *backward(ctx.layer, call, attended, sinks, (grad_out, grad_lse)), None


def flat_options(options: LayerOptions, rotary: Rotary | None) -> tuple[Any, ...]:
    """Scale, rotation and kernel, as operators take them."""
    return options.scale, *(rotary or NO_ROTATION), *options.choice


def flat_name(name: LayerName) -> str:
    """A layer's name, as operators take it."""
    return "" if name is None else str(name)


# ---- forward -------------------------------------------------------------------------------------


@ranged("hcp: attention")
def forward(
    layer: PreparedLayer, call: LayerCall, inputs: Inputs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and the queries and keys that attention saw: rotated."""
    stamp, rotary = Stamp(layer.kind, call.number, layer=call.name), call.rotary
    if not layer.chunks:
        return _forward(layer, stamp, inputs, rotary)
    query, key, value, sinks = inputs
    query, key = _rotated(rotary, query, key)
    rotated = (query, key, value, sinks)
    return *_forward_in_chunks(layer, stamp, rotated), query, key


def _rotated(rotary: Rotary | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return (query, key) if rotary is None else (rotary.rotate(query), rotary.rotate(key))


def _forward_in_chunks(layer: PreparedLayer, stamp: Stamp, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of some heads after others, whose buffers leave with them."""
    query, key, value, sinks = inputs
    out = lse = query.new_empty(0)
    for queries, keys, chunk in layer.chunks:
        own_sinks = None if sinks is None else sinks[queries]
        own = (query[:, queries], key[:, keys], value[:, keys], own_sinks)
        own_out, own_lse, *_ = _forward(chunk, stamp, own, None)
        if queries.start == 0:
            heads = *query.shape[:2], value.shape[2]
            out, lse = own_out.new_empty(heads), own_lse.new_empty(heads[:2])
        out[:, queries], lse[:, queries] = own_out, own_lse
        del own_out, own_lse
    return out, lse


def _forward(
    layer: PreparedLayer, stamp: Stamp, inputs: Inputs, rotary: Rotary | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, sinks = inputs
    if rotary is not None:
        query = rotary.rotate(query)
    if layer.heads is None:
        key, arriving = _sent_keys(layer, stamp, key, value, rotary)
        out, lse = _forward_rows(layer, query, value, sinks, arriving)
    else:
        if rotary is not None:
            key = rotary.rotate(key)
        rotated = (query, key, value, sinks)
        out, lse = _forward_heads(layer, layer.heads, stamp, rotated)
    return out, lse, query, key


def _sent_keys(
    layer: PreparedLayer, stamp: Stamp, key: Tensor, value: Tensor, rotary: Rotary | None
) -> tuple[Tensor, Iterator[list[Tensor]]]:
    """Keys, rotated, and those of each stage as they arrive."""
    sent: Tensor | None = None
    if rotary is not None and layer.packs:
        stage = layer.schedule.stages[1]
        key, sent = torch.ops.hcp.rotate_pack.default(
            key, *rotary, [dense_heads(value.flatten(1))], stage.pack, stage.sent_rows
        )
    elif rotary is not None:
        key = rotary.rotate(key)
    return key, layer.transfer.keys(key, value, sent, stamp)


def _forward_rows(
    layer: PreparedLayer,
    query: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    arriving: Iterator[list[Tensor]],
) -> tuple[Tensor, Tensor]:
    """Attend to keys as they arrive, and merge."""
    launches, rows = layer.launches, layer.schedule.query_rows
    queries = iter(cut([query], launches.query_cuts, launches.number))
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    total: Tensor | None = None
    total_lse: Tensor | None = None
    stages = zip(launches.stages, launches.running_runs, arriving, strict=True)
    for stage, runs, keys in stages:
        _attend(layer, stage, queries, keys, outs, lses)
        if runs is not None:
            if total is None:
                total = new_total(outs[0], rows)
            total_lse = torch.ops.hcp.merge_on.default(total, total_lse, outs, lses, runs)
            outs.clear()
            lses.clear()
    if not outs:
        return _nothing_seen(query, value, sinks)
    if launches.one_launch and sinks is None:
        return outs[0], lses[0]
    runs = launches.output_runs
    if sinks is not None:
        runs = launches.sunk_runs
        _add_sinks(outs, lses, sinks, rows)
    if total is None:
        return merged(outs, lses, runs, rows)
    out, lse = torch.ops.hcp.merge_last.default(total, total_lse, outs, lses, runs)
    return out, lse


def _attend(
    layer: PreparedLayer,
    stage: list[Launch],
    queries: Iterator[Tensor],
    keys: list[Tensor],
    outs: list[Tensor],
    lses: list[Tensor],
) -> None:
    """Add what a stage's launches give. Its keys leave with them."""
    forward, scale = layer.kernel.forward, layer.scale
    for i, launch in enumerate(stage):
        out, lse = forward(launch, next(queries), keys[2 * i], keys[2 * i + 1], scale)
        outs.append(out)
        lses.append(lse)
    keys.clear()


def new_total(part: Tensor, rows: int) -> Tensor:
    """Memory for the sum or merge of parts like this one, (rows, H, E), not yet computed."""
    return part.new_empty(rows, *part.shape[1:], dtype=wide(part.dtype))


def merged(
    outs: list[Tensor], lses: list[Tensor], runs: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Merge partial outputs by log-sum-exp: see `ops.merge`."""
    out, lse = torch.ops.hcp.merge.default(outs, lses, runs, rows)
    return out, lse


def _add_sinks(outs: list[Tensor], lses: list[Tensor], sinks: Tensor, rows: int) -> None:
    """Add a part: a sink is a key that every query of its head sees and whose value is 0."""
    _, query_heads, head_size = outs[0].shape
    outs.append(outs[0].new_zeros(head_size).expand(rows, query_heads, -1))
    lses.append(scores_of_sinks(sinks, lses[0].dtype).expand(rows, -1))


def _nothing_seen(query: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output 0, and the log-sum-exp of nothing or of the sinks: of no rows, or of rows that a mask
    hides every key from."""
    out, lse = empty_result(query, value)
    if sinks is None:
        return out.zero_(), lse.fill_(-torch.inf)
    return out.zero_(), lse.copy_(scores_of_sinks(sinks, lse.dtype))


def empty_result(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, not yet computed."""
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    return out, query.new_empty(query.shape[:2], dtype=wide(query.dtype))


# ---- backward ------------------------------------------------------------------------------------


@ranged("hcp: attention backward")
def backward(
    layer: PreparedLayer,
    call: LayerCall,
    attended: Attended,
    sinks: Tensor | None,
    grads: ResultGrads,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of the queries, keys and values that were given, before any rotation, and of
    the sinks."""
    (grad_out, grad_lse), (query, key, value, out, lse) = grads, attended
    if grad_out.stride(-1) != 1:  # kernels ignore it, and a gradient may come expanded from a sum
        grad_out = grad_out.contiguous()
    # What travels depends on it.
    passed = BACKWARD if grad_lse is None else BACKWARD_WITH_LSE
    stamp = Stamp(layer.kind, call.number, passed, call.name)
    by_query = [grad_out, query, out, lse, *([] if grad_lse is None else [grad_lse])]
    compute = _backward_in_chunks if layer.chunks else _backward
    found = compute(layer, stamp, by_query, key, value, call.rotary)
    if sinks is None:
        return *found, None
    return *found, _sinks_backward(grad_out, grad_lse, sinks, out, lse)


def _backward_in_chunks(
    layer: PreparedLayer,
    stamp: Stamp,
    by_query: list[Tensor],
    key: Tensor,
    value: Tensor,
    rotary: Rotary | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (by_query[1], key, value))
    for queries, keys, chunk in layer.chunks:
        own = [x[:, queries].contiguous() for x in by_query]
        found = _backward(chunk, stamp, own, key[:, keys], value[:, keys], rotary)
        grad_query[:, queries], grad_key[:, keys], grad_value[:, keys] = found
        del own, found
    return grad_query, grad_key, grad_value


def _backward(
    layer: PreparedLayer,
    stamp: Stamp,
    by_query: list[Tensor],
    key: Tensor,
    value: Tensor,
    rotary: Rotary | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries and keys as they were given, not rotated, and of values. ``by_query``:
    grad_out, query, out, lse and, where there is one, grad_lse."""
    if layer.heads is None:
        return _backward_rows(layer, stamp, by_query, key, value, rotary)
    given = stamp, by_query, key, value
    grad_query, grad_key, grad_value = _backward_heads(layer, layer.heads, *given)
    return rotated_back(grad_query, rotary), rotated_back(grad_key, rotary), grad_value


def _backward_rows(
    layer: PreparedLayer,
    stamp: Stamp,
    by_query: list[Tensor],
    key: Tensor,
    value: Tensor,
    rotary: Rotary | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, those of others' keys returned to their owners."""
    launches, count = layer.launches, layer.schedule.query_rows
    rows = iter(cut(by_query, launches.query_cuts, launches.number))
    grad_queries: list[Tensor] = []
    grads: list[Tensor] = []
    total: Tensor | None = None
    arriving = layer.transfer.keys(key, value, None, stamp)
    stages = zip(launches.stages, launches.running_runs, arriving, strict=True)
    for stage, runs, keys in stages:
        _attend_back(layer, stage, rows, len(by_query) == 5, keys, grad_queries, grads)
        if runs is not None:
            begun = total is not None
            if total is None:
                total = new_total(grad_queries[0], count)
            torch.ops.hcp.sum_on.default(total, begun, grad_queries, runs)
            grad_queries.clear()
    if launches.one_launch:
        return rotated_back(grad_queries[0], rotary), rotated_back(grads[0], rotary), grads[1]
    if not grads and len(layer.schedule.stages) == 1:
        return torch.zeros_like(by_query[1]), torch.zeros_like(key), torch.zeros_like(value)
    # Queries that see nothing give no gradients, but others may have some for this rank's keys.
    wait = layer.transfer.return_gradients(grads or [key[:0], value[:0]], rotary, stamp)
    # Meanwhile:
    if total is None:
        parts = grad_queries or [by_query[1][:0]]
        (grad_query,) = sum_gradients(parts, None, launches.output_runs, count, 1, rotary)
        parts.clear()
    else:
        torch.ops.hcp.sum_on.default(total, True, grad_queries, launches.output_runs)
        grad_queries.clear()
        grad_query = rotated_back(total, rotary).to(by_query[1].dtype)
        del total
    grad_key, grad_value = wait()
    return grad_query, grad_key, grad_value


def _attend_back(
    layer: PreparedLayer,
    stage: list[Launch],
    rows: Iterator[Tensor],
    with_lse: bool,
    keys: list[Tensor],
    grad_queries: list[Tensor],
    grads: list[Tensor],
) -> None:
    """Add the gradients of a stage's launches: of queries, of keys and values. Its keys leave with
    them."""
    backward, scale = layer.kernel.backward, layer.scale
    for i, launch in enumerate(stage):
        grad_out, query, out, lse = next(rows), next(rows), next(rows), next(rows)
        grad_lse = next(rows) if with_lse else None
        attended = query, keys[2 * i], keys[2 * i + 1], out, lse
        grad_query, *others = backward(launch, (grad_out, grad_lse), attended, scale)
        grad_queries.append(grad_query)
        grads += others
    keys.clear()


def _sinks_backward(
    grad_out: Tensor, grad_lse: Tensor | None, sinks: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
    """This rank's share: a sink's weight in a row is exp(sink - lse), and its value is 0."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    weights = (sinks.to(lse.dtype) - lse).exp().masked_fill(lse == -torch.inf, 0)
    return -(weights * delta).sum(0).to(sinks.dtype)


# ---- rows for heads ------------------------------------------------------------------------------
#
# Neighbours exchange their rows for heads, and each computes its own heads of all their rows.


def _forward_heads(
    layer: PreparedLayer, heads: HeadExchange, stamp: Stamp, inputs: Inputs
) -> tuple[Tensor, Tensor]:
    result = _own_heads(layer, heads, stamp, inputs)
    out, lse = heads.to_rows(result, [], 0, stamp)
    return out, lse


def _own_heads(
    layer: PreparedLayer, heads: HeadExchange, stamp: Stamp, inputs: Inputs
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of this rank's heads. Their queries, keys and values leave with it."""
    query, key, value, sinks = inputs
    whole_query, whole_key, whole_value = heads.to_heads([query], [key, value], stamp)
    if whole_query.shape[1] == 0:  # nor has any rank of the ring
        return empty_result(whole_query, whole_value)
    own_sinks = None if sinks is None else sinks[heads.own]
    arriving = layer.transfer.keys(whole_key, whole_value, None, stamp)
    return _forward_rows(layer, whole_query, whole_value, own_sinks, arriving)


def _backward_heads(
    layer: PreparedLayer,
    heads: HeadExchange,
    stamp: Stamp,
    by_query: list[Tensor],
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    own_query, *own_keys = _own_heads_back(layer, heads, stamp, by_query, key, value)
    grad_query, grad_key, grad_value = heads.to_rows([own_query], own_keys, key.shape[1], stamp)
    return grad_query, grad_key, grad_value


def _own_heads_back(
    layer: PreparedLayer,
    heads: HeadExchange,
    stamp: Stamp,
    by_query: list[Tensor],
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's heads. What they are of leaves with it."""
    *wholes, whole_key, whole_value = heads.to_heads(by_query, [key, value], stamp)
    if wholes[1].shape[1] == 0:
        return wholes[1], whole_key, whole_value  # empty
    return _backward_rows(layer, stamp, wholes, whole_key, whole_value, None)
