"""Megatron-Core, Megatron-LM and Megatron-Bridge: CP that follows each micro-batch.

    from hcp.integrations import megatron as hcp_megatron

    spec = hcp_megatron.hcp_layer_spec(get_gpt_layer_local_spec())       # layers
    for step in hcp_megatron.plan_batches(batches, config, groups):      # data
        forward_backward(forward_step_func=hcp_megatron.forward_step,    # loss
                         data_iterator=step.data_iterator(), num_microbatches=len(step), ...)

`wrap_evaluate` and `EvalContextParallel`, for evaluation under another layout, do not need
Megatron-Core. All else imports it at its first use. Guide: docs/guides/megatron.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hcp.integrations.megatron.bridge.evaluation import EvalContextParallel
from hcp.integrations.megatron.evaluate import wrap_evaluate
from hcp.integrations.megatron.megatron_arguments import add_megatron_arguments, config_from_args

if TYPE_CHECKING:
    from hcp.integrations.megatron.bridge.dynamic import DynamicContextParallel
    from hcp.integrations.megatron.cpu import megatron_on_cpu
    from hcp.integrations.megatron.data import MicroBatches, plan_batches
    from hcp.integrations.megatron.linear_loss import use_linear_cross_entropy
    from hcp.integrations.megatron.megatron_packed import handler_of, packed_seq_params
    from hcp.integrations.megatron.mtp import hcp_model_class
    from hcp.integrations.megatron.pool import CPGroupPool
    from hcp.integrations.megatron.spec import hcp_layer_spec
    from hcp.integrations.megatron.step import forward_step, mean_loss

_WHERE = {
    "CPGroupPool": "pool",
    "DynamicContextParallel": "bridge.dynamic",
    "MicroBatches": "data",
    "forward_step": "step",
    "handler_of": "megatron_packed",
    "hcp_layer_spec": "spec",
    "hcp_model_class": "mtp",
    "mean_loss": "step",
    "megatron_on_cpu": "cpu",
    "packed_seq_params": "megatron_packed",
    "plan_batches": "data",
    "use_linear_cross_entropy": "linear_loss",
}

__all__ = [
    "CPGroupPool",
    "DynamicContextParallel",
    "EvalContextParallel",
    "MicroBatches",
    "add_megatron_arguments",
    "config_from_args",
    "forward_step",
    "handler_of",
    "hcp_layer_spec",
    "hcp_model_class",
    "mean_loss",
    "megatron_on_cpu",
    "packed_seq_params",
    "plan_batches",
    "use_linear_cross_entropy",
    "wrap_evaluate",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hcp.integrations.megatron.versions import require_megatron

    require_megatron()
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
