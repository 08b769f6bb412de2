"""Show a plan for some lengths, and how good it is by a cost model."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hcp.cli.arguments import (
    FAMILIES_EPILOG,
    add_cost,
    add_drawing,
    add_family,
    add_field,
    add_limits,
    add_pictures,
    draw_lengths,
    in_words,
    limits_of,
    new_parser,
    write_pictures,
)
from hcp.cli.lengths import HELP, read_lengths
from hcp.planning.plan import Plan, plan
from hcp.planning.timeline import chrome_trace


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("plan", __doc__, FAMILIES_EPILOG)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "lengths",
        nargs="?",
        default="-",
        help=HELP,
    )
    add_family(source)
    add_field(parser)
    add_drawing(parser, sequences=512)
    add_limits(parser)
    add_cost(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="the plan as data, and nothing else")
    group.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace")
    add_pictures(group)
    return parser.parse_args(argv)


def table(made: Plan) -> Iterator[str]:
    yield "micro-batch  groups  sequences     tokens  degrees (groups)"
    for m, groups in enumerate(made.micro_batches):
        degrees = Counter(group.degree for group in groups)
        shown = " ".join(f"{d}({n})" for d, n in sorted(degrees.items(), reverse=True))
        held = [s for group in groups for s in group.sequences]
        tokens = sum(made.lengths[s] for s in held)
        yield f"{m:11}  {len(groups):6}  {len(held):9}  {tokens:9,}  {shown}"


def print_report(made: Plan, unit: float | None) -> None:
    lengths = made.lengths
    print(f"{len(lengths)} sequences, {sum(lengths):,} tokens, longest {max(lengths, default=0):,}")
    print(made.report())
    if unit:
        print(f"the makespan is {in_words(made.makespan * unit)} by the cost model")
    print("\n".join(table(made)))


def main(argv: Sequence[str]) -> int:
    args = parse_arguments(argv)
    try:
        if args.family:
            lengths = draw_lengths(args.family, args.sequences, args.seed, args.max_length)
        else:
            lengths = read_lengths(args.lengths, args.field)
            if args.max_length is not None:
                lengths = [min(length, args.max_length) for length in lengths]
        made = plan(lengths, cost=args.cost, **limits_of(args))
        unit = args.cost.unit if args.cost else None
        if args.trace:
            args.trace.write_text(json.dumps(chrome_trace(made, unit)))
        title = f"A plan of {len(lengths):,} sequences for {made.ranks:,} ranks"
        write_pictures(args, {"hcp": made}, title, str(made.report()), unit)
    except (ValueError, OverflowError, OSError) as error:
        print(f"no plan: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(made.to_dict()))
    else:
        print_report(made, unit)
    return 0
