"""Time training steps of one GPT under several plans of the same global batches.

    torchrun --nproc-per-node 8 benchmarks/bench_train.py [--families P1 P2 P3 P4]
    torchrun --nproc-per-node 2 benchmarks/bench_train.py --device cpu

    dynamic       hcp.plan: each sequence has its own degree
    static        hcp.plan at one degree, the smallest that holds the longest sequence of the run
    wave greedy   Megatron's dynamic scheduler, re-implemented in benchmarks/peers/planners.py
    ring          today's usual scheme, re-implemented: the degree of `static`, sequences packed in
                  their order, each padded and split over the ranks, ring attention as in
                  benchmarks/peers/ring.py over torch's point-to-point calls

All but `ring`'s attention runs on hcp's engine. A step is forward, backward and one sum of all
gradients. The optimizer is left out, since its work is equal for all. So are planning and the
dispatch of rows, which a loader does ahead. Families are those of benchmarks/common/families.py,
with sequences up to --tokens per batch, each cut to the rows of all ranks.

Losses and gradients of each contestant are compared with those of `dynamic`, on every batch. The
run ends if a loss is off by more than rounding, or if gradients of the attention's weights point in
another direction. Columns: tokens per second; time / dynamic's, measured and by the plans'
makespans; measured / predicted time; the gradients' relative distance. The prices are fitted in
the run, to micro-batches of degrees 1 to all, unless --cost names a file of `python -m hcp
calibrate` for this model. A time is that of the slowest rank, summed over batches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common.batches import drawn, sample
from common.families import BY_NAME, Family
from common.flags import parser_of
from common.timing import by_turns, device_name, end_ranks, slowest, start_ranks, timed
from peers.planners import next_fit_at, plan_of, static_degree, wave_greedy
from peers.ring import OnRing, padded
from torch import Tensor, nn

import hcp
from hcp._words import CommType
from hcp.cli.calibrate import Cell
from hcp.cli.fit import Point, fit
from hcp.cli.measure import step_of
from hcp.demo.gpt_model import Attention, GPTModel, RotaryEmbedding
from hcp.demo.training import Gradients, Trainer
from hcp.planning.cost import PRICES
from hcp.step.config import Config

FULL = {
    "num_layers": 18,
    "hidden_size": 2048,
    "ffn_hidden_size": 7168,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "max_tokens_per_rank": 8192,
    "tokens": 524_288,
}
TINY = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "max_tokens_per_rank": 512,
    "tokens": 4096,
}
TOLERANCES = {torch.bfloat16: (2**-8, 0.2), torch.float32: (1e-5, 1e-3)}
"""Relative tolerances of a loss and of gradients."""
TIMEOUT = timedelta(seconds=60)
ROUNDS = 2
"""Rounds of the calibration."""
Batches = Iterable[tuple[Any, Any]]
"""A handler, or its stand-in, and the local rows of each micro-batch."""


@dataclass(frozen=True)
class Job:
    """State that all functions share."""

    args: argparse.Namespace
    device: torch.device
    groups: hcp.ProcessGroups
    """Groups whose transport hcp chooses."""
    pairs: hcp.ProcessGroups
    """Groups that exchange rows by torch's point-to-point calls."""
    model: nn.Module
    gradients: Gradients

    @property
    def ranks(self) -> int:
        return dist.get_world_size()


