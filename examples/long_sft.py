"""Supervised fine-tuning of long sequences: TRL's SFTTrainer with hcp, FSDP2 and memory choices.

    torchrun --nproc-per-node 8 examples/long_sft.py --model MODEL --max-length 1048576 --data DATA
    torchrun --nproc-per-node 2 examples/long_sft.py --model Qwen/Qwen3-8B --layers 4 \
        --max-length 262144 --data FOLDER
    torchrun --nproc-per-node 2 examples/long_sft.py --model FOLDER --layers 2 --max-length 2048 \
        --data FOLDER --join                # CPU ranks: a tokenizer and a config.json are enough

Needs `pip install -e '.[trl]'`. --model is any causal language model of Transformers whose MLP and
attention hcp knows. --layers K takes K layers of its configuration with random weights, so that no
weights are read. --data is a text file, a folder of them, JSON lines, Parquet, or a data set on the
hub. A row becomes one sequence, cut at --max-length; --join makes rows of that length of all texts.

Before the first step rank 0 prints what a step is predicted to take, and which layers are kept,
recomputed or offloaded; a length that cannot fit is refused with the longest that can. --prices
reads a file of `hcp calibrate --memory --model`; without it each rank measures a layer, for some
seconds. All about CP is `cp=`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils.fsdp_utils import enable_fsdp_ram_efficient_loading
from datasets import Dataset, load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig

import hcp
from hcp.integrations.transformers import memory
from hcp.integrations.trl import SFTTrainer

WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))
ON_GPUS = torch.cuda.is_available()
GIB = 2**30


# ---- model and data ------------------------------------------------------------------------------


def config_of(args: argparse.Namespace) -> Any:
    config = AutoConfig.from_pretrained(args.model)
    if args.layers:
        text = config.get_text_config()
        text.num_hidden_layers = args.layers
        if kinds := getattr(text, "layer_types", None):
            text.layer_types = kinds[: args.layers]
    if args.rope_parameters:
        text = config.get_text_config()
        text.rope_parameters = text.rope_parameters | args.rope_parameters
    config.use_cache = False
    return config


def model_of(args: argparse.Namespace, config: Any) -> Any:
    """Weights are float32: FSDP2 shards them, and gathers them in bfloat16 on GPUs. Of those that
    are read the first rank of each host alone holds values; rank 0 sends each its shards."""
    dtype = torch.get_default_dtype()
    if args.layers:
        torch.manual_seed(args.seed)
        with torch.device("cuda" if ON_GPUS else "cpu"):  # drawn in seconds, not in minutes
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    waits = fsdp_is_on(args) and int(os.environ.get("LOCAL_RANK", 0)) > 0
    place = {"device_map": "meta"} if waits else {}
    return AutoModelForCausalLM.from_pretrained(args.model, config=config, dtype=dtype, **place)


def texts_of(path: str) -> Dataset:
    """Rows of text, or of messages: what TRL takes."""
    found = Path(path)
    if found.is_dir():
        files = sorted(p for p in found.iterdir() if p.suffix in (".txt", ".md", ".py"))
        if not files:
            raise SystemExit(f"--data: {path} has no .txt, .md or .py file; name a .jsonl itself")
        return Dataset.from_list([{"text": p.read_text(errors="replace")} for p in files])
    kinds = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json"}
    kind = kinds.get(found.suffix, "parquet")
    if found.exists() and kind == "text":
        return Dataset.from_list([{"text": found.read_text(errors="replace")}])
    if found.exists():
        return load_dataset(kind, data_files=path, split="train")
    return load_dataset(path, split="train")


def joined(texts: Dataset, tokenizer: Any, length: int) -> Dataset:
    """All texts one after the other, in rows of ``length`` tokens."""
    if "text" not in texts.column_names:
        raise SystemExit(f"--join takes rows of text, not {', '.join(texts.column_names)}")
    end = [tokenizer.eos_token_id]
    tokens = [t for row in texts for t in tokenizer(row["text"], verbose=False)["input_ids"] + end]
    starts = range(0, max(1, len(tokens) - length + 1), length)
    return Dataset.from_list([{"input_ids": tokens[at : at + length]} for at in starts])


# ---- memory --------------------------------------------------------------------------------------


def machine_of(args: argparse.Namespace) -> memory.Machine:
    device, host = args.device_gib, args.host_gib
    if device is None:
        total = torch.cuda.mem_get_info()[1] if ON_GPUS else _host_bytes() / WORLD
        device = args.memory_share * total / GIB
    if host is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", WORLD))
        host = 0.8 * _host_bytes() / local / GIB
    return memory.Machine(
        *(WORLD, int(device * GIB), int(host * GIB), args.offload_state),
        accumulates=args.sequences > 1,
    )


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def prices_of(args: argparse.Namespace, config: Any, dtype: torch.dtype) -> memory.Prices:
    """Of the file, or of this device: those of rank 0, so that all ranks choose alike."""
    if args.prices:
        return memory.Prices.load(args.prices)
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPUS else torch.device("cpu")
    lengths = (8192, 32_768) if ON_GPUS else (64, 256)
    found: list[Any] = [asdict(memory.measure(config, device, dtype, lengths).prices)]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return memory.Prices(**found[0])


def chosen(args: argparse.Namespace, config: Any) -> memory.Forecast:
    dtype = torch.bfloat16 if ON_GPUS else torch.get_default_dtype()
    counted = memory.model_bytes(config, dtype)
    prices, machine = prices_of(args, config, dtype), machine_of(args)
    return memory.choose(config, counted, prices, machine, args.max_length)


# ---- the run -------------------------------------------------------------------------------------


def fsdp_is_on(args: argparse.Namespace) -> bool:
    return bool(ON_GPUS or args.fsdp)


def sharded(args: argparse.Namespace, layer_class: str) -> dict[str, Any]:
    """FSDP2, each layer a group of its own."""
    offload = args.offload_state
    fsdp: Any = True
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 12):  # then it wants words
        fsdp = "full_shard auto_wrap" + " offload" * offload
    wrap = {"version": 2, "transformer_layer_cls_to_wrap": [layer_class]}
    if not args.layers:
        enable_fsdp_ram_efficient_loading()  # which Transformers asks for when it reads weights
        wrap |= {"cpu_ram_efficient_loading": True}
    return {"fsdp": fsdp, "fsdp_config": wrap | {"cpu_offload": offload}}


def sft_config(args: argparse.Namespace, layer_class: str) -> SFTConfig:
    shards = sharded(args, layer_class) if fsdp_is_on(args) else {}
    return SFTConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_length=args.max_length,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,  # hcp's choice says what is computed again
        bf16=ON_GPUS,
        use_cpu=not ON_GPUS,
        logging_steps=1,
        disable_tqdm=True,
        report_to=args.report_to,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        seed=args.seed,
        **shards,
    )


class Clock(TrainerCallback):  # type: ignore[misc]
    """Takes the time between the ends of steps, each of which waits for its loss."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *given: Any, **named: Any) -> None:
        self.ends.append(time.perf_counter())

    def told(self) -> str:
        if len(self.ends) < 2:
            return "one step, whose seconds also compile kernels"
        return f"{median(b - a for a, b in pairwise(self.ends)):.4g} s a step after the first"


