"""The program's command line, with Megatron's names for the flags that Megatron has."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hcp._validate import expect_size, flag
from hcp.integrations.megatron.megatron_arguments import add_megatron_arguments, config_from_args
from hcp.integrations.megatron.megatron_checks import check_gloo
from hcp.step.config import Config
from hcp.tools.programs.arguments import (
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
from hcp.tools.programs.ranks import runs_on_cpus

DESCRIPTION = """\
Pretrain a GPT of Megatron-Core's on real text, with a CP degree for each micro-batch, beside the
same training under static CP; then evaluate both under two layouts."""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m hcp.integrations.megatron",
        usage="%(prog)s [OPTIONS]",
        description=DESCRIPTION,
        formatter_class=HelpFormatter,
    )
    add_rank_arguments(parser)
    add_data_arguments(parser)
    add_model_arguments(parser)
    add_layout_arguments(parser)
    add_training_arguments(parser)
    add_megatron_arguments(parser)
    return parser


LAYOUT: dict[str, tuple[int | None, str, str]] = {
    "tensor_model_parallel_size": (1, "RANKS", "ranks that share each layer's weights"),
    "pipeline_model_parallel_size": (1, "STAGES", "pipeline stages, each on its own ranks"),
    "num_virtual_stages_per_pipeline_rank": (
        None,
        "CHUNKS",
        "chunks of layers on each stage, which interleaves the pipeline (default: 1)",
    ),
    "expert_model_parallel_size": (1, "RANKS", "ranks over which experts are spread"),
    "expert_tensor_parallel_size": (
        None,
        "RANKS",
        "ranks that share an expert's weights (default: --tensor-model-parallel-size)",
    ),
    "num_experts": (None, "EXPERTS", "experts of each MLP (default: one dense MLP)"),
    "moe_router_topk": (2, "EXPERTS", "experts that compute a token"),
    "moe_ffn_hidden_size": (
        None,
        "WIDTH",
        "values of a token inside an expert (default: --ffn-hidden-size)",
    ),
    "mtp_num_layers": (None, "LAYERS", "layers of multi-token prediction (default: none)"),
}
"""Option, default, unit and meaning of each size."""


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout")
    for name, (size, unit, says) in LAYOUT.items():
        group.add_argument(flag(name), type=int, default=size, metavar=unit, help=says)
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="tensor-parallel ranks share the rows between attention and MLP, too",
    )


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train twice in turns, with static CP as well",
    )
    group.add_argument(
        "--no-rope-fusion",
        action="store_false",
        dest="apply_rope_fusion",
        help="rotate queries and keys by Megatron's unfused code (default: in hcp's attention)",
    )
    group.add_argument(
        "--linear-cross-entropy",
        action="store_true",
        help="compute losses in chunks, without the logits of all rows in memory",
    )
    group.add_argument("--bf16", action="store_true", help="weights and activations in bfloat16")
    group.add_argument(
        "--use-distributed-optimizer",
        action="store_true",
        help="spread the optimizer's state over dp x cp",
    )
    add_steps(group, train_iters=10)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the options. Raises ValueError for options that do not go together."""
    args = build_parser().parse_args(argv)
    args.ranks = number_of_ranks(args.ranks)
    check_data(args)
    check_seed(args.seed)
    check_model(args)
    check_layout(args)
    # Sequence parallelism shares a rank's rows between tensor-parallel ranks.
    args.alignment = args.tensor_model_parallel_size if args.sequence_parallel else 1
    if args.max_seqlen_per_dp_cp_rank is None:
        args.max_seqlen_per_dp_cp_rank = aligned(
            default_rank_tokens(args.max_length, args.domain), args.alignment
        )
    if args.context_parallel_size is None and not args.dynamic_context_parallel:
        args.dynamic_context_parallel = args.sequence_packing_scheduler is None
    args.config = config_from_args(args)
    check_config(args.config)
    args.config.require_backend()
    args.config.validate(
        ranks=args.domain,
        num_layers=args.num_layers,
        longest=args.max_length,
        alignment=args.alignment,
    )
    return args


