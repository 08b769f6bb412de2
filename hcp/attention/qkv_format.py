"""Formats of a batch of rows: THD, packed, is hcp's own; SBHD and BSHD hold equal lengths.

T rows on this rank, S rows of one sequence, B sequences.
"""

from __future__ import annotations

from torch import Tensor

from hcp.exchange.layout import Layout, expect_sequences_alike

QKV_FORMATS = ("thd", "sbhd", "bshd")
"""Transformer Engine's names."""


def to_rows(layout: Layout, x: Tensor, qkv_format: str) -> Tensor:
    """Take this rank's rows, (T, ...), of a batch (S, B, ...) or (B, S, ...); THD rows as they are.

    A view, but for SBHD with several sequences, whose rows lie interleaved.
    """
    if qkv_format not in QKV_FORMATS:
        raise ValueError(f"qkv_format is {qkv_format!r}, expected one of {QKV_FORMATS}")
    if qkv_format == "thd":
        return x
    if x.dim() != 4:
        raise ValueError(f"shape is {tuple(x.shape)}, expected {qkv_format}: 4 dimensions")
    by_sequence = x.transpose(0, 1) if qkv_format == "sbhd" else x
    lengths = layout.lengths
    batch, rows = by_sequence.shape[:2]
    uneven = batch != len(lengths) or len(set(lengths)) > 1
    if batch * rows != layout.rows or (layout.degree and uneven):
        raise ValueError(
            f"the {qkv_format} batch has {batch} sequences of {rows} rows each on this rank, "
            f"expected {layout.rows} rows of {len(lengths)} sequences of one length, "
            f"not {lengths}; lengths that differ are packed: qkv_format='thd'"
        )
    expect_sequences_alike(layout, f"the {qkv_format} batch", tuple(x.shape))
    return by_sequence.flatten(0, 1)


def from_rows(rows: Tensor, batch: int, qkv_format: str) -> Tensor:
    """Undo ``to_rows``: (T, ...) as a view of ``batch`` sequences."""
    if qkv_format == "thd":
        return rows
    count = rows.shape[0] // batch if batch else 0
    by_sequence = rows.view(batch, count, *rows.shape[1:])
    return by_sequence.transpose(0, 1) if qkv_format == "sbhd" else by_sequence
