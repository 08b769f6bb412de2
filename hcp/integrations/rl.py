"""RL trainers, whose driver plans and whose workers compute: verl, NeMo-RL.

sent = plan_in_driver(lengths, sources, ranks, config)       # plain data, in the driver
step = planned_step(sent, samples, groups, config)           # in every worker
trees, samples, fields = rollout_trees(samples)              # before, where answers share a prompt
log_probs = step.combine(log_probs_of(cp, local) for cp, local in step)  # of its own samples
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hcp._validate import expect_sizes
from hcp._versions import has_seam
from hcp.groups.process_groups import ProcessGroups
from hcp.integrations.megatron.lm.dev import sample_id_groups
from hcp.planning.cost import CostModel
from hcp.planning.mask import MasksLike
from hcp.planning.plan import Plan
from hcp.step.config import Config
from hcp.step.dispatch import Step
from hcp.step.fields import Given, Payload
from hcp.step.planner import StepPlanner
from hcp.step.trees import Trees, prefix_trees

__all__ = ["plan_in_driver", "plan_verl", "planned_step", "rollout_trees", "sequence_weights"]

VERL_SCHEDULES = "verl.utils.dynamic_cp_scheduler"
VERL_SEAM = "get_megatron_dynamic_cp_scheduler_cls"


def plan_in_driver(
    lengths: Sequence[int],
    sources: Sequence[int],
    ranks: int,
    config: Config,
    cost: CostModel | None = None,
    *,
    masks: MasksLike | None = None,
    **limits: Any,
) -> dict[str, Any]:
    """Plan a batch and return plain data for all workers: the plan and the sources.

    `lengths`: tokens of each sample, in the order of the ranks that get them. `sources`: the rank
    that gets each sample. `cost`, `masks` and `limits`: see `Config.plan`. Sharded parameters need
    `sync="micro_batch"`. It needs no process group, so that a process without one can call it.
    Raises ValueError unless the sources are ranks that ascend: samples are numbered by rank.
    """
    given = None if masks is None else lambda _: masks
    plan = StepPlanner.of(config, ranks, cost=cost, masks=given, **limits).plan(list(lengths))
    numbers = list(expect_sizes("sources", sources, least=0))
    if (
        numbers != sorted(numbers)
        or len(numbers) != len(plan.lengths)
        or max(numbers, default=0) >= ranks
    ):
        raise ValueError(
            f"sources is {numbers}, expected {len(plan.lengths)} ascending ranks, from 0 to "
            f"{ranks - 1}: the rank of each sample, those of rank 0 first"
        )
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
    they got. `options`: see `hcp.dispatch`; they come before those of `config`.
    """
    if not isinstance(sent, dict) or not {"plan", "sources"} <= sent.keys():
        said = sorted(sent) if isinstance(sent, dict) else type(sent).__name__
        raise ValueError(f"sent is {said}, expected what plan_in_driver returns: plan, sources")
    plan = Plan.from_dict(sent["plan"])
    planner = StepPlanner.of(config, groups.size("dp_cp"))
    return planner.dispatch(plan, samples, sent["sources"], groups, **options)


def sequence_weights(loss_mask: Tensor) -> Tensor:
    """Return the weights with which `cp.loss` is the mean over sequences of each one's mean over
    its loss tokens, whatever the plan.

    `loss_mask` (tokens,): of one whole sample, before it is dispatched. Dispatch the weights as its
    field "loss_mask". They sum to 1, or to 0 in a sequence without loss tokens, which does not
    count. Raises ValueError for another shape, and for values below 0 or NaN.
    """
    wide = torch.as_tensor(loss_mask).to(torch.float64)
    if wide.dim() != 1 or not bool((wide >= 0).all()):
        raise ValueError(
            f"loss_mask is of shape {tuple(wide.shape)}, expected (tokens,) of one sample, without "
            "padding, and values >= 0"
        )
    return wide / wide.sum().where(wide.sum() > 0, torch.ones_like(wide.sum()))


# ---- verl's own dynamic context parallelism ------------------------------------------------------


class VerlScheduler:
    """hcp's planner behind the interface of the Megatron scheduler that verl asks."""

    def __init__(
        self,
        *,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        min_cp_size: int = 1,
        microbatch_group_size_per_vp_stage: int | None = None,
    ) -> None:
        self.limit, self.ranks, self.least = (
            max_seqlen_per_dp_cp_rank,
            cp_size * dp_size,
            min_cp_size,
        )
        self.micro_batch_group = microbatch_group_size_per_vp_stage

    def get_groups_and_subsamples(
        self, samples: Sequence[tuple[int, int]]
    ) -> list[list[list[int]]]:
        """Plan samples, each (id, tokens): for each micro-batch, the ids of each rank."""
        return sample_id_groups(
            samples,
            self.ranks,
            self.limit,
            min_degree=self.least,
            micro_batch_group=self.micro_batch_group,
        )


def plan_verl() -> None:
    """Let hcp plan the micro-batches of verl's `actor.megatron.dynamic_context_parallel`.

    Call it in every worker, before it trains. Raises ImportError for a verl without it."""
    seam = f"{VERL_SCHEDULES}:{VERL_SEAM}"
    if not has_seam(seam):
        raise ImportError(
            f"verl has no {seam}, expected a verl of August 2026 or later, whose Megatron engine "
            "has dynamic_context_parallel; with an older one plan in the driver: plan_in_driver"
        )
    setattr(importlib.import_module(VERL_SCHEDULES), VERL_SEAM, lambda: VerlScheduler)


