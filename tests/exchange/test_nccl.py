"""The transport over NCCL without its device: the work that it queues, watches, keeps and refuses.

The group is Gloo's. The operator and the backend are replaced by fakes.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hcp
from hcp.exchange import nccl
from hcp.exchange.agreement import CallKind, Recent, Stamp
from hcp.exchange.nccl import NcclTransport
from hcp.exchange.tables import Move
from hcp.exchange.torch_p2p import FailureMessages, Stamps

TO_OTHERS = [Move(1, 0, 1), Move(0, 1, 1), Move(3, 2, 2)]
"""The moves of rank 1, which sends a row to itself."""
STAMP = Stamp(CallKind("a call"), 3)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10)
    )
    yield dist.new_group([0])
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Streams that the current one has followed, of exchanges that a stand-in queues."""
    gc.collect()  # what a failure has kept of another test
    streams: list[int] = []
    queue(monkeypatch, lambda *arguments: None)
    join = SimpleNamespace(default=lambda like, stream: streams.append(stream))
    monkeypatch.setattr(torch.ops.hcp, "join", join)
    return streams


def queue(monkeypatch: pytest.MonkeyPatch, exchange: Callable[..., None]) -> None:
    """Exchanges go to a stand-in."""
    stand_in = SimpleNamespace(default=exchange)
    monkeypatch.setattr(torch.ops.hcp, "nccl_exchange", stand_in, raising=False)


@pytest.fixture
def transport(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> NcclTransport:
    """Rank 1 of four, with 60 s for an exchange."""
    return made(group, monkeypatch, timeout=60)


def made(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, *, timeout: float
) -> NcclTransport:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Tensor, "pin_memory", lambda own: own)
    monkeypatch.setattr(nccl._Watch, "_PERIOD", 0.01)
    transport = NcclTransport.__new__(NcclTransport)
    transport.group, transport.rank, transport._communicator = group, 1, 7
    transport.stream, transport._tables = Stream(), {}
    transport.streams = [transport.stream]
    transport.stamps, transport._recent = Stamps(1), Recent(1)
    transport._stamps = torch.zeros(5, dtype=torch.int64)
    transport.failure_messages = FailureMessages(group, 1)
    transport._failure, transport._backend = None, Backend(transport)
    transport._watch = nccl._Watch(timeout, nccl.weakref.ref(transport))
    return transport


class Stream:
    cuda_stream = 5

    def query(self) -> bool:
        return True


class Backend:
    """One that notes what there is to see where NCCL ends what hangs."""

    def __init__(self, transport: NcclTransport) -> None:
        self._of, self.aborted = nccl.weakref.ref(transport), threading.Event()
        self.seen: tuple[Any, ...] = ()

    def abort(self) -> None:
        transport = self._of()
        assert transport is not None
        self.seen = transport._watch.memory.tolist(), transport._failure
        self.aborted.set()
        raise RuntimeError("unspecified launch failure")


def start(transport: NcclTransport) -> Any:
    rows = torch.zeros(4, 2)
    return transport.start(rows, TO_OTHERS, rows, TO_OTHERS, stamp=STAMP)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hcp-nccl-watch"]


LATE = r"rank 1: the exchange with ranks \[0, 3\] did not end within 0\.05 s"


