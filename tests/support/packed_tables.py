"""By slow and obvious Python: entries as libraries take them, exchanges of a block of ranks, moves
of rows that are kept, and where sections lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hcp.exchange.tables import Entry, Move


def sizes_of(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """(queries, keys) of the entries, and the gaps between them as queries without keys and keys
    without queries."""
    sizes = []
    query, key = entries[0].query_row, entries[0].key_row
    for entry in entries:
        sizes += [(entry.query_row - query, 0)] if entry.query_row > query else []
        sizes += [(0, entry.key_row - key)] if entry.key_row > key else []
        sizes.append((entry.query_rows, entry.key_rows))
        query, key = entry.query_row + entry.query_rows, entry.key_row + entry.key_rows
    return sizes


def pairs_of(entry: Entry) -> int:
    return sum(
        entry.low <= key - query <= entry.high
        for query in range(entry.query_rows)
        for key in range(entry.key_rows)
    )


def packed_sizes(entries: Sequence[Entry]) -> list[int]:
    rows = [(entry.query_rows, entry.key_rows) for entry in entries]
    longest = [max(x[side] for x in of) for of in (rows, sizes_of(entries)) for side in (0, 1)]
    totals = [sum(x[side] for x in rows) for side in (0, 1)]
    square = all(queries == keys for queries, keys in rows)
    return [*longest, *totals, sum(map(pairs_of, entries)), int(square)]


def bounds_of(entries: Sequence[Entry]) -> list[list[int]]:
    sizes = torch.tensor([(0, 0), *sizes_of(entries)], device="cpu")
    bounds: list[list[int]] = sizes.cumsum(0).tolist()
    return bounds


def places_of(entries: Sequence[Entry], sequences: int) -> list[list[int]]:
    first, last = entries[0], entries[-1]
    spare = sequences - len(entries)
    end = (
        last.query_row + last.query_rows - first.query_row,
        last.key_row + last.key_rows - first.key_row,
    )
    starts = [(e.query_row - first.query_row, e.key_row - first.key_row) for e in entries]
    sizes = [(e.query_rows, e.key_rows) for e in entries]
    places = [*starts, *[end] * (spare + 1), *sizes, *[(0, 0)] * spare]
    return [list(side) for side in zip(*places, strict=True)]


def block_of(block: range, rank: int, rows: int) -> dict[str, list[list[int]]]:
    """The sections of a block of ranks."""
    others = [peer for peer in block if peer != rank]
    place = block.index(rank)
    parts = {peer: part for part, peer in enumerate([rank, *others])}
    before, after = place * rows, (len(others) - place) * rows
    kept = [[0, before, 0, 0], [before, after, 0, before + rows]]
    rows_of_peers = {peer: (place - (place > i)) * rows for i, peer in enumerate(block)}
    return {
        "OTHERS": [[peer] for peer in others],
        "OWN": [[peer, 0, rows] for peer in block],
        "ALL": [[peer, i * rows, rows] for i, peer in enumerate(block)],
        "SUM": [[0, rows, 0, i * rows] for i in range(len(block))],
        "GATHER_STAGED": [[0, rows, 0, 0]],
        "GATHER_READ": [[i * rows, rows, parts[peer], 0] for i, peer in enumerate(block)],
        "SUM_STAGED": [run for run in kept if run[1]],
        "SUM_READ": [
            [0, rows, part, 0 if part == 0 else rows_of_peers[peer]]
            for peer, part in sorted(parts.items())
        ],
    }


def kept_moves(moves: Sequence[Move], kept: Tensor) -> list[Move]:
    """Moves of the rows that are kept, end to end."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), kept.cumsum(0)])
    edges = [(move.row, move.row + move.rows) for move in moves]
    rows = torch.tensor(edges, dtype=torch.int64, device="cpu").view(-1, 2)
    kept_before = before[rows].tolist()
    made = [Move(m.peer, a, b - a) for m, (a, b) in zip(moves, kept_before, strict=True)]
    return [move for move in made if move.rows]


def sections_of(
    words: Tensor, header_words: int, sections: Sequence[tuple[str, int]]
) -> list[tuple[int, int, int]]:
    heads = words[header_words : header_words + 2 * len(sections)].tolist()
    return [
        (start, start + records * width, records)
        for start, records, (_, width) in zip(heads[::2], heads[1::2], sections, strict=True)
    ]


def schedule_sizes(words: Tensor, found: Sequence[tuple[int, int, int]]) -> list[int]:
    """``found``: the places of SIZES, STAGES and KEY_OWNERS."""
    (sizes, *_), (stages, *_), (first, end, _) = found
    *rows, left, right = words[sizes : sizes + 8].tolist()
    limits = [-1 if limit == 2**40 else limit for limit in (left, right)]
    owned = words[first + 1 : end : 2].tolist()
    staged = max([0, *owned, *(sum(owned) - own for own in owned)])
    return [*rows, *limits, int(words[stages + 11]), staged]
