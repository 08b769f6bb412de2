"""cuDNN's packed attention: what its graphs are given, and schedules over them.

The package is replaced by graphs that compute by the formula.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fake_cudnn
from support.cases import Case, loopback_error
from torch import Tensor

import hcp
import hcp.step.backends
from hcp import _versions
from hcp.attention import kernels
from hcp.attention.kernels import KernelCall, KernelFamily, Launch, join
from hcp.attention.kernels.formula import Formula
from hcp.exchange.tables import Entry

NAME = "hcp.attention.kernels.cudnn"
FAMILY = kernels.FAMILIES["cudnn"]


@pytest.fixture(scope="module")
def cudnn() -> Iterator[Any]:
    """The module with the package replaced, for the CPU, and for float64 too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cudnn", fake_cudnn.module())
        module = importlib.import_module(NAME)
        patch.setattr(module, "_handle_on", lambda device: module._ONE_AT_A_TIME)
        patch.setitem(module._TYPES, torch.float64, "DOUBLE")
        patch.setattr(module.Cudnn, "dtypes", (torch.float64, torch.bfloat16, torch.float16))
        family = KernelFamily(lambda: module.for_device)
        patch.setitem(kernels.FAMILIES, "cudnn", family)
        yield module
    del sys.modules[NAME], kernels.cudnn
    hcp.step.backends._made.cache_clear()


@pytest.fixture
def graphs(cudnn: Any, monkeypatch: pytest.MonkeyPatch) -> list[fake_cudnn.Graph]:
    """Those built from now on."""
    monkeypatch.setattr(cudnn, "_GRAPHS", {})
    monkeypatch.setattr(fake_cudnn.Graph, "built", [])
    return fake_cudnn.Graph.built


# ---- schedules -----------------------------------------------------------------------------------

LENGTHS = (29, 7, 1, 2, 12, 3)


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, (-1, -1)), (False, (-1, -1)), (True, (5, 0)), (False, (4, 3)), (False, (-1, 6))],
)
def test_schedules_over_graphs_equal_one_rank(
    cudnn: Any, comm_type: str, causal: bool, window: tuple[int, int]
) -> None:
    case = Case(LENGTHS, 3, comm_type=comm_type, causal=causal, window=window, min_degree=2)
    case = Case(**{**vars(case), "head_dim": 16, "value_dim": 32, "backend": "cudnn"})
    assert loopback_error(case) <= 1e-10


def test_the_gradient_of_the_log_sum_exp_comes_in_columns(cudnn: Any) -> None:
    for dtype, most in (("float64", 1e-10), ("bfloat16", 0.1)):
        case = Case(LENGTHS, 3, min_degree=2, head_dim=16, lse=True, sinks=True, backend="cudnn")
        assert loopback_error(Case(**{**vars(case), "dtype": dtype})) <= most


# ---- packs ---------------------------------------------------------------------------------------


def entries_of(
    sizes: Sequence[tuple[int, int]], gaps: Sequence[tuple[int, int]], window: tuple[int, int]
) -> list[Entry]:
    """Entries of so many queries and keys, before each of which so many rows are left out."""
    entries, query, key = [], 3, 5  # rows of the launch count from its first
    for (queries, keys), (query_gap, key_gap) in zip(sizes, gaps, strict=True):
        query, key = query + query_gap, key + key_gap
        ahead = keys - queries
        low = 1 - queries if window[0] < 0 else ahead - window[0]
        high = keys - 1 if window[1] < 0 else ahead + window[1]
        entries.append(Entry(query, queries, key, keys, low, high))
        query, key = query + queries, key + keys
    return entries


def packed(
    sizes: Sequence[tuple[int, int]], gaps: Sequence[tuple[int, int]], window: tuple[int, int]
) -> Launch:
    return Launch(entries_of(sizes, gaps, window))


