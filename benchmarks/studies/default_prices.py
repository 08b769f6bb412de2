"""What plans by other prices than the model's cost, in the model's own time.

hcp.CostModel() has to serve those who give no prices. Each row is one choice of them: the launch
and the exchange, both as so many tokens through the linear layers. A plan is made by that choice,
then priced by a model's own prices, and compared with the plan that these give. The models are four
decoders by their published sizes, and one whose prices were measured, each over NVLink and over a
link of a fifth of its rate.

    python benchmarks/studies/default_prices.py

It runs on one core in a minute, and needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common.machine import planner_line

import hcp
from hcp._words import Sync
from hcp.planning.cost import PRICES
from hcp.tools.presets import PRESETS
from hcp.tools.programs.families import FAMILIES

MODELS = {
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128),
    "Llama-3.1-70B": (8192, 28672, 64, 8, 128),
    "Qwen2.5-32B": (5120, 27648, 40, 8, 128),
    "Qwen3-30B-A3B": (2048, 8 * 768, 32, 4, 128),
}
"""Hidden size, feed-forward size that a token uses, heads, key-value heads, values of a head."""
SLOWER = 5
"""NVLink's rate over the other link's."""
CAPACITY = 16384
PAIR, TOKEN = 2, 24576
"""Of every choice: those of hcp.CostModel()."""


def models() -> dict[str, hcp.CostModel]:
    """Give the prices of five models over each of two links."""
    near = {"GPT 1B, measured": PRESETS["gpt-1b-h200"]}
    for name, (hidden, wide, heads, groups, size) in MODELS.items():
        near[name] = hcp.CostModel.for_transformer(
            hidden_size=hidden,
            ffn_hidden_size=wide,
            num_attention_heads=heads,
            num_query_groups=groups,
            head_dim=size,
        )
    far = {
        f"{name}, slower link": replace(cost, exchange=SLOWER * cost.exchange)
        for name, cost in near.items()
    }
    return near | far


class Request(NamedTuple):
    lengths: tuple[int, ...]
    sync: Sync
    ranks: int

    def plan(self, cost: hcp.CostModel) -> hcp.Plan:
        return hcp.plan(
            self.lengths, ranks=self.ranks, max_tokens_per_rank=CAPACITY, sync=self.sync, cost=cost
        )


def requests(ranks: int, seeds: int, sequences: int) -> Iterator[Request]:
    draws = {name: family.draw for name, family in FAMILIES.items()}
    draws["equal"] = lambda _random: 1000
    syncs: tuple[Sync, ...] = ("step", "micro_batch")
    most = ranks * (CAPACITY - 2)
    for draw, seed in itertools.product(draws.values(), range(seeds)):
        random = Random(seed)
        lengths = tuple(min(most, draw(random)) for _ in range(sequences))
        for sync in syncs:
            yield Request(lengths, sync, ranks)


def priced(plan: hcp.Plan, cost: hcp.CostModel) -> int:
    """Give the time of a plan by other prices."""
    data = plan.to_dict()
    data["cost"] = dict(zip(PRICES, cost.prices, strict=True))
    return hcp.Plan.from_dict(data).makespan


def losses(
    asked: Sequence[Request], choice: hcp.CostModel, best: list[dict[str, int]]
) -> list[float]:
    """Give how much longer plans by a choice of prices take, in every model's time."""
    every = models()
    found = []
    for request, times in zip(asked, best, strict=True):
        plan = request.plan(choice)
        found += [priced(plan, every[name]) / time - 1 for name, time in times.items()]
    return found


def choices() -> dict[str, hcp.CostModel]:
    """Give the prices to compare: those of hcp.CostModel(), and a grid."""
    grid = {
        f"launch {launch} tokens, exchange {share}": hcp.CostModel(
            pair=PAIR, token=TOKEN, launch=launch * TOKEN, exchange=round(share * TOKEN)
        )
        for launch in (43, 500, 1000, 1500, 2000, 3000)
        for share in (0.167, 0.05)
    }
    return {"hcp.CostModel()": hcp.CostModel()} | grid


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=64)
    args = parser.parse_args()
    asked = list(requests(args.ranks, args.seeds, args.sequences))
    best = [
        {name: request.plan(cost).makespan for name, cost in models().items()} for request in asked
    ]
    print(planner_line())
    print(f"\n{len(asked)} requests to {args.ranks} ranks, {len(models())} models\n")
    print("| prices | mean loss | p90 | worst |\n|---|---|---|---|")
    for name, choice in choices().items():
        found = sorted(losses(asked, choice, best))
        print(
            f"| {name} | {statistics.mean(found):.1%} | {found[len(found) * 9 // 10]:.1%} "
            f"| {found[-1]:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
