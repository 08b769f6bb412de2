"""Samples of the items of datasets of tokens, by the names of columns that other programs write.

T tokens of an item.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hcp.integrations.documents import (
    NAMES_OF_BOUNDS,
    OF_DOCUMENTS,
    bounds_of,
    cut,
    document_lengths,
    lengths_by_axes,
    lengths_of_numbers,
    short,
)

IGNORED = -100
"""The label that does not count, for torch.nn.functional.cross_entropy and for Transformers."""

TOKENS, LABELS, PADDING, TYPES = "input_ids", "labels", "attention_mask", "token_type_ids"
POSITIONS, LENGTHS = "position_ids", "seq_lengths"
AXES = "rope_positions"
"""The field of positions of three axes (T, 3): those of time, height and width of images."""
MASKS = ("completion_mask", "assistant_masks")
"""Columns that TRL and chat templates leave: 0 where a token is not learned."""

LONGEST = ("max_length_q", "max_length_k")
"""Columns that Transformers' collator leaves beside its bounds, from which they follow."""

_OF_TOKENS = (TOKENS, LABELS, *MASKS, PADDING, POSITIONS, TYPES)
"""Columns with a number for each token."""


def causal_lm_sample(item: Mapping[str, Any]) -> dict[str, Tensor]:
    """Make a sample of one sequence of a dataset: `input_ids`, `labels` (the token after each) and
    `loss_mask`, (tokens,) each.

    `item` has `input_ids`, integers (tokens,) or (1, tokens) in a list, an array or a tensor. It
    may have `labels` of the same length, not shifted, -100 where a token does not count (default:
    all count). It may have `completion_mask` or `assistant_masks`, 0 where a token does not count.
    `attention_mask`, `position_ids`, `seq_lengths`, bounds such as `cu_seqlens` and
    `token_type_ids` are accepted if they describe one document. Tokens after it whose
    `attention_mask` is 0 are left out. Raises ValueError for anything else: an empty sequence,
    padding elsewhere, packed documents (hcp packs them itself), and other entries.
    """
    documents = _documents_of(item)
    if len(documents) > 1:
        lengths = torch.tensor([len(document[TOKENS]) for document in documents])
        raise ValueError(
            f"a sample has documents of {short(lengths)} tokens, expected one document: hcp packs "
            "them itself (causal_lm_samples takes rows apart that say where documents end)"
        )
    return _sample(documents[0])


