"""The tables, counts and signals of ``hcp.exchange.peer``, with ranks that share one memory.

Halves and staged exchanges are those of the transport between GPUs. Here signals and rows lie in
CPU memory, and a thread waits in place of a stream.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import Case, dispatched, loopback_error, staged_by
from support.mapped import MappedTransport

import hcp
import hcp.exchange.tables
from hcp.attention import key_transfer, prepared
from hcp.exchange.agreement import CallKind, Recent, Stamp
from hcp.exchange.peer import PeerMemory
from hcp.exchange.tables import PeerRead
from hcp.exchange.torch_p2p import FailureMessages
from hcp.exchange.transport import Share

loopback_module = sys.modules["hcp.tools.loopback"]


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> type[MappedTransport]:
    """hcp.loopback(..., sharing=True) runs on it."""
    monkeypatch.setattr(loopback_module, "SharingLoopbackTransport", MappedTransport)
    return MappedTransport


@pytest.fixture(params=[0, key_transfer.AT_ONCE_BYTES], ids=["by stages", "at once"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes of keys that all stages read at once."""
    monkeypatch.setattr(key_transfer, "AT_ONCE_BYTES", request.param)
    return request.param


@pytest.mark.parametrize("stage_tokens", [20, hcp.exchange.tables.STAGE_TOKENS])
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a+p2p"])
@pytest.mark.usefixtures("at_once")
def test_attention_over_halves_equals_one_rank(comm_type: str, stage_tokens: int) -> None:
    case = Case((57, 9, 130, 3), 4, min_degree=2, comm_type=comm_type, stage_tokens=stage_tokens)
    case = replace(case, sharing=True, sinks=True, lse=True, value_dim=16)
    assert loopback_error(case) <= 1e-10


