"""Compare simulated steps with measured ones, and simulate plans for up to 1,024 ranks.

    python benchmarks/studies/simulated.py                  what is measured in benchmarks/results
    python benchmarks/studies/simulated.py --ranks 64 256   plans of many ranks
    python benchmarks/studies/simulated.py --eval           an evaluation with few samples

Plans are replayed on a machine (hcp/tools/replay.py): GPUs, their hosts, links inside and across
nodes. Its prices come from runs on up to 2 GPUs. No row is fitted to itself:

    training     a GPT of 1.0 B parameters. Prices: the 18 micro-batches of `calibrate` on 1 and 2
                 ranks, each measured alone; rows move at the rate of a plain copy. Predicted: the
                 18 micro-batches on 3 and 4 ranks, and the steps of bench_train.py on 4
    Megatron     another model and kernel, on 2 GPUs. Prices: attention, and all else, of one
                 profiled step (hcp on P2). Predicted: the steps of bench_megatron.py
    evaluation   Prices: the layouts of CP 1 and 2 without a pipeline. Predicted: the others
    attention    one layer. Prices: one pack on 2 GPUs. Predicted: the share of its bound that a
                 layer reaches on 2, 4 and 8 GPUs

Columns: measured; simulated; simulated / measured. "off" marks a row that is off by more than 3%.

With --ranks, each family has as many sequences per rank as in benchmarks/common/families.py. ALL
BUT THE PLANNING TIME IS SIMULATED. The machine is training's, in nodes of 8 ranks, with --far-gbps
between nodes for each GPU: an assumption. Every rank receives rows from where they lie or, with
--once, a row enters a node once and goes on inside it. Contestants: hcp.plan; "static", hcp's
packing at the least degree that holds the longest sequence (the first batch's is shown);
"next-fit", that degree with Megatron's packing in order; "waves", Megatron's dynamic scheduler. The
last two are re-implemented in benchmarks/peers/planners.py. Columns: tokens per second and GPU;
time / hcp's; the share of all ranks' time in which a GPU waits for others or its host ("idle"),
and, of the rank that waits longest, in which rows are on their way and nothing hides them
("exposed"); the wall-clock milliseconds of hcp.plan, the least of three.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common.batches import drawn
from common.families import BY_NAME, Family
from common.machine import planner_line
from peers.planners import next_fit_at, plan_of, static_degree, wave_greedy

import hcp
from hcp.tools.choose import EvalChoice, choose_eval_context_parallel
from hcp.tools.replay import Machine
from hcp.tools.replay import replay as replayed

RESULTS = Path(__file__).resolve().parents[1] / "results"
COPY = 365e9
"""Bytes per second of a plain copy from a peer's memory: attention_h200x4_2026-11-22.md."""
CALIBRATED = "calibrate_h200x4_2026-11-22.json"
WITHIN = 0.03

# ---- what was measured ---------------------------------------------------------------------------

TRAINING = "train_h200x4_2026-11-22.md"
TRAINED = {
    "P1": {"dynamic": 211_145, "static": 181_983, "wave greedy": 207_702},
    "P2": {"dynamic": 169_785, "static": 154_642, "wave greedy": 167_792},
    "P3": {"dynamic": 105_447, "static": 104_882, "wave greedy": 105_160},
    "P4": {"dynamic": 124_314, "static": 122_315, "wave greedy": 123_386},
}
"""Tokens per second on 4 GPUs."""
PARAMETERS = 1_019.8e6

MEGATRON = "megatron_h200x2_2026-11-23.md"
MEGATRON_STEPS = {
    "P1": {"dynamic": 203_572, "wave greedy": 203_676},
    "P2": {"dynamic": 143_944, "wave greedy": 139_406},
    "P3": {"dynamic": 110_085, "wave greedy": 103_771},
    "P4": {"dynamic": 146_899, "wave greedy": 147_370},
}
"""Tokens per second on 2 GPUs."""
MEGATRON_4 = "megatron_h200x4_2026-11-26.md"
MEGATRON_4_STEPS = {
    "P1": {"dynamic": 403_861, "dynamic, fitted": 396_193, "wave greedy": 399_927},
    "P2": {"dynamic": 284_324, "dynamic, fitted": 279_648, "wave greedy": 231_317},
    "P3": {"dynamic": 211_508, "dynamic, fitted": 209_102, "wave greedy": 211_037},
    "P4": {"dynamic": 289_821, "dynamic, fitted": 288_872, "wave greedy": 279_146},
}
"""Tokens per second on 4 GPUs."""
SIZES = hcp.CostModel.for_transformer(
    hidden_size=2048, ffn_hidden_size=7168, num_attention_heads=16, num_query_groups=8
)
FITTED = hcp.CostModel(
    pair=5755, token=84_271_090, exchange=4_163_629, launch=91_524_185_728, step=1_040_579_053
)
MEGATRON_4_COSTS = {"dynamic": SIZES, "dynamic, fitted": FITTED, "wave greedy": FITTED}
"""What these were planned by: prices that follow from the model's sizes, and those of the run."""
PROFILED = {"attention": 0.206 + 0.549, "all else": 1.055}
"""Seconds of rank 0 in one step of P2 by hcp."""

