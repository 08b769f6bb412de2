"""The demo's command line: Megatron's flag names where Megatron has one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from hcp._validate import expect_size
from hcp.planning.limits import rows_up_to
from hcp.step.config import Config, add_arguments

DTYPES = ("float32", "float64", "bfloat16")
SIZES = (
    "ranks",
    "eval_documents",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "global_batch_size",
    "train_iters",
    "log_interval",
)

DESCRIPTION = """\
Train a small GPT on real text with context parallelism that changes from step to step, compare it
with static context parallelism from the same weights on the same batches, and evaluate under
another layout of the same ranks."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hcp demo",
        description=DESCRIPTION,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, help="ranks to start; under torchrun: what it starts (default: 4)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: GPUs if each rank has one",
    )
    parser.add_argument("--run-dir", help="folder for the results (default: a new one under runs/)")
    add_data_arguments(parser)
    add_model_arguments(parser)
    add_training_arguments(parser)
    add_arguments(parser)
    return parser


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


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train with static_cp as well",
    )
    group.add_argument(
        "--ddp", action="store_true", help="reduce gradients with DistributedDataParallel"
    )
    group.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="bfloat16: autocast over float32 weights"
    )
    group.add_argument("--global-batch-size", type=int, default=64, help="documents in a step")
    group.add_argument("--train-iters", type=int, default=16, help="steps")
    group.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    group.add_argument("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0: any")
    group.add_argument(
        "--seed", type=int, default=1234, help="of the weights and of the order of the documents"
    )
    group.add_argument(
        "--log-interval",
        type=int,
        default=1,
        help="steps from one line of metrics.jsonl to the next",
    )
    group.add_argument(
        "--eval-interval",
        type=int,
        help="steps from one evaluation to the next (default: only at the end)",
    )
    group.add_argument(
        "--eval-iters",
        type=int,
        help="global batches in an evaluation (default: every document once)",
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked. ValueError says which do not go together."""
    args = build_parser().parse_args(argv)
    args.ranks = number_of_ranks(args.ranks)
    check_numbers(args)
    check_data(args)
    check_model(args)
    if args.max_seqlen_per_dp_cp_rank is None:
        args.max_seqlen_per_dp_cp_rank = default_rank_tokens(args.max_length, args.ranks)
    args.config = Config.from_args(args)
    args.config.validate(ranks=args.ranks, num_layers=args.num_layers, longest=args.max_length)
    args.config.static_degree(args.max_length, args.ranks)
    return args


def number_of_ranks(asked: int | None) -> int:
    """What torchrun started, else what was asked for, else 4."""
    if "WORLD_SIZE" not in os.environ:
        return 4 if asked is None else asked
    started = int(os.environ["WORLD_SIZE"])
    if asked is not None and asked != started:
        raise ValueError(f"--ranks {asked}, but torchrun started {started}: leave --ranks out")
    return started


def check_numbers(args: argparse.Namespace) -> None:
    for name in SIZES:
        expect_size(name, getattr(args, name))
    for name in ("eval_interval", "eval_iters"):
        if getattr(args, name) is not None:
            expect_size(name, getattr(args, name))
    if not args.lr >= 0 or not args.clip_grad >= 0:
        raise ValueError(f"lr is {args.lr}, clip_grad is {args.clip_grad}, expected numbers >= 0")


def default_rank_tokens(max_length: int, ranks: int) -> int:
    """A quarter of the longest document, so that it needs context parallelism, or as much as these
    ranks make of it."""
    return max(rows_up_to(max_length, 4), rows_up_to(max_length, ranks), 256)


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
