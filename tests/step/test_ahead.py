"""Steps that are planned ahead are those that would be planned in turn, and so are their errors."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.launched import join, run_as_ranks
from support.ranks import run_ranks
from torch.utils.data import IterableDataset

import hcp
from hcp.integrations.loader import DynamicCPDataLoader
from hcp.planning.ahead import PlanningTime, Worker
from hcp.step.config import Config

DOCUMENTS = [{"input_ids": list(range(1 + i % 7, 14 + 3 * (i % 11)))} for i in range(14)]


def loader_of(
    groups: hcp.ProcessGroups, ahead: int, dataset: Any = DOCUMENTS, **options: Any
) -> Any:
    config = Config(32, plan_ahead=ahead)
    return DynamicCPDataLoader(dataset, config, groups, global_batch_size=4, seed=3, **options)


def content(step: hcp.Step) -> tuple[Any, ...]:
    """All of a step that a model could see."""
    rows = [
        (local["input_ids"].tolist(), local["labels"].tolist(), cp.position_ids.tolist())
        for cp, local in step
    ]
    return step.plan.to_dict(), step.sources, step.loss_tokens, rows


class Stream(IterableDataset[Any]):
    """Documents of which a rank may see fewer, or fail to read one."""

    def __init__(self, count: int = 14, failing: int | None = None) -> None:
        self.count, self.failing = count, failing

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.count):
            if i == self.failing:
                raise OSError("the disk is gone")
            yield DOCUMENTS[i]


class Failing:
    """Documents of which one cannot be read."""

    def __init__(self, wrong: int | None) -> None:
        self.wrong = wrong

    def __len__(self) -> int:
        return 14

    def __getitem__(self, i: int) -> Any:
        if i == self.wrong:
            raise OSError("the disk is gone")
        return DOCUMENTS[i]


def equal_steps(groups: hcp.ProcessGroups, rank: int) -> None:
    """Steps, and the positions of the loader after each, do not depend on planning ahead, whatever
    the trainer exchanges meanwhile on the same domain."""
    for dataset in (DOCUMENTS, Stream()):
        seen = []
        for ahead in (0, 1, 3) if dataset is DOCUMENTS else (2, 0):
            loader = loader_of(groups, ahead, dataset)
            steps = []
            for number, step in enumerate(loader):
                sums = [cp.group.sum(torch.ones(1)) for cp, _ in step]
                assert [int(x) for x in sums] == [max(1, cp.degree) for cp, _ in step]
                if number % 2 == 0:
                    samples = [{"tokens": torch.arange(5)}] * (rank + 1)
                    lengths, sources, own = hcp.gather_lengths(samples, groups)
                    plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=32)
                    assert len(hcp.dispatch(plan, own, sources, groups)) == len(plan.micro_batches)
                steps.append((content(step), loader.state_dict()["next"]))
            assert [place for _, place in steps] == [1, 2, 3, 4]
            seen.append(steps)
        assert all(steps == seen[0] for steps in seen)


def resumed(groups: hcp.ProcessGroups, rank: int) -> None:
    """A checkpoint has the place of the step that was taken, not of those planned ahead; and a loop
    that is left drops them."""
    for dataset in (DOCUMENTS, Stream()):
        whole = [content(step) for step in loader_of(groups, 0, dataset)]
        loader = loader_of(groups, 2, dataset)
        for taken, _ in enumerate(loader, 1):
            if taken == 3:
                break
        state = loader.state_dict()
        assert state["next"] == 3
        again = loader_of(groups, 2, dataset)
        again.load_state_dict(state)
        assert [content(step) for step in again] == whole[3:]
        assert [content(step) for step in loader] == whole


def errors(groups: hcp.ProcessGroups, rank: int) -> list[str]:
    """An error comes with the step that it belongs to, on all ranks, and the loader can go on."""
    order = [int(i) for i in loader_of(groups, 0, Failing(None)).batch_sampler.indices()]
    own = Failing(order[9] if rank == 9 % 2 else None)  # in the third batch, by one rank
    long = [*DOCUMENTS[:9], {"input_ids": [1] * 99}]
    cases = [
        (own, {}, 2, OSError if rank == 9 % 2 else hcp.HcpError, "the disk is gone"),
        (Stream(failing=9 if rank else None), {}, 2, OSError if rank else hcp.HcpError, "disk"),
        (Stream(14 if rank else 8), {}, 2, hcp.HcpError, "batch 2 of the stream rank 1 of dp_cp"),
        (long, {"shuffle": False}, 2, ValueError if rank else hcp.HcpError, r"dataset\[9\]: .* 99"),
        ([*DOCUMENTS[:5], {"input_ids": []}], {"shuffle": False}, 1, None, "input_ids is empty"),
    ]
    said = []
    for dataset, options, at, kind, words in cases:
        for ahead in (0, 2):
            steps = iter(loader_of(groups, ahead, dataset, **options))
            for _ in range(at):
                next(steps)
            with pytest.raises(kind or Exception, match=words) as caught:
                next(steps)
            assert next(steps, "ended") == "ended"
            said.append(str(caught.value))
    assert said[0::2] == said[1::2]
    assert len(list(loader_of(groups, 1))) == 4
    return said


def hides(groups: hcp.ProcessGroups, rank: int) -> None:
    """Planning goes on while the trainer computes, on a thread of its own, and is measured."""
    threads = set()

    def masks(lengths: list[int]) -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.02)

    for ahead, hidden in ((0, False), (1, True)):
        threads.clear()
        times = []
        for step in loader_of(groups, ahead, DOCUMENTS[:12], masks=masks):
            time.sleep(0.15)  # longer than the other rank may be late
            times.append(step.planning)
        assert all(t.seconds >= 0.02 for t in times)
        assert times[0].hidden < 0.5  # nothing comes before it
        assert (min(t.hidden for t in times[1:]) > 0) == hidden, times
        assert (threads == {"hcp-plan-ahead"}) == hidden


def ahead_on_two_ranks(rank: int, size: int) -> list[str]:
    groups = hcp.build_process_groups()
    equal_steps(groups, rank)
    resumed(groups, rank)
    said = errors(groups, rank)
    hides(groups, rank)
    evaluation = groups.with_context_parallel(2)
    assert evaluation.planning_thread() is groups.planning_thread()
    evaluation.close()
    next(iter(loader_of(groups, 3)))  # is left with steps under way
    groups.close()
    return said


def test_steps_planned_ahead_equal_those_in_turn_and_errors_keep_their_place() -> None:
    said = run_ranks(2, ahead_on_two_ranks)
    assert "rank 1 failed: OSError: the disk is gone" in said[0][0]


def test_a_program_that_leaves_its_loop_ends() -> None:
    """Rank 1 fails, and rank 0 waits for a step of which rank 1 has no part."""
    done = run_as_ranks(__file__, 2, patience=60)
    assert done.codes == [1, 1], done.said
    assert "RuntimeError: the trainer failed" in done.said
    assert "one of them has ended or is late" in done.said
    assert not {"terminate", "Fatal"} & set(done.said.split()), done.said


def leave(rank: int, store: str) -> None:
    join(rank, 2, "cpu", store)
    groups = hcp.build_process_groups()
    for _ in loader_of(groups, 2):
        break
    for number, _ in enumerate(loader_of(groups, 2)):
        if number == 0 and rank == 1:  # the last batch is then not exchanged
            raise RuntimeError("the trainer failed")


def test_the_hidden_share_is_what_nobody_waited_for() -> None:
    assert PlanningTime(0.2, 0.05).hidden == 0.75
    assert PlanningTime(0.2, 0.3).hidden == 0.0  # waited for another batch, too
    assert PlanningTime(0.0, 0.0).hidden == 0.0


def test_a_worker_runs_calls_in_order_and_outlives_an_error() -> None:
    worker, ran = Worker(), []
    calls = [worker.submit(lambda i=i: ran.append(i) or 1 // (i - 1)) for i in range(4)]
    with pytest.raises(ZeroDivisionError):
        calls[1].result()
    assert (calls[3].result(), ran) == (0, [0, 1, 2, 3])
    worker.end()
    assert worker.settle()


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_the_number_of_batches_ahead_is_a_count(value: Any) -> None:
    with pytest.raises(ValueError, match=r"plan_ahead is .*, expected an integer >= 0"):
        Config(32, plan_ahead=value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    arguments = parser.parse_args()
    leave(arguments.rank, arguments.store)


def test_ranks_that_are_threads_make_no_plans_ahead() -> None:
    with pytest.raises(ValueError, match=r"hcp\.loopback has no group .* plan_ahead=0"):
        hcp.loopback(2, lambda groups: next(iter(loader_of(groups, 1))))
    hcp.loopback(2, lambda groups: next(iter(loader_of(groups, 0))))
