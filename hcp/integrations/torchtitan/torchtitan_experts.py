"""torchtitan's experts under plans: rows that stand in are not counted for load balancing.

T rows of a micro-batch, t of them on this tensor-parallel rank, K experts of a row, E experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import MoE


class StandIns:
    """Takes rows that belong to no document out of the counts by which torchtitan balances its
    experts without a loss (https://arxiv.org/abs/2408.15664), so that the counts do not depend on
    the plan."""

    def __init__(self, model: nn.Module, tp_rank: int) -> None:
        """Watch the routers of a model."""
        self.tp_rank = tp_rank
        self.rows = torch.empty(0)
        """float32 (T,): 1 for a row that stands in, of the micro-batch that is computed."""
        for module in model.modules():
            if isinstance(module, MoE) and module.load_balance_coeff is not None:
                module.router.register_forward_hook(partial(self._uncount, module))

    @torch.no_grad()
    def _uncount(self, moe: MoE, router: nn.Module, given: Any, chosen: Any) -> None:
        if not moe.training:
            return
        experts = _local(chosen[1])[0]  # (t, K)
        shared = len(experts) == len(self.rows)  # each tensor-parallel rank has all rows, or a part
        first = 0 if shared else self.tp_rank * len(experts)
        rows = self.rows[first : first + len(experts)]
        counts = _local(moe.tokens_per_expert_E)  # (E,)
        each = -rows.unsqueeze(1).expand_as(experts)
        counts.index_add_(0, experts.flatten(), each.flatten().to(counts.dtype))


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
