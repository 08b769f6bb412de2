"""Context parallelism that a PyTorch trainer can change at any moment.

    lengths -> plan -> layout -> dispatch -> attention -> combine -> loss
    groups  -> rebind -> evaluate -> restore
"""

from hcp.dispatch import LocalBatch, Step, dispatch, gather_lengths
from hcp.errors import HcpError
from hcp.handler import COMM_TYPES, ContextParallelHandler
from hcp.layout import Layout, Span
from hcp.loopback import loopback
from hcp.plan import CostModel, Group, Plan, plan

__version__ = "0.1.0"
