"""Rows that several ranks want, with gradients: those before each span, for a convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hcp import ops
from hcp.exchange.agreement import BACKWARD, Stamp
from hcp.exchange.tables import Layout, Move
from hcp.exchange.transport import Transport


class Path(Protocol):
    """How rows get from a source to an output, as a Route has it."""

    pack: Tensor
    sends: list[Move]
    receives: list[Move]
    arrange: Tensor
    sent_rows: int
    received_rows: int
    output_rows: int


def carry_with_gradients(
    transport: Transport, path: Path, sources: Sequence[Tensor], stamp: Stamp
) -> Tensor:
    """Rows of sources (N, width) each along a path, side by side: (output_rows, sum of widths).
    Gradients of all copies of a row are summed once."""
    wire = ops.pack(sources, path.pack, path.sent_rows)
    moves = path.sends, path.receives
    received: Tensor = _Exchange.apply(wire, transport, *moves, path.received_rows, stamp)  # type: ignore[no-untyped-call]
    return ops.pack([received], path.arrange, path.output_rows)


def rows_of_spans(layout: Layout, before: int) -> Tensor:
    """int64 (T,): where the rank's own rows lie when each span is behind ``before`` rows. Padding
    has none before it."""
    spans = len(layout.spans)
    sizes = torch.tensor(
        [*(span.rows for span in layout.spans), layout.padding], dtype=torch.int64, device="cpu"
    )
    halos = before * torch.tensor([*range(1, spans + 1), spans], device="cpu")
    return torch.arange(layout.rows, device="cpu") + halos.repeat_interleave(sizes)


class _Exchange(torch.autograd.Function):
    """Packed rows to their readers; gradients the same way back."""

    @staticmethod
    def forward(
        ctx: Any,
        sent: Tensor,
        transport: Transport,
        sends: list[Move],
        receives: list[Move],
        rows: int,
        stamp: Stamp,
    ) -> Tensor:
        ctx.given, ctx.stamp = (transport, receives, sends, len(sent)), stamp
        received = sent.new_empty(rows, sent.shape[1])
        transport.start(sent, sends, received, receives, stamp=stamp).wait()
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        stamp = ctx.stamp.in_pass(BACKWARD)
        back = _Exchange.apply(grad.contiguous(), *ctx.given, stamp)  # type: ignore[no-untyped-call]
        return back, None, None, None, None, None
