"""Loaders that turn a dataset of tokens into micro-batches, which are planned and dispatched.

They know torch's datasets and no trainer. The trainers of Transformers, Accelerate and Lightning
all accept them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hcp._digest import digest_of
from hcp._validate import expect_groups, expect_names, expect_size
from hcp._words import Sync
from hcp.errors import HcpError
from hcp.evaluation.plan import EvalPlan
from hcp.exchange.transport import Transport
from hcp.groups.alone import initialize_alone
from hcp.groups.build import build_process_groups
from hcp.groups.process_groups import ProcessGroups
from hcp.integrations.barrier import waits_in_layers
from hcp.integrations.columns import IGNORED, causal_lm_samples
from hcp.integrations.model_cost import cost_of_model
from hcp.integrations.too_long import fit_of
from hcp.planning.cost import CostModel
from hcp.planning.mask import MasksFor
from hcp.rebinding.exclude import Exclude
from hcp.rebinding.rebind import eval_cp_context
from hcp.step.ahead import ReadItems
from hcp.step.config import NO_WINDOW, Config
from hcp.step.dispatch import Step, StepTransport, gather_lengths, gather_or_raise
from hcp.step.fields import Given, Rules, tokens_of
from hcp.step.planner import StepPlanner

_log = logging.getLogger("hcp")

ToSample = Callable[[Any], Given | Sequence[Given]]
"""Makes the sample of an item of a dataset, or a list: the samples of the documents in the item."""


def samples_of(to_sample: ToSample, item: Any) -> list[Given]:
    """Return the samples of an item as a list. Raises ValueError if there are none."""
    made = to_sample(item)
    samples = [made] if isinstance(made, Mapping) else list(made)
    if not samples:
        raise ValueError("to_sample gives no sample of an item, expected one or more")
    return samples


# ---- training ------------------------------------------------------------------------------------


Order = Callable[[int], Sequence[int]]
"""The indices of the items in the order of an epoch, whose number is given: as many as the dataset
has items. An index may come more than once."""


def _checked(order: Order, items: int) -> Order:
    """The same order. It raises ValueError where an epoch has more or fewer indices than items, or
    one of none."""

    def indices_of(epoch: int) -> list[int]:
        indices = [int(index) for index in order(epoch)]
        if len(indices) != items:
            raise ValueError(
                f"order({epoch}) gives {len(indices)} indices, expected {items}, the items of the "
                "dataset: give a shorter or longer epoch a dataset of its own"
            )
        if min(indices) < 0 or max(indices) >= items:
            raise ValueError(
                f"order({epoch}) gives indices from {min(indices)} to {max(indices)}, expected "
                f"indices of the dataset's {items} items, from 0 on"
            )
        return indices

    return indices_of


class GlobalBatches:
    """This rank's share of each global batch, as lists of indices. The last batch may be small, and
    a share empty.

    The samples of a batch depend on the seed and the epoch only, not on the ranks.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        rank: int,
        ranks: int,
        *,
        shuffle: bool,
        seed: int,
        order: Order | None = None,
        follower: Callable[[int], object] | None = None,
    ) -> None:
        """`follower`: told of each epoch that is set."""
        self.samples, self.batch_size = samples, batch_size
        self._follower = follower
        self.order = order
        self.rank, self.ranks = rank, ranks
        self.shuffle, self.seed, self.epoch = shuffle and order is None, seed, 0
        self._digest: tuple[int, str] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if self._follower is not None:
            self._follower(epoch)

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return self.shares(self.indices())

    def shares(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """This rank's share of each batch of samples in this order."""
        for first in range(0, self.samples, self.batch_size):
            yield list(indices[first : first + self.batch_size][self.rank :: self.ranks])

    def indices(self) -> list[int]:
        """Samples in the order of the epoch."""
        indices: list[int] = self._order_of(self.epoch).tolist()
        return indices

    def digest(self, epoch: int) -> str:
        """A hash of the order of an epoch."""
        if self._digest is None or self._digest[0] != epoch:
            self._order_of(epoch)
        assert self._digest is not None
        return self._digest[1]

    def _order_of(self, epoch: int) -> Tensor:
        indices = self._drawn(epoch)
        self._digest = epoch, digest_of(indices).hex()
        return indices

    def _drawn(self, epoch: int) -> Tensor:
        if self.order is not None:
            return torch.tensor(list(self.order(epoch)), dtype=torch.int64)
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.samples, generator=generator)


