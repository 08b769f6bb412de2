"""TRL's SFTTrainer by itself, with its own CP, and with hcp: tokens a second over 30 steps.

    python benchmarks/bench_trainers.py                            # 0.7 B, on 1 and 2 GPUs
    python benchmarks/bench_trainers.py --model 8b --layers 4 --ranks 1 2 4
    python benchmarks/bench_trainers.py --device cpu

One Qwen3 with random weights, FSDP2, bfloat16, AdamW, in processes of its own for each contestant,
in turns for --rounds. All train on the same lengths; the first --warm steps do not count.

    packing  TRL alone: packs of --longest tokens, no token of which sees another document
             (FlashAttention's varlen on GPUs, by flash-attn-4 or else flash-attn; on CPUs TRL pads)
    packing-recomputed
             packing with gradient checkpointing, for packs whose layers a GPU cannot keep. By name
             alone
    cp       TRL with Accelerate's ParallelismConfig(cp_size=ranks): one padded sequence at a time,
             one update for those of a step. Four steps count, which are long. On GPUs alone, and
             from 2 ranks on
    static   hcp, one degree for all
    dynamic  hcp, a degree for each sequence

Families: github and byted are published length distributions, cut at --longest; constant has
--longest / 8 tokens in each sequence. All but packing train on the same global batches: the losses
of their first steps must agree, to 0.02 in bfloat16 and 1e-4 in float32, before a table is printed.
Columns: tokens a second (median step), the least and the most of the rounds, GiB on the
fullest GPU, times over packing (or else packing-recomputed) on as many ranks, times over the same
contestant on 1 rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from random import Random
from statistics import median
from typing import Any

import torch
from common.families import BYTED, GITHUB
from common.flags import filled, parser_of
from common.machine import hardware, package_version
from common.trainer_runs import (
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

FAMILIES = ("github", "byted", "constant")
CONTESTANTS = {
    "cpu": ("packing", "static", "dynamic"),
    "cuda": ("packing", "cp", "static", "dynamic"),
}
PACKING = ("packing", "packing-recomputed")
CP_STEPS = 4
"""Steps of TRL's own CP that count: each computes its sequences one after the other."""
DEFAULTS = {
    "model": ("toy", "0.7b"),
    "steps": (2, 40),
    "warm": (1, 10),
    "sequences": (4, 64),
    "longest": (128, 32_768),
    "rows": (128, 32_768),
}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda" if torch.cuda.is_available() else "cpu", rounds=1)
    add_arguments(parser, ("toy", "0.7b"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--sequences", type=int, help="of a step (CPU: 4, CUDA: 64)")
    parser.add_argument("--longest", type=int, help="tokens of one (CPU: 128, CUDA: 32768)")
    parser.add_argument("--rows", type=int, help="that a rank holds (CPU: 128, CUDA: 32768)")
    return filled(parser.parse_args(), DEFAULTS)


def main() -> int:
    args = arguments()
    if args.contestant:
        train(args)
        return 0
    print(
        f"{hardware(args.device)}, torch {torch.__version__}, hcp {hcp.__version__}, TRL "
        f"{package_version('trl')}; {args.model}, {args.layers or 'all'} layers, "
        f"{args.sequences} sequences of up to {args.longest:,} tokens a step"
    )
    head = ("family", "contestant", "ranks", "tokens/s", "least", "most", "GiB", "over packing")
    lines = ["| " + " | ".join((*head, "over 1 rank")) + " |", "|" + "---|" * (len(head) + 1)]
    for family in args.families:
        lines += rows_of(args, family, measured_in_turns(args, family))
    print("\n".join(lines))
    return 0


Key = tuple[str, int]
"""A contestant, and its ranks."""


def measured_in_turns(args: argparse.Namespace, family: str) -> dict[Key, list[Measured]]:
    found: dict[Key, list[Measured]] = {}
    for _ in range(args.rounds):
        for ranks in args.ranks:
            for name in args.contestants or CONTESTANTS[args.device]:
                if name == "cp" and ranks == 1:
                    continue
                one = run(f"{name}:{family}", ranks, args.deadline or 1800.0)
                if isinstance(one, str):
                    print(f"without {name} on {ranks} ranks, {family}: {one}", flush=True)
                else:
                    found.setdefault((name, ranks), []).append(one)
    check(found, family, args.device)
    return found


def check(found: dict[Key, list[Measured]], family: str, device: str) -> None:
    """Raise unless contestants whose batches are equal on any ranks have equal losses."""
    off = 0.02 if device == "cuda" else 1e-4
    equal = [(key, one) for key, of in found.items() if key[0] not in PACKING for one in of]
    for key, one in equal[1:]:
        mine, first = one.losses[0], equal[0][1].losses[0]
        if abs(mine - first) > off * max(1.0, abs(first)):
            raise SystemExit(f"{family}: {key} has loss {mine}, {equal[0][0]} has {first}")


def rows_of(args: argparse.Namespace, family: str, found: dict[Key, list[Measured]]) -> list[str]:
    """Rows of the table, by tokens a second."""
    rates = {key: [tokens_of(args, family, key[0], one) for one in of] for key, of in found.items()}
    lines = []
    for (name, ranks), of in rates.items():
        alone = rates.get((name, 1))
        packing = next((rates[one, ranks] for one in PACKING if (one, ranks) in rates), None)
        row = {
            "family": family,
            "contestant": name,
            "ranks": str(ranks),
            "tokens/s": f"{median(of):,.0f}",
            "least": f"{min(of):,.0f}",
            "most": f"{max(of):,.0f}",
            "GiB": f"{max(one.gib for one in found[name, ranks]):.2f}",
            "over packing": f"{median(of) / median(packing):.2f}" if packing else "-",
            "over 1 rank": f"{median(of) / median(alone):.2f}" if alone else "-",
        }
        args.json.add(row)
        lines.append("| " + " | ".join(row.values()) + " |")
    return lines


def tokens_of(args: argparse.Namespace, family: str, name: str, one: Measured) -> float:
    """Tokens a second, of the median step that counts: a kernel that is compiled for a new shape
    takes seconds of some steps. A step has the tokens of its sequences; one of packing has those of
    all steps, evenly, since TRL draws its packs."""
    lengths = lengths_of(args, family)
    batches = [one.tokens_per_step] * len(one.seconds)
    if name not in PACKING:
        batches = [
            sum(lengths[i * args.sequences : (i + 1) * args.sequences])
            for i in range(len(one.seconds))
        ]
    return median(n / s for n, s in list(zip(batches, one.seconds, strict=True))[args.warm :])


def lengths_of(args: argparse.Namespace, family: str) -> list[int]:
    count = args.steps * args.sequences
    if family == "constant":
        return [max(2, args.longest // 8)] * count
    draw, random = {"github": GITHUB, "byted": BYTED}[family], Random(1)
    return [max(2, min(args.longest, draw(random))) for _ in range(count)]


# ---- a contestant --------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    name, family = args.contestant.split(":")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = config_of(args.model, args.layers, args.longest)
    dataset = samples(lengths_of(args, family), config.vocab_size, seed=1)
    measured, ranks = Measured(), int(os.environ["WORLD_SIZE"])
    if name in ("static", "dynamic"):
        trainer = by_hcp(args, config, dataset, dynamic=name == "dynamic")
    else:
        trainer = by_trl(args, config, dataset, ranks, name)
        measured.tokens_per_step = real_tokens(trainer, ranks)
    trainer.add_callback(watch(measured, args.device))
    trainer.train()
    report(measured, args.device)


def by_hcp(args: argparse.Namespace, config: Any, dataset: Any, *, dynamic: bool) -> Any:
    from hcp.integrations.trl import SFTTrainer

    return SFTTrainer(
        model_of(config, "sdpa", args.device),
        options(args.device, max_steps=args.steps, max_length=args.longest),
        train_dataset=dataset,
        processing_class=tokenizer(),
        global_batch_size=args.sequences,
        dynamic_cp=dynamic,
        linear_cross_entropy=True,
        cp=hcp.Config(max_seqlen_per_dp_cp_rank=args.rows),
    )


def by_trl(args: argparse.Namespace, config: Any, dataset: Any, ranks: int, name: str) -> Any:
    import trl

    with_cp = name == "cp"
    packs = args.device == "cuda" and not with_cp
    more: dict[str, Any] = {"per_device_train_batch_size": 1 if packs or with_cp else 2}
    more |= {"gradient_checkpointing": name == "packing-recomputed"}
    if packs:
        more |= {"packing": True, "padding_free": True}
        more |= {"gradient_accumulation_steps": packs_of(args, dataset, ranks)}
        more |= {"train_sampling_strategy": "random"}  # in order, packs of long texts come first
    if with_cp:
        from accelerate import ParallelismConfig

        more |= {"parallelism_config": ParallelismConfig(cp_size=ranks)}
        more |= {"pad_to_multiple_of": 2 * ranks, "gradient_accumulation_steps": args.sequences}
        more |= {"max_steps": min(args.steps, args.warm + CP_STEPS)}
    return trl.SFTTrainer(
        model_of(config, varlen_attention() if packs else "sdpa", args.device),
        options(args.device, **{"max_steps": args.steps, "max_length": args.longest, **more}),
        train_dataset=dataset,
        processing_class=tokenizer(),
    )


def packs_of(args: argparse.Namespace, dataset: Any, ranks: int) -> int:
    """Of a rank in a step, so that a step has about as many tokens as one of hcp's."""
    tokens = sum(len(row["input_ids"]) for row in dataset) / args.steps
    return max(1, round(tokens / args.longest / ranks))


def real_tokens(trainer: Any, ranks: int) -> float:
    """Tokens of a step of packing, padding left out, on average over the data."""
    rows = trainer.train_dataset
    tokens = sum(len(row["input_ids"]) for row in rows) / len(rows)
    each = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    return float(tokens * each * ranks)


def varlen_attention() -> str:
    """The newest FlashAttention that is installed, by its name in Transformers."""
    from transformers.utils.import_utils import is_flash_attn_4_available

    return "flash_attention_4" if is_flash_attn_4_available() else "flash_attention_2"


def model_of(config: Any, attention: str, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.float32 if attention == "sdpa" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        return model.float()


if __name__ == "__main__":
    sys.exit(main())
