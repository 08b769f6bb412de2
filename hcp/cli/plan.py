"""Show a plan for some lengths, and how good it is by a cost model."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hcp._files import write_file
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
    output,
    write_pictures,
)
from hcp.cli.lengths import HELP, read_lengths
from hcp.cli.simulate import verdict_of_plan
from hcp.cli.slack import add_prove, sharper_bound, slack_of
from hcp.planning.cost import CostModel
from hcp.planning.plan import Plan, plan
from hcp.tools.timeline import chrome_trace, idle_shares, timeline

USAGE = "FILE|-|--family NAME --ranks RANKS --max-tokens-per-rank TOKENS [OPTIONS]"


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("plan", __doc__, FAMILIES_EPILOG, USAGE)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("lengths", nargs="?", metavar="FILE", help=HELP)
    add_family(source)
    add_column(parser)
    add_drawing(parser, sequences=512)
    add_limits(parser)
    add_cost(parser, default="those of hcp.CostModel(), without a unit of time")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the plan as data, nothing else")
    group.add_argument(
        "--trace", type=output, metavar="FILE", help="write a Chrome trace (default: none)"
    )
    add_prove(group)
    add_pictures(group)
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    expect_given(parser, args, "FILE")
    return args


def told(made: Plan, unit: float | None, slack: str, pays: str) -> Iterator[str]:
    """Tell in lines when a plan ends, how near that is to the bound, and who waits.

    ``slack``: how much of the distance to the bound no plan can save. ``pays``: whether dynamic CP
    pays. Both in words.

    Times are in seconds where the unit of the cost model is known, and in its units elsewhere.
    """
    lengths, found = made.lengths, made.report()

    def time(value: int) -> str:
        return in_words(value * unit) if unit else f"{value:.4g}"

    yield f"{len(lengths)} sequences, {sum(lengths):,} tokens, longest {max(lengths, default=0):,}"
    of = "predicted by the cost model" if unit else "in units of the cost model"
    yield f"makespan {time(made.makespan)}, {of}"
    yield f"that is {found.ratio:.4f} of the bound {time(made.bound)}: no plan is faster than that"
    yield slack
    if found.pipeline_stages > 1:
        yield f"{found.pipeline_stages} pipeline stages, bubble {found.bubble:.1%}"
    idle = idle_shares(made, timeline(made))
    most = max(range(made.ranks), key=lambda rank: idle[rank])
    yield f"ranks wait {found.idle_share:.1%} of it, rank {most} the longest: {idle[most]:.1%}"
    memory = max(found.rank_bytes, default=0)
    held = f"{found.peak_tokens:,} rows{f' and {memory:,} bytes' if memory else ''}"
    yield f"at most {held} on a rank, {found.padding:,} rows of padding"
    if made.core.ranks_per_node:
        yield f"{found.node_crossings:,} tokens into other nodes"
    if found.planning_seconds is not None:
        yield f"planned in {in_words(found.planning_seconds)}"
    yield pays
    yield from table(made, time)


def table(made: Plan, time: Callable[[int], str]) -> Iterator[str]:
    """Tell of each micro-batch in a line. It takes as long as its slowest group."""
    yield "micro-batch  groups  ranks  sequences     tokens         time  degrees (groups)"
    for m, groups in enumerate(made.micro_batches):
        degrees = Counter(group.degree for group in groups)
        shown = " ".join(f"{d}({n})" for d, n in sorted(degrees.items(), reverse=True))
        held = [s for group in groups for s in group.sequences]
        tokens = sum(made.lengths[s] for s in held)
        took = time(max((made.group_time(group) for group in groups), default=0))
        ranks = sum(group.degree for group in groups)
        yield (
            f"{m:11}  {len(groups):6}  {ranks:5}  {len(held):9}  {tokens:9,}  {took:>11}  {shown}"
        )


def pays_or_not(made: Plan, cost: CostModel | None, limits: Mapping[str, Any]) -> str:
    """Say whether dynamic CP pays, or why no packed static CP is there to compare with."""
    try:
        return verdict_of_plan(made, cost, limits)
    except ValueError as error:
        return f"packed static CP has no plan within these limits: {error}"


def main(argv: Sequence[str]) -> int:
    args = parse_arguments(argv)
    try:
        if args.family:
            lengths = draw_lengths(args.family, args.sequences, args.seed, args.max_length)
        else:
            lengths = read_lengths(args.lengths, args.column)
            if args.max_length is not None:
                lengths = [min(length, args.max_length) for length in lengths]
        limits = limits_of(args)
        made = plan(lengths, cost=args.cost, **limits)
        unit = args.cost.unit if args.cost else None
        if args.trace:
            write_file(args.trace, json.dumps(chrome_trace(made, unit)))
        title = f"A plan of {len(lengths):,} sequences for {made.ranks:,} ranks"
        write_pictures(args, {"hcp": made}, title, str(made.report()), unit)
    except (ValueError, OverflowError, OSError) as error:
        return fail("plan", error)
    if args.json:
        print(json.dumps(made.to_dict()))
    else:
        slack = slack_of(made, sharper_bound(made, args.cost, limits, args.prove))
        pays = pays_or_not(made, args.cost, limits)
        print("\n".join(told(made, unit, slack, pays)))
    return 0
