"""Measure the seconds of a model's micro-batches, on all ranks at once."""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hcp
from hcp.attention.kernels import FAMILIES
from hcp.attention.kernels.auto import computing
from hcp.demo.training import Trainer, build_model, forward_step
from hcp.planning.limits import rows_up_to
from hcp.tools.programs.progress import progress
from hcp.tools.programs.text_data import VOCABULARY_SIZE

if TYPE_CHECKING:
    from hcp.cli.calibrate import Cell


def measure(args: argparse.Namespace, cells: Sequence[Cell], device: torch.device) -> list[float]:
    """Return the seconds of each cell: those of its slowest rank, the median of the repeats.

    Every round measures all cells, so that other work of the machine slows all of them alike. A
    first round warms up. Ranks that are left over (see `step_of`) do not count.
    """
    groups = hcp.build_process_groups(tp=1, cp=1, dp=args.ranks, pp=1)
    try:
        trainer = Trainer(args, args.config, hcp.CostModel(), groups, device)
        model = build_model(trainer, args.vocab_size)
        steps = [step_of(trainer, cell) for cell in cells]
        rounds = []
        total = (args.repeats + 1) * len(cells)
        with progress(total, "measuring", shown=dist.get_rank() == 0) as bar:
            for _ in range(args.repeats + 1):
                rounds.append([timed(trainer, model, step, bar) for step in steps])
        left_over = [groups.rank("dp_cp") >= args.ranks - args.ranks % c.degree for c in cells]
        slowest = torch.tensor(rounds[1:], dtype=torch.float64)
        slowest = slowest.masked_fill(torch.tensor(left_over), 0.0).to(device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=groups.dp_cp)
        return [statistics.median(column) for column in slowest.t().tolist()]
    finally:
        groups.close()


def step_of(trainer: Trainer, cell: Cell) -> hcp.Step:
    """Return a step of one micro-batch, in which as many groups as fit compute the cell.

    Ranks that are left over compute as many rows each. So no core and no link is idle, from which
    the timed ranks would gain.
    """
    groups, ranks = trainer.groups, trainer.groups.size("dp_cp")
    lengths: list[int] = []
    sources: list[int] = []
    placed = []
    for first in range(0, ranks, cell.degree):
        degree = min(cell.degree, ranks - first)
        members = [max(1, length * degree // cell.degree) for length in cell.lengths]
        sequences = list(range(len(lengths), len(lengths) + len(members)))
        placed.append({"first_rank": first, "degree": degree, "sequences": sequences})
        lengths += members
        sources += [first] * len(members)
    plan = hcp.Plan.from_dict(
        {
            "ranks": ranks,
            "max_tokens_per_rank": sum(rows_up_to(length, 1) for length in cell.lengths),
            "lengths": lengths,
            "micro_batches": [{"groups": placed}],
        }
    )
    rank = groups.rank("dp_cp")
    mine = [
        sample(length, trainer.device)
        for length, source in zip(lengths, sources, strict=True)
        if source == rank
    ]
    return hcp.dispatch(plan, mine, sources, groups, **trainer.config.dispatch_options())


def sample(length: int, device: torch.device) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY_SIZE, (length,), device=device)
    return {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(length, device=device)}


def timed(trainer: Trainer, model: nn.Module, step: hcp.Step, bar: Any) -> float:
    """Return the seconds of forward and backward on this rank, from a common start."""
    ((cp, local),) = step
    dist.barrier(trainer.groups.dp_cp)
    synchronize(trainer.device)
    begun = time.perf_counter()
    losses = forward_step(trainer, model, cp, local)
    cp.loss(losses, local.loss_mask, grad_reduce="sum").backward()  # type: ignore[no-untyped-call]
    synchronize(trainer.device)
    took = time.perf_counter() - begun
    bar.update()
    return took


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_of(backend: str, device: torch.device) -> dict[str, str | None]:
    """Return the families of kernels that compute attention for a backend, and their versions."""
    if backend not in FAMILIES:
        return {backend: None}
    return computing(backend, device)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, NCCL"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads a rank, Gloo"
