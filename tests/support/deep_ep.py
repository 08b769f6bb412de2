"""Stands in for DeepEP, whose exchanges of Megatron-Core's flex dispatcher run on GPUs.

T rows of a rank, K experts of a row, D width; R rows that reach a rank, each once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single


class _Handle:
    """What the way back needs."""

    def __init__(self, rows: int, sent: list[Tensor], received: list[int]) -> None:
        self.rows, self.sent, self.received = rows, sent, received


def dispatch(
    x: Tensor, experts: Tensor, probs: Tensor, count: int, group: Any, **others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, _Handle]:
    """Send each row (T, D) once to every rank that holds one of its experts (T, K). Return the rows
    (R, D) that came, their experts by number on this rank or -1, the weights, and rows of each
    expert."""
    assert probs.dtype == torch.float32  # as DeepEP has it
    size = dist.get_world_size(group)
    own = count // size
    sent = [((experts // own) == rank).any(1).nonzero().flatten() for rank in range(size)]
    counts = torch.tensor([len(rows) for rows in sent])
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    handle = _Handle(len(x), sent, received.tolist())
    local = [experts[rows] - rank * own for rank, rows in enumerate(sent)]
    places = torch.cat([torch.where((e >= 0) & (e < own), e, -1) for e in local])
    rows = torch.cat(sent)
    came, weights = (_exchanged(t[rows], handle, group) for t in (x, probs))
    chosen = _exchanged(places.double(), handle, group).long()
    held = chosen[chosen >= 0].bincount(minlength=own)
    return came, chosen, torch.where(chosen >= 0, weights, 0.0), held, handle


def combine(x: Tensor, group: Any, handle: _Handle, **others: Any) -> tuple[Tensor, None]:
    """Send rows (R, D) back and add those of each row."""
    back = _exchanged(x, handle, group, back=True)
    return x.new_zeros(handle.rows, x.shape[1]).index_add(0, torch.cat(handle.sent), back), None


def _exchanged(x: Tensor, handle: _Handle, group: Any, back: bool = False) -> Tensor:
    splits = handle.received, [len(rows) for rows in handle.sent]
    outgoing, incoming = splits if back else splits[::-1]
    out = x.new_empty(sum(incoming), *x.shape[1:])
    return all_to_all_single(out, x.contiguous(), incoming, outgoing, group=group)


@contextlib.contextmanager
def deep_ep_over_gloo() -> Iterator[None]:
    """Return a context inside which Megatron-Core's flex dispatcher exchanges rows over Gloo, and
    hcp does not refuse it there."""
    from megatron.core.transformer.moe import token_dispatcher

    from hcp.integrations.megatron import megatron_checks

    given: dict[str, Any] = dict(fused_dispatch=dispatch, fused_combine=combine)
    with (
        mock.patch.multiple(token_dispatcher, **given, set_deepep_num_sms=mock.Mock()),
        mock.patch.object(megatron_checks, "_check_flex_on_cpus"),
    ):
        yield
