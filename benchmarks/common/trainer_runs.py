"""Trainers of TRL, each in processes of its own, which train one model on the same samples.

A benchmark starts itself under torchrun for each contestant, in turns, so that their memory and
their settings do not meet. Rank 0 of a contestant prints what it measured as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.torchrun import started

MARK = "MEASURED "
GIB = 2**30
MODELS: Mapping[str, Mapping[str, int]] = {
    "toy": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "0.7b": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "8b": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""Sizes of Qwen3 models; "8b" are those of Qwen3-8B."""


def config_of(name: str, layers: int | None, longest: int) -> Any:
    """The configuration of a Qwen3 model of these sizes."""
    from transformers import Qwen3Config

    sizes = dict(MODELS[name]) | ({"num_hidden_layers": layers} if layers else {})
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return Qwen3Config(**sizes, **ends, max_position_embeddings=longest, use_cache=False)


def samples(lengths: Sequence[int], vocabulary: int, seed: int) -> Any:
    """Documents of drawn tokens, as TRL takes those that are tokens already."""
    from datasets import Dataset

    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, vocabulary, (n,), generator=draw).tolist() for n in lengths]
    return Dataset.from_list([{"input_ids": row} for row in rows])


def tokenizer() -> Any:
    """One that nothing is read by: TRL asks for its name of padding."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


@dataclass
class Measured:
    """What a contestant's rank 0 prints."""

    seconds: list[float] = field(default_factory=list)
    """Of each step, first to last."""
    losses: list[float] = field(default_factory=list)
    micro_batches: list[float] = field(default_factory=list)
    """Of each step on a rank."""
    gib: float = 0.0
    """The most of torch's allocator on the fullest rank; 0 without a GPU."""
    tokens_per_step: float = 0.0
    """On average, where a trainer draws its own batches."""
    predicted_seconds: float = 0.0
    predicted_gib: float = 0.0


def watch(measured: Measured, device: str) -> Any:
    """A callback that takes the time of each step, its work on the GPU included."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        began = 0.0

        def on_step_begin(self, *given: Any, **named: Any) -> None:
            self.began = _now(device)

        def on_step_end(self, *given: Any, **named: Any) -> None:
            measured.seconds.append(_now(device) - self.began)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any
        ) -> None:
            if "loss" in (logs or {}):
                measured.losses.append(logs["loss"])
                each = logs.get("hcp/micro_batches", args.gradient_accumulation_steps)
                measured.micro_batches.append(each)

    return Watch()


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def options(device: str, **more: Any) -> Any:
    """Options of TRL that all contestants have."""
    from trl import SFTConfig

    on_gpu = device == "cuda"
    sharded = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
    }
    same = {
        "output_dir": tempfile.mkdtemp(),
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # which waits for the GPU in each step
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": False,
        **(sharded if on_gpu else {}),
    }
    return SFTConfig(**same | more)


def report(measured: Measured, device: str) -> None:
    """Print the measurement, on rank 0."""
    import torch.distributed as dist

    if device == "cuda":
        most = torch.tensor(torch.cuda.max_memory_allocated() / GIB, device="cuda")
        dist.all_reduce(most, dist.ReduceOp.MAX)
        measured.gib = float(most)
    if int(os.environ.get("RANK", 0)) == 0:
        print(MARK + json.dumps(vars(measured)), flush=True)


def run(contestant: str, ranks: int, deadline: float) -> Measured | str:
    """Start this benchmark under torchrun for a contestant. Return what it measured, or why it did
    not."""
    program = (str(Path(sys.argv[0]).resolve()), *sys.argv[1:], "--contestant", contestant)
    pipe = subprocess.PIPE
    try:
        with started(ranks, *program, stdout=pipe, stderr=pipe) as torchrun:
            output, errors = torchrun.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        return f"not done after {deadline:g} s"
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if torchrun.returncode or not lines:
        return _reason(errors)
    measured = Measured(**json.loads(lines[-1].removeprefix(MARK)))
    steps = " ".join(f"{seconds:.3g}" for seconds in measured.seconds)
    print(f"{contestant} on {ranks} ranks: steps of {steps} s", flush=True)
    return measured


def _reason(errors: str) -> str:
    """The first line that says an error, else the last one."""
    lines = errors.strip().splitlines() or ["it ended without a result"]
    named = [line for line in lines if re.search(r"\b\w+Error: ", line)]
    return (named or lines[-1:])[0].strip()[-500:]


def add_arguments(parser: argparse.ArgumentParser, model: tuple[str, str]) -> None:
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    says = f"sizes of a Qwen3 (CPU: {model[0]}, CUDA: {model[1]})"
    parser.add_argument("--model", choices=MODELS, help=says)
    parser.add_argument("--layers", type=int, help="so many of its layers (all)")
    parser.add_argument("--warm", type=int, help="first steps that do not count")
    parser.add_argument("--steps", type=int, help="of each contestant, with those")
    parser.add_argument("--contestants", nargs="+", help="some of them (all that run here)")
