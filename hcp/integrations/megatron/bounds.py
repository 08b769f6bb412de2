"""Where the sequences of a sample begin and end, by the names that loaders give to their bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hcp.integrations.columns import OF_DOCUMENTS

_READ = {
    ("cu_seqlens",): ("cu_seqlens", "cu_seqlens"),
    ("cu_seqlens", "cu_seqlens_padded"): ("cu_seqlens_padded", "cu_seqlens"),
    ("cu_seqlens", "cu_seqlens_unpadded"): ("cu_seqlens", "cu_seqlens_unpadded"),
    ("cu_seqlens_q",): ("cu_seqlens_q", "cu_seqlens_q"),
    ("cu_seqlens_q", "cu_seqlens_q_padded"): ("cu_seqlens_q_padded", "cu_seqlens_q"),
}
"""By the names of the bounds in a sample: those of the places of sequences, padding included, and
those of their lengths. Bridge's older samples say unpadded where others say padded."""

_TWINS = {"cu_seqlens_kv": "cu_seqlens_q", "cu_seqlens_kv_padded": "cu_seqlens_q_padded"}
BOUNDS = (*OF_DOCUMENTS, "seq_lengths")
"""Beginnings of the names of bounds, lengths and numbers of documents. Those that are not read are
refused."""


def bounds_of(sample: Mapping[str, Any], rows: Mapping[str, Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each sequence of a sample. The other rows are padding."""
    length = len(rows["tokens"])
    given = _given(sample)
    if not given:
        return iter([(0, _end_of(sample.get("original_seq_len"), length))])
    if tuple(sorted(given)) not in _READ:
        raise ValueError(
            f"a sample has {', '.join(sorted(given))}, expected cu_seqlens or cu_seqlens_q, alone "
            "or with the same name and _padded, the bounds with padding: hcp does not read others"
        )
    places, lengths = _READ[tuple(sorted(given))]
    _check_bounds(places, given[places], length)
    found = list(_sequences(places, lengths, given))
    _check_left_out(places, given[places][-1], found, rows)
    return iter(found)


def _end_of(given: Any, length: int) -> int:
    """Return the tokens of a sample of one sequence, without padding."""
    if given is None:
        return length
    ends = _integers("original_seq_len", given)
    if len(ends) != 1 or not 1 <= ends[0] <= length:
        said = ends[0] if len(ends) == 1 else ends
        raise ValueError(
            f"original_seq_len is {said}, expected at most {length} tokens, and at least 1: the "
            "length of the one sequence of the sample"
        )
    return ends[0]


def _integers(name: str, given: Any) -> list[int]:
    try:
        values = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is {given!r:.60}, expected integers: {error}") from None
    if values.numel() and (values.is_floating_point() or values.dtype == torch.bool):
        raise ValueError(f"{name} is {values.dtype}, expected integers")
    numbers: list[int] = values.flatten().tolist()
    return numbers


def _given(sample: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the bounds of a sample by name, without what fills up a batch, and each once."""
    ends = {
        name: list(itertools.takewhile(lambda bound: bound >= 0, _integers(name, value)))
        for name, value in sample.items()
        if value is not None and str(name).startswith(BOUNDS)
    }
    for twin, name in _TWINS.items():
        if twin in ends and name in ends:
            _expect_equal(twin, ends.pop(twin), ends[name], f"{name}: queries and keys alike")
    for name in [name for name in ends if f"{name}_argmin" in ends]:
        count = ends.pop(f"{name}_argmin")
        _expect_equal(f"{name}_argmin", count, [len(ends[name])], f"the number of {name}")
    return ends


def _expect_equal(name: str, given: list[int], expected: list[int], why: str) -> None:
    if given != expected:
        raise ValueError(f"{name} is {given}, expected {expected}, {why}")


def _check_bounds(name: str, ends: list[int], length: int) -> None:
    if ends[:1] != [0] or ends != sorted(ends) or ends[-1] > length:
        raise ValueError(
            f"{name} is {ends}, expected bounds that go up from 0 to at most {length}, the tokens "
            "of the sample"
        )


def _sequences(
    places: str, lengths: str, given: Mapping[str, list[int]]
) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each sequence, which begins at its place."""
    rooms, own = given[places], given[lengths]
    _check_bounds(lengths, own, rooms[-1])
    if len(own) != len(rooms):
        raise ValueError(
            f"{lengths} has {len(own)} bounds and {places} {len(rooms)}, expected as many: one of "
            "each sequence, and 0"
        )
    pairs = zip(itertools.pairwise(rooms), itertools.pairwise(own), strict=True)
    for i, ((start, room_end), (first, end)) in enumerate(pairs):
        if end - first > room_end - start:
            raise ValueError(
                f"sequence {i} has {end - first} tokens by {lengths} and {room_end - start} by "
                f"{places}, expected at most as many"
            )
        yield start, start + end - first


def _check_left_out(
    places: str, end: int, found: list[tuple[int, int]], rows: Mapping[str, Tensor]
) -> None:
    """Refuse rows outside all sequences that a loss is asked of."""
    mask, length = rows.get("loss_mask"), len(rows["tokens"])
    if end < length and (mask is None or bool(mask[end:].any())):
        raise ValueError(
            f"{places} ends at {end}, expected {length}, the tokens of the sample, or a loss_mask "
            "of 0 after it: the others would not be learned"
        )
    starts = [start for start, _ in found]
    for (_, stop), following in zip(found, [*starts[1:], end], strict=False):
        if mask is not None and bool(mask[stop:following].any()):
            raise ValueError(
                f"loss_mask is not 0 in the rows {stop} to {following - 1}, which {places} says "
                "are padding, expected 0 there"
            )
