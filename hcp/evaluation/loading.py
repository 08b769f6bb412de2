"""Load samples of a dataset by index, and a filler past the end of the dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from hcp.errors import HcpError

Load = Callable[[int], Any]


class _Ended(Exception):
    """Raised for a sample past the end of a dataset."""


def loader_of(dataset: Any, count: int) -> Load:
    """Return a function that loads dataset[i]. It raises _Ended past the end."""
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
    """Whether an IndexError means the end of the dataset, and not a failure inside it."""
    try:
        return index >= len(dataset)
    except (TypeError, NotImplementedError):
        pass  # it does not know; if it has the last sample, it has not ended
    try:
        dataset[count - 1]
    except IndexError:
        return True
    return False


def _stream_loader(dataset: Any) -> Load:
    """Return a function that loads the i-th item of an iterable, for ascending i."""
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


def sample_at(load: Load, index: int, filler: list[Any]) -> tuple[Any, bool]:
    """Return a sample, and whether it is the one that was asked for.

    `filler` holds the last sample that was loaded, if any. It is returned past the end.
    """
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
                    "is no sample that could stand in for it",
                    code="dataset-ended",
                ) from error
        return filler[0], False
    filler[:] = [sample]
    return sample, True
