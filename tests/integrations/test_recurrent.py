"""Recurrent layers over several ranks, some of them without rows, equal one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.memory import Alone
from support.zero_rows import DTYPES, PLANS, Call, Inputs, Made, Results, check
from torch import Tensor
from torch.nn import functional

import hcp
from hcp._words import ScanType
from hcp.integrations.recurrent import convolve, delta_rule, mamba_states, scan_mamba

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


def check_mamba(groups: Any, lengths: Sequence[int]) -> None:
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
    hcp.loopback(3, lambda groups: check_mamba(groups, lengths))


# ---- ranks without rows, in every dtype ----------------------------------------------------------


def convolved(made: Made, given: Inputs) -> Results:
    weight = given.parameter("weight", 5, 3)

    def convolution(rows: Tensor) -> Tensor:
        taps = functional.pad(rows.t(), (2, 0))[None]
        return functional.conv1d(taps, weight[:, None], groups=5)[0].t()

    return {"out": ("rows", convolve(made.cp, given("x", 5), 3, convolution))}


def mamba(made: Made, given: Inputs) -> Results:
    wide = torch.promote_types(given.dtype, torch.float32)
    x, writes, reads = given("x", 2, 3), given("writes", 2, 4), given("reads", 2, 4)
    logs = -given("logs", 2).to(wide).square()

    def scan(spans: list[slice]) -> tuple[Tensor, Tensor]:
        outs, states = [], mamba_states(x, logs, writes.to(wide), spans)
        for span in spans:
            past = torch.ones(*2 * [span.stop - span.start]).tril()[..., None].to(wide)
            later = logs[span].cumsum(0)[:, None] - logs[span].cumsum(0)[None]
            seen = torch.einsum("thn,shn->tsh", reads[span].to(wide), writes[span].to(wide))
            seen = seen * (later * past).exp() * past
            outs.append(torch.einsum("tsh,shp->thp", seen, x[span].to(wide)).to(x.dtype))
        return torch.cat(outs), states

    return {"out": ("rows", scan_mamba(made.cp, x, logs, reads.to(wide), scan, writes))}


def rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule of one run of rows, token by token."""
    wide = torch.promote_types(value.dtype, torch.float32)
    heads, outs = value.shape[2], []
    query, key = (x.to(wide).repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    state = torch.zeros(1, heads, key.shape[3], value.shape[3], dtype=wide)
    state = state if initial_state is None else initial_state.to(wide)
    for t in range(value.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        known = torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        added = (value[:, t].to(wide) - known) * beta[:, t, :, None]
        state = state + key[:, t, ..., None] * added[..., None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(outs, 1).to(value.dtype), state


def delta(scan_type: ScanType) -> Call:
    def call(made: Made, given: Inputs) -> Results:
        query, key, value = given("query", 2, 3), given("key", 2, 3), given("value", 4, 5)
        gates = {"g": -given("g", 4).float().square(), "beta": given("beta", 4).sigmoid()}
        cp = made.again(scan_type=scan_type)
        out = delta_rule(cp, rule, query, 0.3 * key, value, gates)
        return {"out": ("rows", out)}

    return call


LAYERS: dict[str, Call] = {
    "a convolution": convolved,
    "Mamba-2": mamba,
    "the delta rule by states": delta("pass_states"),
    "the delta rule by heads": delta("sequence_to_head"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_layer_of_which_ranks_have_no_rows_equals_one_rank(
    plan: str, name: str, dtype: torch.dtype
) -> None:
    check(PLANS[plan], LAYERS[name], dtype)