class DynamicCPCollator:
    """Turns this rank's share of a global batch, items of a dataset, into a planned `hcp.Step`.

    Every rank of the domain calls it for every batch, in the main process.
    """

    def __init__(
        self,
        config: Config,
        groups: ProcessGroups,
        *,
        cost: CostModel | None = None,
        to_sample: ToSample = causal_lm_samples,
        window_sizes: Sequence[tuple[int, int]] = (),
        model: nn.Module | None = None,
        alignment: int = 1,
        masks: MasksFor | None = None,
        fields: Rules | None = None,
    ) -> None:
        """`cost`: prices; None: those of the `model`'s sizes, if its config names them, else the
        default ones. `model`: decides `config.sync` if that is "auto", when the first batch is
        planned.
        `alignment`: the rows of every rank are a multiple of it. `masks`: gives the masks of
        sequences of these lengths. `fields`: see `hcp.dispatch`."""
        expect_groups(groups)
        self.config, self.groups, self.to_sample = config, groups, to_sample
        self._fields, self._alignment = fields or {}, alignment
        ranks = groups.size("dp_cp")
        self.planner = StepPlanner.of(
            config,
            ranks,
            cost=cost or cost_of_model(model, groups, config.ranks_per_node),
            waits=lambda: waits_in_layers(model),
            masks=masks,
            fields=fields,
            window_sizes=window_sizes,
            fit=fit_of(config, ranks, alignment, fields),
            alignment=alignment,
        )
        config.validate(ranks=ranks)
        config.require_backend()

    def __call__(self, items: Any) -> Step:
        """Plan and dispatch. `items` may be a generator: an exception of it is raised on every
        rank."""
        return self.planner.step(self.samples_of(items), self.groups)

    def samples_of(
        self, items: Iterable[Any], place: Callable[[int], str] = "item {} of this rank".format
    ) -> Iterator[Given]:
        """Yield the samples of items, as they are read. `place`: names the place of the item of
        this number, for errors."""
        for number, item in enumerate(items):
            try:
                samples = samples_of(self.to_sample, item)
                self._expect_room(samples)
            except ValueError as error:
                raise ValueError(f"{place(number)}: {error}") from error
            yield from samples

    @cached_property
    def _longest(self) -> int:
        return self.config.longest(self.groups.size("dp_cp"), self._alignment)

    def _expect_room(self, samples: Sequence[Given]) -> None:
        """Refuse a sample that no plan takes where it is read: other ranks know its length alone,
        and not its place in the dataset."""
        if self.config.too_long != "refuse":
            return
        for number, tokens in enumerate(tokens_of(samples, self._fields)):
            if tokens <= self._longest:
                continue
            try:
                self.planner.plan([tokens])
            except ValueError as error:
                which = f"document {number} has" if len(samples) > 1 else "it has"
                raise ValueError(
                    f"{which} {tokens} tokens, expected at most {self._longest}, which all ranks "
                    f"hold together: {str(error).removeprefix(f'lengths[0] is {tokens}: ')}"
                ) from None