def main() -> int:
    begun = time.perf_counter()
    args = arguments()
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    with (
        closing(hcp.build_process_groups(timeout=TIMEOUT)) as groups,
        closing(hcp.build_process_groups(timeout=TIMEOUT, transport="torch")) as pairs,
    ):
        model = build_model(args, groups, device)
        job = Job(args, device, groups, pairs, model, Gradients(model, groups))
        cost = hcp.CostModel.load(args.cost) if args.cost else calibrated(job)
        print_head(job, cost, time.perf_counter() - begun)
        for name in args.families:
            if slowest(time.perf_counter() - begun, device) > args.seconds:
                tell(f"{name}: left out, the run has taken more than --seconds {args.seconds:g}")
                continue
            compare(job, BY_NAME[name], cost)
        tell(f"\n{time.perf_counter() - begun:.0f} s in all")
    end_ranks()
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=1, deadline=150)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["P1", "P2"])
    parser.add_argument("--batches", type=int, default=2, help="global batches of a family (2)")
    parser.add_argument("--cp-comm-type", default="all_gather", help="but ring's (all_gather)")
    parser.add_argument("--cost", metavar="FILE", help="prices of this model (fitted in the run)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=75, help="start no family later (75)")
    for name, size in FULL.items():
        says = f"({size}; {TINY[name]} on the CPU)"
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=says)
    args = parser.parse_args()
    for name, size in (FULL if args.device == "cuda" else TINY).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected >= 1")
    args.untie_embeddings_and_output_weights = False
    args.config = Config(args.max_tokens_per_rank, cp_comm_type=args.cp_comm_type)
    return args


FAMILIES = ("P1", "P2", "P3", "P4")


# ---- the model -----------------------------------------------------------------------------------


class WideRotary(RotaryEmbedding):
    """Rotary angles in float32, for weights of any dtype. bfloat16 is too coarse for positions."""

    def forward(self, positions: int, like: Tensor) -> Tensor:
        return super().forward(positions, like.new_empty(0, dtype=torch.float32))


def build_model(
    args: argparse.Namespace, groups: hcp.ProcessGroups, device: torch.device
) -> nn.Module:
    """Build the demo's GPT in bfloat16 (on the CPU float32), with equal weights on all ranks.
    Layers use the comm type that a micro-batch's handler names first."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GPTModel(args, groups)
    model.rotary_pos_emb = WideRotary(args.hidden_size // args.num_attention_heads)
    for module in model.modules():
        if isinstance(module, Attention):
            module.comm_type = None
    return model.bfloat16() if device.type == "cuda" else model


def run_micro_batches(job: Job, step: Batches) -> Tensor:
    """Run forward and backward. Return this rank's share of the mean loss."""
    total = torch.zeros((), dtype=torch.float64, device=job.device)
    for cp, local in step:
        logits = job.model(local.tokens, cp).float()
        losses = F.cross_entropy(logits, local.labels, reduction="none")
        loss = cp.loss(losses, local.loss_mask, grad_reduce="sum")
        loss.backward()
        total += loss.detach()
    return total


def run_step(job: Job, step: Batches) -> Tensor:
    job.gradients.zero()
    share = run_micro_batches(job, step)
    job.gradients.reduce()
    return share


# ---- prices --------------------------------------------------------------------------------------


