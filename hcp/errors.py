"""The one exception that is hcp's own."""

from __future__ import annotations

from typing import Literal

Code = Literal[
    "backend-missing",
    "builds-differ",
    "call-refused",
    "calls-differ",
    "cuda-graph",
    "dataset-ended",
    "evaluation-finished",
    "groups-closed",
    "kernel-missing",
    "kernel-wrong",
    "layout-unknown",
    "length-changed",
    "metrics-differ",
    "no-data",
    "not-initialised",
    "other-process",
    "other-thread",
    "plan-invalid",
    "pool-full",
    "rank-failed",
    "rank-late",
    "ranks-differ",
    "samples-missed",
    "swap-refused",
]
"""The names of all errors. docs/guides/troubleshooting.md has an entry for each."""


class HcpError(RuntimeError):
    """Something other than an argument is wrong: ranks disagree, a peer is gone, a slot failed.

    The message says what was found, what was expected, where, and what to do. On many ranks it
    starts with the rank. It ends with the code, such as [HCP-ranks-differ], which the page
    docs/guides/troubleshooting.md explains. Wrong arguments raise ValueError.
    """

    def __init__(self, message: str, code: Code) -> None:
        super().__init__(message, code)
        self.message = message
        self.code = code

    def __str__(self) -> str:
        return f"{self.message} [HCP-{self.code}]"
