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
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import nn

from hcp._versions import require
from hcp.groups.alone import initialize_alone
from hcp.groups.build import build_process_groups
from hcp.groups.process_groups import ProcessGroups
from hcp.integrations.barrier import waits_in_layers, warn_of_the_barrier
from hcp.integrations.columns import causal_lm_samples
from hcp.integrations.experts import check_experts
from hcp.integrations.gathers import gathered_once, weights_stay
from hcp.integrations.loader import (
    DynamicCPDataLoader,
    EvalDataLoader,
    ToSample,
    domain,
    eval_groups,
    eval_layout,
)
from hcp.planning.cost import CostModel
from hcp.step.config import Config
from hcp.step.dispatch import LocalBatch, Step
from hcp.step.handler import ContextParallelHandler

__all__ = ["ContextParallel", "config_of"]

_log = logging.getLogger("hcp")

SEAMS = (
    "accelerate:Accelerator.no_sync(model)",
    "accelerate:Accelerator.backward",
    "accelerate:Accelerator.prepare",
    "accelerate:Accelerator.register_for_checkpointing",
    "accelerate:Accelerator.distributed_type",
    "accelerate:Accelerator.parallelism_config",
    "accelerate:Accelerator.gradient_accumulation_steps",
    "accelerate:Accelerator.prepare_scheduler",
    "accelerate.scheduler:AcceleratedScheduler(scheduler, step_with_optimizer, split_batches)",
    "accelerate:ParallelismConfig(cp_size, tp_size)",
)
"""The parts of Accelerate that this calls or reads."""

require(
    "accelerate",
    SEAMS,
    check="Compare the losses of a few steps on one rank and on two.",
    needed_by=__name__,
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
        to_sample: ToSample = causal_lm_samples,
    ) -> None:
        """`groups`: by default, all ranks of the job are one domain, with the CP size of the
        Accelerator's ParallelismConfig. hcp does what that asks for: make this object before
        `accelerator.prepare`. Raises ValueError if Accelerate would also use tensor parallelism,
        another sequence parallelism or gradient accumulation."""
        check_accelerator(accelerator, takes_cp=True)
        config = with_cp_size_of(accelerator, config)
        self.accelerator, self.config = accelerator, with_barrier_of(accelerator, config)
        if groups is None:
            initialize_alone("ContextParallel", accelerator.device)
            groups = build_process_groups(cp=cp_size_of(accelerator))
        self.groups = domain(groups, accelerator.num_processes, accelerator.device)
        self.eval_groups = eval_groups(self.groups, config)
        self.cost, self.to_sample = cost, to_sample
        self._weights_stay = weights_stay(accelerator)
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
        """Yield the micro-batches of a step. Gradients are reduced in the last one only.

        Raises ValueError if Accelerate would scale gradients, or step a learning rate several times
        in an update, and for experts that drop tokens."""
        _check_accumulation(self.accelerator)
        _check_schedulers(self.accelerator)
        check_experts(model)
        if not self._warned:
            self._warned = True
            warn_of_the_barrier(model, step.plan)
        if self._weights_stay:
            yield from gathered_once(self.accelerator, model, step)
        else:
            yield from step.reducing_last(partial(self.accelerator.no_sync, model))

    def eval_loader(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        model: nn.Module | None = None,
        **options: Any,
    ) -> EvalDataLoader:
        """Return a loader of the micro-batches of an evaluation in the eval layout, which has each
        sample once. `model`: see `DynamicCPDataLoader`. `options`: those of `EvalDataLoader`, such
        as `fields`."""
        return EvalDataLoader(
            dataset,
            self.config,
            self.eval_groups,
            global_batch_size=global_batch_size,
            cost=self.cost,
            to_sample=self.to_sample,
            model=model,
            **options,
        )

    def eval_layout(self, model: nn.Module) -> contextlib.AbstractContextManager[ProcessGroups]:
        """Return a context inside which the model holds the groups of the eval layout. Its value is
        these groups, for `hcp.Metrics`."""
        return eval_layout(model, self.groups, self.eval_groups)


def config_of(parallelism: Any, *, max_seqlen_per_dp_cp_rank: int, **options: Any) -> Config:
    """Convert an `accelerate.ParallelismConfig` that asks for CP: one degree for all sequences.

    `options` are further fields of `hcp.Config`. `ContextParallel` takes an Accelerator with the
    ParallelismConfig; for `transformers.Trainer` make it without.
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
    waiting = waits_in_layers(accelerator)
    return replace(config, sync=config.sync_where(waiting=True)) if waiting else config


def cp_size_of(accelerator: Any) -> int:
    """The CP size that the Accelerator's ParallelismConfig asks for, 1 without one."""
    parallelism = accelerator.parallelism_config
    return 1 if parallelism is None else int(parallelism.cp_size)