EVALUATION = "eval_h200x4_2026-11-22.md"
EVALUATED = {
    (1, 1): 172.3,
    (1, 2): 200.8,
    (1, 4): 225.0,
    (2, 1): 196.8,
    (2, 2): 215.5,
    (4, 1): 212.4,
}
"""Milliseconds on 4 GPUs, by (pipeline stages, CP size)."""
SAMPLES, SAMPLE, LAYERS, WIDTH = 12, 8192, 8, 4096

KERNELS = "kernels_libraries_h200_2026-11-23.md"
ALONE = {65_536: 0.101254 + 0.271376, 8192: 0.001872 + 0.004839}
"""Seconds of FlashAttention-2, forward and backward, of one sequence on one GPU."""
HALVES = [32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128]
LAYERS_OF_ATTENTION = [
    ("attention_h200x2_2026-11-22.md", "8 x 8192", 2, 0.96),
    ("attention_h200x2_2026-11-22.md", "32768 ... 128", 2, 0.97),
    ("attention_h200x4_2026-11-22.md", "1 x 65536", 4, 0.97),
    ("attention_h200x4_2026-11-22.md", "8 x 8192", 4, 0.88),
    ("attention_h200x4_2026-11-22.md", "32768 ... 128", 4, 0.94),
    ("attention_h200x8_2026-11-21.md", "1 x 65536", 8, 0.95),
    ("attention_h200x8_2026-11-21.md", "8 x 8192", 8, 0.74),
    ("attention_h200x8_2026-11-21.md", "32768 ... 128", 8, 0.87),
]
"""Page, pack, GPUs, and the share of the bound: all_gather by peer at the full degree."""


def keys_and_values(layers: int, heads: int, head_dim: int, passes: int = 3) -> int:
    """Return the bytes of a token's keys and values in bfloat16, in all layers and passes."""
    return passes * layers * 2 * heads * head_dim * 2


def check_pages() -> None:
    """Raise ValueError for a figure above that does not stand on its page."""
    figures = [(TRAINING, f"{rate:,}") for rates in TRAINED.values() for rate in rates.values()]
    figures += [
        (page, f"{rate:,}")
        for page, steps in ((MEGATRON, MEGATRON_STEPS), (MEGATRON_4, MEGATRON_4_STEPS))
        for rates in steps.values()
        for rate in rates.values()
    ]
    figures += [(EVALUATION, f"| {stages} | {cp} | ") for stages, cp in EVALUATED]
    figures += [(EVALUATION, f"| {ms} (") for ms in EVALUATED.values()]
    figures += [(page, f" / {share:.2f} |") for page, _, _, share in LAYERS_OF_ATTENTION]
    for page, figure in figures:
        if figure not in (RESULTS / page).read_text():
            raise ValueError(f"{figure!r} is not on {page}, expected it there")


# ---- prices --------------------------------------------------------------------------------------

Row = tuple[str, float, float]
"""What it is, measured, simulated."""


@dataclass(frozen=True)
class Point:
    """A micro-batch that was measured alone."""

    plan: hcp.Plan
    length: int
    sequences: int
    seconds: float

    @property
    def degree(self) -> int:
        return self.plan.ranks


def points() -> list[Point]:
    data = json.loads((RESULTS / CALIBRATED).read_text())["provenance"]["points"]
    return [
        Point(one_group([length] * count, degree), length, count, seconds)
        for length, count, degree, seconds in data
    ]


def one_group(lengths: list[int], degree: int) -> hcp.Plan:
    group = {"first_rank": 0, "degree": degree, "sequences": list(range(len(lengths)))}
    return hcp.Plan.from_dict(
        {"ranks": degree, "max_tokens_per_rank": sum(lengths) + len(lengths), "lengths": lengths}
        | {"micro_batches": [{"groups": [group]}]}
    )


