"""Training fills 95% of a GPU and does not run out, by a memory model that was measured there.

    python tests/cuda/check_memory.py

`python -m hcp calibrate --memory` measures a model. Then its longest sequence that fits and packs
of shorter ones train, planned by what it wrote. With a limit 10% lower the same sequence is refused
before anything runs; with one 12% higher the GPU runs out. The exit status is the number of checks
that fail."""

from __future__ import annotations

import dataclasses
import os
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import hcp
from hcp.cli.calibrate import Cell, parse_arguments
from hcp.cli.measure import step_of
from hcp.cli.measure_memory import Model
from hcp.demo.training import Trainer, forward_step
from hcp.programs.ranks import initialize_distributed

SHARE = 0.95
# Packs differ in size: blocks of fixed sizes would leave gaps.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
FLAGS = (
    "--ranks 1 --device cuda --dtype bfloat16 --num-layers 16 --hidden-size 2048 "
    "--ffn-hidden-size 8192 --num-attention-heads 16 --num-query-groups 8 --vocab-size 32000 "
    f"--min-tokens-per-rank 2048 --max-tokens-per-rank 16384 --memory --memory-share {SHARE}"
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "memory.json"
        os.environ |= ALLOCATOR
        argv = [*shlex.split(FLAGS), "--out", str(out)]
        subprocess.run([sys.executable, "-m", "hcp", "calibrate", *argv], check=True)
        memory = hcp.MemoryModel.load(out)
        args = parse_arguments(argv)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    device = initialize_distributed(args)
    groups = hcp.build_process_groups(tp=1, cp=1, dp=1, pp=1)
    model = Model(Trainer(args, args.config, hcp.CostModel(), groups, device))
    longest = memory.limit // (memory.activation + memory.logit)
    checks = {
        "trains": trains(model, memory, longest),
        "refused before it starts": refused(memory, longest),
        "runs out without the limit": runs_out(model, longest * 112 // 100),
    }
    groups.close()
    for name, passed in checks.items():
        print("ok    " if passed else "FAILED", name)
    return sum(not passed for passed in checks.values())


def config_of(memory: hcp.MemoryModel) -> hcp.Config:
    return hcp.Config(2**24, memory=memory)


def trains(model: Model, memory: hcp.MemoryModel, longest: int) -> bool:
    """Of the GPU's memory, the micro-batches fill the share, and no more."""
    draw = random.Random(0)
    lengths = [longest, *(draw.randint(500, longest // 2) for _ in range(24))]
    config = config_of(memory)
    config.validate(ranks=1, longest=longest)
    plan = config.plan(lengths, ranks=1)
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    for (group,) in plan.micro_batches:
        train(model, [plan.lengths[s] for s in group.sequences])
    model.optimizer.step()
    share = torch.cuda.max_memory_allocated() / (total - others)
    reserved = torch.cuda.max_memory_reserved() / (total - others)
    print(
        f"{len(plan.micro_batches)} micro-batches of up to {longest:,} tokens: {share:.1%} of "
        f"{(total - others) / 2**30:.1f} GiB allocated at most, {reserved:.1%} reserved"
    )
    return SHARE - 0.02 <= share <= SHARE


def train(model: Model, lengths: list[int]) -> None:
    ((cp, local),) = step_of(model.trainer, Cell(tuple(lengths), 1))
    losses = forward_step(model.trainer, model.model, cp, local)
    cp.loss(losses, local.loss_mask).backward()


def refused(memory: hcp.MemoryModel, longest: int) -> bool:
    config = config_of(dataclasses.replace(memory, limit=memory.limit * 9 // 10))
    try:
        config.validate(ranks=1, longest=longest)
    except ValueError as error:
        print(error)
        return True
    return False


def runs_out(model: Model, rows: int) -> bool:
    try:
        train(model, [rows])
    except torch.OutOfMemoryError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
