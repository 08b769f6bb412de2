"""A training script on Megatron-LM's own `pretrain`, as short as one can be.

It stands for `pretrain_gpt.py`, which no wheel holds: the same calls, and samples of which a mask
leaves out a tail of its own length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens of four kinds. The loss of a sample ends after a random number of them."""

    def __init__(self, split: Split) -> None:
        self.split, self.length = split, get_args().seq_length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(64 * self.split.value + int(index))
        rows = torch.randint(4, (self.length + 1,), generator=generator)
        end = int(torch.randint(1, self.length + 1, (1,), generator=generator))
        return {
            "tokens": rows[:-1],
            "labels": rows[1:],
            "loss_mask": (torch.arange(self.length) < end).float(),
            "position_ids": torch.arange(self.length),
        }


def datasets(sizes: Any, vp_stage: int | None = None) -> list[Any]:
    train, *others = (Samples(split) for split in Split)
    if get_args().multiple_validation_sets:
        return [train, others, None]
    return [train, *others]


def loss_func(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, tokens = (losses.float() * mask).sum(), mask.sum().int()
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    given = {name: batch[name] for name in ("labels", "loss_mask")}
    losses = model(batch["tokens"], batch["position_ids"], None, **given)
    return losses, functools.partial(loss_func, batch["loss_mask"])


def main() -> None:
    datasets.is_distributed = True  # type: ignore[attr-defined]
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
