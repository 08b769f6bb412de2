"""Evaluate each sample exactly once, under any layout.

plan = hcp.EvalPlan(len(dataset), eval_pgs, micro_batch_size=2)
metrics = hcp.Metrics(eval_pgs)
for batch in plan.batches(dataset):
    losses, mask = forward(batch.samples)
    metrics.add("lm loss", losses, mask * batch.weights)
plan.finish()
print(metrics.reduce()["lm loss"].mean)
"""

from __future__ import annotations

import contextlib
import logging
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hcp._digest import digest_of
from hcp._ranges import range_of
from hcp._validate import expect_names, expect_size, plain
from hcp._words import Sync
from hcp.errors import HcpError
from hcp.evaluation.loading import Load, loader_of, sample_at
from hcp.evaluation.seen import Seen
from hcp.groups.process_groups import ProcessGroups
from hcp.planning.cost import CostModel
from hcp.planning.mask import MasksFor
from hcp.planning.memory import MemoryModel
from hcp.planning.plan import Plan, plan
from hcp.step.ahead import ReadItems
from hcp.step.dispatch import Step, StepTransport
from hcp.step.fields import Rules
from hcp.step.handler import ContextParallelHandler
from hcp.step.planner import StepPlanner

_log = logging.getLogger("hcp")
_REFUSED = b"refused: "


class _Batch(NamedTuple):
    samples: list[Any]
    weights: Tensor
    indices: tuple[int, ...]


class EvalBatch(_Batch):
    """One micro-batch of this data-parallel rank: a named tuple of `samples`, `weights` (float64
    (samples,): 1 for a sample that counts, 0 for a filler), and `indices` of the dataset, fillers
    included.

    It records which of its items were read: a batch whose weights nobody reads was not evaluated.
    """

    read: set[str]
    """The names of those among `samples` and `weights` that were read."""

    def __new__(cls, *fields: Any, **named: Any) -> EvalBatch:
        batch = super().__new__(cls, *fields, **named)
        batch.read = set()
        return batch

    @classmethod
    def _make(cls, fields: Iterable[Any]) -> EvalBatch:  # type: ignore[override]
        return cls(*fields)

    @property
    def samples(self) -> list[Any]:
        return self[0]

    @property
    def weights(self) -> Tensor:
        return self[1]

    def __getitem__(self, at: Any) -> Any:
        names = self._fields[at]
        self.read.update((names,) if isinstance(names, str) else names)
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))