def training_machine() -> Machine:
    """Fit the prices of the GPT of 1.0 B parameters to its micro-batches on 1 and 2 ranks."""
    near = keys_and_values(18, 8, 128) / COPY
    start = Machine(
        pair=2e-9, token=1e-5, launch=5e-3, shared=1e-6, host=0.04, host_shared=0.06, near=near
    )
    return fitted(start, [point for point in points() if point.degree <= 2])


def fitted(machine: Machine, known: Sequence[Point]) -> Machine:
    """Return the prices with the least squared relative errors, by steps along one price."""

    def off(machine: Machine) -> float:
        return sum((replayed(p.plan, machine).seconds / p.seconds - 1) ** 2 for p in known)

    best, step = off(machine), 0.2
    while step > 1e-3:
        found = machine
        for name in ("pair", "token", "launch", "shared", "host", "host_shared"):
            for factor in (1 + step, 1 / (1 + step)):
                moved = replace(found, **{name: getattr(found, name) * factor})
                if off(moved) < best:
                    found, best = moved, off(moved)
        if found == machine:
            step /= 1.5
        machine = found
    return machine


# ---- measured and simulated ----------------------------------------------------------------------


def micro_batches(machine: Machine) -> Iterator[Row]:
    for point in points():
        if point.degree > 2:
            name = f"{point.sequences} x {point.length} on {point.degree} ranks, s"
            yield name, point.seconds, replayed(point.plan, machine).seconds


def contestants(
    lengths: list[int], ranks: int, capacity: int, cost: hcp.CostModel, names: Sequence[str]
) -> Iterator[tuple[str, hcp.Plan]]:
    """Yield the plans of bench_train.py and bench_megatron.py."""
    request: dict[str, Any] = {"ranks": ranks, "max_tokens_per_rank": capacity, "cost": cost}
    degree = static_degree([max(lengths)], ranks, capacity)
    made: dict[str, Callable[[], hcp.Plan]] = {
        "dynamic": lambda: hcp.plan(lengths, **request),
        "static": lambda: hcp.plan(lengths, **request, min_degree=degree, max_degree=degree),
        "wave greedy": lambda: plan_of(
            wave_greedy(lengths, ranks, capacity, cost), lengths, request
        ),
    }
    for name in names:
        yield name, made[name]()


def batch_of(name: str, ranks: int, capacity: int, tokens: int) -> list[int]:
    family = BY_NAME[name]
    (lengths,) = drawn(family, ranks=ranks, capacity=capacity, tokens=tokens, batches=1, seed=1)
    return lengths


def trained(machine: Machine) -> Iterator[Row]:
    reduction = 2 * 3 / 4 * 2 * PARAMETERS / COPY  # a ring's bytes, in bfloat16
    for family, rates in TRAINED.items():
        capacity = min(BY_NAME[family].capacity, 8192)
        lengths = batch_of(family, 4, capacity, 524_288)
        for name, plan in contestants(lengths, 4, capacity, machine.prices(), list(rates)):
            seconds = replayed(plan, machine).seconds + reduction
            yield f"{family} {name}, tokens/s", rates[name], sum(lengths) / seconds


def megatron_machine() -> Machine:
    """Split the time of one step on 2 GPUs into that of pairs and of rows."""
    lengths = batch_of("P2", 2, 32_768, 262_144)
    near = keys_and_values(12, 8, 128) / COPY
    machine = Machine(pair=1e-9, token=1e-5, near=near)
    for _ in range(3):  # the plan depends on the prices, and the prices on what rank 0 has of it
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=32_768, cost=machine.prices())
        pairs, rows = of_rank_0(plan)
        machine = replace(
            machine, pair=PROFILED["attention"] / pairs, token=PROFILED["all else"] / rows
        )
    return machine


def megatron(
    ranks: int,
    steps: Mapping[str, Mapping[str, int]],
    machine: Machine,
    costs: Mapping[str, hcp.CostModel] | None = None,
) -> Iterator[Row]:
    """``costs``: what contestants were planned by; the machine's prices where it is not said."""
    for family, rates in steps.items():
        lengths = batch_of(family, ranks, 32_768, 262_144)
        for name, rate in rates.items():
            cost = (costs or {}).get(name, machine.prices())
            ((_, plan),) = contestants(lengths, ranks, 32_768, cost, [name.partition(",")[0]])
            simulated = sum(lengths) / replayed(plan, machine).seconds
            yield f"{family} {name}, tokens/s", rate, simulated


def of_rank_0(plan: hcp.Plan) -> tuple[float, float]:
    own = [
        (plan.lengths[s], group.degree)
        for groups in plan.micro_batches
        for group in groups
        for s in group.sequences
        if group.first_rank == 0
    ]
    return sum(n * (n + 1) / 2 / d for n, d in own), sum(n / d for n, d in own)


