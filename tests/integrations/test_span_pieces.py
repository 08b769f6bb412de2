"""Recurrent layers compute all spans of a rank in one launch, and no more than they must."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recurrent import gradient_of, rule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hcp
from hcp._words import ScanType
from hcp.integrations import span_pieces
from hcp.integrations.recurrent import delta_rule, mamba_states, scan_mamba
from hcp.integrations.span_pieces import SpanPieces

HEADS, GROUPS, WIDTH, STATES = 4, 2, 3, 5

# ---- pieces --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 9), st.data())
def test_pieces_are_the_rows_of_spans(sizes: list[int], rows: int, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_pieces, "ROWS", rows)
        pieces = SpanPieces(tuple(sizes), torch.device("cpu"))
    x = torch.randn(sum(sizes), HEADS, dtype=torch.float64)
    parts = torch.split(x, sizes)
    assert torch.equal(pieces.joined(pieces.cut(x)), x)
    since, whole = pieces.sums(x)
    torch.testing.assert_close(pieces.joined(since), torch.cat([p.cumsum(0) for p in parts]))
    after = torch.cat([p.sum(0) - p.cumsum(0) for p in parts])
    torch.testing.assert_close(pieces.joined(pieces.later(x)), after)
    expected = torch.stack([p.sum(0) for p in parts])
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(pieces.total(pieces.cut(x).sum(1)), expected)
    numbers = torch.arange(len(sizes))
    assert torch.equal(pieces.total(pieces.of_states(numbers)[:, None] * 0.0)[:, 0], numbers * 0.0)
    places = pieces.joined(pieces.of_states(numbers)[:, None].expand(-1, pieces.size))
    assert torch.equal(places, numbers.repeat_interleave(torch.tensor(sizes)))


@pytest.mark.parametrize("sizes", [[40_000], [39_000, 1000]], ids=str)
def test_states_of_long_spans_keep_the_digits_of_their_last_rows(sizes: list[int]) -> None:
    x, writes = torch.rand(sum(sizes), 1, 3), torch.rand(sum(sizes), 1, 3)
    logs = -2 * torch.rand(sum(sizes), 1)
    spans = [slice(0, sizes[0]), slice(sizes[0], sum(sizes))][: len(sizes)]
    found = mamba_states(x, logs, writes, spans)
    near = slice(sizes[0] - 500, sizes[0])  # earlier rows decay to nothing
    decays = logs[near].double().flip(0).cumsum(0).flip(0) - logs[near]
    rows = x[near].double() * decays.exp()[..., None]
    expected = torch.einsum("thp,thn->hpn", rows, writes[near].double())
    torch.testing.assert_close(found[0].double(), expected, rtol=2e-6, atol=0)


# ---- layers --------------------------------------------------------------------------------------


def mamba(cp: hcp.ContextParallelHandler, rows: Tensor) -> Tensor:
    """Mamba-2 of rows (T, ...), whose groups of heads write and read alike."""
    x, both = rows.split([HEADS * WIDTH, 2 * GROUPS * STATES], 1)
    x, both = x.unflatten(1, (HEADS, WIDTH)), both.unflatten(1, (GROUPS, 2 * STATES))
    writes, reads = both.split(STATES, 2)
    logs = -x[..., 0].square()

    def scan(spans: list[slice]) -> tuple[Tensor, Tensor]:
        outs = []
        for span in spans:
            past = torch.ones(*2 * [span.stop - span.start]).tril()[..., None] > 0
            sums = logs[span].cumsum(0)
            gaps = (sums[:, None] - sums[None]).masked_fill(~past, -torch.inf).exp()
            seen = torch.einsum("tgn,sgn->tsg", reads[span], writes[span])
            mixed = seen.repeat_interleave(HEADS // GROUPS, 2) * gaps
            outs.append(torch.einsum("tsh,shp->thp", mixed, x[span]))
        return torch.cat(outs), mamba_states(x, logs, writes, spans)

    return scan_mamba(cp, x, logs, reads, scan).flatten(1)


def delta(cp: hcp.ContextParallelHandler, rows: Tensor) -> Tensor:
    """The gated delta rule of rows (T, ...), heads of 3 and 5."""
    query, key, value, gate, beta = rows.split([6, 6, 20, 4, 4], 1)
    query, key = (x.unflatten(1, (2, 3)) for x in (query, key))
    gates = {"g": -gate.square(), "beta": beta.sigmoid()}
    return delta_rule(cp, rule, query, 0.3 * key, value.unflatten(1, (4, 5)), gates).flatten(1)


LAYERS = {"Mamba-2": (mamba, HEADS * WIDTH + 2 * GROUPS * STATES), "the delta rule": (delta, 40)}


def check(groups: Any, name: str, lengths: Sequence[int], masks: Any, **options: Any) -> None:
    layer, columns = LAYERS[name]
    ranks = groups.transport.size
    sizes = {"max_tokens_per_rank": sum(lengths), "masks": masks}
    generator = torch.Generator().manual_seed(7)
    whole = [torch.randn(n, columns, generator=generator).double() for n in lengths]

    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()

    def results(degree: int, transport: Any, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """The places of this rank's rows in all sequences, their output and their gradient."""
        plan = hcp.plan(lengths, ranks=degree, min_degree=degree, **sizes)
        cp = hcp.ContextParallelHandler(plan, 0, transport, sources=[0] * len(lengths), **options)
        own = [torch.arange(n) + starts[s] + start for s, start, n in cp.layout.spans]
        rows = torch.cat([*own, torch.arange(0)])
        return rows, *gradient_of(lambda x: layer(cp, x), torch.cat(whole)[rows])

    rows, *found = results(ranks, groups.transport, groups.transport.rank)
    (alone,) = hcp.loopback(1, lambda one: results(1, one.transport, 0))
    order = alone[0].argsort()
    for mine, expected in zip(found, alone[1:], strict=True):
        torch.testing.assert_close(mine, expected[order][rows], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("lengths", [[16], [29, 3, 11]], ids=str)
def test_layers_over_ranks_equal_one_rank(
    name: str, ranks: int, documents: bool, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_pieces, "ROWS", 4)
    span_pieces.pieces_of.cache_clear()
    masks = [hcp.Mask.documents([5, n - 5]) if n > 5 else None for n in lengths]
    given_masks = masks if documents else None
    hcp.loopback(ranks, lambda g: check(g, name, lengths, given_masks, scan_type="pass_states"))
    span_pieces.pieces_of.cache_clear()


# ---- what they compute ---------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.names.add(str(func))
        return func(*args, **kwargs or {})


def launches(lengths: list[int]) -> int:
    """Operators of Mamba's states and of what enters spans, on rank 0 of two."""
    counts = []

    def count(groups: Any) -> None:
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=10_000, min_degree=2)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport, scan_type="pass_states")
        x, logs = torch.randn(cp.rows, HEADS, WIDTH), -torch.rand(cp.rows, HEADS)
        reads = torch.randn(cp.rows, GROUPS, STATES)
        cp.scan.pass_states(
            torch.zeros(len(cp.layout.spans), 1), torch.zeros(1, 1).expand(len(cp.layout.spans), 1)
        )  # makes tables
        for _ in range(2):  # the first makes the pieces
            with Calls() as calls:
                scan_mamba(
                    cp, x, logs, reads, lambda spans: (x, mamba_states(x, logs, reads, spans))
                )
        counts.append((groups.transport.rank, calls.count))

    hcp.loopback(2, count)
    return dict(counts)[0]


