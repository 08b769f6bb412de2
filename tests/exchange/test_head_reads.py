"""Rows for heads, read where neighbours have staged them.

Halves, counts and signals are those between GPUs, in CPU memory (``support.mapped``).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import Case, dispatched, loopback_error
from support.mapped import MappedTransport, MixedLoopback
from torch import Tensor

import hcp
from hcp.attention import head_reads
from hcp.exchange.peer import PeerMemory

loopback_module = sys.modules["hcp.tools.loopback"]
PAGES = 2 * 4096
"""Bytes of a buffer whose halves have a page each."""


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> type[MappedTransport]:
    """hcp.loopback(..., sharing=True) runs on it."""

    class Own(MappedTransport):
        """Whose attributes a test may set."""

    monkeypatch.setattr(loopback_module, "SharingLoopbackTransport", Own)
    return Own


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.uint8)


def layers(groups: Any, case: Case, count: int, like: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Outputs and gradients of consecutive layers, in every micro-batch. ``like``: makes of a
    tensor the one that the layer is given."""
    results = []
    for cp, local in dispatched(groups, case):
        leaves = [local[name].clone().requires_grad_() for name in ("query", "key", "value")]
        out = cp.attention(*map(like, leaves))
        for _ in range(count - 1):
            out = cp.attention(like(out), *map(like, leaves[1:]))
        out.backward(local.grad)
        results += [out, *(leaf.grad for leaf in leaves)]
    return [bits(x) for x in results]


def both(case: Case, count: int = 2, like: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """Expect the same bits of rows that are read and of rows that are sent."""

    def run(groups: Any) -> list[Tensor]:
        return layers(groups, case, count, like)

    results = (hcp.loopback(case.ranks, run, sharing=sharing) for sharing in (True, False))
    for read, sent in zip(*results, strict=True):
        assert all(map(torch.equal, read, sent))


HEADS = [(8, 8), (12, 6), (8, 2), (10, 5), (6, 3), (3, 1), (2, 2)]
"""Numbers of query and key-value heads: some that divide over 4 ranks, and fewer than ranks."""
CASE = Case((57, 9, 130, 3), 4, min_degree=4, comm_type="a2a", dtype="bfloat16")


@pytest.mark.parametrize("comm_type", ["a2a", "a2a+p2p"])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_heads_that_are_read_have_the_bits_of_those_that_are_sent(
    heads: int, kv_heads: int, comm_type: str
) -> None:
    both(replace(CASE, heads=heads, kv_heads=kv_heads, comm_type=comm_type))


@pytest.mark.parametrize("pages", [1, 3, 7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (10, 5)])
def test_what_a_half_does_not_hold_goes_in_pieces(
    mapped: type, monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, pages: int
) -> None:
    monkeypatch.setattr(mapped, "buffer_bytes", PAGES * pages)
    told: list[int] = []
    monkeypatch.setattr(head_reads, "_tell_of_pieces", lambda count, *_: told.append(count))
    both(replace(CASE, heads=heads, kv_heads=kv_heads, head_dim=32, max_degree=4))
    assert max(told) >= 8 // pages


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8])
def test_rows_that_are_no_whole_vectors_are_filled_up(size: int) -> None:
    both(replace(CASE, head_dim=size, value_dim=size))
    case = replace(CASE, head_dim=size, value_dim=9 - size, dtype="float64", sharing=True)
    assert loopback_error(case) <= 1e-10


def fused(x: Tensor) -> Tensor:
    """The same rows with others between them, that begin inside of a vector."""
    wide = torch.zeros(x.shape[0], 2 * x[0].numel() + 3, dtype=x.dtype)
    return (wide[:, 3 : 3 + x[0].numel()] + x.flatten(1)).view(x.shape)


