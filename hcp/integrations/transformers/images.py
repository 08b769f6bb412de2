"""Images of vision-language models: encoded once, by any rank, and put where their tokens are.

T rows of this rank, N image tokens whose images this rank has, M image tokens among its rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from hcp.integrations.columns import AXES
from hcp.integrations.transformers.attention import ATTENTION, Window, register_hcp_attention
from hcp.integrations.transformers.image_samples import (
    OF_AXES,
    PIXELS,
    SIZES,
    has_axes,
)
from hcp.integrations.transformers.model import model_inputs
from hcp.step.dispatch import LocalBatch
from hcp.step.handler import ContextParallelHandler

Encode = Callable[[Tensor], Tensor]
"""Returns the embeddings (N, hidden) of the tokens of some images, given their pixel values."""


@dataclass
class _Encoded(ModelOutput):  # type: ignore[misc]
    """Images as a model takes them encoded: embeddings of tokens, and those that layers add."""

    pooler_output: list[Tensor] | None = None
    deepstack_features: list[tuple[Tensor, ...]] | None = None


def register_for_images(model: Any, *, fused_rope: bool = True) -> None:
    """Give hcp's attention to the language model of a vision-language model. Its vision encoder
    keeps its own: an image is encoded whole.

    See `register_hcp_attention`, which compares the model with hcp's attention on text. Raises
    ValueError for a model without images, or whose image tokens are no rows like those of text.
    """
    name = type(model).__name__
    vision = getattr(getattr(model, "config", None), "vision_config", None)
    if vision is None or not hasattr(model, "get_image_features"):
        raise ValueError(
            f"{name} has no vision_config or no get_image_features, expected a model whose images "
            "take the place of tokens: for text use register_hcp_attention(model)"
        )
    if hasattr(model.base_model, "get_rope_index") and not has_axes(model):
        raise ValueError(
            f"{name} gives image tokens positions of several axes (get_rope_index), expected a "
            f"model whose positions are places in the sequence, or one of {sorted(OF_AXES)}"
        )
    if model.config.model_type == "paligemma" and getattr(
        model.config.text_config, "sliding_window", None
    ):
        raise ValueError(
            f"{name} has layers with a sliding window, which its prefixes reach over, expected "
            "full attention in all of them (PaliGemma 1): a layer's window limits a plan's masks"
        )
    if _adds_in_layers(model) and not _takes_encoded(model):
        raise ValueError(
            f"{name} adds images in its layers, expected a Transformers whose model takes "
            "mm_encoder_outputs, such as 5.23: there they can be given encoded"
        )
    before = vision._attn_implementation
    hook = model.base_model.language_model.register_forward_pre_hook(_mask_once, with_kwargs=True)
    try:
        register_hcp_attention(model, fused_rope=fused_rope)
    except BaseException:
        hook.remove()
        raise
    model.set_attn_implementation({"vision_config": "sdpa" if before == ATTENTION else before})


def _mask_once(
    model: torch.nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Drop hcp's mask of a model whose language model makes it again (PaliGemma)."""
    if not isinstance(keywords.get("attention_mask"), Window):
        return None
    return positional, keywords | {"attention_mask": None}


def _adds_in_layers(model: Any) -> bool:
    """Whether layers of the language model add embeddings of images to their rows (Qwen3-VL)."""
    return hasattr(model.config.vision_config, "deepstack_visual_indexes")


def _takes_encoded(model: Any) -> bool:
    return "mm_encoder_outputs" in inspect.signature(model.forward).parameters


def image_inputs(
    model: Any,
    cp: ContextParallelHandler,
    local: LocalBatch,
    *,
    payload: str = PIXELS,
    encode: Encode | None = None,
) -> dict[str, Any]:
    """Return the arguments of a vision-language model: `model(**image_inputs(model, cp, local))`.

    `payload`: the field with the pixel values, an `hcp.Payload` whose `tokens` are the image
    tokens. By default they are images of one shape for the model's `get_image_features`, or what
    `image_sample` makes; a rank without any encodes one of zeros and drops it, since data-parallel
    trainers wait for every rank. `encode`: what to call instead, also with 0 rows.
    """
    if "token_type_ids" in inspect.signature(model.forward).parameters and not cp.plan.masks:
        raise ValueError(
            f"{type(model).__name__} takes token_type_ids: tokens of an image see each other both "
            "ways, expected a plan with masks that say so: "
            "hcp.plan(masks=[hcp.Mask.bidirectional_spans(length, spans), ...])"
        )
    if has_axes(model) and AXES not in local:
        raise ValueError(
            f"the samples have {sorted(local)}, expected {AXES!r} too: "
            f"{type(model).__name__} gives image tokens positions of several axes; make samples "
            "by image_sample(model, item)"
        )
    if encode is not None:
        found = [encode(local[payload])]
    elif has_axes(model):
        found = _features_of_patches(model, local[payload], local[SIZES])
    else:
        found = [_features(model, local[payload], payload)]
    taken = cp.payloads[payload]
    # What layers add travels beside what takes the place of the tokens.
    own = torch.split(taken.to_tokens(torch.cat(found, -1)), [x.shape[-1] for x in found], -1)
    inputs = model_inputs(cp, local)
    if len(found) > 1:
        layers = _Encoded(list(own[:1]), [(x,) for x in own[1:]])
        return {**inputs, "mm_encoder_outputs": {"image": layers}}
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))[0]
    put = embeddings.index_copy(0, taken.token_rows, own[0].to(embeddings.dtype))
    return {**inputs, "inputs_embeds": put.unsqueeze(0)}


def _features_of_patches(model: Any, pixels: Tensor, sizes: Tensor) -> list[Tensor]:
    """Embeddings of the tokens of images, and those that layers add, (N, hidden) each, of patches
    and sizes (images, 3)."""
    given, grid = pixels, sizes
    if not len(pixels):
        side = model.config.vision_config.spatial_merge_size
        given, grid = pixels.new_zeros(side * side, pixels.shape[1]), sizes.new_ones(1, 3) * side
        grid[:, 0] = 1
    found = model.get_image_features(given, grid, return_dict=True)
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return [torch.cat(list(x)) if len(pixels) else torch.cat(list(x))[:0] for x in parts]


def _features(model: Any, pixels: Tensor, payload: str) -> Tensor:
    if pixels.dim() < 4:
        raise ValueError(
            f"{payload!r} has rows of {tuple(pixels.shape[1:])}, expected images of one shape: "
            "(channels, height, width); give encode= for others"
        )
    given = pixels if len(pixels) else pixels.new_zeros(1, *pixels.shape[1:])
    found = model.get_image_features(given, return_dict=True).pooler_output
    every = found.flatten(0, -2) if isinstance(found, Tensor) else torch.cat(list(found))
    return every if len(pixels) else every[:0]
