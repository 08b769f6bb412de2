"""Where the documents of packed rows begin and end, by the forms in which loaders say it.

Positions that go back to 0 (torchtitan, TRL), the lengths of documents (TRL), the number of each
token's document (LLaMA-Factory), or cu_seqlens (Megatron, Bridge, Transformers).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

OF_DOCUMENTS = (
    *("cu_seq", "seqlens", "seq_lens", "seq_idx", "segment_", "document_", "doc_ids"),
    "sequence_ids",
)
"""How columns begin that also say where documents end."""


def cut(rows: Mapping[str, Tensor], lengths: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    """Cut rows (T, ...) by name into documents of these lengths, which sum to at most T."""
    for start, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        yield {name: value[start:end] for name, value in rows.items()}


def first_miscounted(positions: Tensor, lengths: Sequence[int]) -> int | None:
    """The first of the positions (T,) that is not its row's place in its document, None if all
    are. `lengths`: of the documents, which sum to T."""
    counted = [torch.arange(length, device=positions.device) for length in lengths]
    wrong = (positions != torch.cat(counted)).nonzero() if counted else positions[:0]
    return int(wrong[0]) if len(wrong) else None


def short(values: Tensor) -> str:
    """The values of (N,) as a list, of a long one the first eight."""
    shown = values[:8].tolist()
    return repr(shown) if len(values) <= 8 else f"[{', '.join(map(str, shown))}, ...]"


def _lengths_between_zeros(positions: Tensor) -> list[int]:
    """The lengths of documents (T > 0 rows together) of which each but the first begins at a 0."""
    starts = (positions[1:] == 0).nonzero()[:, 0] + 1
    rows = starts.new_tensor([len(positions)])
    lengths: list[int] = starts.diff(prepend=starts.new_zeros(1), append=rows).tolist()
    return lengths


# ---- positions, and lengths ----------------------------------------------------------------------


def packed_documents(
    fields: Mapping[str, Tensor], positions: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Split rows that other code has packed into their documents.

    `fields`: tensors (T, ...) by name. `positions` (T,): a document starts where they are 0. Raises
    ValueError for positions that do not count up.
    """
    if not len(positions):
        return
    if positions[0] != 0:
        raise ValueError(f"positions begin with {int(positions[0])}, expected 0")
    lengths = _lengths_between_zeros(positions)
    for document, own in zip(cut(fields, lengths), cut({"": positions}, lengths), strict=True):
        after = first_miscounted(own[""], [len(own[""])])
        if after is not None:
            raise ValueError(
                f"position {int(own[''][after])} stands {after} tokens after a 0, "
                "expected positions that count up from 0 in each document"
            )
        yield document


def document_lengths(
    tokens: int, said: Mapping[str, Tensor], positions: Tensor | None
) -> list[int]:
    """Return the tokens of each document of an item of so many tokens.

    `said`: the lengths (documents,) by the column that says them; without any, `positions`
    (tokens,), its position_ids, say where documents begin. Raises ValueError unless all say the
    same.
    """
    found, bounds = [tokens], ""
    for name, lengths in said.items():
        if min(lengths.tolist(), default=0) < 1 or int(lengths.sum()) != tokens:
            raise ValueError(
                f"{name} is {short(lengths)} in an item of {tokens} tokens, "
                "expected lengths >= 1 of its documents, which sum to the tokens"
            )
        if bounds and lengths.tolist() != found:
            raise ValueError(
                f"documents have {short(lengths)} tokens by {name} and "
                f"{short(torch.tensor(found))} by {bounds}, expected the same: give one of them"
            )
        found, bounds = lengths.tolist(), name
    if positions is not None:
        found = found if bounds else _lengths_between_zeros(positions)
        _check_positions(positions, found, bounds)
    return found


def lengths_of_numbers(numbers: Tensor) -> Tensor:
    """Return the tokens of each document, given the number of each token's (tokens,). Raises
    ValueError for numbers that descend: a document is one piece."""
    ascending: Tensor
    lengths: Tensor
    ascending, lengths = torch.unique_consecutive(numbers, return_counts=True)
    if bool((ascending.diff() < 0).any()):
        raise ValueError(
            f"attention_mask is {short(numbers)} in an item of {len(numbers)} tokens, expected "
            "numbers of documents that ascend, as 1, 1, 1, 2, 3, 3"
        )
    return lengths


def lengths_by_axes(axes: Tensor) -> Tensor:
    """Return the tokens of each document, given positions (tokens, 3) of which a document's first
    token alone has 0 on every axis. Raises ValueError unless the first row is one."""
    furthest = axes.amax(1)
    if bool(furthest[0]) or bool((axes < 0).any()):
        raise ValueError(
            f"position_ids has {axes[0].tolist()} on the axes of the first of {len(axes)} tokens, "
            "expected 0 on each, and none below 0: positions count from 0 in each document"
        )
    return torch.tensor(_lengths_between_zeros(furthest))


def _check_positions(positions: Tensor, lengths: Sequence[int], bounds: str) -> None:
    """`bounds`: what else says where documents start."""
    at = first_miscounted(positions, lengths)
    if at is None:
        return
    start = max(first for first in itertools.accumulate(lengths, initial=0) if first <= at)
    of = f", as a document starts at token {start} by {bounds}" if bounds else ""
    raise ValueError(
        f"position_ids is {short(positions)} in an item of {len(positions)} tokens, expected "
        f"{at - start} at token {at}, not {int(positions[at])}{of}: positions count up from "
        "0 in each document, without padding. Count them so, or give seq_lengths in their place"
    )


# ---- cu_seqlens ----------------------------------------------------------------------------------

_READ = {
    ("cu_seqlens",): ("cu_seqlens", "cu_seqlens"),
    ("cu_seqlens", "cu_seqlens_padded"): ("cu_seqlens_padded", "cu_seqlens"),
    ("cu_seqlens", "cu_seqlens_unpadded"): ("cu_seqlens", "cu_seqlens_unpadded"),
    ("cu_seqlens_q",): ("cu_seqlens_q", "cu_seqlens_q"),
    ("cu_seqlens_q", "cu_seqlens_q_padded"): ("cu_seqlens_q_padded", "cu_seqlens_q"),
    ("cu_seq_lens_q",): ("cu_seq_lens_q", "cu_seq_lens_q"),
}
"""By the names of the bounds in a sample: those of the places of sequences, padding included, and
those of their lengths. Bridge's older samples say unpadded where others say padded."""

_TWINS = {
    "cu_seqlens_kv": "cu_seqlens_q",
    "cu_seqlens_kv_padded": "cu_seqlens_q_padded",
    "cu_seq_lens_k": "cu_seq_lens_q",
}
NAMES_OF_BOUNDS = frozenset((*itertools.chain(*_READ), *_TWINS))
"""Names that `bounds_of` reads."""
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
