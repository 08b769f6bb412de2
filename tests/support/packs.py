"""Packs with gaps, and what a kernel has to compute of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hcp.attention.kernels import Kernel, KernelCall, Launch, PackedKernel
from hcp.attention.kernels.formula import Formula
from hcp.exchange.tables import Entry

RESULTS = "out", "lse", "dquery", "dkey", "dvalue"


class Block(NamedTuple):
    """One entry of a pack, and the rows that nobody computes before it."""

    queries: int
    keys: int
    gap: tuple[int, int] = 0, 0


def packed(
    blocks: Sequence[Block], window: tuple[int, int] = (-1, 0), start: tuple[int, int] = (0, 0)
) -> Launch:
    """One launch, of a window that ends at the bottom right; -1 is no limit."""
    query, key = start
    entries = []
    for queries, keys, (query_gap, key_gap) in blocks:
        query, key = query + query_gap, key + key_gap
        ahead = keys - queries
        low = -queries if window[0] < 0 else ahead - window[0]
        high = keys if window[1] < 0 else ahead + window[1]
        entries.append(Entry(query, queries, key, keys, low, high))
        query, key = query + queries, key + keys
    launch = Launch(entries)
    launch.window = window  # that of a block which no limit cuts has none
    return launch


class Rows(NamedTuple):
    """What a kernel is given for a launch."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self[:3]


def drawn(
    launch: Launch,
    *,
    heads: tuple[int, int] = (8, 2),
    sizes: tuple[int, int] = (64, 64),
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    grad_lse: bool = False,
) -> Rows:
    """Random rows, gaps with them."""
    torch.manual_seed(0)
    queries = launch.queries.stop - launch.queries.start
    keys = launch.keys.stop - launch.keys.start
    shapes = [(queries, heads[0], sizes[0]), (keys, heads[1], sizes[0])]
    shapes += [(keys, heads[1], sizes[1]), (queries, heads[0], sizes[1])]
    query, key, value, grad = (torch.randn(*x, device=device).to(dtype) for x in shapes)
    of_lse = torch.randn(queries, heads[0], device=device) if grad_lse else None
    return Rows(query, key, value, grad, of_lse)


def results(kernel: Kernel, launch: Launch, rows: Rows, scale: float = 0.125) -> tuple[Tensor, ...]:
    """``RESULTS`` of a launch."""
    out, lse = kernel.forward(launch, *rows.qkv, scale)
    grads, attended = (rows.grad_out, rows.grad_lse), (*rows.qkv, out, lse)
    return out, lse, *kernel.backward(launch, grads, attended, scale)


def exact(launch: Launch, rows: Rows, softcap: float = 0.0) -> tuple[Tensor, ...]:
    """The results of every entry alone, by the formula in float64. Zeros in the gaps."""
    wide = Rows(*(None if x is None else x.double() for x in rows))  # type: ignore[arg-type]
    of_rows = [x.new_zeros(x.shape) for x in (wide.grad_out, wide.grad_out[..., 0], *wide.qkv)]
    for entry in launch.entries:
        q, k = places(launch, entry)
        own = Rows(
            wide.query[q],
            wide.key[k],
            wide.value[k],
            wide.grad_out[q],
            None if wide.grad_lse is None else wide.grad_lse[q],
        )
        found = results(Formula(softcap), Launch([entry]), own)
        for whole, at, part in zip(of_rows, (q, q, q, k, k), found, strict=True):
            whole[at] = part
    return tuple(of_rows)


def places(launch: Launch, entry: Entry) -> tuple[slice, slice]:
    """The entry's queries and keys among the launch's rows."""
    query, key = entry.query_row - launch.queries.start, entry.key_row - launch.keys.start
    return slice(query, query + entry.query_rows), slice(key, key + entry.key_rows)


def errors(launch: Launch, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
    """Of each result the largest error over the largest number, or over 1. Queries that nobody
    computes do not count; keys that nobody sees do, whose gradient is 0."""
    inside = torch.zeros(len(wanted[0]), dtype=torch.bool, device=wanted[0].device)
    for entry in launch.entries:
        inside[places(launch, entry)[0]] = True
    worst = {}
    for name, got, want in zip(RESULTS, found, wanted, strict=True):
        if name in ("out", "lse", "dquery"):
            got, want = got[inside], want[inside]
        difference = float((got.double() - want).abs().max())
        worst[name] = difference / max(1.0, float(want.abs().max()))
    return worst


def expect_order_refused(kernel: PackedKernel, launch: Launch, rows: Rows, family: str) -> None:
    """Expect that a kernel which sums gradients in any order leaves backwards to others under
    torch's deterministic algorithms, and refuses them, or warns where torch only warns."""

    def takes(backward: bool) -> bool:
        return kernel.takes(KernelCall(launch, rows.query, rows.value, backward, grad_lse=False))

    results(kernel, launch, rows)
    assert takes(backward=True)
    message = f"the backward of the backend '{family}' sums in any order, expected a deterministic"
    try:
        torch.use_deterministic_algorithms(True)
        assert takes(backward=False)
        assert not takes(backward=True)
        with pytest.raises(ValueError, match=message):
            results(kernel, launch, rows)
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert not takes(backward=True)
        with pytest.warns(UserWarning, match=message):
            results(kernel, launch, rows)
    finally:
        torch.use_deterministic_algorithms(False)
