"""Run the python blocks of a page, in a process of its own or on a rank."""

from __future__ import annotations

import torch.distributed as dist


def run_blocks(page: str, blocks: list[tuple[int, str]]) -> None:
    namespace = {"__name__": "__main__", "__file__": page}
    for line, code in blocks:
        # Keeps the line numbers of the page, so that a traceback points into it.
        exec(compile("\n" * (line - 1) + code, page, "exec"), namespace)
    # As a trainer does at its end: threads of groups that are left may abort the exit.
    if dist.is_initialized():
        dist.destroy_process_group()


def run_on_rank(rank: int, size: int, page: str, blocks: list[tuple[int, str]]) -> None:
    run_blocks(page, blocks)
