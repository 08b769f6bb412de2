"""The schedule of train_step and evaluate, over the micro-batches of a plan.

Megatron-LM and Megatron-Bridge have functions of these names.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import hcp
from hcp.integrations.megatron import data, step
from hcp.integrations.megatron.lm.logged import Writers, logged_losses, write_metrics
from hcp.integrations.megatron.lm.reading import (
    MicroBatch,
    Sample,
    StepReader,
    drawn_now,
    is_replaying,
)
from hcp.tools.rates import machine_cost


class PlannedSchedule:
    """A function of Megatron's `get_forward_backward_func` that takes a global batch from the
    loader, plans it, and runs the planned micro-batches.

    It draws as many micro-batches of the loader as Megatron-LM would, so that samples, their order
    and their counts in checkpoints are Megatron-LM's own. Those of the next training step are drawn
    and planned while this one computes, and those of the next evaluation step where the number of
    steps is known.
    """

    def __init__(
        self,
        schedule: Callable[..., Any],
        args: Any,
        config: hcp.Config,
        groups: hcp.ProcessGroups,
        writers: Callable[[], Writers],
        evaluation_steps: int | None = None,
    ) -> None:
        """`args`: Megatron-LM's, or an object with their names. `config`: the options of plans.
        `groups`: those of training. `writers`: where the metrics of the step that runs are written.
        `evaluation_steps`: of the evaluation that it is for: no more are drawn. None: each is drawn
        in its turn."""
        self._schedule, self._args, self._groups = schedule, args, groups
        self._writers = writers
        self._config = config
        if getattr(args, "iterations_to_skip", None):  # Megatron draws their samples itself
            self._config = replace(self._config, plan_ahead=0)
        self._evaluation_steps = self._evaluation_left = evaluation_steps or 0
        self._reader: StepReader | None = None
        self._steps: Iterator[data.MicroBatches] = iter(())

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **options: Any,
    ) -> Any:
        """Run a step or an evaluation step. `forward_step_func`, the script's, is not called:
        hcp's takes its place."""
        if collect_non_loss_data:
            raise ValueError(
                "collect_non_loss_data is True, expected False: hcp's forward step gives losses"
            )
        chunks = model if isinstance(model, list) else [model]
        iterator = first_iterator(data_iterator)
        in_turn = forward_only and not self._evaluation_left
        if in_turn or not self._config.plan_ahead or is_replaying(iterator):
            sequences = drawn_now(iterator, num_microbatches)
            planned = next(self._plan([sequences], evaluation=forward_only))
        else:
            planned, sequences = self._planned_ahead(iterator, num_microbatches, forward_only)
            self._evaluation_left -= forward_only
        if not forward_only:
            self.count_work(sequences)
        run = functools.partial(
            self._schedule,
            forward_step_func=functools.partial(forward_step, args=self._args),
            data_iterator=planned.data_iterator(len(chunks) if len(chunks) > 1 else None),
            model=model,
            num_microbatches=len(planned),
            forward_only=forward_only,
            **{**options, "micro_batch_size": 1},
        )
        if forward_only:
            return run()
        with logged_losses(num_microbatches, len(planned), self._groups.dp_cp):
            losses = run()
        write_metrics(planned.stats, self._writers())
        return losses

    def count_work(self, sequences: list[Sample]) -> None:
        """Tell the trainer the lengths of a step, if it counts operations by them."""

    def _planned_ahead(
        self, iterator: Iterator[MicroBatch], micro_batches: int, evaluation: bool
    ) -> tuple[data.MicroBatches, list[Sample]]:
        """Return the next step, which was planned while the one before it was computed, and its
        sequences."""
        reader = self._reader
        if reader is None or reader.iterator is not iterator:
            reader = StepReader(iterator, micro_batches)
        elif reader.micro_batches != micro_batches:  # Megatron ramps up its batches
            reader = reader.resized(micro_batches)
        if reader is not self._reader:
            batches = itertools.islice(reader, self._evaluation_steps) if evaluation else reader
            self._reader, self._steps = reader, self._plan(batches, evaluation=evaluation)
        planned = next(self._steps)
        return planned, reader.take()

    def _plan(
        self, batches: Iterable[Iterable[Sample]], *, evaluation: bool
    ) -> Iterator[data.MicroBatches]:
        """Plan the sequences that the data-parallel ranks loaded, and bring them to their ranks."""
        args, groups, config = self._args, self._groups, self._config
        alignment = args.tensor_model_parallel_size if args.sequence_parallel else 1
        if evaluation and isinstance(config.eval_context_parallel_size, int):
            degree = config.eval_context_parallel_size
            config = config.for_evaluation(degree, args.seq_length, alignment)
        if isinstance(batches, list):  # of one
            config = replace(config, plan_ahead=0)
        return data.plan_batches(
            batches,
            config,
            groups,
            cost=_cost(args, groups.transport.device, config.ranks_per_node),
            samples_of="dp",
            alignment=alignment,
            virtual_stages=args.virtual_pipeline_model_parallel_size or 1,
            micro_batch_group=args.microbatch_group_size_per_vp_stage,
        )


