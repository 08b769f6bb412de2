"""The tables of ``hcp.attention.fixed_capacity`` by slow and obvious Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hcp
from hcp.attention.fixed_capacity import Capacity
from hcp.exchange.layout import Layout


def spans_of(capacity: Capacity) -> int:
    """A rank has one span of a sequence that it computes alone, at most two of others."""
    return capacity.sequences if capacity.ranks == 1 else 2 * capacity.sequences


def keys_of(capacity: Capacity) -> int:
    """What the spans of any plan see under a causal mask, with two keys of each sequence for
    rounding. The last row belongs to no key."""
    return capacity.ranks * capacity.rows + capacity.rows // 2 + 2 * capacity.sequences + 1


def sizes_of(capacity: Capacity) -> list[int]:
    spans = spans_of(capacity) + 1
    own = [capacity.rows, capacity.rows, spans, spans]
    shared = [keys_of(capacity), 2 * capacity.ranks * capacity.rows]
    return own if capacity.ranks == 1 else [*own, *shared]


def words_of(capacity: Capacity, plan: hcp.Plan, micro_batch: int, rank: int) -> Tensor:
    """Make the tables of a rank in one tensor on the host.

    Raises ValueError for a micro-batch that any rank of the block has no room for, alike on all of
    them.
    """
    first = rank - rank % capacity.ranks
    layouts = [Layout(plan, micro_batch, first + i) for i in range(capacity.ranks)]
    for layout in layouts:
        _expect_room(capacity, layout, first)
    own = layouts[rank - first]
    positions, empty, *others = (
        torch.zeros(size, dtype=torch.int64, device="cpu") for size in sizes_of(capacity)
    )
    tokens = own.rows - own.padding
    positions[:tokens] = own.positions[:tokens]
    empty[tokens:] = 1
    queries, keys = others[0], others[1]
    rows = [span.rows for span in own.spans]
    _sum_into(queries, rows)
    if capacity.ranks == 1:
        _sum_into(keys, rows)
    else:
        _sum_into(keys, [span.start + span.rows for span in own.spans])
        _arrange(others[2], others[3].view(2, -1), capacity, layouts, own, first)
    return torch.cat([positions, empty, queries, keys, *others[2:]])


def _expect_room(capacity: Capacity, layout: Layout, first: int) -> None:
    where = f"micro-batch {layout.micro_batch}, rank {layout.rank}"
    if layout.plan.masks:
        raise ValueError(f"{where}: the plan has masks, expected none for layers in CUDA graphs")
    group = layout.first_rank, layout.first_rank + layout.degree
    if layout.degree and (group[0] < first or group[1] > first + capacity.ranks):
        raise ValueError(
            f"{where}: its group is the ranks {group[0]} to {group[1] - 1}, expected ranks within "
            f"{first} to {first + capacity.ranks - 1}, whose keys the graph gathers: make the "
            "handler with more ranks, or the plan with a smaller max_degree and ranks_per_node="
            f"{capacity.ranks}, max_degree={capacity.ranks}"
        )
    held = len({span.sequence for span in layout.spans})
    for name, found, most in (
        ("rows", layout.rows, capacity.rows),
        ("sequences", held, capacity.sequences),
        ("max_seqlen", max(layout.lengths, default=0), capacity.max_seqlen),
    ):
        if found > most:
            raise ValueError(
                f"{where}: {name} is {found}, expected <= {most}, the capacity of this "
                "GraphHandler: capture a layer of a larger capacity, or run this micro-batch "
                "without the graph"
            )


def _sum_into(bounds: Tensor, rows: Sequence[int]) -> None:
    """Write summed rows; spans beyond them are empty, at the end."""
    summed = torch.tensor([0, *rows], dtype=torch.int64, device="cpu").cumsum(0)
    bounds[: len(summed)] = summed
    bounds[len(summed) :] = summed[-1]


def _arrange(
    keys: Tensor, places: Tensor, capacity: Capacity, layouts: list[Layout], own: Layout, first: int
) -> None:
    """Write which gathered rows the spans see, and where each gathered row lies among these."""
    places.fill_(keys_of(capacity) - 1)
    starts, total = {}, 0
    for sequence, length in zip(own.sequences, own.lengths, strict=True):
        starts[sequence] = total
        total += length
    gathered = torch.empty(total, dtype=torch.int64, device="cpu")
    for rank in range(own.first_rank, own.first_rank + own.degree):
        row = (rank - first) * capacity.rows
        for sequence, start, rows in layouts[rank - first].spans:
            begin = starts[sequence] + start
            gathered[begin : begin + rows] = torch.arange(row, row + rows, device="cpu")
            row += rows
    at, seen = 0, set()
    for sequence, start, rows in own.spans:
        begin, count = starts[sequence], start + rows
        chosen = gathered[begin : begin + count]
        keys[at : at + count] = chosen
        places[int(sequence in seen), chosen] = torch.arange(at, at + count, device="cpu")
        seen.add(sequence)
        at += count
