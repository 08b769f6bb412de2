"""The state of a loader goes on in the loader that it is of, and is refused by others."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import run_alone, run_ranks
from torch.utils.data import IterableDataset, get_worker_info

import hcp
from hcp.integrations.loader import DynamicCPDataLoader, causal_lm_samples

ITEMS = 11


def item(number: int) -> dict[str, list[int]]:
    """A document whose tokens are its number."""
    return {"input_ids": [number + 1] * (1 + number % 4)}


DOCUMENTS = [item(i) for i in range(ITEMS)]


class Stream(IterableDataset[Any]):
    """Documents in an order that depends on the epoch, shared out over the workers that read."""

    def __init__(self, count: int = ITEMS, turned: int = 0) -> None:
        self.count, self.turned, self.epoch = count, turned, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for i in range(first, self.count, step):
            yield item((i + self.turned + 3 * self.epoch) % ITEMS)


def loader_of(dataset: Any = DOCUMENTS, **options: Any) -> DynamicCPDataLoader:
    given = {"global_batch_size": 2, "seed": 3} | options
    groups = hcp.build_process_groups()
    return DynamicCPDataLoader(dataset, hcp.Config(32), groups, **given)


def seen(step: Any) -> list[int]:
    """The numbers of the documents in a step of one rank."""
    return sorted({int(t) - 1 for _, local in step for t in local.input_ids})


def state_after(batches: int, epoch: int = 1, **options: Any) -> tuple[Any, list[list[int]]]:
    """The state of a loader in the middle of an epoch, and the batches that it has then left."""
    loader = loader_of(**options)
    loader.set_epoch(epoch)
    steps = iter(loader)
    for _ in range(batches):
        next(steps)
    return loader.state_dict(), [seen(step) for step in steps]


def backwards(epoch: int) -> list[int]:
    return list(range(ITEMS))[::-1]


def cut(given: Any) -> Any:
    return causal_lm_samples({"input_ids": given["input_ids"][:1]})


def drawn(given: Any) -> Any:
    """A sample with a random number of tokens."""
    return causal_lm_samples({"input_ids": given["input_ids"] * int(torch.randint(1, 9, ()))})


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "shuffled": ({}, {"shuffle": False}, "shuffle True, expected False"),
    "in order": ({"shuffle": False}, {}, "shuffle False, expected True"),
    "another order": (
        {"order": backwards},
        {"order": lambda epoch: list(range(ITEMS))},
        "order [0-9a-f]{12}, expected [0-9a-f]{12}: make",
    ),
    "an order for a shuffle": ({}, {"order": backwards}, "shuffle True, expected False"),
    "in order for an order": ({"order": backwards}, {"shuffle": False}, "order [0-9a-f]{12}, exp"),
    "seed": ({}, {"seed": 4}, "seed 3, expected 4"),
    "batch size": ({}, {"global_batch_size": 3}, "batch_size 2, expected 3"),
    "length": ({}, {"dataset": DOCUMENTS[:-1]}, "samples 11, expected 10"),
    "drop_last": ({}, {"drop_last": True}, "samples 11, expected 10"),
    "contents": ({}, {"dataset": DOCUMENTS[5:] + DOCUMENTS[:5]}, "dataset's first sample"),
    "to_sample": (
        {"dataset": DOCUMENTS[::-1]},
        {"dataset": DOCUMENTS[::-1], "to_sample": cut},
        "the dataset's first sample is not the one of the state",
    ),
    "a stream": ({}, {"dataset": Stream()}, "samples 11, expected 0"),
    "no stream": ({"dataset": Stream()}, {}, "samples 0, expected 11"),
    "contents of a stream": (
        {"dataset": Stream()},
        {"dataset": Stream(turned=5)},
        "the dataset's first sample is not the one of the state",
    ),
    "a stream that ended": ({"dataset": Stream()}, {"dataset": Stream(3)}, "ended after 2 batches"),
    "readers of a stream": (
        {"dataset": Stream(), "load_workers": 2},
        {"dataset": Stream(), "load_workers": 3},
        "stream_workers 2, expected 3",
    ),
}
"""How the loader was made that was saved, the one that goes on, and what is said."""


def refused(saved: dict[str, Any], other: dict[str, Any]) -> str:
    """What a loader says of the state of another one."""
    state, _ = state_after(3, **saved)
    loader = loader_of(**other)
    try:
        loader.load_state_dict(state)
        next(iter(loader))
    except (ValueError, hcp.HcpError) as error:
        return str(error)
    return "taken"


def all_refused() -> None:
    print(json.dumps([refused(saved, other) for saved, other, _ in OTHERS.values()]))


def test_a_state_of_another_loader_is_refused(tmp_path: Path) -> None:
    done = run_alone(all_refused, folder=tmp_path)  # ranks of the pool cannot start readers
    assert done.code == 0, done.err
    for name, text in zip(OTHERS, json.loads(done.out), strict=True):
        assert re.search(OTHERS[name][2], text), (name, text)


EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the same": ({}, {}),
    "with an order": ({"order": backwards}, {"order": backwards}),
    "in order": ({"shuffle": False}, {"shuffle": False}),
    "a stream": ({"dataset": Stream()}, {"dataset": Stream()}),
    "a stream says nothing of shuffle": (
        {"dataset": Stream(), "shuffle": True},
        {"dataset": Stream(), "shuffle": False},
    ),
    "one process reads as none": (
        {"dataset": Stream(), "load_workers": 1},
        {"dataset": Stream(), "load_workers": 0},
    ),
    "two processes, of which some batches are read ahead": (
        {"dataset": Stream(), "load_workers": 2},
        {"dataset": Stream(), "load_workers": 2},
    ),
    "processes for a dataset": ({"load_workers": 2}, {}),
}


def all_gone_on() -> None:
    for name, (saved, other) in EQUAL.items():
        for batches in (0, 3, 6):
            state, left = state_after(batches, **saved)
            loader = loader_of(**other)
            loader.load_state_dict(state)
            assert [seen(step) for step in loader] == left, (name, batches)
            assert len(left) == 6 - batches


def test_a_state_goes_on_where_it_was_taken_and_nothing_is_seen_twice(tmp_path: Path) -> None:
    done = run_alone(all_gone_on, folder=tmp_path)
    assert done.code == 0, done.err


def warned(work: Callable[[], object]) -> list[str]:
    said: list[str] = []
    logger = logging.getLogger("hcp")
    with mock.patch.object(logger, "warning", lambda text, *v: said.append(text % v)):
        work()
    return said


def of_an_older_version(rank: int, size: int) -> list[str]:
    state, left = state_after(3)
    loader = loader_of()
    for name in ("first_sample", "order", "shuffle", "stream_workers"):
        del state[name]
    said = warned(lambda: loader.load_state_dict(state))
    assert [seen(step) for step in loader] == left
    for wrong in ({"next": 7}, {"next": -1}, {"epoch": "1"}, {"later": 1}):
        before = loader.state_dict()
        with pytest.raises(ValueError, match=f"state.{next(iter(wrong))} is "):
            loader.load_state_dict(state | wrong)
        assert loader.state_dict() == before
    return said


def test_a_state_of_an_older_version_is_taken_with_one_warning() -> None:
    (said,) = run_ranks(1, of_an_older_version)
    assert said == [
        "hcp: the state of the loader does not say first_sample, order, shuffle, stream_workers, "
        "as one of an older version: it is taken, and whether the loader has the same is not "
        "checked"
    ]


def random_samples(rank: int, size: int) -> None:
    """A first sample that is drawn at random says nothing."""
    for dataset in (DOCUMENTS, Stream()):
        state, left = state_after(3, dataset=dataset, to_sample=drawn)
        if state["first_sample"]:  # both readings were equal, by chance
            continue
        loader = loader_of(dataset, to_sample=drawn)
        loader.load_state_dict(state)
        assert [seen(step) for step in loader] == left


def test_random_samples_can_go_on() -> None:
    run_ranks(1, random_samples)


def an_order_of_a_stream(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="order is given, and the dataset is a Stream, a stream"):
        loader_of(Stream(), order=backwards)


def test_a_stream_takes_no_order() -> None:
    run_ranks(1, an_order_of_a_stream)


def of_one_rank_only(rank: int, size: int) -> str:
    """Where one rank reads another stream than was saved, all ranks learn of it."""
    state, _ = state_after(3, dataset=Stream())
    loader = loader_of(Stream(turned=5 * rank))
    loader.load_state_dict(state)
    with pytest.raises((ValueError, hcp.HcpError)) as caught:
        next(iter(loader))
    return str(caught.value)


def test_all_ranks_end_where_one_has_another_stream() -> None:
    first, second = run_ranks(2, of_one_rank_only)
    assert "rank 1 failed: ValueError" in first
    assert second.startswith("the dataset's first sample is not the one of the state")
