"""Progress of long runs, with the time that is left: tqdm's bars, on the error output."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class _NoBar:
    """A bar on a rank that shows none, or where tqdm is not installed."""

    n = total = 0

    def update(self, count: int = 1) -> None:
        pass

    def set_postfix_str(self, words: str, refresh: bool = True) -> None:
        pass

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass

    def write(self, line: str) -> None:
        sys.stdout.write(f"{line}\n")

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def progress(
    total: int, what: str, unit: str = "it", *, shown: bool = True, delay: float = 0.0
) -> Any:
    """Return a bar of so many steps, of which `update()` tells one: tqdm's, with an ETA.

    Where nobody watches, as in the log of a job, it is printed every ten seconds at most. `shown`:
    False on other ranks than 0. `delay`: seconds before it appears. Without tqdm nothing appears.
    """
    if not shown or importlib.util.find_spec("tqdm") is None:
        return _NoBar()
    from tqdm import tqdm  # type: ignore[import-untyped]

    often = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        mininterval=often,
        delay=max(delay, often) if delay else 0,
    )


def progress_over(items: Sequence[T], what: str, unit: str = "it") -> Iterator[T]:
    """Yield the items, with a bar where they take more than two seconds."""
    with progress(len(items), what, unit, delay=2.0) as bar:
        for item in items:
            yield item
            bar.update()
