"""What a micro-batch without rows costs a rank.

    torchrun --nproc-per-node 2 benchmarks/studies/empty_micro_batches.py [--models transformers]
    torchrun --nproc-per-node 2 benchmarks/studies/empty_micro_batches.py --device cpu

A plan under `sync="step"` may give a rank fewer sequences than there are micro-batches. The rank
still runs the model forward and backward in each, on nothing. The last rank is timed. It has some
micro-batches of --rows rows, then some of none. The first rank has rows in all. Models:

    transformers    Qwen 3 of Transformers under `register_hcp_attention`
    megatron        the GPT of Megatron-Core under `hcp_layer_spec`, with its local layers

Columns: milliseconds of a micro-batch with rows, and of one without: when the device has nothing
else to do ("alone"), and what one adds that follows micro-batches with rows ("1 + 1": one after
one). What is less than "alone" is hidden, because the host queues it while the device computes.
"host" is the host's time to queue one. "tokens" is the time of one alone in tokens of a
micro-batch with rows. Medians of rounds through all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from common.batches import sample
from common.flags import parser_of
from common.timing import device_name, end_ranks, queued, start_ranks, timed
from torch import Tensor

import hcp

FULL = {"rows": 8192, "num_layers": 24, "hidden_size": 1536, "num_attention_heads": 12}
TINY = {"rows": 64, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
VOCABULARY = 32_768
SHORT = 16
"""Rows of the first rank where the last one has none."""
MIXES = ((1, 0), (0, 1), (0, 8), (1, 1), (1, 4), (1, 8))
"""Micro-batches with rows and without, of a run."""
Run = Callable[[], object]


def main() -> int:
    args = arguments()
    device = start_ranks(args.device, args.deadline, timedelta(seconds=60))
    if dist.get_world_size() < 2:
        raise SystemExit("one rank has rows in every micro-batch, expected 2 ranks or more")
    tell(
        f"{dist.get_world_size()} x {device_name(device)}, torch {torch.__version__}, hcp "
        f"{hcp.__version__}\n{args.num_layers} layers of {args.hidden_size}, {args.rows} rows\n\n"
        "| model | rows, ms | none, alone, ms | 1 + 1 | 1 + 4 | 1 + 8 | host, ms | tokens |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    with closing(hcp.build_process_groups()) as groups, on_device(args):
        for name in args.models:
            runs = {mix: MODELS[name](args, groups, *mix) for mix in MIXES}
            tell(row_of(name, args, *times_of(runs, device, args.rounds)))
    end_ranks()
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=9, deadline=150)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    for name, size in FULL.items():
        says = f"({size}; {TINY[name]} on the CPU)"
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=says)
    args = parser.parse_args()
    for name, size in (FULL if args.device == "cuda" else TINY).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    return args


# ---- times ---------------------------------------------------------------------------------------


def times_of(
    runs: dict[tuple[int, int], Run], device: torch.device, rounds: int
) -> tuple[dict[tuple[int, int], float], float]:
    """Return the last rank's seconds of each mix, and the host's to queue a micro-batch of none."""
    own = dist.get_rank() == dist.get_world_size() - 1
    times: dict[tuple[int, int], list[float]] = {mix: [] for mix in runs}
    host = []
    for number in range(rounds + 2):
        for mix, run in runs.items():
            seconds = timed(run if own else nothing, device)
            if number > 1:
                times[mix].append(seconds)
        host.append(queued(runs[0, 1] if own else nothing, device))
    found: list[Any] = [{mix: statistics.median(taken) for mix, taken in times.items()}, 0.0]
    found[1] = statistics.median(host[2:])
    dist.broadcast_object_list(found, src=dist.get_world_size() - 1)
    return found[0], found[1]


def on_device(args: argparse.Namespace) -> AbstractContextManager[None]:
    """Megatron calls CUDA where it has none, unless it is kept from that."""
    if args.device == "cuda" or "megatron" not in args.models:
        return nullcontext()
    from hcp.integrations.megatron import megatron_on_cpu

    return megatron_on_cpu()


def nothing() -> None:
    pass


def row_of(
    name: str, args: argparse.Namespace, times: dict[tuple[int, int], float], host: float
) -> str:
    full, alone = times[1, 0], times[0, 8] / 8
    added = [(times[1, n] - full) / n for n in (1, 4, 8)]
    cells = [f"{1e3 * seconds:.3f}" for seconds in (full, alone, *added, host)]
    return f"| {name} | {' | '.join(cells)} | {alone / full * args.rows:.0f} |"


# ---- models --------------------------------------------------------------------------------------


def step_of(args: argparse.Namespace, groups: hcp.ProcessGroups, full: int, empty: int) -> hcp.Step:
    """Dispatch micro-batches with rows on every rank, then such as have them on the first alone."""
    ranks, rank = groups.size("dp_cp"), groups.rank("dp_cp")
    lengths = [args.rows] * full * ranks + [SHORT] * empty
    plan = hcp.Plan.from_dict(
        {
            **hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=args.rows + 2).to_dict(),
            "micro_batches": [
                *(
                    {"groups": [group(r, step * ranks + r) for r in range(ranks)]}
                    for step in range(full)
                ),
                *({"groups": [group(0, full * ranks + i)]} for i in range(empty)),
            ],
        }
    )
    sources = [i % ranks if i < full * ranks else 0 for i in range(len(lengths))]
    device = groups.transport.device
    mine = [
        {
            **sample(length, length, i, device),
            "input_ids": sample(length, length, i, device)["tokens"],
        }
        for i, (length, source) in enumerate(zip(lengths, sources, strict=True))
        if source == rank
    ]
    return hcp.dispatch(plan, mine, sources, groups)


def group(rank: int, sequence: int) -> dict[str, Any]:
    return {"first_rank": rank, "degree": 1, "sequences": [sequence]}


def transformers_run(
    args: argparse.Namespace, groups: hcp.ProcessGroups, full: int, empty: int
) -> Run:
    from hcp.integrations.transformers import causal_lm_loss

    model, step = transformers_model(args, groups), step_of(args, groups, full, empty)
    on_gpu = groups.transport.device.type == "cuda"

    def run() -> None:
        for cp, local in step:
            with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
                loss = causal_lm_loss(model, cp, local, grad_reduce="sum")
            loss.backward()

    return run


def transformers_model(args: argparse.Namespace, groups: hcp.ProcessGroups) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from hcp.integrations.transformers import register_hcp_attention

    if "transformers" not in BUILT:
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=args.hidden_size,
            intermediate_size=3 * args.hidden_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=args.num_attention_heads,
            num_key_value_heads=args.num_attention_heads // 2,
            head_dim=args.hidden_size // args.num_attention_heads,
            max_position_embeddings=args.rows,
        )
        device = groups.transport.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = Qwen3ForCausalLM(config).to(device, dtype)
        register_hcp_attention(model)
        BUILT["transformers"] = model
    return BUILT["transformers"]


def megatron_run(args: argparse.Namespace, groups: hcp.ProcessGroups, full: int, empty: int) -> Run:
    from hcp.integrations.megatron.data import MicroBatches

    model = megatron_model(args, groups)
    batches = list(MicroBatches(step_of(args, groups, full, empty)))

    def run() -> None:
        for batch in batches:
            names = ("tokens", "position_ids", "attention_mask")
            given = {"labels": batch["labels"], "packed_seq_params": batch["packed_seq_params"]}
            losses: Tensor = model(*(batch.get(name) for name in names), **given)
            (losses.float() * batch["loss_mask"]).sum().backward()

    return run


def megatron_model(args: argparse.Namespace, groups: hcp.ProcessGroups) -> Any:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    from hcp.integrations.megatron import hcp_layer_spec

    if "megatron" in BUILT:
        return BUILT["megatron"]
    device = groups.transport.device
    on_gpu = device.type == "cuda"
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=3 * args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_attention_heads // 2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
    )
    spec = hcp_layer_spec(get_gpt_layer_local_spec(normalization="RMSNorm"))
    size = args.rows * dist.get_world_size()
    model = GPTModel(config, spec, VOCABULARY, size, position_embedding_type="rope")
    BUILT["megatron"] = model.to(device)
    return BUILT["megatron"]


BUILT: dict[str, Any] = {}
MODELS: dict[str, Callable[..., Run]] = {
    "transformers": transformers_run,
    "megatron": megatron_run,
}


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