class DynamicCPDataLoader:
    """Iterates over the global batches of a dataset as steps of planned micro-batches.

    ::

        for step in DynamicCPDataLoader(dataset, config, groups, global_batch_size=64):
            for cp, local in step:
                ...

    Each rank of the domain loads its share of each batch. The batches do not depend on the number
    of ranks. The loader is no torch DataLoader, so a trainer leaves it as it is. It has the
    attributes that trainers look for: `dataset`, `sampler`, `batch_sampler`, `collate_fn`,
    `set_epoch`, a length, `state_dict`.
    """

    prefetch_factor = (
        None  # Accelerate's skip_first_batches makes a DataLoader of what it finds here
    )

    def __init__(
        self,
        dataset: Any,
        config: Config,
        groups: ProcessGroups,
        *,
        global_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        load_workers: int = 0,
        cost: CostModel | None = None,
        to_sample: ToSample = causal_lm_samples,
        window_sizes: Sequence[tuple[int, int]] = (),
        model: nn.Module | None = None,
        order: Order | None = None,
        masks: MasksFor | None = None,
        fields: Rules | None = None,
    ) -> None:
        """`dataset`: items for `to_sample`, map-style or a stream (an iterable without indices).
        Every rank reads all of a stream, in its order, and keeps its share. `global_batch_size`:
        items of all ranks together. `drop_last`: leave out the last batch of an epoch if it is
        smaller. `load_workers`: processes that read the dataset. `order`: in place of `shuffle` and
        `seed`, for a map-style dataset: given an epoch's number, the indices of its items, on all
        ranks alike. `window_sizes`, `fields`: see `hcp.dispatch`. `masks`:
        gives the masks of sequences of these lengths.
        `model`: the one that trains on the batches. Where `cost` is None, plans use the prices of
        its sizes, if its config names them. With `config.sync` "auto", it decides whether ranks
        wait for each other in every layer. hcp's own trainers set it themselves."""
        _check_dataset(dataset)
        expect_size("global_batch_size", global_batch_size)
        self.dataset = dataset
        self.load_workers = load_workers
        self.collate_fn = DynamicCPCollator(
            config,
            groups,
            cost=cost,
            to_sample=to_sample,
            window_sizes=window_sizes,
            model=model,
            masks=masks,
            fields=fields,
        )
        self._drop_last = drop_last
        self._length = samples = 0 if is_stream(dataset) else len(dataset)
        if drop_last:
            samples -= samples % global_batch_size
        if samples == 0 and not is_stream(dataset):
            raise ValueError(
                f"the dataset has {len(dataset)} samples and no batch of {global_batch_size}, "
                "expected at least one: lower global_batch_size, or leave drop_last out"
            )
        rank, ranks = groups.rank("dp_cp"), groups.size("dp_cp")
        if is_stream(dataset):
            if order is not None:
                raise ValueError(
                    f"order is given, and the dataset is a {_name_of(dataset)}, a stream, expected "
                    "a map-style dataset: a stream is read in its own order"
                )
            shuffle = False
        if order is not None:
            order = _checked(order, self._length)
        self.batch_sampler = GlobalBatches(
            *(samples, global_batch_size, rank, ranks),
            shuffle=shuffle,
            seed=seed,
            order=order,
            follower=getattr(dataset, "set_epoch", None) if is_stream(dataset) else None,
        )
        self.sampler = self.batch_sampler  # where trainers look for set_epoch
        self._start = self._next = self._epoch = 0
        self._first = ""
        """The hash of the first sample in this epoch, once it was read, or loaded with a state."""
        self._skipped: int | None = None
        self._after: WeakKeyDictionary[Step, int] = WeakKeyDictionary()

    def set_epoch(self, epoch: int) -> None:
        """Go on with the order of the samples in another epoch, from its first batch on."""
        self.batch_sampler.set_epoch(epoch)

    def skip(self, batches: int) -> None:
        """Start the next iteration after this many batches, whatever its epoch: trainers skip
        before they set the epoch, or after it."""
        self._skipped = batches

    def _in_epoch(self) -> None:
        """Leave the place that was reached, if it is one of another epoch. Trainers also set the
        epoch of the sampler."""
        if self._epoch != self.batch_sampler.epoch:
            self._epoch, self._start, self._next = self.batch_sampler.epoch, 0, 0
            self._first = ""

    def reached(self, step: Step) -> None:
        """Say that this step is in use, for a trainer that takes steps ahead of their use: its
        `state_dict` goes on with the step that follows this one."""
        self._next = self._after.get(step, self._next)

    def __len__(self) -> int:
        if is_stream(self.dataset):
            raise TypeError(f"a stream has no length: the dataset is a {_name_of(self.dataset)}")
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Step]:
        self._in_epoch()
        self._next = self._start if self._skipped is None else self._skipped
        self._start, self._skipped = 0, None
        if not is_stream(self.dataset) and self._next >= len(self.batch_sampler):
            _log.warning(
                "hcp: no batch of epoch %d is left: the loader goes on after %d of its %d batches. "
                "Call set_epoch for the next epoch",
                *(self._epoch, self._next, len(self.batch_sampler)),
            )
        collator = self.collate_fn
        planner, groups = collator.planner, collator.groups
        steps = (
            planner.steps(self._shares_of_a_stream(), groups, self._step_of_a_stream)
            if is_stream(self.dataset)
            else planner.steps(self._shares(), groups)
        )
        with contextlib.closing(steps):
            for number, step in enumerate(steps, self._next + 1):
                self._after[step] = self._next = number
                yield step

    def _shares_of_a_stream(self) -> Iterator[tuple[int, ReadItems[Any], ReadItems[Given]]]:
        """Read the batches of a stream, from the next one on, and this rank's samples of each."""
        batches, start = self.batch_sampler, self._next
        read = read_stream(self.dataset, batches.batch_size, self.load_workers)
        for number, batch in enumerate(read):
            if batch.is_last and number < start:
                batch = ReadItems(_ended_early(batch, number, start))
            elif number == 0:
                batch = ReadItems(self._expecting_the_first_of(batch))
            if number >= start or batch.is_last:
                own = slice(batches.rank, None, batches.ranks)
                first = number * batches.batch_size
                where = range(first, first + len(batch.items))[own]
                samples = self.collate_fn.samples_of(batch.items[own], _places(where, "stream"))
                yield number, batch, ReadItems(samples)

    def _expecting_the_first_of(self, batch: ReadItems[Any]) -> Iterator[Any]:
        """Yield a stream's first batch. Raises ValueError where a state has another first item."""
        to_sample = self.collate_fn.to_sample
        self._expect_first(_digest_of_both(lambda: [to_sample(batch.items[0]) for _ in range(2)]))
        yield from batch

    def _expect_first(self, first: str) -> None:
        """Remember the first sample of this epoch. Raises ValueError if a state that was loaded has
        another one. Empty: it is drawn at random, or could not be read."""
        if first and self._first not in ("", first):
            raise ValueError(
                f"{_FIRST} is not the one of the state that was loaded, expected the same dataset "
                "and to_sample: samples are trained twice else, and others never. If it is drawn "
                "at random, leave 'first_sample' out of the state"
            )
        self._first = first or self._first

    def _step_of_a_stream(
        self, share: tuple[int, ReadItems[Any], ReadItems[Given]], step_transport: StepTransport
    ) -> Step | None:
        number, batch, samples = share
        items = agree_on_batch(step_transport.transport, number, batch)
        if not items or (self._drop_last and len(items) < self.batch_sampler.batch_size):
            return None
        collator = self.collate_fn
        return collator.planner.step_of(samples, collator.groups, step_transport)

    def _shares(self) -> Iterator[ReadItems[Given]]:
        """Read this rank's share of each batch, in the order of the epoch."""
        batches = self.batch_sampler
        indices = batches.indices()
        shares = list(batches.shares(indices))[self._next :]
        loader = DataLoader(
            self.dataset,
            batch_sampler=[_FIRST_TWICE, *shares],
            collate_fn=list,
            num_workers=self.load_workers,
        )
        items, to_sample = iter(loader), self.collate_fn.to_sample
        length = len(self.dataset)
        first = _check_same_data(
            self.collate_fn.groups,
            {"length": length, **self.state_dict()},
            lambda: [to_sample(item) for item in next(items)],
        )
        self._expect_first(first)
        if length != self._length:
            raise ValueError(
                f"the dataset has {length} samples, expected {self._length}, as when the loader "
                "was made: its batches would leave samples out. Make another loader"
            )
        for share in shares:
            yield ReadItems(self.collate_fn.samples_of(_next_of(items), _places(share)))

    def state_dict(self) -> dict[str, int | str]:
        """Return the position of the next batch, and what the batches before it were made of. It
        holds for any number of ranks. For steps that were taken ahead see `reached`. After an
        epoch's last batch it is the end of this epoch: call `set_epoch` for the next one."""
        self._in_epoch()
        place = {"epoch": self._epoch, "next": self._next}
        return {**place, "first_sample": self._first, **self._made_of(self._epoch)}

    def _made_of(self, epoch: int) -> dict[str, int | str]:
        """The values that decide the batches of an epoch. Those that explain most come last."""
        batches, stream = self.batch_sampler, is_stream(self.dataset)
        return {
            "order": batches.digest(epoch),
            "shuffle": batches.shuffle,
            "stream_workers": max(1, self.load_workers) if stream else 1,  # one reads as none does
            "seed": batches.seed,
            "batch_size": batches.batch_size,
            "samples": batches.samples,
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on where `state_dict` was taken.

        Raises ValueError for a state of a loader with other samples, or in another order. The first
        sample is read by the next iteration, which raises if it is another. A state of an older
        version does not say all of this; it is taken, with a warning."""
        expect_names("state", state, _STATE, _NEWER)
        epoch, place = (expect_size(f"state.{n}", state[n], least=0) for n in ("epoch", "next"))
        own = self._made_of(epoch)
        for name in reversed(own):
            if state.get(name, own[name]) != own[name]:
                raise ValueError(
                    f"the state has {name} {state[name]!s:.12}, expected {own[name]!s:.12}: make "
                    "the loader as the one that was saved, or samples are trained twice, and "
                    "others never"
                )
        if not is_stream(self.dataset) and place > len(self):
            raise ValueError(f"state.next is {place}, expected at most {len(self)}, the batches")
        if missing := [name for name in _NEWER if name not in state]:
            _log.warning(
                "hcp: the state of the loader does not say %s, as one of an older version: it is "
                "taken, and whether the loader has the same is not checked",
                ", ".join(missing),
            )
        if epoch != self.batch_sampler.epoch:
            self.set_epoch(epoch)
        self._epoch, self._start, self._next = epoch, place, place
        self._first = str(state.get("first_sample", ""))


_STATE = ("epoch", "next", "seed", "batch_size", "samples")
"""Entries of every loader's state."""
_NEWER = ("first_sample", "order", "shuffle", "stream_workers")
"""Entries that states of older versions lack."""


def _ended_early(batch: ReadItems[Any], number: int, start: int) -> Iterator[Any]:
    """Raise what kept a stream from being read, or HcpError for one that has become shorter."""
    yield from batch
    raise HcpError(
        f"rank {dist.get_rank()}: the stream ended after {number} batches, expected the {start} "
        "after which the loader goes on: give the stream that was saved, in its epoch",
        code="dataset-ended",
    )


def _places(indices: Sequence[int], dataset: str = "dataset") -> Callable[[int], str]:
    """Name the places of a share's items, such as "dataset[4]"."""
    return lambda number: f"{dataset}[{indices[number]}]"


def _next_of(items: Iterator[list[Any]]) -> Iterator[Any]:
    """Yield the items of the next share, which is loaded when the first one is taken."""
    yield from next(items)


def _digest_of_both(twice: Callable[[], Sequence[object]]) -> str:
    """Hash a value that is read twice; empty if the two differ, or reading fails."""
    try:
        once, again = map(digest_of, twice())
    except Exception:  # where the value is wanted, all ranks learn of it
        return ""
    return once.hex() if once == again else ""


_FIRST = "the dataset's first sample"
_FIRST_TWICE = [0, 0]
"""The first sample of a dataset, twice: ranks compare it, unless two readings of it differ."""


def _check_same_data(
    groups: ProcessGroups,
    made_for: Mapping[str, int | str],
    first_twice: Callable[[], Sequence[object]],
) -> str:
    """Raise HcpError on all ranks unless all have the same dataset and batches. A rank with another
    seed, or with a shard only, would leave samples out and repeat others.

    Return the hash of the dataset's first sample; empty if two readings of it differ."""
    own = {_FIRST: _digest_of_both(first_twice), **made_for}
    gathered = groups.transport.all_gather_bytes(json.dumps(own).encode(), "hcp: same data")
    by_rank = [json.loads(payload) for payload in gathered]
    for name in reversed(own):
        values = [
            (rank, facts[name])
            for rank, facts in enumerate(by_rank)
            if name != _FIRST or facts[name] != ""
        ]
        for rank, value in values:
            if value != values[0][1]:
                shown = [f" ({each})" if name in made_for else "" for each in (value, values[0][1])]
                raise HcpError(
                    f"rank {dist.get_rank()}: {name} is another on rank {rank}{shown[0]} of dp_cp "
                    f"than on rank {values[0][0]}{shown[1]}, expected the same on every rank: each "
                    "is given the whole dataset and the same seed or order, and hcp gives it its "
                    "share",
                    code="ranks-differ",
                )
    return next((facts[_FIRST] for facts in by_rank if facts[_FIRST]), "")


# ---- streams -------------------------------------------------------------------------------------


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read in order: one of torch's or of `datasets`, or any iterable
    without indices and a length."""
    if isinstance(dataset, IterableDataset):
        return True
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and not indexed


def stream_batches(
    dataset: Any, size: int, groups: ProcessGroups, workers: int = 0
) -> Iterator[list[Any]]:
    """Yield the global batches of a stream, `size` items each; the last may be smaller.

    Every rank reads all items. Ranks compare each batch: see `agree_on_batch`. `workers`: processes
    that read.
    """
    for number, batch in enumerate(read_stream(dataset, size, workers)):
        if items := agree_on_batch(groups.transport, number, batch):
            yield items


def read_stream(dataset: Any, size: int, workers: int = 0) -> Iterator[ReadItems[Any]]:
    """Read the global batches of a stream, `size` items each. The last one has none, or an
    error."""
    iterable = dataset if isinstance(dataset, IterableDataset) else _Iterated(dataset)
    items = iter(DataLoader(iterable, batch_size=None, collate_fn=_unchanged, num_workers=workers))
    while True:
        batch = ReadItems(itertools.islice(items, size))
        yield batch
        if batch.is_last:
            return


def agree_on_batch(transport: Transport, number: int, batch: ReadItems[Any]) -> list[Any]:
    """Return the items of a batch of a stream. HcpError on all ranks if one has read another first
    item or another number of items, or failed to read."""

    def read() -> bytes:
        items = list(batch)
        first = digest_of(items[0]).hex() if items else ""
        return json.dumps([len(items), first]).encode()

    messages = gather_or_raise(transport, read, "hcp: stream")
    said = [json.loads(message) for message in messages]
    for rank, (count, first) in enumerate(said):
        if [count, first] != said[0]:
            what = (
                f"{count} items and rank 0 {said[0][0]}"
                if count != said[0][0]
                else "another first item than rank 0"
            )
            raise HcpError(
                f"rank {dist.get_rank()}: in batch {number} of the stream rank {rank} of dp_cp has "
                f"{what}, expected the same stream on every rank: do not shard it (such as by "
                "split_dataset_by_node) and shuffle it by one seed; hcp gives each rank its share",
                code="ranks-differ",
            )
    return batch.items


class _Iterated(IterableDataset[Any]):
    """Any iterable as torch's."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


def _unchanged(item: Any) -> Any:
    return item


def _name_of(dataset: Any) -> str:
    return type(dataset).__name__


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"the dataset is {sorted(map(str, dataset))} by name, expected one dataset: make a "
            "loader of each. Trainers of Transformers and TRL take several as eval_dataset"
        )
    if is_stream(dataset):
        if isinstance(dataset, Iterator):
            raise ValueError(
                f"the dataset is a {_name_of(dataset)}, expected an iterable that starts anew in "
                "each epoch, not an iterator, which is used up"
            )
        return
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(
            f"the dataset is a {_name_of(dataset)}, expected a map-style one with a length, or an "
            "iterable: every rank must know which samples make a batch"
        )


