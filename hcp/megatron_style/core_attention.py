"""Call any core attention module of a Megatron-style layer, under any degree.

T rows on this rank, S tokens of its group's sequences, end to end, H query heads, G key-value
heads, D head size, E head size of values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor

from hcp.attention import qkv_format as formats
from hcp.attention.checks import check_heads
from hcp.attention.options import CoreAttentionOptions, expect_known
from hcp.exchange.calls import Calls
from hcp.megatron_style.handler_protocol import MegatronStyleHandler
from hcp.megatron_style.packed import check_group, packed_seq_params, whole_params


class CoreAttention(torch.nn.Module):
    """hcp's own attention as a module, which is called as Megatron calls its core attention."""

    def __init__(
        self, *, sinks: torch.nn.Parameter | None = None, **options: Unpack[CoreAttentionOptions]
    ) -> None:
        """Keep the options of :meth:`hcp.ContextParallelHandler.attention` that a layer has.

        Args:
            sinks: a parameter of one logit per head.
            **options: ``causal``, ``window_size``, ``softmax_scale``, ``softcap`` and
                ``comm_type``, as there.
        """
        super().__init__()
        expect_known("CoreAttention", options, CoreAttentionOptions)
        for name, value in options.items():
            setattr(self, name, value)
        self.sinks: torch.nn.Parameter | None
        self.register_parameter("sinks", sinks)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """``packed_seq_params``: those of ``cp.packed_seq_params()``, which hold the handler.

        Shapes, arguments and errors: :meth:`hcp.ContextParallelHandler.core_attn`.
        """
        cp: MegatronStyleHandler | None = getattr(packed_seq_params, "cp_handler", None)
        if cp is None:
            raise ValueError(
                f"packed_seq_params is {type(packed_seq_params).__name__} without a handler, "
                "expected what cp.packed_seq_params() gives"
            )
        return cp.core_attn(
            attn_mod=self,
            query=query,
            key=key,
            value=value,
            attention_mask=attention_mask,
            attn_mask_type=attn_mask_type,
            attention_bias=attention_bias,
        )


def core_attn(
    cp: MegatronStyleHandler,
    calls: Calls,
    attn_mod: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: dict[str, Any],
    *,
    packed_class: Any,
    cp_group: Any,
    comm_type: str | None,
    default_comm_type: str,
) -> Tensor:
    """See :meth:`hcp.ContextParallelHandler.core_attn`. ``given``: arguments that a module gets
    unchanged."""
    qkv_format = "sbhd" if query.dim() == 4 else "thd"
    batch = query.shape[1] if query.dim() == 4 else 0
    if attn_mod is None or isinstance(attn_mod, CoreAttention):
        with calls.checking("core_attn"):
            rows = [formats.to_rows(cp.layout, x, qkv_format) for x in (query, key, value)]
            options = _own(attn_mod, given, qkv_format, comm_type)
        out: Tensor = cp.attention(*rows, **options)
        return formats.from_rows(out, batch, qkv_format).flatten(-2)
    with calls.checking("core_attn"):
        _expect_no_masks(cp, attn_mod)
    if not hasattr(attn_mod, "set_context_parallel_group"):
        return _whole(cp, calls, attn_mod, (query, key, value), given, qkv_format, packed_class)
    with _lent(cp, calls, attn_mod, cp_group, comm_type or default_comm_type):
        if cp.degree == 0:
            return _whole(cp, calls, attn_mod, (query, key, value), given, qkv_format, packed_class)
        if qkv_format == "thd":
            given["packed_seq_params"] = packed_seq_params(cp, packed_class, cp_group)
        given_out: Tensor = attn_mod(query, key, value, **given)
        return given_out.flatten(2 if qkv_format == "sbhd" else 1)


def _expect_no_masks(cp: MegatronStyleHandler, attn_mod: Any) -> None:
    if cp.layout.plan.masks:
        raise ValueError(
            f"the plan has masks, which {type(attn_mod).__name__} does not take, expected "
            "hcp.CoreAttention in its place"
        )


