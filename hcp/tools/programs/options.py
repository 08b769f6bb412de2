"""The options of a command line that make a Config."""

from __future__ import annotations

import argparse
from typing import get_args

from hcp._validate import flag
from hcp._words import Backend
from hcp.attention.comm_types import COMM_TYPES
from hcp.attention.scan_types import SCAN_TYPES
from hcp.step.config import MEGATRON_SCHEDULERS, NO_WINDOW, SCHEDULERS, SYNCS, TOO_LONG


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add an option for each field of Config.

    Args:
        parser: one that already has an option, as Megatron's has some, keeps it as it is.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("context parallelism")

    def add(name: str, **options: object) -> None:
        if flag(name) not in parser._option_string_actions:
            group.add_argument(flag(name), **options)  # type: ignore[arg-type]

    add(
        "sequence_packing_scheduler",
        choices=(*SCHEDULERS, *MEGATRON_SCHEDULERS),
        help="a degree for each group of sequences, or one for all (default: dynamic_cp); the last"
        " three are names of the same in Megatron",
    )
    add(
        "max_seqlen_per_dp_cp_rank",
        type=int,
        metavar="TOKENS",
        help="most tokens of one rank in one micro-batch (required where the program has no"
        " default)",
    )
    add(
        "min_dynamic_context_parallel_size",
        type=int,
        metavar="RANKS",
        help="fewest ranks that dynamic_cp gives a sequence (default: 1)",
    )
    add(
        "context_parallel_size",
        type=int,
        metavar="RANKS",
        help="degree of static_cp (default: the least that holds the longest sequence)",
    )
    add(
        "cp_comm_type",
        nargs="+",
        metavar="TYPE",
        help=f"how keys and values travel, one value or one per layer, of {', '.join(COMM_TYPES)}"
        " (default: p2p)",
    )
    add(
        "eval_context_parallel_size",
        type=_size_or_auto,
        metavar="RANKS",
        help="context-parallel size of the evaluation layout, or auto: what is predicted fastest"
        " (default: that of training, unless the program has another)",
    )
    add(
        "hierarchical_context_parallel_sizes",
        type=int,
        nargs="+",
        metavar="RANKS",
        help="levels of a2a+p2p, the inner all-to-all first and the ring last; under dynamic_cp"
        " each group takes the largest inner level up to it that its degree allows (default: none)",
    )
    add(
        "window_size",
        type=_window_from,
        nargs="+",
        metavar="LEFT,RIGHT",
        help="tokens that a query sees before and after its own, or full, one value or one per"
        " layer (default: full)",
    )
    add(
        "ranks_per_node",
        type=int,
        metavar="RANKS",
        help="ranks with fast links to each other, for plans and a2a+p2p (default: all)",
    )
    add(
        "attention_backend",
        metavar="NAME",
        help=f"whose kernels compute attention, of {', '.join(get_args(Backend))} (default: auto,"
        " for every call the fastest kernel that is installed)",
    )
    add(
        "scan_type",
        choices=SCAN_TYPES,
        help="how recurrent layers get past the borders of ranks: states travel, or rows for heads"
        " (default: auto, whichever costs fewer bytes)",
    )
    add(
        "sync",
        choices=SYNCS,
        help="when ranks wait for each other: at the end of a step, or in each micro-batch, as"
        " under FSDP (default: auto, as the trainer's model does)",
    )
    add(
        "plan_ahead",
        type=int,
        metavar="BATCHES",
        help="batches that are planned while the one before them trains; 0: none (default: 1)",
    )
    add(
        "memory",
        metavar="FILE",
        help="bytes of a micro-batch, to which plans keep in addition to the rows: a file that"
        " `hcp calibrate --memory` wrote (default: rows alone)",
    )
    add(
        "too_long",
        choices=TOO_LONG,
        help="what becomes of training samples that are too long for all ranks together: an error,"
        " left out, or cut to their first tokens (default: refuse)",
    )
    return parser


def _size_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer >= 1 or auto") from None


def _window_from(text: str) -> tuple[int, int]:
    """Read LEFT,RIGHT or full."""
    if text == "full":
        return NO_WINDOW
    try:
        left, right = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected LEFT,RIGHT or full") from None
    return left, right
