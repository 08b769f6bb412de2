"""Options that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hcp._files import write_file
from hcp._validate import flag
from hcp.cli.lengths import FIELDS
from hcp.planning.cost import CostModel
from hcp.planning.limits import CHOICES, INTEGERS, Limits
from hcp.planning.plan import Plan
from hcp.tools.drawing import timeline_page, timeline_svg
from hcp.tools.presets import PRESETS
from hcp.tools.programs.arguments import HelpFormatter, whole_number
from hcp.tools.programs.families import FAMILIES, describe
from hcp.tools.programs.files import expect_writable

LIMITS = tuple(field for field in fields(Limits) if field.name in {**INTEGERS, **CHOICES})
"""The limits that have an option: integers and choices."""
SHOWN: dict[str, tuple[str | None, str]] = {
    "ranks": ("RANKS", "ranks of the dp x cp domain, over which a batch is spread"),
    "max_tokens_per_rank": ("TOKENS", "most rows of one rank in one micro-batch"),
    "min_degree": ("RANKS", "fewest ranks that compute a sequence"),
    "max_degree": ("RANKS", "most ranks that compute a sequence (default: all)"),
    "degrees": (None, "numbers of ranks that may compute a sequence: any, or powers of two alone"),
    "alignment": ("ROWS", "rows of a rank are padded to a multiple of this"),
    "ranks_per_node": ("RANKS", "ranks of a node (default: all)"),
    "sync": (None, "when ranks wait for each other: after a step, or after each micro-batch"),
    "pipeline_stages": ("STAGES", "stages of a pipeline, each on its own --ranks ranks"),
    "virtual_stages": ("CHUNKS", "chunks of each stage; more than 1 interleaves the pipeline"),
    "micro_batch_group": (
        "BATCHES",
        "where stages have chunks, the number of micro-batches is a multiple of this (default: "
        "--pipeline-stages)",
    ),
}
"""The unit and the help text of each option."""


def new_parser(
    command: str, says: str, epilog: str = "", takes: str = "[OPTIONS]"
) -> argparse.ArgumentParser:
    """Make the parser of a command. ``takes``: its arguments, in short, for the line of usage."""
    return argparse.ArgumentParser(
        prog=f"hcp {command}",
        usage=f"%(prog)s {takes}",
        description=says,
        epilog=epilog,
        formatter_class=HelpFormatter,
    )


def fail(command: str, error: Exception) -> int:
    """Print an error as one line. Return the exit code."""
    print(f"hcp {command}: error: {error}", file=sys.stderr)
    return 1


FAMILIES_EPILOG = "families of lengths:\n" + describe()


def add_family(parser: argparse._ActionsContainer, **options: Any) -> None:
    parser.add_argument(
        "--family",
        choices=sorted(FAMILIES),
        metavar="NAME",
        help="draw lengths of this family, listed below (default: none)",
        **options,
    )


def add_column(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--column",
        "--field",
        metavar="NAME",
        help="column of CSV or Parquet, or field of JSON lines, that has the tokens of a sequence "
        f"or their number (default: the first there is of {', '.join(FIELDS)})",
    )


def add_drawing(parser: argparse.ArgumentParser, sequences: int) -> None:
    parser.add_argument(
        "--sequences",
        type=whole_number,
        default=sequences,
        metavar="SEQUENCES",
        help="sequences of a global batch",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="NUMBER", help="of what is drawn or shuffled"
    )
    parser.add_argument(
        "--max-length",
        type=whole_number,
        metavar="TOKENS",
        help="cut longer sequences to this (default: cut none)",
    )


def add_limits(parser: argparse.ArgumentParser, **defaults: int) -> argparse._ArgumentGroup:
    """Add the limits of a plan, by the names of hcp.plan's arguments. ``defaults``: of some that
    hcp.plan requires."""
    group = parser.add_argument_group("limits")
    for field in LIMITS:
        unit, says = SHOWN[field.name]
        given = defaults.get(field.name)
        required = field.default is MISSING and given is None
        group.add_argument(
            flag(field.name),
            type=str if field.name in CHOICES else whole_number,
            choices=CHOICES.get(field.name),
            default=given if field.default is MISSING else field.default,
            metavar=unit,
            help=f"{says}; required" if required else says,
        )
    group.add_argument(
        "--effort",
        type=int,
        default=1,
        metavar="NUMBER",
        help="more than 1 searches longer, in attempts",
    )
    return group


def expect_given(parser: argparse.ArgumentParser, args: argparse.Namespace, file: str) -> None:
    """End with one error that lists what is missing of lengths and limits. ``file``: how a file of
    lengths is given."""
    missing = []
    if args.lengths is None and args.family is None:
        missing.append(f"lengths ({file}, with - for standard input, or --family NAME)")
    for field in LIMITS:
        if field.default is MISSING and getattr(args, field.name) is None:
            missing.append(f"{flag(field.name)} {SHOWN[field.name][0]}")
    if missing:
        parser.error(f"missing: {', '.join(missing)}")


def limits_of(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in (*(field.name for field in LIMITS), "effort")}


def add_cost(parser: argparse._ActionsContainer, default: str) -> None:
    """``default``: what holds without the option, in words."""
    parser.add_argument(
        "--cost",
        type=cost_model,
        metavar="NAME|FILE",
        help=f"prices of time: {', '.join(PRESETS)}, or a file that `hcp calibrate` wrote "
        f"(default: {default})",
    )


def cost_model(text: str) -> CostModel:
    """Return the cost model of a file, or a published one by its name. For argparse."""
    if text in PRESETS:
        return PRESETS[text]
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a file nor one of {', '.join(PRESETS)}"
        )
    try:
        return CostModel.load(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_pictures(parser: argparse._ActionsContainer, what: str = "the timeline") -> None:
    parser.add_argument(
        "--svg", type=output, metavar="FILE", help=f"draw {what} as SVG (default: none)"
    )
    parser.add_argument(
        "--html",
        type=output,
        metavar="FILE",
        help=f"draw {what} in a page that needs no network (default: none)",
    )


def output(text: str) -> Path:
    """Return the path of a file that can be written. For argparse."""
    try:
        expect_writable("the file", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def write_pictures(
    args: argparse.Namespace,
    plans: Mapping[str, Plan],
    title: str,
    words: str,
    unit: float | None,
) -> None:
    """Write the pictures that were asked for."""
    if args.svg:
        write_file(args.svg, timeline_svg(plans, unit=unit))
    if args.html:
        write_file(args.html, timeline_page(plans, title, words, unit))


def draw_lengths(family: str, sequences: int, seed: int, max_length: int | None) -> list[int]:
    from random import Random

    random = Random(seed)
    drawn = [FAMILIES[family].draw(random) for _ in range(sequences)]
    return drawn if max_length is None else [min(length, max_length) for length in drawn]


def in_words(seconds: float) -> str:
    """Format a time, given in seconds, with a unit that suits it."""
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"
