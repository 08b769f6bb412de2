"""Packed attention over local and received rows, forward and backward.

The schedule (see ``hcp.layout``) says everything: which keys arrive when, and which dense blocks of
queries and keys are computed. Each block is one call of a library kernel; the partial outputs are
merged once by log-sum-exp. The backward fetches the keys again, gives the kernel the merged output
and log-sum-exp, sends partial gradients of keys and values to their owners, and sums them once.

T rows on this rank, H query heads, G key-value heads, D head size, N rows of a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp import ops
from hcp.exchange import Pending, Transport, agree, signature, transport_of
from hcp.layout import Entry, Schedule, Stage, schedule_of

# ---- blocks: library kernels ---------------------------------------------------------------------


class Block(NamedTuple):
    """Query rows against key rows, both (n, heads, D), causal (a square) or full."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    scale: float


def _batched(rows: Tensor) -> Tensor:
    return rows.unsqueeze(0).transpose(1, 2)


def _packed(batch: Tensor) -> Tensor:
    return batch.squeeze(0).transpose(0, 1)


def cpu_forward(block: Block) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention for the CPU: output (n, H, D) and log-sum-exp (n, H).

    No block is empty: the kernel would end the process.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _batched(block.query),
        _batched(block.key),
        _batched(block.value),
        0.0,
        block.causal,
        scale=block.scale,
    )
    return _packed(out), lse.squeeze(0).transpose(0, 1)