def test_an_exchange_is_queued_with_its_number(
    transport: NcclTransport, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[tuple[Any, ...]] = []
    queue(monkeypatch, lambda *arguments: queued.append(arguments))
    for _ in range(2):
        start(transport).wait()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    start(transport).wait()
    for number, arguments in zip((1, 2, 0), queued, strict=True):
        _, sends, _, receives, *rest = arguments
        assert sends.tolist() == receives.tolist() == [[0, 1, 1], [3, 2, 2]]
        # The stamp goes with the first rows of a call alone.
        stamped = [0, 3] if number == 1 else []
        given = 7, transport._watch.memory, number, 60 * 10**9, 5, transport._stamps
        assert rest == [*given, stamped, stamped, STAMP.tag]
    assert joined == [5, 5, 5]
    assert len(transport._watch._pending) == 2  # none of a graph


@pytest.mark.parametrize("segments", ["expandable_segments:True", "expandable_segments : True"])
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_graph_of_expandable_segments_is_refused_unless_nccl_registers_no_buffers(
    transport: NcclTransport,
    joined: list[int],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    segments: str,
) -> None:
    queue(monkeypatch, lambda *arguments: None)
    monkeypatch.setenv(name, f"max_split_size_mb:64,{segments}")
    start(transport).wait()  # not captured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(hcp.HcpError, match="the replay hangs: leave it out of PYTORCH_ALLOC_CONF"):
        start(transport)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    start(transport).wait()


def test_a_failure_of_another_part_is_said_before_hcp_is_called_again(
    transport: NcclTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = hcp.HcpError("rank 1: rank 2 has not come", code="rank-late")
    monkeypatch.setattr(transport, "failed_elsewhere", lambda: error)
    until(lambda: str(error) in caplog.text)


def test_exchanges_that_end_are_forgotten(transport: NcclTransport, joined: list[int]) -> None:
    for _ in range(3):
        start(transport).wait()
    transport._watch.memory[0] = 2
    until(lambda: len(transport._watch._pending) == 1)
    transport.check()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exchange_that_is_late_stops_the_device_before_what_hangs_is_ended(
    group: dist.ProcessGroup,
    joined: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = made(group, monkeypatch, timeout=0.05)
    pending = start(transport)
    assert transport._backend.aborted.wait(10)
    (ended, aborted, *_), failure = transport._backend.seen
    assert (ended, aborted) == (0, 1)
    assert failure in caplog.messages
    for call in (pending.wait, lambda: start(transport), transport.check):
        with pytest.raises(hcp.HcpError, match=LATE):
            call()
    until(lambda: not watchers())


def test_an_abort_that_waits_for_other_ranks_holds_nobody_up(
    group: dist.ProcessGroup, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's waits for all ranks of a host, and the late one is one of them."""
    transport = made(group, monkeypatch, timeout=0.05)
    late = threading.Event()
    monkeypatch.setattr(transport, "_backend", SimpleNamespace(abort=lambda: late.wait(60)))
    pending = start(transport)
    until(lambda: not watchers())
    with pytest.raises(hcp.HcpError, match=LATE):
        pending.wait()
    late.set()


def test_a_failure_of_another_part_comes_before_that_of_an_exchange_behind_it(
    group: dist.ProcessGroup,
    joined: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = hcp.HcpError("rank 1: rank 2 has not come", code="rank-late")
    transport = made(group, monkeypatch, timeout=0.05)
    transport.grace = 60.0
    start(transport)
    deadline = transport._watch._pending[0].deadline
    failed = threading.Event()
    monkeypatch.setattr(transport, "failed_elsewhere", lambda: error if failed.is_set() else None)
    until(lambda: time.monotonic() > deadline + 0.1)
    failed.set()
    until(lambda: not watchers())
    assert caplog.messages == [str(error)]
    assert not transport._backend.aborted.is_set()


@pytest.mark.parametrize("failed", ["exchange", "elsewhere"])
def test_only_a_device_that_does_not_stop_ends_the_process(
    failed: str, group: dist.ProcessGroup, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer: list[Any] = []
    monkeypatch.setattr(
        nccl.faulthandler,
        "dump_traceback_later",
        lambda seconds, **options: timer.append((seconds, options)),
    )
    monkeypatch.setattr(
        nccl.faulthandler, "cancel_dump_traceback_later", lambda: timer.append("cancelled")
    )
    transport = made(group, monkeypatch, timeout=0.05)
    other = SimpleNamespace(query=lambda: False)
    transport.streams.append(other)
    if failed == "exchange":
        start(transport)
    else:
        error = hcp.HcpError("rank 1: rank 2 has not come", code="rank-late")
        monkeypatch.setattr(transport, "failed_elsewhere", lambda: error)
    until(lambda: len(timer) > 2)
    seconds, options = zip(*timer, strict=True)
    assert list(seconds) == sorted(seconds, reverse=True)
    assert 0 < seconds[-1] < seconds[0] <= 0.05 + nccl._Watch._SLACK
    assert all(each == {"exit": True, "file": 2} for each in options)
    assert watchers()

    def fail() -> bool:
        raise RuntimeError("unspecified launch failure")

    other.query = fail
    until(lambda: not watchers())
    assert timer.index("cancelled") == len(timer) - 1


@pytest.mark.parametrize("held", ["log", "store"])
def test_a_lock_that_a_thread_holds_while_it_hangs_does_not_keep_what_hangs(
    held: str, group: dist.ProcessGroup, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that logs a tensor holds its handler's lock until the device has the tensor."""
    monkeypatch.setattr(nccl, "_PATIENCE", 0.05)
    ended = threading.Event()
    transport = made(group, monkeypatch, timeout=0.05)
    if held == "store":
        monkeypatch.setattr(transport.failure_messages, "said", lambda peers: str(ended.wait(60)))
    else:
        handler = logging.NullHandler()
        monkeypatch.setattr(handler, "handle", lambda record: ended.wait(60))
        monkeypatch.setattr(nccl._log, "handlers", [handler])
    start(transport)
    assert transport._backend.aborted.wait(10)
    assert not ended.is_set()
    with pytest.raises(hcp.HcpError, match=LATE):
        transport.check()
    ended.set()


NEVER_STOPS = """
import faulthandler
import sys
import threading
import weakref
from torch import Tensor
from hcp.exchange.nccl import _Watch

class Transport:
    is_open, grace = True, 0.0
    def failed_elsewhere(self): pass
    def __init__(self, stops): self.stops, self.asked = stops, threading.Event()
    def abort(self, peers, timeout): print("aborted", peers, flush=True)
    def has_stopped(self):
        self.asked.set()
        return self.stops

def wait_for_a_late_one(peer, stops):
    transport = Transport(stops)
    watch = _Watch(0.05, weakref.ref(transport))
    watch.begin()
    watch.add(frozenset({peer}))
    transport.asked.wait()
    return transport

def a_wait_for_the_device():
    lock = threading.Lock()
    with lock, lock:
        pass

Tensor.pin_memory = lambda own: own
_Watch._SLACK = 3.0
transport = wait_for_a_late_one(2, stops=False)
if "another" in sys.argv:
    other = wait_for_a_late_one(3, stops=True)
if "cancelled" in sys.argv:
    faulthandler.cancel_dump_traceback_later()
a_wait_for_the_device()
"""


@pytest.mark.parametrize("meanwhile", ["nothing", "another", "cancelled"])
def test_a_process_whose_device_does_not_stop_ends_and_says_where(meanwhile: str) -> None:
    """Another transport whose device stops, or a program that cancels its own timer, does not keep
    the process."""
    done = subprocess.run(
        [sys.executable, "-c", NEVER_STOPS, meanwhile], capture_output=True, text=True, timeout=100
    )
    said = "aborted [2]\naborted [3]\n" if meanwhile == "another" else "aborted [2]\n"
    assert (done.returncode, done.stdout) == (1, said), done.stderr
    assert "in a_wait_for_the_device" in done.stderr


def test_a_failure_that_is_found_while_a_rank_waits_is_raised_there(
    group: dist.ProcessGroup, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = made(group, monkeypatch, timeout=0.05)

    def join(like: Tensor, stream: int) -> None:
        assert transport._backend.aborted.wait(10)
        raise RuntimeError("unspecified launch failure")

    pending = start(transport)
    monkeypatch.setattr(torch.ops.hcp, "join", SimpleNamespace(default=join))
    with pytest.raises(hcp.HcpError, match=LATE) as raised:
        pending.wait()
    assert "unspecified launch failure" in str(raised.value.__context__)


def test_an_exchange_that_nobody_waits_for_is_joined(
    transport: NcclTransport, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        pending = start(transport)
        assert joined == []
        raise ValueError(f"between start and wait of {pending}")

    with pytest.raises(ValueError, match="between"):
        fail()
    gc.collect()
    assert joined == [5]
    start(transport).wait()
    gc.collect()
    assert joined == [5, 5]  # and once where it was waited for


def test_closed_groups_refuse_exchanges_and_end_the_watch(
    transport: NcclTransport, joined: list[int]
) -> None:
    start(transport).wait()
    assert watchers()
    dist.destroy_process_group(transport.group)
    with pytest.raises(hcp.HcpError, match=r"rank 1: the process groups .* been closed"):
        start(transport)
    until(lambda: not watchers())


def test_the_end_of_all_groups_is_that_of_hcps(transport: NcclTransport, joined: list[int]) -> None:
    dist.destroy_process_group()
    with pytest.raises(hcp.HcpError, match="have been closed"):
        start(transport)
    until(lambda: not watchers())


def test_a_transport_that_is_gone_ends_its_watch(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = made(group, monkeypatch, timeout=60)
    assert watchers()
    del transport
    gc.collect()
    until(lambda: not watchers())


def test_an_exchange_that_cannot_be_queued_names_the_ranks(transport: NcclTransport) -> None:
    # On the CPU the operator has no kernel: it takes its arguments, and fails.
    refused = r"rank 1: the exchange with ranks \[0, 3\] could not be queued: Could not run"
    with pytest.raises(hcp.HcpError, match=refused):
        start(transport)
    assert not transport._watch._pending


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
