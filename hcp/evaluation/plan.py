"""Evaluate each sample exactly once, whatever the layout, and report one number.

plan = hcp.EvalPlan(len(dataset), eval_pgs, micro_batch_size=2)
metrics = hcp.Metrics(eval_pgs)
for batch in plan.batches(dataset):
    losses, mask = forward(batch.samples)
    metrics.add("lm loss", losses, mask * batch.weights)
plan.finish()
print(metrics.reduce()["lm loss"].mean)
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from hcp._digest import digest_of
from hcp._validate import expect_names, expect_size, plain
from hcp.errors import HcpError
from hcp.exchange.gather import all_gather_object
from hcp.groups.groups import ProcessGroups
from hcp.planning.cost import CostModel
from hcp.planning.plan import Plan, plan
from hcp.step.dispatch import Step, dispatch, gather_lengths


class _Batch(NamedTuple):
    samples: list[Any]
    weights: Tensor
    indices: tuple[int, ...]


class EvalBatch(_Batch):
    """One micro-batch of this data-parallel rank: a named tuple of `samples`, `weights` (float64
    (samples,): 1 for a sample that counts, 0 for a filler), and `indices` of the dataset, fillers
    included.

    It notes what was read of it: a batch whose weights nobody reads was not evaluated.
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
    """Which rank evaluates which samples: each exactly once, with the same number of micro-batches
    on every rank. Of one evaluation: the next one has a plan of its own.

    Micro-batch k of data-parallel rank r has the samples that start at (k * dp + r) *
    micro_batch_size. Past the last sample there are fillers: samples of the dataset again, with
    weight 0.
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
        sync: str | None = None,
    ) -> None:
        """`samples`: how many, or the length of each in tokens. With lengths, `dispatch` spreads
        global batches of `global_batch_size` samples over dp_cp by the dynamic scheduler, at most
        `max_tokens_per_rank` rows to a rank, with one CP `degree` for all if it is given, and by
        `min_degree`, `ranks_per_node`, `cost` and `sync` as `hcp.plan` takes them; without,
        `batches` uses data parallelism."""
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
        for name, given in (("cost", cost), ("sync", sync)):
            if given is not None:
                self._expect_lengths(name)
        self.groups = eval_pgs
        self.global_batch_size = global_batch_size or max(1, self.num_samples)
        self._max_tokens = max_tokens_per_rank
        self._min_degree, self._max_degree = degree or min_degree or 1, degree
        self._node, self._cost, self._sync = ranks_per_node, cost, sync or "step"
        self._next = 0
        self._seen = _Seen()
        self._unweighted = _Seen()
        """Samples of batches of which samples and no weights were read."""
        self._skipped = 0
        self._finished = False

    def _expect_lengths(self, name: str) -> None:
        if self.lengths is None:
            raise ValueError(f"{name} is given without lengths, expected it together with them")

    # ---- data parallel ----

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of every rank, for a pipeline's schedule."""
        stride = self.micro_batch_size * self.groups.size("dp")
        return -(-self.num_samples // stride)

    def indices(self, micro_batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sample indices and weights of one micro-batch of this rank."""
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
        """This rank's micro-batches, those that are left of a plan that was resumed.

        `dataset`: map-style (`dataset[i]`), or any iterable that gives the same samples in the same
        order on every rank. A dataset that ends early is continued by fillers, so that nobody
        waits for this rank, and `finish` raises everywhere. What it raises for a sample that it has
        goes on, an IndexError too, and is an HcpError on the others.

        `check_siblings`: the ranks of a CP group compare a hash of what they loaded (tensors,
        arrays, bytes, numbers, text, and lists, dictionaries and dataclasses of them), and raise
        HcpError where it differs; all ranks of dp_cp iterate together.
        """
        if self.lengths is not None:
            raise ValueError("the plan was made with lengths, expected none: or use dispatch()")
        self._check_not_finished()
        load = _loader(dataset, self.num_samples)
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
            yield batch
            # Only what came back for more was evaluated.
            self._note(batch, [i for i, k in zip(indices, kept, strict=True) if k])
            self._next += 1

    def _load(
        self, load: _Load, indices: Sequence[int], filler: list[Any], tell: bool
    ) -> list[tuple[Any, bool]]:
        """The samples, and whether each is the one that was asked for."""
        try:
            return [_sample(load, i, filler) for i in indices]
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
                    f"{other.removeprefix(_REFUSED).decode()}"
                )
        domain, own = groups.ranks("dp_cp"), digests[groups.transport.rank]
        for rank in groups.ranks("cp"):
            if digests[domain.index(rank)] != own:
                raise HcpError(
                    f"rank {dist.get_rank()}: ranks of one CP group loaded different bytes for the "
                    f"samples {list(indices)}: rank {rank} has others; expected each to load by "
                    "its data-parallel rank in the eval layout, without randomness of its own"
                )

    # ---- by the dynamic scheduler ----

    def plan(self, batch: int) -> Plan:
        """The plan of one global batch, of those with lengths."""
        if self.lengths is None or self._max_tokens is None:
            raise ValueError("the plan was made without lengths, expected them: or use batches()")
        batches = -(-self.num_samples // self.global_batch_size)
        if not 0 <= batch < batches:
            raise ValueError(f"batch is {batch}, expected one of {batches}")
        return plan(
            [self.lengths[i] for i in self._global_batch(batch)],
            ranks=self.groups.size("dp_cp"),
            max_tokens_per_rank=self._max_tokens,
            min_degree=self._min_degree,
            max_degree=self._max_degree,
            ranks_per_node=self._node,
            cost=self._cost,
            sync=self._sync,
        )

    def dispatch(self, dataset: Any, **options: Any) -> Iterator[Step]:
        """The global batches as steps of `hcp.dispatch`: every sample is loaded by one rank and its
        rows computed once. `dataset`: map-style, of dictionaries of tensors. `options` go to
        `hcp.dispatch`."""
        if self.lengths is None:
            raise ValueError("the plan was made without lengths, expected them: or use batches()")
        self._check_not_finished()
        ranks, rank = self.groups.size("dp_cp"), self.groups.rank("dp_cp")
        while self._next * self.global_batch_size < self.num_samples:
            wanted = self._global_batch(self._next)
            own = wanted[rank::ranks]
            made = self.plan(self._next)
            lengths, _, samples = gather_lengths((dataset[i] for i in own), self.groups)
            by_rank = [i for r in range(ranks) for i in wanted[r::ranks]]
            planned = [self.lengths[i] for i in by_rank]
            if lengths != planned:
                at = next(k for k, n in enumerate(planned) if lengths[k : k + 1] != [n])
                raise HcpError(
                    f"rank {dist.get_rank()}: sample {by_rank[at]} has "
                    f"{lengths[at] if at < len(lengths) else 'no'} tokens, planned {planned[at]}"
                )
            sources = [(i - wanted.start) % ranks for i in wanted]
            step = _Taken(dispatch(made, samples, sources, self.groups, **options))
            yield step
            if step.taken == len(step):
                self._seen.add(own)
            else:
                self._skipped += len(own)
            self._next += 1

    def _global_batch(self, batch: int) -> range:
        first = batch * self.global_batch_size
        return range(first, min(first + self.global_batch_size, self.num_samples))

    def _check_not_finished(self) -> None:
        if self._finished:
            raise HcpError(
                f"the plan has been finished, all {self.num_samples} samples are evaluated, "
                "expected a plan with some left: make an EvalPlan, and Metrics, for each evaluation"
            )

    # ---- the end, and a pause ----

    @property
    def observed(self) -> int:
        """Samples that this rank has evaluated."""
        return self._seen.count

    def finish(self) -> int:
        """How many samples all ranks evaluated together. Every rank of dp_cp calls it.

        Raises HcpError on all of them unless each sample was evaluated exactly once, by all ranks
        of its CP group. A batch was evaluated when the loop has read its weights and come back for
        more; a step of `dispatch`, when all of its micro-batches were taken. Of a pipeline's stage
        that computes no losses the samples are enough.
        """
        groups = self.groups
        records = [
            _Seen.pair_from_bytes(data)
            for data in groups.transport.all_gather_bytes(self._record(), "EvalPlan.finish")
        ]
        seen = [weighted for weighted, _ in records]
        if not any(record.count for record in seen) and _stages(groups) > 1:
            seen = [unweighted for _, unweighted in records]  # a stage that computes no losses
        totals, expected = _Seen(), _Seen()
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
            f"this{skipped}"
        )

    def _record(self) -> bytes:
        return self._seen.to_bytes() + self._unweighted.to_bytes()

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is, for a job that stops in the middle: the same layout goes on."""
        return {
            "next": self._next,
            "seen": self._record().hex(),
            "made_for": self._made_for(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        expect_names("state", state, ("next", "seen", "made_for"))
        if state["made_for"] != self._made_for():
            raise ValueError(
                f"the state is of an evaluation of {state['made_for']}, expected {self._made_for()}"
            )
        self._next, self._finished = state["next"], False
        self._seen, self._unweighted = _Seen.pair_from_bytes(bytes.fromhex(state["seen"]))

    def _made_for(self) -> dict[str, int]:
        return {
            "num_samples": self.num_samples,
            "micro_batch_size": self.micro_batch_size,
            "global_batch_size": self.global_batch_size,
            "lengths": 0 if self.lengths is None else _checksum(self.lengths),
            "dp": self.groups.size("dp"),
            "cp": self.groups.size("cp"),
        }


class _Seen:
    """Which indices, told apart from any other choice that a mistake could make."""

    _MASK = (1 << 64) - 1

    def __init__(self, count: int = 0, total: int = 0, mixed: int = 0) -> None:
        self.count, self.total, self.mixed = count, total, mixed

    def add(self, indices: Iterable[int]) -> None:
        for i in indices:
            self.count += 1
            self.total = (self.total + i) & self._MASK
            self.mixed = (self.mixed + _mixed(i)) & self._MASK

    def merge(self, other: _Seen) -> None:
        self.count += other.count
        self.total = (self.total + other.total) & self._MASK
        self.mixed = (self.mixed + other.mixed) & self._MASK

    def times(self, n: int) -> _Seen:
        return _Seen(self.count * n, self.total * n & self._MASK, self.mixed * n & self._MASK)

    def to_bytes(self) -> bytes:
        return struct.pack("<3Q", self.count, self.total, self.mixed)

    @classmethod
    def pair_from_bytes(cls, data: bytes) -> tuple[_Seen, _Seen]:
        numbers = struct.unpack("<6Q", data)
        return cls(*numbers[:3]), cls(*numbers[3:])


class _Taken(Step):
    """A step that counts how many of its micro-batches were taken."""

    def __init__(self, step: Step) -> None:
        self._pairs = list(step)
        super().__init__(step.plan, self._pairs, step.loss_tokens)
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        for k, pair in enumerate(self._pairs):
            self.taken = max(self.taken, k + 1)
            yield pair


def _stages(groups: ProcessGroups) -> int:
    return groups.size("pp") if "pp" in groups.roles else 1


def _mixed(i: int) -> int:
    """64 bits that look random: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (i + 1) * 0x9E3779B97F4A7C15 & _Seen._MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _Seen._MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _Seen._MASK
    return x ^ x >> 31


# ---- loading -------------------------------------------------------------------------------------


_Load = Callable[[int], Any]
_REFUSED = b"refused: "


class _Ended(Exception):
    """The dataset has ended before a sample."""


def _loader(dataset: Any, count: int) -> _Load:
    """dataset[i]; raises _Ended past the end, and what the dataset raises itself."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return _stream_loader(dataset)

    def load(index: int) -> Any:
        try:
            return dataset[index]
        except IndexError as error:
            if _has_ended(dataset, index, count):
                raise _Ended(index) from error
            error.add_note(f"hcp: the dataset has raised this for sample {index}, which it has")
            raise

    return load


def _has_ended(dataset: Any, index: int, count: int) -> bool:
    """Whether an IndexError says so, and not that something inside the dataset went wrong."""
    try:
        return index >= len(dataset)
    except (TypeError, NotImplementedError):
        pass  # it does not know; if it has the last sample, it has not ended
    try:
        dataset[count - 1]
    except IndexError:
        return True
    return False


def _stream_loader(dataset: Any) -> _Load:
    stream = iter(dataset)
    position = -1
    current: Any = None

    def load(index: int) -> Any:
        nonlocal position, current
        if index < position:
            raise _Ended(index)  # a filler: the stream has gone past it
        while position < index:
            try:
                current = next(stream)
            except StopIteration:
                raise _Ended(index) from None
            position += 1
        return current

    return load


def _sample(load: _Load, index: int, filler: list[Any]) -> tuple[Any, bool]:
    """A sample, and whether it is the one that was asked for."""
    try:
        sample = load(index)
    except _Ended as error:
        if not filler:
            # A rank that starts past the end of a stream has none of its own to repeat.
            try:
                filler.append(load(0))
            except _Ended:
                raise HcpError(
                    f"rank {dist.get_rank()}: the dataset ended before sample {index}, and there "
                    "is no sample that could stand in for it"
                ) from error
        return filler[0], False
    filler[:] = [sample]
    return sample, True


def _checksum(lengths: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(lengths)}q", *lengths))


# ---- metrics -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """A sum over all ranks, and what to divide it by."""

    total: float
    count: float

    @property
    def mean(self) -> float:
        """NaN where nothing was counted."""
        return self.total / self.count if self.count else math.nan


class Metrics:
    """Sums and counts of named metrics in float64, reduced once, so that the layout does not show.
    Of one evaluation: what is added later is added to it.

    Every token counts once: each rank adds the tokens that it computed, ranks of one CP group each
    their own part. Several validation sets are several names. Every rank adds the same names, with
    a sum and a count of 0 where it has nothing of one: a name that one rank lacks is an error. Of a
    pipeline only the stage that computes losses adds.
    """

    def __init__(self, eval_pgs: ProcessGroups) -> None:
        self._groups = eval_pgs
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Values and their weights, of any one shape; a value of weight 0 does not count, even if
        it is not finite."""
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
        """What a trainer's loss function has summed already: Megatron's [sum, tokens]."""
        pair = [
            torch.as_tensor(x, dtype=torch.float64).detach().reshape(()) for x in (total, count)
        ]
        sums = self._sums.setdefault(name, [])
        sums.append(torch.stack([x.to(pair[0].device) for x in pair]))
        if len(sums) >= 1024:
            sums[:] = [torch.stack(sums).sum(0)]

    def reduce(self) -> dict[str, Metric]:
        """The totals of all ranks, on all ranks, pipeline stages included; called by all of them.

        Raises HcpError, on all of them, where a rank added something that is not finite, which
        would hide behind the others' mean, and where one lacks a name that another added.
        """
        groups = self._groups
        own = {name: torch.stack(sums).sum(0).tolist() for name, sums in self._sums.items()}
        payloads = groups.transport.all_gather_bytes(json.dumps(own).encode(), "Metrics.reduce")
        by_rank = [json.loads(payload) for payload in payloads]
        problem = _problem_of(by_rank)
        if problem:
            return self._share_with_stages({}, problem)
        names = sorted({name for sums in by_rank for name in sums})
        totals = {
            # Correctly rounded, so that the order of ranks does not show.
            name: Metric(*(math.fsum(s[name][i] for s in by_rank) for i in (0, 1)))
            for name in names
        }
        return self._share_with_stages(totals, None)

    def _share_with_stages(
        self, totals: dict[str, Metric], problem: str | None
    ) -> dict[str, Metric]:
        groups = self._groups
        gathered = [(totals, problem)]
        if "pp" in groups.roles and groups.size("pp") > 1:
            gathered = all_gather_object((totals, problem), groups.pp)
        for _, found in gathered:
            if found:
                raise HcpError(f"rank {dist.get_rank()}: {found}")
        named = [stage for stage, _ in gathered if stage]
        if len(named) > 1:
            raise HcpError(
                f"rank {dist.get_rank()}: {len(named)} pipeline stages added metrics, expected "
                "only the one that computes losses"
            )
        return named[0] if named else {}


def _problem_of(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> str | None:
    """What makes totals of these sums wrong, by rank of dp_cp."""
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
