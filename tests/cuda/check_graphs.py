"""Layers captured in CUDA graphs over several GPUs, and replayed.

    torchrun --nproc-per-node 2 tests/cuda/check_graphs.py [--transport peer nccl]

A layer of fixed capacity is captured once and replayed for plans of any degree. Each plan's results
are compared with the same layer without the graph, bit for bit, and with the micro-batch's own
handler, whose exchanges come between the replays. Then it is replayed 100 times, while one rank
after the other is late. The exit status is the number of comparisons that fail."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.graphs import FixedLayer, difference, layer_of_plan, plans_of_rows

import hcp

ROWS = 512
REPLAYS = 100
TIMEOUT = timedelta(seconds=30)
LATE = 2_000_000
"""Cycles for which a rank waits before a replay, about a millisecond."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--transport", nargs="+", default=["nccl"], choices=("nccl", "peer"))
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    wrong = 0
    for transport in args.transport:
        groups = hcp.build_process_groups(transport=transport, timeout=TIMEOUT)
        for dtype, limit in ((torch.float64, 1e-10), (torch.bfloat16, 2e-2)):
            # In float64 both are sums of cuBLAS, which has a workspace of its own in a graph.
            torch.use_deterministic_algorithms(dtype == torch.bfloat16)
            wrong += check(groups, dtype, limit)
        wrong += check_refusals(groups)
        groups.close()
    dist.destroy_process_group()
    return wrong


def check(groups: hcp.ProcessGroups, dtype: torch.dtype, limit: float) -> int:
    ranks = groups.size("dp_cp")
    plans = plans_of_rows(ranks, ROWS)
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=24, ranks=ranks, backend="torch")
    layer = FixedLayer(fixed, 64, dtype)
    graph = layer.capture(hcp.ContextParallelHandler(plans[0], 0, groups.transport))
    handlers = [hcp.ContextParallelHandler(plan, 0, groups.transport) for plan in plans]
    differ, error = 0, 0.0
    for seed, cp in enumerate(handlers):
        layer.draw(cp, seed)
        replayed = layer.replay()
        again = layer.run()
        if dtype == torch.bfloat16:
            differ += not all(map(torch.equal, replayed, again))
        error = max(error, difference(replayed, layer_of_plan(cp, layer.rows)))
    many = replay_often(layer, handlers)
    own = [x.detach()[: cp.rows].requires_grad_() for x in layer.rows[:3]]
    torch.use_deterministic_algorithms(False)  # they take the host's time
    host = [
        host_time(call) for call in (graph.replay, layer.run, lambda: eager(cp, own, layer.rows[3]))
    ]
    found = torch.tensor([float(differ), error, many], device="cuda", dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    most, worst, often = found.tolist()
    often_limit = 0.0 if dtype == torch.bfloat16 else limit
    if dist.get_rank() == 0:
        degrees = sorted({cp.degree for cp in handlers})
        print(
            f"{groups.transport.name} {dtype}: {len(plans)} plans of degrees {degrees} in one "
            f"graph: {most:.0f} differ from the layer without it; largest difference from the "
            f"plans' own layers {worst:.1e}, limit {limit:.0e}; {REPLAYS} replays while ranks are "
            f"late: largest difference {often:.1e}, limit {often_limit:.0e}; host, forward and "
            f"backward: replay {host[0]:.0f} us, the layer without the graph {host[1]:.0f} us, the "
            f"micro-batch's own layer {host[2]:.0f} us",
            flush=True,
        )
    return int(most > 0) + int(not worst <= limit) + int(not often <= often_limit)


def replay_often(layer: FixedLayer, handlers: list[hcp.ContextParallelHandler]) -> float:
    """The largest difference between replays and the layer without the graph, which runs after
    every tenth of them. The host waits for none."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    worst = torch.zeros((), dtype=torch.float64, device="cuda")
    for number in range(REPLAYS):
        layer.draw(handlers[number % len(handlers)], number)
        if number % ranks == rank:
            torch.cuda._sleep(LATE)
        replayed = layer.replay()
        if number % 10 == 0:
            for a, b in zip(replayed, layer.run(), strict=True):
                worst = torch.maximum(worst, (a.double() - b.double()).abs().max())
    return float(worst)


def check_refusals(groups: hcp.ProcessGroups) -> int:
    """The number of captures that end otherwise than they should: a first call is refused, as are
    rows that ranks send each other under the transport that reads."""
    ranks, wrong = groups.size("dp_cp"), 0
    plan = plans_of_rows(ranks, ROWS)[0]
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=24, ranks=ranks, backend="torch")
    rows = [torch.zeros(ROWS, heads, 64, device="cuda").bfloat16() for heads in (ranks, 2, 2)]
    cases: list[tuple[str, Callable[[], object]]] = [
        ("captures the first call of its kind", lambda: fixed.attention(*rows))
    ]
    if groups.transport.name == "peer":
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        own = torch.zeros(cp.rows, 64, device="cuda")
        cp.roll_tensor(own)
        cases.append(("captures rows that ranks send each other", lambda: cp.roll_tensor(own)))
    for words, call in cases:
        torch.cuda.synchronize()
        said = "nothing"
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call()
        except hcp.HcpError as error:
            said = str(error)
        if words not in said:
            wrong += 1
            print(f"{groups.transport.name}: said {said!r}, expected {words!r}", flush=True)
    return wrong


def eager(cp: hcp.ContextParallelHandler, rows: list[Tensor], grad: Tensor) -> None:
    torch.autograd.grad(cp.attention(*rows), rows, grad[: cp.rows])


def host_time(call: Callable[[], object]) -> float:
    """The median microseconds until a call returns, its work on the device done before the next."""
    times = []
    for _ in range(30):
        begun = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begun))
        torch.cuda.synchronize()
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
