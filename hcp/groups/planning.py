"""The group and the thread of a domain for plans that are made ahead. Nobody else uses them."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from hcp.exchange.torch_p2p import TorchTransport
from hcp.groups.create import Creator
from hcp.planning.ahead import Worker


class PlanningThread(NamedTuple):
    """A transport between the CPUs of a domain's ranks, and the one thread that uses it.

    Calls run in the order in which they were given. Where every rank gives the same calls, their
    exchanges meet, whatever other threads do on other groups at the time.
    """

    transport: TorchTransport
    worker: Worker


class Planning:
    """Starts the planning thread of a domain when it is first asked for. All layouts of the domain
    share it."""

    def __init__(self, creator: Creator) -> None:
        self.creator = creator

    @cached_property
    def thread(self) -> PlanningThread:
        """Every rank of the job asks for it, at the same place among collectives."""
        group = self.creator.duplicate("transport", "planning", backend="gloo")
        return PlanningThread(TorchTransport(group), Worker())

    def close(self) -> None:
        """Let the thread end what is under way, before its group is destroyed."""
        if "thread" in self.__dict__:
            self.thread.worker.settle()
            self.thread.worker.end()
