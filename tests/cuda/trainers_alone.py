"""The trainers of check_trainers.py without hcp: on one rank, or with a CP of their own.

They compute one document at a time, with the attention that the trainer takes by default. Their own
CP cuts it into 2 x ranks equal chunks: each document is filled up to a multiple of that.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from trainers_work import Timed, Work, averaged, documents, llama

IGNORED = -100


def filled_up(document: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a document as a batch of one row, of a length that every rank has an equal part of."""
    tokens = document["input_ids"]
    behind = 0 if dist.get_world_size() == 1 else -len(tokens) % (2 * dist.get_world_size())
    labels = F.pad(tokens, (0, behind), value=IGNORED)
    return {
        "input_ids": F.pad(tokens, (0, behind))[None],
        "labels": labels[None],
        "shift_labels": F.pad(labels[1:], (0, 1), value=IGNORED)[None],
        "position_ids": torch.arange(len(labels))[None],
    }


def steps_of(work: Work) -> Iterator[tuple[list[dict[str, torch.Tensor]], int]]:
    """Yield the documents of each step, and the number of their labels."""
    rows = [filled_up(each) for each in documents(work)]
    for first in range(0, len(rows), work.batch):
        batch = rows[first : first + work.batch]
        yield batch, sum(int((row["shift_labels"] != IGNORED).sum()) for row in batch)


def share_of(model: Any, row: dict[str, torch.Tensor], labels: int) -> torch.Tensor:
    """Return what a document adds to the mean loss of a step that has so many labels."""
    logits = model(input_ids=row["input_ids"], position_ids=row["position_ids"]).logits
    found = logits.float().flatten(0, 1), row["shift_labels"].flatten()
    return F.cross_entropy(*found, ignore_index=IGNORED, reduction="sum") / labels


def by_transformers(work: Work, cuda: bool, timed: Timed) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                timed.step(logs["loss"])

    sharded = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        "bf16": True,
        "parallelism_config": parallelism(),
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=work.batch,
            num_train_epochs=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
            **(sharded if cuda else {"use_cpu": True}),
        )
        trainer = Trainer(
            llama(work),
            arguments,
            train_dataset=documents(work),
            data_collator=lambda rows: filled_up(*rows),
            callbacks=[Watch()],
        )
        trainer.train()


def parallelism() -> Any:
    """Return Accelerate's configuration of its own CP over all ranks, None for one rank."""
    from accelerate import ParallelismConfig

    ranks = dist.get_world_size()
    return ParallelismConfig(cp_size=ranks) if ranks > 1 else None


def by_accelerate(work: Work, cuda: bool, timed: Timed) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(
        cpu=not cuda,
        mixed_precision="bf16" if cuda else "no",
        fsdp_plugin=plugin if cuda else None,
        parallelism_config=parallelism(),
    )
    model = llama(work).to(accelerator.device)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    names = ("input_ids", "shift_labels", "position_ids")
    for batch, labels in steps_of(work):
        total = torch.zeros((), device=accelerator.device)
        for i, whole in enumerate(batch):
            row = {name: whole[name].to(accelerator.device) for name in names}
            buffers = list(row.values())
            with (
                accelerator.maybe_context_parallel(
                    buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers)
                ),
                accelerator.no_sync(model) if i + 1 < len(batch) else contextlib.nullcontext(),
            ):
                loss = share_of(model, row, labels) * dist.get_world_size()
                accelerator.backward(loss)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        timed.step(averaged(total))


def by_lightning(work: Work, cuda: bool, timed: Timed) -> None:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.automatic_optimization = llama(work), False

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for layer in (*self.model.model.layers, self.model):
                fully_shard(layer, mesh=mesh)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            rows, labels = batch
            total = torch.zeros((), device=self.device)
            for row in rows:
                loss = share_of(self.model, row, labels)
                self.manual_backward(loss)
                total += loss.detach()
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            timed.step(total.item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    trainer = lightning.Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices=1,
        strategy=ModelParallelStrategy(process_group_backend="nccl" if cuda else "gloo"),
        precision="bf16-mixed" if cuda else "32-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    steps: Any = list(steps_of(work))
    loader: Any = torch.utils.data.DataLoader(steps, batch_size=None)
    trainer.fit(Module(), loader)


def by_deepspeed(work: Work, cuda: bool, timed: Timed) -> None:
    import deepspeed

    model = llama(work)
    options = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": work.batch,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": cuda},
        "gradient_clipping": 1.0,
    }
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=options)[0]
    for batch, labels in steps_of(work):
        total = torch.zeros((), device=engine.device)
        for whole in batch:
            row = {name: rows.to(engine.device) for name, rows in whole.items()}
            loss = share_of(engine, row, labels)
            engine.backward(loss * work.batch)  # which the engine divides by again
            engine.step()
            total += loss.detach()
        timed.step(averaged(total))


def by_torchtitan(work: Work, cuda: bool, timed: Timed) -> None:
    import trainers_titan

    trainers_titan.train(work, None, cuda, timed)


ALONE: dict[str, Callable[[Work, bool, Timed], None]] = {
    "transformers": by_transformers,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "deepspeed": by_deepspeed,
    "torchtitan": by_torchtitan,
}
"""Trainers without hcp."""

OWN_CP = ("transformers", "accelerate", "torchtitan")
"""Those with context parallelism of their own in `ALONE`. PyTorch's needs GPUs."""