class EvalPlan:
    """The samples that each rank evaluates: every sample exactly once, with the same number of
    micro-batches on every rank. A plan is for one evaluation; the next one has its own.

    Micro-batch k of data-parallel rank r has the samples that start at (k * dp + r) *
    micro_batch_size. Past the last sample come fillers: samples of the dataset again, with weight
    0.
    """

    def __init__(
        self,
        samples: int | Sequence[int],
        eval_pgs: ProcessGroups,
        *,
        micro_batch_size: int = 1,
        max_tokens_per_rank: int | None = None,
        global_batch_size: int | None = None,
        degree: int | None = None,
        min_degree: int | None = None,
        ranks_per_node: int | None = None,
        cost: CostModel | None = None,
        sync: Sync | None = None,
        masks: MasksFor | None = None,
        memory: MemoryModel | None = None,
    ) -> None:
        """Plan an evaluation. Without lengths, `batches` gives the samples out by data parallelism.
        With lengths, `dispatch` spreads global batches over dp_cp by the dynamic scheduler.

        Args:
            samples: their number, or the length of each in tokens.
            eval_pgs: the process groups of the eval layout.
            micro_batch_size: samples of a rank in a micro-batch of `batches`.
            max_tokens_per_rank: most rows of a rank in a micro-batch; required with lengths, as all
                arguments below need lengths.
            global_batch_size: samples of one global batch of `dispatch`; None: all.
            degree: one CP degree for all samples; None: the plan chooses.
            min_degree: fewest ranks of a sample.
            ranks_per_node: ranks of a node, as of `hcp.plan`.
            cost: the prices, as of `hcp.plan`.
            sync: when ranks wait for each other, as of `hcp.plan`.
            masks: gives the masks of sequences of these lengths.
            memory: a limit of bytes, as of `hcp.plan`.

        Raises:
            ValueError: a number out of its range, or an argument of `dispatch` without lengths.
        """
        self._masks = masks
        samples = plain(samples)
        self.lengths = None if isinstance(samples, int) else tuple(samples)
        count = samples if isinstance(samples, int) else len(samples)
        self.num_samples = expect_size("num_samples", count, least=0)
        self.micro_batch_size = expect_size("micro_batch_size", micro_batch_size)
        if self.lengths is not None and max_tokens_per_rank is None:
            raise ValueError("max_tokens_per_rank is missing, expected it together with lengths")
        of_dispatch = {
            "max_tokens_per_rank": max_tokens_per_rank,
            "global_batch_size": global_batch_size,
            "degree": degree,
            "min_degree": min_degree,
            "ranks_per_node": ranks_per_node,
        }
        for name, value in of_dispatch.items():
            if value is not None:
                expect_size(name, value)
                self._expect_lengths(name)
        for name, given in (("cost", cost), ("sync", sync), ("memory", memory)):
            if given is not None:
                self._expect_lengths(name)
        self.groups = eval_pgs
        self.global_batch_size = global_batch_size or max(1, self.num_samples)
        self._max_tokens = max_tokens_per_rank
        self._min_degree, self._max_degree = degree or min_degree or 1, degree
        self._node, self._cost, self._sync = ranks_per_node, cost, sync or "step"
        self._memory = memory
        self._next = 0
        self._seen = Seen()
        self._unweighted = Seen()
        """Samples of batches whose weights nobody read."""
        self._skipped = 0
        self._finished = False

    def _expect_lengths(self, name: str) -> None:
        if self.lengths is None:
            raise ValueError(f"{name} is given without lengths, expected it together with them")

    # ---- data parallel ----

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of each rank, for a pipeline's schedule."""
        stride = self.micro_batch_size * self.groups.size("dp")
        return -(-self.num_samples // stride)

    def indices(self, micro_batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Give the samples of one micro-batch of this rank.

        Args:
            micro_batch: its number, from 0.

        Returns:
            The indices of the samples, and the weight of each: 0 for a filler.

        Raises:
            ValueError: there is no micro-batch of this number.
        """
        if not 0 <= micro_batch < self.num_micro_batches:
            raise ValueError(
                f"micro_batch is {micro_batch}, expected one of {self.num_micro_batches}"
            )
        size = self.micro_batch_size
        first = (micro_batch * self.groups.size("dp") + self.groups.rank("dp")) * size
        wanted = range(first, first + size)
        weights = tuple(int(i < self.num_samples) for i in wanted)
        return tuple(i % self.num_samples for i in wanted), weights

    def batches(
        self, dataset: Any, *, check_siblings: bool = True, device: torch.device | str = "cpu"
    ) -> Iterator[EvalBatch]:
        """Yield this rank's micro-batches. A plan that was resumed yields those that are left.

        All ranks of dp_cp iterate together while siblings are checked. If a dataset ends early,
        fillers follow, so that nobody waits for this rank, and `finish` raises on all ranks.

        Args:
            dataset: map-style (`dataset[i]`), or any iterable that gives the same samples in the
                same order on every rank.
            check_siblings: the ranks of a CP group compare a hash of what they loaded (tensors,
                arrays, bytes, numbers, text, and lists, dictionaries and dataclasses of them).
            device: where the weights lie.

        Returns:
            An iterator over the micro-batches.

        Raises:
            HcpError: siblings loaded different bytes, or the dataset of another rank raised an
                error. An error of this rank's own dataset is raised unchanged.
            ValueError: the plan was made with lengths.
        """
        if self.lengths is not None:
            raise ValueError("the plan was made with lengths, expected none: or use dispatch()")
        self._check_not_finished()
        load = loader_of(dataset, self.num_samples)
        filler: list[Any] = []
        while self._next < self.num_micro_batches:
            indices, weights = self.indices(self._next)
            loaded = self._load(load, indices, filler, check_siblings)
            kept = [int(w and ok) for w, (_, ok) in zip(weights, loaded, strict=True)]
            samples = [sample for sample, _ in loaded]
            if check_siblings:
                self._check_siblings(samples, indices)
            weights_here = torch.tensor(kept, dtype=torch.float64, device=device)
            batch = EvalBatch(samples, weights_here, indices)
            with range_of("hcp: evaluate"):
                yield batch
            # Only what came back for more was evaluated.
            self._note(batch, [i for i, k in zip(indices, kept, strict=True) if k])
            self._next += 1

    def _load(
        self, load: Load, indices: Sequence[int], filler: list[Any], tell: bool
    ) -> list[tuple[Any, bool]]:
        """Return the samples, and whether each is the one that was asked for."""
        try:
            return [sample_at(load, i, filler) for i in indices]
        except Exception as error:
            if tell:  # the others, which wait for this rank's hash
                self.groups.transport.all_gather_bytes(
                    _REFUSED + repr(error).encode(), "hcp.EvalPlan"
                )
            raise

    def _note(self, batch: EvalBatch, counted: Sequence[int]) -> None:
        if "weights" in batch.read:
            self._seen.add(counted)
            return
        self._skipped += len(counted)
        if "samples" in batch.read:
            self._unweighted.add(counted)

    def _check_siblings(self, samples: Sequence[Any], indices: Sequence[int]) -> None:
        groups = self.groups
        digests = groups.transport.all_gather_bytes(digest_of(samples), "hcp.EvalPlan")
        for rank, other in enumerate(digests):
            if other.startswith(_REFUSED):
                raise HcpError(
                    f"rank {dist.get_rank()}: rank {rank} of dp_cp could not load its samples: "
                    f"{other.removeprefix(_REFUSED).decode()}",
                    code="rank-failed",
                )
        domain, own = groups.ranks("dp_cp"), digests[groups.transport.rank]
        for rank in groups.ranks("cp"):
            if digests[domain.index(rank)] != own:
                raise HcpError(
                    f"rank {dist.get_rank()}: ranks of one CP group loaded different bytes for the "
                    f"samples {list(indices)}: rank {rank} has others; expected each to load by "
                    "its data-parallel rank in the eval layout, without randomness of its own",
                    code="ranks-differ",
                )

    # ---- by the dynamic scheduler ----

    def plan(self, batch: int) -> Plan:
        """Plan one global batch of `dispatch`.

        Args:
            batch: its number, from 0.

        Returns:
            The plan.

        Raises:
            ValueError: the evaluation was planned without lengths, or has no such batch.
        """
        if self.lengths is None or self._max_tokens is None:
            raise ValueError("the plan was made without lengths, expected them: or use batches()")
        batches = -(-self.num_samples // self.global_batch_size)
        if not 0 <= batch < batches:
            raise ValueError(f"batch is {batch}, expected one of {batches}")
        return self._plan_of([self.lengths[i] for i in self._global_batch(batch)])

    def _plan_of(self, lengths: Sequence[int]) -> Plan:
        assert self._max_tokens is not None
        return plan(
            lengths,
            masks=self._masks(lengths) if self._masks else None,
            ranks=self.groups.size("dp_cp"),
            max_tokens_per_rank=self._max_tokens,
            min_degree=self._min_degree,
            max_degree=self._max_degree,
            ranks_per_node=self._node,
            cost=self._cost,
            sync=self._sync,
            memory=self._memory,
        )

    def dispatch(
        self,
        dataset: Any,
        *,
        fields: Rules | None = None,
        plan_ahead: int = 1,
        handler_cls: type[ContextParallelHandler] = ContextParallelHandler,
        **options: Any,
    ) -> Iterator[Step]:
        """Yield the global batches as steps of `hcp.dispatch`. One rank loads each sample, and its
        rows are computed once.

        Args:
            dataset: map-style, of dictionaries of tensors.
            fields: the rules of fields, as of `hcp.dispatch`.
            plan_ahead: steps that are planned and dispatched while one before them is computed.
                Every rank of the job then takes the first step, and with 0 every rank of dp_cp.
            handler_cls: the class of handlers, as of `hcp.dispatch`.
            **options: all else that `hcp.dispatch` takes.

        Returns:
            An iterator over the steps.

        Raises:
            ValueError: the plan was made without lengths.
        """
        if self.lengths is None:
            raise ValueError("the plan was made without lengths, expected them: or use batches()")
        self._check_not_finished()
        expect_size("plan_ahead", plan_ahead, "steps", least=0)
        options |= {"fields": fields, "handler_cls": handler_cls}
        planner = StepPlanner(self._plan_of, lambda: options, plan_ahead=plan_ahead)
        batches = range(self._next, -(-self.num_samples // self.global_batch_size))
        shares = ((k, ReadItems(dataset[i] for i in self._own(k))) for k in batches)

        def make(share: tuple[int, ReadItems[Any]], step_transport: StepTransport) -> Step:
            return self._step(*share, step_transport, planner)

        with contextlib.closing(planner.steps(shares, self.groups, make)) as steps:
            for step in steps:
                taken = _Taken(step)
                with range_of("hcp: evaluate"):
                    yield taken
                own = self._own(self._next)
                if taken.taken == len(taken):
                    self._seen.add(own)
                else:
                    self._skipped += len(own)
                self._next += 1

    def _step(
        self, batch: int, read: ReadItems[Any], step_transport: StepTransport, planner: StepPlanner
    ) -> Step:
        """Plan and dispatch this rank's samples of a global batch, on any thread."""
        assert self.lengths is not None
        made, ranks, wanted = self.plan(batch), self.groups.size("dp_cp"), self._global_batch(batch)
        lengths, _, samples = planner.gather(read, step_transport)
        sources = [(i - wanted.start) % ranks for i in wanted]
        by_rank = sorted(wanted, key=lambda i: sources[i - wanted.start])
        planned = [self.lengths[i] for i in by_rank]
        if lengths != planned:
            at = next(k for k, n in enumerate(planned) if lengths[k : k + 1] != [n])
            raise HcpError(
                f"rank {dist.get_rank()}: sample {by_rank[at]} has "
                f"{lengths[at] if at < len(lengths) else 'no'} tokens, planned {planned[at]}",
                code="length-changed",
            )
        return planner.dispatch(made, samples, sources, self.groups, step_transport=step_transport)

    def _own(self, batch: int) -> range:
        """The samples of a global batch that this rank loads."""
        return self._global_batch(batch)[self.groups.rank("dp_cp") :: self.groups.size("dp_cp")]

    def _global_batch(self, batch: int) -> range:
        first = batch * self.global_batch_size
        return range(first, min(first + self.global_batch_size, self.num_samples))

    def _check_not_finished(self) -> None:
        if self._finished:
            raise HcpError(
                f"the plan has been finished, all {self.num_samples} samples are evaluated, "
                "expected a plan with some left: make an EvalPlan, and Metrics, for each "
                "evaluation",
                code="evaluation-finished",
            )

    # ---- the end, and a pause ----

    @property
    def observed(self) -> int:
        """The number of samples that this rank has evaluated."""
        return self._seen.count

    def finish(self) -> int:
        """Check the evaluation, and return how many samples all ranks evaluated together.

        Every rank of dp_cp calls it. It raises HcpError on all of them unless each sample was
        evaluated exactly once, by all ranks of its CP group. A batch was evaluated if the loop has
        read its weights and has asked for the next batch. A step of `dispatch` was evaluated if all
        of its micro-batches were taken. A pipeline's stage that computes no losses need only read
        the samples.
        """
        groups = self.groups
        records = [
            Seen.pair_from_bytes(data)
            for data in groups.transport.all_gather_bytes(self._record(), "EvalPlan.finish")
        ]
        seen = [weighted for weighted, _ in records]
        if not any(record.count for record in seen) and _stages(groups) > 1:
            seen = [unweighted for _, unweighted in records]  # a stage that computes no losses
        totals, expected = Seen(), Seen()
        for record in seen:
            totals.merge(record)
        expected.add(range(self.num_samples))
        copies = 1 if self.lengths is not None else groups.size("cp")
        if totals.to_bytes() == expected.times(copies).to_bytes():
            self._finished = True
            return self.num_samples
        counts = ", ".join(f"rank {r} {record.count}" for r, record in enumerate(seen))
        skipped = (
            f"; {self._skipped} samples were handed out here in batches whose weights, or steps "
            "whose micro-batches, were not read: a loop that skips them by `continue` does this"
            if self._skipped
            else ""
        )
        raise HcpError(
            f"rank {dist.get_rank()}: the evaluation observed {totals.count / copies:g} samples, "
            f"expected each of {self.num_samples} exactly once ({counts} of dp_cp, CP groups of "
            f"{groups.size('cp')}); a dataset that ends early or a loop that was left early does "
            f"this{skipped}",
            code="samples-missed",
        )

    def _record(self) -> bytes:
        return self._seen.to_bytes() + self._unweighted.to_bytes()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of this rank, for a job that stops in the middle and resumes in the
        same layout."""
        return {
            "next": self._next,
            "seen": self._record().hex(),
            "made_for": self._made_for(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict` was taken, on the same rank. A state of an older version does
        not name its rank; it is taken, with a warning.

        Args:
            state: what `state_dict` gave.

        Raises:
            ValueError: the state of another plan or rank.
        """
        expect_names("state", state, ("next", "seen", "made_for"))
        own = self._made_for()
        if "rank" not in state["made_for"]:
            _log.warning(
                "hcp: the state of the evaluation does not say its rank, as one of an older "
                "version: it is taken as that of rank %d of dp_cp",
                own.pop("rank"),
            )
        if state["made_for"] != own:
            raise ValueError(
                f"the state is of an evaluation of {state['made_for']}, expected {own}: each rank "
                "goes on with its own"
            )
        self._next = expect_size("state.next", state["next"], least=0)
        self._finished = False
        self._seen, self._unweighted = Seen.pair_from_bytes(bytes.fromhex(state["seen"]))

    def _made_for(self) -> dict[str, int]:
        return {
            "num_samples": self.num_samples,
            "micro_batch_size": self.micro_batch_size,
            "global_batch_size": self.global_batch_size,
            "lengths": 0 if self.lengths is None else _checksum(self.lengths),
            "dp": self.groups.size("dp"),
            "cp": self.groups.size("cp"),
            "rank": self.groups.rank("dp_cp"),
        }


class _Taken(Step):
    """A step that counts how many of its micro-batches were taken."""

    def __init__(self, step: Step) -> None:
        self._pairs = list(step)
        super().__init__(step.plan, self._pairs, step.loss_tokens, step._sources, step.rank)
        self.planning = step.planning
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        for k, pair in enumerate(self._pairs):
            self.taken = max(self.taken, k + 1)
            yield pair


def _stages(groups: ProcessGroups) -> int:
    return groups.size("pp") if "pp" in groups.roles else 1


def _checksum(lengths: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(lengths)}q", *lengths))
