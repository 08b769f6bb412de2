"""Metrics of an evaluation, the same under every layout."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hcp._validate import expect_groups
from hcp.errors import HcpError
from hcp.exchange.gather import all_gather_object, rank_in_messages
from hcp.groups.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True)
class Metric:
    """A sum over all ranks, and the count to divide it by."""

    total: float
    count: float
    name: str = field(default="", compare=False)

    @property
    def mean(self) -> float:
        """total / count; NaN, with a warning that names the metric, if nothing was counted."""
        if self.count:
            return self.total / self.count
        warnings.warn(
            f"the metric {self.name!r} has a count of 0 on all ranks together, expected more: its "
            "mean is NaN; where it is a loss, every token is masked (labels of -100, a loss_mask "
            "of 0), or there was no sample",
            RuntimeWarning,
            stacklevel=2,
        )
        return math.nan


class Metrics:
    """Sums and counts of named metrics of one evaluation, in float64. They are reduced over ranks
    once, so that the result does not depend on the layout.

    Every token counts once: each rank adds the tokens that it computed, and each rank of a CP group
    its own part. Give each validation set a name of its own. Every rank adds the same names, with a
    sum and a count of 0 if it has no value. A name that one rank lacks is an error. In a pipeline
    only the stage that computes losses adds.
    """

    def __init__(self, eval_pgs: ProcessGroups) -> None:
        """Begin with nothing added.

        Args:
            eval_pgs: the process groups of the layout under which the model is evaluated.
        """
        expect_groups(eval_pgs, "eval_pgs")
        self._groups = eval_pgs
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add values with their weights.

        Args:
            name: of the metric, the same on every rank.
            values: any shape.
            mask: the weights, of the same shape. A value of weight 0 does not count, even if it is
                not finite. None: all count.
        """
        weights = torch.ones_like(values) if mask is None else mask
        if values.shape != weights.shape:
            raise ValueError(
                f"values have shape {tuple(values.shape)}, mask {tuple(weights.shape)}, expected "
                "the same"
            )
        wide, weights = values.detach().double(), weights.detach().double()
        masked = torch.where(weights == 0, 0.0, wide * weights)
        self.add_sum(name, masked.sum(), weights.sum())

    def add_sum(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add a sum and a count that a loss function has made, such as Megatron's [sum, tokens].

        Args:
            name: of the metric, the same on every rank.
            total: the sum of this rank's values.
            count: the sum of their weights.
        """
        pair = [
            torch.as_tensor(x, dtype=torch.float64).detach().reshape(()) for x in (total, count)
        ]
        sums = self._sums.setdefault(name, [])
        sums.append(torch.stack([x.to(pair[0].device) for x in pair]))
        if len(sums) >= 1024:
            sums[:] = [torch.stack(sums).sum(0)]

    def reduce(self) -> dict[str, Metric]:
        """Return the totals of all ranks. Every rank of every pipeline stage calls it.

        Raises HcpError on all of them if a rank added something that is not finite, which the mean
        would hide, or if one lacks a name that another added.
        """
        groups = self._groups
        own = {name: torch.stack(sums).sum(0).tolist() for name, sums in self._sums.items()}
        payloads = groups.transport.all_gather_bytes(json.dumps(own).encode(), "Metrics.reduce")
        by_rank = [json.loads(payload) for payload in payloads]
        problem = _problem_of(by_rank)
        if problem:
            return self._share_with_stages({}, problem)
        names = sorted({name for sums in by_rank for name in sums})
        totals = {name: _summed(name, [sums[name] for sums in by_rank]) for name in names}
        return self._share_with_stages(totals, None)

    def _share_with_stages(
        self, totals: dict[str, Metric], problem: str | None
    ) -> dict[str, Metric]:
        groups, rank = self._groups, rank_in_messages(self._groups.transport)
        gathered = [(totals, problem)]
        if "pp" in groups.roles and groups.size("pp") > 1:
            gathered = all_gather_object((totals, problem), groups.pp)
        for _, found in gathered:
            if found:
                raise HcpError(f"rank {rank}: {found}", code="metrics-differ")
        named = [stage for stage, _ in gathered if stage]
        if len(named) > 1:
            raise HcpError(
                f"rank {rank}: {len(named)} pipeline stages added metrics, expected "
                "only the one that computes losses",
                code="metrics-differ",
            )
        return named[0] if named else {}


def _summed(name: str, pairs: Sequence[Sequence[float]]) -> Metric:
    """Correctly rounded, so that the order of ranks does not show."""
    totals, counts = zip(*pairs, strict=True)
    return Metric(math.fsum(totals), math.fsum(counts), name)


def _problem_of(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> str | None:
    """Return the reason why totals would be wrong, or None. `by_rank`: sums of the dp_cp ranks."""
    for rank, sums in enumerate(by_rank):
        for name, pair in sums.items():
            if not all(map(math.isfinite, pair)):
                return f"rank {rank} of dp_cp added {pair} to {name!r}, expected finite"
        for other, theirs in enumerate(by_rank):
            missing = sorted(theirs.keys() - sums.keys())
            if missing:
                return (
                    f"rank {other} of dp_cp added {missing} and rank {rank} did not, expected the "
                    "same names on every rank: add_sum(name, 0.0, 0) where one has nothing of it"
                )
    return None