def evaluation_machine() -> Machine:
    """Split a sample's time on 2 ranks into half of that on one, moved rows, and work on them."""
    alone, halved = EVALUATED[1, 1] / 3e3, EVALUATED[1, 2] / 6e3
    near = keys_and_values(LAYERS, 1, WIDTH, passes=1) / COPY
    shared = (halved - alone / 2 - near * SAMPLE / 2) / (SAMPLE / 2)
    return Machine(token=alone / SAMPLE, near=near, shared=shared)


def chosen(samples: int, ranks: int, stages: int) -> EvalChoice:
    cost = evaluation_machine().prices()
    return choose_eval_context_parallel(
        samples, SAMPLE, ranks=ranks, train_cp=1, cost=cost, pipeline_stages=stages
    )


def evaluated() -> Iterator[Row]:
    unit = evaluation_machine().prices().unit or 0.0
    for stages in (1, 2, 4):
        for candidate in chosen(SAMPLES, 4 // stages, stages).candidates:
            if (stages, candidate.cp) not in ((1, 1), (1, 2)):
                name = f"{stages} stages, CP {candidate.cp}, ms"
                yield name, EVALUATED[stages, candidate.cp], candidate.time * unit * 1e3


def attended() -> Iterator[Row]:
    packs = {"1 x 65536": [65_536], "8 x 8192": [8192] * 8, "32768 ... 128": HALVES}
    near = keys_and_values(1, 8, 128) / COPY

    def share(pack: str, degree: int, shared: float) -> float:
        rate = ALONE[65_536] / 65_536**2 * 2 if pack == "1 x 65536" else ALONE[8192] / 8192**2 * 2
        plan = one_group(packs[pack], degree)
        own = replayed(plan, Machine(pair=rate)).seconds
        moved = replayed(plan, Machine(near=near)).seconds
        whole = replayed(plan, Machine(pair=rate, near=near, shared=shared)).seconds
        return max(own, moved) / whole

    low, high = 0.0, 1e-6
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if share("8 x 8192", 2, middle) > 0.96 else (low, middle)
    for number, (_, pack, degree, measured) in enumerate(LAYERS_OF_ATTENTION):
        if number:
            yield f"{pack} on {degree} GPUs, of bound", measured, share(pack, degree, low)


def print_check() -> None:
    machine, of_megatron = training_machine(), megatron_machine()
    print("prices of training, in seconds: " + in_words(machine))
    tables = {
        f"micro-batches alone, {CALIBRATED}": micro_batches(machine),
        f"training on 4 GPUs, {TRAINING}": trained(machine),
        f"Megatron-Core on 2 GPUs, {MEGATRON}": megatron(2, MEGATRON_STEPS, of_megatron),
        f"Megatron-Core on 4 GPUs, {MEGATRON_4}": megatron(
            4, MEGATRON_4_STEPS, of_megatron, MEGATRON_4_COSTS
        ),
        f"evaluation on 4 GPUs, {EVALUATION}": evaluated(),
        f"attention layers on 2, 4 and 8 GPUs, kernels of {KERNELS}": attended(),
    }
    for title, rows in tables.items():
        print(f"\n{title}\n\n| what | measured | simulated | simulated / measured | |")
        print("|---|---|---|---|---|")
        ratios = []
        for name, measured, simulated in rows:
            ratios.append(simulated / measured)
            off = "off" if abs(ratios[-1] - 1) > WITHIN else ""
            print(f"| {name} | {shown(measured)} | {shown(simulated)} | {ratios[-1]:.3f} | {off} |")
        inside = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"\n{inside} of {len(ratios)} within {WITHIN:.0%}; {spread}")


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def in_words(machine: Machine) -> str:
    names = ("pair", "token", "launch", "shared", "near", "host", "host_shared")
    return ", ".join(f"{name} {getattr(machine, name):.4g}" for name in names)


# ---- many ranks ----------------------------------------------------------------------------------