def calibrated(job: Job) -> hcp.CostModel:
    """Fit prices on rank 0, to micro-batches of few and many rows, of one and of several sequences,
    at degrees 1 to all."""
    ranks, rows = job.ranks, job.args.max_tokens_per_rank
    degrees = [d for d in (1, 2, 4, 8, 16, 32) if d < ranks] + [ranks]
    cells = [
        Cell((size * degree // parts,) * parts, degree)
        for degree in degrees
        for size, parts in ((rows, 1), (rows, 4), (rows, 16), (rows // 4, 1))
        if ranks % degree == 0
    ]
    trainer = Trainer(job.args, job.args.config, hcp.CostModel(), job.groups, job.device)
    steps = {str(i): step_of(trainer, cell) for i, cell in enumerate(cells)}
    job.gradients.zero()
    times = by_turns(
        {name: partial(run_micro_batches, job, step) for name, step in steps.items()},
        job.device,
        lambda run: timed(run, job.device),
        ROUNDS,
    )
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        points = [
            Point(cell.lengths, cell.degree, False, times[str(i)]) for i, cell in enumerate(cells)
        ]
        result = fit(points, job.args.cp_comm_type)
        errors = result.errors(points)
        print(
            f"prices from {len(points)} micro-batches, of which the fit is off by "
            f"{errors[len(errors) // 2]:.1%} (median), {errors[-1]:.1%} (most)"
        )
        found = [result.cost]
    dist.broadcast_object_list(found, src=0)
    cost: hcp.CostModel = found[0]
    return cost


# ---- contestants ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contestant:
    name: str
    plan: hcp.Plan
    groups: hcp.ProcessGroups
    comm_type: CommType
    on_ring: bool = False


@dataclass
class Totals:
    """The times of one contestant, over batches."""

    seconds: float = 0.0
    makespan: int = 0
    micro_batches: int = 0
    distance: float = 0.0


def compare(job: Job, family: Family, cost: hcp.CostModel) -> None:
    capacity = min(family.capacity, job.args.max_tokens_per_rank) // 2 * 2
    batches = list(
        drawn(
            family,
            ranks=job.ranks,
            capacity=capacity,
            tokens=job.args.tokens,
            batches=job.args.batches,
            seed=job.args.seed,
        )
    )
    longest = max(max(batch) for batch in batches)
    degree = static_degree([longest], job.ranks, capacity)
    totals: dict[str, Totals] = {}
    for number, lengths in enumerate(batches):
        contestants = list(plans(job, lengths, capacity, degree, cost))
        steps = {c.name: dispatched(job, c, lengths, number) for c in contestants}
        distances = distances_of(job, family, steps)
        times = by_turns(
            {name: partial(run_step, job, step) for name, step in steps.items()},
            job.device,
            lambda run: timed(run, job.device),
            job.args.rounds,
            warm=True,
        )
        for c in contestants:
            total = totals.setdefault(c.name, Totals())
            total.seconds += times[c.name]
            total.makespan += c.plan.makespan
            total.micro_batches += len(c.plan.micro_batches)
            total.distance = max(total.distance, distances[c.name])
    reduce = slowest(timed(job.gradients.reduce, job.device), job.device) * len(batches)
    tokens = sum(map(sum, batches))
    sizes = f"{len(batches)} batches, {sum(map(len, batches))} sequences, {tokens} tokens"
    tell(f"\n{family.name}  {family.says}: {sizes}; {capacity} rows a rank, static degree {degree}")
    print_table(job, family, totals, tokens, reduce, cost)


def plans(
    job: Job, lengths: list[int], capacity: int, degree: int, cost: hcp.CostModel
) -> Iterator[Contestant]:
    request: dict[str, Any] = {"ranks": job.ranks, "max_tokens_per_rank": capacity, "cost": cost}
    comm_type = job.args.cp_comm_type
    yield Contestant("dynamic", hcp.plan(lengths, **request), job.groups, comm_type)
    static = hcp.plan(lengths, **request, min_degree=degree, max_degree=degree)
    yield Contestant("static", static, job.groups, comm_type)
    if job.ranks & (job.ranks - 1) == 0:
        greedy = plan_of(wave_greedy(lengths, job.ranks, capacity, cost), lengths, request)
        yield Contestant("wave greedy", greedy, job.groups, comm_type)
    split = [padded(length, degree) for length in lengths]
    in_order = plan_of(next_fit_at(degree, split, job.ranks, capacity), split, request)
    yield Contestant("ring", in_order, job.pairs, "p2p", on_ring=True)


def dispatched(job: Job, contestant: Contestant, lengths: list[int], batch: int) -> Batches:
    """Return a contestant's step. Sequence i has equal tokens for all; rank i mod N loads it."""
    sources = [i % job.ranks for i in range(len(lengths))]
    mine = [
        sample(lengths[i], contestant.plan.lengths[i], batch * 2**20 + i, job.device)
        for i in range(dist.get_rank(), len(lengths), job.ranks)
    ]
    step = hcp.dispatch(
        contestant.plan, mine, sources, contestant.groups, comm_types=(contestant.comm_type,)
    )
    if not contestant.on_ring:
        return step
    dtype = next(job.model.parameters()).dtype
    return [(OnRing(cp, dtype), local) for cp, local in step]


def distances_of(job: Job, family: Family, steps: dict[str, Batches]) -> dict[str, float]:
    """Return the relative distance of each contestant's gradients of the attention's weights from
    those of the first. Losses must also agree. This first run of each step is not timed."""
    dtype = next(job.model.parameters()).dtype
    most_loss, most_distance = TOLERANCES[dtype]
    losses: dict[str, float] = {}
    distances: dict[str, float] = {}
    first: Tensor | None = None
    for name, step in steps.items():
        loss = run_step(job, step)
        dist.all_reduce(loss)
        losses[name] = loss.item()
        weights = attention_gradients(job.model)
        first = weights if first is None else first
        distances[name] = float((weights - first).norm() / first.norm())
        expected = next(iter(losses.values()))
        if not abs(losses[name] / expected - 1) <= most_loss:
            raise SystemExit(
                f"{family.name}: the loss of {name} is {losses[name]}, expected {expected} within "
                f"{most_loss:.1e}"
            )
        if not distances[name] <= most_distance:
            raise SystemExit(
                f"{family.name}: gradients of {name} are off by {distances[name]:.3f}, expected "
                f"<= {most_distance}"
            )
    return distances


def attention_gradients(model: nn.Module) -> Tensor:
    grads = (p.grad for name, p in model.named_parameters() if "linear_qkv" in name)
    return torch.cat([grad.float().flatten() for grad in grads if grad is not None])


# ---- the report ----------------------------------------------------------------------------------


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def print_head(job: Job, cost: hcp.CostModel, seconds: float) -> None:
    args = job.args
    prices = zip(PRICES, cost.prices, strict=True)
    parameters = sum(p.numel() for p in job.model.parameters())
    dtype = str(next(job.model.parameters()).dtype).removeprefix("torch.")
    tell(
        f"{job.ranks} x {device_name(job.device)}, torch {torch.__version__}, hcp {hcp.__version__}"
        f"\n{parameters / 1e6:.1f} M parameters in {dtype}, heads {args.num_attention_heads}:"
        f"{args.num_query_groups}; {args.cp_comm_type} by {job.groups.transport.name}, ring by "
        f"{job.pairs.transport.name}; ready after {seconds:.0f} s\n"
        + "  ".join(f"{name} {price}" for name, price in prices if price),
    )


def print_table(
    job: Job,
    family: Family,
    totals: dict[str, Totals],
    tokens: int,
    reduce: float,
    cost: hcp.CostModel,
) -> None:
    tell(
        f"{'':12} {'micro-batches':>13} {'tokens/s':>9} {'/ dynamic':>10} {'predicted':>10} "
        f"{'s/predicted':>12} {'gradients off':>14}"
    )
    dynamic = totals["dynamic"]
    predicted = {name: t.makespan * (cost.unit or 0) + reduce for name, t in totals.items()}
    for name, total in totals.items():
        known = name != "ring"  # whose exchange has other prices
        ratio = predicted[name] / predicted["dynamic"]
        tell(
            f"{name:12} {total.micro_batches:13} {tokens / total.seconds:9.0f} "
            f"{total.seconds / dynamic.seconds:9.2f}x "
            + (
                f"{ratio:9.2f}x {total.seconds / predicted[name]:12.2f}"
                if known
                else f"{'-':>10} {'-':>12}"
            )
            + f" {total.distance:14.1e}"
        )
        row = {"family": family.name, "plan": name, "micro-batches": total.micro_batches}
        row |= {"tokens/s": tokens / total.seconds, "/ dynamic": total.seconds / dynamic.seconds}
        if known:
            row |= {"predicted": ratio, "s/predicted": total.seconds / predicted[name]}
        if dist.get_rank() == 0:
            job.args.json.add(row | {"gradients off": total.distance})


if __name__ == "__main__":
    sys.exit(main())
