"""A forked child that communicates gets an error at once, and its parents go on.

A DataLoader's worker is such a child. It has its parent's connections, and none of its threads.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

import hcp
from hcp.planning.ahead import PlanAhead, Worker

LENGTH = 16


def in_a_child(call: Any) -> str:
    """What a forked child says of a call: its exception, or "" where there is none."""
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            theirs.send("")
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    said = ours.recv() if ours.poll(20) else "hangs"
    if said == "hangs":
        os.kill(child, 9)
    os.waitpid(child, 0)
    return str(said)


class Model(torch.nn.Module):
    def __init__(self, groups: hcp.ProcessGroups) -> None:
        super().__init__()
        self.cp_group = groups.cp


def calls_of(rank: int, size: int) -> dict[str, Any]:
    groups = hcp.build_process_groups(cp=1)
    other = groups.with_context_parallel(size)
    limits = {"max_tokens_per_rank": LENGTH // size, "min_degree": size}
    plan = hcp.plan([LENGTH], ranks=size, **limits)
    samples = [{"tokens": torch.arange(LENGTH)}] if rank == 0 else []
    (cp, local), *_ = hcp.dispatch(plan, samples, [0], groups)
    x = torch.ones(cp.rows, 2, 4)
    metrics = hcp.Metrics(other)
    return {
        "attention": lambda: cp.attention(x, x, x),
        "a wrong operand": lambda: cp.attention(x, x, x.double()),
        "cross-attention": lambda: cp.cross_attention(x, x, x, cp),
        "roll": lambda: cp.roll_tensor(local.tokens),
        "sum": lambda: cp.group.sum(x),
        "combine": lambda: cp.combine(x),
        "dispatch": lambda: hcp.dispatch(plan, samples, [0], groups),
        "lengths": lambda: hcp.gather_lengths(samples, groups),
        "metrics": metrics.reduce,
        "evaluation": lambda: hcp.eval_cp_context(Model(groups), groups, other).__enter__(),
        "build": lambda: hcp.build_process_groups(cp=1),
        "resize": lambda: groups.with_context_parallel(size),
        "existing": lambda: hcp.ProcessGroups.from_existing({"dp_cp": dist.group.WORLD}),
        "thread": lambda: groups.planning_thread(),
        "warm-up": groups.warm_up,
        "close": groups.close,
    }


def say_what_children_hear(rank: int, size: int) -> dict[str, str]:
    calls = calls_of(rank, size)
    said = {name: in_a_child(call) for name, call in calls.items()}
    calls["attention"]()  # the connections are as they were
    calls["lengths"]()
    return said


def test_a_forked_child_is_refused_whatever_it_calls_and_its_parents_go_on() -> None:
    for said in run_ranks(2, say_what_children_hear, timeout=100, group_timeout=20):
        for name, words in said.items():
            assert words.startswith("HcpError: "), (name, words)
            assert "forked" in words, (name, words)
            assert words.endswith("[HCP-other-process]"), (name, words)


class Rows(torch.utils.data.Dataset[bytes]):
    def __init__(self, groups: hcp.ProcessGroups) -> None:
        self.groups = groups

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> bytes:
        return self.groups.transport.all_gather_bytes(b"", "test")[0]


def test_a_worker_of_a_data_loader_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rows = Rows(hcp.build_process_groups(cp=1))
        loader = torch.utils.data.DataLoader(rows, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(RuntimeError, match="HCP-other-process"):
            next(iter(loader))
    finally:
        dist.destroy_process_group()


def test_a_child_that_has_left_its_parents_job_may_begin_its_own() -> None:
    def begin() -> None:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        groups = hcp.build_process_groups(cp=1)
        assert groups.transport.all_gather_bytes(b"own", "test") == [b"own"]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        hcp.build_process_groups(cp=1)
        assert in_a_child(begin) == ""
    finally:
        dist.destroy_process_group()


def test_threads_of_the_parent_are_not_waited_for() -> None:
    worker = Worker()
    assert "HCP-other-process" in in_a_child(lambda: worker.submit(int))

    def loop(groups: Any) -> str:
        return in_a_child(lambda: groups.transport.all_gather_bytes(b"", "test"))

    for said in hcp.loopback(2, loop):
        assert "HCP-other-process" in said


def test_a_child_does_not_wait_for_what_its_parents_thread_plans() -> None:
    goes_on = threading.Event()

    def prepare(batch: int) -> int:
        assert batch == 0 or goes_on.wait(30)
        return batch

    with PlanAhead([0, 1], prepare) as steps:
        assert next(steps) == (0, 0)
        assert "HCP-other-process" in in_a_child(lambda: next(steps))
        goes_on.set()
        assert next(steps) == (1, 1)