def test_launches_do_not_grow_with_spans() -> None:
    few, many = launches([40, 29]), launches([40, 29] * 8)
    assert many <= few + 4, (few, many)


class Stub(torch.autograd.Function):
    """A kernel's operator in place of fla's: two results of the right shapes, and gradients."""

    @staticmethod
    def forward(ctx: Any, spans: int, start: Tensor | None, *rows: Tensor) -> tuple[Tensor, Tensor]:
        query, value = rows[0], rows[2]
        ctx.start = start is not None
        ctx.save_for_backward(*rows)
        return value.clone(), value.new_empty(spans, *query.shape[2:], value.shape[3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_ends: Tensor) -> tuple[Tensor | None, ...]:
        return None, of_ends if ctx.start else None, *ctx.saved_tensors


def of_packs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    found: tuple[Tensor, Tensor] = Stub.apply(
        len(cu_seqlens) - 1, initial_state, query, key, value, g, beta
    )  # type: ignore[no-untyped-call]
    return found[0], found[1] if output_final_state else None


of_packs.__module__ = "fla.ops"


def delta_operators(lengths: list[int], scan_type: ScanType) -> list[tuple[Calls, Calls]]:
    """Those of the forward and of the backward of a gated delta rule, on two ranks, after the calls
    that make tables."""

    def run(groups: Any) -> tuple[Calls, Calls]:
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=1000, min_degree=2)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport, scan_type=scan_type)
        wide = [torch.randn(cp.rows, 4, 8, requires_grad=True) for _ in range(3)]
        gates = {name: torch.rand(cp.rows, 4, requires_grad=True) for name in ("g", "beta")}
        for _ in range(2):
            with Calls() as forward:
                out = delta_rule(cp, of_packs, *wide, gates)
            with Calls() as backward:
                torch.autograd.grad(out, [*wide, *gates.values()], torch.ones_like(out))
        return forward, backward

    return hcp.loopback(2, run)