# ---- hcp's own -----------------------------------------------------------------------------------


def _own(
    attn_mod: CoreAttention | None,
    given: dict[str, Any],
    qkv_format: str,
    comm_type: str | None,
) -> dict[str, Any]:
    """Return the options of hcp's own attention."""
    options = {name: getattr(attn_mod, name) for name in _OPTIONS if hasattr(attn_mod, name)}
    own_type = options.get("comm_type")
    if given["attention_bias"] is not None:
        raise ValueError("attention_bias is given, expected None: hcp's attention adds none")
    if given["attention_mask"] is not None:
        raise ValueError(
            "attention_mask is given, expected None: hcp's attention reads no mask; say "
            "attn_mask_type, or a window_size of hcp.CoreAttention, instead"
        )
    if comm_type and own_type and comm_type != own_type:
        raise ValueError(
            f"comm_type is {comm_type!r}, expected {own_type!r}, that of attn_mod, or None"
        )
    return {
        **options,
        "causal": _is_causal(given["attn_mask_type"], options.get("causal", True), qkv_format),
        "sinks": None if attn_mod is None else attn_mod.sinks,
        "comm_type": own_type or comm_type,
        "layer": getattr(attn_mod, "layer_number", None),
    }


_OPTIONS = sorted(CoreAttentionOptions.__optional_keys__)

_CAUSAL = {"causal": True, "padding_causal": True, "no_mask": False, "padding": False}


def _is_causal(attn_mask_type: Any, default: bool, qkv_format: str) -> bool:
    """Read Megatron's AttnMaskType, or its name. No mask is read: the plan knows the sequences'
    ends."""
    if attn_mask_type is None:
        return default
    name = getattr(attn_mask_type, "name", attn_mask_type)
    if name not in _CAUSAL or (qkv_format != "thd" and name.startswith("padding")):
        allowed = sorted(n for n in _CAUSAL if qkv_format == "thd" or not n.startswith("padding"))
        raise ValueError(
            f"attn_mask_type is {name!r} for {qkv_format} rows, expected one of {allowed}: "
            "hcp packs sequences instead of masking their padding, and takes no mask"
        )
    return _CAUSAL[name]


# ---- a module that does context parallelism itself -----------------------------------------------

_LENT = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")


@contextmanager
def _lent(
    cp: MegatronStyleHandler, calls: Calls, attn_mod: Any, cp_group: Any, comm_type: str
) -> Iterator[None]:
    """Set the plan's group on a module for one call, by Transformer Engine's own method.

    The module gets its old values back in any case."""
    if cp.degree > 1:
        with calls.checking("core_attn"):
            _check_lent(cp, cp_group)
        to_lend: tuple[Any, ...] = (
            cp_group,
            cp.group.global_ranks,
            _stream(cp, attn_mod),
            comm_type,
        )
    else:
        to_lend = (None, None, None, comm_type)
    before = [getattr(attn_mod, name, None) for name in _LENT]
    try:
        attn_mod.set_context_parallel_group(*to_lend)
        yield
    finally:
        attn_mod.set_context_parallel_group(*before)


def _check_lent(cp: MegatronStyleHandler, cp_group: Any) -> None:
    if cp_group is None:
        raise ValueError(
            f"cp_group is None, expected the process group of the {cp.degree} ranks from "
            f"{cp.layout.first_rank}: attn_mod exchanges rows itself, and hcp creates no group "
            "per degree; hcp.CoreAttention needs none"
        )
    check_group(cp, cp_group)
    uneven = [n for n in cp.layout.lengths if n % (2 * cp.degree)]
    if uneven:
        raise ValueError(
            f"lengths {uneven} are not divisible by 2 * degree ({2 * cp.degree}), as attn_mod "
            "wants, which cuts sequences itself: pad them, or use hcp.CoreAttention, which "
            "takes any length"
        )


