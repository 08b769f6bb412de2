"""Trainers on the GPUs of one host: the losses of one rank against those of all, tokens per second.

    python tests/cuda/check_trainers.py --trainers transformers accelerate lightning deepspeed

Each trainer trains a Llama of random weights with sharded parameters, in bfloat16 with the kernels
that `auto` chooses: on one rank, then on all under dynamic CP, then on all under static CP. The
losses of every step must agree. More --ranks than GPUs share them, which says nothing about speed.
--device cpu runs toys in float32 over Gloo, with DDP where the trainer shards on GPUs only. The
last line of each trainer is its row of the table; the exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hcp
from hcp._words import Scheduler

RUNS = {"one rank": "dynamic_cp", "dynamic": "dynamic_cp", "static": "static_cp"}
"""Runs of a trainer, and their schedulers."""


@dataclass(frozen=True)
class Work:
    """What is trained. A step has `batch` documents, of `longest` tokens at most."""

    hidden_size: int
    layers: int
    vocabulary: int
    longest: int
    batch: int
    steps: int
    apart: float
    """Most that the losses of a step may be apart."""


WORK = {
    "cuda": Work(1024, 8, 8192, 16384, 32, 6, 2e-2),
    "cpu": Work(32, 2, 64, 64, 6, 3, 1e-5),
}


def documents(work: Work) -> list[dict[str, torch.Tensor]]:
    """Draw documents whose lengths are lognormal, as those of text are."""
    generator = torch.Generator().manual_seed(7)
    count = work.batch * work.steps
    lengths = torch.randn(count, generator=generator).exp() * work.longest / 8
    return [
        {"input_ids": torch.randint(3, work.vocabulary, (int(n),), generator=generator)}
        for n in lengths.clamp(2, work.longest)
    ]


def llama(work: Work) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=work.vocabulary,
        hidden_size=work.hidden_size,
        intermediate_size=2 * work.hidden_size,
        num_hidden_layers=work.layers,
        num_attention_heads=max(work.hidden_size // 128, 4),
        num_key_value_heads=max(work.hidden_size // 512, 2),
        max_position_embeddings=work.longest,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config)


@dataclass
class Timed:
    """The loss of each step, and the seconds of all but the first two."""

    losses: list[float]
    ends: list[float]

    def step(self, loss: float) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.losses.append(loss)
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        warm = min(2, len(self.ends) - 1)
        return (self.ends[-1] - self.ends[warm - 1]) / (len(self.ends) - warm)


# ---- trainers ------------------------------------------------------------------------------------


def by_transformers(work: Work, config: hcp.Config, cuda: bool, timed: Timed) -> None:
    from transformers import TrainerCallback, TrainingArguments

    from hcp.integrations.transformers import Trainer

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                timed.step(logs["loss"])

    sharded = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        "bf16": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=work.batch // dist.get_world_size(),
            num_train_epochs=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            **(sharded if cuda else {"use_cpu": True}),
        )
        trainer = Trainer(
            llama(work),
            arguments,
            train_dataset=documents(work),
            cp=config,
            dynamic_cp=config.sequence_packing_scheduler == "dynamic_cp",
            callbacks=[Watch()],
        )
        trainer.train()


def by_accelerate(work: Work, config: hcp.Config, cuda: bool, timed: Timed) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from hcp.integrations.accelerate import ContextParallel
    from hcp.integrations.transformers import causal_lm_loss, register_hcp_attention

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(
        cpu=not cuda,
        mixed_precision="bf16" if cuda else "no",
        fsdp_plugin=plugin if cuda else None,
    )
    parallel = ContextParallel(accelerator, config)
    model = llama(work).to(accelerator.device)
    register_hcp_attention(model)
    loader = parallel.train_loader(documents(work), global_batch_size=work.batch, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step in loader:
        total = torch.zeros((), device=accelerator.device)
        for cp, local in parallel.micro_batches(model, step):
            loss = causal_lm_loss(model, cp, local)
            accelerator.backward(loss)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        timed.step(averaged(total))


def by_lightning(work: Work, config: hcp.Config, cuda: bool, timed: Timed) -> None:
    import lightning
    from torch.distributed.fsdp import fully_shard

    from hcp.integrations.lightning import ContextParallelFSDP2Strategy, DynamicCPDataLoader
    from hcp.integrations.transformers import causal_lm_loss, register_hcp_attention

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(work)
            register_hcp_attention(self.model)

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for layer in (*self.model.model.layers, self.model):
                fully_shard(layer, mesh=mesh)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return causal_lm_loss(self.model, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            timed.step(float(self.trainer.callback_metrics["train_loss"]))

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices=dist.get_world_size(),
        strategy=ContextParallelFSDP2Strategy(process_group_backend="nccl" if cuda else "gloo"),
        precision="bf16-mixed" if cuda else "32-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    groups = hcp.build_process_groups()
    loader = DynamicCPDataLoader(
        documents(work), config, groups, global_batch_size=work.batch, shuffle=False, model=module
    )
    trainer.fit(module, loader)


def by_deepspeed(work: Work, config: hcp.Config, cuda: bool, timed: Timed) -> None:
    import deepspeed

    from hcp.integrations.deepspeed import DynamicCPDataLoader, micro_batches
    from hcp.integrations.transformers import causal_lm_loss, register_hcp_attention

    model = llama(work)
    register_hcp_attention(model.cuda() if cuda else model)
    options = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": cuda},
        "gradient_clipping": 1.0,
    }
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=options)[0]
    groups = hcp.build_process_groups()
    loader = DynamicCPDataLoader(
        documents(work),
        config,
        groups,
        global_batch_size=work.batch,
        shuffle=False,
        model=engine.module,
    )
    for step in loader:
        total = torch.zeros((), device=engine.device)
        for cp, local in micro_batches(engine, step):
            loss = causal_lm_loss(engine, cp, local)
            engine.backward(loss)
            total += loss.detach()
        engine.step()
        timed.step(averaged(total))


def averaged(total: torch.Tensor) -> float:
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


TRAINERS: dict[str, Callable[[Work, hcp.Config, bool, Timed], None]] = {
    "transformers": by_transformers,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "deepspeed": by_deepspeed,
}


# ---- one run, as a rank --------------------------------------------------------------------------


def run(trainer: str, scheduler: Scheduler, device: str, file: Path) -> None:
    """Train as a rank of torchrun. Rank 0 writes losses and tokens per second into the file."""
    cuda, work, ranks = device == "cuda", WORK[device], int(os.environ["WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    dist.init_process_group("nccl" if cuda else "gloo")
    limit = work.longest if ranks == 1 else -(-work.longest * 3 // (2 * ranks))
    config = hcp.Config(
        sequence_packing_scheduler=scheduler,
        max_seqlen_per_dp_cp_rank=limit,
        context_parallel_size=ranks if scheduler == "static_cp" else None,
    )
    timed = Timed([], [])
    TRAINERS[trainer](work, config, cuda, timed)
    tokens = sum(len(each["input_ids"]) for each in documents(work)) / work.steps
    if dist.get_rank() == 0:
        found = {"losses": timed.losses, "tokens_per_s": tokens / timed.seconds()}
        file.write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of a trainer's may outlive its group for a moment


# ---- all runs ------------------------------------------------------------------------------------


def compare(trainer: str, ranks: int, device: str, limit_s: float, folder: Path) -> bool:
    """Run a trainer three times, print its row, and return whether its losses agree."""
    found = {}
    for name, scheduler in RUNS.items():
        file = folder / f"{trainer}-{name.replace(' ', '-')}.json"
        size = 1 if name == "one rank" else ranks
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(size), *_on_fewer_gpus(size, device)),
            *(__file__, "--device", device),
            *("--as-rank", trainer, scheduler, str(file)),
        ]
        with file.with_suffix(".log").open("w") as log:
            code = ended(command, log, limit_s)
        if code or not file.exists():
            print(file.with_suffix(".log").read_text()[-3000:])
            print(f"BAD {trainer:14} {name}: exit code {code}", flush=True)
            return False
        found[name] = json.loads(file.read_text())
    one, work = found["one rank"], WORK[device]
    apart = max(
        abs(loss - expected)
        for each in found.values()
        for loss, expected in zip(each["losses"], one["losses"], strict=True)
    )
    good = apart <= work.apart and len(one["losses"]) == work.steps
    speeds = "  ".join(f"{name} {each['tokens_per_s']:9.0f}" for name, each in found.items())
    print(
        f"{'ok ' if good else 'BAD'} {trainer:14} losses {one['losses'][0]:.4f} to "
        f"{one['losses'][-1]:.4f}, apart by {apart:.1e}  tokens/s: {speeds}",
        flush=True,
    )
    return good


def _on_fewer_gpus(ranks: int, device: str) -> list[str]:
    """The program by which more ranks than GPUs share them, each as a host of its own to NCCL."""
    shared = device == "cuda" and ranks > torch.cuda.device_count()
    return [str(Path(__file__).with_name("as_nodes.py")), str(ranks)] if shared else []


def ended(command: Sequence[str], log: Any, limit_s: float) -> int | None:
    try:
        return subprocess.run(command, stdout=log, stderr=log, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--ranks", type=int, help="default: every GPU; 2 on a CPU")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds of each run")
    parser.add_argument("--as-rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        logging.getLogger("hcp").setLevel(logging.ERROR)
        trainer, scheduler, file = args.as_rank
        run(trainer, scheduler, args.device, Path(file))
    ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    folder = Path(os.environ.get("OUT") or tempfile.mkdtemp())
    good = [compare(each, ranks, args.device, args.limit_s, folder) for each in args.trainers]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
