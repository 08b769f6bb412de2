"""hcp's attention under a name in Transformers' registry of attention functions.

T rows of this rank, H query heads, G key-value heads, D and E head sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, AttentionMaskInterface

from hcp.attention.kernels import KernelChoice, kernel_for
from hcp.integrations.experts import capacities
from hcp.integrations.transformers import indexer, transformers_recurrent
from hcp.integrations.transformers.encoder import EncoderMask, attend
from hcp.integrations.transformers.masks import CHUNKED, FULL, LAYERS, SLIDING
from hcp.integrations.transformers.probe import (
    NoHandlerError,
    implementations,
    probe,
    was_probed,
)
from hcp.integrations.transformers.trained_positions import each_rope
from hcp.integrations.transformers.transformers_latent import Unexpanded
from hcp.integrations.unrotated import Unrotated, take_rotary
from hcp.step.handler import ContextParallelHandler

ATTENTION = "hcp"
"""The name to give `model.set_attn_implementation`."""

# What changes scores in a way that no kernel here computes, by the names that models pass it under.
REFUSED = ("position_bias", "indices", "block_indices", "cache")

LAYER_DROPS = ("layerdrop", "decoder_layerdrop")
"""Names that configurations give to the probability that a layer is left out in training."""

# Their frequencies depend on the longest sequence that happens to be on this rank.
VARYING_ROTARY = {"dynamic", "longrope"}

ATTENTION_DROPS = {"attention_dropout": "attention_dropout", "attn_dropout": "attn_pdrop"}
"""Names that layers give to the dropout of attention weights, and that of the option."""


def register_hcp_attention(
    model: nn.Module | None = None, *, fused_rope: bool = True, send_latents: bool = True
) -> None:
    """Make "hcp" an attention implementation of Transformers; with a model, set it there.

    `model`: any causal language model that calls its attention through Transformers'
    `AttentionInterface`. Afterwards `model.set_attn_implementation` switches that model to any
    other name, and back to "hcp". The model takes the handler of the micro-batch as
    `model(..., cp=cp)`: see `model_inputs`.

    `fused_rope`: hcp's attention rotates queries and keys of a model whose rotary embedding has a
    known form, in fewer passes. Where layers compute with what is rotated (latent attention), hcp's
    kernel rotates before. Other models, and all models with False, rotate by their own code.

    `send_latents`: the keys and values of latent attention (DeepSeek-V3) travel compressed, and are
    expanded where they are received. With a comm type that exchanges heads, in compiled layers, and
    where an adapter drops elements out, they travel expanded.

    Three to six forwards of a few tokens compare the model's own logits with those of packed
    documents. Raises ValueError for a model that is no causal language model, or whose layers mix
    rows outside of attention. If parameters are sharded, every rank calls it.
    """
    AttentionInterface.register(ATTENTION, hcp_attention)
    AttentionMaskInterface.register(ATTENTION, window_of)
    if model is not None:
        check_model(model)
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(model).__name__} has an encoder and a decoder, expected a decoder alone, "
                "or T5Gemma by hcp.integrations.transformers.register_for_seq2seq(model)"
            )
        transformers_recurrent.hand_states_on(model)
        indexer.hand_choices_on(model)
        probe(model, ATTENTION, fused_rope=fused_rope, latents=send_latents)


@contextlib.contextmanager
def own_attention(model: Any, attention: str = "sdpa") -> Iterator[Any]:
    """Give a model, which may be wrapped in DDP, one of Transformers' attentions inside a context,
    and its former one after it. The value is the model without DDP.

    `with own_attention(model) as whole: whole.generate(...)`: each rank then computes whole
    sequences.
    """
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    before = implementations(whole)
    whole.set_attn_implementation(attention)
    try:
        yield whole
    finally:
        whole.set_attn_implementation(before)


def check_model(model: nn.Module) -> None:
    """Raise ValueError unless every layer of a model is right under context parallelism."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"the model is a {name}, expected a PreTrainedModel of Transformers")
    known = transformers_recurrent.is_recurrent(config)
    if getattr(model, "_is_stateful", False) and not known:
        raise ValueError(
            f"{name} has layers with a state that scans the sequence, expected attention only, or "
            f"one of {sorted(transformers_recurrent.MODEL_TYPES)}: the state of others does not "
            "cross ranks"
        )
    if not (known or getattr(model, "_supports_attention_backend", False)):
        raise ValueError(
            f"{name} does not call its attention through AttentionInterface, expected a model that "
            "does: it has no place for another attention"
        )
    for part in (config, *_parts(config)):
        _check_config(part)


