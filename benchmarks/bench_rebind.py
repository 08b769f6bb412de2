"""Time a switch of process groups: python benchmarks/bench_rebind.py [--modules 100 1000 10000]

Each of a model's N modules holds four groups of the training layout (cp_group, tp_cp_group,
tp_dp_cp_group, dp_cp_group). All four have another group in the eval layout, so 4 N slots change.
Every way of switching is checked in the same run: each slot must hold the eval group after the
switch, and the training group after the switch back.

  table    first entry: walk the model, build the table
  check    test whether the structure still holds (each entry)
  strict   the time that strict=True adds: search the process for other holders of a group
  entry    check, agreement of ranks (here one rank), swap
  swap     the loop in C over the table; "back": the loop that restores
  walk     a re-implementation of the peer's walk: look up five names in every module, set those
           that exist
  setattr  setattr(module, name, group) for these slots in a plain Python loop
  dict     vars(module)[name] read and written for these slots in a plain Python loop

Contestants take turns; medians of --rounds, with the spread (median of the upper half over median
of the lower half). walk/swap and setattr/swap are ratios of medians.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from common.flags import end_after, parser_of
from common.machine import commit
from torch import nn

import hcp
from hcp._core import Rebinding
from hcp.rebinding.request import Request
from hcp.rebinding.slot_tables import RequestTable, tables_of

NAMES = {
    "cp_group": "cp",
    "tp_cp_group": "tp_cp",
    "tp_dp_cp_group": "tp_dp_cp",
    "dp_cp_group": "dp_cp",
}


class Leaf(nn.Module):
    """A module with as many attributes as a small layer, and four groups."""

    def __init__(self, pgs: hcp.ProcessGroups) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.name, self.bias = 64, 1e-5, "leaf", None
        for name, role in NAMES.items():
            setattr(self, name, getattr(pgs, role))


def build(modules: int, pgs: hcp.ProcessGroups) -> nn.Module:
    """Build a tree with 10 leaves per block, as layers have."""
    blocks = [
        nn.ModuleList(Leaf(pgs) for _ in range(min(10, modules - first)))
        for first in range(0, modules, 10)
    ]
    return nn.ModuleList(blocks)


def walk_every_module(model: nn.Module, target: hcp.ProcessGroups) -> None:
    """Switch as the peer does, re-implemented."""
    for module in model.modules():
        if hasattr(module, "pg_collection"):
            module.pg_collection = target  # type: ignore[assignment]
        for name, role in NAMES.items():
            if hasattr(module, name):
                setattr(module, name, getattr(target, role, None))


def check(model: nn.Module, pgs: hcp.ProcessGroups, what: str) -> None:
    for module in model.modules():
        if isinstance(module, Leaf):
            for name, role in NAMES.items():
                assert getattr(module, name) is getattr(pgs, role), f"{what}: {name}"


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(
    modules: int, rounds: int, train: hcp.ProcessGroups, other: hcp.ProcessGroups
) -> list[str]:
    model = build(modules, train)
    leaves = [module for module in model.modules() if isinstance(module, Leaf)]
    request = Request(model, train, other, (), False, train.transport)
    gc.collect()
    gc.disable()
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    times["table"].append(timed(lambda: RequestTable(request, tables_of(model))))
    tracemalloc.start()
    table = RequestTable(request, tables_of(model))
    table_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(table.slots) == 4 * modules, len(table.slots)

    def set_attributes(pgs: hcp.ProcessGroups) -> None:
        groups = [(name, getattr(pgs, role)) for name, role in NAMES.items()]
        for leaf in leaves:
            for name, group in groups:
                setattr(leaf, name, group)

    def set_items(pgs: hcp.ProcessGroups) -> list[object]:
        groups = [(name, getattr(pgs, role)) for name, role in NAMES.items()]
        held = []
        for leaf in leaves:
            attributes = vars(leaf)
            for name, group in groups:
                held.append(attributes[name])
                attributes[name] = group
        return held

    peers = (
        ("walk", partial(walk_every_module, model)),
        ("setattr", set_attributes),
        ("dict", set_items),
    )
    rebinding = Rebinding()
    context = hcp.eval_cp_context(model, train, other)
    with context:  # the kept table
        pass
    strict = RequestTable(replace(request, strict=True), tables_of(model))
    for _ in range(rounds):
        times["strict"].append(timed(strict.check_covered))
        times["check"].append(timed(table.still_holds))
        times["swap"].append(timed(lambda: rebinding.switch(table.switch)))
        check(model, other, "swap")
        times["back"].append(timed(rebinding.restore))
        check(model, train, "back")
        times["entry"].append(timed(context.__enter__))
        check(model, other, "entry")
        context.__exit__(None, None, None)
        for name, switch in peers:
            times[name].append(timed(partial(switch, other)))
            check(model, other, name)
            switch(train)
            check(model, train, name)
    gc.enable()
    median = {name: statistics.median(values) for name, values in times.items()}
    cells = [f"{modules:,}", f"{4 * modules:,}"]
    cells += [f"{1e3 * median[name]:.3f} ({spread(times[name]):.2f})" for name in CONTESTANTS]
    cells += [f"{median['walk'] / median['swap']:.0f}", f"{median['setattr'] / median['swap']:.1f}"]
    cells += [f"{table_bytes / (4 * modules):.0f}"]
    return cells


CONTESTANTS = ("table", "check", "strict", "entry", "swap", "back", "walk", "setattr", "dict")


def spread(values: list[float]) -> float:
    ordered = sorted(values)
    half = max(1, len(ordered) // 2)
    return statistics.median(ordered[-half:]) / statistics.median(ordered[:half])


def main() -> None:
    parser = parser_of(__doc__, devices=("cpu",), device="cpu", rounds=9)
    parser.add_argument("--modules", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    args = parser.parse_args()
    end_after(args.deadline)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train, other = hcp.build_process_groups(), hcp.build_process_groups()
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, hcp {hcp.__version__} "
        f"({commit()}), {platform.machine()}, {os.cpu_count()} cores; milliseconds, median (spread)"
        f" of {args.rounds}\n"
    )
    heads = ("modules", "slots", *CONTESTANTS, "walk/swap", "setattr/swap", "table bytes/slot")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for modules in args.modules:
        cells = measure(modules, args.rounds, train, other)
        print("| " + " | ".join(cells) + " |", flush=True)
        args.json.add(dict(zip(heads, cells, strict=True)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