def _stream(cp: MegatronStyleHandler, attn_mod: Any) -> Any:
    if cp.device.type != "cuda":
        return None
    own = getattr(attn_mod, "cp_stream", None)
    return _stream_of(cp.device) if own is None else own


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


# ---- any other module: whole sequences, a share of the heads -------------------------------------


def _whole(
    cp: MegatronStyleHandler,
    calls: Calls,
    attn_mod: Any,
    tensors: tuple[Tensor, Tensor, Tensor],
    given: dict[str, Any],
    qkv_format: str,
    packed_class: Any,
) -> Tensor:
    query, key, value = tensors
    with calls.checking("core_attn"):
        check_heads(query, key, value)
        batch = query.shape[1] if qkv_format == "sbhd" else 1
        query, key, value = (formats.to_rows(cp.layout, x, qkv_format) for x in (query, key, value))
        heads = query.shape[1]
        if heads < cp.degree:
            raise ValueError(
                f"query has {heads} heads, expected at least {cp.degree}, one for each rank: "
                "attn_mod sees whole sequences of some heads; hcp.CoreAttention takes any number"
            )
    whole = _share(cp, query, key, value)
    if cp.degree == 0:  # a row of zeros, so that the module's parameters take part
        whole = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in whole]
    if qkv_format == "thd":
        params = whole_params(cp, packed_class)
        given["packed_seq_params"] = _of_one_row(params, whole[0]) if cp.degree == 0 else params
    count = batch if cp.degree else 1
    out = attn_mod(*(formats.from_rows(x, count, qkv_format) for x in whole), **given)
    if qkv_format == "sbhd":
        out = out.transpose(0, 1)
    rows, own = whole[0].shape[:2]
    wanted = rows * own * value.shape[2]
    if out.numel() != wanted:
        raise ValueError(
            f"attn_mod returned shape {tuple(out.shape)}, expected {wanted} elements: {rows} rows "
            f"of {own} heads of {value.shape[2]}; it must take its number of heads from its "
            "arguments"
        )
    out = out.reshape(rows, own, value.shape[2])
    out = out[:0] if cp.degree == 0 else cp.whole.head_to_sequence(out, heads)
    return formats.from_rows(out, batch, qkv_format).flatten(-2)


def _share(cp: MegatronStyleHandler, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return queries, keys and values of whole sequences and this rank's heads, by one exchange.

    Heads are exchanged in units of equal shape: one for each rank if the query heads are divisible
    by the ranks, else one for each query head. Key-value heads of several units are repeated.
    """
    heads, groups = query.shape[1], key.shape[1]
    ranks = max(cp.degree, 1)
    units = ranks if heads % ranks == 0 else heads
    per_group = heads // groups
    repeat = next(
        r for r in range(1, per_group + 1) if per_group % r == 0 and groups * r % units == 0
    )
    columns = [query, *(x.repeat_interleave(repeat, 1) for x in (key, value))]
    shapes = [(x.shape[1] // units, x.shape[2]) for x in columns]
    side_by_side = [
        x.reshape(x.shape[0], units, h * d) for x, (h, d) in zip(columns, shapes, strict=True)
    ]
    whole = cp.whole.sequence_to_head(torch.cat(side_by_side, 2))
    parts = torch.split(whole, [h * d for h, d in shapes], 2)
    own = whole.shape[1]
    # Columns of several dtypes travelled in the widest.
    return [
        part.reshape(len(part), own * h, d).to(column.dtype)
        for part, (h, d), column in zip(parts, shapes, columns, strict=True)
    ]


def _of_one_row(params: Any, like: Tensor) -> Any:
    bounds = torch.tensor([0, 1], dtype=torch.int32, device=like.device)
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        setattr(params, name, bounds)
    params.max_seqlen_q = params.max_seqlen_kv = 1
    return params
