"""Other threads run while the core plans, bounds, and makes masks, layouts and tables; Ctrl-C ends
a search. That is csrc/python/gil.c."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import hcp
from hcp import _core
from hcp.planning.plan import lower_bound

SECONDS = 20
"""A call that keeps the GIL lets no other thread run, however often it is made. One that gives it
up for microseconds does so at some time, if the machine has much to do."""


@contextmanager
def another_thread() -> Iterator[list[int]]:
    """Count the turns of another thread, which gets the GIL only when this one gives it up."""
    turns, ended = [0], threading.Event()

    def run() -> None:
        while not ended.is_set():
            turns[0] += 1
            time.sleep(0)  # gives the GIL up

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(1e6)
    time.sleep(0.05)  # the thread may have begun to wait by the interval before
    try:
        yield turns
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()


def lets_others_run(call: Callable[[], Any], seconds: float = SECONDS) -> bool:
    with another_thread() as turns:
        before, end = turns[0], time.monotonic() + seconds
        while turns[0] == before and time.monotonic() < end:
            assert call() is not None
        return turns[0] > before


LENGTHS = [9000 + 11 * i for i in range(64)]
PLAN = hcp.plan(LENGTHS, ranks=64, max_tokens_per_rank=2**20, min_degree=64)
MASKED = PLAN.with_masks([hcp.Mask.documents([n - 4000, 4000]) for n in LENGTHS])
REQUEST: dict[str, Any] = {"ranks": 64, "max_tokens_per_rank": 4096, "sync": "micro_batch"}
SCHEDULE = 1, -1, 0, 2**40
RUNS = [word for i in range(64) for word in (0, LENGTHS[i], 1)]
COMPUTED = [word for i in PLAN.micro_batches[0][0].sequences for word in (0, LENGTHS[i], 1)]
TAKERS = [3] * 64, 3, [1] * 64, RUNS, COMPUTED
PAYLOAD = PLAN.core.payload("even", LENGTHS, None, TAKERS)

TOKENS = bytes(8 * sum(LENGTHS))

RELEASED: dict[str, Callable[[], Any]] = {
    "plan": lambda: hcp.plan(LENGTHS, **REQUEST),
    "bound": lambda: lower_bound(LENGTHS, **REQUEST),
    "plan of given groups": lambda: hcp.Plan.from_dict(PLAN.to_dict()),
    "prefix trees": lambda: _core.trees(TOKENS, 8, LENGTHS, 0, 1, 0, 0, None),
    "masks": lambda: PLAN.with_masks([hcp.Mask.causal(n) for n in LENGTHS]),
    "layout": lambda: _core.create_layout(PLAN.core, 0, 5),
    "dispatch": lambda: PLAN.core.route_dispatch([3] * 64, 3, 0, 1, False),
    "roll": lambda: PLAN.core.route_roll(0, 5, -1),
    "halo": lambda: PLAN.core.route_halo(0, 5, 3),
    "states": lambda: PLAN.core.states(0, 5, False),
    "rows of states": lambda: PLAN.core.states_rows(0, 5),
    "way of states": lambda: PLAN.core.states_by_rounds(0, 5, 1, 1),
    "payload": lambda: PLAN.core.payload("even", LENGTHS, None, TAKERS),
    "route of a payload": lambda: PAYLOAD.route([3] * 64, 3, False),
    "rows of a payload": lambda: PAYLOAD.measure(0, 3, False),
    "results to tokens": lambda: PAYLOAD.route_to_tokens(0, 3),
    "a row of each sequence": lambda: PLAN.core.route_by_sequence([3] * 64, 0, 3),
    "units": lambda: _core.check_units([1] * 9000, [0, 9000, 1]) is None,
    "fixed capacity": lambda: PLAN.core.fixed(0, 3, 2**16, 64, 2**16, 64),
    "schedule": lambda: PLAN.core.schedule(0, 5, "all_gather", *SCHEDULE),
    "schedule under masks": lambda: MASKED.core.schedule(0, 5, "p2p", *SCHEDULE, 0),
    "time of a pipeline": lambda: _core.pipeline_time(LENGTHS, 8, 1, 0),
    "grid": lambda: _core.Grid(tp=8, cp=64, dp=8).groups("dp_cp"),
}


@pytest.mark.parametrize("what", RELEASED)
def test_other_threads_run_meanwhile(what: str) -> None:
    assert lets_others_run(RELEASED[what])


def test_a_call_that_keeps_the_gil_would_be_found() -> None:
    assert not lets_others_run(lambda: sorted(range(1000)), seconds=1)


PROGRAM = """
from hcp.planning.plan import lower_bound
lengths = [(7919 * i) % 4000 + 1 for i in range(400)]
print("begins", flush=True)
lower_bound(lengths, ranks=64, max_tokens_per_rank=4096, sync="micro_batch", effort=1000)
print("ended by itself", flush=True)
"""


def test_ctrl_c_ends_the_bound_of_a_child_process() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begins\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert out == ""
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert child.returncode == -signal.SIGINT
