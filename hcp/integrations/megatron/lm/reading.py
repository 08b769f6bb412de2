"""The steps that Megatron's data iterator gives, of which some are read before their turn."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp.integrations.documents import BOUNDS
from hcp.integrations.megatron import data

Sample = dict[str, Tensor]
MicroBatch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Stacked samples, or a list: loaders of samples of several lengths do not stack them."""


class _Drawn(NamedTuple):
    """The micro-batches that were drawn for a step."""

    micro_batches: list[MicroBatch]
    sequences: list[Sample]


class StepReader:
    """Reads the sequences of one step after the other. Megatron's iterator is left as if each were
    read when `take` is called: it may replay the micro-batches of the step that was taken last."""

    def __init__(self, iterator: Iterator[MicroBatch], micro_batches: int) -> None:
        """`micro_batches`: of the loader, in a step."""
        self.iterator, self.micro_batches = iterator, micro_batches
        self._waiting: deque[_Drawn] = deque()
        self._given_back: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[Iterator[Sample]]:
        while True:
            yield self._read()

    def _read(self) -> Iterator[Sample]:
        drawn = _Drawn([], [])
        self._waiting.append(drawn)
        for _ in range(self.micro_batches):
            given_back = self._given_back
            batch = given_back.popleft() if given_back else next(_source(self.iterator))
            drawn.micro_batches.append(batch)
            for sequence in sequences_of(batch):
                drawn.sequences.append(sequence)
                yield sequence

    def take(self) -> list[Sample]:
        """Return the sequences of the next step in turn."""
        drawn = self._waiting.popleft()
        if is_replayable(self.iterator) and _keeps():
            self.iterator.saved_microbatches += map(copy.copy, drawn.micro_batches)  # type: ignore[attr-defined]
        return drawn.sequences

    def resized(self, micro_batches: int) -> StepReader:
        """Return a reader of steps of another size. It begins with what was read and not taken."""
        reader = StepReader(self.iterator, micro_batches)
        for drawn in self._waiting:
            reader._given_back += drawn.micro_batches
        reader._given_back += self._given_back
        return reader


def drawn_now(iterator: Iterator[MicroBatch], micro_batches: int) -> list[Sample]:
    """Return the sequences of the iterator's next micro-batches."""
    return [each for _ in range(micro_batches) for each in sequences_of(next(iterator))]


def sequences_of(batch: MicroBatch) -> Iterator[Sample]:
    """Yield the sequences of a micro-batch of the loader, without rows that nothing learns from."""
    for sample in _samples(batch):
        yield from map(_trimmed, data.sequences_of(sample))


def _samples(batch: MicroBatch) -> Sequence[Mapping[str, Any]]:
    if not isinstance(batch, Mapping):
        return batch
    tokens = batch.get("tokens")
    if tokens is None or tokens.dim() == 1 or len(tokens) == 1:
        return [batch]
    count = len(tokens)
    return [{n: _of_sample(n, v, i, count) for n, v in batch.items()} for i in range(count)]


def _of_sample(name: str, value: Any, i: int, count: int) -> Any:
    if torch.is_tensor(value) and value.dim() and len(value) == count:
        return value[i : i + 1]
    if value is not None and name.startswith(BOUNDS):
        shape = tuple(getattr(value, "shape", ()))
        raise ValueError(
            f"{name} is a {type(value).__name__} of shape {shape} in a micro-batch of {count} "
            f"samples, expected a tensor ({count}, bounds)"
        )
    return value


def _trimmed(sequence: Sample) -> Sample:
    """Leave out the rows after the last one that has a loss: no row before them sees them."""
    learned = sequence["loss_mask"].nonzero()
    end = int(learned[-1]) + 1 if len(learned) else 1
    return {name: value[:end] for name, value in sequence.items()}


def is_replayable(iterator: Any) -> bool:
    """Whether an iterator is Megatron's `RerunDataIterator`."""
    return hasattr(iterator, "saved_microbatches")


def is_replaying(iterator: Any) -> bool:
    """Whether Megatron runs a step again, to see whether its result is the same."""
    return is_replayable(iterator) and iterator.replaying


def _source(iterator: Any) -> Iterator[MicroBatch]:
    """The iterator without Megatron's replay: what is read ahead is not to be replayed with the
    step before it."""
    source: Iterator[MicroBatch] = iterator.iterable if is_replayable(iterator) else iterator
    return source


def _keeps() -> bool:
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    return bool(get_rerun_state_machine().get_mode() != RerunMode.DISABLED)