def rollout_trees(
    samples: Sequence[Given],
    *,
    tokens: str = "input_ids",
    summed: Sequence[str] = ("loss_mask",),
    first: Sequence[str] = (),
    **options: Any,
) -> tuple[Trees, list[dict[str, Any]], dict[str, str | Payload]]:
    """Make prefix trees of rollouts. Return them, a sample of each in place of those of the
    rollouts, and the rules of the samples' fields, for `fields=` of `planned_step`.

    `samples`: of the rollouts, whole, with the same fields. `tokens`: the field of their tokens.
    `summed`: fields (tokens, ...) of which a row gets the sum over the rollouts through it: weights
    of losses, and their products with advantages. Of other fields (tokens, ...) a row gets the
    value of the first rollout that has a weight there, else of the first one: labels, old
    log-probabilities. `first`: those of them whose values may differ where several rollouts have a
    weight, so that one stands for all: log-probabilities of an engine that rounds. A number of each
    rollout becomes a payload (rollouts,), a string or a tuple of each one value of Python's.
    `options`: of `hcp.prefix_trees`.

    Plan `trees.lengths` with `masks=trees.masks`. `trees.by_rollout` gives results back to the
    rollouts, in the order of the samples. Raises ValueError for samples of different fields, for
    names of fields that they lack, and for values that differ between rollouts which have a weight
    in the same row: advantages, whose products with weights are `summed`.
    """
    _expect_same_fields(samples)
    rows: list[Any] = [sample[tokens] for sample in samples]
    trees = prefix_trees(rows, **options)
    made: list[dict[str, Any]] = [*trees.fields()]
    rules: dict[str, str | Payload] = dict(Trees.RULES)
    names = list(samples[0]) if samples else []
    for name in (*summed, *first):
        if samples and name not in names and name != "loss_mask":
            raise ValueError(f"the samples have no field {name!r}, expected one of {names}")
    weights = [[sample[name] for sample in samples] for name in summed if name in names]
    chosen = _Chosen(trees, weights)
    for name in names:
        values: list[Any] = [sample[name] for sample in samples]
        if isinstance(values[0], Tensor) and values[0].dim():
            columns: list[Any] = (
                trees.summed(values)
                if name in summed
                else chosen.of(name, values, may_differ=name in first)
            )
        else:
            columns = trees.by_tree(values)
            rules[name] = Payload("whole") if isinstance(columns[0], Tensor) else "value"
        for sample, column in zip(made, columns, strict=True):
            sample[name] = column
    return trees, made, rules


class _Chosen:
    """Of the rollouts through a row, the one that says its values: the first that has a weight
    there. Elsewhere, as in a history without a loss, others may have other labels."""

    def __init__(self, trees: Trees, weights: Sequence[Sequence[Any]]) -> None:
        """`weights`: fields (tokens, ...) of all rollouts. Without any, every row counts."""
        self._trees, rows = trees, sum(trees.lengths)
        places = list(torch.arange(rows).split_with_sizes(trees.lengths)) if rows else []
        self._row = torch.cat([torch.empty(0, dtype=torch.int64), *trees.by_rollout(places)])
        self._counts = torch.full_like(self._row, not weights, dtype=torch.bool)
        for field in weights:
            self._counts |= _any_of(torch.cat(list(field)) != 0)
        tokens = torch.arange(len(self._row))
        late = tokens.where(self._counts, tokens + len(tokens))
        first = torch.full((rows,), 2 * len(tokens))
        self._token = first.scatter_reduce_(0, self._row, late, "amin") % max(1, len(tokens))

    def of(self, name: str, values: Sequence[Tensor], *, may_differ: bool) -> list[Tensor]:
        """Of each tree, (rows, ...)."""
        self._trees.first(values)  # refuses values of other lengths
        joined = torch.cat(list(values))
        rows = joined[self._token.to(joined.device)]
        if not may_differ:
            differs = _any_of(joined != rows[self._row.to(joined.device)])
            others = self._token[self._row] != torch.arange(len(self._row))  # NaN is not itself
            if bool((differs & others & self._counts).any()):
                raise ValueError(
                    f"samples have other {name!r} in rows that they share, and weights in both, "
                    "expected equal ones: a row has one value. Sum the products of weights and "
                    "advantages (summed=), name what may differ by rounding in first=, or leave "
                    "the field out"
                )
        return list(rows.split_with_sizes(self._trees.lengths))


def _any_of(x: Tensor) -> Tensor:
    """(tokens,) on the CPU, of bools (tokens, ...)."""
    return x.flatten(1).any(1).cpu() if x.dim() > 1 else x.cpu()


def _expect_same_fields(samples: Sequence[Given]) -> None:
    for i, sample in enumerate(samples):
        if sample.keys() != samples[0].keys():
            raise ValueError(
                f"samples[{i}] has fields {sorted(sample)}, expected {sorted(samples[0])} as "
                "samples[0]"
            )
