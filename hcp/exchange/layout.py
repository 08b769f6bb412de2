"""The layout: which rows one rank holds in a micro-batch."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp import _core
from hcp.errors import HcpError
from hcp.planning.plan import Plan


class Span(NamedTuple):
    """A run of consecutive tokens of one sequence."""

    sequence: int
    start: int
    rows: int


class Layout:
    """The rows that ``rank`` holds in a micro-batch of a plan. A rank without rows has degree 0."""

    def __init__(self, plan: Plan, micro_batch: int, rank: int) -> None:
        """Lay out one micro-batch of a plan for one rank.

        Args:
            plan: the plan.
            micro_batch: its place in the plan, from 0.
            rank: of the plan's ranks, from 0.

        Raises:
            ValueError: the plan has no such micro-batch or rank.
        """
        core = _core.create_layout(plan.core, micro_batch, rank)
        self.plan = plan
        self.micro_batch: int = core.micro_batch
        self.rank: int = core.rank
        self.first_rank: int = core.first_rank
        """First rank of the group."""
        self.degree: int = core.degree
        """Ranks of the group."""
        self.rows: int = core.rows
        """Rows of this rank, padding included."""
        self.padding: int = core.padding
        """Number of rows at the end that ``alignment`` adds. They belong to no sequence."""
        self.paddings: tuple[int, ...] = tuple(core.paddings)
        """The padding of each rank of the group."""
        self.sequences: tuple[int, ...] = tuple(core.sequences)
        """The group's sequences, as indices of ``plan.lengths``."""
        self.lengths: tuple[int, ...] = tuple(core.lengths)
        """Tokens of each of these sequences."""
        self.cu_seqlens: Tensor = tensor_of(core.cu_seqlens, torch.int32)
        """int32 (sequences + 1,): local rows of each sequence, summed."""
        self.positions: Tensor = tensor_of(core.positions, torch.int64)
        """int64 (rows,): each row's place in its sequence; 0 in padding."""
        self._core = core

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.plan, self.micro_batch, self.rank)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The rank's rows, end to end, as runs of tokens, each of one document."""
        return tuple(Span(*span) for span in self._core.spans)

    @cached_property
    def documents(self) -> tuple[Span, ...]:
        """The documents of the group's sequences, whole and in order. A sequence is one, unless its
        masks let tokens from some position on neither see, nor be seen by, those before."""
        return tuple(Span(*span) for span in self._core.documents)

    @cached_property
    def span_documents(self) -> tuple[int, ...]:
        """The number of each span's document among these."""
        return self._core.span_documents

    @cached_property
    def stretches(self) -> tuple[Span, ...]:
        """The stretches of the group's sequences, whole and in order: documents or, of one with
        branches, tokens of a part of its tree that no other part continues but at the last."""
        return tuple(Span(*span) for span in self._core.stretches)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The number of the stretch that each of these continues, -1: none. It comes before."""
        return tuple(self._core.parents)

    @cached_property
    def has_branches(self) -> bool:
        """Whether the group's sequences have branches."""
        return any(parent >= 0 for parent in self.parents)

    @property
    def spans_continue(self) -> bool:
        """Whether a span of the group may continue another."""
        return self.degree > 1 or self.has_branches


