"""Lightning: strategies that train on planned micro-batches, and a callback for evaluation.

callback = EvalContextParallel(groups, evaluation)
trainer = Trainer(strategy=ContextParallelStrategy(), callbacks=[callback])

The module's `training_step((cp, local), batch_idx)` returns a micro-batch's share of the loss, a
scalar. Its `validation_step((cp, local), batch_idx)` returns the loss of each row, (T,).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hcp._versions import require
from hcp.evaluation.metrics import Metrics
from hcp.groups.process_groups import ProcessGroups
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
from hcp.step.dispatch import Step
from hcp.step.stats import StepStats

SEAMS = (
    "lightning.pytorch:Callback.on_validation_start(trainer, pl_module)",
    "lightning.pytorch:Callback.on_validation_batch_end(outputs, batch, batch_idx)",
    "lightning.pytorch:Callback.on_exception(exception)",
    "lightning.pytorch:LightningModule.log",
    "lightning.pytorch.strategies:DDPStrategy.training_step",
    "lightning.pytorch.strategies:DDPStrategy.backward(closure_loss)",
)
"""The parts of Lightning that this derives from or overrides."""

require(
    "lightning",
    SEAMS,
    check="Compare the losses of a few steps on one rank and on two.",
    needed_by=__name__,
)

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402

__all__ = [
    "ContextParallelFSDP2Strategy",
    "ContextParallelStrategy",
    "DynamicCPCollator",
    "DynamicCPDataLoader",
    "EvalContextParallel",
    "EvalDataLoader",
    "causal_lm_sample",
    "eval_groups",
]


class _PlannedSteps:
    """Mixed into a strategy of Lightning's whose batches are steps of a `DynamicCPDataLoader`: it
    calls the module's `training_step` for each micro-batch, and the optimizer once."""

    model: Any
    lightning_module: Any

    def __init__(self, *positional: Any, name: str = "train_loss", **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self.name = name
        self._rest: Iterator[Any] = iter(())
        self._stats: Callable[[], StepStats] | None = None
        self._others: tuple[Any, ...] = ()
        self._warned = False

    def training_step(self, batch: Step, *others: Any) -> Tensor:
        """Run the first micro-batch's forward. The others follow in `backward`, since Lightning
        clears gradients between the two."""
        self._check(batch)
        loader = self.lightning_module.trainer.train_dataloader
        if isinstance(loader, DynamicCPDataLoader):
            loader.reached(batch)  # Lightning takes a step of a stream ahead
        self._stats = batch.stats
        self._rest = batch.reducing_last(self._no_sync)
        self._others = others
        return self._forward(next(self._rest))

    def backward(self, closure_loss: Tensor, *positional: Any, **keywords: Any) -> Tensor:
        """Run the first micro-batch's backward, then the others forward and backward."""
        total = closure_loss.detach()
        super().backward(closure_loss, *positional, **keywords)  # type: ignore[misc]
        for micro_batch in self._rest:
            with _logging_as_training_step(self.lightning_module):
                loss = self._forward(micro_batch)
            super().backward(loss, *positional, **keywords)  # type: ignore[misc]
            total = total + loss.detach()
        self.lightning_module.log(self.name, total, sync_dist=True, prog_bar=True, batch_size=1)
        if self._stats is not None:
            self.lightning_module.log_dict(self._stats().metrics(), batch_size=1)
        return closure_loss

    def _forward(self, micro_batch: Any) -> Tensor:
        """Run a micro-batch's forward. Gradients are reduced in the backward of the last one."""
        loss = super().training_step(micro_batch, *self._others)  # type: ignore[misc]
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"training_step gave a {type(loss).__name__}, expected a tensor: "
                "cp.loss(losses, local.loss_mask, grad_reduce='mean')"
            )
        return loss

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward and backward that reduce no gradients."""
        raise NotImplementedError

    @property
    def _averaged_ranks(self) -> int:
        """The ranks over which the strategy averages gradients."""
        raise NotImplementedError

    def _check(self, batch: object) -> None:
        if not isinstance(batch, Step):
            raise ValueError(
                f"a batch is a {type(batch).__name__}, expected an hcp.Step: "
                "train on a DynamicCPDataLoader"
            )
        if batch.plan.ranks != self._averaged_ranks:
            raise ValueError(
                f"the plan is for {batch.plan.ranks} ranks, expected {self._averaged_ranks}: those "
                "over which the strategy averages gradients"
            )
        module = self.lightning_module
        check_experts(module)
        if not self._warned:
            self._warned = True
            warn_of_the_barrier(module, batch.plan)
        if not module.automatic_optimization:
            raise ValueError(
                "automatic_optimization is False, expected True: a loop of your own needs no "
                "strategy, only the micro-batches of its step and no_sync for all but the last"
            )
        accumulated = module.trainer.accumulate_grad_batches
        if accumulated != 1:
            raise ValueError(
                f"accumulate_grad_batches is {accumulated}, expected 1: the plan has the "
                "micro-batches of a step; raise the global batch size instead"
            )


@contextlib.contextmanager
def _logging_as_training_step(module: Any) -> Iterator[None]:
    """Inside this context, values that a module logs are those of its `training_step`. Lightning
    would keep those of the hook it is in apart, and report them in later steps, too."""
    before, module._current_fx_name = module._current_fx_name, "training_step"
    try:
        yield
    finally:
        module._current_fx_name = before


class ContextParallelStrategy(_PlannedSteps, DDPStrategy):  # type: ignore[misc]
    """DDP whose batches are steps of a `DynamicCPDataLoader`: it calls the module's `training_step`
    for each micro-batch, and the optimizer once.

    Gradients are averaged over ranks in the last micro-batch: compute losses with
    `cp.loss(..., grad_reduce="mean")`. The strategy logs the mean loss of the whole batch. A value
    that `training_step` logs itself is that of one micro-batch.
    """

    def __init__(self, *positional: Any, name: str = "train_loss", **keywords: Any) -> None:
        """`name`: that of the logged loss. Other options are those of Lightning's `DDPStrategy`."""
        super().__init__(*positional, name=name, **keywords)

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        context: contextlib.AbstractContextManager[None] = self.model.no_sync()
        return context

    @property
    def _averaged_ranks(self) -> int:
        return int(self.world_size)


