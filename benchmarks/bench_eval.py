"""Evaluate the same samples under each layout.

    torchrun --nproc-per-node 8 benchmarks/bench_eval.py --pp 1 2 4

A decoder's layers (attention with keys and values gathered over CP, a feed-forward layer), cut
into --pp stages, evaluate --samples sequences of --length tokens under the training layout (cp 1)
and inside hcp.eval_cp_context under every other CP size. --device chooses Gloo on CPUs or NCCL on
GPUs, and the default sizes.

All layouts do equal work: hcp.EvalPlan.finish() checks that each sample was evaluated exactly once,
and the means must agree to --tolerance, or the run ends without a figure. Layouts take turns. Times
are those of the slowest rank with the switch, medians of --rounds. "switch" is an empty context, in
and out. "predicted" is choose_eval_context_parallel with the time of a stage's layers in each
layout, measured here on all ranks at once: it adds up micro-batches, fillers and bubbles.

The prediction assumes a processor for each rank. With more ranks than cores, a rank that waits
frees its core for the others, so that bubbles and fillers cost less than predicted: then nothing is
predicted.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from common.flags import end_after, parser_of
from common.machine import hardware
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

import hcp
from hcp.tools.choose import EvalChoice, choose_eval_context_parallel

# T tokens on this rank, W width, H heads

DEFAULTS = {
    "cpu": {"samples": 4, "length": 1024, "hidden": 128, "heads": 4, "layers": 4},
    "cuda": {"samples": 12, "length": 8192, "hidden": 4096, "heads": 32, "layers": 8},
}


class Layer(nn.Module):
    def __init__(self, pgs: hcp.ProcessGroups, hidden: int, heads: int) -> None:
        super().__init__()
        self.cp_group, self.cp_size, self.cp_rank = pgs.cp, pgs.size("cp"), pgs.rank("cp")
        self.heads = heads
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.qkv(x).split((x.shape[1], 2 * x.shape[1]), dim=1)
        x = x + self.proj(self.attend(q, self.gather(kv)))
        return x + self.down(nn.functional.gelu(self.up(x)))

    def gather(self, kv: Tensor) -> Tensor:
        """Gather all keys and values, in order: rank j has chunks j and 2 cp - 1 - j."""
        if self.cp_size == 1:
            return kv
        gathered = kv.new_empty(self.cp_size * len(kv), kv.shape[1])
        parts = list(gathered.chunk(self.cp_size))
        dist.all_gather(parts, kv.contiguous(), group=self.cp_group)
        halves = [part.chunk(2) for part in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)])

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """Compute each chunk of queries against the keys before the chunk's end only."""
        q, k, v = (x.unflatten(1, (self.heads, -1)).transpose(0, 1) for x in (q, *kv.chunk(2, 1)))
        size = k.shape[1] // (2 * self.cp_size)
        outs = []
        for part, chunk in zip(q.chunk(2, 1), chunks_of(self.cp_rank, self.cp_size), strict=True):
            end = (chunk + 1) * size
            mask = causal_lower_right(size, end)
            outs.append(
                nn.functional.scaled_dot_product_attention(
                    part[None], k[None, :, :end], v[None, :, :end], attn_mask=mask
                )[0]
            )
        return torch.cat(outs, 1).transpose(0, 1).flatten(1)


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


