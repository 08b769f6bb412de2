"""A layer of fixed capacity over several GPUs, captured once and replayed for plans of any degree.

    torchrun --nproc-per-node 2 tests/cuda/check_graphs.py

Each plan's results are compared with the same layer without the graph, bit for bit, and with the
micro-batch's own handler. The exit status is the number of comparisons that fail."""

from __future__ import annotations

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


def main() -> int:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    groups = hcp.build_process_groups(transport="nccl")
    wrong = 0
    for dtype, limit in ((torch.float64, 1e-10), (torch.bfloat16, 2e-2)):
        # In float64 both are sums of cuBLAS, which has a workspace of its own in a graph.
        torch.use_deterministic_algorithms(dtype == torch.bfloat16)
        wrong += check(groups, dtype, limit)
    groups.close()
    dist.destroy_process_group()
    return wrong


def check(groups: hcp.ProcessGroups, dtype: torch.dtype, limit: float) -> int:
    ranks = groups.size("dp_cp")
    plans = plans_of_rows(ranks, ROWS)
    fixed = hcp.GraphHandler(groups, rows=ROWS, sequences=24, ranks=ranks, backend="torch")
    layer = FixedLayer(fixed, 64, dtype)
    graph = layer.capture(hcp.ContextParallelHandler(plans[0], 0, groups.transport))
    differ, error, degrees = 0, 0.0, set()
    for seed, plan in enumerate(plans):
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        degrees.add(cp.degree)
        layer.draw(cp, seed)
        replayed = layer.replay()
        again = layer.run()
        if dtype == torch.bfloat16:
            differ += not all(map(torch.equal, replayed, again))
        error = max(error, difference(replayed, layer_of_plan(cp, layer.rows)))
    own = [x.detach()[: cp.rows].requires_grad_() for x in layer.rows[:3]]
    torch.use_deterministic_algorithms(False)  # they take the host's time
    host = host_time(graph.replay), host_time(lambda: eager(cp, own, layer.rows[3]))
    found = torch.tensor([float(differ), error], device="cuda", dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    most, worst = found.tolist()
    if dist.get_rank() == 0:
        print(
            f"{dtype}: {len(plans)} plans of degrees {sorted(degrees)} in one graph: {most:.0f} "
            f"differ from the layer without it; largest difference from the plans' own layers "
            f"{worst:.1e}, limit {limit:.0e}; host, forward and backward: replay {host[0]:.0f} us, "
            f"the micro-batch's own layer {host[1]:.0f} us",
            flush=True,
        )
    return int(most > 0) + int(not worst <= limit)


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
