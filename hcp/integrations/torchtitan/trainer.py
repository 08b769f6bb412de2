"""torchtitan's trainer, whose steps are planned.

B rows of the loader, T tokens on this rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchtitan.components.checkpointer import DATALOADER
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

import hcp
from hcp.integrations.barrier import waits_in_layers
from hcp.integrations.model_cost import cost_of_sizes
from hcp.integrations.torchtitan.batches import (
    Batch,
    collator_of,
    documents_of,
    joined,
    model_inputs,
    stand_in_rows,
)
from hcp.integrations.torchtitan.sizes import sizes_of_decoder
from hcp.integrations.torchtitan.timeouts import supply_set_timeout
from hcp.integrations.torchtitan.torchtitan_checks import alignment_of, check_supported
from hcp.integrations.torchtitan.torchtitan_experts import StandIns
from hcp.step.ahead import ReadItems
from hcp.step.fields import Given


class _ReadBatch(NamedTuple):
    """The samples that a rank has read for a step."""

    batch: Batch
    tokens: int
    """That torchtitan counts."""
    position: dict[str, Any]
    """The loader's state after it."""


class TakenPosition:
    """The state of a loader in checkpoints: after the step that was trained last, not after those
    that were read ahead."""

    def __init__(self, loader: BaseDataLoader) -> None:
        self._loader = loader
        self.taken: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict() if self.taken is None else self.taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self.taken = None


class ContextParallelTrainer(Trainer):
    """torchtitan's trainer, whose steps are planned.

    To torchtitan there is no context parallelism: each data-parallel rank loads documents of its
    own and holds its shard of the parameters. The plan decides which ranks compute a document.
    Ranks of one tensor-parallel group have the same rows.
    """

    planner: hcp.Config
    groups: hcp.ProcessGroups
    cost: hcp.CostModel
    """Prices by the model's sizes."""
    alignment: int
    """The number that divides every rank's rows."""
    step_in_use: hcp.Step
    """The step of the batch that `batch_generator` gave last."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        context_parallel: hcp.Config
        """The planner's options, such as static or dynamic degrees.
        `parallelism.context_parallel_degree` stays 1."""

    def __init__(self, config: Config) -> None:
        check_supported(config)
        supply_set_timeout()
        super().__init__(config)
        sync = self.planner.sync_where(waiting=waits_in_layers(self.parallel_dims))
        self.planner = replace(self.planner, sync=sync)
        sizes = sizes_of_decoder(config.model_spec.model)
        self.cost = cost_of_sizes(sizes, self.groups.transport.device, self.planner.ranks_per_node)
        self.batches_per_step: int = self.gradient_accumulation_steps  # type: ignore[has-type]
        # The batches of a step are planned together: they come as one from batch_generator.
        self.gradient_accumulation_steps = 1
        self.position = TakenPosition(self.dataloader)
        if self.checkpointer.enable:
            self.checkpointer.states[DATALOADER] = self.position
        (model,) = self.model_parts
        self.stand_ins = StandIns(model, self.groups.rank("tp"))
        self._log_stats()
        if config.validator.enable:
            self.validator.use(self.groups, self.planner, self.cost, self.alignment)

    def init_distributed(self) -> ParallelDims:
        """Make torchtitan's meshes, and hcp's groups of the same ranks."""
        parallel_dims = super().init_distributed()
        tp, longest = parallel_dims.tp, self.config.training.seq_len
        self.alignment = alignment_of(self.config.parallelism)
        limit = self.config.context_parallel.max_seqlen_per_dp_cp_rank
        self.planner = replace(
            self.config.context_parallel,
            max_seqlen_per_dp_cp_rank=limit // self.alignment * self.alignment,
        )
        ranks = parallel_dims.world_size // tp
        self.planner.validate(ranks=ranks, longest=longest, alignment=self.alignment)
        static = self.planner.sequence_packing_scheduler == "static_cp"
        degree = self.planner.static_degree(longest, ranks, self.alignment) if static else 1
        self.groups = hcp.build_process_groups(tp=tp, cp=degree)
        return parallel_dims

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """Yield all batches of a step as one. After the end of the loader it has fewer batches, or
        none: the step goes on with those of the other ranks. The next step is read and planned
        while this one trains."""
        waiting: deque[_ReadBatch] = deque()
        collator = collator_of(self.planner, self.groups, cost=self.cost, alignment=self.alignment)

        def shares() -> Iterator[ReadItems[Given]]:
            for read in self._read(super_batches):
                waiting.append(read)
                yield ReadItems(collator.samples_of(documents_of(*read.batch)))

        super_batches = super().batch_generator(data_iterable)
        steps = collator.planner.steps(shares(), self.groups)
        with contextlib.closing(steps):
            for self.step_in_use in steps:
                read = waiting.popleft()
                self.position.taken = read.position
                self.metrics_processor.ntokens_since_last_log += read.tokens
                yield read.batch

    def _read(self, batches: Iterator[Batch]) -> Iterator[_ReadBatch]:
        """Read the batches of one step after the other."""
        metrics, exhausted = self.metrics_processor, False
        while True:
            loaded: list[Batch] = []
            counted = metrics.ntokens_since_last_log
            while not exhausted and len(loaded) < self.batches_per_step:
                try:
                    loaded.append(next(batches))
                except DataloaderExhaustedError:
                    exhausted = True
            tokens = metrics.ntokens_since_last_log - counted
            metrics.ntokens_since_last_log = counted  # they are counted when they train
            yield _ReadBatch(joined(loaded), tokens, self.dataloader.state_dict())

    def _log_stats(self) -> None:
        """Add the metrics of the step to those that torchtitan logs."""
        processor = self.metrics_processor
        log = processor.log

        @functools.wraps(log)
        def logged(*given: Any, extra_metrics: dict[str, Any] | None = None, **named: Any) -> None:
            stats = self.step_in_use.stats().metrics()
            log(*given, extra_metrics={**(extra_metrics or {}), **stats}, **named)

        processor.log = logged

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, Tensor],
        labels: Tensor,
        global_valid_tokens: Tensor,
    ) -> Tensor:
        """Run all micro-batches of a step. Return this rank's part of the mean loss, a scalar.

        Raises torchtitan's DataloaderExhaustedError on all ranks if none has a document.
        """
        losses = []
        if not self.step_in_use.plan.lengths:
            raise DataloaderExhaustedError
        for cp, local in self.step_in_use:
            self.ntokens_seen += cp.rows - cp.layout.padding
            tokens, targets, extra = model_inputs(cp, local)
            self.stand_ins.rows = stand_in_rows(cp, tokens.shape[1])
            losses.append(self.fwd_bwd_fn(tokens, targets, global_valid_tokens, extra).detach())
        return torch.stack(losses).sum()

    def close(self) -> None:
        """Close torchtitan's trainer, then hcp's groups."""
        super().close()
        self.groups.close()
