"""Train a small decoder of Qwen3's kind on one prompt with many answers, forward and backward: as a
prefix tree (hcp.prefix_trees), packed under dynamic CP, and packed under CP over all ranks.

    torchrun --nproc-per-node 2 benchmarks/bench_rollouts.py [--prompts 8000 16000 32000]
    torchrun --nproc-per-node 1 benchmarks/bench_rollouts.py --device cpu --prompts 200
        --answer 20 --layers 1 --width 256 --inner 512 --heads 2 1 --vocabulary 1000    one rank

Columns, one row for each length of the prompt and each way:
  rows     tokens of the batch
  ms       of all micro-batches, forward and backward, the slowest rank's, median of --rounds
  GiB      the most memory that a rank's tensors took in one step; 0 on a CPU
  x        time of "packed" over this one's

Before anything is timed, the log-probabilities of all answers' tokens and the gradients of all
weights are compared with those of "packed". bench_tree.py times attention alone.

T rows of this rank, H query heads, G key heads, E head size.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common.flags import parser_of
from common.timing import by_turns, device_name, end_ranks, start_ranks, timed
from torch import Tensor, nn
from torch.nn import functional as F

import hcp

TIMEOUT = timedelta(seconds=120)
FIELDS = ("tokens", "labels", "loss_mask")


class Layer(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        (heads, keys), size, width = args.heads, args.head_dim, args.width
        self.split = [heads, keys, keys]
        self.qkv = nn.Linear(width, (heads + 2 * keys) * size, bias=False)
        self.out = nn.Linear(heads * size, width, bias=False)
        self.up = nn.Linear(width, 2 * args.inner, bias=False)
        self.down = nn.Linear(args.inner, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(n) for n in (width, width, size, size))
        self.size = size

    def forward(self, x: Tensor, cp: hcp.ContextParallelHandler, rotary: Any) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.size))
        q, k, v = qkv.split(self.split, 1)
        q, k = self.norms[2](q), self.norms[3](k)
        attended = cp.attention(q, k, v.contiguous(), rotary_pos_emb=rotary)
        x = x + self.out(attended.flatten(1))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.size = args.head_dim

    def forward(self, cp: hcp.ContextParallelHandler, local: hcp.LocalBatch) -> Tensor:
        """The log-probability of each row's label, (T,), 0 where the row has no loss."""
        rates = 1e6 ** -(torch.arange(0, self.size, 2, device=local.tokens.device) / self.size)
        angles = torch.arange(cp.get_rotary_seq_len(), device=rates.device)[:, None] * rates
        rotary = cp.rotary(torch.cat((angles, angles), 1))
        x = self.embedding(local.tokens)
        for layer in self.layers:
            x = layer(x, cp, rotary)
        kept = local.loss_mask > 0
        logits = self.head(self.norm(x[kept]))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found = -F.cross_entropy(logits, local.labels[kept], reduction="none")
        return found.new_zeros(cp.rows).masked_scatter(kept, found)


