"""Samples of the items of datasets of tokens, by the names of columns that other programs write.

T tokens of an item.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hcp.integrations.documents import OF_DOCUMENTS, cut, document_lengths, short

IGNORED = -100
"""The label that does not count, for torch.nn.functional.cross_entropy and for Transformers."""

TOKENS, LABELS, PADDING, TYPES = "input_ids", "labels", "attention_mask", "token_type_ids"
POSITIONS, LENGTHS = "position_ids", "seq_lengths"
MASKS = ("completion_mask", "assistant_masks")
"""Columns that TRL and chat templates leave: 0 where a token is not learned."""

_OF_TOKENS = (TOKENS, LABELS, *MASKS, PADDING, POSITIONS, TYPES)
"""Columns with a number for each token."""


def causal_lm_sample(item: Mapping[str, Any]) -> dict[str, Tensor]:
    """Make a sample of one sequence of a dataset: `input_ids`, `labels` (the token after each) and
    `loss_mask`, (tokens,) each.

    `item` has `input_ids`, integers (tokens,) or (1, tokens) in a list, an array or a tensor. It
    may have `labels` of the same length, not shifted, -100 where a token does not count (default:
    all count). It may have `completion_mask` or `assistant_masks`, 0 where a token does not count.
    `attention_mask`, `position_ids`, `seq_lengths` and `token_type_ids` are accepted if they
    describe one document without padding. Raises ValueError for anything else: an empty sequence,
    padding, packed documents (hcp packs them itself), and other entries.
    """
    columns = _columns_of(item)
    if len(_documents_of(columns)) > 1:
        name = LENGTHS if LENGTHS in columns else POSITIONS
        expected = "their number" if name == LENGTHS else "0, 1, 2, ..."
        raise ValueError(
            f"{name} is {short(columns[name])} in a sample of {len(columns[TOKENS])} tokens, "
            f"expected {expected}, one document: hcp packs them itself (causal_lm_samples takes "
            "rows apart that say their seq_lengths, or whose position_ids go back to 0)"
        )
    return _sample(columns)


def causal_lm_samples(item: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Make the samples of an item, each as `causal_lm_sample` does.

    An item with several `seq_lengths`, as TRL packs rows, has a sample for each of its documents,
    and so has one whose `position_ids` go back to 0. Raises ValueError if lengths do not sum to the
    tokens, or positions are not those of the documents.
    """
    columns = _columns_of(item)
    return [_sample(document) for document in cut(columns, _documents_of(columns))]


def _documents_of(columns: Mapping[str, Tensor]) -> list[int]:
    return document_lengths(len(columns[TOKENS]), columns.get(LENGTHS), columns.get(POSITIONS))


def _sample(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sample of one document."""
    labels = columns.get(LABELS, columns[TOKENS]).clone()
    for name in MASKS:
        if name in columns:
            labels[columns[name] == 0] = IGNORED
    labels = torch.cat((labels[1:], labels.new_full((1,), IGNORED)))
    return {
        "input_ids": columns[TOKENS],
        "labels": labels,
        "loss_mask": (labels != IGNORED).float(),
    }


# ---- columns -------------------------------------------------------------------------------------


def _columns_of(item: Mapping[str, Any]) -> dict[str, Tensor]:
    """The columns of an item, int64 (T,) each; `seq_lengths` (documents,). ValueError, by name, for
    what hcp would not follow."""
    given = _given(item)
    tokens = _checked_tokens(given)
    _refuse_others(sorted(set(given) - {*_OF_TOKENS, LENGTHS}))
    columns = {name: _row(name, given[name]) for name in _OF_TOKENS if name in given}
    for name, column in columns.items():
        if len(column.shape) != 1 or len(column) != tokens:
            raise ValueError(
                f"{name} has shape {tuple(column.shape)}, expected ({tokens},)"
                f"{_OF_SHAPES.get(name, '')}"
            )
    _check_values(columns)
    if LENGTHS in given:
        columns[LENGTHS] = _integers(LENGTHS, given[LENGTHS]).flatten()
    return columns


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
    POSITIONS: ", the place of each token in its document: those of several axes belong to the "
    "tokens of images (image_sample makes them). Give the row that counts tokens, or seq_lengths",
}
"""The advice for a column of a wrong shape: the end of the error."""


def _row(name: str, given: Any) -> Tensor:
    """int64 (T,) of (T,) or (1, T), as collators leave it; another shape as it is."""
    values = _integers(name, given)
    return values[0] if values.dim() == 2 and len(values) == 1 else values


def _integers(name: str, given: Any) -> Tensor:
    try:
        values = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is {type(given).__name__}, expected integers (tokens,): {error}"
        ) from None
    wide = values.is_floating_point() or values.is_complex()
    if wide and values.numel():  # an empty list has floats
        raise ValueError(f"{name} is {values.dtype}, expected integers")
    return values.to(torch.int64)


def _refuse_others(others: list[str]) -> None:
    if not others:
        return
    bounds = [name for name in others if name.startswith(OF_DOCUMENTS)]
    if bounds:
        raise ValueError(
            f"a sample has {bounds[0]!r}, expected seq_lengths, or position_ids that start at 0 in "
            "each document: from these hcp reads where documents end. Give one of them, then "
            f"remove the others (dataset.remove_columns({bounds}))"
        )
    known = ", ".join(sorted((*_OF_TOKENS, LENGTHS)))
    raise ValueError(
        f"a sample has {others[0]!r}, expected only {known}: hcp does not know what it asks for. "
        f"Remove it (dataset.remove_columns({others})) if training does without, or give "
        "to_sample=, which makes a sample of an item"
    )


def _check_values(columns: Mapping[str, Tensor]) -> None:
    """Raise ValueError for values that do not describe documents without padding."""
    for name, column in columns.items():
        if name == TYPES and bool(column.any()):
            _refuse(name, column, "all 0: hcp does not hand segments on")
        if name in MASKS and bool(((column != 0) & (column != 1)).any()):
            _refuse(name, column, "0 or 1 for each token")
        if name in (TOKENS, LABELS):
            _check_ids(name, column)
    if PADDING in columns:
        _check_padding(columns[PADDING])


def _check_ids(name: str, column: Tensor) -> None:
    wrong = column[(column < 0) & (column != IGNORED) if name == LABELS else column < 0]
    if len(wrong):
        more = f", or {IGNORED} where a token does not count" if name == LABELS else ""
        _refuse(name, column, f"ids >= 0{more}, not {int(wrong[0])}")


def _check_padding(mask: Tensor) -> None:
    padded = int((mask == 0).sum())
    if bool(((mask != 0) & (mask != 1)).any()):
        numbers, lengths = torch.unique_consecutive(mask, return_counts=True)
        _refuse(
            PADDING,
            mask,
            "all 1: numbers of documents are given by seq_lengths, here "
            f"{short(lengths[numbers != 0])}" + (", without the padding" if padded else ""),
        )
    if padded:
        _refuse(
            PADDING,
            mask,
            f"all 1, no padding: leave the {padded} tokens of 0 out (tokenize and pack with "
            "padding=False)",
        )


def _refuse(name: str, column: Tensor, expected: str) -> None:
    raise ValueError(
        f"{name} is {short(column)} in an item of {len(column)} tokens, expected {expected}"
    )
