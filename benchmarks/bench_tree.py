"""Compare one prompt with many answers as a tree (hcp.Mask.shared_prefix) with packing the prompt
before every answer: attention of one layer, forward and backward.

    torchrun --nproc-per-node 4 benchmarks/bench_tree.py [--prompt 8000 --answers 16 --answer 1000]
    python benchmarks/bench_tree.py --device cpu                 one rank

Columns:
  rows     tokens of the batch
  Mpairs   pairs of a query and a key, in millions
  ms       of all micro-batches, forward and backward, the slowest rank's, median of --rounds
  x        the row of "packed" over this one: of pairs, and of time

Before anything is timed, outputs of the answers are compared, and gradients: those of the prompt's
keys and values are the sums of all its copies'.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from common.flags import parser_of
from common.timing import by_turns, device_name, end_ranks, start_ranks, timed
from torch import Tensor

import hcp
from hcp import Mask
from hcp.planning.plan import Group

TIMEOUT = timedelta(seconds=60)
FIELDS = ("query", "key", "value", "grad")


class Shape(NamedTuple):
    prompt: int
    answers: int
    answer: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def lengths(self) -> list[int]:
        """Of the tree's parts."""
        return [self.prompt, *[self.answer] * self.answers]


def rows_of(shape: Shape) -> list[dict[str, Tensor]]:
    """The rows of the prompt and of each answer. The prompt's outputs are not used: no gradient."""
    generator = torch.Generator().manual_seed(1)
    counts = dict(
        zip(FIELDS, (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads), strict=True)
    )
    parts = [
        {
            name: torch.randn(n, count, shape.head_dim, generator=generator).to(
                shape.device, shape.dtype
            )
            for name, count in counts.items()
        }
        for n in shape.lengths
    ]
    parts[0]["grad"].zero_()
    return parts


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in FIELDS}


class Contestant:
    """A batch that is planned and dispatched; calling it computes attention both ways."""

    def __init__(
        self, samples: list[dict[str, Tensor]], masks: list[Mask] | None, groups: hcp.ProcessGroups
    ) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        lengths = [len(sample["query"]) for sample in samples]
        most = 2 * -(-sum(lengths) // ranks)
        self.plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=most, masks=masks)
        self.pairs = sum((mask.pairs for mask in masks or map(Mask.causal, lengths)), 0)
        self.rows = sum(lengths)
        sources = [0] * len(samples)
        own = samples if rank == 0 else []
        self.step = hcp.dispatch(self.plan, own, sources, groups, comm_types=["all_gather"])

    def __call__(self) -> list[tuple[Tensor, ...]]:
        """Outputs, and gradients of keys and values, of each micro-batch."""
        results: list[tuple[Tensor, ...]] = []
        for cp, local in self.step:
            query, key, value = (local[n].detach().requires_grad_() for n in FIELDS[:3])
            out = cp.attention(query, key, value)
            out.backward(local["grad"])
            assert key.grad is not None
            assert value.grad is not None
            results.append((out.detach(), key.grad, value.grad))
        return results

    def on_rank_0(self) -> list[Tensor]:
        """The same, of all sequences end to end, where they were loaded."""
        combined = [
            [cp.combine(x) for x in result]
            for (cp, _), result in zip(self.step, self(), strict=True)
        ]
        order = [s for groups in self.plan.micro_batches for s in self._loaded(groups)]
        parts: dict[int, list[Tensor]] = {}
        for groups, results in zip(self.plan.micro_batches, combined, strict=True):
            at = 0
            for s in self._loaded(groups):
                end = at + self.plan.lengths[s]
                parts[s] = [x[at:end] for x in results]
                at = end
        assert sorted(order) == list(range(len(self.plan.lengths)))
        return [torch.cat([parts[s][i] for s in sorted(parts)]) for i in range(3)]

    @staticmethod
    def _loaded(groups: tuple[Group, ...]) -> list[int]:
        return sorted(s for group in groups for s in group.sequences)


def check(shape: Shape, packed: Contestant, tree: Contestant) -> None:
    """Raise AssertionError unless both compute the same."""
    many, one = packed.on_rank_0(), tree.on_rank_0()
    if dist.get_rank():
        return
    whole, prompt = shape.prompt + shape.answer, shape.prompt
    tolerance = 1e-4 if shape.dtype == torch.float32 else 3e-2
    for name, x, y in zip(("outputs", "gradients of keys", "of values"), many, one, strict=True):
        copies = x.view(shape.answers, whole, *x.shape[1:]).double()
        answers = copies[:, prompt:].flatten(0, 1)
        shared = copies[0, :prompt] if name == "outputs" else copies[:, :prompt].sum(0)
        expected = torch.cat([shared, answers])
        apart = float((y.double() - expected).abs().max() / expected.abs().max())
        assert apart <= tolerance, f"{name} of the tree are {apart:.1e} off, expected {tolerance}"


def main() -> None:
    parser = parser_of(__doc__, device="cuda", rounds=20, deadline=500.0)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--answer", type=int, default=1000, help="tokens of an answer")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    shape = Shape(
        args.prompt,
        args.answers,
        args.answer,
        args.heads[0],
        args.heads[1],
        args.head_dim,
        getattr(torch, args.dtype),
        device,
    )
    groups = hcp.build_process_groups(timeout=TIMEOUT)
    prompt, *answers = rows_of(shape)
    contestants = {
        "packed": Contestant([joined([prompt, answer]) for answer in answers], None, groups),
        "tree": Contestant(
            [joined([prompt, *answers])],
            [Mask.shared_prefix(shape.prompt, shape.lengths[1:])],
            groups,
        ),
    }
    check(shape, contestants["packed"], contestants["tree"])
    clock = partial(timed, device=device)
    times = by_turns(contestants, device, clock, args.rounds)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} x {device_name(device)}, {shape.dtype}, checked")
        print(f"{'':>8} {'rows':>9} {'Mpairs':>9} {'ms':>10} {'x pairs':>8} {'x time':>8}")
        first = contestants["packed"]
        for name, each in contestants.items():
            row = {
                "name": name,
                "rows": each.rows,
                "Mpairs": f"{each.pairs / 1e6:.1f}",
                "ms": f"{times[name] * 1e3:.2f}",
                "x pairs": f"{first.pairs / each.pairs:.2f}",
                "x time": f"{times['packed'] / times[name]:.2f}",
            }
            print(
                f"{row['name']:>8} {row['rows']:>9} {row['Mpairs']:>9} {row['ms']:>10} "
                f"{row['x pairs']:>8} {row['x time']:>8}"
            )
            args.json.add(row)
    groups.close()
    end_ranks()


if __name__ == "__main__":
    main()
