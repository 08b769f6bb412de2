"""The options that the programs share, with Megatron's names for the flags that Megatron has."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hcp._validate import flag
from hcp.planning.cost import CostModel
from hcp.planning.limits import rows_up_to
from hcp.tools.rates import machine_cost

if TYPE_CHECKING:  # --help needs no torch
    import torch

DTYPES = ("float32", "float64", "bfloat16")


class Parser(argparse.ArgumentParser):
    """Raises ValueError for options that it does not know: programs print it as one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the options)")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows every default but None, False, and those that the help text names."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says, default = action.help, action.default
        silent = default is None or default is False or default == argparse.SUPPRESS
        return says if silent or "default" in (says or "") else f"{says} (default: %(default)s)"


UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}


def whole_number(text: str) -> int:
    """Return 16384 for "16384", "16_384" and "16K". For argparse."""
    unit = UNITS.get(text[-1:].upper())
    try:
        return int(text) if unit is None else int(text[:-1]) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number, expected one such as 16384 or 16K"
        ) from None


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a program that starts its own ranks."""
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="RANKS",
        help="processes to start on this machine (default: 4; under torchrun what it starts)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where ranks compute; auto: on GPUs if each rank has one, else on the CPU",
    )


def add_data_arguments(parser: argparse.ArgumentParser, max_length: int = 8192) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        metavar="PATH",
        help="a folder of text files, a text file, or a .jsonl file with a field 'text' (default:"
        " the sources of Python's standard library, cut at blank lines)",
    )
    group.add_argument(
        "--document-separator",
        metavar="TEXT",
        help="cut each text into documents here; \\n is a new line (default: none)",
    )
    group.add_argument(
        "--max-length",
        type=whole_number,
        default=max_length,
        metavar="TOKENS",
        help="most tokens of a document; longer ones are split",
    )
    group.add_argument(
        "--eval-documents",
        type=int,
        default=37,
        metavar="DOCUMENTS",
        help="documents held out for evaluation",
    )


MODEL_SIZES: dict[str, tuple[int, str, str]] = {
    "num_layers": (4, "LAYERS", "transformer layers"),
    "hidden_size": (128, "WIDTH", "values of a token between layers"),
    "ffn_hidden_size": (512, "WIDTH", "values of a token inside the MLP"),
    "num_attention_heads": (4, "HEADS", "query heads of a layer"),
    "num_query_groups": (2, "HEADS", "key and value heads of a layer"),
}
"""Option, default, unit and meaning of each size of the demo's model."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    for name, (size, unit, says) in MODEL_SIZES.items():
        group.add_argument(flag(name), type=int, default=size, metavar=unit, help=says)
    group.add_argument(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="two matrices for the embedding and the output instead of one",
    )


def add_steps(group: argparse._ArgumentGroup, train_iters: int) -> None:
    """Add the options of training steps. ``train_iters``: the default of their number."""
    group.add_argument(
        "--global-batch-size",
        type=int,
        default=64,
        metavar="DOCUMENTS",
        help="documents in a step, of all ranks",
    )
    group.add_argument(
        "--train-iters", type=int, default=train_iters, metavar="STEPS", help="steps to train"
    )
    group.add_argument(
        "--lr", type=float, default=2e-3, metavar="RATE", help="learning rate, the highest"
    )
    group.add_argument(
        "--clip-grad",
        type=float,
        default=1.0,
        metavar="NORM",
        help="largest norm of the gradients; 0: any",
    )
    add_seed(group)


def add_seed(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--seed",
        type=int,
        default=1234,
        metavar="NUMBER",
        help="of the weights and of the order of documents",
    )


def number_of_ranks(asked: int | None) -> int:
    """Return the number of ranks: torchrun's, else the one that was asked for, else 4.

    Raises ValueError if torchrun started another number than the one asked for.
    """
    if "WORLD_SIZE" not in os.environ:
        return 4 if asked is None else asked
    started = int(os.environ["WORLD_SIZE"])
    if asked is not None and asked != started:
        raise ValueError(f"--ranks {asked}, but torchrun started {started}: leave --ranks out")
    return started


def default_rank_tokens(max_length: int, ranks: int) -> int:
    """Return the default of a rank's rows, at least 256.

    It is a quarter of the longest document, which then needs context parallelism, or more if there
    are fewer than 4 ranks to share it.
    """
    return max(rows_up_to(max_length, 4), rows_up_to(max_length, ranks), 256)


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}, expected 0 to {2**32 - 1}, which every library takes")


def check_data(args: argparse.Namespace) -> None:
    if args.max_length < 2:
        raise ValueError(
            f"max_length is {args.max_length}, expected >= 2: one token has nothing to predict"
        )
    if args.data is not None and not Path(args.data).exists():
        raise ValueError(f"--data {args.data}: no such file or folder")
    if args.document_separator is not None:
        args.document_separator = args.document_separator.replace("\\n", "\n")
        if not args.document_separator:
            raise ValueError(
                "document_separator is empty, expected the text at which documents are cut"
            )


def check_model(args: argparse.Namespace) -> None:
    hidden, heads, groups = args.hidden_size, args.num_attention_heads, args.num_query_groups
    if hidden % (2 * heads) != 0:
        raise ValueError(
            f"hidden_size ({hidden}) % (2 * num_attention_heads ({heads}))"
            f" == {hidden % (2 * heads)}, expected 0: rotary embedding turns pairs of values"
        )
    if heads % groups != 0:
        raise ValueError(
            f"num_attention_heads ({heads}) % num_query_groups ({groups}) == {heads % groups},"
            " expected 0"
        )


def cost_model(
    args: argparse.Namespace,
    device: torch.device,
    bytes_per_element: int,
    ranks_per_node: int | None = None,
) -> CostModel:
    """Return the costs of a model of these sizes on devices of this type."""
    return machine_cost(
        device,
        ranks_per_node,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        bytes_per_element=bytes_per_element,
    )
