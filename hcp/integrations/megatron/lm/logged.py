"""Values that Megatron logs apart from the main loss: the metrics of hcp's steps, and the losses of
experts, indexers and prediction layers.

Megatron adds these losses up over micro-batches and divides by the number that its loader gives. A
plan has another number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from hcp.integrations.megatron.mtp import taken_sums
from hcp.step.stats import StepStats


class Writers(NamedTuple):
    """Where a trainer writes the metrics of a step, on this rank."""

    step: int
    """The number of the step, from 1 on."""
    interval: int
    """Every so many steps are written."""
    tensorboard: Any
    """A SummaryWriter, or None on a rank that has none."""
    wandb: Any
    """The module of a run, or None."""


def write_metrics(stats: Callable[[], StepStats], writers: Writers) -> None:
    """Write the metrics of a step, if it is one of those that are written."""
    step, interval, tensorboard, wandb = writers
    if step % interval or not (tensorboard or wandb):
        return
    metrics = stats().metrics()
    if tensorboard:
        for name, value in metrics.items():
            tensorboard.add_scalar(name, value, step)
    if wandb:
        wandb.log(metrics, step)


@contextmanager
def logged_losses(loaded: int, planned: int, group: dist.ProcessGroup) -> Iterator[None]:
    """Return a context for the schedule of a training step of so many planned micro-batches.

    `loaded`: the number by which Megatron divides. `group`: all ranks of dp_cp. After it a loss of
    experts or of an indexer is its mean over the planned micro-batches, and that of a prediction
    layer the mean over all tokens of the step, whatever the plan is.
    """
    before = {key: values.clone() for key, values in _values()}
    yield
    for key, values in _values():
        earlier = before.get(key)
        added = values if earlier is None else values - earlier
        own = added * (loaded / planned)
        values.copy_(own if earlier is None else earlier + own)
    sums = taken_sums()
    if sums is not None:
        dist.all_reduce(sums, group=group)
        _prediction_tracker()["loss_values"].copy_(loaded * sums[0] / sums[1].clamp(min=1))


def _values() -> Iterator[tuple[str, Tensor]]:
    """Yield the sums over micro-batches that Megatron keeps of experts' and indexers' losses."""
    for name, entry in _experts_tracker()._metrics.items():
        yield name, entry.values
    indexer = import_module("megatron.core.transformer.experimental_attention_variant.dsa")
    tracker = indexer.DSAIndexerLossLoggingHelper.tracker
    if "values" in tracker:
        yield "indexer", tracker["values"]


def _experts_tracker() -> Any:
    return import_module("megatron.core.transformer.moe.moe_logging").get_moe_metrics_tracker()


def _prediction_tracker() -> dict[str, Any]:
    prediction = import_module("megatron.core.transformer.multi_token_prediction")
    tracker: dict[str, Any] = prediction.MTPLossLoggingHelper.tracker
    return tracker
