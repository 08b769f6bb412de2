"""Compare the job layout on all ranks, before any process group is created."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from hcp._core import Grid
from hcp.exchange.gather import all_gather_object


class _Refusal(str):
    """The reason why a rank refuses, sent in place of its view."""


@contextmanager
def tell_others_of_errors() -> Iterator[None]:
    """Send an error of this rank to the others, which wait for its view in `views_of_all`."""
    try:
        yield
    except Exception as error:
        with suppress(RuntimeError):  # of ranks that do not come: what is refused says more
            all_gather_object(_Refusal(error))
        raise


def views_of_all(own: object) -> list[Any]:
    """Gather the views of all ranks. Raises ValueError on all of them if one refuses."""
    views = all_gather_object(own)
    for rank, view in enumerate(views):
        if isinstance(view, _Refusal):
            raise ValueError(
                f"rank {dist.get_rank()}: rank {rank} refuses the layout, expected one that all "
                f"ranks can have; it says: {view}"
            )
    return views


def agree_on_layout(grid: Grid, ranks: list[int], levels: tuple[int, ...] = ()) -> list[list[int]]:
    """Compare the job layout on all ranks, and return the ranks of every parent, ascending.

    Ranks that create different groups would wait for each other until the timeout.
    """
    layout = f"{grid!r}, levels {list(levels)}" if levels else repr(grid)
    views = views_of_all((layout, tuple(ranks)))
    for rank, (other, _) in enumerate(views):
        if other != layout:
            raise ValueError(
                f"rank {dist.get_rank()}: the ranks want different layouts: {layout} here, {other} "
                f"on rank {rank}; expected the same sizes and order on every rank"
            )
    parents = sorted({parent for _, parent in views})
    for rank, (_, parent) in enumerate(views):
        if parent != tuple(ranks) and set(parent) & set(ranks):
            raise ValueError(
                f"rank {dist.get_rank()}: the parents overlap: {ranks} here, {list(parent)} on "
                f"rank {rank}; expected the same parent on all of its ranks"
            )
    return [list(parent) for parent in parents]
