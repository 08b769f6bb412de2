"""Samples of texts with images, and how their pixel values are split.

A processor of Transformers puts a token for each part of an image into the text. Its pixel values
are images of one shape (LLaVA), or patches of images of any size beside the sizes, and tokens then
have positions of three axes (Qwen2-VL).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hcp.integrations.columns import AXES, causal_lm_samples
from hcp.step.fields import Payload

PIXELS, SIZES, MARKED = "pixel_values", "image_grid_thw", "is_image"

OF_AXES = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
"""Types of models whose image tokens have positions of several axes, which were tested."""

_TYPES = ("mm_token_type_ids", "token_type_ids")


def has_axes(model: Any) -> bool:
    """Whether image tokens of a model have positions of several axes, and its images sizes."""
    return model.config.model_type in OF_AXES


def image_fields(model: Any) -> dict[str, str | Payload]:
    """Return the rules of a vision-language model's samples, for `hcp.dispatch(fields=)`."""
    if not has_axes(model):
        return {PIXELS: Payload("even", tokens=MARKED)}
    return {
        PIXELS: Payload("even", units=_patches, tokens=MARKED),
        SIZES: Payload(per_unit_of=PIXELS),
    }


def _patches(sample: Mapping[str, Tensor]) -> Tensor:
    """The patches of each image."""
    return sample[SIZES].prod(-1)


def image_sample(model: Any, item: Mapping[str, Any]) -> dict[str, Tensor]:
    """Make a sample of what a processor gives for one text and its images.

    `item`: `input_ids` (tokens,), with the tokens of images; `pixel_values`, and `image_grid_thw`
    (images, 3) where the model takes sizes; none of them in a text without images. Other entries
    are those of `causal_lm_sample`; `position_ids` (3, tokens) or (4, tokens) are taken as they
    are, in place of the model's. Raises ValueError for videos, and unless the tokens of images are
    as many as the images take.
    """
    samples = image_samples(model, item)
    if len(samples) > 1:
        raise ValueError(
            f"a sample has {len(samples)} documents, expected one: image_samples takes packed rows "
            "apart"
        )
    return samples[0]


def image_samples(model: Any, item: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Make the samples of an item, each as `image_sample` does: one of each document of a packed
    row, with its own images. `causal_lm_samples` says what tells documents apart."""
    images = {PIXELS, SIZES, *_TYPES}
    samples = causal_lm_samples({name: item[name] for name in item if name not in images})
    for sample in samples:
        sample[MARKED] = sample["input_ids"] == _image_token(model)
    pixels, sizes = item.get(PIXELS), item.get(SIZES)
    rows = _no_pixels(model) if pixels is None else torch.as_tensor(pixels)
    if not has_axes(model):
        for sample, (start, end) in zip(samples, _shares(samples, len(rows)), strict=True):
            sample[PIXELS] = rows[start:end]
        return samples
    grid = torch.as_tensor([] if sizes is None else sizes).long().view(-1, 3)
    _put_patches(model, samples, rows, grid)
    for sample in samples:
        if AXES not in sample:
            sample[AXES] = _positions(model, sample)
    return samples


def _shares(samples: Sequence[Mapping[str, Tensor]], images: int) -> list[tuple[int, int]]:
    """The first and the last of each sample's images, which all take as many tokens. Of one sample,
    all of them: dispatch counts their tokens."""
    marked = [int(sample[MARKED].sum()) for sample in samples]
    if len(samples) == 1:
        return [(0, images)]
    each = sum(marked) // images if images else 1
    if any(count % max(each, 1) for count in marked) or sum(marked) != images * each:
        raise ValueError(
            f"the documents of a row have {marked} tokens of images, and the row {images} images, "
            "expected as many tokens for each image"
        )
    ends = list(itertools.accumulate((count // max(each, 1) for count in marked), initial=0))
    return list(itertools.pairwise(ends))


def _put_patches(
    model: Any, samples: Sequence[dict[str, Tensor]], pixels: Tensor, sizes: Tensor
) -> None:
    """Give each sample the images that its tokens take, in order. ValueError where tokens and
    images differ."""
    patches = sizes.prod(-1)
    tokens = patches // model.config.vision_config.spatial_merge_size**2
    ends = [0, *tokens.cumsum(0).tolist()]
    rows = [0, *patches.cumsum(0).tolist()]
    first = taken = 0
    for i, sample in enumerate(samples):
        taken += int(sample[MARKED].sum())
        last = len(sizes) if i == len(samples) - 1 else first
        while last < len(sizes) and ends[last] < taken:
            last += 1
        end = len(pixels) if last == len(sizes) else rows[last]
        sample[SIZES], sample[PIXELS] = sizes[first:last], pixels[rows[first] : end]
        _check_count(model, sample)
        first = last


def _image_token(model: Any) -> int:
    names = ("image_token_id", "image_token_index")
    found = [getattr(model.config, name, None) for name in names]
    return next(int(token) for token in found if token is not None)


def _no_pixels(model: Any) -> Tensor:
    """Pixel values of no images."""
    vision = model.config.vision_config
    if has_axes(model):
        return torch.zeros(
            0, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        )
    size = vision.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.zeros(0, getattr(vision, "num_channels", 3), height, width)


def _check_count(model: Any, sample: Mapping[str, Tensor]) -> None:
    patches, marked = int(_patches(sample).sum()), int(sample[MARKED].sum())
    taken = marked * model.config.vision_config.spatial_merge_size**2
    if not len(sample[PIXELS]) == patches == taken:
        raise ValueError(
            f"a sample has {len(sample[PIXELS])} patches, {patches} by its {SIZES}, and "
            f"{marked} tokens of images, which take {taken}, expected the same number: give what "
            "the model's processor makes"
        )


def _positions(model: Any, sample: Mapping[str, Tensor]) -> Tensor:
    """The positions of each token, (tokens, 3)."""
    tokens, marked = sample["input_ids"][None], sample[MARKED][None].int()
    sizes = sample[SIZES] if len(sample[SIZES]) else None
    found, _ = model.base_model.get_rope_index(tokens, marked, image_grid_thw=sizes)
    positions: Tensor = found[:, 0].T.contiguous()
    return positions