def expect_sequences_alike(layout: Layout, what: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError for several sequences, all of one length, of which a rank does not hold the
    same places: chunks of which some have a token more are cut one in another way than the next."""
    chunks, sequences = 2 * layout.degree, len(layout.lengths)
    if sequences > 1 and layout.degree > 1 and layout.lengths[0] % chunks:
        raise ValueError(
            f"{what} has shape {shape}, of {sequences} sequences of {layout.lengths[0]} tokens, "
            f"expected a multiple of 2 * degree = {chunks}, or the sequences packed, end to end"
        )


def tensor_of(view: memoryview, dtype: torch.dtype) -> Tensor:
    """The values of a buffer that the C core holds, without a copy. A backward may keep them, also
    those that an evaluation in inference mode has made."""
    with torch.inference_mode(False):
        if view.nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(view, dtype=dtype)


def copied(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table of the host to a device, where it is kept, for evaluation and training. The host
    does not wait for what a GPU has to do before. Raises HcpError in a CUDA graph, which copies
    when it is replayed."""
    if device.type != "cuda":
        return table.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise HcpError(
            "a CUDA graph captures the first call of its kind, which copies a table that later "
            "calls read, expected calls that were made before: run the layer once, forward and "
            "backward, before the capture",
            code="cuda-graph",
        )
    with torch.inference_mode(False):
        return table.pin_memory().to(device, non_blocking=True)


def buffer_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The values of a tensor on the CPU for the C core to read, without a copy where they are
    contiguous. The buffer keeps them."""
    values = tensor.contiguous()
    buffer = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
    buffer.values = values  # type: ignore[attr-defined]
    return buffer


def rows_may_vary(tensor: Tensor) -> Tensor:
    """Tell a compiler in use that dim 0 differs from plan to plan, so that one graph serves all."""
    dynamo = sys.modules.get("torch._dynamo")  # there once torch.compile was called
    mark = getattr(dynamo, "maybe_mark_dynamic", None)  # not yet, while another thread imports it
    if mark is not None:
        mark(tensor, 0)
    return tensor


def halo_rows(layout: Layout, before: int) -> Tensor:
    """int64 (T,): where the rank's own rows lie when ``before`` rows precede each span. Padding has
    none before it."""
    spans = len(layout.spans)
    sizes = torch.tensor(
        [*(span.rows for span in layout.spans), layout.padding], dtype=torch.int64, device="cpu"
    )
    halos = before * torch.tensor([*range(1, spans + 1), spans], device="cpu")
    return torch.arange(layout.rows, device="cpu") + halos.repeat_interleave(sizes)


def positions_of(layout: Layout) -> Tensor:
    """int64 (rows,): each row's position by the mask of its sequence; without one, its place."""
    masks = next(iter(layout.plan.masks.values()), None)
    if masks is None:
        return layout.positions
    positions = layout.positions.clone()
    bounds = layout.cu_seqlens.tolist()
    for sequence, (begin, end) in zip(layout.sequences, itertools.pairwise(bounds), strict=True):
        runs = masks[sequence].runs
        if runs is not None:
            tokens, at = torch.tensor(runs, device="cpu").t().contiguous()
            run = torch.searchsorted(tokens, positions[begin:end], right=True) - 1
            positions[begin:end] += (at - tokens)[run]
    return positions


def position_count(layout: Layout) -> int:
    """The number of positions that the group's sequences have at most."""
    masks = next(iter(layout.plan.masks.values()), None)
    if masks is None:
        return max(layout.lengths, default=0)
    return max((masks[sequence].end for sequence in layout.sequences), default=0)


def span_rows(layout: Layout) -> list[int]:
    """Rows of each span; then of the padding, if there is any, which is a span too."""
    rows = [span.rows for span in layout.spans]
    return [*rows, layout.padding] if layout.padding else rows


# ---- whole sequences -----------------------------------------------------------------------------
#
# The group's sequences, whole and end to end, then the padding of each of its ranks. Documents of a
# sequence have bounds of their own.


def whole_cu_seqlens(layout: Layout) -> Tensor:
    """int32, as attention kernels take it: tokens of each document, then of each rank's padding,
    summed."""
    masked = bool(layout.plan.masks)  # without masks, sequences are documents
    documents = [document.rows for document in layout.documents] if masked else layout.lengths
    return _summed(layout, [*documents, *filter(None, layout.paddings)])


def whole_stretches(layout: Layout) -> Tensor:
    """The same of stretches."""
    return _summed(layout, stretch_rows(layout))


def stretch_rows(layout: Layout) -> list[int]:
    """Tokens of each stretch, then of each rank's padding."""
    return [*(stretch.rows for stretch in layout.stretches), *filter(None, layout.paddings)]


def _summed(layout: Layout, sizes: Sequence[int]) -> Tensor:
    lengths = torch.tensor([0, *sizes], dtype=torch.int64, device="cpu")
    total, most = int(lengths.sum()), torch.iinfo(torch.int32).max
    if total > most:
        raise ValueError(
            f"micro-batch {layout.micro_batch}: the group of rank {layout.rank} has {total:,} "
            f"tokens, expected <= {most:,}, what int32 boundaries of sequences can name: lower "
            "max_tokens_per_rank or the degree"
        )
    return lengths.cumsum(0).int()


def rows_in_whole(layout: Layout) -> Tensor:
    """int64 (T,): where each of this rank's rows lies in the whole sequences."""
    lengths = torch.tensor(layout.lengths, dtype=torch.int64, device="cpu")
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(layout.cu_seqlens.diff())
    rows = starts + layout.positions[: len(starts)]
    if not layout.padding:
        return rows
    place = layout.rank - layout.first_rank
    first = sum(layout.lengths) + sum(layout.paddings[:place])
    return torch.cat((rows, torch.arange(first, first + layout.padding, device="cpu")))
