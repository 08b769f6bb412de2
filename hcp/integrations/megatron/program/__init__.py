"""A complete Megatron-Core pretraining on real text, with static and with dynamic CP in turns.

    python -m hcp.integrations.megatron --ranks 4             4 ranks on this machine
    torchrun --nproc-per-node 8 -m hcp.integrations.megatron  under a launcher of your own

Read training.py first: it is what changes in a script of your own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hcp.demo import parse_on_rank, start_ranks
from hcp.errors import HcpError

USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run as one rank when a launcher started us, else start all ranks. Returns the exit code."""
    from hcp.integrations.megatron.program.arguments import parse_args
    from hcp.integrations.megatron.versions import require_megatron

    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        require_megatron()
        if "RANK" in os.environ:
            return run_rank(argv)
        args = parse_args(argv)
    except (ImportError, ValueError) as error:
        return fail(error)
    return start_ranks(args.ranks, ["-m", "hcp.integrations.megatron", *argv])


def run_rank(argv: Sequence[str]) -> int:
    from hcp.integrations.megatron.program.arguments import parse_args
    from hcp.integrations.megatron.program.training import pretrain

    args = parse_on_rank(int(os.environ["RANK"]), argv, parse_args)
    try:
        pretrain(args)
    except HcpError as error:
        return fail(error)
    return 0


def fail(error: Exception) -> int:
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"hcp.integrations.megatron: error: {error}", file=sys.stderr, flush=True)
    return USER_ERROR
