"""Split batches of torchtitan's loaders into documents, and turn planned rows into model inputs.

B rows of the loader, T tokens on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

import hcp
from hcp.integrations.documents import packed_documents
from hcp.integrations.loader import DynamicCPCollator

Batch = tuple[dict[str, Tensor], Tensor]
"""A batch of torchtitan's loaders: {"input", "positions"} and labels, each (B, seq_len)."""


def collator_of(
    config: hcp.Config, groups: hcp.ProcessGroups, *, cost: hcp.CostModel, alignment: int = 1
) -> DynamicCPCollator:
    """Return what plans documents: see `documents_of`."""
    return DynamicCPCollator(config, groups, cost=cost, to_sample=_sample, alignment=alignment)


def documents_of(inputs: dict[str, Tensor], labels: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield the documents that are packed into the rows of a batch."""
    if set(inputs) != {"input", "positions"}:
        raise ValueError(f"the loader gives {sorted(inputs)}, expected input and positions")
    rows = zip(inputs["input"], labels, inputs["positions"], strict=True)
    for tokens, targets, positions in rows:
        yield from packed_documents({"tokens": tokens, "labels": targets}, positions)


def _sample(document: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**document, "loss_mask": (document["labels"] != IGNORE_INDEX).float()}


def joined(batches: Sequence[Batch]) -> Batch:
    """Join the batches of a step. Without any, return a batch without rows."""
    if not batches:
        empty = torch.empty(0, 0, dtype=torch.int64)
        return {"input": empty, "positions": empty}, empty
    inputs = {name: torch.cat([batch[name] for batch, _ in batches]) for name in batches[0][0]}
    return inputs, torch.cat([labels for _, labels in batches])


def model_inputs(
    cp: hcp.ContextParallelHandler, local: hcp.LocalBatch
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return tokens (1, T), labels (1, T), and the model's keyword arguments.

    torchtitan's layers cannot take 0 rows: a rank without rows gets as many as the plan's alignment
    asks for. They have no label, as those that the alignment adds.
    """
    labels = torch.where(local.loss_mask > 0, local.labels, IGNORE_INDEX)
    tokens, positions = (_with_rows(cp, x, 0) for x in (local.tokens, cp.position_ids))
    extra = {"positions": positions, "attention_masks": cp}
    return tokens, _with_rows(cp, labels, IGNORE_INDEX), extra


def _with_rows(cp: hcp.ContextParallelHandler, x: Tensor, value: int) -> Tensor:
    """x (T,) as (1, T). Where T is 0, rows of `value` stand in."""
    return (x if cp.rows else x.new_full((cp.plan.core.alignment,), value)).unsqueeze(0)


def stand_in_rows(cp: hcp.ContextParallelHandler, rows: int) -> Tensor:
    """float32 (rows,): 1 for a row that belongs to no document, of those that `model_inputs`
    gives."""
    own = cp.rows - cp.layout.padding
    return (torch.arange(rows, device=cp.device) >= own).float()
