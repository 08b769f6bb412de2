"""A check of a library's kernel before its results are used: on a small pack, by the formula.

A library may be wrong for some head sizes or masks alone, and say nothing. So each kind of call is
checked once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hcp.attention.kernels import KernelCall, Launch, PackedKernel
from hcp.attention.kernels.formula import Formula
from hcp.exchange.tables import Entry

ENTRIES = (75, 263), (9, 33), (150, 150), (3, 8), (1, 1)
"""Queries and keys of the entries of the pack."""

GAP = 2, 5
"""Queries and keys between two entries, which no entry names."""

TOLERANCE = 0.05
"""Most that a result may be off, as a share of the largest expected, or of 1."""


def fault(kernel: PackedKernel, call: KernelCall, softcap: float) -> str | None:
    """Name what the kernel gets wrong for calls like this one. None: nothing.

    It computes rows of other lengths, with the call's dtype, heads, head sizes and window. Raises
    what the kernel raises. The random state of torch stays as it is.
    """
    launch = launch_of(call.launch.window)
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        rows = _Rows.like(call, launch)
        expected = _Results.by_formula(rows, launch, softcap)
        if not call.backward:
            found = kernel.forward(launch, rows.query, rows.key, rows.value, rows.scale)
            return _difference(expected[:2], found, launch.entries)
        attended = *rows[:3], expected.out.to(call.query.dtype), expected.lse
        grads = kernel.backward(launch, (rows.grad_out, rows.grad_lse), attended, rows.scale)
        return _difference(expected[2:], grads, launch.entries)


def launch_of(window: tuple[int, int]) -> Launch:
    """The pack under a window that ends at the bottom right. -1: no limit."""
    left, right = window
    entries, query, key = [], 0, 0
    for queries, keys in ENTRIES:
        ahead = keys - queries
        low = -queries if left < 0 else ahead - left
        high = keys if right < 0 else ahead + right
        entries.append(Entry(query, queries, key, keys, low, high))
        query, key = query + queries + GAP[0], key + keys + GAP[1]
    launch = Launch(entries)
    launch.window = window  # also where it cuts nothing from the first entry
    return launch


class _Rows(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    @property
    def scale(self) -> float:
        return math.sqrt(1 / self.query.shape[2])

    @classmethod
    def like(cls, call: KernelCall, launch: Launch) -> _Rows:
        (_, heads, size), (_, key_heads, value_size) = call.query.shape, call.value.shape
        queries, keys = launch.queries.stop, launch.keys.stop
        generator = torch.Generator(call.query.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            device = generator.device
            return torch.randn(*shape, generator=generator, device=device).to(call.query.dtype)

        return cls(
            random(queries, heads, size),
            random(keys, key_heads, size),
            random(keys, key_heads, value_size),
            random(queries, heads, value_size),
            random(queries, heads).float() if call.grad_lse else None,
        )


class _Results(NamedTuple):
    """In float32. In gaps the log-sum-exp is NaN, as kernels give it, and the rest is 0."""

    out: Tensor
    lse: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor

    @classmethod
    def by_formula(cls, rows: _Rows, launch: Launch, softcap: float) -> _Results:
        formula = Formula(softcap)
        query, key, value, grad_out = (x.float() for x in rows[:4])
        lse = torch.full(query.shape[:2], torch.nan, device=query.device)
        zeros = [torch.zeros_like(x) for x in (query, key, value)]
        whole = cls(torch.zeros_like(grad_out), lse, *zeros)
        for entry in launch.entries:
            q = slice(entry.query_row, entry.query_row + entry.query_rows)
            k = slice(entry.key_row, entry.key_row + entry.key_rows)
            own, given = Launch([entry]), (query[q], key[k], value[k])
            out, sums = formula.forward(own, *given, rows.scale)
            of_lse = None if rows.grad_lse is None else rows.grad_lse[q]
            grads = grad_out[q], of_lse
            parts = formula.backward(own, grads, (*given, out, sums), rows.scale)
            for target, at, part in zip(whole, (q, q, q, k, k), (out, sums, *parts), strict=True):
                target[at] = part
        return whole


_NAMES = {
    2: ("output", "log-sum-exp"),
    3: ("queries' gradient", "keys' gradient", "values' gradient"),
}


def _difference(
    expected: Sequence[Tensor], found: Sequence[Tensor], entries: Sequence[Entry]
) -> str | None:
    """Which result is off, and by how much."""
    queries = _rows_of([(entry.query_row, entry.query_rows) for entry in entries])
    keys = _rows_of([(entry.key_row, entry.key_rows) for entry in entries])
    for name, want, got in zip(_NAMES[len(expected)], expected, found, strict=True):
        rows = keys if name.startswith(("keys", "values")) else queries
        want, got = want[rows], got[rows]
        largest = max(1.0, float(want.abs().max()))  # a query with one key has a gradient of 0
        error = float((got.float() - want).abs().max()) / largest
        if not error <= TOLERANCE:
            return f"the {name} is off by {error:.3f} of its largest, expected <= {TOLERANCE}"
    return None


def _rows_of(parts: Sequence[tuple[int, int]]) -> list[int]:
    return [row for first, rows in parts for row in range(first, first + rows)]
