"""Predictions of a model for the rows of all ranks, in the order of the samples.

T rows of this rank, N samples, L tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hcp.integrations.columns import IGNORED
from hcp.step.dispatch import LocalBatch
from hcp.step.handler import ContextParallelHandler

Preprocess = Callable[[Tensor, Tensor], Any]
"""Transformers' `preprocess_logits_for_metrics`."""

_NONE = -1
"""The document of rows that fill a rank's share up for the gathering."""


class Predictions:
    """Collects predictions of micro-batches, whose samples have `document` and `own_labels`."""

    def __init__(self, accelerator: Any, preprocess: Preprocess | None) -> None:
        self._accelerator, self._preprocess = accelerator, preprocess
        self._several = False
        self._rows: list[tuple[Tensor, ...]] = []

    def add(self, cp: ContextParallelHandler, local: LocalBatch, logits: Tensor) -> None:
        """Keep what is predicted for the rows of a micro-batch. `logits`: (T, vocabulary)."""
        found: Any = logits[None]
        if self._preprocess is not None:
            found = self._preprocess(found, local.own_labels[None])
        self._several = isinstance(found, tuple | list)
        parts = list(found) if self._several else [found]
        for part in parts:
            shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            if not isinstance(part, Tensor) or part.shape[:2] != (1, cp.rows):
                raise ValueError(
                    f"preprocess_logits_for_metrics gives {shape} for {cp.rows} rows, expected "
                    f"tensors (1, {cp.rows}, ...): a rank has rows of sequences, so each is "
                    "computed by itself"
                )
        places = torch.stack((local.document, cp.position_ids[: cp.rows].to(local.document)), 1)
        self._rows.append((places, local.own_labels, *(part[0] for part in parts)))

    def gather(self, samples: int) -> tuple[Any, np.ndarray[Any, Any]]:
        """Return predictions (N, L, ...) and labels (N, L) of all ranks, -100 after the end of a
        sample. Every rank calls it, and gets all."""
        columns = [self._gather(torch.cat(rows)) for rows in zip(*self._rows, strict=True)]
        (documents, positions), labels, *parts = columns[0].T, *columns[1:]
        kept = documents != _NONE
        at = (documents[kept], positions[kept])
        longest = int(at[1].max()) + 1
        filled = [_filled(part[kept], at, (samples, longest)) for part in (labels, *parts)]
        return (tuple(filled[1:]) if self._several else filled[1]), filled[0]

    def _gather(self, rows: Tensor) -> np.ndarray[Any, Any]:
        rows = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
        even = self._accelerator.pad_across_processes(rows, dim=0, pad_index=_NONE)
        return np.asarray(self._accelerator.gather(even).cpu())


def _filled(
    rows: np.ndarray[Any, Any], at: tuple[Any, Any], shape: Sequence[int]
) -> np.ndarray[Any, Any]:
    full = np.full((*shape, *rows.shape[1:]), IGNORED, dtype=rows.dtype)
    full[at] = rows
    return full
