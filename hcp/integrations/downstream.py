"""What trainers of other projects share that derive from Transformers' `Trainer`: axolotl,
LLaMA-Factory and ms-swift. Each prepares datasets and models, and trains with its own class.

T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hcp.integrations.columns import IGNORED, causal_lm_samples
from hcp.integrations.transformers import Trainer

READ = ("input_ids", "labels", "attention_mask", "position_ids")
"""Columns of a row that make its samples. Others are the collator's of these projects."""

MEDIA = ("images", "videos", "audios", "pixel_values", "pixel_values_videos", "input_features")


def planned_class(theirs: type, check: Callable[[Any], None], **options: Any) -> type[Trainer]:
    """Return a class of these: hcp's `Trainer` on `theirs`, another project's.

    hcp loads, plans, computes losses and evaluates; models, optimizers, schedules, logs and
    checkpoints are theirs. `check` refuses options of theirs that would have no effect. `options`:
    those of hcp's `Trainer`, with `cp`."""

    class Planned(Trainer, theirs):  # type: ignore[misc]
        def __init__(self, *positional: Any, **keywords: Any) -> None:
            keywords.pop("data_collator", None)  # samples are packed, not padded
            super().__init__(*positional, **{"to_sample": row_samples, **options, **keywords})
            check(self)

    Planned.__name__ = Planned.__qualname__ = f"ContextParallel{theirs.__name__}"
    return Planned


def row_samples(item: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
    """Make the samples of an item: a row, whose documents may be packed, or a list of rows.

    Documents without a label are left out, such as the padding of a pack, unless a row has no
    other. Raises ValueError for rows with images, videos or sounds, and for weighted tokens."""
    rows = [item] if isinstance(item, Mapping) else item
    return [sample for row in rows for sample in _samples_of(row)]


def _samples_of(row: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    if media := [name for name in MEDIA if row.get(name) is not None and len(row[name])]:
        raise ValueError(f"a row has {', '.join(media)}, expected text: hcp dispatches tokens only")
    _check_weights(row)
    made = causal_lm_samples({name: row[name] for name in READ if row.get(name) is not None})
    return [sample for sample in made if bool(sample["loss_mask"].any())] or made[:1]


def _check_weights(row: Mapping[str, Any]) -> None:
    if row.get("loss_scale") is None:
        return
    weights, labels = (torch.as_tensor(row[name]) for name in ("loss_scale", "labels"))
    found = weights.flatten()[labels.flatten() != IGNORED]
    if bool((found != 1).any()):
        raise ValueError(
            f"loss_scale has {found[found != 1][0].item():g}, expected 1: hcp computes the plain "
            "mean over tokens with a label"
        )


def refuse(where: str, value: object, expected: object, reason: str) -> None:
    """Raise ValueError unless an option has the value that it must have. None is as good."""
    if value is not None and value != expected:
        raise ValueError(f"{where} is {value!r}, expected {expected!r}: {reason}")
