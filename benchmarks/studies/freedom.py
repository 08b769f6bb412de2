"""Count requests that end sooner with less freedom.

Fewer degrees, less memory, less effort or a stricter sync allow only plans that the request itself
allows too. A plan of such a stricter request that ends sooner is one that the planner missed, and
no bound is needed to see it.

    python benchmarks/studies/freedom.py [--requests 1000] [--first 0] [--shown 10]

Each request has a family of benchmarks/common/families.py, cut to its ranks, and any mix of nodes,
slow ranks, a pipeline, memory and pairs of masks, at prices of a model or of the default. Columns:

  stricter    what the request was denied
  compared    requests that have such a plan
  any, 1.005, 1.03    plans that end later than that of the stricter request at all, and by more
              than so much
  worst       the largest ratio of the two makespans
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common.families import BY_NAME
from common.machine import planner_line

import hcp
from hcp.planning.plan import Plan

FAMILIES = ("P1", "P2", "P3", "P4", "P5", "X1", "X2", "X3", "X4", "X5b")
PRICES: tuple[Any, ...] = (None, "gpt-1b-h200", "hydraulis-7b-tp4", "flexsp-7b")
COUNT_MAX = 192
"""Sequences of a request, so that a thousand requests take minutes."""

Request = dict[str, Any]


def draw(seed: int) -> Request:
    """Draw a request. Every seed gives one that has a plan, or none at all by its lengths."""
    random = Random(f"freedom {seed}")
    family = BY_NAME[FAMILIES[seed % len(FAMILIES)]]
    ranks = random.choice([4, 6, 8, 8, 12, 16, 24, 32, 32, 60, 64])
    capacity = random.choice([family.capacity, 8192, 16384])
    count = round(2 ** random.uniform(2, math.log2(COUNT_MAX)))
    lengths = family.draw(random)
    random.shuffle(lengths)
    most = ranks * (capacity - 2) * 3 // 4
    cost = random.choice(PRICES)
    request: Request = {
        "lengths": [min(most, length) for length in lengths[:count]],
        "ranks": ranks,
        "max_tokens_per_rank": capacity,
        "sync": random.choice(["step", "micro_batch"]),
        "cost": hcp.CostModel() if cost is None else hcp.CostModel.preset(cost),
    }
    return request | dict(_options(random, request))


def _options(random: Random, request: Request) -> Iterator[tuple[str, Any]]:
    """Yield each rarer option with a fifth to a tenth of the requests."""
    ranks, capacity = request["ranks"], request["max_tokens_per_rank"]
    if ranks > 8 and ranks % 8 == 0 and random.random() < 0.4:
        yield "ranks_per_node", 8
    if random.random() < 0.1:
        yield "speeds", [random.choice([1.0, 1.0, 1.0, 0.93]) for _ in range(ranks)]
    if random.random() < 0.15:
        yield "pipeline_stages", random.choice([2, 4])
        if random.random() < 0.4:
            yield "virtual_stages", 2
    if random.random() < 0.15:
        row = 10_000
        limit = round(capacity * row * random.uniform(0.9, 1.3))
        yield "memory", hcp.MemoryModel(activation=row, gathered=row // 12, limit=limit)
    if request["cost"].table is None and random.random() < 0.1:
        yield "pairs", [round(n * (n + 1) / 2 * random.uniform(0.3, 1)) for n in request["lengths"]]
    if random.random() < 0.1:
        yield "effort", random.choice([2, 3, 6])


def stricter(seed: int, request: Request) -> Iterator[tuple[str, Request]]:
    """Yield names and arguments of requests with less freedom."""
    random = Random(f"stricter {seed}")
    ranks, capacity = request["ranks"], request["max_tokens_per_rank"]
    least = random.randint(2, max(2, ranks // 4))
    most = random.randint(max(1, ranks // 4), ranks - 1)
    yield "pow2", {"degrees": "pow2"}
    yield "min degree", {"min_degree": least}
    yield "max degree", {"max_degree": most}
    yield "both degrees", {"min_degree": min(least, most), "max_degree": most}
    yield "pow2 and min degree", {"degrees": "pow2", "min_degree": 2}
    yield "less memory", {"max_tokens_per_rank": round(capacity * random.uniform(0.5, 0.98))}
    yield (
        "degrees of a sequence",
        {"min_degrees": [1 + (random.random() < 0.2) for _ in request["lengths"]]},
    )
    if request.get("effort", 1) > 1:
        yield "less effort", {"effort": 1}
    if "memory" in request:
        memory = request["memory"]
        limit = round(memory.limit * random.uniform(0.6, 0.98))
        yield (
            "fewer bytes",
            {"memory": hcp.MemoryModel(memory.activation, 0, memory.gathered, limit=limit)},
        )
    if request["sync"] == "step":
        yield "micro_batch", {"sync": "micro_batch"}


def degrees(request: Request) -> Iterator[Request]:
    """Yield static CP: one degree for all, every one that leaves no rank without a group."""
    for degree in range(1, request["ranks"] + 1):
        if request["ranks"] % degree == 0:
            yield {"min_degree": degree, "max_degree": degree}


def by_the_clock_of(request: Request, plan: Plan) -> int:
    """Return the makespan of a plan under the sync of a request."""
    if plan.sync == request["sync"]:
        return plan.makespan
    return Plan.from_dict(plan.to_dict() | {"sync": request["sync"]}).makespan


def compare(seed: int) -> Iterator[tuple[str, float]]:
    """Yield names of stricter requests and by how much the request's own plan is slower."""
    request = draw(seed)
    try:
        own = hcp.plan(**request)
    except ValueError:
        return
    for name, change in stricter(seed, request):
        with contextlib.suppress(ValueError):
            made = hcp.plan(**(request | change))
            yield name, own.makespan / by_the_clock_of(request, made)
    static = []
    for change in degrees(request):
        with contextlib.suppress(ValueError):
            static.append(hcp.plan(**(request | change)).makespan)
    if static:
        yield "static CP", own.makespan / min(static)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first request")
    parser.add_argument("--shown", type=int, default=10, help="of the worst requests")
    args = parser.parse_args()
    ratios: dict[str, list[float]] = defaultdict(list)
    worst: list[tuple[float, int, str]] = []
    begun = time.process_time()
    for seed in range(args.first, args.first + args.requests):
        found = list(compare(seed))
        for name, ratio in found:
            ratios[name].append(ratio)
            worst.append((ratio, seed, name))
        if found:
            ratios["any of these"].append(max(ratio for _, ratio in found))
    print(
        f"{planner_line()}, {args.requests} requests from seed {args.first}, "
        f"{time.process_time() - begun:.0f} s\n"
    )
    print("| stricter | compared | any | 1.005 | 1.03 | worst |\n" + "|---" * 6 + "|")
    for name, values in ratios.items():
        above = [sum(value > limit for value in values) for limit in (1, 1.005, 1.03)]
        print(
            f"| {name} | {len(values)} | {above[0]} | {above[1]} | {above[2]} | {max(values):.4f} |"
        )
    for ratio, seed, name in sorted(worst, reverse=True)[: args.shown]:
        print(f"{ratio:.4f} {name}: seed {seed}, {BY_NAME[FAMILIES[seed % len(FAMILIES)]].says}")


if __name__ == "__main__":
    main()