def by_elements(x: Tensor) -> Tensor:
    """The same rows, heads last in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("like", [fused, by_elements])
@pytest.mark.parametrize("heads", [8, 10])
def test_rows_of_any_strides_are_staged(like: Callable[[Tensor], Tensor], heads: int) -> None:
    both(replace(CASE, heads=heads, kv_heads=heads // 2), like=like)


@pytest.mark.parametrize("heads", [8, 6])
def test_numbers_that_are_conjugate_or_negative_by_a_bit_are_exchanged(heads: int) -> None:
    def work(groups: Any) -> None:
        for cp, _ in dispatched(groups, CASE):
            x = torch.randn(cp.layout.rows, heads, 4, dtype=torch.complex64).conj()
            whole = cp.whole.sequence_to_head(x.resolve_conj())
            assert torch.equal(cp.whole.sequence_to_head(x), whole)
            assert torch.equal(cp.whole.sequence_to_head(x.imag), whole.imag)

    hcp.loopback(4, work, sharing=True)


def test_exchanges_that_a_graph_captures_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There a rank reads once it has staged."""
    monkeypatch.setattr(PeerMemory, "is_captured", True)
    both(replace(CASE, heads=6, kv_heads=3))


@pytest.mark.parametrize("comm_type", ["a2a", "a2a+p2p"])
def test_attention_equals_one_rank(comm_type: str) -> None:
    case = replace(CASE, comm_type=comm_type, dtype="float64", sharing=True, sinks=True, lse=True)
    assert loopback_error(replace(case, value_dim=5, min_degree=1, capacity=70)) <= 1e-10
    assert loopback_error(replace(case, head_chunks=2, window=(9, 0))) <= 1e-10


@settings(max_examples=30)
@given(st.data())
def test_any_layer_goes_through_any_buffer(data: st.DataObject) -> None:
    groups, ranks = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 6))
    case = Case(
        tuple(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))),
        ranks,
        comm_type="a2a",
        kv_heads=groups,
        heads=groups * data.draw(st.integers(1, 3)),
        capacity=data.draw(st.integers(60, 200)),
        min_degree=data.draw(st.sampled_from([1, ranks])),
        alignment=data.draw(st.sampled_from([1, 4])),
        sharing=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedTransport, "buffer_bytes", PAGES * data.draw(st.integers(2, 14)))
        patch.setattr(loopback_module, "SharingLoopbackTransport", MappedTransport)
        assert loopback_error(case) <= 1e-10


