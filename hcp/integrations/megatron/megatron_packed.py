"""Pass the handler of a micro-batch to its layers, with Megatron's PackedSeqParams.

`packed_seq_params(cp)` makes PackedSeqParams that hold the handler. Those that Megatron made
itself, with its cp_group or local_cp_size, get a handler when the first layer asks for one.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

import hcp
from hcp._words import CommType
from hcp.exchange.torch_p2p import TorchTransport
from hcp.integrations.megatron.attention_backend import backend_of_config
from hcp.tools.loopback import one_rank


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


def without_causal_mask(cp: hcp.ContextParallelHandler) -> hcp.ContextParallelHandler:
    """Return the handler for a layer whose rows see later ones too. Of params with padding between
    their sequences it is another one, which hides the padding. Raises ValueError if several ranks
    compute these."""
    real = _real_lengths.get(cp)
    if real is None:
        return cp
    if cp.degree > 1:
        raise ValueError(
            f"packed_seq_params has padding (cu_seqlens_q {real}, cu_seqlens_q_padded "
            f"{cp.plan.lengths}) on {cp.degree} ranks in a layer without a causal mask, expected "
            "none: hcp would cut such sequences elsewhere; plan_batches needs no padding"
        )
    if cp not in _hiding:
        rooms = zip(real, cp.plan.lengths, strict=True)
        masks = [hcp.Mask(room, [((0, n), (0, n))] if n else []) for n, room in rooms]
        alone = one_rank(cp.cu_seqlens.device)
        _hiding[cp] = type(cp)(cp.plan.with_masks(masks), 0, alone, comm_types=_WITHOUT_CHOICE)
    return _hiding[cp]


_Handlers = weakref.WeakKeyDictionary[hcp.ContextParallelHandler, Any]
_real_lengths: _Handlers = weakref.WeakKeyDictionary()
"""Tokens of each sequence without padding, of the handlers whose sequences have some."""
_hiding: _Handlers = weakref.WeakKeyDictionary()
"""The handlers that hide it."""


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
    mode = getattr(params, "cp_partition_mode", None) or "zigzag"
    if size > 1 and mode != "zigzag":
        raise ValueError(
            f"packed_seq_params.cp_partition_mode is {mode!r}, expected 'zigzag': hcp takes each "
            "sequence as cut in 2 x CP chunks"
        )
    lengths, real = _lengths_of(params)
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
    transport = one_rank(params.cu_seqlens_q.device) if alone else _transport_over(group)
    kind = hcp.get_cp_handler_cls(backend_of_config(config))
    made: hcp.ContextParallelHandler = kind(plan, 0, transport, comm_types=_WITHOUT_CHOICE)
    if real != lengths:
        _real_lengths[made] = real
    return made


def _lengths_of(params: Any) -> tuple[list[int], list[int]]:
    """Return the lengths of sequences with padding, and those without it."""
    real = _bounds_of(params, "cu_seqlens_q")
    if real is None:
        raise ValueError("packed_seq_params.cu_seqlens_q is None, expected bounds of its sequences")
    padded = _bounds_of(params, "cu_seqlens_q_padded") or real
    for name, expected in (("cu_seqlens_kv", real), ("cu_seqlens_kv_padded", padded)):
        given = _bounds_of(params, name)
        if given is not None and given != expected:
            raise ValueError(
                f"packed_seq_params.{name} is {given}, expected {expected} as of the "
                "queries: hcp's layers are self-attention"
            )
    if len(real) != len(padded):
        raise ValueError(
            f"packed_seq_params has {len(real)} cu_seqlens_q and {len(padded)} "
            "cu_seqlens_q_padded, expected as many"
        )
    pairs = zip(itertools.pairwise(padded), itertools.pairwise(real), strict=True)
    lengths = [(end - start, own_end - own) for (start, end), (own, own_end) in pairs]
    if wrong := next((pair for pair in lengths if not 0 <= pair[1] <= pair[0]), None):
        raise ValueError(
            f"packed_seq_params has a sequence of {wrong[1]} tokens by cu_seqlens_q in {wrong[0]} "
            "rows by cu_seqlens_q_padded, expected at most as many tokens"
        )
    return [room for room, _ in lengths if room], [own for room, own in lengths if room]


def _bounds_of(params: Any, name: str) -> list[int] | None:
    """Return bounds of sequences. ValueError unless they go up from 0."""
    given = getattr(params, name)
    if given is None:
        return None
    ends: list[int] = torch.as_tensor(given).tolist()
    numbers = all(isinstance(end, int) for end in ends)
    if not numbers or ends[:1] != [0] or len(ends) < 2 or ends != sorted(ends):
        raise ValueError(
            f"packed_seq_params.{name} is {ends}, expected integers (sequences + 1,) that go up "
            "from 0"
        )
    return ends


_WITHOUT_CHOICE: tuple[CommType, ...] = ("p2p", "all_gather", "a2a")
"""Comm types that need neither the sizes of levels nor prices, which Megatron's params lack."""


_over: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchTransport] = weakref.WeakKeyDictionary()


def _transport_over(group: dist.ProcessGroup) -> TorchTransport:
    """Return a transport on Megatron's own group, whose ranks all use it in the same order."""
    if group not in _over:
        _over[group] = TorchTransport(group)
    return _over[group]