def check_softcap(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError for a model with soft-capped scores (Gemma 2) if PyTorch has no kernel for
    them in this dtype."""
    config: Any = model.config
    for part in (config, *_parts(config)):
        if softcap := getattr(part, "attn_logit_softcapping", None):
            kernel_for(device, dtype, KernelChoice(softcap=softcap))


def check_dropout(model: nn.Module) -> None:
    """Raise ValueError for a model that drops attention weights out in training, where its layers
    name how many: no forward finds it out before."""
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    of_layers = ((name, m) for name, m in model.named_modules() if vars(m).get("config") is text)
    for name, module in of_layers:
        for attribute, option in ATTENTION_DROPS.items():
            rate = getattr(module, attribute, 0.0)
            rate = getattr(rate, "p", rate)
            if isinstance(rate, float) and rate > 0:
                raise ValueError(
                    f"{type(model).__name__} has {name}.{attribute} {rate:g}, expected 0: no "
                    "kernel gives the same dropout under every layout. Make the model without it, "
                    f"such as by from_pretrained(..., {option}=0.0)"
                )


def _parts(config: Any) -> list[Any]:
    return [
        part for name in config.sub_configs if (part := getattr(config, name, None)) is not None
    ]


def _check_config(config: Any) -> None:
    name = type(config).__name__
    known = (
        LAYERS | transformers_recurrent.LAYERS
        if transformers_recurrent.is_recurrent(config)
        else LAYERS
    )
    known = known | {indexer.LAYER} if indexer.is_indexed(config) else known
    others = set(getattr(config, "layer_types", None) or ()) - known
    if others:
        raise ValueError(
            f"{name}.layer_types has {sorted(others)}, expected only {sorted(known)}: the others "
            "need rows of other ranks outside of attention, or a mask that hcp does not compute"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"{name}.output_router_logits is True, expected False: the model's own loss of its "
            "routers is of the rows of a rank, so it would depend on the plan. Give "
            "router_aux_loss_coef= to hcp's Trainer, to causal_lm_loss, or in TRL's options: hcp "
            "computes that of each sequence"
        )
    for attribute, value in capacities(config):
        raise ValueError(
            f"{name}.{attribute} is {value}, expected experts that take every token: which ones "
            "they drop depends on the rows of a rank, and so on the plan"
        )
    for attribute in LAYER_DROPS:
        if probability := getattr(config, attribute, 0.0):
            raise ValueError(
                f"{name}.{attribute} is {probability}, expected 0: a rank that skips a layer "
                "leaves the others waiting for its rows, or gives them those of another layer"
            )
    for parameters in each_rope(getattr(config, "rope_parameters", None)):
        if (rotary := parameters.get("rope_type")) in VARYING_ROTARY:
            raise ValueError(
                f"{name}.rope_parameters has rope_type {rotary!r}, expected one that does not "
                "depend on the rows of the batch, such as 'default', 'linear', 'llama3' or 'yarn'"
            )


# ---- what the registry calls ---------------------------------------------------------------------


class Window(NamedTuple):
    """Replaces a mask by the number of rows that a row sees back."""

    size: int | None
    """The number of rows, the row itself included; None: all of them."""
    chunk: int | None = None
    """Rows of a chunk, in which attention stays; None: there are no chunks."""
    overlaid: bool = False
    """Whether the model overlays a mask of its own, which the plan has to have."""

    @property
    def ndim(self) -> int:
        """That of a mask which is made already: Transformers hands it on then."""
        return 4

    def __getitem__(self, part: Any) -> Any:
        """A layer that cuts its mask for an indexer hands on the same."""
        return self if isinstance(part, tuple) else tuple.__getitem__(self, part)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model reads {name!r} of its attention mask, expected one that hands the mask on "
            "to attention: hcp has none"
        )


def window_of(
    *positional: Any,
    attention_mask: Tensor | Window | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **keywords: Any,
) -> Window:
    """Return the window, the part of a mask that the layout does not say. Raises for other masks.

    Some models give their window to the mask only, and not to the attention function."""
    if isinstance(attention_mask, Window):  # a model with parts that make masks, too
        return attention_mask
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected None: rows are "
            "packed and none is padding. model.generate passes a mask: call it inside of "
            "hcp.integrations.transformers.own_attention(model)"
        )
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        return Window(None, local_size, use_vmap)
    return Window(local_size, None, use_vmap)


def hcp_attention(
    module: nn.Module,
    query: Tensor | Unrotated,
    key: Tensor | Unrotated | Unexpanded,
    value: Tensor | Unexpanded,
    attention_mask: Window | EncoderMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cp: ContextParallelHandler | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (1, T, H, E) for query (1, H, T, D), key (1, G, T, D) and value (1, G, T, E), or for
    latent rows in the place of keys and values.

    A rank without rows has one row that stands in: see `model_inputs`.
    """
    if cp is None:
        raise NoHandlerError(
            f"{type(module).__name__} was called without cp=, expected the handler of the "
            "micro-batch: model(**model_inputs(cp, local)). model.generate has none: call it "
            "inside of hcp.integrations.transformers.own_attention(model)"
        )
    if not was_probed(module):
        raise ValueError(
            f"{type(module).__name__} is of a model that hcp has not checked, expected "
            "register_hcp_attention(model), which sets the attention and compares what it computes"
        )
    if isinstance(attention_mask, EncoderMask):
        rows: Any = query
        if dropout:
            raise ValueError(f"{type(module).__name__} has dropout {dropout}, expected 0")
        more = {"softmax_scale": scaling, "softcap": softcap or 0.0}
        out = attend(module, rows, key, value, attention_mask, cp, **more)  # type: ignore[arg-type]
        return _padded(out, rows.shape[2])
    if isinstance(key, Unexpanded) and not key.can_travel(cp):
        key, value = key.expanded()
    latent = key if isinstance(key, Unexpanded) else None
    query, rows, rotary = take_rotary(query, key.latent if isinstance(key, Unexpanded) else key, cp)
    _refuse(module, query, rows, attention_mask, cp, options)
    if not (_is_causal(module) if is_causal is None else is_causal):
        raise ValueError(
            f"{type(module).__name__} is not causal, expected a decoder: set is_causal to True"
        )
    query = _with_temperature(module, query, cp)
    size = sliding_window if attention_mask is None else attention_mask.size
    # The masks of a plan say what comes after a row.
    right = -1 if cp.plan.masks else 0
    keys = _keys(rows, value, cp.rows) if latent is None else latent.arguments(cp.rows)
    queries = query[0].transpose(0, 1)[: cp.rows].to(keys["key"].dtype)
    if isinstance(options.get("indices"), indexer.ChosenKeys):
        _refuse_with_indices(module, size, softcap, s_aux, dropout, rotary)
        indices = options["indices"].indices(cp)
        keys.pop("parameters", None)  # autograd follows the function that expands
        out, _, _ = cp.sparse.attention(queries, **keys, indices=indices, softmax_scale=scaling)
        return _padded(out, query.shape[2])
    out = cp.attention(
        queries,
        **keys,
        window_size=(-1 if size is None else size - 1, right),
        mask=_mask_of(module, attention_mask, size, cp),
        softmax_scale=scaling,
        sinks=s_aux,
        softcap=softcap or 0.0,
        dropout_p=dropout,
        rotary_pos_emb=rotary,
        # In a compiled model none: it would be compiled anew for each.
        layer=None if torch.compiler.is_dynamo_compiling() else getattr(module, "layer_idx", None),
    )
    return _padded(out, query.shape[2])


def _is_causal(module: nn.Module) -> bool:
    """Whether a layer's mask is causal, or that of the plan. PaliGemma's layers say that they are
    not, for the sake of prefixes, which are in the plan; the model's own text is causal."""
    of_prefixes = getattr(getattr(module, "config", None), "use_bidirectional_attention", False)
    return getattr(module, "is_causal", True) or bool(of_prefixes)


def _padded(out: Tensor, rows: int) -> tuple[Tensor, None]:
    """(1, rows, H, E) of (T, H, E): a row may stand in."""
    if out.shape[0] == rows:  # a pad of nothing is a copy
        return out.unsqueeze(0), None
    return F.pad(out, (0, 0, 0, 0, 0, rows - out.shape[0])).unsqueeze(0), None


def _refuse_with_indices(
    module: nn.Module,
    size: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    dropout: float,
    rotary: Any,
) -> None:
    asked = {"a sliding window": size, "soft-capping": softcap, "attention sinks": s_aux}
    asked |= {"dropout": dropout or None, "unrotated queries": rotary}
    if found := [name for name, value in asked.items() if value is not None]:
        raise ValueError(
            f"{type(module).__name__} asks for {found[0]} and for chosen keys, expected chosen "
            "keys alone: cp.sparse.attention computes nothing else"
        )


def _keys(key: Tensor, value: Any, count: int) -> dict[str, Any]:
    """The arguments of attention for the first rows of keys and values. Rotary embedding may widen
    queries and keys; values stay as they were."""
    return {
        "key": key[0].transpose(0, 1)[:count].to(value.dtype),
        "value": value[0].transpose(0, 1)[:count],
    }


def _with_temperature(module: nn.Module, query: Tensor, cp: ContextParallelHandler) -> Tensor:
    """Scale queries by their positions where the model has scaled them by their rows: Llama 4's
    layers without rotary embedding (https://arxiv.org/abs/2501.19399)."""
    options: Any = module
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    floor_scale, attn_scale = float(options.floor_scale), float(options.attn_scale)

    def scales(positions: Tensor) -> Tensor:
        return torch.log1p(((positions.float() + 1.0) / floor_scale).floor()) * attn_scale + 1.0

    positions = cp.at_least_one_row(cp.position_ids)
    wanted, given = scales(positions), scales(torch.arange(len(positions), device=cp.device))
    scaled: Tensor = query * (wanted.double() / given).unsqueeze(1)
    return scaled.to(query.dtype)


def _mask_of(
    module: nn.Module, given: Window | None, size: int | None, cp: ContextParallelHandler
) -> str | None:
    """Return the name of the plan's mask for a layer, if the plan has one for its kind."""
    kind = FULL if size is None else SLIDING
    if given is not None and given.chunk is not None:
        kind = CHUNKED
        if kind not in cp.plan.masks:
            remedy = (
                f"its masks are named {list(cp.plan.masks)}. masks_of(model, lengths) makes those "
                "of causal sequences: plan the texts of a tree alone, without the tree, or give "
                f"masks of your own, named {FULL!r} and {CHUNKED!r}"
                if cp.plan.masks
                else "hcp.plan(masks=masks_of(model, lengths))"
            )
            raise ValueError(
                f"{type(module).__name__} attends in chunks of {given.chunk}, expected a plan with "
                f"masks named {CHUNKED!r}: {remedy}"
            )
    if given is not None and given.overlaid and not cp.plan.masks:
        raise ValueError(
            "the model overlays a mask of its own, expected a causal one, or a plan that has it: "
            "hcp.plan(masks=)"
        )
    return kind if kind in cp.plan.masks else None


def _refuse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Window | None,
    cp: ContextParallelHandler,
    options: dict[str, Any],
) -> None:
    name = type(module).__name__
    for option in REFUSED:
        if not isinstance(options.get(option), indexer.ChosenKeys | None):
            raise ValueError(
                f"{name} asks for {option}={_shown(options[option])}, expected a model without: "
                "none of the attention kernels in use computes it"
            )
    if not isinstance(attention_mask, Window | None):
        raise ValueError(
            f"{name} was given a mask of its own, expected none: the layout says who sees whom"
        )
    rows = max(1, cp.rows)
    if query.shape[0] != 1 or query.shape[2] != rows or key.shape[2] != rows:
        raise ValueError(
            f"{name} was given {query.shape[0]} x {query.shape[2]} queries and {key.shape[2]} "
            f"keys, expected 1 x {rows} of each: the rows of this micro-batch on this rank, and no "
            "cache (model_inputs says use_cache=False; model.generate needs own_attention(model))"
        )


def _shown(option: Any) -> str:
    return f"a tensor {tuple(option.shape)}" if isinstance(option, torch.Tensor) else repr(option)