def test_neither_rows_nor_calls_are_sent(mapped: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(groups: Any) -> None:
        steps = list(dispatched(groups, replace(CASE, heads=6, kv_heads=3)))
        groups.transport.all_gather_bytes(b"", "dispatched")
        for name in ("start", "agree"):
            monkeypatch.setattr(mapped, name, None)
        for cp, local in steps:
            leaves = [local[name].clone().requires_grad_() for name in ("query", "key", "value")]
            cp.attention(*leaves).sum().backward()
            x = cp.whole.sequence_to_head(leaves[0])
            cp.whole.head_to_sequence(x, 6).sum().backward()

    hcp.loopback(4, work, sharing=True)


def test_inside_a_node_heads_are_read_and_between_nodes_keys_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own(MixedLoopback):
        ranks_per_node = 2

    counted: list[int] = []
    made = head_reads.HeadReads.__init__

    def counts(self: Any, *given: Any) -> None:
        made(self, *given)
        counted.append(len(self._queries))

    monkeypatch.setattr(head_reads.HeadReads, "__init__", counts)
    monkeypatch.setattr(loopback_module, "SharingLoopbackTransport", Own)
    both(replace(CASE, comm_type="a2a+p2p", sizes=(2, 2), node=2))
    assert counted == [2] * 4
    both(CASE)  # neighbours in two nodes send
    assert counted == [2] * 4


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int64", "float8_e4m3fn", "float16", "complex64", "complex128"]
)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (2, 5), (8, 0), (3, 1, 2)])
def test_whole_sequences_of_any_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch, dtype)

    def work(groups: Any) -> list[Tensor]:
        results = []
        for cp, _ in dispatched(groups, CASE):
            rows, rank = cp.layout.rows, groups.transport.rank
            size = torch.empty(rows, *shape, dtype=kind).nbytes
            drawn = torch.randint(2, (size,), generator=torch.Generator().manual_seed(rank))
            x = drawn.to(torch.uint8).view(kind).view(rows, *shape)
            whole = cp.whole.sequence_to_head(x)
            assert whole.is_contiguous()
            assert whole.shape[1:] == (
                len(range(shape[0])[cp.whole.head_slice(shape[0])]),
                *shape[1:],
            )
            back = cp.whole.head_to_sequence(whole, shape[0])
            assert back.dtype == x.dtype
            assert torch.equal(bits(back), bits(x))
            results.append(bits(whole))
        return results

    read, sent = (hcp.loopback(4, work, sharing=sharing) for sharing in (True, False))
    for one, other in zip(read, sent, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("sharing", [True, False], ids=["read", "sent"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_whole_sequences_of_another_dtype_than_autocast_has(
    mapped: type, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sharing: bool
) -> None:
    """Also where they go in pieces, which are put together."""
    monkeypatch.setattr(mapped, "buffer_bytes", PAGES)

    def work(groups: Any) -> None:
        for cp, _ in dispatched(groups, CASE):
            x = torch.randn(cp.layout.rows, 8, 32).to(dtype)
            with torch.autocast("cpu", torch.bfloat16):
                whole = cp.whole.sequence_to_head(x)
                back = cp.whole.head_to_sequence(whole, 8)
            assert (whole.dtype, back.dtype) == (dtype, dtype)
            assert torch.equal(bits(back), bits(x))

    hcp.loopback(4, work, sharing=sharing)


def test_pieces_are_told_of_once(
    mapped: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = replace(CASE, sharing=True, dtype="float64")
    monkeypatch.setattr(mapped, "buffer_bytes", PAGES)
    monkeypatch.setattr(head_reads, "_told", itertools.count())
    assert loopback_error(case) <= 1e-10
    (line,) = [record.getMessage() for record in caplog.records]
    enough = 0
    while "peer_buffer_bytes=" in line:
        enough = int(line.split("peer_buffer_bytes=")[1].split()[0])
        caplog.clear()
        monkeypatch.setattr(mapped, "buffer_bytes", enough)
        monkeypatch.setattr(head_reads, "_told", itertools.count())
        assert loopback_error(case) <= 1e-10
        line = caplog.records[0].getMessage() if caplog.records else ""
    assert enough > PAGES


def test_a_vector_of_each_row_that_does_not_fit_is_refused_with_what_would_do(
    mapped: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "buffer_bytes", PAGES)
    # 300 rows of 16 bytes for the other rank
    with pytest.raises(ValueError, match=r"stages 4800 bytes .* peer_buffer_bytes=16384 or more"):
        both(Case((600,), 2, min_degree=2, comm_type="a2a"))


def scaled(scale: Callable[[int], float]) -> Callable[[Any], None]:
    """A layer whose ranks have softmax scales of their own; 0: it does not come."""

    def work(groups: Any) -> None:
        for cp, local in dispatched(groups, Case((40, 9), 2, min_degree=2, comm_type="a2a")):
            own = scale(groups.transport.rank)
            if own:
                cp.attention(local.query, local.key, local.value, softmax_scale=own)

    return work


def test_a_rank_that_does_not_come_is_named(mapped: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "timeout", 0.2)
    with pytest.raises(hcp.HcpError, match=r"rank 0: rank 1 has not come .* within 0\.2 s"):
        hcp.loopback(2, scaled(lambda rank: 1.0 - rank), sharing=True)


def test_a_rank_that_calls_differently_is_named() -> None:
    with pytest.raises(hcp.HcpError, match=r"rank \d: rank \d is in another call than this rank"):
        hcp.loopback(2, scaled(lambda rank: 1.0 + rank), sharing=True)
