"""States passed along sequences: recurrences under any plan equal those of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import GlooGroups
from support.ranks import RankError, run_ranks, try_ranks
from torch import Tensor

import hcp
from hcp.exchange import states as passing
from hcp.exchange.layout import Layout

HEADS, KEYS, VALUES = 2, 3, 2
WAYS = {"gathering": 1 << 40, "rounds": 0}
"""A price of a round at which states travel that way."""


# ---- plain recurrences ---------------------------------------------------------------------------
#
# h = apply(decay of a token, h) + input of a token, token by token.


def mamba_2(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One decay for each head."""
    decay = torch.rand(rows, HEADS, 1, 1, generator=generator, dtype=torch.float64)
    return decay, torch.randn(rows, HEADS, KEYS, VALUES, generator=generator).double()


def gated_linear(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One decay for each key (gated linear attention, KDA without its delta rule)."""
    decay = torch.rand(rows, HEADS, KEYS, 1, generator=generator, dtype=torch.float64)
    return decay, torch.randn(rows, HEADS, KEYS, VALUES, generator=generator).double()


def gated_delta(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """g (I - b k k'), and b k v'."""
    key = torch.randn(rows, HEADS, KEYS, generator=generator, dtype=torch.float64)
    key = key / key.norm(dim=-1, keepdim=True)
    value = torch.randn(rows, HEADS, VALUES, generator=generator, dtype=torch.float64)
    gate, beta = torch.rand(2, rows, HEADS, 1, 1, generator=generator, dtype=torch.float64)
    outer = key[..., :, None] * key[..., None, :]
    transition = gate * (torch.eye(KEYS, dtype=torch.float64) - beta * outer)
    return transition, beta * key[..., :, None] * value[..., None, :]


RULES: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Any, str]] = {
    "Mamba-2": (mamba_2, torch.mul, "decay"),
    "gated linear attention": (gated_linear, torch.mul, "decay"),
    "gated delta rule": (gated_delta, torch.matmul, "transition"),
}


def scan(apply: Any, decays: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
    """The state after each token."""
    states = []
    for decay, given_state in zip(decays, inputs, strict=True):
        state = apply(decay, state) + given_state
        states.append(state)
    return torch.stack(states) if states else inputs


def product(apply: Any, decays: Tensor) -> Tensor:
    total = decays[0]
    for decay in decays[1:]:
        total = apply(decay, total)
    return total


# ---- under a plan --------------------------------------------------------------------------------


def handlers(groups: Any, lengths: Any, capacity: int, **plan: Any) -> list[Any]:
    made = hcp.plan(lengths, ranks=groups.transport.size, max_tokens_per_rank=capacity, **plan)
    return [
        hcp.ContextParallelHandler(made, m, groups.transport, sources=[0] * len(lengths))
        for m in range(len(made.micro_batches))
    ]


def by_spans(cp: Any, apply: Any, name: str, decays: Tensor, inputs: Tensor) -> Tensor:
    """The state after each of this rank's tokens."""
    sizes = cp.scan.span_cu_seqlens.diff().tolist()
    assert sum(sizes) == cp.rows
    spans = list(zip(decays.split(sizes), inputs.split(sizes), strict=True)) if sizes else []
    zero = inputs.new_zeros(inputs.shape[1:])
    ends = [scan(apply, *span, zero)[-1] for span in spans]
    totals = [product(apply, own) for own, _ in spans]
    states = torch.stack(ends) if ends else inputs
    entering = cp.scan.pass_states(states, **{name: torch.stack(totals) if totals else decays})
    assert entering.shape == states.shape
    outs = [scan(apply, *span, state) for span, state in zip(spans, entering, strict=True)]
    return torch.cat(outs) if outs else entering


def check(groups: Any, rule: str, lengths: Any, capacity: int = 24, **plan: Any) -> None:
    make, apply, name = RULES[rule]
    generator = torch.Generator().manual_seed(3)
    whole = [make(n, generator) for n in lengths]
    weights = [torch.randn(x.shape, generator=generator).double() for _, x in whole]
    for cp in handlers(groups, lengths, capacity, **plan):
        tokens = [(s, t) for s, start, n in cp.layout.spans for t in range(start, start + n)]
        padding = range(cp.layout.padding)

        def rows(tensors: list[Tensor], tokens: Any = tokens, padding: Any = padding) -> Tensor:
            own = [tensors[s][t] for s, t in tokens]
            own += [torch.zeros_like(tensors[0][0]) for _ in padding]
            return torch.stack(own) if own else tensors[0][:0]

        decays = rows([d for d, _ in whole]).requires_grad_()
        inputs = rows([x for _, x in whole]).requires_grad_()
        found = by_spans(cp, apply, name, decays, inputs)
        (found * rows(weights)).sum().backward()
        expected = [expected_of(apply, *whole[s], weights[s]) for s in range(len(lengths))]
        for mine, part in ((found, 0), (decays.grad, 1), (inputs.grad, 2)):
            want = rows([e[part] for e in expected])
            assert torch.allclose(mine, want, rtol=0, atol=1e-10), (part, mine - want)


def expected_of(apply: Any, decays: Tensor, inputs: Tensor, weights: Tensor) -> list[Tensor]:
    decays, inputs = (x.clone().requires_grad_() for x in (decays, inputs))
    states = scan(apply, decays, inputs, inputs.new_zeros(inputs.shape[1:]))
    return [states.detach(), *torch.autograd.grad((states * weights).sum(), (decays, inputs))]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12)
@given(st.integers(1, 8), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
def test_recurrences_of_spans_equal_those_of_sequences(
    way: str, rule: str, ranks: int, lengths: list[int], data: st.DataObject
) -> None:
    min_degree = data.draw(st.integers(1, ranks))
    lengths = [min(n, 20 * ranks) for n in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passing, "ROUND_BYTES", WAYS[way])
        hcp.loopback(ranks, lambda g: check(g, rule, lengths, min_degree=min_degree))


@pytest.mark.parametrize("degree", range(1, 9))
@pytest.mark.parametrize("way", WAYS)
def test_sequences_of_a_few_tokens_start_from_zeros(
    monkeypatch: pytest.MonkeyPatch, way: str, degree: int
) -> None:
    monkeypatch.setattr(passing, "ROUND_BYTES", WAYS[way])
    lengths = (1, 2, 3, 17, 1, 3, 2)
    options = {"min_degree": degree, "capacity": 40}
    hcp.loopback(degree, lambda g: check(g, "gated delta rule", lengths, **options))


def test_a_rank_without_rows_has_gradients_of_none() -> None:
    hcp.loopback(3, lambda g: check(g, "Mamba-2", (4, 2)))


def test_padding_is_a_span_that_starts_from_zeros() -> None:
    def padded(groups: Any) -> None:
        check(groups, "Mamba-2", (17, 5), capacity=32, min_degree=3, alignment=8)

    hcp.loopback(3, padded)


def on_gloo(rank: int, size: int) -> None:
    for price in WAYS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passing, "ROUND_BYTES", price)
            for rule in RULES:
                check(GlooGroups(), rule, (33, 2, 1, 9), min_degree=size)


@pytest.mark.parametrize("ranks", [2, 4])
def test_states_pass_on_gloo_ranks(ranks: int) -> None:
    run_ranks(ranks, on_gloo)


# ---- rules of a layer's own ----------------------------------------------------------------------
#
# Exponential gates, as in xLSTM: h = exp(f) h + exp(i) x, where h and x are kept as exp(m) times
# something small. A map is (x, m, f), a state (h, m).


def combine(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return *apply_gates(later, earlier[:2]), earlier[2] + later[2]


def apply_gates(maps: tuple[Tensor, ...], states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (x, m, f), (h, most) = maps, states
    top = torch.maximum(most + f, m)
    return (most + f - top).exp() * h + (m - top).exp() * x, top


def with_gates(tokens: Tensor, initial: list[Tensor]) -> tuple[Tensor, ...]:
    """The state after tokens (n, 5), each a map: m, f, x."""
    state = tuple(x[None] for x in initial)
    for row in tokens:
        m, f, x = row[None].split([1, 1, 3], 1)
        state = apply_gates((x, m, f), state)
    return state


def check_gates(groups: Any, lengths: Any) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(n, 5, generator=generator).double() * 9 for n in lengths]
    initial = [torch.full((3,), 0.5).double().requires_grad_(), torch.zeros(1).double()]
    total, expected = torch.zeros(2, 3).double()
    for cp in handlers(groups, lengths, 40, min_degree=groups.transport.size):
        spans = [
            whole[s][start : start + n].clone().requires_grad_() for s, start, n in cp.layout.spans
        ]
        maps = [torch.zeros(0, 3), torch.zeros(0, 1), torch.zeros(0, 1)]
        if spans:
            folded = []
            for span in spans:
                m, f, x = span.split([1, 1, 3], 1)
                one = x[:1], m[:1], f[:1]
                for t in range(1, len(span)):
                    one = combine(one, (x[t : t + 1], m[t : t + 1], f[t : t + 1]))
                folded.append(one)
            maps = [torch.cat(parts) for parts in zip(*folded, strict=True)]
        maps = [x.double() if spans else x.double().requires_grad_() for x in maps]
        found = cp.scan.pass_maps(maps, combine=combine, apply=apply_gates, initial=initial)
        sum(x.sin().sum() for x in found).backward()
        total += initial[0].grad
        for i, (sequence, start, n) in enumerate(cp.layout.spans):
            before = whole[sequence][:start].clone().requires_grad_()
            entering = with_gates(before, initial)
            for mine, theirs in zip(found, entering, strict=True):
                assert torch.allclose(mine[i], theirs[0], rtol=0, atol=1e-10)
            expected += torch.autograd.grad(sum(x.sin().sum() for x in entering), initial[0])[0]
            theirs_grad = torch.zeros(n, 5).double()
            for other, later, _ in spans_of(cp, lengths):
                if other == sequence and later > start:
                    tokens = whole[sequence][:later].clone().requires_grad_()
                    out = with_gates(tokens, initial)
                    (grad,) = torch.autograd.grad(sum(x.sin().sum() for x in out), tokens)
                    theirs_grad += grad[start : start + n]
            mine_grad = spans[i].grad if spans[i].grad is not None else torch.zeros(n, 5).double()
            assert torch.allclose(mine_grad, theirs_grad, rtol=0, atol=1e-10)
        initial[0].grad = None
    return total, expected


def spans_of(cp: Any, lengths: Any) -> list[Any]:
    """All spans of the micro-batch, of every rank."""
    ranks = range(cp.layout.first_rank, cp.layout.first_rank + cp.degree)
    return [span for r in ranks for span in Layout(cp.plan, cp.micro_batch, r).spans]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_rule_of_functions_passes_states_with_gradients(
    monkeypatch: pytest.MonkeyPatch, way: str, ranks: int
) -> None:
    monkeypatch.setattr(passing, "ROUND_BYTES", WAYS[way])
    results = hcp.loopback(ranks, lambda g: check_gates(g, (21, 2, 1, 6)))
    mine, theirs = (sum(part) for part in zip(*results, strict=True))
    assert torch.allclose(mine, theirs, rtol=0, atol=1e-10)


# ---- what travels --------------------------------------------------------------------------------


def bytes_received(lengths: Any, ranks: int) -> list[int]:
    def received(groups: Any) -> int:
        (cp,) = handlers(groups, lengths, 4096, min_degree=ranks)
        states = torch.zeros(len(cp.scan.span_cu_seqlens) - 1, 2, 3)
        cp.scan.pass_states(states, states)
        return int(groups.transport.bytes_received)

    return hcp.loopback(ranks, received)


def test_bytes_do_not_depend_on_the_length() -> None:
    assert bytes_received([160], 8) == bytes_received([16_000], 8)
    assert max(bytes_received([160], 8)) == 14 * 2 * 6 * 4 - 2 * 6 * 4


@pytest.mark.parametrize(("degree", "by_rounds"), [(2, False), (3, False), (4, True), (8, True)])
def test_rounds_are_taken_where_they_bring_fewer_bytes(degree: int, by_rounds: bool) -> None:
    plan = hcp.plan([160], ranks=degree, max_tokens_per_rank=160, min_degree=degree)
    passes = passing.StatePasses(Layout(plan, 0, 0), torch.device("cpu"))
    assert passes.choose(1 << 30).by_rounds == by_rounds
    assert not passes.choose(1 << 10).by_rounds


# ---- refused -------------------------------------------------------------------------------------

X = torch.zeros(1, 2, 3, 4)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "spans": ({"states": X[:0], "decay": X}, r"states has shape \(0, 2, 3, 4\), expected \(1, "),
    "neither": ({"states": X}, "neither of decay and transition given, expected one of them"),
    "both": ({"states": X, "decay": X, "transition": X}, "both of decay and transition given"),
    "decay": ({"states": X, "decay": X[:, :, :2]}, r"decay has shape \(1, 2, 2, 4\), expected th"),
    "transition": ({"states": X, "transition": X}, r"expected \(spans, ..., K, K\) for \(spans, "),
    "a complex decay": (
        {"states": X.double(), "decay": X.to(torch.complex128)},
        r"states is torch.float64 and .* torch.complex128, expected complex .*\(torch.complex128\)",
    ),
    "a complex transition": (
        {"states": X, "transition": torch.zeros(1, 2, 3, 3, dtype=torch.complex64)},
        r"states is torch.float32 and .* torch.complex64, expected complex states too",
    ),
    "dtype": ({"states": X.long(), "decay": X}, "states is torch.int64, expected floats or comp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_states_that_do_not_fit_are_refused(case: str) -> None:
    given_args, message = REFUSED[case]

    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9], 16)
        cp.scan.pass_states(**given_args)

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


def other_shapes(rank: int, size: int) -> None:
    (cp,) = handlers(GlooGroups(), [40], 24, min_degree=2)
    states = torch.zeros(len(cp.scan.span_cu_seqlens) - 1, 2, 3)
    cp.scan.pass_states(states, states[:, : 2 - rank])


def test_ranks_whose_decays_differ_hear_it() -> None:
    errors = try_ranks(2, other_shapes)
    for error in errors:
        assert isinstance(error, RankError)
        assert "in scan.pass_states, decay differs" in str(error)


@pytest.mark.parametrize("way", WAYS)
def test_autocast_does_not_round_maps(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "ROUND_BYTES", WAYS[way])

    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [32], 16, min_degree=4)
        draw = torch.Generator().manual_seed(groups.transport.rank)
        spans = len(cp.scan.span_cu_seqlens) - 1
        states = torch.randn(spans, HEADS, KEYS, VALUES, generator=draw)
        transition = torch.randn(spans, HEADS, KEYS, KEYS, generator=draw)
        start = torch.zeros(HEADS, KEYS, VALUES)
        given: Any = {
            "combine": lambda a, b: (b[0] @ a[0], b[0] @ a[1] + b[1]),
            "apply": lambda a, b: (a[0] @ b[0] + a[1],),
            "initial": (start,),
        }
        want = cp.scan.pass_states(states, transition=transition)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(cp.scan.pass_states(states, transition=transition), want)
            (found,) = cp.scan.pass_maps((transition, states), **given)
        assert torch.allclose(found, want)

    hcp.loopback(4, check)


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        ((), "initial is empty, expected a state"),
        ((torch.zeros(3, dtype=torch.long),), r"initial\[0\] is torch.int64, expected floats"),
        (
            (torch.zeros(3), torch.zeros(3, device="meta")),
            r"initial\[1\] is on meta, expected cpu",
        ),
    ],
)
def test_a_wrong_state_at_the_start_is_refused(
    initial: tuple[torch.Tensor, ...], message: str
) -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [8], 8)
        maps = [torch.zeros(len(cp.scan.span_cu_seqlens) - 1, 3)]
        given: Any = {"combine": lambda a, b: b, "apply": lambda a, b: b, "initial": initial}
        with pytest.raises(ValueError, match=message):
            cp.scan.pass_maps(maps, **given)

    hcp.loopback(1, check)


