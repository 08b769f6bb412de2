"""DeepSpeed: dynamic context parallelism in a training loop of your own, with its engine.

engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
loader = DynamicCPDataLoader(dataset, config, groups, global_batch_size=64, model=engine.module)
for step in loader:
    for cp, local in micro_batches(engine, step):
        losses = engine(cp, local)
        engine.backward(cp.loss(losses, local.loss_mask, grad_reduce="mean"))
    engine.step()

ZeRO-3 gathers the parameters of each layer from all ranks. `model=` tells the loader, whose plans
take into account that ranks wait for each other there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hcp._versions import require
from hcp.integrations.barrier import warn_of_the_barrier
from hcp.integrations.columns import causal_lm_sample
from hcp.integrations.experts import check_experts
from hcp.integrations.loader import (
    DynamicCPCollator,
    DynamicCPDataLoader,
    EvalDataLoader,
    eval_groups,
    eval_layout,
)
from hcp.step.dispatch import LocalBatch, Step
from hcp.step.handler import ContextParallelHandler

__all__ = [
    "DynamicCPCollator",
    "DynamicCPDataLoader",
    "EvalDataLoader",
    "causal_lm_sample",
    "check_engine",
    "eval_groups",
    "eval_layout",
    "micro_batches",
]

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine."
SEAMS = (
    f"{_ENGINE}set_gradient_accumulation_boundary",
    f"{_ENGINE}managed_gradient_accumulation",
    f"{_ENGINE}gradient_accumulation_steps",
    f"{_ENGINE}backward",
    f"{_ENGINE}step",
)
"""The parts of DeepSpeed that this and the loop around it call."""


def micro_batches(engine: Any, step: Step) -> Iterator[tuple[ContextParallelHandler, LocalBatch]]:
    """Yield the micro-batches of a step. The last one is the engine's boundary of gradient
    accumulation: `engine.step()` after the loop updates the parameters once.

    The engine averages gradients over the ranks: compute losses with `grad_reduce="mean"`. Raises
    ValueError for an engine that would cut sequences or scale gradients itself, see `check_engine`,
    and for experts that drop tokens.
    """
    check_engine(engine, step)
    check_experts(engine.module)
    warn_of_the_barrier(engine.module, step.plan)
    for i, micro_batch in enumerate(step):
        engine.set_gradient_accumulation_boundary(i + 1 == len(step))
        yield micro_batch


def check_engine(engine: Any, step: Step) -> None:
    """Raise ValueError for options of a DeepSpeed engine that do not go with planned steps, and
    ImportError for a version of DeepSpeed that hcp does not take."""
    require("deepspeed", SEAMS, check="Compare the losses of a few steps on one rank and on two.")
    if engine.pipeline_parallelism:
        raise ValueError(
            "the engine is one of pipeline stages, expected one that runs whole models: its "
            "schedule has a fixed number of micro-batches of one shape"
        )
    accumulated = engine.gradient_accumulation_steps()
    if accumulated != 1:
        raise ValueError(
            f"gradient_accumulation_steps is {accumulated}, expected 1: the plan has the "
            "micro-batches of a step; raise the global batch size instead"
        )
    if not engine.managed_gradient_accumulation():
        raise ValueError(
            "managed_gradient_accumulation is False, expected True: hcp tells the engine which "
            "micro-batch is the last of a step"
        )
    if engine.sequence_parallel_size != 1:
        raise ValueError(
            f"sequence_parallel_size is {engine.sequence_parallel_size}, expected 1: hcp spreads "
            "the sequences over the data-parallel ranks"
        )
    if engine.dp_world_size != step.plan.ranks:
        raise ValueError(
            f"the plan is for {step.plan.ranks} ranks, expected {engine.dp_world_size}: those over "
            "which the engine averages gradients"
        )
