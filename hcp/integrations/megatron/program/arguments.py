"""The program's command line: Megatron's flag names where Megatron has one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hcp.config import rows_up_to
from hcp.demo.arguments import (
    HelpFormatter,
    add_data_arguments,
    add_model_arguments,
    check_data,
    check_model,
    default_rank_tokens,
    number_of_ranks,
)
from hcp.integrations.megatron.arguments import add_megatron_arguments, config_from_args

DESCRIPTION = """\
Pretrain a GPT of Megatron-Core's on real text, with a CP degree for each micro-batch, beside the
same training under static CP; then evaluate both under two layouts."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hcp.integrations.megatron",
        description=DESCRIPTION,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, help="ranks to start; under torchrun: what it starts (default: 4)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_data_arguments(parser)
    add_model_arguments(parser)
    add_layout_arguments(parser)
    add_training_arguments(parser)
    add_megatron_arguments(parser)
    return parser


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    group.add_argument("--expert-model-parallel-size", type=int, default=1)
    group.add_argument("--num-experts", type=int, help="of each MLP (default: one dense MLP)")
    group.add_argument("--moe-router-topk", type=int, default=2)
    group.add_argument("--moe-ffn-hidden-size", type=int)
    group.add_argument("--mtp-num-layers", type=int, help="multi-token prediction")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train twice in turns, with static CP as well",
    )
    group.add_argument("--bf16", action="store_true", help="weights and activations in bfloat16")
    group.add_argument(
        "--use-distributed-optimizer", action="store_true", help="its state is sharded over dp x cp"
    )
    group.add_argument("--global-batch-size", type=int, default=64, help="documents in a step")
    group.add_argument("--train-iters", type=int, default=10, help="steps")
    group.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    group.add_argument("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0: any")
    group.add_argument("--seed", type=int, default=1234)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked. ValueError says which do not go together."""
    args = build_parser().parse_args(argv)
    args.ranks = number_of_ranks(args.ranks)
    check_data(args)
    check_model(args)
    inner = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.ranks % inner:
        raise ValueError(
            f"ranks ({args.ranks}) % (tensor * pipeline sizes ({inner})) == {args.ranks % inner},"
            " expected 0"
        )
    args.domain = args.ranks // inner
    # Sequence parallelism shares a rank's rows between tensor-parallel ranks.
    args.alignment = args.tensor_model_parallel_size if args.sequence_parallel else 1
    if args.max_seqlen_per_dp_cp_rank is None:
        args.max_seqlen_per_dp_cp_rank = aligned(
            default_rank_tokens(args.max_length, args.domain), args.alignment
        )
    if args.context_parallel_size is None and not args.dynamic_context_parallel:
        args.dynamic_context_parallel = args.sequence_packing_scheduler is None
    args.config = config_from_args(args)
    args.config.validate(ranks=args.domain, num_layers=args.num_layers, longest=args.max_length)
    whole = aligned(rows_up_to(args.max_length, 1), args.alignment)
    args.eval_tokens_per_rank = max(args.max_seqlen_per_dp_cp_rank, whole)
    return args


def aligned(rows: int, alignment: int) -> int:
    return -(-rows // alignment) * alignment