class Way:
    """A way to plan the same rollouts: calling it trains on them once, without a step."""

    def __init__(
        self,
        model: Decoder,
        trees: hcp.Trees,
        weights: list[Tensor],
        groups: hcp.ProcessGroups,
        min_degree: int,
    ) -> None:
        device, rank = groups.transport.device, dist.get_rank()
        labels = [each.clamp(min=0) for each in trees.labels]
        columns = zip(trees.tokens, labels, trees.summed(weights), strict=True)
        samples = [
            {name: x.to(device) for name, x in zip(FIELDS, rows, strict=True)} for rows in columns
        ]
        self.model, self.trees, self.rows = model, trees, sum(trees.lengths)
        ranks = dist.get_world_size()
        most = 2 * -(-max(self.rows, 1) // ranks)
        plan = hcp.plan(
            trees.lengths,
            masks=trees.masks,
            ranks=ranks,
            max_tokens_per_rank=most,
            min_degree=min_degree,
        )
        own = samples if rank == 0 else []
        sources = [0] * len(samples)
        self.step = hcp.dispatch(plan, own, sources, groups, comm_types=("all_gather",))

    def __call__(self) -> list[Tensor]:
        """The log-probabilities of each micro-batch's rows."""
        self.model.zero_grad()
        found = []
        for cp, local in self.step:
            rows = self.model(cp, local)
            cp.loss(-rows, local.loss_mask, grad_reduce="sum").backward()
            found.append(rows.detach())
        return found

    def checked(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities of all rollouts on rank 0, and the gradients of all weights."""
        rows = self.step.combine(self())
        back = self.trees.by_rollout(rows) if dist.get_rank() == 0 else []
        grads = torch.cat([
            (torch.zeros_like(p) if p.grad is None else p.grad).double().flatten()
            for p in self.model.parameters()
        ])  # fmt: skip
        dist.all_reduce(grads)
        return torch.cat([grads[:0].float(), *back]), grads


def apart(found: Tensor, expected: Tensor) -> float:
    if not len(expected):
        return 0.0
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check(ways: dict[str, Way], tolerance: float) -> None:
    """Raise AssertionError unless all ways compute the same."""
    expected = ways["packed"].checked()
    for name in ways.keys() - {"packed"}:
        for what, x, y in zip(("rows", "gradients"), ways[name].checked(), expected, strict=True):
            off = apart(x, y)
            assert off <= tolerance, f"{what} of {name} are {off:.1e} off, expected {tolerance}"


def ways_of(
    prompt: int, model: Decoder, groups: hcp.ProcessGroups, args: argparse.Namespace
) -> dict[str, Way]:
    draw = torch.Generator().manual_seed(1)
    start = torch.randint(args.vocabulary, (prompt,), generator=draw)
    answers = torch.randint(args.vocabulary, (args.answers, args.answer), generator=draw)
    rollouts = [torch.cat((start, answer)) for answer in answers]
    weights = [F.pad(torch.ones(args.answer), (prompt - 1, 1)) for _ in rollouts]
    tree = hcp.prefix_trees(rollouts)
    alone = hcp.prefix_trees(rollouts, max_tokens=prompt + args.answer)
    given = {"packed": (1, alone), "fixed": (dist.get_world_size(), alone), "tree": (1, tree)}
    return {
        name: Way(model, trees, weights, groups, min_degree)
        for name, (min_degree, trees) in given.items()
    }


def memory_of(way: Way, device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    way()
    most = torch.tensor(torch.cuda.max_memory_allocated(device) / 2**30, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=10, deadline=560.0)
    parser.add_argument("--prompts", type=int, nargs="+", default=[8000, 16_000, 32_000])
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--answer", type=int, default=1000, help="tokens of an answer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=6144)
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 8])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    groups = hcp.build_process_groups(timeout=TIMEOUT)
    torch.manual_seed(1)
    dtype = getattr(torch, args.dtype)
    model = Decoder(args).to(device, dtype)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} x {device_name(device)}, {dtype}, checked")
        print(f"{'prompt':>8} {'':>8} {'rows':>9} {'ms':>10} {'GiB':>7} {'x':>6}")
    for prompt in args.prompts:
        ways = ways_of(prompt, model, groups, args)
        check(ways, 1e-9 if dtype == torch.float64 else 5e-2 if dtype.itemsize == 2 else 1e-3)
        times = by_turns(ways, device, partial(timed, device=device), args.rounds)
        for name, way in ways.items():
            gib = memory_of(way, device)
            if dist.get_rank():
                continue
            ratio = times["packed"] / times[name]
            row = {"prompt": prompt, "name": name, "rows": way.rows}
            row |= {"ms": f"{times[name] * 1e3:.2f}", "GiB": f"{gib:.2f}", "x": f"{ratio:.2f}"}
            print(
                f"{prompt:>8} {name:>8} {way.rows:>9} {row['ms']:>10} {row['GiB']:>7} "
                f"{row['x']:>6}",
                flush=True,
            )
            args.json.add(row)
    groups.close()
    end_ranks()


if __name__ == "__main__":
    main()