def drawn(launch: Launch, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    rows = launch.queries.stop - launch.queries.start, launch.keys.stop - launch.keys.start
    shapes = [(rows[0], heads[0]), (rows[1], heads[1]), (rows[1], heads[1]), (rows[0], heads[0])]
    return [torch.randn(*shape, 16, generator=generator).to(dtype) for shape in shapes]


def results(kernel: Any, launch: Launch, rows: list[Tensor]) -> list[Tensor]:
    query, key, value, grad = rows
    out, lse = kernel.forward(launch, query, key, value, 0.25)
    grads = kernel.backward(launch, (grad, None), (query, key, value, out, lse), 0.25)
    return [out, lse, *grads]


def by_formula(launch: Launch, rows: list[Tensor]) -> list[Tensor]:
    """The same in float64, entry by entry. Rows of no entry are 0, but NaN in the log-sum-exp."""
    query, key, value, grad = (x.double() for x in rows)
    found = [torch.zeros_like(x) for x in (query, query[..., 0], query, key, value)]
    found[1] += torch.nan
    q0, k0 = launch.queries.start, launch.keys.start
    for e in launch.entries:
        q = slice(e.query_row - q0, e.query_row - q0 + e.query_rows)
        k = slice(e.key_row - k0, e.key_row - k0 + e.key_rows)
        parts = results(Formula(), Launch([e]), [query[q], key[k], value[k], grad[q]])
        for target, at, part in zip(found, (q, q, q, k, k), parts, strict=True):
            target[at] = part
    return found


SIZES = st.integers(1, 9)
GAPS = st.integers(0, 3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SIZES, SIZES, GAPS, GAPS), min_size=1, max_size=6),
    st.sampled_from([(-1, 0), (-1, -1), (2, 0)]),
    st.sampled_from([(4, 4), (4, 1)]),
)
def test_any_pack_equals_the_formula_entry_by_entry(
    cudnn: Any,
    drawn_entries: list[tuple[int, int, int, int]],
    window: tuple[int, int],
    heads: tuple[int, int],
) -> None:
    # A causal entry's first query sees a key: it has no more queries than keys.
    sizes = [(min(q, k) if window[1] == 0 else q, k) for q, k, _, _ in drawn_entries]
    gaps = [(q, k) for _, _, q, k in drawn_entries]
    for launch in join(entries_of(sizes, gaps, window), packs=True):
        rows = drawn(launch, heads, torch.float64)
        found, want = results(cudnn.Cudnn(), launch, rows), by_formula(launch, rows)
        inside = ~want[1].isnan()
        assert torch.allclose(found[1][inside], want[1][inside], atol=1e-10)
        for i in (0, 2, 3, 4):
            assert torch.allclose(found[i], want[i], atol=1e-10), i


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIZES, SIZES, GAPS, GAPS), min_size=1, max_size=6))
def test_a_graph_gets_the_places_of_the_entries(
    cudnn: Any, drawn_entries: list[tuple[int, int, int, int]]
) -> None:
    sizes = [(q, k) for q, k, _, _ in drawn_entries]
    launch = packed(sizes, [(q, k) for _, _, q, k in drawn_entries], (-1, -1))
    places = cudnn._Places(launch, torch.device("cpu"))
    entries, spare = len(sizes), places.sequences - len(sizes)
    assert 0 <= spare < 3 * entries
    firsts = [
        [e.query_row - launch.queries.start for e in launch.entries],
        [e.key_row - launch.keys.start for e in launch.entries],
    ]
    ends = launch.queries.stop - launch.queries.start, launch.keys.stop - launch.keys.start
    for side in (0, 1):
        assert places.sizes(side).tolist() == [n[side] for n in sizes] + [0] * spare
        rows = firsts[side] + [ends[side]] * (spare + 1)
        assert places.offsets(side, 7).tolist() == [7 * row for row in rows]
        assert places.offsets(side, 7) is places.offsets(side, 7)  # kept for the next layer
        assert places.longest[side] >= max(n[side] for n in sizes)


# ---- graphs --------------------------------------------------------------------------------------


def test_few_graphs_serve_many_packs(cudnn: Any, graphs: list[fake_cudnn.Graph]) -> None:
    kernel = cudnn.Cudnn()
    for lengths in ([3, 4], [200, 1, 7], [60, 61, 62, 63], [256], [5]):
        entries, row = [], 0
        for n in lengths:
            entries.append(Entry(row, n, row, n, 1 - n, 0))
            row += n
        for launch in join(entries, packs=True):  # one row alone has another window
            results(kernel, launch, drawn(launch, (4, 2), torch.float64))
    # Of each direction: for one entry, for up to four, and for one that sees one key.
    assert len(graphs) == 6
    assert sum(len(graph.calls) for graph in graphs) == 12


def test_whole_sequences_are_aligned_top_left(cudnn: Any, graphs: list[fake_cudnn.Graph]) -> None:
    for sizes, alignment in (([(5, 5), (9, 9)], "TOP_LEFT"), ([(5, 5), (4, 9)], "BOTTOM_RIGHT")):
        launch = packed(sizes, [(0, 0)] * 2, (-1, 0))
        results(cudnn.Cudnn(), launch, drawn(launch, (2, 2), torch.float64))
        assert {graph.options.alignment for graph in graphs[-2:]} == {alignment}
        assert {(graph.options.left, graph.options.right) for graph in graphs} == {(None, 0)}


def test_deterministic_algorithms_get_a_graph_of_their_own(
    cudnn: Any, graphs: list[fake_cudnn.Graph]
) -> None:
    launch = packed([(5, 5)], [(0, 0)], (-1, 0))
    rows = drawn(launch, (2, 2), torch.float64)
    results(cudnn.Cudnn(), launch, rows)
    torch.use_deterministic_algorithms(True)
    try:
        results(cudnn.Cudnn(), launch, rows)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [vars(graph.options).get("deterministic") for graph in graphs] == [None, False, True]


