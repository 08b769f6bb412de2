"""Images of vision-language models: encoded once, by any rank, and put where their tokens are.

T rows of this rank, N image tokens whose images this rank has, M image tokens among its rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hcp.integrations.transformers.attention import ATTENTION, register_hcp_attention
from hcp.integrations.transformers.model import model_inputs
from hcp.step.dispatch import LocalBatch
from hcp.step.handler import ContextParallelHandler

Encode = Callable[[Tensor], Tensor]
"""Returns the embeddings (N, hidden) of the tokens of some images, given their pixel values."""


def register_for_images(model: Any) -> None:
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
    if hasattr(model.base_model, "get_rope_index"):
        raise ValueError(
            f"{name} gives image tokens positions of several axes (get_rope_index), expected a "
            "model whose positions are places in the sequence"
        )
    before = vision._attn_implementation
    register_hcp_attention(model)
    model.set_attn_implementation({"vision_config": "sdpa" if before == ATTENTION else before})


def image_inputs(
    model: Any,
    cp: ContextParallelHandler,
    local: LocalBatch,
    *,
    payload: str = "pixel_values",
    encode: Encode | None = None,
) -> dict[str, Any]:
    """Return the arguments of a vision-language model: `model(**image_inputs(model, cp, local))`.

    `payload`: the field with the pixel values, an `hcp.Payload` whose `tokens` are the image
    tokens. By default they are images of one shape for the model's `get_image_features`; a rank
    without any encodes one of zeros and drops it, since data-parallel trainers wait for every rank.
    `encode`: what to call instead, also with 0 rows.
    """
    if "token_type_ids" in inspect.signature(model.forward).parameters and not cp.plan.masks:
        raise ValueError(
            f"{type(model).__name__} takes token_type_ids: tokens of an image see each other both "
            "ways, expected a plan with masks that say so: "
            "hcp.plan(masks=[hcp.Mask.bidirectional_spans(length, spans), ...])"
        )
    inputs = model_inputs(cp, local)
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))[0]
    pixels = local[payload]
    encoded = _features(model, pixels, payload) if encode is None else encode(pixels)
    own = cp.payloads[payload].to_tokens(encoded)
    put = embeddings.index_copy(0, cp.payloads[payload].token_rows, own.to(embeddings.dtype))
    return {**inputs, "inputs_embeds": put.unsqueeze(0)}


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
