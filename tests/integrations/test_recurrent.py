"""Recurrent layers over several ranks, some of them without rows, equal one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.memory import Alone
from torch import Tensor

import hcp
from hcp.integrations.recurrent import mamba_states, scan_mamba

HEADS, WIDTH, STATES = 2, 3, 4
COLUMNS = HEADS * (WIDTH + 2 * STATES)


def scanned(cp: hcp.ContextParallelHandler, rows: Tensor) -> Tensor:
    """Mamba-2 of rows (T, ...), row by row inside of a span."""
    x, writes, reads = rows.view(-1, HEADS, WIDTH + 2 * STATES).split([WIDTH, STATES, STATES], -1)
    logs = -x[..., 0].square()

    def scan(spans: list[slice]) -> tuple[Tensor, Tensor]:
        outs = []
        for span in spans:
            state = x.new_zeros(HEADS, WIDTH, STATES)
            for t in range(span.start, span.stop):
                added = torch.einsum("hp,hn->hpn", x[t], writes[t])
                state = state * logs[t].exp()[:, None, None] + added
                outs.append(torch.einsum("hpn,hn->hp", state, reads[t]))
        return torch.stack(outs), mamba_states(x, logs, writes, spans)

    return scan_mamba(cp, x, logs, reads, scan)


def check(groups: Any, lengths: Sequence[int]) -> None:
    ranks = groups.transport.size
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=16, min_degree=ranks)
    cp = hcp.ContextParallelHandler(plan, 0, groups.transport, sources=[0] * len(lengths))
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(n, COLUMNS, generator=generator) for n in lengths]
    expected = [gradient_of(alone, x) for x in whole]

    def own(parts: Sequence[Tensor]) -> Tensor:
        spans = [parts[s][start : start + n] for s, start, n in cp.layout.spans]
        return torch.cat(spans) if spans else parts[0][:0]

    out, grad = gradient_of(lambda x: scanned(cp, x), own(whole))
    torch.testing.assert_close(out, own([e[0] for e in expected]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad, own([e[1] for e in expected]), rtol=1e-4, atol=1e-4)


def alone(rows: Tensor) -> Tensor:
    """Of one sequence, on one rank."""
    plan = hcp.plan([len(rows)], ranks=1, max_tokens_per_rank=16)
    return scanned(hcp.ContextParallelHandler(plan, 0, Alone(0, 1, "cpu"), sources=[0]), rows)


def gradient_of(function: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.clone().requires_grad_()
    out = function(rows)
    (out * out).sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    return out.detach(), rows.grad


@pytest.mark.parametrize("lengths", [[1], [2, 1], [9, 4]])
def test_mamba_over_ranks_some_without_rows_equals_one_rank(lengths: list[int]) -> None:
    hcp.loopback(3, lambda groups: check(groups, lengths))
