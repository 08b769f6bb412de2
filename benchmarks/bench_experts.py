"""A mixture of experts on lengths with a long tail: one CP degree for all, beside dynamic CP.

    torchrun --nproc-per-node 2 benchmarks/bench_experts.py [--expert-ranks 2]
    torchrun --nproc-per-node 8 benchmarks/bench_experts.py --expert-ranks 8
    torchrun --nproc-per-node 2 benchmarks/bench_experts.py --device cpu
    python benchmarks/bench_experts.py --simulate [--ranks 32 --expert-ranks 8]

The case is one that verl's users published: sequences of 1K to 16K tokens, 4,096 tokens a GPU, CP 4
for all of them against dynamic CP. A length has the density 1 / length^(1 + tail) between
--max-tokens-per-rank / 4 and 4 times it, at most all ranks' rows, and is a multiple of 8.

    fixed             one degree for all, the least divisor of the ranks that holds the longest
                      length. Sequences go to data-parallel ranks by largest differencing and are
                      packed there, longest first, as RL trainers do (peers/planners.py)
    fixed, by hcp     the same degree, packed by hcp
    dynamic           hcp.plan: a degree for each sequence
    wave greedy       Megatron's dynamic scheduler, re-implemented; where ranks are a power of two

All run on hcp's engine and plan with the ranks meeting after every micro-batch, as they do in each
layer with experts. Columns: micro-batches; tokens per second; over those of "fixed".

MEASURED, on torchrun's ranks: a small GPT of Megatron-Core with experts over --expert-ranks.
A step is forward, backward and one sum of all gradients. Optimizer, planning and dispatch are left
out: their work is equal, or a loader does it ahead. Routers have the loss of each sequence and a z
loss, which no plan changes. Losses and gradients of each contestant are compared with the first
one's before anything is timed.

SIMULATED, with --simulate: a model of the sizes of Qwen3-30B-A3B by the rates of the flags. Those
of matrix products, of attention, and of links, which carry keys, values and the rows of experts
there and back, are assumed. What a micro-batch and a cut sequence cost is that of hcp's preset
"gpt-1b-h200", which was measured, times the layers over its own 18. A replay (hcp/tools/replay.py)
has the ranks of a micro-batch wait for the slowest, and attention hides exchanges as far as it can.
Experts that get more rows than others are not in it.
"""

from __future__ import annotations

import argparse
import os
import sys

from common.expert_case import (
    RANKS_PER_NODE,
    describe,
    drawn,
    fixed_degree,
    plans_of,
    print_table,
)
from common.flags import parser_of

import hcp
from hcp.cli.simulate import ATTENTION_FORWARD_AND_BACKWARD, FORWARD_AND_BACKWARD
from hcp.tools.replay import Machine, replay

FULL = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "num_experts": 16,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 512,
    "max_tokens_per_rank": 4096,
}
TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "max_tokens_per_rank": 64,
}
SIMULATED = {
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "num_experts": 128,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 768,
    "max_tokens_per_rank": 4096,
}
HEAD_DIM, VOCABULARY = 128, 151_936
"""Of the simulated model."""
RATES: dict[str, tuple[float, str]] = {
    "tflops": (400, "10^12 operations per second in matrix products"),
    "attention-tflops": (350, "10^12 operations per second in attention"),
    "gbps": (250, "10^9 bytes per second between GPUs of a node"),
    "far-gbps": (50, "10^9 bytes per second between nodes"),
    "launch-ms": (75, "milliseconds that any micro-batch takes"),
    "step-ms": (0.45, "milliseconds of one more rank, for each sequence that is cut"),
}


def main() -> int:
    args = arguments()
    if args.simulate:
        return simulate(args)
    from common.expert_run import measure

    return measure(args)


