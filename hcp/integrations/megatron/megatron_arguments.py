"""The options by which a Megatron script asks for dynamic context parallelism."""

from __future__ import annotations

import argparse
from typing import Any

from hcp.integrations.megatron.attention_backend import BACKENDS, backend_of
from hcp.step.config import MEGATRON_SCHEDULERS, Config
from hcp.tools.programs.options import add_arguments


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add to a Megatron script's parser the options of hcp that it does not have yet.

    `--dynamic-context-parallel`, `--sequence-packing-scheduler`, `--max-seqlen-per-dp-cp-rank`,
    `--min-dynamic-context-parallel-size`, `--context-parallel-size`, `--cp-comm-type` (once, or per
    layer), `--hierarchical-context-parallel-sizes`, `--eval-context-parallel-size`,
    `--attention-backend`, `--memory`. Megatron's parser has most of them; these stay its own. Pass
    this function as `extra_args_provider` of Megatron-LM's `pretrain`.
    """
    group = parser.add_argument_group("dynamic context parallelism")
    known = parser._option_string_actions
    if "--attention-backend" not in known:
        group.add_argument(
            "--attention-backend",
            metavar="NAME",
            help="whose kernels compute attention: Megatron's names "
            f"{', '.join(BACKENDS)}, or a backend of hcp's (default: auto)",
        )
    add_arguments(parser)
    if "--dynamic-context-parallel" not in known:
        group.add_argument(
            "--dynamic-context-parallel",
            action="store_true",
            help="choose a CP degree for each group of sequences in each step",
        )
    if "--hierarchical-context-parallel-sizes" not in known:
        group.add_argument(
            "--hierarchical-context-parallel-sizes",
            nargs="+",
            type=int,
            metavar="SIZE",
            help="ranks of each level of hierarchical CP groups, the innermost first "
            "(default: none)",
        )
    return parser


def config_from_args(args: argparse.Namespace) -> Config:
    """Read hcp's options from Megatron's global arguments.

    `--dynamic-context-parallel` asks for the scheduler dynamic_cp. Without it, and without
    `--sequence-packing-scheduler`, the degree is `--context-parallel-size` for all.
    `--attention-backend`, and `--flash-attention-version`, are translated: see `backends`.
    """
    values: dict[str, Any] = dict(vars(args))
    named = values.get("sequence_packing_scheduler")
    name = str(getattr(named, "value", named))
    scheduler = MEGATRON_SCHEDULERS.get(name, named)
    if values.get("dynamic_context_parallel"):
        if scheduler == "static_cp":
            raise ValueError(
                "--dynamic-context-parallel and --sequence-packing-scheduler "
                f"{named} contradict each other, expected one of them"
            )
        scheduler = "dynamic_cp"
    values["sequence_packing_scheduler"] = scheduler or "static_cp"
    version = values.get("flash_attention_version")
    values["attention_backend"] = backend_of(values.get("attention_backend"), version)
    return Config.from_args(argparse.Namespace(**values))
