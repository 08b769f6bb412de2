"""The forward step for Megatron's schedules, and a loss that does not depend on the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from hcp.integrations.megatron.megatron_checks import check_experts
from hcp.integrations.megatron.mtp import mask_of
from hcp.step.loss import masked_sum

Losses = Callable[[Tensor, Tensor], Tensor]
"""(logits (1, T, words of this tensor-parallel rank), labels (1, T)) to losses (1, T)."""


def forward_step(
    data_iterator: Iterator[Mapping[str, Any]],
    model: Any,
    return_schedule_plan: bool = False,
    *,
    losses: Losses | None = None,
) -> tuple[Tensor, partial[Any]]:
    """Compute a micro-batch: the function for `forward_step_func` of Megatron's schedules.

    Returns the model's output and a loss function. `data_iterator`: from
    `MicroBatches.data_iterator`. The loss function returns (sum, tokens, {"lm loss": [sum,
    tokens]}). Megatron divides by the tokens of the whole batch once, in `finalize_model_grads`:
    set `calculate_per_token_loss`. `losses`: a function of your own for the losses, given by
    `functools.partial(forward_step, losses=...)` (default: the model's cross-entropy in float32).
    """
    if return_schedule_plan:
        raise ValueError(
            "return_schedule_plan is True, expected False: hcp does not split a micro-batch to "
            "overlap its experts' exchange (overlap_moe_expert_parallel_comm)"
        )
    config = get_attr_wrapped_model(model, "config")
    check_config(config, model)
    if losses is not None and _of(config, "mtp_num_layers"):
        raise ValueError(
            "losses is given and mtp_num_layers is not 0, expected one of them: the losses of "
            "prediction layers are computed inside the model"
        )
    batch = next(data_iterator)
    if _of(config, "mtp_num_layers") and batch["packed_seq_params"].cp_handler.plan.masks:
        raise ValueError(
            f"config.mtp_num_layers is {config.mtp_num_layers} and samples have masks, expected "
            "one of them: several tokens may follow a row of a tree. Give prediction layers the "
            "texts alone, or train without them"
        )
    _check_axes(batch["position_ids"], config)
    masks = {"loss_mask": _mask_of(batch, config, model)} if _of(config, "mtp_num_layers") else {}
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"] if losses is None else None,
        packed_seq_params=batch["packed_seq_params"],
        **masks,
    )
    if losses is not None and get_attr_wrapped_model(model, "post_process"):
        output = losses(output, batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def _check_axes(position_ids: Tensor, config: Any) -> None:
    """Refuse positions of three axes for a model that would not turn rows by them."""
    if position_ids.dim() == 3 and getattr(config, "mrope_section", None) is None:
        raise ValueError(
            f"position_ids of the micro-batch has shape {tuple(position_ids.shape)} and "
            "config.mrope_section is None, expected samples with position_ids (length,): only a "
            "model with position_embedding_type='mrope' has positions of three axes"
        )


def _mask_of(batch: Mapping[str, Any], config: Any, model: Any) -> Tensor | None:
    """Return the loss mask for a model with prediction layers. Only the chunk that computes losses
    counts them, and only in training: every rank of the domain does in the same micro-batch."""
    if get_attr_wrapped_model(model, "post_process") and torch.is_grad_enabled():
        return mask_of(batch, _of(config, "mtp_num_layers"))
    mask: Tensor | None = batch["loss_mask"]
    return mask


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum losses (1, T) of this rank's rows where the mask is 1, and count them."""
    total, tokens = masked_sum(losses, loss_mask), loss_mask.sum().to(torch.int)
    report = torch.stack([total.detach(), tokens.to(total.dtype)])
    return total, tokens, {"lm loss": report}


def check_config(config: Any, model: Any) -> None:
    """Refuse options under which a loss or a gradient would depend on the plan."""
    if not config.calculate_per_token_loss:
        raise ValueError(
            "config.calculate_per_token_loss is False, expected True: a mean per micro-batch "
            "would depend on the plan"
        )
    if _of(config, "pipeline_model_parallel_size") > 1 and not config.variable_seq_lengths:
        raise ValueError(
            "config.variable_seq_lengths is False with pipeline stages, expected True: "
            "micro-batches have as many rows as the plan gives them"
        )
    check_experts(config)
    inner = model
    while hasattr(inner, "module"):  # DistributedDataParallel, Float16Module
        inner = inner.module
    if _of(config, "mtp_num_layers") and not getattr(inner, "rolls_along_sequences", False):
        name = type(inner).__name__
        raise ValueError(
            f"the model is a {name} with mtp_num_layers, expected one of hcp_model_class({name}): "
            "Megatron's own would roll labels along the rows of this rank"
        )


def _of(config: Any, name: str) -> int:
    return getattr(config, name, None) or 0


def mean_loss(
    reports: Iterable[Mapping[str, Tensor]], dp_cp_group: dist.ProcessGroup, device: Any
) -> tuple[float, int]:
    """Return (mean, tokens) over all ranks of the reports that a schedule returned for all
    micro-batches.

    Every rank of the last pipeline stage calls it. Sums are added in float64.
    """
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for report in reports:
        total += report["lm loss"]
    dist.all_reduce(total, group=dp_cp_group)
    loss, tokens = total.tolist()
    return loss / max(1.0, tokens), int(tokens)
