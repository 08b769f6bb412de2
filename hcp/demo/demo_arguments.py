"""The demo's command line, with Megatron's names for the flags that Megatron has."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hcp._validate import expect_size
from hcp.step.config import Config
from hcp.tools.programs.arguments import (
    DTYPES,
    HelpFormatter,
    Parser,
    add_data_arguments,
    add_model_arguments,
    add_rank_arguments,
    add_steps,
    check_data,
    check_model,
    check_seed,
    default_rank_tokens,
    number_of_ranks,
)
from hcp.tools.programs.options import add_arguments

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


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hcp demo",
        usage="%(prog)s [OPTIONS]",
        description=DESCRIPTION,
        formatter_class=HelpFormatter,
    )
    add_rank_arguments(parser)
    parser.add_argument(
        "--run-dir", metavar="DIR", help="folder for the results (default: a new one under runs/)"
    )
    add_data_arguments(parser)
    add_model_arguments(parser)
    add_training_arguments(parser)
    add_arguments(parser)
    return parser


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
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="type of what is computed; bfloat16: autocast over float32 weights",
    )
    add_steps(group, train_iters=6)
    group.add_argument(
        "--lr-warmup-iters",
        type=int,
        default=0,
        metavar="STEPS",
        help="steps in which the rate rises to --lr",
    )
    group.add_argument(
        "--lr-decay-style",
        choices=("constant", "cosine"),
        default="constant",
        help="how the rate goes on after that; cosine: to 0 at the last step",
    )
    group.add_argument(
        "--log-interval",
        type=int,
        default=1,
        metavar="STEPS",
        help="steps from one line of metrics.jsonl to the next",
    )
    group.add_argument(
        "--eval-interval",
        type=int,
        metavar="STEPS",
        help="steps from one evaluation to the next (default: only at the end)",
    )
    group.add_argument(
        "--save",
        metavar="DIR",
        help="write a checkpoint into this folder at the end, and where the next two options say "
        "(default: none)",
    )
    group.add_argument(
        "--save-interval",
        type=int,
        metavar="STEPS",
        help="steps from one checkpoint to the next (default: only at the end)",
    )
    group.add_argument(
        "--exit-duration-in-mins",
        type=float,
        metavar="MINUTES",
        help="save and end after the step that runs then; --load goes on from it (default: never)",
    )
    group.add_argument(
        "--load",
        metavar="DIR",
        help="go on from the checkpoint in this folder (default: begin anew)",
    )
    group.add_argument(
        "--eval-iters",
        type=int,
        metavar="BATCHES",
        help="global batches in an evaluation (default: every document once)",
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the options. Raises ValueError for options that do not go together."""
    args = build_parser().parse_args(argv)
    args.ranks = number_of_ranks(args.ranks)
    check_numbers(args)
    check_data(args)
    check_seed(args.seed)
    check_model(args)
    if args.max_seqlen_per_dp_cp_rank is None:
        args.max_seqlen_per_dp_cp_rank = default_rank_tokens(args.max_length, args.ranks)
    args.config = Config.from_args(args)
    args.config.validate(ranks=args.ranks, num_layers=args.num_layers, longest=args.max_length)
    args.config.require_backend()
    args.config.static_degree(args.max_length, args.ranks)
    return args


def check_numbers(args: argparse.Namespace) -> None:
    for name in SIZES:
        expect_size(name, getattr(args, name))
    for name in ("eval_interval", "eval_iters", "save_interval"):
        if getattr(args, name) is not None:
            expect_size(name, getattr(args, name))
    if not 0 <= args.lr_warmup_iters < args.train_iters:
        raise ValueError(
            f"lr_warmup_iters is {args.lr_warmup_iters}, expected 0 to {args.train_iters - 1}: "
            "fewer than train_iters"
        )
    minutes = args.exit_duration_in_mins
    if minutes is not None and not minutes > 0:
        raise ValueError(f"exit_duration_in_mins is {minutes}, expected > 0")
    if args.save is None and (args.save_interval, minutes) != (None, None):
        raise ValueError(
            "save is None, expected a folder: save_interval and exit_duration_in_mins write into it"
        )
    if not args.lr >= 0 or not args.clip_grad >= 0:
        raise ValueError(f"lr is {args.lr}, clip_grad is {args.clip_grad}, expected numbers >= 0")