def batch_for(family: Family, ranks: int, seed: int) -> list[int]:
    """Draw a family's batch for so many ranks, with its number of sequences per rank."""
    random, most = Random(seed), ranks * family.capacity
    lengths: list[int] = []
    for _ in range(max(1, ranks // family.ranks)):
        lengths += [min(length, most) for length in family.draw(random)]
    return lengths


def plans_of(
    lengths: list[int], family: Family, ranks: int, cost: hcp.CostModel
) -> tuple[dict[str, hcp.Plan], float]:
    """Return each contestant's plan, and the seconds that hcp's took."""
    capacity = family.capacity // 2 * 2
    request: dict[str, Any] = {"ranks": ranks, "max_tokens_per_rank": capacity, "cost": cost}
    request["ranks_per_node"] = min(8, ranks)
    took = math.inf
    for _ in range(3):
        begun = time.perf_counter()
        dynamic = hcp.plan(lengths, **request)
        took = min(took, time.perf_counter() - begun)
    degree = static_degree([max(lengths)], ranks, capacity)
    in_order = next_fit_at(degree, lengths, ranks, capacity)
    waves = wave_greedy(lengths, ranks, capacity, cost)
    return {
        "hcp": dynamic,
        f"static, degree {degree}": hcp.plan(
            lengths, **request, min_degree=degree, max_degree=degree
        ),
        f"next-fit, degree {degree}": plan_of(in_order, lengths, request),
        "waves": plan_of(waves, lengths, request),
    }, took


def print_many(
    ranks: Sequence[int], families: Sequence[str], seeds: int, far: float, once: bool
) -> None:
    machine = training_machine()
    far_price = keys_and_values(18, 8, 128) / (far * 1e9)
    machine = replace(machine, far=far_price, ranks_per_node=8, once=once)
    cost = machine.prices()
    print(f"SIMULATED but for the planning time, {planner_line()}\n")
    print(
        "| family | ranks | tokens | plan | micro-batches | tokens/s/GPU | time / hcp's | idle ",
        end="",
    )
    print("| exposed | planning ms |\n|---|---|---|---|---|---|---|---|---|---|")
    for name in families:
        for count in ranks:
            print_rows(name, count, seeds, machine, cost)


def print_rows(name: str, ranks: int, seeds: int, machine: Machine, cost: hcp.CostModel) -> None:
    batches = [batch_for(BY_NAME[name], ranks, seed) for seed in range(seeds)]
    made = [plans_of(lengths, BY_NAME[name], ranks, cost) for lengths in batches]
    tokens = sum(map(sum, batches))
    planning = statistics.median(took for _, took in made) * 1e3
    first = 0.0
    for places in zip(*(plans for plans, _ in made), strict=True):
        assert len({place.split(",")[0] for place in places}) == 1
        plans = [own[place] for (own, _), place in zip(made, places, strict=True)]
        found = [replayed(plan, machine) for plan in plans]
        seconds = sum(each.seconds for each in found)
        first = first or seconds
        idle = statistics.mean(each.idle_share for each in found)
        exposed = statistics.mean(max(each.exposed) / each.seconds for each in found)
        count = statistics.mean(len(plan.micro_batches) for plan in plans)
        print(
            f"| {name} | {ranks} | {tokens // seeds:,} | {places[0]} | {count:.1f} | "
            f"{tokens / seconds / ranks:,.0f} | {seconds / first:.2f} | {idle:.1%} | "
            f"{exposed:.1%} | {f'{planning:.1f}' if places[0] == 'hcp' else '-'} |",
            flush=True,
        )


# ---- an evaluation with few samples --------------------------------------------------------------


def print_eval() -> None:
    unit = evaluation_machine().prices().unit or 0.0
    print("SIMULATED: samples of 8192 tokens, 4 pipeline stages, training layout CP 1\n")
    print(
        "| GPUs | data-parallel ranks | samples | CP | ms | CP 1 / it | chosen |\n"
        + "|---" * 7
        + "|"
    )
    for gpus, samples in ((8, 1), (8, 3), (1024, 8), (1024, 64), (1024, 200)):
        ranks = gpus // 4
        choice = chosen(samples, ranks, 4)
        base = choice.candidates[0].time
        for each in choice.candidates:
            if each.cp <= 2 * choice.cp:
                chose = "chosen" if each.cp == choice.cp else ""
                print(
                    f"| {gpus} | {ranks} | {samples} | {each.cp} | {each.time * unit * 1e3:.1f} | "
                    f"{base / each.time:.2f} | {chose} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", help="powers of two, 64 or more")
    parser.add_argument("--families", nargs="+", default=["P1", "P2", "P3", "P4"])
    parser.add_argument("--seeds", type=int, default=3, help="global batches (3)")
    parser.add_argument("--far-gbps", type=float, default=50, help="GB/s of a GPU (50)")
    parser.add_argument("--once", action="store_true", help="rows enter a node once")
    parser.add_argument("--eval", action="store_true")
    args = parser.parse_args()
    check_pages()
    if args.ranks:
        print_many(args.ranks, args.families, args.seeds, args.far_gbps, args.once)
    elif args.eval:
        print_eval()
    else:
        print_check()


if __name__ == "__main__":
    main()
