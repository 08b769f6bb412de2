"""Compare a model's own results with its results under hcp, before training.

A list of models' names would be out of date with each release of Transformers.

n tokens of the document that is compared.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from hcp.integrations.transformers.masks import masks_of
from hcp.integrations.transformers.model import model_inputs
from hcp.integrations.transformers.transformers_latent import expand_before, send_latents
from hcp.integrations.transformers.transformers_rotary import Rotator, let_model_rotate, let_rotate
from hcp.planning.plan import plan
from hcp.step.dispatch import dispatch
from hcp.tools.loopback import loopback

_log = logging.getLogger("hcp")

_TOKENS, _OTHERS = 4, 7
"""Tokens of the compared document, and of two others that are packed before and after it."""

# Relative to the logits. Kernels round differently, and in 16 bits an expert may change with it.
_ROUNDING, _ROUNDING_OF_16_BITS = 1e-2, 0.2
_ROUNDING_OF_LOSSES = 1e-4


_CHECKED = "_hcp_checked"
"""An attribute of a model's modules, copied and pickled with them."""


class NoHandlerError(ValueError):
    """An attention layer was called without `cp=`."""


class Positions:
    """A pre-hook of a model whose positions start at `first`: it adds `first` to hcp's positions.

    Such models (RoBERTa) count the tokens that are not padding. A padding token would shift the
    others, so it is refused.
    """

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(
        self, model: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        cp, tokens = keywords.get("cp"), keywords.get("input_ids")
        positions = keywords.get("position_ids")
        if cp is None or positions is None:
            return None
        padding = self.first - 1
        if tokens is not None and bool((tokens[0, : cp.rows] == padding).any()):
            raise ValueError(
                f"input_ids has the token {padding} in a document, expected none: it is "
                f"{type(model).__name__}'s padding, which it leaves out when it counts positions"
            )
        return positional, keywords | {"position_ids": positions + self.first}


class KeptAttention:
    """A pre-hook of a model with hcp's attention: a call with `cp=` computes by no other one.

    Transformers' own ignore `cp=`, so that each rank would attend to its own rows alone.
    """

    def __init__(self, attention: str) -> None:
        self.attention = attention

    def __call__(
        self, model: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        if keywords.get("cp") is None:
            return
        found = _text_config(model)._attn_implementation
        if found != self.attention:
            raise ValueError(
                f"{type(model).__name__} was called with cp= while its attention is {found!r}, "
                f"expected {self.attention!r}: another attention sees only the rows of this rank. "
                f"Call model.set_attn_implementation({self.attention!r}), or leave cp= out"
            )


def keep_attention(model: nn.Module, attention: str) -> None:
    """Refuse calls with `cp=` that would compute by another attention, from now on."""
    hooks = model._forward_pre_hooks.values()
    if not any(isinstance(hook, KeptAttention) for hook in hooks):
        model.register_forward_pre_hook(KeptAttention(attention), with_kwargs=True)


def probe(model: nn.Module, attention: str, *, fused_rope: bool, latents: bool) -> None:
    """Set the attention implementation `attention` in a model, if it passes a test.

    Raises ValueError unless the model is a causal language model whose logits of packed documents
    equal its own of each document alone. A model that is refused keeps its attention. The test
    costs three forwards of up to 15 tokens. `fused_rope` costs one or two more, and lets attention,
    or else a kernel before it, rotate the queries and keys of a model that computes the same then;
    likewise `latents`, which costs one and lets attention expand their latent rows. If parameters
    are sharded, every rank calls it.
    """
    before, shift = implementations(model), None
    try:
        with evaluating(model):
            model.set_attn_implementation("eager")  # type: ignore[operator]
            document, others = documents_to_compare(model)
            own = _own_logits(model, document)
            if (first := _first_position(model, document, own)) > 0:
                shift = model.register_forward_pre_hook(Positions(first), with_kwargs=True)
            mark(model, True)
            let_model_rotate(model)
            expand_before(model)
            model.set_attn_implementation(_of_text(model, attention, before))  # type: ignore[operator]
            packed = _compare(model, document, others, own)
            if fused_rope:
                _fuse_rotary(model, attention, document, others, packed)
            if latents:
                _send_latents(model, attention, document, others, packed)
        keep_attention(model, attention)
    except BaseException:
        mark(model, False)
        let_model_rotate(model)
        expand_before(model)
        if shift is not None:
            shift.remove()
        model.set_attn_implementation(before)  # type: ignore[operator]
        raise


def _of_text(model: nn.Module, attention: str, before: dict[str, str]) -> dict[str, str]:
    """Return the implementations of a model's parts with `attention` in those that compute text.
    Towers of images or audio keep their own."""
    config, of_text = model.config, _text_config(model)
    text = {"", *(name for name in before if name and getattr(config, name) is of_text)}
    return {name: attention if name in text else own for name, own in before.items()}


def _text_config(model: nn.Module) -> Any:
    """The configuration of the part that computes text: of two such parts, the decoder."""
    config: Any = model.config
    return config.get_text_config()


def mark(model: nn.Module, checked: bool) -> None:
    for module in model.modules():
        setattr(module, _CHECKED, checked)


def was_probed(module: nn.Module) -> bool:
    """Whether the model of an attention layer has passed the probe."""
    return getattr(module, _CHECKED, False)


def implementations(model: nn.Module) -> dict[str, str]:
    """Return the attention implementations of a model's parts, as set_attn_implementation takes
    them."""
    config: Any = model.config
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    every = {"": config, **{name: part for name, part in parts.items() if part is not None}}
    return {name: part._attn_implementation or "eager" for name, part in every.items()}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and gradients. On exit, restore the training mode of every module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def documents_to_compare(model: nn.Module) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return a document to compare and two others, of arbitrary tokens."""
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    if weight.is_meta:
        raise ValueError(
            f"the weights of {type(model).__name__} are on the device meta, expected their values: "
            "load them first, then call register_hcp_attention"
        )
    special = set(_special(model.config.to_dict()))  # type: ignore[operator, union-attr]
    words = int(weight.shape[0])
    ordinary = (word for word in range(words // 4, words) if word not in special)
    chosen = list(itertools.islice(ordinary, _TOKENS + _OTHERS)) or [0]
    cycled = itertools.islice(itertools.cycle(chosen), _TOKENS + _OTHERS)
    # FSDP2 computes on the mesh's device, also where its shards lie on the host.
    device = weight.device_mesh.device_type if isinstance(weight, DTensor) else weight.device
    tokens = torch.tensor(list(cycled), device=device)
    return tokens[:_TOKENS], (tokens[_TOKENS : _TOKENS + 3], tokens[_TOKENS + 3 :])


def _special(options: Mapping[str, Any]) -> Iterator[int]:
    """Yield the ids of special tokens that a configuration names, also in nested ones."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _special(value)
        elif "token" in str(name):
            ids = value if isinstance(value, Sequence) else [value]
            yield from (i for i in ids if type(i) is int)


# ---- the model by itself -------------------------------------------------------------------------


def _own_logits(model: nn.Module, document: Tensor) -> Tensor:
    """Return the model's own logits, (n, vocabulary)."""
    logits = getattr(_own(model, document), "logits", None)
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else None
    if shape is None or shape[:2] != (1, len(document)) or shape[2] <= int(document.max()):
        found = "no logits" if shape is None else f"logits of shape {shape}"
        raise ValueError(
            f"{type(model).__name__} gives {found} for {len(document)} tokens, expected "
            f"(1, {len(document)}, vocabulary): hcp trains causal language models (...ForCausalLM) "
            "that add no tokens or prompts of their own. For ...ForSequenceClassification take "
            "SequenceClassificationTrainer, or TRL's RewardTrainer, of hcp"
        )
    assert isinstance(logits, Tensor)
    return logits[0]


def _own(model: nn.Module, document: Tensor, **more: Tensor) -> Any:
    try:
        return model(input_ids=document[None], use_cache=False, **more)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not compute {len(document)} tokens with "
            f"{', '.join(('input_ids', *more))}, expected a causal language model of text: "
            f"{type(error).__name__}: {error}"
        ) from error


def _first_position(model: nn.Module, document: Tensor, own: Tensor) -> int:
    """Find the number that hcp has to add to its positions to give the model's own."""
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    padding = getattr(text, "pad_token_id", None)
    fed = any(
        isinstance(hook, Positions)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )
    counted = torch.arange(len(document), device=document.device)[None]
    for first in (0, *([] if padding is None else [padding + 1])):
        given = _own(model, document, position_ids=counted + first, labels=document[None])
        if first == 0:
            _check_loss(model, given, document)
        if difference_of(given.logits[0], own) <= tolerance(model, own):
            return 0 if fed else first
    raise ValueError(
        f"{type(model).__name__} makes other positions than those it is given, expected 0, 1, 2, "
        "... or the same from its padding's index on: hcp cannot feed them"
    )


def _check_loss(model: nn.Module, output: Any, document: Tensor) -> None:
    """Refuse a model whose loss is not the mean cross-entropy of the next tokens."""
    loss = getattr(output, "loss", None)
    expected = F.cross_entropy(output.logits[0, :-1].float(), document[1:])
    if not isinstance(loss, Tensor) or loss.dim():
        raise ValueError(f"{type(model).__name__} gives no loss for labels, expected it to")
    apart = abs(float(loss) - float(expected))
    rounding = max(_ROUNDING_OF_LOSSES, torch.finfo(loss.dtype).eps)  # 16 bits under FSDP2
    if apart > rounding * max(1.0, abs(float(expected))):
        raise ValueError(
            f"{type(model).__name__}'s own loss of {len(document)} tokens is {float(loss):.5f}, "
            f"expected {float(expected):.5f}, the cross entropy of the next tokens: hcp trains on "
            "that alone, without labels in place (masked or token classification), a router's "
            "loss or a z loss (set their coefficients to 0)"
        )


# ---- the model by way of hcp ---------------------------------------------------------------------


def _compare(
    model: nn.Module, document: Tensor, others: tuple[Tensor, Tensor], own: Tensor
) -> Tensor:
    """Compare the logits of a document that is packed twice, after others, with each other and with
    the model's own. Returns them. Raises ValueError if they differ."""
    name, tokens = type(model).__name__, len(document)
    first, second = _packed_logits(model, document, others)
    limit = tolerance(model, own)
    if (apart := difference_of(first, second)) > limit / 10:
        raise ValueError(
            f"{name}'s logits of a document change by {apart:.1%} with the document before it in "
            "the pack, expected none: some layer other than attention mixes rows"
        )
    if (apart := difference_of(first, own)) > limit:
        raise ValueError(
            f"{name}'s logits of {tokens} packed tokens are {apart:.1%} off its own, expected at "
            f"most {limit:.0%}: it computes something that hcp does not know"
        )
    return first


def _fuse_rotary(
    model: nn.Module,
    attention: str,
    document: Tensor,
    others: tuple[Tensor, Tensor],
    expected: Tensor,
) -> None:
    """Let attention rotate queries and keys, or hcp's kernel before it, where the logits of a pack
    are `expected` then too."""
    name = type(model).__name__
    rotators: tuple[Rotator, ...] = ("attention", "kernel")
    for rotator in rotators:
        if not let_rotate(model, attention, rotator):
            _log.info("hcp: %s has no layers that could leave rotary embedding to hcp", name)
            return
        wrong = _what_is_wrong(model, document, others, expected)
        if wrong is None:
            _log.info("hcp: %s leaves rotary embedding to hcp's %s", name, rotator)
            return
        let_model_rotate(model)
    _log.info("hcp: %s rotates queries and keys itself: %s", name, wrong)


def _send_latents(
    model: nn.Module,
    attention: str,
    document: Tensor,
    others: tuple[Tensor, Tensor],
    expected: Tensor,
) -> None:
    """Let attention expand latent rows, where the logits of a pack are `expected` then too."""
    name = type(model).__name__
    if not send_latents(model, attention):
        return
    if (wrong := _what_is_wrong(model, document, others, expected)) is not None:
        expand_before(model)
        _log.info("hcp: %s expands keys and values before they travel: %s", name, wrong)
        return
    _log.info("hcp: %s sends latent rows in place of keys and values", name)


def _what_is_wrong(
    model: nn.Module, document: Tensor, others: tuple[Tensor, Tensor], expected: Tensor
) -> ValueError | str | None:
    """Return why a model does not compute the `expected` logits of a pack, or None if it does."""
    try:
        found, _ = _packed_logits(model, document, others)
    except ValueError as error:
        return error
    apart = difference_of(found, expected)
    return f"logits differ by {apart:.1e}" if apart > tolerance(model, expected) else None


def _packed_logits(
    model: nn.Module, document: Tensor, others: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    samples = [others[0], document, others[1], document]
    lengths = [len(sample) for sample in samples]
    masks = masks_of(model, lengths)
    made = plan(lengths, ranks=1, max_tokens_per_rank=sum(lengths), masks=masks)
    fields = [
        {"input_ids": sample, "copy": torch.full_like(sample, i)}
        for i, sample in enumerate(samples)
    ]
    device = document.device
    (((cp, local),),) = loopback(
        1, lambda groups: list(dispatch(made, fields, [0] * len(fields), groups)), device=device
    )
    name = type(model).__name__
    try:
        logits = model(**model_inputs(cp, local)).logits[0]
    except NoHandlerError:
        raise ValueError(
            f"{name} does not hand its keyword arguments on to its attention, expected that cp= "
            "arrives there: its layers have no place for the handler of a micro-batch"
        ) from None
    except Exception as error:
        raise ValueError(
            f"{name} does not compute packed documents with hcp's attention: "
            f"{type(error).__name__}: {error}"
        ) from error
    return logits[local.copy == 1], logits[local.copy == 3]


# ---- how far apart -------------------------------------------------------------------------------


def difference_of(found: Tensor, expected: Tensor) -> float:
    """Return the relative norm of the difference; 0, with a warning, if values are not finite."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.double(), expected.double()
    if not bool(found.isfinite().all() and expected.isfinite().all()):
        _log.warning("hcp: the model's logits are not finite, so hcp could not check them")
        return 0.0
    size = float(expected.norm())
    return float((found - expected).norm()) / size if size else float(found.norm())


def tolerance(model: nn.Module, logits: Tensor) -> float:
    wide = {torch.float32, torch.float64}
    narrow = torch.is_autocast_enabled(logits.device.type) or not all(
        parameter.dtype in wide for parameter in model.parameters()
    )
    return _ROUNDING_OF_16_BITS if narrow else _ROUNDING