def with_cp_size_of(accelerator: Any, config: Config) -> Config:
    """Return the configuration. If the Accelerator asks for CP, "static_cp" has its degree, and
    Accelerate's own CP does nothing. Under "dynamic_cp" plans choose degrees, whatever its size.
    """
    size = cp_size_of(accelerator)
    if size == 1:
        return config
    if getattr(accelerator, "_cp_context", _refuse_to_cut) is not _refuse_to_cut:
        raise ValueError(
            f"the Accelerator has prepared a model for its own cp_size {size}, expected a "
            "ContextParallel before: make it first, then call accelerator.prepare"
        )
    accelerator._prepare_cp = lambda *objects: objects
    accelerator._cp_context = _refuse_to_cut
    if config.sequence_packing_scheduler == "dynamic_cp":
        return config
    if config.context_parallel_size not in (None, size):
        raise ValueError(
            f"context_parallel_size is {config.context_parallel_size}, expected {size}, the "
            "cp_size of the Accelerator's ParallelismConfig, or None"
        )
    return replace(config, context_parallel_size=size)


def _refuse_to_cut(**options: Any) -> None:
    raise ValueError(
        "accelerator.maybe_context_parallel would cut sequences that hcp has cut, expected none: "
        "leave it out, the micro-batches of hcp are this rank's rows"
    )


def check_accelerator(
    accelerator: Any, *, takes_cp: bool = False, accumulates: bool = False
) -> None:
    """Raise ValueError if the Accelerator would also cut sequences or scale gradients. `takes_cp`:
    its CP size is for hcp. `accumulates`: it may scale the gradients of several batches."""
    parallelism = accelerator.parallelism_config
    for name in ("cp_size", "sp_size", "tp_size"):
        size = getattr(parallelism, name, 1)  # older ones have no sp_size
        if size > 1 and not (takes_cp and name == "cp_size"):
            raise ValueError(
                f"parallelism_config.{name} is {size}, expected 1: hcp spreads the sequences. "
                "Leave it out of the Accelerator; hcp.integrations.accelerate.config_of("
                "parallelism_config, ...) says its cp_size to hcp"
            )
    if not accumulates:
        _check_accumulation(accelerator)
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if _asks_for("FSDP") and kind != "FSDP":
        raise ValueError(
            f"the Accelerator asks for FSDP and uses {kind}, expected FSDP: Accelerate leaves it "
            "out on CPUs without a word. Leave it out of the options, or wrap the model with "
            "torch.distributed.fsdp.fully_shard"
        )
    plugin = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    if kind == "FSDP" and getattr(plugin, "fsdp_version", 2) != 2:
        _warn_of_fsdp1()
    if kind == "DEEPSPEED" or _asks_for("DEEPSPEED"):  # which Accelerate leaves out on CPUs, too
        raise ValueError(
            "the Accelerator uses DeepSpeed, expected DDP or FSDP: for DeepSpeed write the loop "
            "with its engine and hcp.integrations.deepspeed"
        )


@cache
def _warn_of_fsdp1() -> None:
    _log.warning(
        "hcp: the Accelerator shards by FSDP 1, under which hcp was not tested: say fsdp_version=2 "
        'to FullyShardedDataParallelPlugin, or fsdp_config={"version": 2} to TrainingArguments, '
        "whose default it is from Transformers 5.12 on"
    )


def _check_accumulation(accelerator: Any) -> None:
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps is {accelerator.gradient_accumulation_steps}, expected "
            "1: the plan has the micro-batches of a step; raise the global batch size instead"
        )


def _check_schedulers(accelerator: Any) -> None:
    """Refuse schedulers that step once for each rank. Accelerate counts batches of a rank, of which
    as many as there are ranks make an update; those of hcp's loaders are global."""
    for prepared in accelerator._schedulers:
        once = prepared.split_batches or not prepared.step_with_optimizer
        if accelerator.num_processes > 1 and not once:
            raise ValueError(
                f"a prepared {type(prepared.scheduler).__name__} steps {accelerator.num_processes} "
                "times in each update, expected once: a batch of hcp's loader is that of all "
                "ranks. Leave the scheduler out of accelerator.prepare, or make the Accelerator "
                "with dataloader_config=DataLoaderConfiguration(split_batches=True)"
            )


def _asks_for(plugin: str) -> bool:
    """Whether a plugin, or the launcher, asks Accelerate for a way of sharding."""
    return os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true"
