"""torchtitan's trainer, whose steps are planned.

B rows of the loader, T tokens on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

import hcp
from hcp.integrations.torchtitan.batches import Batch, dispatch, joined, model_inputs
from hcp.integrations.torchtitan.checks import check_supported


class ContextParallelTrainer(Trainer):
    """torchtitan's trainer, whose steps are planned.

    To torchtitan all ranks are data parallel: each loads documents of its own and holds its shard
    of the parameters. The plan decides which ranks compute a document.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        context_parallel: hcp.Config
        """The planner's options, such as static or dynamic degrees.
        `parallelism.context_parallel_degree` stays 1."""

    def __init__(self, config: Config) -> None:
        check_supported(config)
        super().__init__(config)
        # FSDP gathers the parameters of each layer: ranks wait for each other there.
        sync = config.context_parallel.sync_where(waiting=self.parallel_dims.fsdp_enabled)
        self.planner = replace(config.context_parallel, sync=sync)
        self.batches_per_step: int = self.gradient_accumulation_steps  # type: ignore[has-type]
        # The batches of a step are planned together: they come as one from batch_generator.
        self.gradient_accumulation_steps = 1
        if config.validator.enable:
            self.validator.use(self.groups, self.planner)

    def init_distributed(self) -> ParallelDims:
        """Make torchtitan's meshes, and hcp's groups of the same ranks."""
        parallel_dims = super().init_distributed()
        planner, longest = self.config.context_parallel, self.config.training.seq_len
        planner.validate(ranks=parallel_dims.world_size, longest=longest)
        static = planner.sequence_packing_scheduler == "static_cp"
        degree = planner.static_degree(longest, parallel_dims.world_size) if static else 1
        self.groups = hcp.build_process_groups(cp=degree)
        return parallel_dims

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """Yield all batches of a step as one. After the end of the loader it has fewer batches, or
        none: the step goes on with those of the other ranks."""
        batches = super().batch_generator(data_iterable)
        exhausted = False
        while True:
            loaded: list[Batch] = []
            while not exhausted and len(loaded) < self.batches_per_step:
                try:
                    loaded.append(next(batches))
                except DataloaderExhaustedError:
                    exhausted = True
            yield joined(loaded)

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
        loss = torch.zeros((), device=self.device)
        step = dispatch((input_dict, labels), self.planner, self.groups)
        if not step.plan.lengths:
            raise DataloaderExhaustedError
        for cp, local in step:
            self.ntokens_seen += cp.rows
            tokens, targets, extra = model_inputs(cp, local)
            loss += self.fwd_bwd_fn(tokens, targets, global_valid_tokens, extra).detach()
        return loss

    def close(self) -> None:
        """Close torchtitan's trainer, then hcp's groups."""
        super().close()
        self.groups.close()
