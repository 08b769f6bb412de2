"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hcp.cli.families import FAMILIES, describe
from hcp.cost import PRESETS, CostModel
from hcp.plan import DEGREES, SYNCS

LIMITS = (
    "ranks",
    "max_tokens_per_rank",
    "min_degree",
    "max_degree",
    "degrees",
    "alignment",
    "ranks_per_node",
    "sync",
    "pipeline_stages",
    "virtual_stages",
    "micro_batch_group",
    "effort",
)


def new_parser(command: str, says: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m hcp {command}",
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


def add_drawing(parser: argparse.ArgumentParser, sequences: int) -> None:
    parser.add_argument(
        "--sequences", type=int, default=sequences, help=f"in a global batch ({sequences})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the lengths that are drawn (0)")
    parser.add_argument(
        "--max-length", type=int, metavar="TOKENS", help="longer ones are cut to this"
    )


def add_limits(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What a plan must keep, by the names of hcp.plan's arguments."""
    group = parser.add_argument_group("limits")
    group.add_argument("--ranks", type=int, required=True, help="of the dp x cp domain")
    group.add_argument(
        "--max-tokens-per-rank",
        type=int,
        required=True,
        metavar="TOKENS",
        help="most rows of one rank in one micro-batch",
    )
    group.add_argument("--min-degree", type=int, default=1, metavar="RANKS")
    group.add_argument("--max-degree", type=int, metavar="RANKS")
    group.add_argument("--degrees", choices=DEGREES, default="any")
    group.add_argument("--alignment", type=int, default=1, metavar="ROWS")
    group.add_argument("--ranks-per-node", type=int, metavar="RANKS")
    group.add_argument(
        "--sync", choices=SYNCS, default="step", help="when ranks wait for each other (step)"
    )
    group.add_argument(
        "--pipeline-stages", type=int, default=1, metavar="STAGES", help="of so many ranks each (1)"
    )
    group.add_argument(
        "--virtual-stages", type=int, default=1, metavar="CHUNKS", help="of each stage (1)"
    )
    group.add_argument(
        "--micro-batch-group",
        type=int,
        metavar="MICRO_BATCHES",
        help="their count is a multiple of this where stages have chunks (the stages)",
    )
    group.add_argument("--effort", type=int, default=1, help="more: a longer search (1)")
    return group


def limits_of(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in LIMITS}


def add_cost(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--cost",
        type=cost_model,
        metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)}, or a file that `python -m hcp calibrate` wrote",
    )


def cost_model(text: str) -> CostModel:
    """A published model by its name, or one from a file."""
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


def draw_lengths(family: str, sequences: int, seed: int, max_length: int | None) -> list[int]:
    from random import Random

    random = Random(seed)
    drawn = [FAMILIES[family].draw(random) for _ in range(sequences)]
    return drawn if max_length is None else [min(length, max_length) for length in drawn]


def in_words(seconds: float) -> str:
    """A time with a unit that suits it."""
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"
