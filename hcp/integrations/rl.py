"""RL trainers, whose driver plans and whose workers compute: verl, NeMo-RL.

sent = plan_in_driver(lengths, sources, ranks, config)       # plain data, in the driver
step = planned_step(sent, samples, groups, config)           # in every worker
log_probs = step.combine(log_probs_of(cp, local) for cp, local in step)  # of its own samples
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hcp.groups.process_groups import ProcessGroups
from hcp.planning.cost import CostModel
from hcp.planning.plan import Plan
from hcp.step.config import Config
from hcp.step.dispatch import Step, dispatch
from hcp.step.fields import Given

__all__ = ["plan_in_driver", "planned_step", "sequence_weights"]


def plan_in_driver(
    lengths: Sequence[int],
    sources: Sequence[int],
    ranks: int,
    config: Config,
    cost: CostModel | None = None,
    **limits: Any,
) -> dict[str, Any]:
    """Plan a batch and return plain data for all workers: the plan and the sources.

    `lengths`: tokens of each sample, in the order of the ranks that get them. `sources`: the rank
    that gets each sample. `cost` and `limits`: see `Config.plan`. Sharded parameters need
    `sync="micro_batch"`. It needs no process group, so that a process without one can call it.
    Raises ValueError if the sources do not ascend: samples are numbered by rank.
    """
    numbers = [int(source) for source in sources]
    if numbers != sorted(numbers):
        raise ValueError(
            f"sources is {numbers}, expected ascending ranks: list the samples of rank 0 first"
        )
    plan = config.plan(list(lengths), ranks, cost, **limits)
    return {"plan": plan.to_dict(), "sources": numbers}


def planned_step(
    sent: dict[str, Any],
    samples: Sequence[Given],
    groups: ProcessGroups,
    config: Config,
    **options: Any,
) -> Step:
    """Bring the samples that this worker got to where the driver's plan computes them.

    Every rank of the domain calls it. The plan is checked when it arrives, and ranks compare what
    they got. `options`: see `hcp.dispatch`.
    """
    plan = Plan.from_dict(sent["plan"])
    return dispatch(plan, samples, sent["sources"], groups, **config.dispatch_options(), **options)


def sequence_weights(loss_mask: Tensor) -> Tensor:
    """Return the weights with which `cp.loss` is the mean over sequences of each one's mean over
    its loss tokens, whatever the plan.

    `loss_mask` (tokens,): of one whole sample, before it is dispatched. Dispatch the weights as its
    field "loss_mask". They sum to 1, or to 0 in a sequence without loss tokens, which does not
    count.
    """
    wide = loss_mask.to(torch.float64)
    return wide / wide.sum().where(wide.sum() > 0, torch.ones_like(wide.sum()))
