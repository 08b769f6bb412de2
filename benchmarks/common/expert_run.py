"""The measured half of bench_experts.py: contestants' steps of a small GPT with experts.

Megatron-Core's layers, by the model of hcp's Megatron program.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

import hcp
from common.batches import sample
from common.expert_case import describe, drawn, fixed_degree, plans_of, print_table
from common.timing import by_turns, device_name, end_ranks, start_ranks, timed
from hcp.integrations import megatron as hcp_megatron
from hcp.integrations.megatron.data import MicroBatches
from hcp.integrations.megatron.program import pretraining
from hcp.integrations.megatron.program.program_arguments import parse_args

TIMEOUT = timedelta(seconds=120)
TOLERANCES = {torch.bfloat16: (2**-8, 0.2), torch.float32: (1e-5, 1e-3)}
"""Relative tolerances of a loss and of gradients."""
BALANCED: dict[str, Any] = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    "moe_router_dtype": "fp32",
}
Measured = dict[str, MicroBatches]


def measure(args: argparse.Namespace) -> int:
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    on_cpu = hcp_megatron.megatron_on_cpu if device.type == "cpu" else contextlib.nullcontext
    with on_cpu():
        job = pretraining.start_job(program(args), device)
        config = pretraining.transformer_config(job.args, **BALANCED)
        model = pretraining.build_model(job, config)
        tell(
            f"{dist.get_world_size()} x {device_name(device)}, torch {torch.__version__}, "
            f"Megatron-Core, hcp {hcp.__version__}; {args.num_layers} layers of "
            f"{args.hidden_size}, {args.num_experts} experts, {args.moe_router_topk} for a token"
        )
        for tail in args.tail:
            compare(args, job, model, tail)
        parallel_state.destroy_model_parallel()
    end_ranks()
    return 0


def program(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options of hcp's Megatron program for this model."""
    named = {
        "num-layers": args.num_layers,
        "hidden-size": args.hidden_size,
        "num-attention-heads": args.num_attention_heads,
        "num-query-groups": args.num_query_groups,
        "num-experts": args.num_experts,
        "moe-router-topk": args.moe_router_topk,
        "moe-ffn-hidden-size": args.moe_ffn_hidden_size,
        "ffn-hidden-size": args.moe_router_topk * args.moe_ffn_hidden_size,
        "expert-model-parallel-size": args.expert_ranks,
        "max-length": 4 * args.max_tokens_per_rank,
        "max-seqlen-per-dp-cp-rank": 4 * args.max_tokens_per_rank,
        "seed": args.seed,
        "device": args.device,
    }
    flags = [part for name, value in named.items() for part in (f"--{name}", str(value))]
    return parse_args([*flags, *(["--bf16"] if args.device == "cuda" else [])])


def compare(args: argparse.Namespace, job: Any, model: list[Any], tail: float) -> None:
    batches = [drawn(args, tail, batch) for batch in range(args.batches)]
    degree = fixed_degree(args, batches)
    seconds: dict[str, float] = {}
    counts: dict[str, float] = {}
    for number, lengths in enumerate(batches):
        plans = plans_of(args, lengths, job.cost, degree)
        steps = {name: dispatched(job, plan, number) for name, plan in plans.items()}
        check(job, model, steps)
        times = by_turns(
            {name: partial(run_step, job, model, step) for name, step in steps.items()},
            job.device,
            lambda run: timed(run, job.device),
            args.rounds,
            warm=True,
        )
        for name, step in steps.items():
            seconds[name] = seconds.get(name, 0.0) + times[name]
            counts[name] = counts.get(name, 0.0) + len(step) / len(batches)
    if dist.get_rank() == 0:
        print(f"\n{describe(args, tail, batches)}")
        print_table(args, sum(map(sum, batches)), seconds, counts)


def dispatched(job: Any, plan: hcp.Plan, batch: int) -> MicroBatches:
    """Return the micro-batches of a plan. Rank i mod N loads sequence i."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sources = [i % ranks for i in range(len(plan.lengths))]
    mine = [
        sample(plan.lengths[i], plan.lengths[i], batch * 2**20 + i, job.device)
        for i in range(rank, len(plan.lengths), ranks)
    ]
    return MicroBatches(hcp.dispatch(plan, mine, sources, job.groups))


def run_step(job: Any, model: list[Any], step: MicroBatches) -> tuple[float, int]:
    """Compute the losses and gradients of a batch. Return (mean loss, tokens)."""
    for chunk in model:
        chunk.zero_grad_buffer()
    reports = pretraining.run_schedule(job, model, step, forward_only=False)
    return hcp_megatron.mean_loss(reports, job.groups.dp_cp, job.device)


def check(job: Any, model: list[Any], steps: Measured) -> None:
    """Run each contestant once. End the run where a loss, or the gradients on any rank, are off by
    more than rounding from the first's."""
    dtype = torch.bfloat16 if job.args.bf16 else torch.float32
    most_loss, most_distance = TOLERANCES[dtype]
    (first, expected), *others = ((name, found(job, model, step)) for name, step in steps.items())
    for name, (loss, gradients) in others:
        off = abs(loss - expected[0]) / expected[0]
        pair = torch.stack([(gradients - expected[1]).square().sum(), expected[1].square().sum()])
        dist.all_reduce(pair)
        distance = float((pair[0] / pair[1]).sqrt())
        if not (off <= most_loss and distance <= most_distance):
            raise SystemExit(
                f"{name}: loss {loss:.6f} and gradients at a distance of {distance:.2g}, expected "
                f"{expected[0]:.6f} of {first!r} and at most {most_distance:g}"
            )


def found(job: Any, model: Sequence[Any], step: MicroBatches) -> tuple[float, Tensor]:
    loss, _ = run_step(job, list(model), step)
    parts = [p.main_grad.float().flatten() for chunk in model for p in chunk.parameters()]
    return loss, torch.cat(parts)


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