def causal_lm_samples(item: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Make the samples of an item, each as `causal_lm_sample` does.

    A packed row has a sample for each of its documents. Where they end is said by `seq_lengths`
    (TRL), by `position_ids` that go back to 0, by an `attention_mask` with the number of each
    token's document (1 1 1 2 3 3; 0 is padding, at the end), or by `cu_seqlens`, `cu_seqlens_q` or
    `cu_seq_lens_q`; with `cu_seqlens_padded` or `cu_seqlens_q_padded`, these are the places, and
    rows between documents are left out. `position_ids` (3, tokens), of time, height and width, are
    0 on every axis where a document begins; (4, tokens) also count the tokens, first. Samples then
    have them as `rope_positions` (tokens, 3). Raises ValueError if they do not agree with each
    other or the tokens.
    """
    return [_sample(document) for document in _documents_of(item)]


def _documents_of(item: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """The columns of each document of an item."""
    given = _given(item)
    columns = _without_padding(_columns_of(given))
    said: dict[str, Tensor] = {}
    if bounds := {name: given[name] for name in NAMES_OF_BOUNDS if name in given}:
        columns, said[min(bounds)] = _within(bounds, columns)
    if LENGTHS in given:
        said[LENGTHS] = _integers(LENGTHS, given[LENGTHS]).flatten()
    numbers = columns.get(PADDING)
    if numbers is not None and bool((numbers != 1).any()):
        said[PADDING] = lengths_of_numbers(numbers)
    if AXES in columns:
        said[POSITIONS] = lengths_by_axes(columns[AXES])
    lengths = document_lengths(len(columns[TOKENS]), said, columns.get(POSITIONS))
    return list(cut(columns, lengths))


def _without_padding(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the rows at the end whose attention mask is 0."""
    if PADDING not in columns:
        return dict(columns)
    mask = columns[PADDING]
    end = int((mask != 0).sum())
    if not bool((mask[:end] != 0).all()) or not end:
        _refuse(
            PADDING,
            mask,
            f"0, which is padding, at the end alone: leave the {len(mask) - end} tokens of 0 out "
            "(tokenize and pack with padding=False)",
        )
    if LABELS in columns and bool((columns[LABELS][end:] != IGNORED).any()):
        _refuse(LABELS, columns[LABELS], f"{IGNORED} where the {PADDING} is 0, as in padding")
    return {name: column[:end] for name, column in columns.items()}


def _within(
    bounds: Mapping[str, Any], columns: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Leave out the rows between documents, by bounds such as cu_seqlens. Also return the lengths
    of documents."""
    rows = {"tokens": columns[TOKENS]}
    if any(name in columns for name in (LABELS, *MASKS)):
        rows["loss_mask"] = _learned(columns) != IGNORED
    spans = [(start, end) for start, end in bounds_of(bounds, rows) if end > start]
    kept = [torch.arange(start, end) for start, end in spans]
    places = torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64)
    within = {name: column[places] for name, column in columns.items()}
    return within, torch.tensor([end - start for start, end in spans])


def _sample(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sample of one document."""
    labels = _learned(columns)
    labels = torch.cat((labels[1:], labels.new_full((1,), IGNORED)))
    axes = {AXES: columns[AXES]} if AXES in columns else {}
    return {
        "input_ids": columns[TOKENS],
        "labels": labels,
        "loss_mask": labels != IGNORED,
        **axes,
    }


def _learned(columns: Mapping[str, Tensor]) -> Tensor:
    """The labels of tokens, not shifted: IGNORED where one does not count."""
    labels = columns.get(LABELS, columns[TOKENS]).clone()
    for name in MASKS:
        if name in columns:
            labels[columns[name] == 0] = IGNORED
    return labels


# ---- columns -------------------------------------------------------------------------------------


def _columns_of(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The columns with a number for each token, int64 (T,) each. ValueError, by name, for what hcp
    would not follow."""
    tokens = _checked_tokens(given)
    _refuse_others(sorted(set(given) - {*_OF_TOKENS, LENGTHS, *NAMES_OF_BOUNDS, *LONGEST}))
    columns = {name: _row(name, given[name]) for name in _OF_TOKENS if name in given}
    axes = _axes_of(columns, tokens)
    for name, column in columns.items():
        if len(column.shape) != 1 or len(column) != tokens:
            raise ValueError(
                f"{name} has shape {tuple(column.shape)}, expected ({tokens},)"
                f"{_OF_SHAPES.get(name, '')}"
            )
    _check_values(columns)
    return columns | axes


def _axes_of(columns: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """Take positions of several axes, (3 or 4, T), out of the columns, but for those that count
    tokens."""
    given = columns.get(POSITIONS)
    if given is None or given.shape not in ((3, tokens), (4, tokens)):
        return {}
    *counted, _, _, _ = columns.pop(POSITIONS)
    if counted:
        columns[POSITIONS] = counted[0]
    return {AXES: given[-3:].T.contiguous()}


def _given(item: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that have a value. ValueError unless there are tokens."""
    if not isinstance(item, Mapping):
        names: Any = type(item).__name__
    else:
        given = {str(name): column for name, column in item.items() if column is not None}
        if TOKENS in given:
            return given
        names = sorted(given)
    raise ValueError(f"a sample has {names}, expected 'input_ids': tokenize the dataset first")


def _checked_tokens(given: Mapping[str, Any]) -> int:
    """The number of tokens. ValueError unless they are a row of some."""
    tokens = _row(TOKENS, given[TOKENS])
    if tokens.dim() != 1:
        raise ValueError(
            f"input_ids has shape {tuple(tokens.shape)}, expected (tokens,): an item is one row"
        )
    if not len(tokens):
        raise ValueError(
            "input_ids is empty in a sample, expected >= 1 token: leave empty documents out of the "
            "dataset (dataset.filter)"
        )
    return len(tokens)


_OF_SHAPES = {
    PADDING: ": hcp makes the masks of documents itself",
    POSITIONS: ", the place of each token in its document, or positions of axes, (3, tokens), or "
    "(4, tokens) where the first row counts tokens",
}
"""The advice for a column of a wrong shape: the end of the error."""


def _row(name: str, given: Any) -> Tensor:
    """int64 (T,) of (T,) or (1, T), and (3, T) of (3, 1, T), as collators leave it; another shape
    as it is."""
    values = _integers(name, given)
    batch = values.dim() - 2
    return values.squeeze(batch) if batch in (0, 1) and values.shape[batch] == 1 else values


def _integers(name: str, given: Any) -> Tensor:
    try:
        values = _tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is {type(given).__name__}, expected integers (tokens,): {error}"
        ) from None
    wide = values.is_floating_point() or values.is_complex()
    if wide and values.numel():  # an empty list has floats
        raise ValueError(f"{name} is {values.dtype}, expected integers")
    return values.to(torch.int64)


def _tensor(given: Any) -> Tensor:
    """Make a tensor as torch.as_tensor does: of a list of integers in a seventh of its time, in
    which a trainer's GPU may wait for the next step."""
    if type(given) is list and given and isinstance(given[0], int):
        try:
            return torch.frombuffer(array("q", given), dtype=torch.int64)
        except (TypeError, OverflowError):
            pass  # others behind it, or integers of more than 64 bits
    return torch.as_tensor(given)


def _refuse_others(others: list[str]) -> None:
    if not others:
        return
    bounds = [name for name in others if name.startswith(OF_DOCUMENTS)]
    if bounds:
        raise ValueError(
            f"a sample has {bounds[0]!r}, expected seq_lengths, cu_seqlens, or position_ids that "
            "start at 0 in each document: from these hcp reads where documents end. Give one of "
            "them, then "
            f"remove the others (dataset.remove_columns({bounds}))"
        )
    known = ", ".join(sorted((*_OF_TOKENS, LENGTHS)))
    raise ValueError(
        f"a sample has {others[0]!r}, expected only {known}: hcp does not know what it asks for. "
        f"Remove it (dataset.remove_columns({others})) if training does without, or give "
        "to_sample=, which makes a sample of an item"
    )


def _check_values(columns: Mapping[str, Tensor]) -> None:
    """Raise ValueError for values that do not describe documents."""
    for name, column in columns.items():
        if name == TYPES and bool(column.any()):
            _refuse(name, column, "all 0: hcp does not hand segments on")
        if name in MASKS and bool(((column != 0) & (column != 1)).any()):
            _refuse(name, column, "0 or 1 for each token")
        if name in (TOKENS, LABELS):
            _check_ids(name, column)
        if name == PADDING and bool((column < 0).any()):
            _refuse(name, column, "the number of each token's document, 0 in padding")


def _check_ids(name: str, column: Tensor) -> None:
    wrong = column[(column < 0) & (column != IGNORED) if name == LABELS else column < 0]
    if len(wrong):
        more = f", or {IGNORED} where a token does not count" if name == LABELS else ""
        _refuse(name, column, f"ids >= 0{more}, not {int(wrong[0])}")


def _refuse(name: str, column: Tensor, expected: str) -> None:
    raise ValueError(
        f"{name} is {short(column)} in an item of {len(column)} tokens, expected {expected}"
    )
