"""The same samples under each layout: torchrun --nproc-per-node 4 benchmarks/bench_eval.py

A decoder's layers (attention with keys and values gathered over CP, a feed-forward layer), cut
into --pp stages, evaluate --samples sequences of --length tokens under the training layout (cp 1)
and inside hcp.eval_cp_context under every other CP size. Gloo on CPUs, NCCL where each rank has a
GPU.

Equal work: hcp.EvalPlan.finish() counts that each sample was evaluated exactly once in every
layout, and the means agree to 1e-6, or there is no figure. Layouts take turns; times are medians of
--rounds, of the slowest rank, the switch included. "predicted" is hcp.choose_eval_context_parallel
with prices measured here (one layer's two halves and one exchange), each as a ratio to cp 1.

The prediction takes each rank to have a processor of its own. With more ranks than cores, a rank
that waits lends its core to the others, and neither bubbles nor fillers cost what is predicted.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hcp

# T tokens on this rank, H hidden size


class Layer(nn.Module):
    def __init__(self, pgs: hcp.ProcessGroups, hidden: int) -> None:
        super().__init__()
        self.cp_group, self.cp_size, self.cp_rank = pgs.cp, pgs.size("cp"), pgs.rank("cp")
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.qkv(x).split((x.shape[1], 2 * x.shape[1]), dim=1)
        x = x + self.proj(self.attend(q, self.gather(kv)))
        return x + self.down(nn.functional.gelu(self.up(x)))

    def gather(self, kv: Tensor) -> Tensor:
        """Keys and values of the whole sequence, in its order: rank j has chunks j and 2 cp-1-j."""
        if self.cp_size == 1:
            return kv
        parts = [torch.empty_like(kv) for _ in range(self.cp_size)]
        dist.all_gather(parts, kv.contiguous(), group=self.cp_group)
        halves = [part.chunk(2) for part in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)])

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """Each chunk of queries sees what stands before its end, and no more work is done."""
        k, v = kv.chunk(2, dim=1)
        size = len(kv) // (2 * self.cp_size)
        chunks = (self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank)
        outs = []
        for part, chunk in zip(q.chunk(2), chunks, strict=True):
            end = (chunk + 1) * size
            hidden = torch.ones(size, end, dtype=torch.bool, device=q.device).triu(end - size + 1)
            scores = part @ k[:end].T / q.shape[1] ** 0.5
            outs.append(scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v[:end])
        return torch.cat(outs)


class Stage(nn.Module):
    def __init__(self, pgs: hcp.ProcessGroups, args: argparse.Namespace) -> None:
        super().__init__()
        self.pg_collection, self.hidden = pgs, args.hidden
        self.sent: tuple[object, Tensor] | None = None
        """What is on its way to the next stage: dropped, it would never arrive."""
        torch.manual_seed(1 + pgs.rank("pp"))
        self.layers = nn.ModuleList(
            Layer(pgs, args.hidden) for _ in range(args.layers // pgs.size("pp"))
        )

    def forward(self, sample: Tensor) -> Tensor | None:
        """Values of the last stage, after what came from the stage before went through."""
        pgs = self.pg_collection
        stage, stages, cp = pgs.rank("pp"), pgs.size("pp"), pgs.size("cp")
        chunks = sample.chunk(2 * cp)
        x = torch.cat([chunks[pgs.rank("cp")], chunks[2 * cp - 1 - pgs.rank("cp")]])
        if stage > 0:
            dist.recv(x, pgs.ranks("pp")[stage - 1], group=pgs.pp)
        for layer in self.layers:
            x = layer(x)
        if stage + 1 < stages:
            if self.sent is not None:
                self.sent[0].wait()  # type: ignore[attr-defined]
            self.sent = dist.isend(x, pgs.ranks("pp")[stage + 1], group=pgs.pp), x
            return None
        return x


@torch.no_grad()
def evaluate(model: Stage, dataset: list[Tensor]) -> float:
    pgs = model.pg_collection
    plan, metrics = hcp.EvalPlan(len(dataset), pgs), hcp.Metrics(pgs)
    for batch in plan.batches(dataset, check_siblings=False):
        values = model(batch.samples[0])
        if values is not None:
            metrics.add("mean", values, batch.weights[0].to(values).expand_as(values))
    if model.sent is not None:
        model.sent[0].wait()  # type: ignore[attr-defined]
        model.sent = None
    assert plan.finish() == len(dataset)
    return metrics.reduce()["mean"].mean


def timed(function) -> float:
    dist.barrier()
    start = time.perf_counter()
    function()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


@torch.no_grad()
def prices(model: Stage, args: argparse.Namespace, pgs: hcp.ProcessGroups) -> hcp.CostModel:
    """Nanoseconds of all layers, from one layer alone on every rank at once."""
    layer, n, layers = model.layers[0], args.length, args.layers
    x = torch.randn(n, args.hidden)
    q, kv = layer.qkv(x).split((args.hidden, 2 * args.hidden), dim=1)
    attend = statistics.median(timed(lambda: layer.attend(q, kv)) for _ in range(5))
    whole = statistics.median(timed(lambda: layer(x)) for _ in range(5))
    parts = [torch.empty_like(kv) for _ in range(pgs.size("dp_cp"))]
    exchange = statistics.median(
        timed(lambda: dist.all_gather(parts, kv, group=pgs.dp_cp)) for _ in range(5)
    )
    received = n * max(1, len(parts) - 1)
    measured = torch.tensor(
        [
            attend * layers * 1e9 / (n * (n + 1) / 2),
            (whole - attend) * layers * 1e9 / n,
            exchange * layers * 1e9 / received,
        ]
    )
    dist.broadcast(measured, 0)
    pair, token, exchange = (max(1, round(1000 * t)) for t in measured.tolist())
    return hcp.CostModel(pair=pair, token=token, exchange=exchange, launch=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpus else "gloo")
    train = hcp.build_process_groups(pp=args.pp)
    ranks = train.size("dp_cp")
    sizes = [d for d in range(1, ranks + 1) if ranks % d == 0 and args.length % (2 * d) == 0]
    layouts = {cp: train.with_context_parallel(cp) for cp in sizes}
    for pgs in layouts.values():
        pgs.warm_up()
    model = Stage(train, args)
    generator = torch.Generator().manual_seed(1)
    dataset = [
        torch.randn(args.length, args.hidden, generator=generator, device="cpu").to(
            torch.get_default_device()
        )
        for _ in range(args.samples)
    ]
    means: dict[int, float] = {}

    def run(cp: int) -> None:
        with hcp.eval_cp_context(model, train, layouts[cp]):
            means[cp] = evaluate(model, dataset)

    times: dict[int, list[float]] = {cp: [] for cp in sizes}
    for turn in range(args.rounds + 1):
        for cp in sizes:
            seconds = timed(lambda cp=cp: run(cp))
            if turn:
                times[cp].append(seconds)
            assert abs(means[cp] - means[1]) <= 1e-6 * max(1.0, abs(means[1])), means
    choice = hcp.choose_eval_context_parallel(
        args.samples,
        args.length,
        ranks=ranks,
        train_cp=1,
        cost=prices(model, args, train),
        pipeline_stages=args.pp,
    )
    if dist.get_rank() == 0:
        report(args, times, choice, ranks)
    dist.destroy_process_group()


def report(
    args: argparse.Namespace,
    times: dict[int, list[float]],
    choice: hcp.EvalChoice,
    ranks: int,
) -> None:
    print(
        f"\n{ranks * args.pp} ranks on {os.cpu_count()} cores ({platform.machine()}), pp {args.pp}"
        f", {args.samples} samples of {args.length} tokens, {args.layers} layers of {args.hidden}, "
        f"python {platform.python_version()}, torch {torch.__version__}; predicted choice: cp "
        f"{choice.cp}\n"
    )
    print("| pp | cp | micro-batches | fillers | ms, median (min-max) | measured | predicted |")
    print("|---|---|---|---|---|---|---|")
    predicted = {c.cp: c for c in choice.candidates}
    base = statistics.median(times[1])
    for cp, seconds in times.items():
        c, median = predicted[cp], statistics.median(seconds)
        print(
            f"| {args.pp} | {cp} | {c.micro_batches} | {c.fillers} | {1e3 * median:.1f} "
            f"({1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f}) | {median / base:.2f} | "
            f"{c.time / predicted[1].time:.2f} |"
        )


if __name__ == "__main__":
    main()
