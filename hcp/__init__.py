"""Context parallelism that a PyTorch trainer can change at any moment.

lengths -> plan -> layout -> dispatch -> attention -> combine -> loss
groups  -> rebind -> evaluate -> restore
"""

from hcp.ahead import PlanAhead
from hcp.check import check_plan
from hcp.config import Config, add_arguments
from hcp.cost import CostModel
from hcp.dispatch import LocalBatch, Step, dispatch, gather_lengths
from hcp.errors import HcpError
from hcp.groups import ProcessGroups, build_process_groups
from hcp.handler import COMM_TYPES, ContextParallelHandler
from hcp.layout import Layout, Span
from hcp.loopback import loopback
from hcp.plan import Group, Plan, Report, lower_bound, plan
from hcp.rebind import eval_cp_context, find_slots

__all__ = [
    "COMM_TYPES",
    "Config",
    "ContextParallelHandler",
    "CostModel",
    "Group",
    "HcpError",
    "Layout",
    "LocalBatch",
    "Plan",
    "PlanAhead",
    "ProcessGroups",
    "Report",
    "Span",
    "Step",
    "add_arguments",
    "build_process_groups",
    "check_plan",
    "dispatch",
    "eval_cp_context",
    "find_slots",
    "gather_lengths",
    "loopback",
    "lower_bound",
    "plan",
]

__version__ = "0.1.0"
