"""Megatron-LM's command line: the flags that it lacks, and options that do not go with hcp."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hcp.integrations.megatron.megatron_arguments import add_megatron_arguments, config_from_args
from hcp.integrations.megatron.megatron_checks import unfit_dispatcher
from hcp.step.config import MEGATRON_SCHEDULERS, SCHEDULERS, Config

_SCHEDULER = "--sequence-packing-scheduler"


_PACKING = {
    "pad_packed_seq_alignment": "it pads no micro-batch",
    "thd_max_packed_sequences": "a micro-batch has as many sequences as the plan gives it",
}
"""Options of branch dev's packing, and why they do not go with hcp."""


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add hcp's flags to Megatron-LM's parser, and hcp's schedulers to a flag that it has."""
    own = parser._option_string_actions.get(_SCHEDULER)
    if own is not None and own.choices is not None:
        own.choices = tuple(dict.fromkeys((*own.choices, *SCHEDULERS, *MEGATRON_SCHEDULERS)))
    add_megatron_arguments(parser).add_argument(
        "--linear-cross-entropy",
        action="store_true",
        help="compute losses in chunks, without the logits of all rows in memory",
    )
    return parser


def take_options(args: Any) -> Config:
    """Return the options of planned micro-batches, and hide them from Megatron-LM: branch dev would
    plan too and make groups for it, and all check the levels of a2a+p2p against one CP size.

    Raises ValueError on every rank, before any process group is made.
    """
    if not _of(args, "dynamic_context_parallel") and not _of(args, "sequence_packing_scheduler"):
        raise ValueError(
            f"neither --dynamic-context-parallel nor {_SCHEDULER} is given, expected one of them: "
            "hcp plans every micro-batch; run the script without hcp for Megatron-LM's own"
        )
    for name, why in _PACKING.items():
        if _of(args, name):
            raise ValueError(f"--{name.replace('_', '-')} does not go with hcp: {why}")
    config = config_from_args(args)
    hide_options(args)
    return config


def hide_options(args: Any) -> None:
    """Let Megatron-LM not see the options of planned micro-batches. It may set one by itself."""
    args.dynamic_context_parallel, args.sequence_packing_scheduler = False, None
    args.hierarchical_context_parallel_sizes = None
    if _of(args, "sft") and args.micro_batch_size > 1:
        args.use_vanilla_collate_fn = True  # branch dev: samples have lengths of their own


@contextmanager
def hidden_limits(args: Any) -> Iterator[None]:
    """Return a context in which Megatron-LM's checks see no a2a+p2p, whose levels they would miss,
    and no limit of a rank, which they compare with one CP size."""
    given = {name: getattr(args, name) for name in ("cp_comm_type", "max_seqlen_per_dp_cp_rank")}
    args.cp_comm_type, args.max_seqlen_per_dp_cp_rank = ["p2p"], None
    try:
        yield
    finally:
        vars(args).update(given)


def check_args(args: Any, config: Config) -> None:
    """Refuse what does not go with planned micro-batches, by the names of Megatron-LM's flags.

    Where pipeline stages send rows to each other, sets `args.variable_seq_lengths`, and for models
    without experts the dispatcher that Megatron-Core requires with it. Raises ValueError on every
    rank, before any process group is made.
    """
    for flag, why in _refused(args, config):
        raise ValueError(f"{flag} does not go with hcp: {why}")
    if config.eval_context_parallel_size == "auto":
        raise ValueError(
            "--eval-context-parallel-size is auto, expected a number: ask "
            "hcp.tools.choose.choose_eval_context_parallel with the lengths of the evaluation"
        )
    stages = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    config.validate(
        ranks=args.world_size // stages,
        num_layers=args.num_layers,
        longest=args.seq_length,
        alignment=args.tensor_model_parallel_size if _of(args, "sequence_parallel") else 1,
    )
    if args.pipeline_model_parallel_size > 1:
        args.variable_seq_lengths = True
        if not args.num_experts:
            args.moe_token_dispatcher_type = "alltoall"


def _refused(args: Any, config: Config) -> Iterator[tuple[str, str]]:
    """Yield (flag, reason) of options under which a run would end later, or differ silently."""
    if not args.calculate_per_token_loss:
        why = "a mean per micro-batch would depend on the plan"
        yield "a run without --calculate-per-token-loss", why
    shapes = "micro-batches have as many rows as the plan gives them"
    losses = "hcp's forward step has the cross-entropy of the model alone"
    fixed = {
        "hybrid_context_parallel": "its loader plans too; give --dynamic-context-parallel",
        "enable_cuda_graph": shapes,
        "external_cuda_graph": shapes,
        "use_megatron_fsdp": "it was not tested",
        "use_torch_fsdp2": "it was not tested",
        "perform_rl_step": "its samples do not come from the data iterator",
        "logits_load_dir": losses,
        "logits_save_dir": "rows of a rank are the plan's, not the sample's",
        "modelopt_enabled": losses,
        "check_for_spiky_loss": "it judges the loss of a micro-batch, which depends on the plan",
        "fp8": "it was not tested",
        "fp4": "it was not tested",
        "overlap_moe_expert_parallel_comm": "hcp does not split a micro-batch",
        "fim_data": "it was not tested",
    }
    for name, why in fixed.items():
        if _of(args, name):
            yield f"--{name.replace('_', '-')}", why
    if args.num_experts:
        for name, why in unfit_dispatcher(args, stages=args.pipeline_model_parallel_size):
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            yield flag, f"{why}; give --moe-token-dispatcher-type alltoall"
    eager = hasattr(args, "fallback_to_eager_attn") and args.transformer_impl == "local"
    if eager and args.context_parallel_size > 1 and {*config.comm_types} != {"all_gather"}:
        why = "branch dev takes --cp-comm-type all_gather alone with --transformer-impl local"
        yield f"--cp-comm-type {' '.join(config.comm_types)}", why
    if _of(args, "cuda_graph_impl") not in (None, "none"):
        yield f"--cuda-graph-impl {args.cuda_graph_impl}", shapes


def _of(args: Any, name: str) -> Any:
    return getattr(args, name, None) or None
