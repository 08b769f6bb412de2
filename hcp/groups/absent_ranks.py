"""Which ranks do not answer when groups cannot be built: torch's own errors name none."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hcp.errors import HcpError

_PATIENCE = 5.0
"""Seconds in which the others fail too: they began to wait at about the same time."""
_numbers = itertools.count(1)
"""Numbers of what all ranks build together, in one order."""


@contextmanager
def naming_silent_ranks(what: str) -> Iterator[None]:
    """Raise HcpError for a failure of torch, with the ranks that say nothing of one. Every rank of
    the job enters."""
    number = next(_numbers)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HcpError) or not dist.is_initialized():
            raise
        raise HcpError(
            f"rank {dist.get_rank()}: {what} failed; {_said_of_others(number)}: {error}",
            code="rank-late",
        ) from error


def _said_of_others(number: int) -> str:
    """Ask the job's store, from a thread: one that a stopped rank keeps never answers."""
    silent: list[list[int]] = []
    thread = threading.Thread(target=lambda: silent.append(_silent(number)), daemon=True)
    thread.start()
    thread.join(_PATIENCE + 1)
    if not silent:
        return "the job's store does not answer, and the rank or agent that keeps it has ended"
    if not silent[0]:
        return "all ranks have failed"
    return f"ranks {silent[0]} have ended, are stopped, or wait: they say nothing of a failure"


def _silent(number: int) -> list[int]:
    """The ranks that have not failed in this step within some seconds."""
    store = dist.PrefixStore(f"hcp/failed/{number}", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), "")
    silent, deadline = list(range(dist.get_world_size())), time.monotonic() + _PATIENCE
    while silent and time.monotonic() < deadline:
        silent = [rank for rank in silent if not store.check([str(rank)])]
        time.sleep(0.05)
    return silent
