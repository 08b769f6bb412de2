"""Run a script of Megatron-LM's with hcp in place, with the script's own flags.

    torchrun --nproc-per-node 8 -m hcp.integrations.megatron.launch pretrain_gpt.py \\
        --dynamic-context-parallel --max-seqlen-per-dp-cp-rank 8192 ...

The script's folder is the first in which modules are looked for, as if Python ran it. Without a
GPU, and with `--distributed-backend gloo`, the script runs on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

NAME = "hcp.integrations.megatron.launch"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script that the first argument names, with the others as its command line."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not Path(args.script).is_file():
        parser.error(f"the script is {args.script}, expected a file")
    sys.argv = [args.script, *args.flags]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    run(args.script)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {NAME}",
        usage="%(prog)s SCRIPT [FLAGS]",
        description="Run a script of Megatron-LM's, such as pretrain_gpt.py, with hcp in place.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="its file, in a checkout of Megatron-LM")
    flags = parser.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        metavar="FLAGS",
        help="the script's own flags (default: none)",
    )
    flags.required = False  # argparse would name them beside a script that is missing
    return parser


def run(script: str) -> None:
    """Run a script's file as the main module, on the CPU if there is no GPU. What hcp refuses
    before training ends the process with one line."""
    import torch

    from hcp.integrations.megatron.lm.seams import install
    from hcp.tools.programs.launch import InputError

    on_cpu: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    try:
        install()
        if not torch.cuda.is_available():
            from hcp.integrations.megatron.lm.on_cpu import megatron_lm_on_cpu, require_helpers

            require_helpers()
            on_cpu = megatron_lm_on_cpu()
    except ImportError as error:
        _end(error)
    try:
        with on_cpu:
            runpy.run_path(script, run_name="__main__")
    except InputError as error:
        _end(error)


def _end(error: Exception) -> NoReturn:
    """Say what is refused and end at once: the launcher then ends the other ranks, before each
    says the same."""
    from hcp.tools.programs.launch import fail

    code = fail(error, int(os.environ.get("RANK", 0)), NAME)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
