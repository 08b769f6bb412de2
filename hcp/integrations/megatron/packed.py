"""Pass the handler of a micro-batch to its layers, with Megatron's PackedSeqParams.

`packed_seq_params(cp)` makes PackedSeqParams that hold the handler. Those that Megatron made
itself, with its cp_group or local_cp_size, get a handler when the first layer asks for one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

import hcp
from hcp._words import CommType
from hcp.exchange.loopback import one_rank
from hcp.exchange.torch_p2p import TorchTransport
from hcp.integrations.megatron.backends import backend_of_config


def packed_seq_params(
    cp: hcp.ContextParallelHandler,
    cp_group: dist.ProcessGroup | None = None,
    *,
    rows: int | None = None,
) -> Any:
    """Describe a handler's micro-batch by Megatron's PackedSeqParams, from which the layers of
    `hcp_layer_spec` take the handler.

    `cp_group`: the group of the ranks that compute these sequences, for other layers that need one.
    `rows`: those of the model's input on this rank (default: `cp.rows`). They are more than
    `cp.rows` if a rank without rows computes padding.
    """
    params = cp.packed_seq_params(PackedSeqParams, cp_group=cp_group)
    params.rows = cp.rows if rows is None else rows
    # An upper bound is all that it is asked for, and Megatron keeps a rotary table of each length.
    params.max_seqlen_q = params.max_seqlen_kv = 1 << max(0, cp.max_seqlen - 1).bit_length()
    return params


def handler_of(
    packed_seq_params: Any, cp_group: dist.ProcessGroup, config: Any = None
) -> hcp.ContextParallelHandler:
    """Return the handler that PackedSeqParams hold, or make one from Megatron's own fields.

    `cp_group`: the model's, which is used if the params have neither a group nor a size of 1.
    `config`: the model's, whose `attention_backend` a handler made here has.
    """
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        raise ValueError(
            "the layer got no packed_seq_params in the format 'thd', expected them: hcp computes "
            "packed sequences; take the micro-batch's from plan_batches or packed_seq_params(cp)"
        )
    if getattr(packed_seq_params, "cp_handler", None) is None:
        packed_seq_params.cp_handler = _made_of(packed_seq_params, cp_group, config)
        packed_seq_params.rows = packed_seq_params.cp_handler.rows
    handler: hcp.ContextParallelHandler = packed_seq_params.cp_handler
    return handler


def with_padding(rows: Tensor, count: int) -> Tensor:
    """Append zeros to (T, ...), up to `count` rows."""
    if rows.shape[0] == count:
        return rows
    return torch.cat([rows, rows.new_zeros(count - rows.shape[0], *rows.shape[1:])])


def _made_of(params: Any, cp_group: dist.ProcessGroup, config: Any) -> hcp.ContextParallelHandler:
    """Make the handler for Megatron's cut: 2 x size chunks of every sequence, padding included. It
    is also hcp's cut."""
    group = cp_group if params.cp_group is None else params.cp_group
    alone = params.cp_group is None and params.local_cp_size == 1
    size = 1 if alone else group.size()
    if params.local_cp_size not in (None, size):
        raise ValueError(
            f"packed_seq_params.local_cp_size is {params.local_cp_size}, expected {size}: the size "
            "of its cp_group"
        )
    bounds = params.cu_seqlens_q
    if params.cu_seqlens_q_padded is not None:
        bounds = params.cu_seqlens_q_padded
    lengths = [n for n in bounds.diff().tolist() if n > 0]
    uneven = [n for n in lengths if n % (2 * size)]
    if size > 1 and uneven:
        raise ValueError(
            f"packed_seq_params has sequences of {uneven[:4]} tokens, expected multiples of "
            f"2 * {size}, as Megatron cuts them; plan_batches takes any length"
        )
    data = {
        "lengths": lengths,
        "ranks": size,
        "max_tokens_per_rank": max(1, sum(lengths)),
        "micro_batches": [
            {"groups": [{"first_rank": 0, "degree": size, "sequences": [*range(len(lengths))]}]}
        ],
    }
    plan = hcp.Plan.from_dict(data)
    transport = one_rank(bounds.device) if alone else _transport_over(group)
    made = hcp.get_cp_handler_cls(backend_of_config(config))
    return made(plan, 0, transport, comm_types=_WITHOUT_CHOICE)


_WITHOUT_CHOICE: tuple[CommType, ...] = ("p2p", "all_gather", "a2a")
"""Comm types that need neither the sizes of levels nor prices, which Megatron's params lack."""


_over: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchTransport] = weakref.WeakKeyDictionary()


def _transport_over(group: dist.ProcessGroup) -> TorchTransport:
    """Return a transport on Megatron's own group, whose ranks all use it in the same order."""
    if group not in _over:
        _over[group] = TorchTransport(group)
    return _over[group]