def arguments() -> argparse.Namespace:
    device = "cpu" if "--simulate" in sys.argv else "cuda"
    parser = parser_of(__doc__, device=device, rounds=3, deadline=580)
    parser.add_argument("--simulate", action="store_true", help="compute nothing, and need no GPU")
    parser.add_argument("--ranks", type=int, default=32, help="of --simulate (32)")
    parser.add_argument("--expert-ranks", type=int, help="of experts (1; --simulate: 8)")
    parser.add_argument("--sequences", type=int, default=16, help="for each rank in a batch (16)")
    parser.add_argument("--batches", type=int, help="global batches (1; --simulate: 10)")
    parser.add_argument("--tail", type=float, nargs="+", default=[1.0], help="of lengths (1)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches (1)")
    for name in FULL:
        sizes = f"{FULL[name]}; CPU: {TINY[name]}; --simulate: {SIMULATED[name]}"
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=f"({sizes})")
    for name, (value, says) in RATES.items():
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{says} ({value:g})")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    for name, size in (SIMULATED if args.simulate else TINY if on_cpu else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    args.expert_ranks = args.expert_ranks or (8 if args.simulate else 1)
    args.batches = args.batches or (10 if args.simulate else 1)
    if not args.simulate:
        args.ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.ranks % args.expert_ranks or args.num_experts % args.expert_ranks:
        parser.error(
            f"--expert-ranks is {args.expert_ranks}, expected a divisor of {args.ranks} ranks and "
            f"of --num-experts {args.num_experts}"
        )
    return args


# ---- simulated -----------------------------------------------------------------------------------


def simulate(args: argparse.Namespace) -> int:
    cost = simulated_cost(args)
    machine = Machine.of(cost, ranks_per_node=RANKS_PER_NODE, once=True)
    rates = ", ".join(f"{name} {getattr(args, name.replace('-', '_')):g}" for name in RATES)
    print(f"SIMULATED, nothing was run. {args.num_layers} layers of {args.hidden_size}; {rates}")
    for tail in args.tail:
        batches = [drawn(args, tail, batch) for batch in range(args.batches)]
        degree = fixed_degree(args, batches)
        made = [plans_of(args, lengths, cost, degree) for lengths in batches]
        seconds = {
            name: sum(replay(plans[name], machine).seconds for plans in made) for name in made[0]
        }
        counts = {
            name: sum(len(plans[name].micro_batches) for plans in made) / len(made)
            for name in made[0]
        }
        print(f"\n{describe(args, tail, batches)}")
        print_table(args, sum(map(sum, batches)), seconds, counts)
    return 0


def simulated_cost(args: argparse.Namespace) -> hcp.CostModel:
    """Return prices, in seconds, of a step of the simulated model."""
    hidden, layers = args.hidden_size, args.num_layers
    query, key = args.num_attention_heads * HEAD_DIM, args.num_query_groups * HEAD_DIM
    used = args.moe_router_topk * args.moe_ffn_hidden_size
    weights = layers * (2 * hidden * (query + key) + 3 * hidden * used) + hidden * VOCABULARY
    away = (args.expert_ranks - 1) / args.expert_ranks
    # To the experts and back, in bfloat16, forward and backward.
    moved = 4 * 2 * hidden * args.moe_router_topk * away * layers
    inside = args.expert_ranks <= RANKS_PER_NODE
    exchanged = moved / ((args.gbps if inside else args.far_gbps) * 1e9)
    keys_and_values = FORWARD_AND_BACKWARD * layers * 2 * key * 2
    pair = ATTENTION_FORWARD_AND_BACKWARD * layers * 4 * query
    return hcp.CostModel.from_seconds(
        pair=pair / (args.attention_tflops * 1e12),
        token=FORWARD_AND_BACKWARD * 2 * weights / (args.tflops * 1e12) + exchanged,
        exchange=keys_and_values / (args.gbps * 1e9),
        exchange_far=keys_and_values / (args.far_gbps * 1e9),
        launch=args.launch_ms * 1e-3,
        step=args.step_ms * 1e-3,
        overlap=1,
    )


if __name__ == "__main__":
    sys.exit(main())
