"""Measure the bytes of a model's micro-batches, on all ranks at once."""

# T rows on this rank, H query heads, G key and value heads D head size.

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import hcp
from hcp.cli.calibrate import BYTES_MAX, Cell, degrees_of, origin, rows_of
from hcp.cli.measure import step_of
from hcp.demo.training import (
    Gradients,
    Trainer,
    autocast,
    build_model,
    build_optimizer,
    forward_step,
)
from hcp.exchange.transport import shares
from hcp.tools.memory import Allocated, allocated_on_gpu, measure_peaks, room_on_gpu
from hcp.tools.memory_fit import MemoryFit, Peak, expect_close, fit_peaks, fit_shared

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class MeasuredMemory:
    """The bytes of the busiest rank."""

    fit: MemoryFit
    by_degree: dict[int, list[Peak]]
    """Those of attention alone, at degree 1 and others. Empty for one rank."""
    room: int
    """The most bytes of a micro-batch, with those of ``buffer``."""
    buffer: int = 0
    """Bytes that exchanges hold, measured or foreseen."""


def measure_memory(
    args: argparse.Namespace,
    device: torch.device,
    allocated: Allocated = allocated_on_gpu,
    room: int | None = None,
) -> MeasuredMemory:
    """Measure and fit, on every rank alike. ``room``: the most bytes of a micro-batch; None: those
    of the GPUs."""
    sizes = {"tp": 1, "cp": 1, "dp": args.ranks, "pp": 1}
    groups = hcp.build_process_groups(**sizes, peer_buffer_bytes=args.peer_buffer_bytes)
    try:
        trainer = Trainer(args, args.config, hcp.CostModel(), groups, device)
        rows = rows_of(args.min_tokens_per_rank, args.max_tokens_per_rank)
        by_degree = {}
        if args.ranks > 1:
            for degree in degrees_of(args.ranks):
                by_degree[degree] = most_of_ranks(
                    trainer, measure_peaks(Attention(trainer, degree), rows, None, allocated)
                )
        model = Model(trainer)
        peaks = most_of_ranks(trainer, measure_peaks(model.step, rows, model.forward, allocated))
        left = torch.tensor(room_on_gpu(args.memory_share) if room is None else room).to(device)
        dist.all_reduce(left, dist.ReduceOp.MIN, group=groups.dp_cp)
        held = groups.transport.buffer_bytes if shares(groups.transport) else 0
        foreseen = args.peer_buffer_bytes if device.type == "cuda" else 0
        limit, buffer = int(left) + held, max(held, foreseen)
        shared = fit_shared(by_degree, args.head_chunks)
        return MeasuredMemory(fit_peaks(peaks, limit, shared, buffer), by_degree, limit, buffer)
    finally:
        groups.close()


def most_of_ranks(trainer: Trainer, peaks: Sequence[Peak]) -> list[Peak]:
    """Return the peaks of the rank with the most bytes, each."""
    most = torch.tensor(peaks, device=trainer.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=trainer.groups.dp_cp)
    return [Peak(*row) for row in most.tolist()]


class Model:
    """The model's micro-batches at degree 1, with all that training holds."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.model = build_model(trainer, trainer.args.vocab_size)
        self.gradients = Gradients(self.model, trainer.groups)
        self.step(1)
        self.optimizer = build_optimizer(self.model, lr=0.0)
        self.optimizer.step()  # makes its state

    def step(self, rows: int) -> None:
        ((cp, local),) = step_of(self.trainer, Cell((rows,), 1))
        losses = forward_step(self.trainer, self.model, cp, local)
        cp.loss(losses, local.loss_mask, grad_reduce="sum").backward()  # type: ignore[no-untyped-call]

    def forward(self, rows: int) -> Tensor:
        ((cp, local),) = step_of(self.trainer, Cell((rows,), 1))
        with autocast(self.trainer):
            return self.model.hidden_states(local.tokens, cp)


class Attention:
    """One layer's attention at a degree, forward and backward."""

    def __init__(self, trainer: Trainer, degree: int) -> None:
        self.trainer, self.degree = trainer, degree

    def __call__(self, rows: int) -> None:
        args, config = self.trainer.args, self.trainer.config
        ((cp, _),) = step_of(self.trainer, Cell((rows * self.degree,), self.degree))
        size = args.hidden_size // args.num_attention_heads
        heads = (args.num_attention_heads, args.num_query_groups, args.num_query_groups)
        query, key, value = (
            torch.zeros(
                cp.rows, n, size, dtype=DTYPES[args.dtype], device=cp.device, requires_grad=True
            )
            for n in heads
        )
        out = cp.attention(
            query,
            key,
            value,
            causal=True,
            window_size=config.window(0),
            comm_type=config.comm_type(0),
        )
        torch.autograd.grad(out, (query, key, value), torch.zeros_like(out))


# ---- the report ----------------------------------------------------------------------------------


def conclude_memory(args: argparse.Namespace, measured: MeasuredMemory, device: str) -> None:
    """Write the model to the file and print a report, on rank 0. Raises ValueError for a fit that
    does not tell what was measured."""
    fit = measured.fit
    if not args.accept_errors:
        expect_close(fit, BYTES_MAX)
    columns = "degree", "rows", "bytes at peak", "bytes kept"
    points = [[1, *peak] for peak in fit.peaks]
    attention = [[d, *peak] for d, peaks in measured.by_degree.items() for peak in peaks]
    measures = {
        "memory share": args.memory_share,
        "bytes of a micro-batch": measured.room,
        "bytes of any micro-batch": fit.fixed,
        "bytes of exchange buffers": measured.buffer,
        "largest error": round(fit.largest_error, 4),
        "columns": columns,
        "points": points,
        "points of attention alone": attention,
    }
    fit.model.save(args.out, origin(args, device) | measures)
    print("\n".join(told(args, measured, device)))


def told(args: argparse.Namespace, measured: MeasuredMemory, device: str) -> Iterator[str]:
    fit, model = measured.fit, measured.fit.model
    said = {
        "activation": "a row, kept by the layers for the backward",
        "logit": "a row, in addition to that at the peak",
        "gathered": f"a token of a group of 2 to {args.ranks} ranks",
        "attention": f"a row of a group of 2 to {args.ranks} ranks",
        "limit": f"a micro-batch: {args.memory_share:.0%} of a GPU, less what is held",
    }
    yield f"{args.ranks} ranks on {device}, {args.dtype}, {args.cp_comm_type}"
    for name, of in said.items():
        yield f"  {name:11}{getattr(model, name):>16,}  bytes of {of}"
    yield f"  {'buffer':11}{model.buffer:>16,}  bytes of the limit that exchanges hold"
    yield f"  {'':11}{fit.fixed:>16,}  bytes of any micro-batch are off the limit"
    if args.ranks == 1:
        yield "  it is for plans of degree 1: larger degrees need more ranks here"
    elif model.head_chunks > 1:
        yield f"  gathered and attention are divided by up to {model.head_chunks} chunks of heads"
    rows = (model.limit - model.buffer) // (model.activation + model.logit)
    yield f"  that is {rows:,} rows of a rank at degree 1"
    yield (
        f"  largest error on {len(fit.peaks)} points of {fit.peaks[0].rows} to "
        f"{fit.peaks[-1].rows} rows: {fit.largest_error:.2%}"
    )
    yield f"wrote {args.out}"
