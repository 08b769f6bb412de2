"""Context parallelism that a PyTorch trainer can change at any moment.

lengths -> plan -> layout -> dispatch -> attention -> combine -> loss
groups  -> rebind -> evaluate -> restore
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hcp._built import require_built
from hcp._version import __version__ as __version__

require_built()

if TYPE_CHECKING:
    from hcp.attention.comm_types import COMM_TYPES, CommChoice
    from hcp.attention.rotary import Rotary
    from hcp.errors import HcpError
    from hcp.evaluation.choose import EvalChoice, choose_eval_context_parallel
    from hcp.evaluation.metrics import Metric, Metrics
    from hcp.evaluation.plan import EvalBatch, EvalPlan
    from hcp.exchange.layout import Layout, Span
    from hcp.exchange.loopback import loopback
    from hcp.groups.build import build_process_groups
    from hcp.groups.process_groups import ProcessGroups
    from hcp.megatron_style.core_attention import CoreAttention
    from hcp.megatron_style.packed import (
        PackedSeqParams,
        get_batch_on_this_cp_rank,
        get_thd_batch_on_this_cp_rank,
    )
    from hcp.planning.ahead import PlanAhead, PlanningTime
    from hcp.planning.check import check_plan
    from hcp.planning.cost import CostModel
    from hcp.planning.drawing import Timelines
    from hcp.planning.mask import Mask
    from hcp.planning.memory import MemoryModel
    from hcp.planning.plan import Group, Plan, lower_bound, plan
    from hcp.planning.report import Report
    from hcp.rebinding.derived import register_derived
    from hcp.rebinding.rebind import Audit, audit, eval_cp_context, find_slots, rebind
    from hcp.rebinding.rules import register_rebind
    from hcp.step.ahead import Read, planned_steps
    from hcp.step.backends import get_cp_handler_cls, register_backend
    from hcp.step.config import Config, add_arguments
    from hcp.step.dispatch import (
        LocalBatch,
        Passage,
        Step,
        dispatch,
        gather_lengths,
        gather_masks,
    )
    from hcp.step.fields import Payload
    from hcp.step.graph_handler import GraphHandler
    from hcp.step.handler import ContextParallelHandler
    from hcp.step.memory import fit_memory
    from hcp.step.stats import StepStats, log_to

__all__ = [
    "COMM_TYPES",
    "Audit",
    "CommChoice",
    "Config",
    "ContextParallelHandler",
    "CoreAttention",
    "CostModel",
    "EvalBatch",
    "EvalChoice",
    "EvalPlan",
    "GraphHandler",
    "Group",
    "HcpError",
    "Layout",
    "LocalBatch",
    "Mask",
    "MemoryModel",
    "Metric",
    "Metrics",
    "PackedSeqParams",
    "Passage",
    "Payload",
    "Plan",
    "PlanAhead",
    "PlanningTime",
    "ProcessGroups",
    "Read",
    "Report",
    "Rotary",
    "Span",
    "Step",
    "StepStats",
    "Timelines",
    "add_arguments",
    "audit",
    "build_process_groups",
    "check_plan",
    "choose_eval_context_parallel",
    "dispatch",
    "eval_cp_context",
    "find_slots",
    "fit_memory",
    "gather_lengths",
    "gather_masks",
    "get_batch_on_this_cp_rank",
    "get_cp_handler_cls",
    "get_thd_batch_on_this_cp_rank",
    "log_to",
    "loopback",
    "lower_bound",
    "plan",
    "planned_steps",
    "rebind",
    "register_backend",
    "register_derived",
    "register_rebind",
]

_HOMES = {
    "attention.comm_types": (
        "COMM_TYPES",
        "CommChoice",
    ),
    "attention.rotary": ("Rotary",),
    "errors": ("HcpError",),
    "evaluation.choose": (
        "EvalChoice",
        "choose_eval_context_parallel",
    ),
    "evaluation.metrics": (
        "Metric",
        "Metrics",
    ),
    "evaluation.plan": (
        "EvalBatch",
        "EvalPlan",
    ),
    "exchange.layout": (
        "Layout",
        "Span",
    ),
    "exchange.loopback": ("loopback",),
    "groups.build": ("build_process_groups",),
    "groups.process_groups": ("ProcessGroups",),
    "megatron_style.core_attention": ("CoreAttention",),
    "megatron_style.packed": (
        "PackedSeqParams",
        "get_batch_on_this_cp_rank",
        "get_thd_batch_on_this_cp_rank",
    ),
    "planning.ahead": (
        "PlanAhead",
        "PlanningTime",
    ),
    "planning.check": ("check_plan",),
    "planning.cost": ("CostModel",),
    "planning.drawing": ("Timelines",),
    "planning.memory": ("MemoryModel",),
    "planning.mask": ("Mask",),
    "planning.plan": (
        "Group",
        "Plan",
        "lower_bound",
        "plan",
    ),
    "planning.report": ("Report",),
    "rebinding.derived": ("register_derived",),
    "rebinding.rebind": (
        "Audit",
        "audit",
        "eval_cp_context",
        "find_slots",
        "rebind",
    ),
    "rebinding.rules": ("register_rebind",),
    "step.ahead": (
        "Read",
        "planned_steps",
    ),
    "step.backends": (
        "get_cp_handler_cls",
        "register_backend",
    ),
    "step.config": (
        "Config",
        "add_arguments",
    ),
    "step.dispatch": (
        "LocalBatch",
        "Passage",
        "Step",
        "dispatch",
        "gather_lengths",
        "gather_masks",
    ),
    "step.fields": ("Payload",),
    "step.graph_handler": ("GraphHandler",),
    "step.handler": ("ContextParallelHandler",),
    "step.memory": ("fit_memory",),
    "step.stats": (
        "StepStats",
        "log_to",
    ),
}
"""Where the public names are. Their modules are imported at first use: most of them import torch,
which takes seconds, and the planner needs none."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"hcp.{name} needs torch, which is not installed: python -m pip install torch"
        ) from None
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
