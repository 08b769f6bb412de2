"""Say in words what differs between ranks: which value, and which ranks have which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SHOWN_RANKS = 4


def in_words(name: str, by_rank: Mapping[int, Any]) -> str:
    """Name a value that differs: "causal differs: True on rank 0, False on rank 1".

    ``by_rank``: each rank's value, one that JSON can hold.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(by_rank):
        value = by_rank[rank]
        ranks_of.setdefault("nothing" if value is None else str(value), []).append(rank)
    said = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
    return f"{name} differs: {said}"


def first_difference(name: str, by_rank: Mapping[int, Any]) -> str:
    """Find the first part in which data of ranks differs, and name it as ``in_words`` does.

    ``by_rank``: data that JSON can hold. Parts are named by their places: "cost.launch",
    "lengths[3]". ``name``: of the whole, or "" for an object whose entries have names of their own.
    """
    values = list(by_rank.values())
    if all(isinstance(value, dict) for value in values):
        prefix = f"{name}." if name else ""
        for key in dict.fromkeys(key for value in values for key in value):
            parts = {rank: value.get(key) for rank, value in by_rank.items()}
            if _differ(list(parts.values())):
                return first_difference(f"{prefix}{key}", parts)
    if all(_are_named(value) for value in values):
        records = {rank: _by_name(value) for rank, value in by_rank.items()}
        return first_difference(name, records)
    if all(isinstance(value, list) for value in values):
        sizes = {rank: len(value) for rank, value in by_rank.items()}
        if _differ(list(sizes.values())):
            return in_words(f"the number of {name}", sizes)
        for i in range(len(values[0])):
            if _differ([value[i] for value in values]):
                return first_difference(f"{name}[{i}]", {r: v[i] for r, v in by_rank.items()})
    return in_words(name, by_rank)


def _by_name(records: Sequence[Sequence[Any]]) -> dict[str, str]:
    return {name: str([part for part in parts if part is not None]) for name, *parts in records}


def _are_named(value: Any) -> bool:
    """Whether a value is a list of records that begin with their names."""
    return isinstance(value, list) and all(
        isinstance(each, list) and each and isinstance(each[0], str) for each in value
    )


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *but_last, last = map(str, ranks)
    if len(ranks) <= _SHOWN_RANKS:
        return f"ranks {', '.join(but_last)} and {last}"
    return f"ranks {', '.join(but_last[:_SHOWN_RANKS])} and {len(ranks) - _SHOWN_RANKS} more"
