"""Accelerate: dynamic context parallelism in a training loop of your own.

parallel = ContextParallel(accelerator, hcp.Config(max_seqlen_per_dp_cp_rank=4096))
loader = parallel.train_loader(dataset, global_batch_size=64)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step in loader:
    for cp, local in parallel.micro_batches(model, step):
        accelerator.backward(loss_of(model, cp, local))
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from hcp.groups.process_groups import ProcessGroups
from hcp.integrations.experts import warn_of_experts
from hcp.integrations.loader import (
    DynamicCPDataLoader,
    EvalDataLoader,
    ToSample,
    causal_lm_sample,
    domain,
    eval_groups,
    eval_layout,
)
from hcp.planning.cost import CostModel
from hcp.programs.versions import require
from hcp.step.config import Config
from hcp.step.dispatch import LocalBatch, Step
from hcp.step.handler import ContextParallelHandler

SEAMS = (
    "accelerate:Accelerator.no_sync(model)",
    "accelerate:Accelerator.backward",
    "accelerate:Accelerator.prepare",
    "accelerate:Accelerator.register_for_checkpointing",
    "accelerate:Accelerator.distributed_type",
    "accelerate:Accelerator.parallelism_config",
    "accelerate:Accelerator.gradient_accumulation_steps",
    "accelerate:ParallelismConfig(cp_size, tp_size, sp_size)",
)
"""What this calls or reads."""

require(
    "accelerate",
    "1.15",
    "1.15",
    seams=SEAMS,
    check="Compare the losses of a few steps on one rank and on two.",
)

COMM_TYPES = {"allgather": "all_gather", "alltoall": "p2p"}
"""hcp's comm types by Accelerate's names; its "alltoall" passes keys around a ring."""


class ContextParallel:
    """Context parallelism for a loop with an `accelerate.Accelerator`: groups, loaders, and the
    choice of the micro-batch that reduces gradients.

    The gradients of a step are averaged over ranks once, in its last micro-batch, by the DDP or
    FSDP that `accelerator.prepare` has put around the model: compute losses with
    `grad_reduce="mean"`.
    """

    def __init__(
        self,
        accelerator: Any,
        config: Config,
        *,
        groups: ProcessGroups | None = None,
        cost: CostModel | None = None,
        to_sample: ToSample = causal_lm_sample,
    ) -> None:
        """`groups`: by default, all ranks of the job are one domain. Raises ValueError if
        Accelerate would also use its own CP, tensor parallelism or gradient accumulation."""
        check_accelerator(accelerator)
        self.accelerator, self.config = accelerator, with_barrier_of(accelerator, config)
        self.groups = domain(groups, accelerator.num_processes)
        self.eval_groups = eval_groups(self.groups, config)
        self.cost, self.to_sample = cost, to_sample
        self._warned = False

    def train_loader(
        self, dataset: Any, *, global_batch_size: int, **options: Any
    ) -> DynamicCPDataLoader:
        """Return a loader of steps of planned micro-batches.

        `options` are those of `DynamicCPDataLoader`. `accelerator.prepare` leaves the loader as it
        is, and `accelerator.register_for_checkpointing` saves its position.
        """
        return DynamicCPDataLoader(
            dataset,
            self.config,
            self.groups,
            global_batch_size=global_batch_size,
            cost=self.cost,
            to_sample=self.to_sample,
            **options,
        )

    def micro_batches(
        self, model: nn.Module, step: Step
    ) -> Iterator[tuple[ContextParallelHandler, LocalBatch]]:
        """Yield the micro-batches of a step. Gradients are reduced in the last one only."""
        if not self._warned:
            self._warned = True
            warn_of_experts(model)
        for i, micro_batch in enumerate(step):
            last = i + 1 == len(step)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                yield micro_batch

    def eval_loader(self, dataset: Any, *, global_batch_size: int) -> EvalDataLoader:
        """Return a loader of the micro-batches of an evaluation in the eval layout, which has each
        sample once."""
        return EvalDataLoader(
            dataset,
            self.config,
            self.eval_groups,
            global_batch_size=global_batch_size,
            cost=self.cost,
            to_sample=self.to_sample,
        )

    def eval_layout(self, model: nn.Module) -> contextlib.AbstractContextManager[ProcessGroups]:
        """Return a context inside which the model holds the groups of the eval layout. Its value is
        these groups, for `hcp.Metrics`."""
        return eval_layout(model, self.groups, self.eval_groups)


def config_of(parallelism: Any, *, max_seqlen_per_dp_cp_rank: int, **options: Any) -> Config:
    """Convert an `accelerate.ParallelismConfig` that asks for CP: one degree for all sequences.

    `options` are further fields of `hcp.Config`. Make the Accelerator without the
    ParallelismConfig: hcp does what it asks of Accelerate.
    """
    strategy = (
        "allgather" if parallelism.cp_handler is None else parallelism.cp_handler.cp_comm_strategy
    )
    given = {
        "sequence_packing_scheduler": "static_cp",
        "context_parallel_size": parallelism.cp_size,
        "cp_comm_type": COMM_TYPES[strategy],
    }
    return Config(max_seqlen_per_dp_cp_rank=max_seqlen_per_dp_cp_rank, **(given | options))


def with_barrier_of(accelerator: Any, config: Config) -> Config:
    """Return the configuration. Its `sync` is no longer "auto" if the Accelerator is going to shard
    parameters over ranks."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    return replace(config, sync=config.sync_where(waiting=True)) if kind == "FSDP" else config


def check_accelerator(accelerator: Any) -> None:
    """Raise ValueError if the Accelerator would also cut sequences or scale gradients."""
    parallelism = accelerator.parallelism_config
    for name in ("cp_size", "sp_size", "tp_size"):
        size = 1 if parallelism is None else getattr(parallelism, name)
        if size > 1:
            raise ValueError(
                f"parallelism_config.{name} is {size}, expected 1: hcp spreads the sequences. "
                "Leave it out of the Accelerator; hcp.integrations.accelerate.config_of("
                "parallelism_config, ...) says its cp_size to hcp"
            )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps is {accelerator.gradient_accumulation_steps}, expected "
            "1: the plan has the micro-batches of a step; raise the global batch size instead"
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and kind != "FSDP":
        raise ValueError(
            f"the Accelerator asks for FSDP and uses {kind}, expected FSDP: Accelerate leaves it "
            "out on CPUs without a word. Leave it out of the options, or wrap the model with "
            "torch.distributed.fsdp.fully_shard"
        )
    if kind == "DEEPSPEED":
        raise ValueError("the Accelerator uses DeepSpeed, expected DDP or FSDP: it was not tested")
