"""Whether ranks wait for each other inside the layers of a model, by whatever says so."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

from torch import nn

from hcp.groups.process_groups import ProcessGroups
from hcp.planning.plan import Plan

_log = logging.getLogger("hcp")

_EXPERT_RANKS = ("ep_size", "expert_parallel_size", "expert_model_parallel_size")
"""Names that modules, their configurations and trainers' options give to the number of ranks of
experts."""


def waits_in_layers(holder: Any) -> bool:
    """Whether ranks wait for each other in the layers of a model, not only to reduce gradients.

    They do if parameters are sharded by FSDP or DeepSpeed's ZeRO-3, or experts lie on several
    ranks. `holder`: what says so. A model does, once it is sharded; before that an Accelerator,
    torchtitan's parallel dimensions, or a trainer's options; and, of experts, hcp's groups of
    Megatron's. None says nothing.
    """
    if isinstance(holder, nn.Module):
        return _is_sharded(holder) or any(_spreads_experts(module) for module in holder.modules())
    if isinstance(holder, ProcessGroups):
        return _spreads_experts_over(holder)
    return _is_going_to_shard(holder) or _spreads_experts(holder)


def _is_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        return True
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())  # ZeRO-3 marks them


def _is_going_to_shard(trainer: Any) -> bool:
    """Whether an Accelerator, or torchtitan's parallel dimensions, say that FSDP will."""
    kind = str(getattr(trainer, "distributed_type", "")).rpartition(".")[2]
    return kind == "FSDP" or bool(getattr(trainer, "fsdp_enabled", False))


def _spreads_experts(holder: Any) -> bool:
    if getattr(holder, "ep_enabled", False) is True:
        return True
    config = getattr(holder, "config", None)
    holders = (holder, config, getattr(config, "distributed_config", None))
    sizes = (getattr(each, name, None) for each in holders for name in _EXPERT_RANKS)
    return any(isinstance(size, int) and size > 1 for size in sizes)


def _spreads_experts_over(groups: ProcessGroups) -> bool:
    """Whether experts lie on several ranks, by the trainer's groups or Megatron's global ones."""
    group = getattr(groups.source, "ep", None)
    state = sys.modules.get("megatron.core.parallel_state")
    if group is None and state is not None:
        group = state.get_expert_model_parallel_group(check_initialized=False)
    return group is not None and bool(group.size() > 1)


def warn_of_the_barrier(model: nn.Module, plan: Plan) -> None:
    """Warn, once, of plans that are right but slower than they could be: those whose ranks do not
    wait for each other in the layers, for a model whose ranks do."""
    if plan.sync == "step" and plan.ranks > 1 and waits_in_layers(model):
        _warn_of_the_barrier()


@cache
def _warn_of_the_barrier() -> None:
    _log.warning(
        "hcp: the plan lets ranks wait at the end of a step only, and the model's are to wait in "
        "every layer, as its parameters are sharded or its experts lie on several ranks: give "
        'model= to the loader, or say hcp.Config(sync="micro_batch")'
    )
