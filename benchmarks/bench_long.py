"""Long sequences through TRL's SFTTrainer: hcp with a choice of memory, beside TRL's own ring CP.

    python benchmarks/bench_long.py --ranks 2 --layers 4 --tokens 262144
    python benchmarks/bench_long.py --ranks 8 --tokens 1048576 --prices prices.json
    python benchmarks/bench_long.py --device cpu --ranks 2
    python benchmarks/bench_long.py --forecast 8 --device-gib 75 --host-gib 200
    python benchmarks/bench_long.py --ranks 8 --layers 4 --tokens 262144 --sequences 16

FSDP2, bfloat16, AdamW, drawn tokens. Each contestant trains in processes of its own, in turns for
--rounds; the first --warm steps of each do not count. By default a step is one sequence of --tokens
on all ranks:

    hcp    what each layer keeps is chosen before the first step; losses without logits
    trl    Accelerate's ParallelismConfig(cp_size=) as TRL's guide has it: torch's ring attention,
           gradient checkpointing, activations offloaded with --trl-offload. On GPUs alone: torch's
           ring does not run on CPUs
    alone  TRL without CP, on one rank: what the loss must be. Where the sequence fits

Columns: seconds a step (median), tokens a second, GiB on the fullest GPU, the fraction of --peak
that matrix products take, both predictions of hcp, tokens a second over trl's.

--sequences takes so many a step, of mixed lengths: log-uniform from --tokens / 256 to --tokens
(1K to 256K), or a published --family cut there. They are multiples of twice the ranks: TRL's own CP
then pads nothing, and makes no mask of padding, which has an element for each pair.

    dynamic  hcp, a degree for each sequence
    fixed    hcp, all ranks for each sequence; as many in a micro-batch as fit
    padded   as fixed, with each sequence padded to the longest of its step
    trl      as above, one sequence after the other, one update for all
    alone    as above

hcp's have one choice of memory, for a sequence of --tokens. Columns: seconds a step (mean of the
steps, of each the median of the rounds), tokens a second without padding, GiB on the fullest GPU
and as predicted, micro-batches a step, tokens a second over those of fixed.

Losses of the first two steps must agree before a time is printed, to 0.02 in bfloat16 and to 1e-4
in float32.

--forecast computes what hcp would choose on so many ranks, and starts nothing: simulated. With
--sequences it also plans the steps, by prices of a Hopper GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from random import Random
from statistics import mean, median
from typing import Any

import torch
from common.flags import filled, parser_of
from common.machine import hardware, package_version
from common.trainer_runs import (
    GIB,
    Measured,
    add_arguments,
    config_of,
    options,
    report,
    run,
    samples,
    tokenizer,
    watch,
)

import hcp
from hcp.tools.programs.families import FAMILIES, log_uniform

CONTESTANTS = {"cpu": ("hcp", "alone"), "cuda": ("hcp", "trl")}
MIXED = ("dynamic", "fixed", "padded")
MIXED_CONTESTANTS = {"cpu": (*MIXED, "alone"), "cuda": (*MIXED, "trl")}
DEFAULTS = {
    "model": ("toy", "8b"),
    "tokens": (256, 262_144),
    "steps": (2, 6),
    "warm": (0, 2),
}
RATES = {"matrices": 600e12, "attention": 620e12, "attention_backward": 560e12}
RATES |= {"host_rate": 40e9, "memory_rate": 3e12, "host_memory_rate": 45e9}
"""Assumed for --forecast, of a Hopper GPU."""


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda" if torch.cuda.is_available() else "cpu", rounds=1)
    add_arguments(parser, ("toy", "8b"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="of the longest (CPU: 256, CUDA: 262144)")
    parser.add_argument("--sequences", type=int, default=1, help="of a step (%(default)s)")
    parser.add_argument("--family", choices=FAMILIES, help="of lengths (log-uniform)")
    parser.add_argument("--prices", help="a file of hcp calibrate --memory --model")
    parser.add_argument("--device-gib", type=float, help="of a device (0.92 of a GPU; CPU: 1)")
    parser.add_argument("--host-gib", type=float, default=64.0, help="of the host for a rank")
    parser.add_argument("--trl-offload", action="store_true", help="activation_offloading of TRL")
    parser.add_argument("--peak", type=float, default=989e12, help="operations a second of a GPU")
    parser.add_argument("--forecast", type=int, metavar="RANKS", help="predict alone")
    return filled(parser.parse_args(), DEFAULTS)


def main() -> int:
    args = arguments()
    if args.contestant:
        train(args)
        return 0
    if args.forecast:
        forecast(args)
        return 0
    names = args.contestants or (MIXED_CONTESTANTS if mixed(args) else CONTESTANTS)[args.device]
    print(
        f"{hardware(args.device)}, torch {torch.__version__}, hcp {hcp.__version__}, TRL "
        f"{package_version('trl')}; {told(args)} on {args.ranks} ranks, {args.model}, "
        f"{args.layers or 'all'} layers"
    )
    found = measured_in_turns(args, names)
    check(found, args.device)
    (print_mixed if mixed(args) else print_table)(args, found)
    return 0 if found else 1


def mixed(args: argparse.Namespace) -> bool:
    return bool(args.sequences > 1)


def lengths_of(args: argparse.Namespace) -> list[list[int]]:
    """The tokens of the sequences of each step."""
    if not mixed(args):
        return [[args.tokens]] * args.steps
    random, unit = Random(1), 2 * args.ranks
    draw = (
        FAMILIES[args.family].draw
        if args.family
        else partial(log_uniform, low=max(1, args.tokens // 256), high=args.tokens)
    )

    def one() -> int:
        return max(unit, min(args.tokens, draw(random)) // unit * unit)

    return [[one() for _ in range(args.sequences)] for _ in range(args.steps)]


def told(args: argparse.Namespace) -> str:
    if not mixed(args):
        return f"{args.tokens:,} tokens"
    lengths = [length for step in lengths_of(args) for length in step]
    return (
        f"{args.sequences} sequences a step of {min(lengths):,} to {max(lengths):,} tokens "
        f"({args.family or 'log-uniform'}, {mean(lengths):,.0f} in the mean)"
    )


def measured_in_turns(args: argparse.Namespace, names: Any) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for _ in range(args.rounds):
        for name in names:
            one = run(name, 1 if name == "alone" else args.ranks, args.deadline or 1800.0)
            if isinstance(one, str):
                print(f"without {name}: {one}")
            else:
                found.setdefault(name, []).append(one)
    return found


def check(found: dict[str, list[Measured]], device: str) -> None:
    """Raise unless all contestants have the losses of the first."""
    off = 0.02 if device == "cuda" else 1e-4
    runs = [(name, one) for name, of in found.items() for one in of]
    for name, one in runs[1:]:
        for mine, first in zip(one.losses[:2], runs[0][1].losses[:2], strict=True):
            if abs(mine - first) > off * max(1.0, abs(first)):
                raise SystemExit(f"{name} has losses {one.losses[:2]}, {runs[0][0]}'s are {first}")


def print_table(args: argparse.Namespace, found: dict[str, list[Measured]]) -> None:
    head = ("contestant", "s a step", "tokens/s", "GiB", "of peak", "predicted s", "predicted GiB")
    print("| " + " | ".join((*head, "over trl")) + " |")
    print("|" + "---|" * (len(head) + 1))
    seconds = {
        name: median(s for one in of for s in one.seconds[args.warm :])
        for name, of in found.items()
    }
    for name, of in found.items():
        took, ranks = seconds[name], 1 if name == "alone" else args.ranks
        row = {
            "contestant": name,
            "s a step": f"{took:.4g}",
            "tokens/s": f"{args.tokens / took:,.0f}",
            "GiB": f"{max(one.gib for one in of):.2f}",
            "of peak": f"{operations(args) / took / ranks / args.peak:.3g}",
            "predicted s": f"{of[0].predicted_seconds:.4g}",
            "predicted GiB": f"{of[0].predicted_gib:.2f}",
            "over trl": f"{seconds['trl'] / took:.2f}" if "trl" in seconds else "-",
        }
        print("| " + " | ".join(row.values()) + " |")
        args.json.add(row)


def print_mixed(args: argparse.Namespace, found: dict[str, list[Measured]]) -> None:
    head = ("contestant", "s a step", "tokens/s", "GiB", "predicted GiB", "micro-batches")
    print("| " + " | ".join((*head, "over fixed")) + " |")
    print("|" + "---|" * (len(head) + 1))
    tokens = mean(sum(step) for step in lengths_of(args)[args.warm :])
    seconds = {
        name: mean(map(median, zip(*(one.seconds[args.warm :] for one in of), strict=True)))
        for name, of in found.items()
    }
    for name, of in found.items():
        row = {
            "contestant": name,
            "s a step": f"{seconds[name]:.4g}",
            "tokens/s": f"{tokens / seconds[name]:,.0f}",
            "GiB": f"{max(one.gib for one in of):.2f}",
            "predicted GiB": f"{of[0].predicted_gib:.2f}" if name in MIXED else "-",
            "micro-batches": f"{mean(of[0].micro_batches[args.warm :]):.1f}",
            "over fixed": f"{seconds['fixed'] / seconds[name]:.2f}" if "fixed" in seconds else "-",
        }
        print("| " + " | ".join(row.values()) + " |")
        args.json.add(row)


def operations(args: argparse.Namespace) -> float:
    """Of the products of a step, nothing computed twice: matrices 6 a weight and token, attention
    3.5 times its forward over the pairs that a causal mask leaves."""
    config = config_of(args.model, args.layers, args.tokens)
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * keys + 3 * config.intermediate_size)
    pairs = args.tokens**2 / 2
    layers = config.num_hidden_layers * (6 * layer * args.tokens + 3.5 * 4 * heads * pairs)
    return float(layers + 6 * config.hidden_size * config.vocab_size * args.tokens)


# ---- a contestant --------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    measured = Measured()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    trainer = (by_hcp if args.contestant in ("hcp", *MIXED) else by_trl)(args, measured)
    trainer.add_callback(watch(measured, args.device))
    trainer.train()
    report(measured, args.device)


def data(args: argparse.Namespace, config: Any) -> Any:
    steps = lengths_of(args)
    rows = samples([length for step in steps for length in step], config.vocab_size, seed=1)
    return rows.add_column("longest", [max(step) for step in steps for _ in step])


def padded_sample(item: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """With padding at the end, which no loss counts, up to the longest sequence of its step."""
    from hcp.integrations.trl.sft import prepared_samples

    (sample,) = prepared_samples(item)
    more = item["longest"] - len(sample["input_ids"])
    return {name: torch.nn.functional.pad(rows, (0, more)) for name, rows in sample.items()}


def model_of(config: Any, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )


def by_hcp(args: argparse.Namespace, measured: Measured) -> Any:
    from hcp.integrations.transformers import memory
    from hcp.integrations.trl import SFTTrainer

    config = config_of(args.model, args.layers, args.tokens)
    found = chosen(args, config, args.ranks)
    measured.predicted_seconds = found.seconds
    measured.predicted_gib = found.device_bytes / GIB
    model = model_of(config, args.device)
    memory.apply(model, found.choice)
    return SFTTrainer(
        model,
        options(args.device, max_steps=args.steps, max_length=args.tokens),
        train_dataset=data(args, config),
        processing_class=tokenizer(),
        linear_cross_entropy=True,
        global_batch_size=args.sequences,
        dynamic_cp=args.contestant not in ("fixed", "padded"),
        to_sample=padded_sample if args.contestant == "padded" else None,
        cp=hcp.Config(max_seqlen_per_dp_cp_rank=2 + found.rows, context_parallel_size=args.ranks),
    )


def chosen(args: argparse.Namespace, config: Any, ranks: int) -> Any:
    from hcp.integrations.transformers import memory

    dtype = torch.bfloat16 if args.device == "cuda" or args.forecast else torch.float32
    counted = memory.model_bytes(config, dtype)
    prices = (
        memory.Prices.load(args.prices) if args.prices else memory.Prices.of_rates(config, **RATES)
    )
    gib = args.device_gib
    if gib is None:
        gib = 0.92 * torch.cuda.mem_get_info()[1] / GIB if args.device == "cuda" else 1.0
    newest: dict[str, Any] = {"apart": True} if args.forecast else {}  # whatever is installed
    sizes = ranks, int(gib * GIB), int(args.host_gib * GIB)
    machine = memory.Machine(*sizes, accumulates=mixed(args), **newest)
    return memory.choose(config, counted, prices, machine, args.tokens)


def by_trl(args: argparse.Namespace, measured: Measured) -> Any:
    import trl

    config = config_of(args.model, args.layers, args.tokens)
    more: dict[str, Any] = {"per_device_train_batch_size": 1}
    more |= {"gradient_accumulation_steps": args.sequences}
    if args.contestant == "trl":
        from accelerate import ParallelismConfig

        more |= {
            "parallelism_config": ParallelismConfig(cp_size=args.ranks),
            "pad_to_multiple_of": 2 * args.ranks,
            "gradient_checkpointing": True,
            "activation_offloading": args.trl_offload,
        }
    return trl.SFTTrainer(
        model_of(config, args.device),
        options(args.device, max_steps=args.steps, max_length=args.tokens, **more),
        train_dataset=data(args, config),
        processing_class=tokenizer(),
    )


def forecast(args: argparse.Namespace) -> None:
    config = config_of(args.model, args.layers, args.tokens)
    print("simulated, by " + ("measured prices" if args.prices else f"assumed rates {RATES}"))
    try:
        found = chosen(args, config, args.forecast)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(found.told())
    if mixed(args):
        args.ranks = args.forecast
        print(f"simulated, by plans alone: {told(args)}, {args.steps} steps")
        print_plans(args, config, 2 + found.rows)


def print_plans(args: argparse.Namespace, config: Any, rows: int) -> None:
    """Print what each of hcp's contestants would take, over fixed, by the times of its plans."""
    cost = hcp.CostModel.for_transformer(
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        head_dim=config.head_dim,
    )
    limits: dict[str, Any] = {"ranks": args.ranks, "max_tokens_per_rank": rows, "cost": cost}
    limits |= {"sync": "micro_batch"}  # as under FSDP2
    steps = lengths_of(args)
    longest = [[max(step)] * len(step) for step in steps]
    plans = {
        "dynamic": [hcp.plan(step, **limits) for step in steps],
        "fixed": [hcp.plan(step, **limits, min_degree=args.ranks) for step in steps],
        "padded": [hcp.plan(step, **limits, min_degree=args.ranks) for step in longest],
    }
    spans = {name: sum(plan.makespan for plan in of) for name, of in plans.items()}
    print("| contestant | micro-batches | over fixed |\n|---|---|---|")
    for name, of in plans.items():
        row = {
            "contestant": name,
            "micro-batches": f"{mean(plan.micro_batch_count for plan in of):.1f}",
            "over fixed": f"{spans['fixed'] / spans[name]:.2f}",
        }
        print("| " + " | ".join(row.values()) + " |")
        args.json.add(row)


if __name__ == "__main__":
    sys.exit(main())