SIZES = (
    "ranks",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "eval_documents",
    "global_batch_size",
    "train_iters",
)
OPTIONAL_SIZES = (
    "num_virtual_stages_per_pipeline_rank",
    "num_experts",
    "moe_ffn_hidden_size",
    "mtp_num_layers",
)


def check_layout(args: argparse.Namespace) -> None:
    """Refuse sizes that Megatron would refuse on every rank. Set `args.domain`: the number of ranks
    over which sequences are spread."""
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    for name in SIZES:
        expect_size(name, getattr(args, name))
    for name in OPTIONAL_SIZES:
        if getattr(args, name) is not None:
            expect_size(name, getattr(args, name))
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    virtual = args.num_virtual_stages_per_pipeline_rank
    if virtual is not None and stages == 1:
        raise ValueError(
            f"num_virtual_stages_per_pipeline_rank is {virtual} and pipeline_model_parallel_size "
            "1, expected >= 2: interleaved stages are those of several ranks"
        )
    expect_multiple("ranks", args.ranks, "(tensor * pipeline sizes)", tensor * stages)
    chunks = stages * (virtual or 1)
    expect_multiple("num_layers", args.num_layers, "(pipeline * virtual stages)", chunks)
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        expect_multiple(name, getattr(args, name), "tensor_model_parallel_size", tensor)
    args.domain = args.ranks // (tensor * stages)
    check_experts(args)
    if args.sequence_parallel and tensor == 1:
        raise ValueError(
            "sequence_parallel is set with tensor_model_parallel_size 1, expected >= 2"
        )
    if args.sequence_parallel and args.mtp_num_layers:
        raise ValueError(
            f"mtp_num_layers is {args.mtp_num_layers} with sequence_parallel, expected one of "
            "them: Megatron's norms of prediction layers refuse it without Transformer Engine"
        )


def check_experts(args: argparse.Namespace) -> None:
    experts, ranks = args.num_experts, args.expert_model_parallel_size
    if experts is None:
        if ranks > 1:
            raise ValueError(
                f"expert_model_parallel_size is {ranks} without num_experts, expected 1"
            )
        return
    expect_multiple("num_experts", experts, "expert_model_parallel_size", ranks)
    tensor, shared = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    expect_multiple("tensor_model_parallel_size", tensor, "expert_tensor_parallel_size", shared)
    expect_multiple(
        "ranks of a pipeline stage",
        args.domain * tensor,
        "(expert tensor * expert model sizes)",
        shared * ranks,
    )
    if not 1 <= args.moe_router_topk <= experts:
        raise ValueError(
            f"moe_router_topk is {args.moe_router_topk}, expected 1 to num_experts ({experts})"
        )
    if tensor > 1 and not args.sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size is {tensor} with num_experts and "
            "without sequence_parallel, expected it, as Megatron's experts do"
        )
    if runs_on_cpus(args.device, args.ranks):
        check_gloo(shared, ranks)


def check_config(config: Config) -> None:
    """Refuse options that this program's model would not follow."""
    if config.window_size and not isinstance(config.window_size[0], int):
        raise ValueError(
            f"window_size lists {list(config.window_size)}, expected one for all layers, as "
            "Megatron's models have it"
        )
    if config.eval_context_parallel_size == "auto":
        raise ValueError(
            "eval_context_parallel_size is 'auto', expected a number: ask "
            "hcp.tools.choose.choose_eval_context_parallel with the lengths of the evaluation"
        )


def expect_multiple(name: str, value: int, of: str, size: int) -> None:
    if value % size:
        raise ValueError(f"{name} ({value}) % {of} ({size}) == {value % size}, expected 0")


def aligned(rows: int, alignment: int) -> int:
    return -(-rows // alignment) * alignment