@pytest.mark.parametrize(
    ("lengths", "scan_type", "most"),
    [
        ([64], "pass_states", (90, 85)),
        ([64, 32, 16], "pass_states", (110, 140)),
        ([64], "sequence_to_head", (70, 70)),
    ],
    ids=str,
)
def test_a_delta_rule_queues_few_operators_beside_its_kernel(
    lengths: list[int], scan_type: ScanType, most: tuple[int, int]
) -> None:
    """Each takes time of a host, which queues them faster than a GPU computes them, or slower."""
    for forward, backward in delta_operators(lengths, scan_type):
        assert forward.count <= most[0]
        assert backward.count <= most[1]


@pytest.mark.parametrize("scan_type", ["pass_states", "sequence_to_head"])
def test_a_delta_rule_neither_makes_tables_nor_reads_on_the_host(scan_type: ScanType) -> None:
    """Once they are made: a host that copies numbers to a GPU, or from it, waits for the GPU."""
    for calls in itertools.chain(*delta_operators([64, 3, 30], scan_type)):
        assert not calls.names & {"aten.lift_fresh.default", "aten._local_scalar_dense.default"}


@pytest.mark.parametrize("lengths", [[32], [32, 16, 8]], ids=str)
def test_a_span_that_begins_a_document_is_computed_from_zeros_alone(lengths: list[int]) -> None:
    """The rule runs on K columns more only where a state may enter."""
    columns: list[int] = []

    def counted(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        columns.append(value.shape[1] * value.shape[3])
        return rule(query, key, value, **given)

    def run(groups: Any) -> None:
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=100, min_degree=2)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport, scan_type="pass_states")
        x = torch.randn(cp.rows, 2, 8)
        gates = {"g": -torch.rand(cp.rows, 2), "beta": torch.rand(cp.rows, 2)}
        delta_rule(cp, counted, x[..., :3], x[..., :3], x[..., :5], gates)

    hcp.loopback(2, run)
    entered = sum(lengths) * 3 // 4  # all but the first of four chunks
    assert sum(columns) == sum(lengths) * 5 + entered * 3


def test_a_kernel_gets_the_bounds_of_a_pack_as_one_tensor_in_all_layers() -> None:
    """fla keeps what it derives from them, through the host, by the tensor's identity."""
    given: list[Tensor] = []

    def of_packs(
        query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens: Tensor, **more: Any
    ) -> tuple[Tensor, Tensor]:
        given.append(cu_seqlens)
        return value, torch.zeros(len(cu_seqlens) - 1, *key.shape[2:], value.shape[3])

    of_packs.__module__ = "fla.ops"

    def run(groups: Any) -> None:
        plan = hcp.plan([30, 7], ranks=1, max_tokens_per_rank=100)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        x = torch.randn(37, 2, 8)
        gates = {"g": -torch.rand(37, 2), "beta": torch.rand(37, 2)}
        for _ in range(3):
            delta_rule(cp, of_packs, x, x, x, gates)

    hcp.loopback(1, run)
    assert len(given) == 3
    assert given[0].tolist() == [0, 30, 37]
    assert all(bounds is given[0] for bounds in given)


@pytest.mark.parametrize("work", [0, 10**6])
def test_auto_counts_what_a_layer_computes_more(work: int) -> None:
    def run(groups: Any) -> str:
        plan = hcp.plan([4096], ranks=2, max_tokens_per_rank=4096, min_degree=2)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        choice = cp.scan.choose(4, row_bytes=10_000, state_bytes=8, row_work=work)
        assert (choice,) == cp.scan.choices
        return choice.used

    assert set(hcp.loopback(2, run)) == {"sequence_to_head" if work else "pass_states"}