class Stage(nn.Module):
    def __init__(self, pgs: hcp.ProcessGroups, args: argparse.Namespace) -> None:
        super().__init__()
        self.pg_collection = pgs
        self.sent: tuple[dist.Work | None, Tensor] | None = None
        """The send that is on its way to the next stage. If nobody kept it, it would not arrive."""
        torch.manual_seed(1 + pgs.rank("pp"))
        self.layers = nn.ModuleList(
            Layer(pgs, args.hidden, args.heads) for _ in range(args.layers // pgs.size("pp"))
        )

    def own_rows(self, sample: Tensor) -> Tensor:
        pgs = self.pg_collection
        chunks = sample.chunk(2 * pgs.size("cp"))
        return torch.cat([chunks[i] for i in chunks_of(pgs.rank("cp"), pgs.size("cp"))])

    def forward(self, sample: Tensor) -> Tensor | None:
        """Run one stage, and send its rows to the next. In the last stage, return one value for
        each token."""
        pgs = self.pg_collection
        stage, stages = pgs.rank("pp"), pgs.size("pp")
        x = self.own_rows(sample)
        if stage > 0:
            dist.recv(x, pgs.ranks("pp")[stage - 1], group=pgs.pp)
        x = self.compute(x)
        if stage + 1 == stages:
            return x.float().square().mean(1)
        self.flush()
        self.sent = dist.isend(x, pgs.ranks("pp")[stage + 1], group=pgs.pp), x
        return None

    def compute(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def flush(self) -> None:
        if self.sent is not None and self.sent[0] is not None:
            self.sent[0].wait()
        self.sent = None


@torch.no_grad()
def evaluate(model: Stage, dataset: list[Tensor]) -> float:
    pgs = model.pg_collection
    plan, metrics = hcp.EvalPlan(len(dataset), pgs), hcp.Metrics(pgs)
    for batch in plan.batches(dataset, check_siblings=False):
        values = model(batch.samples[0])
        if values is not None:
            metrics.add("mean", values, batch.weights[0].to(values).expand_as(values))
    model.flush()
    assert plan.finish() == len(dataset)
    return metrics.reduce()["mean"].mean


# ---- timing --------------------------------------------------------------------------------------


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the slowest rank."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Times:
    """The times of one layout, in seconds."""

    evaluation: list[float] = field(default_factory=list)
    switch: list[float] = field(default_factory=list)
    sample: list[float] = field(default_factory=list)
    """The times of one sample in one stage, without its neighbours."""


@torch.no_grad()
def measure(
    args: argparse.Namespace,
    model: Stage,
    layouts: dict[int, hcp.ProcessGroups],
    dataset: list[Tensor],
) -> dict[int, Times]:
    """Measure the layouts in turns. The first turn warms up. Raises if results disagree."""
    train, device = layouts[1], dataset[0].device
    times = {cp: Times() for cp in layouts}
    means: dict[int, float] = {}

    def context(cp: int) -> AbstractContextManager[hcp.ProcessGroups]:
        return hcp.eval_cp_context(model, train, layouts[cp])

    def switch(cp: int) -> None:
        with context(cp):
            pass

    def run(cp: int) -> None:
        with context(cp):
            means[cp] = evaluate(model, dataset)

    for turn in range(args.rounds + 1):
        for cp, found in times.items():
            seconds = timed(partial(run, cp), device)
            with context(cp):
                rows = model.own_rows(dataset[0])
                sample = timed(partial(model.compute, rows), device)
            if turn:
                found.evaluation.append(seconds)
                found.sample.append(sample)
                found.switch.append(timed(partial(switch, cp), device))
            difference = abs(means[cp] / means[1] - 1)
            if difference > args.tolerance:
                raise AssertionError(f"cp {cp} has {means[cp]}, expected cp 1's {means[1]}")
    return times


def predict(
    args: argparse.Namespace, times: dict[int, Times], ranks: int, pp: int, device: str
) -> EvalChoice:
    """Return the choice of choose_eval_context_parallel, by rank 0's times on all ranks."""
    stage = torch.tensor([statistics.median(t.sample) for t in times.values()], device=device)
    dist.broadcast(stage, 0)
    seconds = dict(zip(times, (stage * pp).tolist(), strict=True))
    cost = hcp.CostModel.from_function(lambda _, degree: seconds[degree])
    return choose_eval_context_parallel(
        args.samples,
        args.length,
        ranks=ranks,
        train_cp=1,
        cost=cost.tabulated([args.length], seconds),
        pipeline_stages=pp,
        sizes=list(times),
    )


# ---- the run -------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, devices=("auto", "cpu", "cuda"), device="auto", rounds=5)
    parser.add_argument("--pp", type=int, nargs="+", default=[1], help="pipelines, one after other")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--length", type=int, help="tokens of each sample")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--layers", type=int, help="of the whole model")
    parser.add_argument("--tolerance", type=float, help="of means: 1e-6, or 1e-3 in bfloat16")
    args = parser.parse_args()
    gpus, wanted = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if args.device == "auto":
        args.device = "cuda" if gpus >= wanted else "cpu"
    if args.device == "cuda" and gpus < wanted:
        parser.error(f"--device cuda: {wanted} ranks on this machine > {gpus} GPUs")
    defaults = {**DEFAULTS[args.device], "tolerance": 1e-3 if args.device == "cuda" else 1e-6}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def start(args: argparse.Namespace) -> torch.device:
    if args.device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> None:
    args = parse_args()
    end_after(args.deadline)
    device = start(args)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)
    dataset = [
        torch.randn(args.length, args.hidden, generator=generator).to(device, dtype)
        for _ in range(args.samples)
    ]
    for pp in args.pp:
        train = hcp.build_process_groups(pp=pp)
        ranks = train.size("dp_cp")
        sizes = [d for d in range(1, ranks + 1) if ranks % d == 0 and args.length % (2 * d) == 0]
        layouts = {1: train, **{cp: train.with_context_parallel(cp) for cp in sizes if cp > 1}}
        for pgs in layouts.values():
            pgs.warm_up()
        model = Stage(train, args).to(device, dtype)
        times = measure(args, model, layouts, dataset)
        choice = predict(args, times, ranks, pp, args.device)
        if dist.get_rank() == 0:
            report(args, times, choice, pp)
        for pgs in reversed(layouts.values()):
            pgs.close()
    dist.destroy_process_group()