def test_rows_of_a_projection_are_not_copied(cudnn: Any, graphs: list[fake_cudnn.Graph]) -> None:
    launch = packed([(5, 5), (3, 3)], [(0, 0), (2, 2)], (-1, 0))
    plain = drawn(launch, (4, 2), torch.float64)
    together = torch.cat([x.flatten(1) for x in plain[:3]], 1)
    parts = [x.unflatten(1, (-1, 16)) for x in together.split([64, 32, 32], 1)]
    found = results(cudnn.Cudnn(), launch, [*parts, plain[3]])
    want = results(cudnn.Cudnn(), launch, plain)
    inside = ~by_formula(launch, plain)[1].isnan()
    assert torch.equal(found[1][inside], want[1][inside])
    assert all(torch.equal(found[i], want[i]) for i in (0, 2, 3, 4))
    first = graphs[0]
    assert first.ports["q"].stride == [128 * first.ports["q"].dim[2], 16, 128, 1]
    assert first.calls[0][first.ports["k"].uid].data_ptr() == parts[1].data_ptr()
    # Heads that do not lie one after the other are laid out anew.
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in plain]
    found = results(cudnn.Cudnn(), launch, heads_first)
    assert all(torch.equal(found[i], want[i]) for i in (0, 2, 3, 4))


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 5000, 65536, 65537, 100_000])
def test_memory_is_asked_for_a_quarter_more_rows_at_most(cudnn: Any, rows: int) -> None:
    found = cudnn._rounded_total(rows)
    assert 0 <= found - rows < max(1024, rows / 4)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "value_size", "hopper", "taken"),
    [
        (16, 16, False, True),
        (128, 128, False, True),
        (128, 64, False, True),
        (192, 128, False, True),
        (144, 144, False, False),
        (144, 144, True, True),
        (256, 256, True, True),
        (272, 272, True, False),
        (256, 128, True, False),
        (72, 72, True, False),
    ],
)
def test_head_sizes(
    cudnn: Any, size: int, value_size: int, hopper: bool, taken: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(cudnn, "_is_hopper", lambda device: hopper)
    launch = packed([(2, 2)], [(0, 0)], (-1, 0))
    query, value = torch.zeros(2, 2, size), torch.zeros(2, 2, value_size)
    call = KernelCall(launch, query.bfloat16(), value.bfloat16(), False, False)
    assert cudnn.Cudnn().takes(call) is taken
    if not taken:
        with pytest.raises(ValueError, match=f"{size} and {value_size}, expected multiples of 16"):
            cudnn.Cudnn().forward(launch, query, query, value, 1.0)


def test_a_gradient_of_the_log_sum_exp_that_has_no_columns_is_refused(cudnn: Any) -> None:
    launch = packed([(2, 2)], [(0, 0)], (-1, 0))
    rows, lse = torch.zeros(2, 2, 128), torch.zeros(2, 2)
    assert not cudnn.Cudnn().takes(KernelCall(launch, rows, rows, True, True))
    assert cudnn.Cudnn().takes(KernelCall(launch, rows, rows, True, False))
    assert cudnn.Cudnn().takes(KernelCall(launch, rows[..., :96], rows[..., :96], True, True))
    with pytest.raises(ValueError, match="has a gradient with head sizes 128 and 128, for which"):
        cudnn.Cudnn().backward(launch, (rows, lse), (rows, rows, rows, rows, lse), 1.0)


def test_what_cudnn_cannot_build_is_named(cudnn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Any) -> None:
        raise fake_cudnn.NotSupportedError("no engine")

    monkeypatch.setattr(cudnn, "_GRAPHS", {})
    monkeypatch.setattr(fake_cudnn.Graph, "check_support", refuse)
    launch = packed([(2, 2)], [(0, 0)], (-1, 0))
    message = r"cuDNN 9\.19\.0 has no kernel for .*sequences=1.*use the backend 'torch' \(no engine"
    with pytest.raises(hcp.HcpError, match=message):
        results(cudnn.Cudnn(), launch, drawn(launch, (2, 2), torch.float64))
    assert not cudnn._GRAPHS


def test_an_old_cudnn_is_refused(cudnn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn.cudnn, "backend_version", lambda: 91001)
    monkeypatch.setattr(cudnn.cudnn, "backend_version_string", lambda: "9.10.1")
    with pytest.raises(ValueError, match=r"cuDNN is 9\.10\.1, expected 9\.10\.2 or later"):
        cudnn.for_device(torch.device("cpu"))


def test_an_older_frontend_is_refused_and_a_newer_one_warned_of(
    cudnn: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_versions, "_warned", set())
    monkeypatch.setattr(_versions, "installed", lambda package: "1.31.0")
    with pytest.raises(ImportError, match=r"^nvidia-cudnn-frontend is 1\.31\.0, expected 1\.32\.0"):
        cudnn.for_device(torch.device("cpu"))
    monkeypatch.setattr(_versions, "installed", lambda package: "2.0.0")
    assert cudnn.for_device(torch.device("cpu"))
    (said,) = caplog.messages
    assert said.startswith("hcp was tested with nvidia-cudnn-frontend 1.32.0; this is 2.0.0. ")


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ((8, 0), "8.0, expected 9.0 or higher: use 'torch' there. Below, its backward takes no"),
        ((12, 0), "12.0, expected 10.x or lower"),
    ],
)
def test_gpus_without_packed_kernels_are_refused(
    capability: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernels.FAMILIES, "cudnn", FAMILY)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    with pytest.raises(ValueError, match=message):
        kernels.kernels_of("cudnn", SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
