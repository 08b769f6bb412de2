"""A long sequence through TRL's SFTTrainer: hcp with a choice of memory, beside TRL's own ring CP.

    python benchmarks/bench_long.py --ranks 2 --layers 4 --tokens 262144
    python benchmarks/bench_long.py --ranks 8 --tokens 1048576 --prices prices.json
    python benchmarks/bench_long.py --device cpu --ranks 2
    python benchmarks/bench_long.py --forecast 8 --device-gib 75 --host-gib 200

One sequence of drawn tokens a step, on all ranks, FSDP2, bfloat16, AdamW. Each contestant trains in
processes of its own, in turns for --rounds; the first --warm steps of each do not count.

    hcp    what each layer keeps is chosen before the first step; losses without logits
    trl    Accelerate's ParallelismConfig(cp_size=) as TRL's guide has it: torch's ring attention,
           gradient checkpointing, activations offloaded with --trl-offload. On GPUs alone: torch's
           ring does not run on CPUs
    alone  TRL without CP, on one rank: what the loss must be. Where the sequence fits

Losses of the first two steps must agree before a time is printed, to 0.02 in bfloat16 and to 1e-4
in float32. Columns: seconds a step (median), tokens a second, GiB on the fullest GPU, the fraction
of --peak that matrix products take, both predictions of hcp, tokens a second over trl's.

--forecast computes what hcp would choose on so many ranks, and starts nothing: simulated.
"""

from __future__ import annotations

import argparse
import os
import sys
from statistics import median
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

CONTESTANTS = {"cpu": ("hcp", "alone"), "cuda": ("hcp", "trl")}
DEFAULTS = {
    "model": ("toy", "8b"),
    "tokens": (256, 262_144),
    "steps": (2, 6),
    "warm": (0, 2),
}
RATES = {"matrices": 600e12, "attention": 620e12, "attention_backward": 560e12}
RATES |= {"host_rate": 40e9, "memory_rate": 3e12}
"""Assumed for --forecast, of a Hopper GPU."""


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda" if torch.cuda.is_available() else "cpu", rounds=1)
    add_arguments(parser, ("toy", "8b"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="of the sequence (CPU: 256, CUDA: 262144)")
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
    names = args.contestants or CONTESTANTS[args.device]
    print(
        f"{hardware(args.device)}, torch {torch.__version__}, hcp {hcp.__version__}, TRL "
        f"{package_version('trl')}; {args.tokens:,} tokens on {args.ranks} ranks, {args.model}, "
        f"{args.layers or 'all'} layers"
    )
    found = measured_in_turns(args, names)
    check(found, args.device)
    print_table(args, found)
    return 0 if found else 1


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
    trainer = (by_hcp if args.contestant == "hcp" else by_trl)(args, measured)
    trainer.add_callback(watch(measured, args.device))
    trainer.train()
    report(measured, args.device)


def data(args: argparse.Namespace, config: Any) -> Any:
    return samples([args.tokens] * args.steps, config.vocab_size, seed=1)


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
        global_batch_size=1,
        cp=hcp.Config(max_seqlen_per_dp_cp_rank=2 + found.rows),
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
    machine = memory.Machine(ranks, int(gib * GIB), int(args.host_gib * GIB), **newest)
    return memory.choose(config, counted, prices, machine, args.tokens)


def by_trl(args: argparse.Namespace, measured: Measured) -> Any:
    import trl

    config = config_of(args.model, args.layers, args.tokens)
    more: dict[str, Any] = {"per_device_train_batch_size": 1}
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
    print(chosen(args, config, args.forecast).told())


if __name__ == "__main__":
    sys.exit(main())
