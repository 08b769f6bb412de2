"""Options that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hcp._files import expect_writable, write_file
from hcp._validate import flag
from hcp.planning.cost import PRESETS, CostModel
from hcp.planning.drawing import timeline_page, timeline_svg
from hcp.planning.limits import CHOICES, INTEGERS, Limits
from hcp.planning.plan import Plan
from hcp.programs.families import FAMILIES, describe

LIMITS = tuple(field for field in fields(Limits) if field.name in {**INTEGERS, **CHOICES})
"""The limits that have an option: integers and choices."""
SHOWN: dict[str, tuple[str | None, str | None]] = {
    "ranks": (None, "of the dp x cp domain"),
    "max_tokens_per_rank": ("TOKENS", "most rows of one rank in one micro-batch"),
    "min_degree": ("RANKS", "fewest that compute a sequence (1)"),
    "max_degree": ("RANKS", "most that compute a sequence (all)"),
    "degrees": (None, "any, or powers of two alone (any)"),
    "alignment": ("ROWS", "rows of a rank are a multiple of this (1)"),
    "ranks_per_node": ("RANKS", "of a node (all ranks are on one)"),
    "sync": (None, "when ranks wait for each other (step)"),
    "pipeline_stages": ("STAGES", "of so many ranks each (1)"),
    "virtual_stages": ("CHUNKS", "of each stage (1)"),
    "micro_batch_group": (
        "MICRO_BATCHES",
        "their count is a multiple of this where stages have chunks (the stages)",
    ),
}
"""The value and the help text of each option."""


THOUSANDS = {"K": 1024, "M": 1024**2}


def whole_number(text: str) -> int:
    """Return 16384 for "16384", "16_384" and "16K". For argparse."""
    unit = THOUSANDS.get(text[-1:].upper())
    try:
        return int(text) if unit is None else int(text[:-1]) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number, expected one such as 16384 or 16K"
        ) from None


def program() -> str:
    """How this command line was called."""
    return "hcp" if Path(sys.argv[0]).name == "hcp" else "python -m hcp"


def new_parser(command: str, says: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"{program()} {command}",
        usage="%(prog)s [OPTIONS]",
        description=says,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


FAMILIES_EPILOG = "families of lengths:\n" + describe()


def add_family(parser: argparse._ActionsContainer, **options: Any) -> None:
    parser.add_argument(
        "--family",
        choices=sorted(FAMILIES),
        metavar="NAME",
        help="draw lengths, see below",
        **options,
    )


def add_field(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--field",
        metavar="NAME",
        help="of a record of JSON lines or Parquet: tokens, or their number",
    )


def add_drawing(parser: argparse.ArgumentParser, sequences: int) -> None:
    parser.add_argument(
        "--sequences", type=whole_number, default=sequences, help=f"in a global batch ({sequences})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the lengths that are drawn (0)")
    parser.add_argument(
        "--max-length", type=whole_number, metavar="TOKENS", help="longer ones are cut to this"
    )


def add_limits(parser: argparse.ArgumentParser, **defaults: int) -> argparse._ArgumentGroup:
    """Add the limits of a plan, by the names of hcp.plan's arguments. ``defaults``: of some that
    hcp.plan requires."""
    group = parser.add_argument_group("limits")
    for field in LIMITS:
        metavar, says = SHOWN[field.name]
        given = defaults.get(field.name)
        required = field.default is MISSING and given is None
        group.add_argument(
            flag(field.name),
            type=str if field.name in CHOICES else whole_number,
            choices=CHOICES.get(field.name),
            required=required,
            default=given if field.default is MISSING else field.default,
            metavar=metavar,
            help=says if given is None else f"{says} ({given})",
        )
    group.add_argument("--effort", type=int, default=1, help="more: a longer search (1)")
    return group


def limits_of(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in (*(field.name for field in LIMITS), "effort")}


def add_cost(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--cost",
        type=cost_model,
        metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)}, or a file that `python -m hcp calibrate` wrote",
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
    parser.add_argument("--svg", type=output, metavar="FILE", help=f"draw {what}")
    parser.add_argument(
        "--html", type=output, metavar="FILE", help=f"draw {what} in a page that needs no network"
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