def report(args: argparse.Namespace, times: dict[int, Times], choice: EvalChoice, pp: int) -> None:
    predicts = args.device == "cuda" or dist.get_world_size() <= (os.cpu_count() or 1)
    print(
        f"\n{dist.get_world_size()} ranks on {hardware(args.device)}, pp {pp}, {args.samples} "
        f"samples of {args.length} tokens, {args.layers} layers of {args.hidden}, python "
        f"{platform.python_version()}, torch {torch.__version__}\n"
    )
    print(
        "| pp | cp | micro-batches | fillers | ms, median (min-max) | predicted ms | measured | "
        "predicted | switch ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    medians = {cp: statistics.median(t.evaluation) for cp, t in times.items()}
    base = next(c for c in choice.candidates if c.cp == 1)
    for c in choice.candidates:
        seconds = times[c.cp].evaluation
        predicted = f"{c.time / 1e6:.1f}", f"{c.time / base.time:.2f}"
        row: dict[str, object] = {
            "pp": pp,
            "cp": c.cp,
            "micro-batches": c.micro_batches,
            "fillers": c.fillers,
        }
        row |= {
            "ms": 1e3 * medians[c.cp],
            "ms min": 1e3 * min(seconds),
            "ms max": 1e3 * max(seconds),
        }
        row |= {"measured": medians[c.cp] / medians[1]}
        row |= {"switch ms": 1e3 * statistics.median(times[c.cp].switch)}
        if predicts:
            row |= {"predicted ms": c.time / 1e6, "predicted": c.time / base.time}
        args.json.add(row)
        ms, ratio = predicted if predicts else ("-", "-")
        print(
            f"| {pp} | {c.cp} | {c.micro_batches} | {c.fillers} | {1e3 * medians[c.cp]:.1f} "
            f"({1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f}) | {ms} | "
            f"{medians[c.cp] / medians[1]:.2f} | {ratio} | "
            f"{1e3 * statistics.median(times[c.cp].switch):.2f} |"
        )
    if not predicts:
        print("\nNothing is predicted: there are more ranks than cores, and ranks lend cores.")
        return
    best = min(medians, key=medians.__getitem__)
    behind = medians[choice.cp] / medians[best] - 1
    print(
        f"\nchosen: cp {choice.cp}; fastest: cp {best}; the choice is {behind:.1%} slower than the "
        f"fastest: {'within' if behind <= 0.05 else 'NOT WITHIN'} 5%"
    )


if __name__ == "__main__":
    main()