class ContextParallelFSDP2Strategy(_PlannedSteps, ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2 over all ranks, as Lightning's `ModelParallelStrategy`, with batches and losses as
    under `ContextParallelStrategy`.

    The module's `configure_model` calls `fully_shard` with `self.device_mesh["data_parallel"]`.
    Ranks wait for each other in every layer: give `model=` to the loaders, so that plans take
    this into account.
    """

    def __init__(self, *, name: str = "train_loss", **keywords: Any) -> None:
        """`name`: that of the logged loss. Other options are those of Lightning's
        `ModelParallelStrategy`, without the sizes: tensor parallelism was not tested."""
        for size in ("data_parallel_size", "tensor_parallel_size"):
            if size in keywords:
                raise ValueError(
                    f"{size} is {keywords[size]}, expected none: all ranks are one domain and "
                    "shard the parameters; tensor parallelism was not tested"
                )
        super().__init__(name=name, tensor_parallel_size=1, **keywords)

    def setup_environment(self) -> None:
        """Make the process group, and a device mesh of all ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        self._reduce(False)
        try:
            yield
        finally:
            self._reduce(True)

    def _reduce(self, reduces: bool) -> None:
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(reduces, recurse=False)

    @property
    def _averaged_ranks(self) -> int:
        return int(self.device_mesh["data_parallel"].size())


def _check_limit(trainer: Trainer) -> None:
    """Refuse to evaluate the first micro-batches only: which samples they have depends on the plan.
    A run that only tries the code may."""
    if trainer.sanity_checking or trainer.fast_dev_run:
        return
    name = "limit_test_batches" if trainer.testing else "limit_val_batches"
    limit = getattr(trainer, name)
    if limit != 1.0 or isinstance(limit, int):
        raise ValueError(
            f"{name} is {limit!r}, expected 1.0: batches are micro-batches, whose samples "
            "depend on the plan. Give the EvalDataLoader a part of the dataset instead"
        )


class EvalContextParallel(Callback):  # type: ignore[misc]
    """A callback that runs validation and test in the eval layout, and logs one mean over the
    tokens of all samples.

    The loaders are `EvalDataLoader`s with the eval groups. `validation_step` and `test_step` return
    the loss of each row, (T,).
    """

    def __init__(self, groups: ProcessGroups, evaluation: ProcessGroups | None = None) -> None:
        """`evaluation`: the groups of the eval layout (default: those of training)."""
        self.groups, self.evaluation = groups, evaluation or groups
        self._layout = contextlib.ExitStack()
        self._metrics = Metrics(groups)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.restore()
        _check_limit(trainer)
        # Of the trainer, which a module knows, nothing is the model's.
        layout = eval_layout(module, self.groups, self.evaluation, exclude=(trainer,))
        self._metrics = Metrics(self._layout.enter_context(layout))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,
        outputs: Tensor,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        cp, local = batch
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"validation_step or test_step gave a {type(outputs).__name__}, expected a tensor: "
                "the loss of each row"
            )
        name = f"/{dataloader_idx}" if dataloader_idx else ""
        self._metrics.add_sum(name, *cp.loss_sum(outputs, local.loss_mask))

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._log(module, "val_loss")

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._log(module, "test_loss")

    def _log(self, module: LightningModule, name: str) -> None:
        for suffix, metric in self._metrics.reduce().items():
            module.log(name + suffix, metric.mean, sync_dist=True)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.restore()

    def on_exception(
        self, trainer: Trainer, module: LightningModule, exception: BaseException
    ) -> None:
        self.restore()

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end
    on_test_end = on_validation_end

    def restore(self) -> None:
        """Restore the model's training layout, if it is in the other one."""
        self._layout.close()
