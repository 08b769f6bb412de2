"""Training fills 95% of each GPU and does not run out, by a memory model that was measured there.

    python tests/cuda/check_memory.py [--ranks 2] [--head-chunks 4]

`hcp calibrate --memory` measures a model. Then the longest sequence that fits on all
ranks together and packs of shorter ones train, planned by what it wrote. With a limit 10% lower the
same sequence is refused before anything runs; with 12% more rows the GPUs run out. The exit status
is 0 if every check passes on every rank."""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import hcp
from hcp.cli.calibrate import Cell, parse_arguments
from hcp.cli.measure import sample, step_of
from hcp.cli.measure_memory import Model
from hcp.demo.training import Trainer, forward_step
from hcp.tools.programs.ranks import initialize_distributed

SHARE = 0.95
# Packs differ in size: blocks of fixed sizes would leave gaps.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
FLAGS = (
    "--device cuda --dtype bfloat16 --num-layers 16 --hidden-size 2048 "
    "--ffn-hidden-size 8192 --num-attention-heads 16 --num-query-groups 8 --vocab-size 32000 "
    f"--min-tokens-per-rank 2048 --max-tokens-per-rank 16384 --memory --memory-share {SHARE}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--head-chunks", type=int, default=1)
    parser.add_argument("--memory", help="a measured model: set on the ranks that train by it")
    own = parser.parse_args()
    flags = f"{FLAGS} --ranks {own.ranks} --head-chunks {own.head_chunks}"
    if own.memory is not None:
        return train_by(
            hcp.MemoryModel.load(own.memory),
            parse_arguments(shlex.split(f"{flags} --out {own.memory}")),
        )
    os.environ |= ALLOCATOR
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "memory.json")
        calibrate = [sys.executable, "-m", "hcp", "calibrate", *shlex.split(flags), "--out", out]
        subprocess.run(calibrate, check=True)
        launch = f"-m torch.distributed.run --standalone --nproc-per-node {own.ranks}"
        return subprocess.run(
            [sys.executable, *launch.split(), __file__, *sys.argv[1:], "--memory", out]
        ).returncode


def train_by(memory: hcp.MemoryModel, args: argparse.Namespace) -> int:
    device = initialize_distributed(args)
    groups = hcp.build_process_groups(tp=1, cp=1, dp=args.ranks, pp=1)
    model = Model(Trainer(args, config_of(memory), hcp.CostModel(), groups, device))
    longest = longest_that_fits(memory, args.ranks)
    checks = {
        "trains": trains(model, memory, longest),
        "refused before it starts": refused(memory, args.ranks, longest),
        "runs out without the limit": runs_out(model, longest * 112 // 100 // args.ranks),
    }
    for name, passed in checks.items():
        print(f"{'ok    ' if passed else 'FAILED'} rank {groups.rank('dp_cp')}: {name}")
    dist.barrier()
    groups.close()
    dist.destroy_process_group()
    return sum(not passed for passed in checks.values())


def config_of(memory: hcp.MemoryModel) -> hcp.Config:
    return hcp.Config(2**24, memory=memory)


def longest_that_fits(memory: hcp.MemoryModel, ranks: int) -> int:
    tokens = ranks * memory.limit // (memory.activation + memory.logit)
    while memory.bytes(-(-tokens // ranks) + 1, tokens, ranks) > memory.limit:
        tokens -= 1
    return tokens


def trains(model: Model, memory: hcp.MemoryModel, longest: int) -> bool:
    """Of each GPU's memory, the micro-batches fill the share, and no more."""
    trainer, ranks = model.trainer, model.trainer.args.ranks
    draw = random.Random(0)
    lengths = [longest, *(draw.randint(500, longest // 2) for _ in range(24 * ranks))]
    config = config_of(memory)
    config.validate(ranks=ranks, longest=longest)
    plan = config.plan(lengths, ranks=ranks)
    rank = trainer.groups.rank("dp_cp")
    sources = [i % ranks for i in range(len(lengths))]
    mine = [sample(n, trainer.device) for n, s in zip(lengths, sources, strict=True) if s == rank]
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    options = config.dispatch_options()
    for cp, local in hcp.dispatch(plan, mine, sources, trainer.groups, **options):
        losses = forward_step(trainer, model.model, cp, local)
        cp.loss(losses, local.loss_mask, grad_reduce="sum").backward()
    model.optimizer.step()
    share = torch.cuda.max_memory_allocated() / (total - others)
    reserved = torch.cuda.max_memory_reserved() / (total - others)
    degrees = sorted({group.degree for batch in plan.micro_batches for group in batch})
    print(
        f"rank {rank}: {len(plan.micro_batches)} micro-batches of degrees {degrees}, sequences of "
        f"up to {longest:,} tokens: {share:.1%} of {(total - others) / 2**30:.1f} GiB allocated at "
        f"most, {reserved:.1%} reserved"
    )
    return SHARE - 0.02 <= share <= SHARE


def refused(memory: hcp.MemoryModel, ranks: int, longest: int) -> bool:
    config = config_of(dataclasses.replace(memory, limit=memory.limit * 9 // 10))
    try:
        config.validate(ranks=ranks, longest=longest)
    except ValueError as error:
        print(error)
        return True
    return False


def runs_out(model: Model, rows: int) -> bool:
    """Of so many rows on each rank, which exchange nothing, so that none waits for another."""
    try:
        ((cp, local),) = step_of(model.trainer, Cell((rows,), 1))
        losses = forward_step(model.trainer, model.model, cp, local)
        cp.loss(losses, local.loss_mask, grad_reduce="sum").backward()
    except torch.OutOfMemoryError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
