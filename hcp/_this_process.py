"""Objects that hold connections of the process that made them: no other process may use them."""

from __future__ import annotations

import os
from typing import Any, Self

from hcp.errors import HcpError


def expect_here(process: int, what: str) -> None:
    """Raise HcpError in a process that was forked from the one that made an object."""
    if process != os.getpid():
        raise elsewhere(what)


def elsewhere(what: str) -> HcpError:
    """Make the error of a process that would use the connections or threads of its parent."""
    return HcpError(
        f"{what} is used in process {os.getpid()}, forked from the one that made it, whose "
        "connections it shares and whose threads it lacks; expected it to be used there: give a "
        "DataLoader's worker, or another child, samples and plans, and let it call nothing that "
        "communicates",
        code="other-process",
    )


class BoundToProcess:
    """Copies, deep ones too, share what the object holds. Pickling raises NotImplementedError."""

    _ELSEWHERE: str
    """The advice of the error: what to send to another process instead."""

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise NotImplementedError(
            f"a {type(self).__name__} is pickled, expected it to stay in its process, whose "
            f"connections it holds: {self._ELSEWHERE}"
        )