class CountedSchedule(PlannedSchedule):
    """A schedule that gives Megatron-LM the lengths for its count of operations, as get_batch
    would. Refuses a model with none but Megatron's own layers, which would cut sequences again."""

    def __call__(self, *, model: Any, **call: Any) -> Any:
        for chunk in model if isinstance(model, list) else [model]:
            _check_layers(chunk)
        return super().__call__(model=model, **call)

    def count_work(self, sequences: list[Sample]) -> None:
        from megatron.training import training

        lengths = torch.tensor([0, *(len(each["tokens"]) for each in sequences)])
        device = self._groups.transport.device
        training.update_seqlen_stats_from_cu_seqlens(lengths.cumsum(0).to(device))


def _check_layers(model: torch.nn.Module) -> None:
    if not any(type(each).__module__.startswith("hcp.") for each in model.modules()):
        raise ValueError(
            "the model has Megatron's own layers, expected those of hcp: import GPTModel or "
            "HybridModel from megatron.core.models after hcp is in place, or build the model of "
            "layers by hcp_layer_spec"
        )


def first_iterator(data_iterator: Any) -> Iterator[MicroBatch]:
    """Return the iterator of a rank's first chunk of the model. Each chunk has one, of the same
    samples."""
    if isinstance(data_iterator, list):
        data_iterator = data_iterator[0]
    if data_iterator is None:
        raise hcp.HcpError(
            "this rank has no data iterator, expected one on every rank: tensor- and "
            "pipeline-parallel ranks load the samples that they plan; build the datasets with "
            "BlendedMegatronDatasetBuilder, or on all ranks",
            code="no-data",
        )
    return data_iterator  # type: ignore[no-any-return]


@functools.cache
def groups_of_parallel_state() -> hcp.ProcessGroups:
    """hcp's view of Megatron-LM's groups, which it keeps in `parallel_state`."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return hcp.ProcessGroups.from_existing(ProcessGroupCollection.use_mpu_process_groups())


def _cost(args: Any, device: torch.device, ranks_per_node: int | None) -> hcp.CostModel:
    """Return the costs of one pipeline stage of the model."""
    heads = args.num_attention_heads
    return machine_cost(
        device,
        ranks_per_node,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else heads,
        bytes_per_element=args.params_dtype.itemsize,
    )


def forward_step(
    data_iterator: Any, model: Any, return_schedule_plan: bool = False, *, args: Any
) -> tuple[Tensor, Callable[..., Any]]:
    """hcp's forward step, with Megatron-LM's check of each loss for numbers that are not finite."""
    output, loss = step.forward_step(data_iterator, model, return_schedule_plan)
    if not args.check_for_nan_in_loss_and_grad:
        return output, loss
    return output, functools.partial(_checked, loss)


def _checked(loss_func: Callable[[Tensor], Any], losses: Tensor) -> Any:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    result = loss_func(losses)
    for wrong, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        get_rerun_state_machine().validate_result(
            result=result[0],
            rejection_func=wrong,
            message=f"found {name} in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
    return result
