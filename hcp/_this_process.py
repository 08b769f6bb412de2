"""A base class for objects that hold connections of the process that made them."""

from __future__ import annotations

from typing import Any, Self


class OfThisProcess:
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
