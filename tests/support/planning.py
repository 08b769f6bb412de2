"""Draw requests for a plan with every option mixed, and judge the result.

The judge is written from the documents of :func:`hcp.plan`. It uses nothing of the core: no time,
no row count and no simulation, and not ``check_plan``, which belongs to the library.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from dataclasses import replace
from datetime import date
from random import Random
from typing import Any, NamedTuple

import hcp
from hcp.planning.cost import TimeTable
from hcp.planning.plan import Group, lower_bound
from hcp.tools.check import check_plan

CHEAP_LAUNCHES = hcp.CostModel(exchange=4_096, launch=1_048_576)
"""Groups cost so little that sequences of few tokens are spread over ranks, too, and that what
keeps a plan from its bound is how sequences fit together."""
FULL_SPEED = 65_536
"""Slowness of the fastest rank."""
COST_BITS = 62
ROWS_MAX, LENGTH_MAX = 2**31 - 1, 2**40
PRICES = [
    "pair",
    "token",
    "exchange",
    "launch",
    "exchange_far",
    "all_to_all",
    "step",
    "tile",
    "host",
]

Request = dict[str, Any]


# ---- drawing -------------------------------------------------------------------------------------


def seed() -> int:
    """Return the seed of the day, so that runs of other days draw other requests. A failure prints
    it, and HCP_TEST_SEED repeats it."""
    chosen = os.environ.get("HCP_TEST_SEED")
    return int(chosen) if chosen else date.today().toordinal()


def draw(r: Random) -> Request:
    """Draw arguments of hcp.plan, right and wrong ones. More than half of them have a plan."""
    ranks = r.choice([1, 2, 3, r.randint(1, 16), r.randint(1, 16), r.randint(1, 40)])
    least = 1 if r.random() < 0.8 else r.randint(1, ranks)
    most = ranks if r.random() < 0.7 else r.randint(least, ranks)
    rows = _rows(r)
    request: Request = {
        "ranks": ranks,
        "max_tokens_per_rank": rows,
        "min_degree": least,
        "max_degree": most if most < ranks or r.random() < 0.5 else None,
        "degrees": r.choice(["any", "any", "pow2"]),
        "alignment": r.choice([1, 1, 2, r.randint(1, min(ROWS_MAX, 1 + rows // 3))]),
        "ranks_per_node": r.choice([None, None, 1, 2, 4, 8, r.randint(1, 9)]),
        "sync": r.choice(["step", "micro_batch"]),
    }
    lengths = _lengths(r, request)
    request["lengths"] = lengths
    request["cost"] = _cost(r, lengths, ranks)
    for part, share in (
        (_pipeline, 0.4),
        (_memory, 0.3),
        (_bounds, 0.3),
        (_speeds, 0.3),
        (_prices, 0.15),
        (_own_pairs, 0.15),
        (_junk, 0.1),
    ):
        if r.random() < share:
            part(r, request)
    return request


def _rows(r: Random) -> int:
    if r.random() < 0.08:
        return min(ROWS_MAX, 2**31 - r.choice([1, 2, 3, 2**20]))
    return int(2 ** r.uniform(0, r.choice([6, 10, 14])))


def _lengths(r: Random, request: Request) -> list[int]:
    usable = request["max_tokens_per_rank"] - request["alignment"]
    widest = max((d for d in _allowed(request)), default=1)
    longest = max(1, usable - 2) * widest
    n = r.choice([0, 1, 2, 3, r.randint(0, 30), r.randint(0, 30), r.randint(0, 120)])
    shape = r.choice(["even", "tail", "equal", "short"])
    equal = r.randint(1, longest)
    draws = {
        "even": lambda: r.randint(1, longest),
        "tail": lambda: min(longest, max(1, int(longest / 40 * r.paretovariate(1.1)))),
        "equal": lambda: equal,
        "short": lambda: r.randint(1, max(1, usable // 3)),
    }
    return [min(LENGTH_MAX, draws[shape]()) for _ in range(n)]


def _cost(r: Random, lengths: list[int], ranks: int) -> hcp.CostModel:
    if r.random() < 0.15:
        return _table(r, lengths, ranks)

    def maybe(most: int) -> int:
        return r.randint(0, most) if r.random() < 0.5 else 0

    large = 2 ** r.choice([0, 0, 0, 0, 0, 20, 40, 55])
    return hcp.CostModel(
        pair=r.randint(1, 100) * (large if r.random() < 0.5 else 1),
        token=maybe(100_000) * (large if r.random() < 0.5 else 1),
        exchange=maybe(100_000),
        launch=maybe(2 ** r.randint(0, 30)) * (large if r.random() < 0.3 else 1),
        exchange_far=maybe(100_000),
        all_to_all=maybe(100_000),
        all_to_all_far=maybe(100_000),
        step=maybe(100_000),
        window=maybe(5000),
        tile=maybe(200),
        overlap=r.randint(0, 1),
        host=maybe(2 ** r.randint(0, 32)) * (large if r.random() < 0.1 else 1),
    )


def _prices(r: Random, request: Request) -> None:
    """Replace some prices, or all, by nothing or by as much as may fit."""
    cost: hcp.CostModel = request["cost"]
    names = [r.choice(PRICES)] if r.random() < 0.5 else [p for p in PRICES if r.random() < 0.8]
    price = r.choice([0, 0, 2 ** r.randint(20, 62)])
    if cost.table is None:
        request["cost"] = replace(cost, **dict.fromkeys(names, price))


def _own_pairs(r: Random, request: Request) -> None:
    """Give sequences pairs of their own, often none."""
    most = r.choice([0, 0, 1])
    if request["cost"].table is None:
        request["pairs"] = [r.randint(0, most * min(n * n, 2**63 - 1)) for n in request["lengths"]]


def draw_cheap(r: Random) -> Request:
    """Draw a request in which much, or everything, may cost nothing."""
    request = draw(r)
    if request["cost"].table is None:
        names = [p for p in PRICES[1:] if r.random() < r.choice([0.3, 0.9])]
        request["cost"] = replace(request["cost"], pair=1, **dict.fromkeys(names, 0))
        request["pairs"] = [r.choice([0, 0, n]) for n in request["lengths"]]
    return request


def _table(r: Random, lengths: list[int], ranks: int) -> hcp.CostModel:
    rows = tuple(sorted(set(lengths)))
    degrees = tuple(sorted({1, *(r.randint(1, ranks) for _ in range(6))}))
    most = 2 ** r.choice([10, 30, 42])
    times = tuple(r.randint(1, most) for _ in range(len(rows) * len(degrees)))
    return hcp.CostModel(
        pair=0,
        token=0,
        exchange=0,
        launch=r.randint(0, most),
        host=r.choice([0, r.randint(0, 2 * most)]),
        table=TimeTable(rows, degrees, times),
    )


def _pipeline(r: Random, request: Request) -> None:
    stages = r.randint(1, 6)
    request["pipeline_stages"] = stages
    if stages > 1 and r.random() < 0.5:
        request["virtual_stages"] = r.randint(1, 3)
        if request["virtual_stages"] > 1 and r.random() < 0.4:
            request["micro_batch_group"] = stages + r.randint(0, 2)


def _memory(r: Random, request: Request) -> None:
    rows, large = request["max_tokens_per_rank"], 2 ** r.choice([0, 0, 0, 20, 40])
    activation, logit = r.randint(0, 1000), r.choice([0, r.randint(0, 100_000)])
    limit = (activation + logit + 1) * large * rows // r.randint(1, 4) + r.randint(0, 1000)
    request["memory"] = hcp.MemoryModel(
        activation=activation * large,
        logit=logit * large,
        gathered=r.choice([0, r.randint(0, 1000)]),
        attention=r.choice([0, r.randint(0, 1000)]),
        head_chunks=r.choice([1, 1, 2, 3, 8]),
        limit=min(2**50, limit),
        buffer=r.choice([0, 0, r.randint(0, limit // 4)]),
    )


def _bounds(r: Random, request: Request) -> None:
    ranks, n = request["ranks"], len(request["lengths"])
    least = [r.choice([1, 1, r.randint(1, ranks)]) for _ in range(n)]
    if r.random() < 0.7:
        request["min_degrees"] = least
    if r.random() < 0.7:
        request["max_degrees"] = [r.choice([ranks, r.randint(d, ranks)]) for d in least]


def _speeds(r: Random, request: Request) -> None:
    request["speeds"] = [r.choice([1.0, 1.0, r.uniform(0.3, 1)]) for _ in range(request["ranks"])]


def _junk(r: Random, request: Request) -> None:
    """Replace one argument by a value at an edge or beyond it."""
    near = [e + d for e in (0, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64) for d in (-1, 0, 1)]
    value = r.choice([sign * x for x in near for sign in (1, -1)])
    names = ["ranks", "max_tokens_per_rank", "min_degree", "max_degree", "alignment"]
    names += ["ranks_per_node", "pipeline_stages", "virtual_stages", "micro_batch_group"]
    name = r.choice([*names, "lengths", "min_degrees", "max_degrees", "memory", "cost"])
    if name in names:
        request[name] = value
    elif name == "memory":
        request["memory"] = hcp.MemoryModel(activation=abs(value), limit=r.choice([1, abs(value)]))
    elif name == "cost":
        price: dict[str, Any] = {r.choice(["pair", "token", "launch"]): abs(value)}
        request["cost"] = hcp.CostModel(**price)
    elif request["lengths"]:
        values = list(request.get(name) or [1] * len(request["lengths"]))
        values[r.randrange(len(values))] = value
        request[name] = values


# ---- what has to be refused ----------------------------------------------------------------------


def fault(request: Request) -> str | None:
    """Return the argument for which a request has no plan, or None if it has one.

    Costs that are too large are no fault here: see :func:`may_overflow`.
    """
    return _bad_size(request) or _bad_list(request) or _bad_option(request) or _too_long(request)


def _bad_size(request: Request) -> str | None:
    ranks, rows = request["ranks"], request["max_tokens_per_rank"]
    least, most = request["min_degree"], _most(request)
    stages, chunks = request.get("pipeline_stages", 1), request.get("virtual_stages", 1)
    group = request.get("micro_batch_group") or 0
    sound = {
        "ranks": 1 <= ranks <= 2**20,
        "max_tokens_per_rank": 1 <= rows <= ROWS_MAX,
        "min_degree": 1 <= least <= ranks,
        "max_degree": least <= most <= ranks,
        "alignment": 0 <= request["alignment"] <= rows,
        "ranks_per_node": 0 <= (request["ranks_per_node"] or 0) < 2**31,
        "pipeline_stages": 0 <= stages <= 4096,
        "virtual_stages": 0 <= chunks <= 4096 and (chunks < 2 or stages > 1),
        "micro_batch_group": group == 0 or (chunks > 1 and stages <= group <= 4096),
    }
    return next((name for name, holds in sound.items() if not holds), None)


def _bad_list(request: Request) -> str | None:
    ranks = request["ranks"]
    if len(request.get("speeds") or range(ranks)) != ranks:
        return "speeds"
    if not all(1 <= length <= LENGTH_MAX for length in request["lengths"]):
        return "lengths"
    own = request.get("pairs") or [0] * len(request["lengths"])
    if any(pairs > n * n for pairs, n in zip(own, request["lengths"], strict=True)):
        return "pairs"
    for i in range(len(request["lengths"])):
        least, most = _bounds_of(request, i)
        if not 1 <= least <= ranks:
            return "min_degrees"
        if not least <= most <= ranks:
            return "max_degrees"
    return None


def _bad_option(request: Request) -> str | None:
    node = request["ranks_per_node"] or 0
    memory: hcp.MemoryModel | None = request.get("memory")
    if request["degrees"] == "pow2" and node > 0 and node.bit_count() != 1:
        return "ranks_per_node"
    if memory is not None:
        if max(memory.activation, memory.logit, memory.gathered, memory.limit) > 2**50:
            return "memory"
        if memory.limit > 0 and _bytes_left(request, memory, 1) < 1:
            return "memory.limit"
    cost: hcp.CostModel = request["cost"]
    if max(cost.prices) >= 2**63 or (cost.table is None and cost.pair == cost.token == 0):
        return "cost"
    if cost.table is not None and not set(request["lengths"]) <= set(cost.table.lengths):
        return "lengths"
    return None if any(True for _ in _allowed(request)) else "degrees"


def _too_long(request: Request) -> str | None:
    for i, length in enumerate(request["lengths"]):
        if not any(_holds(request, i, length, d) for d in _allowed(request)):
            return f"lengths[{i}]"
    return None


def _most(request: Request) -> int:
    most: int | None = request.get("max_degree")
    return request["ranks"] if most is None else most


def _allowed(request: Request) -> Any:
    """Return the degrees that a plan may use."""
    node, cost = request["ranks_per_node"] or 0, request.get("cost")
    for d in range(max(1, request["min_degree"]), min(_most(request), request["ranks"]) + 1):
        if request["degrees"] == "pow2" and d.bit_count() != 1:
            continue
        if node and d > node and d % node:
            continue
        if cost is None or cost.table is None or d in cost.table.degrees:
            yield d


def _bounds_of(request: Request, i: int) -> tuple[int, int]:
    least, most = request.get("min_degrees"), request.get("max_degrees")
    return least[i] if least else 1, most[i] if most else request["ranks"]


def _capacity(request: Request) -> int:
    rows, alignment = request["max_tokens_per_rank"], max(1, request["alignment"])
    return int(rows // alignment * alignment)


def _bytes_left(request: Request, memory: hcp.MemoryModel, degree: int) -> int:
    """Return the limit's bytes without those of rows that alignment may add."""
    padding = max(1, request["alignment"]) - 1
    buffers = padding * (memory.attention + memory.gathered) if degree > 1 else 0
    taken = padding * (memory.activation + memory.logit) + -(-buffers // memory.head_chunks)
    return memory.limit - memory.buffer - taken


def fullest(length: int, degree: int) -> int:
    """Return the rows of the fullest rank under zigzag, chunk by chunk."""
    cuts = [k * length // (2 * degree) for k in range(2 * degree + 1)]
    chunks = [b - a for a, b in itertools.pairwise(cuts)]
    return max(chunks[j] + chunks[-1 - j] for j in range(degree))


def _bytes(memory: hcp.MemoryModel, length: int, degree: int) -> int:
    rows = fullest(length, degree)
    buffers = memory.gathered * length + memory.attention * rows if degree > 1 else 0
    return rows * (memory.activation + memory.logit) + -(-buffers // memory.head_chunks)


def _holds(request: Request, i: int, length: int, degree: int) -> bool:
    least, most = _bounds_of(request, i)
    memory: hcp.MemoryModel | None = request.get("memory")
    if not least <= degree <= most or fullest(length, degree) > _capacity(request):
        return False
    if memory is None or memory.limit == 0:
        return True
    return _bytes(memory, length, degree) <= _bytes_left(request, memory, degree)


# ---- times ---------------------------------------------------------------------------------------


def time_of(request: Request, i: int, degree: int) -> int:
    """Return the time of a sequence without launch, by the header's formula or by the table."""
    cost: hcp.CostModel = request["cost"]
    length, own = request["lengths"][i], request.get("pairs")
    if cost.table is not None:
        row, column = cost.table.lengths.index(length), cost.table.degrees.index(degree)
        return cost.table.times[row * len(cost.table.degrees) + column]
    far = 0 < (request["ranks_per_node"] or 0) < degree
    exchange = max(cost.exchange, cost.exchange_far) if far else cost.exchange
    heads = max(cost.all_to_all, cost.all_to_all_far) if far else cost.all_to_all
    rows = _tiled(cost, length, degree)
    attention = cost.pair * (_pairs(rows, cost.window) if own is None else own[i])
    time = -(-(attention + cost.token * rows) // degree)
    if degree == 1:
        return max(1, time)
    moved = exchange * (length - length // degree)
    if cost.overlap:
        share = -(-attention // degree)
        moved = max(0, moved - (share - share // degree))
    return max(1, time + moved - (-heads * length // degree) + (degree - 1) * cost.step)


def _tiled(cost: hcp.CostModel, length: int, degree: int) -> int:
    chunk = 2 * degree * cost.tile
    return -(-length // chunk) * chunk if cost.tile > 1 else length


def _pairs(rows: int, window: int) -> int:
    seen = min(rows, window) if window else rows
    return seen * (seen + 1) // 2 + (rows - seen) * seen


def may_overflow(request: Request) -> bool:
    """Whether costs are so large that a plan may be refused for them. Each of them must fit in 62
    bits, summed over ranks, and the sum of all in 63 bits."""
    cost: hcp.CostModel = request["cost"]
    stages = max(1, request.get("pipeline_stages") or 1) * max(
        1, request.get("virtual_stages") or 1
    )
    if cost.table is not None:
        one = cost.launch + cost.host + max(cost.table.times, default=0)
        total = one * (1 + len(request["lengths"]))
        return total * request["ranks"] * stages * 2**12 >= 2**COST_BITS
    most, total = request["ranks"], cost.pair * sum(request.get("pairs") or [])
    for length in request["lengths"]:
        rows = length + 2 * most * cost.tile
        total += cost.launch + cost.host + cost.pair * rows * (rows + 1) // 2 + cost.token * rows
        total += length * most * max(cost.exchange, cost.exchange_far)
        total += length * max(cost.all_to_all, cost.all_to_all_far) + most**2 * cost.step
    return total * stages * most * 2**12 >= 2**COST_BITS


# ---- the judge of an answer ----------------------------------------------------------------------


def judged(request: Request) -> str:
    """Return what came of a request: "plan", or the kind of refusal that it deserved."""
    wrong = fault(request)
    try:
        plan = hcp.plan(**request)
    except OverflowError:
        assert may_overflow(request)
        return "overflow"
    except ValueError:
        if wrong is None:
            raise
        return "refused"
    assert wrong is None, f"there is a plan in spite of {wrong}"
    judge(request, plan)
    check_plan(plan, request["lengths"])
    assert hcp.plan(**request).checksum == plan.checksum
    assert lower_bound(**request) == plan.bound
    assert hcp.Plan.from_dict(plan.to_dict()).checksum == plan.checksum
    return "plan"


# ---- the judge -----------------------------------------------------------------------------------


class Timed(NamedTuple):
    """A group of a micro-batch."""

    first: int
    degree: int
    time: int


def judge(request: Request, plan: hcp.Plan) -> None:
    """Check every rule of plans, and the times that this plan claims."""
    lengths, seen = request["lengths"], list[int]()
    assert list(plan.lengths) == list(lengths)
    for groups in plan.micro_batches:
        free = 0
        for group in groups:
            assert free <= group.first_rank <= request["ranks"] - group.degree
            free = group.first_rank + group.degree
            _judge_group(request, group)
            seen += group.sequences
    assert sorted(seen) == list(range(len(lengths)))
    _judge_count(request, plan)
    assert 0 <= plan.bound <= plan.makespan
    assert plan.makespan == makespan(request, plan)
    if request["cost"].table is None:
        assert plan.work == sum(time_of(request, i, 1) for i in range(len(lengths)))


def _judge_group(request: Request, group: Group) -> None:
    node = request["ranks_per_node"] or 0
    assert group.sequences
    assert group.degree in set(_allowed(request))
    if request["degrees"] == "pow2":
        assert group.first_rank % group.degree == 0
    if node:
        last = group.first_rank + group.degree - 1
        one_node = group.first_rank // node == last // node
        assert one_node or group.first_rank % node == group.degree % node == 0
    held, taken = 0, 0
    memory: hcp.MemoryModel | None = request.get("memory")
    for s in group.sequences:
        length = request["lengths"][s]
        assert _holds(request, s, length, group.degree)
        held += fullest(length, group.degree)
        taken += _bytes(memory, length, group.degree) if memory else 0
    assert held <= _capacity(request)
    assert not memory or memory.limit == 0 or taken <= _bytes_left(request, memory, group.degree)


def _judge_count(request: Request, plan: hcp.Plan) -> None:
    multiple = _multiple(request)
    empty = [m for m, groups in enumerate(plan.micro_batches) if not groups]
    assert multiple > 1 or not empty
    assert len(plan.micro_batches) % multiple == 0
    assert empty == list(range(len(plan.micro_batches) - len(empty), len(plan.micro_batches)))
    assert len(empty) < multiple


def _multiple(request: Request) -> int:
    if request.get("virtual_stages", 1) < 2:
        return 1
    return int(request.get("micro_batch_group") or request["pipeline_stages"])


def makespan(request: Request, plan: hcp.Plan) -> int:
    """Return the time at which the last rank ends."""
    batches = [_timed(request, groups) for groups in plan.micro_batches]
    stages = max(1, request.get("pipeline_stages") or 1)
    chunks = max(1, request.get("virtual_stages") or 1)
    if stages == 1:
        free, idle = [0] * request["ranks"], _idle(request)
        for batch in batches:
            outside = set(range(request["ranks"]))
            for first, degree, time in batch:
                free[first : first + degree] = [max(free[first : first + degree]) + time] * degree
                outside -= set(range(first, first + degree))
            for rank in outside:
                free[rank] += idle[rank]
        return max(free)
    return _piped(batches, request["ranks"], stages, chunks, _multiple(request))


def _idle(request: Request) -> list[int]:
    """Return what each rank takes for a micro-batch in which it has no rows."""
    cost: hcp.CostModel = request["cost"]
    time = max(cost.host, cost.launch) if request["sync"] == "step" else 0
    return [-(-time * slow // FULL_SPEED) for slow in slowness_of(request)]


def _timed(request: Request, groups: tuple[Group, ...]) -> list[Timed]:
    cost, slowness = request["cost"], slowness_of(request)
    timed = []
    for first, degree, sequences in groups:
        time = cost.launch + sum(time_of(request, s, degree) for s in sequences)
        time = max(cost.host, time)
        slowest = max(slowness[first : first + degree])
        timed.append(Timed(first, degree, -(-time * slowest // FULL_SPEED)))
    if request["sync"] == "step":
        return timed
    return [Timed(0, request["ranks"], max((group.time for group in timed), default=0))]


def slowness_of(request: Request) -> list[int]:
    speeds = request.get("speeds")
    if speeds is None:
        return [FULL_SPEED] * request["ranks"]
    return [round(FULL_SPEED * max(speeds) / speed) for speed in speeds]


class Pass(NamedTuple):
    """The time of one micro-batch through one chunk of one stage."""

    forward: bool
    batch: int
    chunk: int


def _passes(stage: int, stages: int, chunks: int, group: int, n: int) -> list[Pass]:
    """Return the passes of a stage in order: some forwards ahead, then forward and backward in
    turns."""
    turns = [range(first, min(n, first + group)) for first in range(0, n, group)]
    forward = [Pass(True, m, c) for turn in turns for c in range(chunks) for m in turn]
    backward = [Pass(False, m, chunks - 1 - c) for _, m, c in forward]
    ahead = stages - 1 - stage
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * group
    ahead = min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *itertools.chain(*pairs), *backward[len(forward) - ahead :]]


def _piped(batches: list[list[Timed]], ranks: int, stages: int, chunks: int, group: int) -> int:
    """Return the integer time at which the last pass ends. A pass waits for its ranks, and for the
    link before it."""
    ends: dict[tuple[int, Pass, int], int] = {}
    free = [[0] * ranks for _ in range(stages)]
    todo = [
        deque(
            (step, g)
            for step in _passes(stage, stages, chunks, group, len(batches))
            for g in range(len(batches[step.batch]))
        )
        for stage in range(stages)
    ]
    while any(todo):
        moved = False
        for stage in range(stages):
            while todo[stage]:
                step, g = todo[stage][0]
                needed = _link_before(stage, stages, chunks, step)
                if needed is not None and (*needed, g) not in ends:
                    break
                first, degree, time = batches[step.batch][g]
                held = free[stage][first : first + degree]
                begun = max([*held, ends[(*needed, g)] if needed is not None else 0])
                ends[stage, step, g] = end = begun + time * (1 if step.forward else 2)
                free[stage][first : first + degree] = [end] * degree
                todo[stage].popleft()
                moved = True
        assert moved, "the pipeline stands still"
    return -(-max(ends.values(), default=0) // (3 * chunks))


def _link_before(stage: int, stages: int, chunks: int, step: Pass) -> tuple[int, Pass] | None:
    link = step.chunk * stages + stage
    if not step.forward and link == stages * chunks - 1:
        return stage, step._replace(forward=True)
    link += -1 if step.forward else 1
    return None if link < 0 else (link % stages, step._replace(chunk=link // stages))
