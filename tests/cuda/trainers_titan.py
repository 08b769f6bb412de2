"""torchtitan for check_trainers.py, with hcp or alone: rows of one document, all of one length.

Its own CP refuses packed attention; with equal documents both compute the same.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from trainers_work import Timed, Work

import hcp

sys.path.insert(0, str(Path(__file__).parents[1]))


def train(work: Work, config: hcp.Config | None, cuda: bool, timed: Timed) -> None:
    """Train with hcp, or without: on one rank, or under torchtitan's own CP over all."""
    if cuda:
        os.environ["TITAN_ON_GPU"] = "1"
    from support import titan
    from torchtitan.components.checkpoint import CheckpointManager

    job = titan.config_of(
        config or hcp.Config(work.longest),
        spec=titan.spec_of(flavor="1B" if cuda else "debugmodel", layers=work.layers),
        steps=work.steps,
        local_batch_size=1,
        global_batch_size=work.batch,
        seq_len=work.longest,
        loader=titan.Loader.Config(shortest=work.longest, longest=work.longest),
        training={"mixed_precision_param": "bfloat16" if cuda else "float32"},
        checkpoint=CheckpointManager.Config(enable=False),
    )
    run = titan.Run(job if config else alone(job))
    log = run.trainer.metrics_processor.log

    def watch(step: int, loss: float, *others: Any, **named: Any) -> None:
        log(step, loss, *others, **named)
        timed.step(float(loss))

    run.trainer.metrics_processor.log = watch
    run.train()
    run.close()


def alone(job: Any) -> Any:
    """Return the configuration of torchtitan's own trainer that is like this one of hcp's."""
    from torchtitan.components.validate import Validator
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    given = {each.name: getattr(job, each.name) for each in fields(Trainer.Config)}
    own = llama3.model_registry(job.model_spec.flavor, attn_backend="flex")
    del own.model.layers[len(job.model_spec.model.layers) :]
    for layer in own.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    job.parallelism.context_parallel_degree = dist.get_world_size()
    given |= {"model_spec": own, "validator": Validator.Config(enable=False)}
    return Trainer.Config(**given)


def tokens_of(work: Work) -> int:
    """The tokens of all steps."""
    return work.longest * work.batch * work.steps