def layers(groups: Any, case: Case, count: int) -> list[torch.Tensor]:
    """Outputs and gradients of consecutive layers, in every micro-batch."""
    results = []
    for cp, local in dispatched(groups, case):
        query, key, value = (
            local[name].clone().requires_grad_() for name in ("query", "key", "value")
        )
        out = query
        for _ in range(count):
            out = cp.attention(out, key, value)
        out.backward(local.grad)
        results += [out.detach(), query.grad, key.grad, value.grad]
    return results


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
@pytest.mark.usefixtures("at_once")
def test_halves_serve_many_layers_with_the_bits_of_rows_that_are_sent(comm_type: str) -> None:
    case = Case((57, 9, 130, 40, 22), 4, capacity=40, comm_type=comm_type, dtype="bfloat16")
    assert len(case.plan().micro_batches) > 1
    with staged_by(30):
        sent, read = (
            hcp.loopback(4, lambda groups: layers(groups, case, 5), sharing=sharing)
            for sharing in (False, True)
        )
    for one, other in zip(sent, read, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_few_bytes_of_keys_are_read_at_once(
    mapped: type, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    numbers = []
    share = mapped.share  # type: ignore[attr-defined]

    def counted(self: Any, given: Share) -> Any:
        numbers.append(sum(read is not None for read in given.reads))
        return share(self, given)

    monkeypatch.setattr(mapped, "share", counted)
    case = Case((100,), 4, min_degree=4, comm_type="p2p", dtype="bfloat16", sharing=True)
    at_once_bits = hcp.loopback(4, lambda groups: layers(groups, case, 2), sharing=True)
    # Of each rank: its keys, which come from three others, and gradients.
    assert sorted(numbers) == sorted(4 * [1 if at_once else 3, 1])
    monkeypatch.setattr(key_transfer, "AT_ONCE_BYTES", 0)
    by_stages = hcp.loopback(4, lambda groups: layers(groups, case, 2), sharing=True)
    for one, other in zip(at_once_bits, by_stages, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def attend(case: Case, scale: Callable[[int], float]) -> None:
    def layer(groups: Any) -> None:
        for cp, local in dispatched(groups, case):
            rank = groups.transport.rank
            if scale(rank):
                given = local.query, local.key, local.value
                cp.attention(*given, softmax_scale=scale(rank))

    hcp.loopback(2, layer, sharing=True)


@pytest.mark.parametrize("captured", [[1], [0, 1, 0], [1, 1, 0]])
def test_halves_and_stamps_that_a_graph_keeps_serve_any_number_of_exchanges(
    captured: list[int],
) -> None:
    """As when it is replayed, other exchanges between: nothing but the counts differs."""
    rows, width, ranks = 9, 3, 3
    kind = CallKind("check")

    def work(groups: Any) -> None:
        transport = groups.transport
        others = [peer for peer in range(ranks) if peer != transport.rank]
        whole = torch.tensor([[0, rows, 0, 0]])
        runs = torch.tensor([[part * rows, rows, part, 0] for part in range(ranks)])
        read = PeerRead([(peer, rows) for peer in others], runs, ranks * rows, others)
        shared = transport.share(Share(rows, (width,), torch.float64, whole, others, [read]))
        pause, total = Random(transport.rank), 0
        own = torch.empty(rows, width, dtype=torch.float64)

        def exchange(number: int, stamp: Stamp) -> None:
            nonlocal total
            total += 1
            own.fill_(10 * total + transport.rank)
            time.sleep(pause.choice((0, 0, 0.002)))
            found = shared.stage(number, [own], stamp, [own]).read(0).wait()[::rows, 0]
            assert found.tolist() == [10 * total + peer for peer in (transport.rank, *others)]

        for replay in range(40):
            for place, half in enumerate(captured):
                exchange(half, Stamp(kind, place))
            if replay % 4 == 0:
                exchange(replay // 4, Stamp(kind, 100 + replay))

    hcp.loopback(ranks, work, sharing=True)


def test_a_handler_of_fixed_capacity_reads_the_bits_that_it_is_sent() -> None:
    def work(groups: Any) -> list[torch.Tensor]:
        fixed, results = hcp.GraphHandler(groups, rows=64, sequences=8, ranks=3), []
        for seed, lengths in enumerate([(57, 9, 61), (180,), (33, 33, 5, 1)]):
            plan = hcp.plan(lengths, ranks=3, max_tokens_per_rank=64)
            cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
            fixed.load(cp)
            generator = torch.Generator().manual_seed(3 * seed + groups.transport.rank)
            *given, grad = (
                fixed.pad(torch.randn(cp.rows, heads, 8, generator=generator))
                for heads in (4, 2, 2, 4)
            )
            leaves = [x.requires_grad_() for x in given]
            out = fixed.attention(*leaves)
            results += [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        return results

    sent, read = (hcp.loopback(3, work, sharing=sharing) for sharing in (False, True))
    for one, other in zip(sent, read, strict=True):
        assert all(map(torch.equal, one, other))


def test_calls_of_captures_are_remembered_for_good() -> None:
    recent, kind = Recent(0), CallKind("check")
    recent.add(Stamp(kind, 1), kept=True)
    for number in range(2, 5000):
        recent.add(Stamp(kind, number))
    assert recent.of(Stamp(kind, 1).tag) == {"operation": "check", "call": 1, "pass": "forward"}
    assert recent.of(Stamp(kind, 2).tag) is None


def test_a_rank_that_does_not_come_is_named(mapped: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "timeout", 0.2)
    with pytest.raises(hcp.HcpError, match=r"rank 0: rank 1 has not come .* within 0\.2 s"):
        attend(Case((40, 9), 2, min_degree=2), lambda rank: 1.0 - rank)


@pytest.mark.parametrize("says", [True, False])
def test_a_rank_that_calls_differently_is_named(
    mapped: type, monkeypatch: pytest.MonkeyPatch, says: bool
) -> None:
    """The error in words, if the ranks have failure messages to say them."""
    failure_messages = SimpleNamespace(group_name="words")
    store = torch.distributed.HashStore()
    monkeypatch.setattr(FailureMessages, "_store", store)
    monkeypatch.setattr(
        mapped,
        "failure_messages",
        lambda rank: FailureMessages(failure_messages, rank) if says else None,
    )
    words = (
        r".*softmax_scale differs: \d.0 on rank \d, \d.0 on rank \d"
        if says
        else " than this rank, which is in"
    )
    with pytest.raises(hcp.HcpError, match=rf"rank \d: rank \d is in another call{words}"):
        attend(Case((40, 9), 2, min_degree=2), lambda rank: 1.0 + rank)


def test_a_rank_that_is_in_an_earlier_call_is_named_by_its_number(mapped: type) -> None:
    def check(groups: Any) -> None:
        cp, local = next(iter(dispatched(groups, Case((40, 9), 2, min_degree=2))))
        given = local.query, local.key, local.value
        cp.attention(*given)
        if groups.transport.rank == 0:
            with pytest.raises(ValueError, match="softcap is -1"):
                cp.attention(*given, softcap=-1)
        cp.attention(*given)

    with pytest.raises(hcp.HcpError, match=r"call differs: [23] on rank \d, [23] on rank \d"):
        hcp.loopback(2, check, sharing=True)


def test_a_head_that_does_not_fit_is_refused_with_what_would_do(
    mapped: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "buffer_bytes", 2 * 4096)
    # 25 rows of a head, 2 x 32 float64
    with pytest.raises(ValueError, match=r"stages 12800 bytes .* peer_buffer_bytes=32768 or more"):
        attend(Case((50,), 2, min_degree=2, head_dim=32), lambda rank: 1.0)


WIDE = Case(
    (57, 9, 130, 3), 4, min_degree=4, heads=12, kv_heads=6, value_dim=5, sinks=True, sharing=True
)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a+p2p"])
@pytest.mark.usefixtures("at_once")
def test_layers_that_stage_more_than_half_the_buffer_compute_heads_in_chunks(
    mapped: type, monkeypatch: pytest.MonkeyPatch, comm_type: str, causal: bool
) -> None:
    monkeypatch.setattr(mapped, "buffer_bytes", 8 * 4096)
    asked: list[int] = []
    monkeypatch.setattr(prepared, "_tell_of_chunks", lambda count, *_: asked.append(count))
    case = replace(WIDE, comm_type=comm_type, causal=causal)
    assert loopback_error(replace(case, lse=True)) <= 1e-10
    assert loopback_error(replace(case, head_chunks=2)) <= 1e-10
    assert max(asked) > 2


@settings(max_examples=30)
@given(st.data())
def test_any_layer_goes_through_a_buffer_that_holds_a_head(data: st.DataObject) -> None:
    groups, ranks = data.draw(st.integers(1, 7)), data.draw(st.integers(2, 6))
    case = Case(
        tuple(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))),
        ranks,
        comm_type=data.draw(st.sampled_from(["p2p", "all_gather", "a2a+p2p"])),
        kv_heads=groups,
        heads=groups * data.draw(st.integers(1, 3)),
        capacity=data.draw(st.integers(60, 200)),
        min_degree=data.draw(st.sampled_from([1, ranks])),
        window=data.draw(st.sampled_from([(-1, -1), (9, 0)])),
        sharing=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedTransport, "buffer_bytes", 2 * 4096 * data.draw(st.integers(10, 14)))
        assert loopback_error(case) <= 1e-10


def test_a_layer_in_chunks_is_told_of_once(
    mapped: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mapped, "buffer_bytes", 8 * 4096)
    monkeypatch.setattr(prepared, "_told", itertools.count())
    assert loopback_error(WIDE) <= 1e-10
    (line,) = [record.getMessage() for record in caplog.records]
    assert "peer_buffer_bytes=" in line
    enough = int(line.split("peer_buffer_bytes=")[1].split()[0])
    caplog.clear()
    monkeypatch.setattr(mapped, "buffer_bytes", enough)
    monkeypatch.setattr(prepared, "_told", itertools.count())
    assert loopback_error(WIDE) <= 1e-10
    assert not caplog.records


def test_what_was_kept_of_micro_batches_that_are_over_is_dropped(
    mapped: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerMemory, "_MOST", 3)
    case = Case((57, 9, 130, 40, 22, 31), 3, capacity=70, min_degree=2, comm_type="all_gather")

    def kept(groups: Any) -> int:
        layers(groups, case, 2)
        memory = groups.transport._peers_memory
        return len(memory._columns)

    assert max(hcp.loopback(3, kept, sharing=True)) <= 3
    assert loopback_error(replace(case, sharing=True)) <= 1e-10
