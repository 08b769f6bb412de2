"""A tuple that another thread is making. CPython refuses to enlarge one that somebody else holds,
such as a search through all objects."""

from __future__ import annotations

import threading
from collections.abc import Iterator

LENGTH = 30


class Growing:
    """Its thread waits in the middle until `finish`."""

    def __init__(self) -> None:
        self.made: tuple[int, ...] | None = None
        self._waits, self._goes_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._make)
        self._thread.start()
        assert self._waits.wait(30)

    def _make(self) -> None:
        self.made = tuple(self._items())

    def _items(self) -> Iterator[int]:
        for i in range(LENGTH):
            if i == 10:  # as many as CPython makes room for at first
                self._waits.set()
                assert self._goes_on.wait(30)
            yield i

    def finish(self) -> None:
        self._goes_on.set()
        self._thread.join()

    @property
    def is_whole(self) -> bool:
        return self.made == tuple(range(LENGTH))
