"""The options that the programs share, with Megatron's names for the flags that Megatron has."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hcp.planning.cost import CostModel, rates_of
from hcp.planning.limits import rows_up_to

if TYPE_CHECKING:  # --help needs no torch
    import torch

DTYPES = ("float32", "float64", "bfloat16")


class Parser(argparse.ArgumentParser):
    """Raises ValueError for options that it does not know: programs print it as one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the options)")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows every default but None, and those that the help text already names."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
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
        help="cut each text into documents here; \\n is a new line",
    )
    group.add_argument(
        "--max-length", type=int, default=8192, help="tokens; longer documents are split"
    )
    group.add_argument(
        "--eval-documents", type=int, default=37, help="documents held out for evaluation"
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=int, default=4, help="transformer layers")
    group.add_argument("--hidden-size", type=int, default=128, help="width")
    group.add_argument("--ffn-hidden-size", type=int, default=512, help="width inside the MLP")
    group.add_argument("--num-attention-heads", type=int, default=4, help="query heads")
    group.add_argument("--num-query-groups", type=int, default=2, help="key and value heads")
    group.add_argument(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="two matrices instead of one",
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
    return CostModel.for_transformer(
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        bytes_per_element=bytes_per_element,
        **rates_of(device.type, ranks_per_node),
    )
