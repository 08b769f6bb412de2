"""Replay global batches through packed static CP and through hcp, for a cluster and a model.

Everything but the planning time is SIMULATED by the cost model, not measured. The model leaves out
the optimizer, gradient reduction, loading and other ranks' jitter: they cost nothing here.

  static CP      one degree for all, the least divisor of the ranks that holds the longest sequence,
                 a power of two with --degrees pow2; sequences packed by next-fit in the order of
                 arrival, as trainers do it
  packing only   the same degree; hcp packs and places
  hcp            hcp chooses degrees, too

With --host-ms every plan is replayed: hosts queue micro-batches ahead of their GPUs, rows of the
own node and of others arrive over two links at once, behind attention over a rank's own rows.

With --pipeline-stages, each on its own --ranks ranks, a step is an exact simulation of 1F1B with
equal stages. --virtual-stages cuts each stage into chunks and interleaves the pipeline; static CP
then has smaller micro-batches if their count would not be a multiple of the group.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from hcp._validate import expect_size, flag
from hcp.cli.command_arguments import (
    FAMILIES_EPILOG,
    add_column,
    add_cost,
    add_drawing,
    add_family,
    add_limits,
    add_pictures,
    draw_lengths,
    expect_given,
    fail,
    in_words,
    limits_of,
    new_parser,
    write_pictures,
)
from hcp.cli.lengths import HELP, read_lengths
from hcp.cli.slack import add_prove, sharper_bound
from hcp.planning.cost import PRICES, TIMES, CostModel
from hcp.planning.limits import LIMITS, even_degrees, least_degree, rows_up_to, slowness_of
from hcp.planning.memory import MemoryModel
from hcp.planning.plan import Plan, plan
from hcp.tools.drawing import brief_svg
from hcp.tools.programs.arguments import whole_number
from hcp.tools.programs.progress import progress_over
from hcp.tools.replay import Machine, replay

SIZES = (
    "ranks",
    "max_tokens_per_rank",
    "pipeline_stages",
    "virtual_stages",
    "batches",
    "sequences",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "vocab_size",
    "bytes_per_element",
)
RATES = ("tflops", "attention_tflops", "gbps", "far_gbps")
FORWARD_AND_BACKWARD = 3.0
"""The work of forward and backward over that of the forward. It holds for a matrix product, and for
the exchange: the backward fetches keys and values again and sends their gradients to the owners."""
ATTENTION_FORWARD_AND_BACKWARD = 3.5
"""The backward computes the scores again."""


USAGE = "--lengths FILE|--family NAME --ranks RANKS [OPTIONS]"


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("simulate", __doc__, FAMILIES_EPILOG, USAGE)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--lengths", metavar="FILE", help=f"{HELP} (default: none)")
    add_family(source)
    add_column(parser)
    add_drawing(parser, sequences=512)
    parser.add_argument(
        "--batches", type=int, default=20, metavar="BATCHES", help="most global batches"
    )
    limits = add_limits(parser, max_tokens_per_rank=8192)
    limits.add_argument(
        "--speed-spread",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="ranks are up to this share slower than the fastest, drawn with the seed",
    )
    add_cluster(parser)
    add_model(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print numbers as data, nothing else")
    add_prove(group)
    add_pictures(group, "the first batch")
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    expect_given(parser, args, "--lengths FILE")
    return args


def add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster, by what one GPU reaches")
    for name, (value, unit, says) in CLUSTER.items():
        group.add_argument(flag(name), type=float, default=value, metavar=unit, help=says)
    group.add_argument(
        "--overlap", action="store_true", help="the exchange overlaps with attention"
    )
    add_cost(group, default="those of the model below on this cluster")
    group.add_argument(
        "--memory-bytes",
        type=whole_number,
        metavar="BYTES",
        help="memory of a rank for the rows of a micro-batch (default: any)",
    )
    group.add_argument(
        "--activation-bytes",
        type=whole_number,
        default=0,
        metavar="BYTES",
        help="memory that one row takes of --memory-bytes",
    )


CLUSTER: dict[str, tuple[float | None, str, str]] = {
    "tflops": (400, "TFLOPS", "10^12 operations per second in matrix products"),
    "attention_tflops": (350, "TFLOPS", "10^12 operations per second in attention"),
    "gbps": (50, "GB/S", "10^9 bytes per second of keys and values inside a node"),
    "far_gbps": (None, "GB/S", "10^9 bytes per second between nodes (default: --gbps)"),
    "launch_ms": (5, "MS", "milliseconds that any micro-batch takes"),
    "host_ms": (
        None,
        "MS",
        "milliseconds in which a host queues a micro-batch; replays the plans (default: no replay)",
    ),
}
"""Option, default, unit and meaning of the rates and times."""


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model, by default a decoder of 8B parameters")
    for name, (size, unit, says) in MODEL.items():
        group.add_argument(flag(name), type=int, default=size, metavar=unit, help=says)


MODEL = {
    "num_layers": (32, "LAYERS", "transformer layers"),
    "hidden_size": (4096, "WIDTH", "values of a token between layers"),
    "ffn_hidden_size": (14336, "WIDTH", "values of a token inside SwiGLU"),
    "num_attention_heads": (32, "HEADS", "query heads of a layer"),
    "num_query_groups": (8, "HEADS", "key and value heads of a layer"),
    "vocab_size": (128_256, "TOKENS", "rows of the output layer"),
    "bytes_per_element": (2, "BYTES", "bytes of a value of keys and values"),
}
"""Option, default, unit and meaning of the sizes."""


def check(args: argparse.Namespace) -> None:
    for name in SIZES:
        expect_size(name, getattr(args, name))
    args.far_gbps = args.gbps if args.far_gbps is None else args.far_gbps
    for name in RATES:
        if not getattr(args, name) > 0:
            raise ValueError(f"{name} is {getattr(args, name)}, expected > 0")
    if not 0 <= args.speed_spread < 1:
        raise ValueError(f"speed_spread is {args.speed_spread}, expected 0 <= share < 1")
    chunks = args.pipeline_stages * args.virtual_stages
    if args.num_layers % chunks:
        virtual = f" * virtual_stages ({args.virtual_stages})" if args.virtual_stages > 1 else ""
        raise ValueError(
            f"num_layers ({args.num_layers}) % pipeline_stages ({args.pipeline_stages}){virtual}"
            f" == {args.num_layers % chunks}, expected 0"
        )
    if args.host_ms is not None and not args.host_ms >= 0:
        raise ValueError(f"host_ms is {args.host_ms}, expected >= 0")
    if args.memory_bytes is not None:
        expect_size("memory_bytes", args.memory_bytes)
        expect_size("activation_bytes", args.activation_bytes)
    if not args.launch_ms >= 0:
        raise ValueError(f"launch_ms is {args.launch_ms}, expected >= 0")
    if args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"hidden_size ({args.hidden_size}) % num_attention_heads ({args.num_attention_heads})"
            f" == {args.hidden_size % args.num_attention_heads}, expected 0"
        )
    if args.cost is not None and args.cost.unit is None:
        raise ValueError("the cost file has no unit_seconds, expected it: tokens/s need seconds")


# ---- The cluster's cost --------------------------------------------------------------------------


def exchange_bytes(args: argparse.Namespace) -> float:
    """Return the bytes that a rank receives for one token of others: keys and values of all layers,
    forward and backward."""
    head = args.hidden_size // args.num_attention_heads
    width: int = 2 * args.num_query_groups * head * args.bytes_per_element
    layers: int = args.num_layers
    return FORWARD_AND_BACKWARD * layers * width


def of_stage(cost: CostModel, stages: int) -> CostModel:
    """Return the cost model of one stage, of a pipeline of equal stages."""
    if stages == 1:
        return cost
    if cost.table is not None:
        raise ValueError("the cost file is a table, expected prices: they can be cut into stages")
    return replace(cost, **{name: -(-getattr(cost, name) // stages) for name in TIMES})


def cluster_cost(args: argparse.Namespace) -> CostModel:
    """Return the cost model of a whole step, by the sizes and rates of the flags."""
    head = args.hidden_size // args.num_attention_heads
    width = args.hidden_size + args.num_query_groups * head
    layer = 2 * args.hidden_size * width + 3 * args.hidden_size * args.ffn_hidden_size
    weights = args.num_layers * layer + args.hidden_size * args.vocab_size
    pair = ATTENTION_FORWARD_AND_BACKWARD * args.num_layers * 4 * args.hidden_size
    return CostModel.from_seconds(
        pair=pair / (args.attention_tflops * 1e12),
        token=FORWARD_AND_BACKWARD * 2 * weights / (args.tflops * 1e12),
        exchange=exchange_bytes(args) / (args.gbps * 1e9),
        exchange_far=exchange_bytes(args) / (args.far_gbps * 1e9),
        launch=args.launch_ms * 1e-3,
        overlap=int(args.overlap),
    )


def memory_of(args: argparse.Namespace) -> MemoryModel | None:
    if args.memory_bytes is None:
        return None
    return MemoryModel(activation=args.activation_bytes, limit=args.memory_bytes)


def machine_of(args: argparse.Namespace, cost: CostModel) -> Machine | None:
    """Return the machine on which plans are replayed, if they are."""
    if args.host_ms is None:
        return None
    host = args.host_ms * 1e-3
    nodes = args.ranks_per_node or 0
    return Machine.of(cost, host=host, host_shared=host, ranks_per_node=nodes, once=nodes > 0)


# ---- The contestants -----------------------------------------------------------------------------


def draw_speeds(args: argparse.Namespace) -> list[float] | None:
    if args.speed_spread == 0:
        return None
    random = Random(args.seed)
    return [1 - random.uniform(0, args.speed_spread) for _ in range(args.ranks)]


def static_degree(longest: int, limits: Mapping[str, Any]) -> int:
    ranks, most = limits["ranks"], limits["max_tokens_per_rank"]
    pow2 = limits["degrees"] == "pow2"
    even = even_degrees(ranks, limits["ranks_per_node"])
    even = [d for d in even if not pow2 or d & (d - 1) == 0]
    degree = least_degree(longest, even, most, limits["alignment"])
    if degree is not None:
        return degree
    widest = f", the widest power of two that divides {ranks}," if pow2 else ""
    raise ValueError(
        f"rows of {longest} tokens on a rank of {even[-1]}{widest} "
        f"({rows_up_to(longest, even[-1])}) > max_tokens_per_rank ({most}): raise it "
        "(--max-tokens-per-rank), use more ranks (--ranks), or shorten the sequences (--max-length)"
    )


def next_fit(lengths: Sequence[int], degree: int, limits: Mapping[str, Any]) -> list[list[int]]:
    """Pack sequences in their order, on ranks that share each of them: a pack ends where the next
    sequence does not fit."""
    most, memory = limits["max_tokens_per_rank"], limits["memory"]
    if memory is not None and memory.activation > 0:
        most = min(most, memory.limit // memory.activation)
    most -= most % limits["alignment"]
    packs: list[list[int]] = []
    held = most
    for i, length in enumerate(lengths):
        rows = rows_up_to(length, degree)
        if held + rows > most:
            packs.append([])
            held = 0
        packs[-1].append(i)
        held += rows
    return packs


def split_until(packs: list[list[int]], count: int) -> list[list[int]]:
    """Halve the packs of most sequences until there are so many of them, if there can be."""
    packs = list(packs)
    while len(packs) < count:
        largest = max(range(len(packs)), key=lambda i: len(packs[i]))
        pack = packs[largest]
        if len(pack) == 1:
            break
        packs[largest : largest + 1] = pack[: len(pack) // 2], pack[len(pack) // 2 :]
    return packs


def packed(lengths: Sequence[int], degree: int, limits: Mapping[str, Any], cost: Any) -> Plan:
    """Return the plan of packed static CP: groups take the packs in turn."""
    lanes = limits["ranks"] // degree
    multiple = 1
    if limits["virtual_stages"] > 1:
        multiple = limits["micro_batch_group"] or limits["pipeline_stages"]
    packs = next_fit(lengths, degree, limits)
    count = -(-len(packs) // (lanes * multiple)) * multiple
    packs = split_until(packs, count)
    # Full ones, or as equal as can be where the multiple asks for more than that.
    sizes: list[int] = []
    left = len(packs)
    for remaining in range(count, 0, -1):
        sizes.append(min(lanes, left) if multiple == 1 else -(-left // remaining))
        left -= sizes[-1]
    coming = iter(packs)
    batches = [
        {
            "groups": [
                {"first_rank": place * degree, "degree": degree, "sequences": next(coming)}
                for place in range(size)
            ]
        }
        for size in sizes
    ]
    prices = dict(zip(PRICES, cost.prices, strict=True))
    asked = {name: limits[name] for name in LIMITS if limits.get(name) is not None}
    if limits["memory"] is not None:
        asked["memory"] = asdict(limits["memory"])
    if limits["speeds"] is not None:
        asked["slowness"] = slowness_of(limits["speeds"])
    return Plan.from_dict(
        asked | {"lengths": list(lengths), "cost": prices, "micro_batches": batches}
    )


def contestants(
    lengths: Sequence[int], degree: int, limits: Mapping[str, Any], cost: CostModel
) -> dict[str, Plan]:
    fixed = dict(limits) | {"min_degree": degree, "max_degree": degree}
    return {
        "static CP": packed(lengths, degree, fixed, cost),
        "packing only": plan(lengths, cost=cost, **fixed),
        "hcp": plan(lengths, cost=cost, **limits),
    }


@dataclass(frozen=True)
class Result:
    """One contestant's results over all batches. All but planning_ms is simulated."""

    tokens_per_second: float
    speedup: float
    """Tokens per second over those of packed static CP."""
    idle_share: float
    bubble: float
    """The share of the time that filling and emptying the pipeline adds."""
    micro_batches: float
    """The mean number of micro-batches in a step."""
    gigabytes: float
    """GB of keys, values and their gradients that ranks receive from others in a step."""
    far_gigabytes: float
    """The part of `gigabytes` that enters a node from others; 0 without --ranks-per-node."""
    of_bound: float
    """The median over batches of the makespan over the lower bound under hcp's limits."""
    slack: float | None
    """How much more than that lower bound a sharper one proves, in shares of it: the median over
    batches; None where it was not looked for."""
    planning_ms: float | None
    """The median over batches; None for a contestant that plans nothing."""


