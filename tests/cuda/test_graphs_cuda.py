"""A layer of fixed capacity, captured once and replayed for several plans; and exchanges through
peers' memory, captured by two ranks of one process that share a GPU.

Tables and results on the CPU: tests/attention/test_fixed_capacity.py. Counts of exchanges in every
order: tests/c/test_signals.c. With several GPUs: tests/cuda/check_graphs.py."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.graphs import FixedLayer, difference, layer_of_plan, plans_of_rows

import hcp
from hcp import _core
from hcp.exchange.agreement import CallKind, Stamp
from hcp.exchange.peer import PeerMemory, PeerShared
from hcp.exchange.tables import PeerRead
from hcp.exchange.transport import Share

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROWS, SEQUENCES = 512, 24


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_one_gpu() -> hcp.ProcessGroups:
    groups: hcp.ProcessGroups = hcp.loopback(1, lambda groups: groups, device="cuda")[0]
    return groups


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_graph_gives_the_bits_of_the_same_layer_without_it(
    deterministic: None, backend: Any, head_dim: int
) -> None:
    groups = on_one_gpu()
    plans = plans_of_rows(1, ROWS)
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=SEQUENCES, backend=backend)
    layer = FixedLayer(fixed, head_dim, torch.bfloat16)
    layer.capture(hcp.ContextParallelHandler(plans[0], 0, groups.transport))
    for seed, plan in enumerate([*plans, plans[0]]):
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        layer.draw(cp, seed)
        replayed = layer.replay()
        assert all(map(torch.equal, replayed, layer.run()))
        assert all(x.isfinite().all() for x in replayed)
        tokens = int(cp.cu_seqlens[-1])
        assert not any(x[tokens:].any() for x in replayed)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)]
)
def test_one_graph_equals_the_micro_batchs_own_layer(dtype: torch.dtype, limit: float) -> None:
    groups = on_one_gpu()
    plans = plans_of_rows(1, ROWS)
    layer = FixedLayer(hcp.GraphHandler(groups, rows=ROWS, sequences=SEQUENCES), 64, dtype)
    layer.capture(hcp.ContextParallelHandler(plans[0], 0, groups.transport))
    for seed, plan in enumerate(plans):
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        layer.draw(cp, seed)
        assert difference(layer.replay(), layer_of_plan(cp, layer.rows)) <= limit


def test_forward_has_the_bits_of_the_same_kernel_in_the_micro_batchs_own_layer() -> None:
    """Padding and empty sequences change no order of sums in a forward."""
    groups = on_one_gpu()
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=SEQUENCES, backend="torch")
    layer = FixedLayer(fixed, 64, torch.bfloat16)
    handler = hcp.get_cp_handler_cls(backend="torch")
    plans = plans_of_rows(1, ROWS)
    layer.capture(handler(plans[0], 0, groups.transport))
    for seed, plan in enumerate(plans):
        cp = handler(plan, 0, groups.transport)
        layer.draw(cp, seed)
        out, *_ = layer.replay()
        expected, *_ = layer_of_plan(cp, layer.rows)
        tokens = int(cp.cu_seqlens[-1])
        assert torch.equal(out[:tokens], expected[:tokens])


def test_graphed_callables_of_torch_take_the_handler() -> None:
    groups = on_one_gpu()
    plans = plans_of_rows(1, ROWS)
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=SEQUENCES)
    layer = FixedLayer(fixed, 64, torch.bfloat16)
    layer.draw(hcp.ContextParallelHandler(plans[0], 0, groups.transport), 0)
    given = tuple(x.detach().clone().requires_grad_() for x in layer.rows[:3])
    graphed: Any = torch.cuda.make_graphed_callables(fixed.attention, given)
    for seed, plan in enumerate(plans):
        layer.draw(hcp.ContextParallelHandler(plan, 0, groups.transport), seed)
        *leaves, grad = (x.detach().clone() for x in layer.rows)
        for leaf in leaves:
            leaf.requires_grad_()
        out = graphed(*leaves)
        found = [out.detach().clone(), *torch.autograd.grad(out, leaves, grad)]
        assert difference(found, layer.run()) <= 2e-2


# ---- exchanges through peers' memory -------------------------------------------------------------

RANKS, WIDTH, BUFFER_BYTES = 2, 64, 2**22
KIND = CallKind("check")


class TwoRanks:
    """Two ranks of one process. Each has a stream that stages and one that reads."""

    def __init__(self, rows: int, timeout: float = 20.0) -> None:
        size = _core.link_bytes(RANKS, BUFFER_BYTES)
        memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(RANKS)]

        def view(rank: int, shape: tuple[int, int], dtype: torch.dtype, start: int) -> torch.Tensor:
            return memory[rank].view(dtype)[start : start + shape[0] * shape[1]].view(shape)

        self.streams = [torch.cuda.Stream() for _ in range(RANKS)]
        self._reading = [torch.cuda.Stream() for _ in range(RANKS)]
        self.memories = [
            PeerMemory(
                rank,
                [one.data_ptr() for one in memory],
                view,
                torch.zeros(4).long().pin_memory(),
                device=torch.device("cuda", torch.cuda.current_device()),
                stream=self._reading[rank].cuda_stream,
                buffer_bytes=BUFFER_BYTES,
                timeout=timeout,
            )
            for rank in range(RANKS)
        ]
        self.sent = [torch.zeros(rows, WIDTH, device="cuda") for _ in range(RANKS)]
        whole = torch.tensor([[0, rows, 0, 0]])
        both = torch.tensor([[0, rows, 1, 0], [rows, rows, 0, 0]])
        self._shared = [
            PeerShared(
                memory,
                Share(
                    *(rows, (WIDTH,), torch.float32, whole, [1 - rank]),
                    [PeerRead([(1 - rank, rows)], both, 2 * rows, [1 - rank])],
                ),
            )
            for rank, memory in enumerate(self.memories)
        ]
        self._warm_up()
        self.exchange(0, 0)
        torch.cuda.synchronize()

    def _warm_up(self) -> None:
        """Load kernels and take memory of each stream: both may wait for a kernel that waits."""
        for rank, stream in enumerate(self.streams):
            self.fill(rank, 0)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1)
                rows = torch.zeros(2 * len(self.sent[rank]), WIDTH, device="cuda")
                rows[:: len(self.sent[rank])].clone()
        torch.cuda.synchronize()

    def exchange(self, exchange: int, number: int) -> list[torch.Tensor]:
        """An exchange of both: the other's rows, then one's own."""
        return [self.exchange_of(rank, exchange, number) for rank in range(RANKS)]

    def exchange_of(self, rank: int, exchange: int, number: int) -> torch.Tensor:
        with torch.cuda.stream(self.streams[rank]):
            own, stamp = [self.sent[rank]], Stamp(KIND, number)
            return self._shared[rank].stage(exchange, own, stamp, own).read(0).wait()

    def capture(self, exchanges: list[int], number: int) -> list[Any]:
        """A graph of each rank, of some exchanges; and the rows that it reads."""
        gc.collect()  # graphs and pinned memory of earlier tests: to free them ends a capture
        captured = []
        for rank in range(RANKS):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.streams[rank]):
                read = [self.exchange_of(rank, half, number) for half in exchanges]
            captured.append((graph, read))
        self._warm_up()  # a capture gives back memory that nobody uses
        return captured

    def fill(self, rank: int, value: int) -> None:
        with torch.cuda.stream(self.streams[rank]):
            self.sent[rank].fill_(value)


@pytest.mark.parametrize("rows", [1, 5, 4096])
@pytest.mark.parametrize("exchanges", [[1], [0, 1, 0], [1, 1, 0, 1]])
def test_captured_exchanges_count_on_in_every_replay(exchanges: list[int], rows: int) -> None:
    both = TwoRanks(rows)
    captured = both.capture(exchanges, 1)
    found: list[list[torch.Tensor]] = [[] for _ in range(RANKS)]
    expected: list[float] = []
    for replay in range(100):
        for rank, (graph, results) in enumerate(captured):
            both.fill(rank, 10 * replay + rank)
            with torch.cuda.stream(both.streams[rank]):
                if replay % 3 == rank:
                    torch.cuda._sleep(200_000)
                graph.replay()
                found[rank] += [read[::rows].clone() for read in results]
        expected += [10 * replay] * len(exchanges)
        if replay % 10 == 3:  # through either half
            for rank, read in enumerate(both.exchange(replay // 10, 2)):
                with torch.cuda.stream(both.streams[rank]):
                    found[rank].append(read[::rows].clone())
            expected.append(10 * replay)
    torch.cuda.synchronize()
    for rank, all_read in enumerate(found):
        starts = torch.stack(all_read)[:, :, 0].tolist()
        assert starts == [[value + 1 - rank, value + rank] for value in expected]
    for memory in both.memories:
        memory.check()


def replay_otherwise(away: bool) -> None:
    """One rank replays; the other stays away, or replays another call."""
    both = TwoRanks(64, timeout=1.0)
    first, second = both.capture([1], 1), both.capture([1], 2)
    words = "rank 0: rank 1 has not come" if away else "is in another call"
    try:
        with torch.cuda.stream(both.streams[0]):
            first[0][0].replay()
        if not away:
            with torch.cuda.stream(both.streams[1]):
                second[1][0].replay()
        torch.cuda.synchronize()
    except RuntimeError:  # CUDA's
        said = []
        for memory in both.memories:
            try:
                memory.check()
            except hcp.HcpError as error:
                said.append(str(error))
        os._exit(STOPPED if any(words in one for one in said) else 1)
    os._exit(0)


STOPPED = 77


@pytest.mark.parametrize("away", [True, False])
def test_a_replay_that_the_other_rank_does_not_share_stops_the_device(away: bool) -> None:
    process = multiprocessing.get_context("spawn").Process(target=replay_otherwise, args=(away,))
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == STOPPED
