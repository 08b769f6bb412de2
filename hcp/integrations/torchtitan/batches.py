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
from hcp.integrations.loader import DynamicCPCollator, packed_documents

Batch = tuple[dict[str, Tensor], Tensor]
"""A batch of torchtitan's loaders: {"input", "positions"} and labels, each (B, seq_len)."""


def dispatch(batch: Batch | None, config: hcp.Config, groups: hcp.ProcessGroups) -> hcp.Step:
    """Plan and dispatch the documents of all ranks' batches. None: this rank has no batch.

    Every rank calls it. The plan has no lengths if no rank has a document.
    """
    documents = () if batch is None else documents_of(*batch)
    return DynamicCPCollator(config, groups, to_sample=_sample)(documents)


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

    torchtitan's layers cannot take 0 rows: a rank without rows gets one, which has no label.
    """
    tokens, positions = (cp.at_least_one_row(x) for x in (local.tokens, cp.position_ids))
    labels = cp.at_least_one_row(local.labels, IGNORE_INDEX)
    extra = {"positions": positions.unsqueeze(0), "attention_masks": cp}
    return tokens.unsqueeze(0), labels.unsqueeze(0), extra