# ---- evaluation ----------------------------------------------------------------------------------


class EvalDataLoader:
    """Iterates over the micro-batches of an evaluation, as pairs (cp, local): each sample once.

    `groups`: those of the eval layout. The end of an iteration checks that each sample was
    evaluated once, by `hcp.EvalPlan.finish`.
    """

    def __init__(
        self,
        dataset: Any,
        config: Config,
        groups: ProcessGroups,
        *,
        global_batch_size: int,
        cost: CostModel | None = None,
        to_sample: ToSample = causal_lm_samples,
        model: nn.Module | None = None,
        masks: MasksFor | None = None,
        fields: Rules | None = None,
    ) -> None:
        """`cost`, `model`: as for `DynamicCPDataLoader`. `masks`: gives the masks of sequences of
        these lengths. `fields`: see `hcp.dispatch`."""
        self.masks, self.fields = masks, fields
        _check_dataset(dataset)
        expect_size("global_batch_size", global_batch_size)
        self._model = model
        if not is_stream(dataset) and len(dataset) == 0:
            raise ValueError("the dataset has 0 samples, expected some to evaluate")
        self.dataset, self.config, self.groups = dataset, config, groups
        self.global_batch_size, self.to_sample = global_batch_size, to_sample
        self.cost = cost or cost_of_model(model, groups, config.ranks_per_node)
        self.places = False
        """Whether samples also get the fields `document`, their number in the evaluation, and
        `own_labels`, the labels that are not shifted, (tokens,) each."""
        self.num_samples = 0
        """The number of samples so far in this evaluation."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self.num_samples = 0
        if not is_stream(self.dataset):
            yield from self._evaluate(self.dataset)
            return
        for batch in stream_batches(self.dataset, self.global_batch_size, self.groups):
            yield from self._evaluate(batch)
        if self.num_samples == 0:
            raise ValueError("the dataset has 0 samples, expected some to evaluate")

    def _evaluate(self, dataset: Any) -> Iterator[tuple[Any, Any]]:
        """Evaluate a dataset whose length is known: all of it, or a batch of a stream."""
        places, lengths = self._find(dataset)
        degree = self._degree(lengths)
        plan = self._plan(lengths, degree)
        first = self.num_samples if self.places else None
        samples = _Samples(dataset, self.to_sample, places, first)
        options = self.config.dispatch_options(degree)
        ahead = self.config.plan_ahead
        for step in plan.dispatch(samples, fields=self.fields, plan_ahead=ahead, **options):
            yield from step
        self.num_samples += plan.finish()

    @cached_property
    def _sync(self) -> Sync:
        return self.config.sync_where(waiting=waits_in_layers(self._model))

    def _plan(self, lengths: Sequence[int], degree: int | None) -> EvalPlan:
        widest = degree or self.groups.size("dp_cp")
        return EvalPlan(
            lengths,
            self.groups,
            max_tokens_per_rank=self.config.rows_in_evaluation(widest, max(lengths)),
            global_batch_size=self.global_batch_size,
            degree=degree,
            min_degree=self.config.min_dynamic_context_parallel_size,
            ranks_per_node=self.config.ranks_per_node,
            cost=self.cost,
            sync=self._sync,
            masks=self.masks,
            memory=self.config.memory_in_evaluation(widest, max(lengths)),
        )

    def _degree(self, lengths: Sequence[int]) -> int | None:
        """Return the degree for all samples: the eval layout's if there is one, else training's.
        None stands for dynamic degrees."""
        if self.config.eval_context_parallel_size:
            return self.groups.size("cp")
        if self.config.sequence_packing_scheduler == "dynamic_cp":
            return None
        return self.config.static_degree(max(lengths), self.groups.size("dp_cp"))

    def _find(self, dataset: Any) -> tuple[list[tuple[int, int]], list[int]]:
        """Return where the samples are, as (item, number in the item), and their lengths. Each rank
        reads its share of the items, in addition to evaluating it."""
        rank, ranks = self.groups.rank("dp_cp"), self.groups.size("dp_cp")
        count = len(dataset)
        _check_same_data(
            self.groups,
            {"samples": count, "batch_size": self.global_batch_size},
            lambda: [self.to_sample(dataset[i]) for i in _FIRST_TWICE],
        )
        own: list[Given] = []

        def widthless() -> Iterator[Given]:
            for i in range(rank, count, ranks):
                samples = samples_of(self.to_sample, dataset[i])
                own.append({"rows": torch.empty(len(samples), 0)})
                lengths = tokens_of(samples, self.fields or {})
                yield from ({"rows": torch.empty(length, 0)} for length in lengths)

        lengths_of = _by_source(ranks, *gather_lengths(widthless(), self.groups)[:2])
        counts_of = _by_source(ranks, *gather_lengths(own, self.groups)[:2])
        places = [(i, k) for i in range(count) for k in range(next(counts_of[i % ranks]))]
        return places, [next(lengths_of[i % ranks]) for i, _ in places]


def _by_source(ranks: int, values: Sequence[int], sources: Sequence[int]) -> list[Iterator[int]]:
    """Iterate over the values of each source."""
    by_source: list[list[int]] = [[] for _ in range(ranks)]
    for value, source in zip(values, sources, strict=True):
        by_source[source].append(value)
    return [iter(own) for own in by_source]


class _Samples:
    """The samples of a dataset, by their number. With `first`, they say their number from there on,
    and their labels as they were."""

    def __init__(
        self,
        dataset: Any,
        to_sample: ToSample,
        places: Sequence[tuple[int, int]],
        first: int | None,
    ) -> None:
        self.dataset, self.to_sample, self.places, self.first = dataset, to_sample, places, first

    def __getitem__(self, index: int) -> Given:
        item, number = self.places[index]
        sample = samples_of(self.to_sample, self.dataset[item])[number]
        if self.first is None:
            return sample
        labels = torch.as_tensor(sample["labels"])
        return {
            **sample,
            "document": torch.full_like(labels, self.first + index),
            "own_labels": torch.cat((labels.new_full((1,), IGNORED), labels[:-1])),
        }


def domain(groups: ProcessGroups | None, ranks: int, device: torch.device | str) -> ProcessGroups:
    """Return the given groups, or those of one domain of all ranks.

    `device`: the trainer's, for a process that no launcher started: it becomes a job of one rank.
    `ranks`: the number of ranks over which the trainer averages gradients. Raises ValueError if it
    is not the domain's: a loss with grad_reduce="mean" relies on that.
    """
    if groups is None:
        initialize_alone("hcp's trainer", device)
    made = groups or build_process_groups()
    if made.size("dp_cp") != ranks:
        raise ValueError(
            f"the domain has {made.size('dp_cp')} ranks, expected {ranks}: those over which the "
            "trainer averages gradients. On a CPU say use_cpu=True to TrainingArguments and "
            "cpu=True to Accelerator, or they take each rank for a job of its own"
        )
    return made


class _GroupsHolder:
    """Holds the groups that are in use, so that a model without any has something to switch."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups


