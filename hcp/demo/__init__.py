"""A Megatron-style training script with dynamic context parallelism on real text.

    hcp demo --ranks 4                            starts 4 ranks on this machine
    torchrun --nproc-per-node 4 -m hcp.demo       runs under a launcher of your own

Read training.py first: it is the script that your own would look like.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hcp.tools.programs.launch import Program, require_packages


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo as one rank if a launcher started this process; else start all ranks. Return the
    exit code."""
    return Program("hcp demo", "hcp.demo", check_packages, parse_args, run).main(argv)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    from hcp.demo import demo_arguments

    return demo_arguments.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    from hcp.demo.training import pretrain

    pretrain(args)


def check_packages() -> None:
    require_packages("the demo", "torch")
