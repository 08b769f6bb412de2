"""The trainers of check_trainers.py with hcp: the same documents on one rank or on many."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from trainers_work import Timed, Work, averaged, documents, llama

import hcp


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
            loss = causal_lm_loss(model, cp, local, grad_reduce="mean")
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
            return causal_lm_loss(self.model, *batch, grad_reduce="mean")

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
            loss = causal_lm_loss(engine, cp, local, grad_reduce="mean")
            engine.backward(loss)
            total += loss.detach()
        engine.step()
        timed.step(averaged(total))


def by_torchtitan(work: Work, config: hcp.Config, cuda: bool, timed: Timed) -> None:
    import trainers_titan

    trainers_titan.train(work, config, cuda, timed)


WITH_HCP: dict[str, Callable[[Work, hcp.Config, bool, Timed], None]] = {
    "transformers": by_transformers,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "deepspeed": by_deepspeed,
    "torchtitan": by_torchtitan,
}
"""Trainers with hcp."""