def eval_groups(groups: ProcessGroups, config: Config) -> ProcessGroups:
    """Return the groups for evaluation: those with CP size `config.eval_context_parallel_size`, by
    default the training groups."""
    size = config.eval_context_parallel_size
    if size is None or size == groups.size("cp"):
        return groups
    check_eval_size(config)
    assert isinstance(size, int)
    config.validate(ranks=groups.size("dp_cp"))
    return groups.with_context_parallel(size)


def check_eval_size(config: Config) -> None:
    """Raise ValueError for the eval CP size "auto", which nobody has replaced by a number."""
    if config.eval_context_parallel_size == "auto":
        raise ValueError(
            "eval_context_parallel_size is 'auto', expected a number: ask "
            "hcp.tools.choose.choose_eval_context_parallel with the lengths of the evaluation first"
        )


def check_model_config(config: Config) -> None:
    """Raise ValueError for options that only Megatron-style layers follow, and for the eval CP size
    "auto", which nobody has replaced by a number."""
    if not isinstance(config, Config):
        raise ValueError(
            f"cp is {config!r:.60}, expected options, such as "
            "hcp.Config(max_seqlen_per_dp_cp_rank=8192)"
        )
    if len(config.comm_types) > 1:
        raise ValueError(
            f"cp_comm_type lists {list(config.comm_types)}, expected one for all layers: the "
            "model's layers do not say which of them they are"
        )
    if config.window_size != NO_WINDOW:
        raise ValueError(
            f"window_size is {config.window_size}, expected {NO_WINDOW}: the model has the windows "
            "of its own configuration"
        )
    check_eval_size(config)


def eval_layout(
    model: object, groups: ProcessGroups, evaluation: ProcessGroups, *, exclude: Exclude = ()
) -> contextlib.AbstractContextManager[ProcessGroups]:
    """Like `hcp.eval_cp_context`, but also for a model that holds no groups and for equal
    layouts."""
    if evaluation is groups:
        return contextlib.nullcontext(groups)
    return eval_cp_context([model, _GroupsHolder(groups)], groups, evaluation, exclude=exclude)