def received_tokens(made: Plan) -> int:
    """Count the tokens whose keys and values ranks receive from others, summed over ranks."""
    return sum(
        group.degree * (made.lengths[s] - made.lengths[s] // group.degree)
        for groups in made.micro_batches
        for group in groups
        for s in group.sequences
    )


def summarize(
    plans: Sequence[Plan],
    bounds: Sequence[int],
    slack: float | None,
    bytes_: float,
    unit: float,
    machine: Machine | None,
) -> Result:
    reports = [made.report() for made in plans]
    whole = sum(made.makespan for made in plans)
    seconds = whole * unit
    idle = sum(r.idle_share * r.makespan for r in reports) / whole
    if machine is not None:
        steps = [replay(made, machine) for made in progress_over(plans, "replaying", "batch")]
        seconds = sum(step.seconds for step in steps)
        idle = sum(step.idle_share * step.seconds for step in steps) / seconds
    took = [made.planning_seconds for made in plans if made.planning_seconds is not None]
    return Result(
        tokens_per_second=sum(sum(made.lengths) for made in plans) / seconds,
        speedup=1.0,
        idle_share=idle,
        bubble=sum(r.bubble * r.makespan for r in reports) / whole,
        micro_batches=statistics.mean(r.micro_batches for r in reports),
        gigabytes=statistics.mean(map(received_tokens, plans)) * bytes_ / 1e9,
        far_gigabytes=statistics.mean(r.node_crossings for r in reports) * bytes_ / 1e9,
        of_bound=statistics.median(
            made.makespan / bound for made, bound in zip(plans, bounds, strict=True)
        ),
        slack=slack,
        planning_ms=statistics.median(took) * 1e3 if took else None,
    )


def proven_slack(
    plans: Sequence[Plan], cost: CostModel, limits: Mapping[str, Any], prove: bool
) -> float | None:
    """Return how much more than the bounds of these plans is proven, in shares of them."""
    shares = []
    for made in progress_over(plans, "proving", "batch"):
        proven = sharper_bound(made, cost, limits, prove)
        if proven is None:
            return None
        shares.append(proven / made.bound - 1)
    return statistics.median(shares)


# ---- The report ----------------------------------------------------------------------------------


def describe(args: argparse.Namespace, cost: CostModel, degree: int, tokens: int) -> Iterator[str]:
    stages = f"{args.pipeline_stages} stages of " if args.pipeline_stages > 1 else ""
    if args.virtual_stages > 1:
        stages = f"{args.pipeline_stages} stages of {args.virtual_stages} chunks and "
    of_what = Path(args.lengths).name if args.lengths else args.family
    speeds = f", speeds {args.speed_spread:.0%} apart" if args.speed_spread else ""
    batches = "1 batch" if args.batches == 1 else f"{args.batches} batches"
    yield (
        f"SIMULATED: {batches} of {args.sequences} {of_what} sequences, "
        f"{tokens:,} tokens, on {stages}{args.ranks} ranks of {args.max_tokens_per_rank:,} tokens, "
        f"sync {args.sync}{speeds}; static degree {degree}"
    )
    assert cost.unit is not None
    moved = cost.exchange + cost.all_to_all
    prices = {"pair": cost.pair, "token": cost.token, "exchange": moved, "launch": cost.launch}
    shown = ", ".join(f"{name} {in_words(p * cost.unit)}" for name, p in prices.items() if p)
    replayed = (
        "" if args.host_ms is None else f"replayed, hosts {args.host_ms:g} ms a micro-batch; "
    )
    yield f"by the cost model: {shown}; {replayed}nothing here was measured but the planning time"


HEAD = (
    f"{'':14}{'tokens/s':>12}{'':>8}{'idle':>7}{'bubble':>8}{'of bound':>10}{'proven':>9}"
    f"{'micro-':>9}{'GB':>9}{'between':>10}{'planning':>11}\n"
    f"{'':59}{'slack':>9}{'batches':>9}{'a step':>9}{'nodes':>10}{'':>11}"
)


def row(name: str, r: Result) -> str:
    took = "-" if r.planning_ms is None else f"{r.planning_ms:.2f} ms"
    slack = "--prove" if r.slack is None else f"{r.slack:.3f}"
    return (
        f"{name:14}{r.tokens_per_second:>12,.0f}{f'x {r.speedup:.2f}':>8}{r.idle_share:>7.1%}"
        f"{r.bubble:>8.1%}{r.of_bound:>10.3f}{slack:>9}{r.micro_batches:>9.1f}{r.gigabytes:>9,.0f}{r.far_gigabytes:>10,.0f}"
        f"{took:>11}"
    )


def drawn_batches(args: argparse.Namespace) -> list[list[int]]:
    return [
        draw_lengths(args.family, args.sequences, args.seed + i, args.max_length)
        for i in range(args.batches)
    ]


def own_batches(args: argparse.Namespace) -> list[list[int]]:
    """Global batches of a file's lengths, in a drawn order, as a shuffling loader makes them."""
    lengths = read_lengths(args.lengths, args.column)
    if args.max_length is not None:
        lengths = [min(length, args.max_length) for length in lengths]
    Random(args.seed).shuffle(lengths)
    args.sequences = min(args.sequences, len(lengths))
    args.batches = min(args.batches, len(lengths) // args.sequences)
    each = args.sequences
    return [lengths[i * each : (i + 1) * each] for i in range(args.batches)]


LITTLE = 1.03
"""A speed over static CP for which nobody needs to change a trainer."""


def static_name(degree: int) -> str:
    return f"packed static CP (next-fit, degree {degree})"


def little(degree: int) -> str:
    return f"Dynamic CP brings {LITTLE - 1:.0%} or less here: {static_name(degree)} is enough."


def verdict_of_plan(made: Plan, cost: CostModel | None, limits: Mapping[str, Any]) -> str:
    """Whether dynamic CP pays for the lengths of a plan, in a sentence."""
    given = {"memory": None, "speeds": None, **limits}
    degree = static_degree(max(made.lengths), given)
    fixed = given | {"min_degree": degree, "max_degree": degree}
    static = packed(made.lengths, degree, fixed, cost or CostModel())
    gain = static.makespan / made.makespan
    if gain <= LITTLE:
        return little(degree)
    return f"x {gain:.2f} over {static_name(degree)}, by this model: dynamic CP pays here."


def verdict(results: Mapping[str, Result], degree: int) -> str:
    """Whether dynamic CP pays for these lengths, in a sentence."""
    gain, static = results["hcp"].speedup, static_name(degree)
    if gain <= LITTLE:
        return little(degree)
    packing = results["packing only"].speedup
    return (
        f"hcp trains these batches {gain:.2f} times as fast as {static}, by this model; packing "
        f"alone, at that degree, {packing:.2f} times."
    )


class Simulation(NamedTuple):
    """The results of a run of the model."""

    results: dict[str, Result]
    """By contestant."""
    degree: int
    """The degree of static CP."""
    plans: list[dict[str, Plan]]
    """The plans of each batch, by contestant."""
    words: str
    """The setting."""
    unit: float
    """Seconds of one unit of the cost model."""

    def picture(self) -> str:
        """Draw the first batch as SVG, as packed static CP and hcp plan it."""
        batch = f", batch 1 of {len(self.plans)}" if len(self.plans) > 1 else ""
        names = {"packed static CP": "static CP", "hcp": "hcp"}
        first = self.plans[0]
        return brief_svg({f"{shown}{batch}": first[name] for shown, name in names.items()})

    def _repr_svg_(self) -> str:
        """The picture, which a notebook shows."""
        return self.picture()

    @property
    def verdict(self) -> str:
        """Whether dynamic CP pays for these lengths, in a sentence."""
        return verdict(self.results, self.degree)

    def __repr__(self) -> str:
        return f"{self.words}\n{self.verdict}"


def simulate(args: argparse.Namespace) -> Simulation:
    """Plan all batches, and sum up."""
    check(args)
    cost = of_stage(args.cost or cluster_cost(args), args.pipeline_stages)
    assert cost.unit is not None
    limits = limits_of(args) | {"speeds": draw_speeds(args), "memory": memory_of(args)}
    machine = machine_of(args, cost)
    batches = own_batches(args) if args.lengths else drawn_batches(args)
    degree = static_degree(max(map(max, batches)), limits)
    played = [
        contestants(lengths, degree, limits, cost)
        for lengths in progress_over(batches, "planning", "batch")
    ]
    bounds = [plans["hcp"].bound for plans in played]
    slack = proven_slack([plans["hcp"] for plans in played], cost, limits, args.prove)
    results = {
        name: summarize(
            [plans[name] for plans in played],
            bounds,
            slack,
            exchange_bytes(args),
            cost.unit,
            machine,
        )
        for name in played[0]
    }
    first = next(iter(results.values())).tokens_per_second
    results = {
        name: Result(**asdict(r) | {"speedup": r.tokens_per_second / first})
        for name, r in results.items()
    }
    words = "\n".join(describe(args, cost, degree, sum(map(sum, batches))))
    return Simulation(results, degree, played, words, cost.unit)


def main(argv: Sequence[str]) -> int:
    args = parse_arguments(argv)
    try:
        simulated = simulate(args)
        results, _, plans, words, unit = simulated
        write_pictures(args, plans[0], "SIMULATED: the first batch", words, unit)
    except (ValueError, OverflowError, OSError) as error:
        return fail("simulate", error)
    if args.json:
        named = {name: asdict(result) for name, result in results.items()}
        says = {"says": words, "verdict": simulated.verdict}
        print(json.dumps({"simulated": True, **says, "results": named}))
        return 0
    rows = (row(name, result) for name, result in results.items())
    print(words, HEAD, *rows, simulated.verdict, sep="\n")
    return 0
