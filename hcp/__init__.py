"""Context parallelism that a PyTorch trainer can change at any moment.

lengths -> plan -> layout -> dispatch -> attention -> combine -> loss
groups  -> rebind -> evaluate -> restore
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hcp._built import require_built
from hcp._version import __version__ as __version__

require_built()

if TYPE_CHECKING:
    from hcp.attention.comm_types import COMM_TYPES
    from hcp.errors import HcpError
    from hcp.evaluation.metrics import Metrics
    from hcp.evaluation.plan import EvalPlan
    from hcp.groups.build import build_process_groups
    from hcp.groups.process_groups import ProcessGroups
    from hcp.megatron_style.core_attention import CoreAttention
    from hcp.megatron_style.packed import PackedSeqParams, get_batch_on_this_cp_rank
    from hcp.planning.cost import CostModel
    from hcp.planning.mask import Mask
    from hcp.planning.memory import MemoryModel
    from hcp.planning.plan import Plan, plan
    from hcp.rebinding.rebind import audit, eval_cp_context, rebind
    from hcp.rebinding.rules import register_rebind
    from hcp.step.ahead import planned_steps
    from hcp.step.backends import get_cp_handler_cls, register_backend
    from hcp.step.config import Config
    from hcp.step.dispatch import LocalBatch, Step, dispatch, gather_lengths
    from hcp.step.fields import Payload
    from hcp.step.graph_handler import GraphHandler
    from hcp.step.handler import ContextParallelHandler
    from hcp.step.tree_values import TreeValues
    from hcp.step.trees import Trees, prefix_trees
    from hcp.tools.loopback import loopback
    from hcp.tools.programs.options import add_arguments

__all__ = [
    "COMM_TYPES",
    "Config",
    "ContextParallelHandler",
    "CoreAttention",
    "CostModel",
    "EvalPlan",
    "GraphHandler",
    "HcpError",
    "LocalBatch",
    "Mask",
    "MemoryModel",
    "Metrics",
    "PackedSeqParams",
    "Payload",
    "Plan",
    "ProcessGroups",
    "Step",
    "TreeValues",
    "Trees",
    "add_arguments",
    "audit",
    "build_process_groups",
    "dispatch",
    "eval_cp_context",
    "gather_lengths",
    "get_batch_on_this_cp_rank",
    "get_cp_handler_cls",
    "loopback",
    "plan",
    "planned_steps",
    "prefix_trees",
    "rebind",
    "register_backend",
    "register_rebind",
]

_HOMES = {
    "attention.comm_types": ("COMM_TYPES",),
    "errors": ("HcpError",),
    "evaluation.metrics": ("Metrics",),
    "evaluation.plan": ("EvalPlan",),
    "groups.build": ("build_process_groups",),
    "groups.process_groups": ("ProcessGroups",),
    "megatron_style.core_attention": ("CoreAttention",),
    "megatron_style.packed": (
        "PackedSeqParams",
        "get_batch_on_this_cp_rank",
    ),
    "planning.cost": ("CostModel",),
    "planning.memory": ("MemoryModel",),
    "planning.mask": ("Mask",),
    "planning.plan": (
        "Plan",
        "plan",
    ),
    "rebinding.rebind": (
        "audit",
        "eval_cp_context",
        "rebind",
    ),
    "rebinding.rules": ("register_rebind",),
    "step.ahead": ("planned_steps",),
    "step.backends": (
        "get_cp_handler_cls",
        "register_backend",
    ),
    "step.config": ("Config",),
    "step.dispatch": (
        "LocalBatch",
        "Step",
        "dispatch",
        "gather_lengths",
    ),
    "step.fields": ("Payload",),
    "step.graph_handler": ("GraphHandler",),
    "step.handler": ("ContextParallelHandler",),
    "step.tree_values": ("TreeValues",),
    "step.trees": (
        "Trees",
        "prefix_trees",
    ),
    "tools.loopback": ("loopback",),
    "tools.programs.options": ("add_arguments",),
}
"""Where the public names are. Their modules are imported at first use: most of them import torch,
which takes seconds, and the planner needs none."""

_MOVED = {
    "attention.comm_types": ("CommChoice",),
    "attention.rotary": ("Rotary",),
    "evaluation.metrics": ("Metric",),
    "evaluation.plan": ("EvalBatch",),
    "exchange.layout": (
        "Layout",
        "Span",
    ),
    "megatron_style.packed": ("get_thd_batch_on_this_cp_rank",),
    "planning.ahead": (
        "PlanAhead",
        "PlanningTime",
    ),
    "planning.plan": (
        "Group",
        "lower_bound",
    ),
    "planning.report": ("Report",),
    "rebinding.derived": ("register_derived",),
    "rebinding.rebind": (
        "Audit",
        "find_slots",
    ),
    "step.ahead": ("ReadItems",),
    "step.dispatch": (
        "StepTransport",
        "gather_masks",
    ),
    "step.stats": ("StepStats",),
    "tools.check": ("check_plan",),
    "tools.choose": (
        "EvalChoice",
        "choose_eval_context_parallel",
    ),
    "tools.drawing": ("Timelines",),
    "tools.loggers": ("log_to",),
    "tools.memory": ("fit_memory",),
}
"""Names that were here until 0.3 and are public in their modules. They go with the next release."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}
_RENAMED = {"ReadItems": "Read", "StepTransport": "Passage"}
"""Names that moved, with those that they had until 0.3."""
_OLD = {
    _RENAMED.get(name, name): f"{module}.{name}"
    for module, names in _MOVED.items()
    for name in names
}
"""Old names in ``hcp``, with their places now."""


def __getattr__(name: str) -> Any:
    if name in _OLD:
        warnings.warn(f"hcp.{name} is now hcp.{_OLD[name]}", DeprecationWarning, stacklevel=2)
        module, _, new = _OLD[name].rpartition(".")
        return _from(module, new)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _from(_HOME[name], name)
    return globals()[name]


def _from(home: str, name: str) -> Any:
    try:
        module = import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"hcp.{name} needs torch, which is not installed: python -m pip install torch"
        ) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