def trainer_of(args: argparse.Namespace, prepare: Any = lambda: None) -> SFTTrainer:
    """Return hcp's trainer. ``prepare``: called once TRL's arguments are there."""
    config = config_of(args)
    forecast = chosen(args, config)
    if RANK == 0:
        print(forecast.told(), flush=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = texts_of(args.data)
    dataset = joined(texts, tokenizer, args.max_length) if args.join else texts
    held_out = dataset.select(range(args.held_out)) if args.held_out else None
    with torch.device("meta"):
        layer_class = type(memory.layers_of(AutoModelForCausalLM.from_config(config))[0]).__name__
    sft = sft_config(args, layer_class)
    model = model_of(args, config)
    applied = memory.apply(model, forecast.choice)
    prepare()
    trainer = SFTTrainer(
        model,
        sft,
        train_dataset=dataset.select(range(args.held_out, len(dataset))),
        eval_dataset=held_out,
        processing_class=tokenizer,
        linear_cross_entropy=True,
        global_batch_size=args.sequences,
        cp=hcp.Config(
            max_seqlen_per_dp_cp_rank=2 + forecast.rows,
            eval_context_parallel_size=args.eval_cp,
        ),
    )
    trainer.memory_choice = applied
    return trainer


def train(args: argparse.Namespace, prepare: Any = lambda: None) -> SFTTrainer:
    trainer = trainer_of(args, prepare)
    if ON_GPUS:
        torch.cuda.reset_peak_memory_stats()
    trainer.add_callback(clock := Clock())
    trainer.train(resume_from_checkpoint=args.resume)
    if args.held_out:
        trainer.evaluate()
    if ON_GPUS and RANK == 0:
        most = torch.cuda.max_memory_allocated() / GIB
        print(f"measured: {clock.told()}, {most:.2f} GiB at the most", flush=True)
    return trainer


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a model on long sequences, with CP, FSDP2 and a choice of memory"
    )
    add = parser.add_argument
    add("--model", required=True, help="name on the hub or folder")
    add(
        "--data",
        required=True,
        help=".txt, .md, .jsonl, .parquet, a folder of .txt, .md and .py, or name on the hub",
    )
    add(
        "--max-length",
        type=int,
        default=1_048_576,
        help="tokens of a sequence; the rest is cut (default: %(default)s)",
    )
    add(
        "--layers",
        type=int,
        default=0,
        help="layers of a model with random weights (default: the trained model, whole)",
    )
    add(
        "--rope-parameters",
        type=json.loads,
        help="JSON in addition to those of the model's config.json, for lengths that it was not "
        'trained for, such as \'{"rope_type": "yarn", "factor": 32.0, '
        '"original_max_position_embeddings": 32768}\'',
    )
    add("--join", action="store_true", help="join texts to rows of --max-length tokens")
    add("--steps", type=int, default=20, help="updates (default: %(default)s)")
    add(
        "--sequences",
        type=int,
        default=1,
        help="sequences of a step, on all ranks together (default: %(default)s)",
    )
    add(
        "--held-out",
        type=int,
        default=0,
        help="first sequences, not trained on but evaluated at the end (default: none)",
    )
    add("--eval-cp", type=int, help="CP size of the evaluation (default: chosen as in training)")
    add("--lr", type=float, default=1e-5, help="learning rate (default: %(default)s)")
    add("--prices", help="a file of `hcp calibrate --memory --model` (default: measured now)")
    add("--device-gib", type=float, help="what a GPU may hold (default: --memory-share of it)")
    add(
        "--memory-share",
        type=float,
        default=0.92,
        help="share of a GPU's memory that training may fill (default: %(default)s)",
    )
    add(
        "--host-gib",
        type=float,
        help="what a rank may hold of its host (default: an even share of 0.8 of it)",
    )
    add("--offload-state", action="store_true", help="parameters and optimizer on the host")
    add("--fsdp", action="store_true", help="shard by FSDP2 without a GPU, too")
    add(
        "--save-steps",
        type=int,
        default=0,
        help="steps from one checkpoint to the next (default: nothing is saved)",
    )
    add("--resume", metavar="DIR", help="checkpoint to resume from")
    add("--report-to", nargs="*", default=[], help="loggers of Transformers, such as wandb")
    add("--output", default="runs/long_sft", help="folder (default: %(default)s)")
    add("--seed", type=int, default=0, help="of random weights and the run (default: %(default)s)")
    return parser.parse_args(argv)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    if ON_GPUS:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:  # under torchrun; without it hcp makes a job of one rank
        dist.init_process_group("nccl" if ON_GPUS else "gloo")
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