def cpu_backward(
    block: Block, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given the merged output and log-sum-exp."""
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _batched(grad_out),
        _batched(block.query),
        _batched(block.key),
        _batched(block.value),
        _batched(out),
        lse.transpose(0, 1).unsqueeze(0),
        0.0,
        block.causal,
        scale=block.scale,
    )
    query, key, value = (_packed(grad) for grad in grads)
    return query, key, value


# ---- stages: keys as they arrive -----------------------------------------------------------------


class _Fetch(NamedTuple):
    """A stage whose keys are on their way."""

    stage: Stage
    received: Tensor
    pending: Pending

    def rows(self) -> Tensor:
        """Keys beside values, (key_rows, G * 2D), once they are there."""
        self.pending.wait()
        if len(self.stage.arrange) == 0:
            return self.received
        return ops.pack([self.received], self.stage.arrange, self.stage.key_rows)


def _fetch(transport: Transport, stage: Stage, local: list[Tensor], forwarded: Tensor) -> _Fetch:
    packed = len(stage.pack) > 0
    sent = ops.pack(local, stage.pack, stage.sent_rows) if packed else forwarded
    received = local[0].new_empty(stage.received_rows, sum(rows.shape[1] for rows in local))
    pending = transport.start(sent, stage.sends, received, stage.receives)
    return _Fetch(stage, received, pending)


def _arrivals(
    transport: Transport, schedule: Schedule, key: Tensor, value: Tensor
) -> Iterator[tuple[Stage, Tensor, Tensor]]:
    """Each stage with its keys and values, while those of the next are on their way."""
    local = [key.flatten(1), value.flatten(1)]
    width = key.shape[1] * key.shape[2]
    stages = schedule.stages
    received = local[0].new_empty(0, 0)
    stage_key, stage_value = key, value
    for i, stage in enumerate(stages):
        following = stages[i + 1] if i + 1 < len(stages) else None
        fetch = _fetch(transport, following, local, received) if following else None
        yield stage, stage_key, stage_value
        if fetch is not None:
            received = fetch.rows()
            stage_rows = len(received)
            stage_key = received[:, :width].view(stage_rows, *key.shape[1:])
            stage_value = received[:, width:].view(stage_rows, *value.shape[1:])


def _block(entry: Entry, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Block:
    queries = slice(entry.query_row, entry.query_row + entry.query_rows)
    keys = slice(entry.key_row, entry.key_row + entry.key_rows)
    return Block(query[queries], key[keys], value[keys], bool(entry.causal), scale)


# ---- operators -----------------------------------------------------------------------------------


def _open(query: Tensor, key: Tensor, value: Tensor, words: Tensor) -> tuple[Schedule, Transport]:
    schedule = schedule_of(words)
    transport = transport_of(schedule.transport_key)
    traits = signature(query, key, value)
    if schedule.agreed != traits:
        sends = [move for stage in schedule.stages for move in stage.sends]
        receives = [move for stage in schedule.stages for move in stage.receives]
        agree(transport, traits, sends, receives)
        schedule.agreed = traits
    return schedule, transport


@torch.library.custom_op("hcp::attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, words: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    schedule, transport = _open(query, key, value, words)
    outs, lses = [], []
    for stage, stage_key, stage_value in _arrivals(transport, schedule, key, value):
        for entry in stage.entries:
            out, lse = cpu_forward(_block(entry, query, stage_key, stage_value, scale))
            outs.append(out)
            lses.append(lse)
    if not outs:
        return torch.zeros_like(query), _empty_lse(query)
    merged: tuple[Tensor, Tensor] = ops.merge(outs, lses, schedule.output_runs, schedule.rows)
    return merged


def _empty_lse(query: Tensor) -> Tensor:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_full(query.shape[:2], -math.inf, dtype=dtype)


@_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, words: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty(query.shape)
    return out, query.new_empty((query.shape[0], query.shape[1]), dtype=dtype)


@torch.library.custom_op("hcp::attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    schedule, transport = _open(query, key, value, words)
    grad_out = _innermost_contiguous(grad_out)
    grad_queries: list[Tensor] = []
    grad_keys: list[Tensor] = []
    grad_values: list[Tensor] = []
    for stage, stage_key, stage_value in _arrivals(transport, schedule, key, value):
        for entry in stage.entries:
            rows = slice(entry.query_row, entry.query_row + entry.query_rows)
            block = _block(entry, query, stage_key, stage_value, scale)
            grads = cpu_backward(block, grad_out[rows], out[rows], lse[rows])
            for parts, grad in zip((grad_queries, grad_keys, grad_values), grads, strict=True):
                parts.append(grad.flatten(1))
    if not grad_queries:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    home = _bring_home(transport, schedule, grad_keys, grad_values)
    local = len(schedule.stages[0].entries)
    width = grad_keys[0].shape[1]
    return (
        ops.reduce(grad_queries, schedule.output_runs, schedule.rows).view_as(query),
        _summed([*grad_keys[:local], home[:, :width]], schedule).view_as(key),
        _summed([*grad_values[:local], home[:, width:]], schedule).view_as(value),
    )


@_attention_backward.register_fake
def _(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
    )


def _innermost_contiguous(rows: Tensor) -> Tensor:
    # The kernel ignores the innermost stride, and a gradient may come expanded from a sum.
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _bring_home(
    transport: Transport, schedule: Schedule, grad_keys: list[Tensor], grad_values: list[Tensor]
) -> Tensor:
    """Partial gradients of other ranks' keys to their owners; what comes home, part by part."""
    columns = [grad for pair in zip(grad_keys, grad_values, strict=True) for grad in pair]
    sent = ops.reduce(columns, schedule.home_runs, schedule.home_sent_rows, columns=2)
    received = sent.new_empty(schedule.home_received_rows, sent.shape[1])
    transport.start(sent, schedule.home_sends, received, schedule.home_receives).wait()
    return received


def _summed(parts: list[Tensor], schedule: Schedule) -> Tensor:
    return ops.reduce(parts, schedule.local_runs, schedule.rows)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, words, scale = inputs
    ctx.save_for_backward(query, key, value, *output, words)
    ctx.scale = scale
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, out, lse, words = ctx.saved_tensors
    grads = torch.ops.hcp.attention_backward(
        grad_out, query, key, value, out, lse, words, ctx.scale
    )
    return *grads, None, None


_attention.register_autograd(_backward, setup_context=_save)


# ---- the call ------------------------------------------------------------------------------------


def attention(query: Tensor, key: Tensor, value: Tensor, words: Tensor, scale: float) -> Tensor:
    """Attention of this rank's rows over the whole sequences: (T, H, D), (T, G, D), (T, G, D) to
    (T, H, D), under the schedule in ``words``.

    Differentiable once, with tensors that are checked already: see
    :meth:`hcp.ContextParallelHandler.attention`.
    """
    out: Tensor
    out, _ = torch.ops.hcp.attention(query, key, value, words, scale)
    return out


def check(query: Tensor, key: Tensor, value: Tensor, rows: int) -> None:
    """Raise ValueError unless the tensors are what a kernel computes right.

    The CPU kernel does not check head counts, and computes nonsense from wrong ones.
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
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}, expected the CPU")
        if tensor.dtype not in _KERNEL_DTYPES or tensor.dtype != query.dtype:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}, expected one of {_KERNEL_DTYPES}, as query has"
            )
    if key.shape != value.shape or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key has shape {tuple(key.shape)} and value {tuple(value.shape)}, expected the same "
            f"with the query's head_dim {query.shape[2]}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"query has {query.shape[1]} heads, expected a multiple of the {key.shape[1]} of key"
        )


_KERNEL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
