"""python -m hcp plan: what a plan for these lengths looks like, and how good it is."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from hcp.cost import PRESETS, CostModel
from hcp.plan import DEGREES, SYNCS, Plan, plan


def lognormal(mean: float, sigma: float, low: int, high: int) -> Callable[[Random], int]:
    mu = math.log(mean) - sigma**2 / 2
    return lambda random: min(high, max(low, round(random.lognormvariate(mu, sigma))))


FAMILIES: dict[str, Callable[[Random], int]] = {
    "short": lognormal(1024, 1.5, 128, 8192),
    "web": lognormal(1014, 1.258, 16, 131_072),
    "code": lognormal(6000, 1.8, 64, 393_216),
}
"""Log-normal lengths: mean tokens, sigma, least and most."""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hcp plan", description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "lengths",
        nargs="?",
        default="-",
        help="a file of lengths, separated by spaces, commas or lines; - for standard input",
    )
    source.add_argument("--family", choices=sorted(FAMILIES), help="draw lengths instead")
    parser.add_argument("--sequences", type=int, default=512, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--max-tokens-per-rank", type=int, required=True, metavar="TOKENS")
    parser.add_argument("--min-degree", type=int, default=1, metavar="RANKS")
    parser.add_argument("--max-degree", type=int, metavar="RANKS")
    parser.add_argument("--degrees", choices=DEGREES, default="any")
    parser.add_argument("--alignment", type=int, default=1, metavar="ROWS")
    parser.add_argument("--ranks-per-node", type=int, metavar="RANKS")
    parser.add_argument("--sync", choices=SYNCS, default="step")
    parser.add_argument("--cost", choices=sorted(PRESETS), help="a published cost model")
    parser.add_argument("--effort", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the plan as data, and nothing else")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline (.png, .svg)")
    return parser.parse_args(argv)


def read_lengths(source: str) -> list[int]:
    text = sys.stdin.read() if source == "-" else Path(source).read_text()
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise SystemExit(f"{source}: {error}, expected lengths in tokens") from None


def box_times(made: Plan) -> Iterator[tuple[int, int, int, int, tuple[int, ...]]]:
    """(first rank, degree, start, end, sequences) of each group, as the cost model has it."""
    cost, node = made.cost, made.core.ranks_per_node
    free = [0] * made.ranks
    for groups in made.micro_batches:
        if made.sync == "micro_batch":
            free = [max(free)] * made.ranks
        for first, degree, sequences in groups:
            start = max(free[first : first + degree])
            end = start + cost.launch
            end += sum(cost.time(made.lengths[s], degree, node) for s in sequences)
            free[first : first + degree] = [end] * degree
            yield first, degree, start, end, sequences


def trace(made: Plan) -> dict[str, Any]:
    """Chrome's trace format: a row per rank, the makespan stretched over one second."""
    scale = 1e6 / max(1, made.makespan)
    return {
        "traceEvents": [
            {
                "name": f"cp{degree}: {len(sequences)} sequences",
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "ts": start * scale,
                "dur": (end - start) * scale,
                "args": {"sequences": list(sequences)},
            }
            for first, degree, start, end, sequences in box_times(made)
            for rank in range(first, first + degree)
        ]
    }


def draw(made: Plan, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(12, 6))
    whole = max(1, made.makespan)
    for first, degree, start, end, sequences in box_times(made):
        axes.broken_barh(
            [(100 * start / whole, 100 * (end - start) / whole)],
            (first, degree),
            facecolors=f"C{sequences[0] % 10}",
            edgecolor="white",
            linewidth=0.4,
        )
    axes.axvline(100 * made.bound / whole, color="black", linestyle=":", label="bound")
    axes.set(xlabel="percent of the makespan (by the cost model)", ylabel="rank", xlim=(0, 102))
    axes.legend(loc="upper right")
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


def table(made: Plan) -> Iterator[str]:
    yield "micro-batch  groups  sequences  degrees (groups)"
    for m, groups in enumerate(made.micro_batches):
        degrees = Counter(group.degree for group in groups)
        shown = " ".join(f"{d}({n})" for d, n in sorted(degrees.items(), reverse=True))
        held = sum(len(group.sequences) for group in groups)
        yield f"{m:11}  {len(groups):6}  {held:9}  {shown}"


def main(argv: Sequence[str]) -> int:
    args = parse_arguments(argv)
    if args.family:
        random = Random(args.seed)
        lengths = [FAMILIES[args.family](random) for _ in range(args.sequences)]
    else:
        lengths = read_lengths(args.lengths)
    names = ("ranks", "max_tokens_per_rank", "min_degree", "max_degree", "degrees", "alignment")
    options = {name: getattr(args, name) for name in (*names, "ranks_per_node", "sync", "effort")}
    try:
        made = plan(lengths, cost=CostModel.preset(args.cost) if args.cost else None, **options)
    except (ValueError, OverflowError) as error:
        print(f"no plan: {error}", file=sys.stderr)
        return 1
    if args.trace:
        args.trace.write_text(json.dumps(trace(made)))
    if args.png:
        draw(made, args.png)
    if args.json:
        print(json.dumps(made.to_dict()))
        return 0
    print(f"{len(lengths)} sequences, {sum(lengths):,} tokens, longest {max(lengths, default=0):,}")
    print(made.report())
    print("\n".join(table(made)))
    return 0