# ---- the price of a layer ------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 8),
    st.integers(0, 3),
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.tuples(*[st.integers(0, 10**6)] * 4, st.integers(0, 4)),
    st.tuples(st.integers(0, 9), st.integers(0, 99)),
)
def test_a_layer_costs_what_travels_and_what_it_computes_more(
    ranks: int,
    node: int,
    lengths: list[int],
    layer: tuple[int, int, int, int, int],
    links: tuple[int, int],
) -> None:
    near, far = links
    cost = hcp.CostModel(exchange=near, exchange_far=far)
    node = ranks // node if node and ranks % node == 0 else 0
    plan = hcp.plan(
        lengths,
        ranks=ranks,
        max_tokens_per_rank=sum(lengths),
        min_degree=ranks,
        ranks_per_node=node or None,
        cost=cost,
    )
    row_bytes, state_bytes, row_work, round_bytes, exchanges = layer
    spans_nodes = node > 0 and ranks > node
    parts = 16 * far // near if near and spans_nodes and far > near else 16
    rows = max(Layout(plan, 0, rank).rows for rank in range(ranks))

    def over_link(moved: int) -> int:
        return moved // 16 * parts + moved % 16 * parts // 16

    for rank in range(ranks):
        gathered, by_rounds, rounds = plan.core.states_rows(0, rank)
        ways = ((gathered, 1), (by_rounds, rounds))
        costs = [over_link(n * state_bytes) + r * round_bytes for n, r in ways]
        states = min(costs)
        moved = sum(lengths) * (ranks - 1) * row_bytes // ranks**2
        heads = over_link(moved) + rows * (row_bytes // 2) + exchanges * round_bytes
        assert plan.core.scan_price(0, rank, *layer) == (states + rows * row_work, heads)
        asked = plan.core.states_by_rounds(0, rank, state_bytes, round_bytes)
        assert asked == (costs[1] < costs[0])


@pytest.mark.parametrize(("far", "by_rounds"), [(1, False), (64, True)])
def test_states_travel_by_rounds_where_links_between_nodes_make_that_cheaper(
    far: int, by_rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank gathers 13 states or gets 8 in 5 rounds, each of which costs 1 MiB."""
    monkeypatch.setattr(passing, "ROUND_BYTES", 1 << 20)
    plan = hcp.plan(
        [64],
        ranks=8,
        max_tokens_per_rank=8,
        ranks_per_node=4,
        cost=hcp.CostModel(exchange=1, exchange_far=far),
    )
    for rank in range(8):
        chosen = passing.StatePasses(Layout(plan, 0, rank), torch.device("cpu")).choose(2**16)
        assert chosen.by_rounds == by_rounds


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_states_of_a_node_are_gathered_where_a_round_takes_longer_than_they_do(ranks: int) -> None:
    """8 MiB are those of 64 heads of a gated delta net."""
    plan = hcp.plan([64], ranks=ranks, max_tokens_per_rank=64, min_degree=ranks)
    for rank in range(ranks):
        passes = passing.StatePasses(Layout(plan, 0, rank), torch.device("cpu"))
        assert not passes.choose(2**23).by_rounds


def test_a_price_below_nothing_is_refused() -> None:
    plan = hcp.plan([8], ranks=2, max_tokens_per_rank=8, min_degree=2)
    with pytest.raises(
        ValueError, match="state_bytes is -1 and round_bytes 0, expected none below"
    ):
        plan.core.states_by_rounds(0, 0, -1, 0)
    assert not plan.core.states_by_rounds(0, 0, 2**62, 2**62)
    with pytest.raises(ValueError, match="row_work -1, round_bytes 0 and exchanges 0, expected no"):
        plan.core.scan_price(0, 0, 0, 0, -1, 0, 0)
    most = 2**61 - 1
    assert plan.core.scan_price(0, 0, *[2**62] * 4, 2**30) == (most, most)
