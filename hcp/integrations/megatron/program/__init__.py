"""A complete Megatron-Core pretraining on real text, with static and with dynamic CP in turns.

    python -m hcp.integrations.megatron --ranks 4             4 ranks on this machine
    torchrun --nproc-per-node 8 -m hcp.integrations.megatron  under a launcher of your own

Read pretraining.py first: it is what changes in a script of your own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hcp.integrations.megatron.versions import require_megatron
from hcp.tools.programs.launch import Program


def main(argv: Sequence[str] | None = None) -> int:
    """Run as one rank if a launcher started this process; else start all ranks. Return the exit
    code."""
    name = "hcp.integrations.megatron"
    return Program(name, name, require_megatron, parse_args, run).main(argv)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    from hcp.integrations.megatron.program import program_arguments

    return program_arguments.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    from hcp.integrations.megatron.program.pretraining import pretrain

    pretrain(args)
