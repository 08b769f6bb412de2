"""Megatron-Bridge: a callback under which every micro-batch has CP degrees of its own.

config.model.max_seqlen_per_dp_cp_rank = 8192
pretrain(config, forward_step, callbacks=[DynamicContextParallel()])
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import hcp
from hcp._validate import expect_choice
from hcp.integrations.megatron.bridge.bridge_seams import BridgeCallback, check_batches, module_with
from hcp.integrations.megatron.lm.logged import Writers
from hcp.integrations.megatron.lm.schedule import PlannedSchedule
from hcp.integrations.megatron.lm.seams import with_layers
from hcp.integrations.megatron.megatron_arguments import config_from_args
from hcp.integrations.megatron.megatron_checks import unfit_dispatcher

OPTIONS = (
    *("sequence_packing_scheduler", "min_dynamic_context_parallel_size", "ranks_per_node"),
    *("attention_backend", "sync", "plan_ahead", "memory", "too_long"),
)
"""Options of `hcp.Config` that Bridge's configuration has no place for."""


class DynamicContextParallel(BridgeCallback):
    """A callback of Megatron-Bridge: training and evaluation run over planned micro-batches.

    `options`: those of `hcp.Config` that Bridge's configuration lacks (`OPTIONS`). The others are
    Bridge's own: `model.max_seqlen_per_dp_cp_rank`, which is required, `model.cp_comm_type` and
    `dist.eval_context_parallel_size`. `linear_cross_entropy`: see `use_linear_cross_entropy`. The
    model gets layers by hcp. hcp's forward step takes the
    place of the one that `pretrain` is given.
    """

    def __init__(self, *, linear_cross_entropy: bool = False, **options: Any) -> None:
        for name in options:
            expect_choice("an option of DynamicContextParallel", name, OPTIONS)
        self._options, self._linear_cross_entropy = options, linear_cross_entropy
        self._args: Any = None
        self._state: Any = None
        self._groups: hcp.ProcessGroups | None = None
        super().__init__()

    def set_up(self, state: Any, collection: Any) -> None:
        """Read the configuration. Raises ValueError for what does not go with planned
        micro-batches, on every rank, before the model is built."""
        groups = hcp.ProcessGroups.from_existing(collection)
        _check(state.cfg)
        check_batches(state, groups.size("dp"))
        self._args = _args_of(state.cfg, self._options)
        self._groups, self._state = groups, state
        model = state.cfg.model
        if model.pipeline_model_parallel_size > 1:
            model.variable_seq_lengths = True
            if not model.num_moe_experts:  # the default dispatcher is refused with it
                model.moe_token_dispatcher_type = "alltoall"

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context inside which Bridge trains and evaluates over planned micro-batches."""
        provider: Any = import_module("megatron.bridge.models.gpt_provider")
        model = with_layers(provider.MCoreGPTModel, lambda: self._linear_cross_entropy)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(provider, "MCoreGPTModel", model))
            for name in ("train", "eval"):
                module = module_with(name, "get_forward_backward_func")
                get = self._planned(module.get_forward_backward_func, model)
                stack.enter_context(mock.patch.object(module, "get_forward_backward_func", get))
            yield

    def _writers(self) -> Writers:
        state = self._state
        step, interval = state.train_state.step + 1, state.cfg.logger.tensorboard_log_interval
        return Writers(step, interval, state.tensorboard_logger, state.wandb_logger)

    def _planned(self, get: Callable[..., Any], kind: type) -> Callable[..., Any]:
        @functools.wraps(get)
        def planned(*given: Any, **named: Any) -> Callable[..., Any]:
            assert self._groups is not None  # Bridge calls set_up before it trains
            run = get(*given, **named)
            config = config_from_args(self._args)
            schedule = PlannedSchedule(run, self._args, config, self._groups, self._writers)

            def over_plan(**call: Any) -> Any:
                _check_model(call["model"], kind)
                return schedule(**call)

            return over_plan

        return planned


def _args_of(config: Any, options: dict[str, Any]) -> argparse.Namespace:
    """Return Bridge's configuration under the names of Megatron-LM's arguments."""
    if config.model.max_seqlen_per_dp_cp_rank is None:
        raise ValueError(
            "config.model.max_seqlen_per_dp_cp_rank is None, expected the most tokens that a rank "
            "can hold"
        )
    stages = config.model.virtual_pipeline_model_parallel_size
    group = config.model.microbatch_group_size_per_vp_stage
    scheduler = options.get("sequence_packing_scheduler", "dynamic_cp")
    return argparse.Namespace(
        **{
            **vars(config.model),
            **options,
            "sequence_packing_scheduler": scheduler,
            "microbatch_group_size_per_vp_stage": group if stages else None,
            "eval_context_parallel_size": config.dist.eval_context_parallel_size,
            "group_query_attention": config.model.num_query_groups is not None,
            "check_for_nan_in_loss_and_grad": config.rerun_state_machine.check_for_nan_in_loss,
        }
    )


def _check(config: Any) -> None:
    for name, why in _refused(config):
        raise ValueError(f"{name} does not go with DynamicContextParallel: {why}")


def _refused(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (option, reason) of options under which a run would end later, or differ silently."""
    model, dist = config.model, config.dist
    provider = import_module("megatron.bridge.models.gpt_provider").GPTModelProvider
    if not isinstance(model, provider):
        yield f"a model of {type(model).__name__}", "expected a GPTModelProvider"
    if not model.calculate_per_token_loss:
        why = "a mean per micro-batch would depend on the plan; set it to True"
        yield "model.calculate_per_token_loss=False", why
    shapes = "micro-batches have as many rows as the plan gives them"
    untested = "it was not tested"
    given = {
        "dist.use_megatron_fsdp": (dist.use_megatron_fsdp, untested),
        "dist.use_torch_fsdp2": (dist.use_torch_fsdp2, untested),
        "ddp.use_megatron_fsdp": (config.ddp.use_megatron_fsdp, untested),
        "peft": (config.peft, untested),
        "inprocess_restart": (config.inprocess_restart, untested),
        "model.fp8": (model.fp8, untested),
        "model.fp4": (model.fp4, untested),
        "model.hybrid_context_parallel": (
            model.hybrid_context_parallel,
            "its loader plans too; set max_seqlen_per_dp_cp_rank only",
        ),
        "model.enable_cuda_graph": (model.enable_cuda_graph, shapes),
        "model.external_cuda_graph": (model.external_cuda_graph, shapes),
        "model.cuda_graph_impl": (model.cuda_graph_impl not in (None, "none"), shapes),
        "model.overlap_moe_expert_parallel_comm": (
            model.overlap_moe_expert_parallel_comm,
            "hcp does not split a micro-batch",
        ),
        "rerun_state_machine.check_for_spiky_loss": (
            config.rerun_state_machine.check_for_spiky_loss,
            "it judges the loss of a micro-batch, which depends on the plan",
        ),
    }
    for name, (value, why) in given.items():
        if value:
            yield name, why
    if model.num_moe_experts:
        for option, why in unfit_dispatcher(model, stages=model.pipeline_model_parallel_size):
            yield f"model.{option}={getattr(model, option)}", f"{why}; choose alltoall"


def _check_model(chunks: Any, kind: type) -> None:
    """Refuse a model that Bridge built in another place than its GPTModelProvider."""
    for chunk in chunks if isinstance(chunks, list) else [chunks]:
        inner = chunk
        while hasattr(inner, "module"):  # DistributedDataParallel, Float16Module
            inner = inner.module
        if not isinstance(inner, kind):
            raise ValueError(
                f"the model is a {type(inner).__name__} with Megatron's own layers, expected the "
                "GPTModel of a GPTModelProvider: other providers build their models elsewhere"
            )
