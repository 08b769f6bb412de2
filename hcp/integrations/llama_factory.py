"""LLaMA-Factory: its pre-training and supervised fine-tuning with dynamic context parallelism.

plan_llama_factory(hcp.Config(max_seqlen_per_dp_cp_rank=16_384))
llamafactory.train.tuner.run_exp()                 # reads its YAML from the command line
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from hcp._versions import has_seam
from hcp.integrations.downstream import planned_class, refuse
from hcp.step.config import Config

__all__ = ["plan_llama_factory"]

TRAINERS = {
    "llamafactory.train.sft.workflow": "CustomSeq2SeqTrainer",
    "llamafactory.train.pt.workflow": "CustomTrainer",
}
"""The name under which each workflow finds its trainer."""

THEIRS = {
    "CustomSeq2SeqTrainer": "llamafactory.train.sft.trainer",
    "CustomTrainer": "llamafactory.train.pt.trainer",
}
"""The module that defines it."""


def plan_llama_factory(cp: Config, **options: Any) -> None:
    """Let LLaMA-Factory's stages `sft` and `pt` train over hcp, in this process. Call it in every
    rank, before `run_exp`.

    `options`: those of `hcp.integrations.transformers.Trainer`. Raises ImportError for a
    LLaMA-Factory whose workflows find no such trainers, and ValueError, when the trainer is made,
    for options that hcp does not have."""
    lost = [f"{module}:{name}" for module, name in TRAINERS.items()]
    lost = [seam for seam in lost if not has_seam(seam)]
    if lost:
        raise ImportError(
            f"LLaMA-Factory has no {', '.join(lost)}, which hcp replaces: expected 0.9.5 "
            "(pip install llamafactory)"
        )
    for workflow, name in TRAINERS.items():
        theirs = getattr(importlib.import_module(THEIRS[name]), name)
        planned = planned_class(theirs, partial(_check, name), cp=cp, **options)
        setattr(importlib.import_module(workflow), name, planned)


def _check(name: str, trainer: Any) -> None:
    """Refuse what LLaMA-Factory's own loaders and losses do, which hcp's stand for."""
    given, args = trainer.finetuning_args, trainer.args
    asft = getattr(given, "use_asft_loss", None)
    refuse("use_asft_loss", asft, False, "hcp computes no logits of a second model")
    strategy = args.train_sampling_strategy
    if given.disable_shuffling and strategy == "random":
        refuse(
            "disable_shuffling",
            True,
            False,
            "hcp's loader shuffles unless train_sampling_strategy is 'sequential'",
        )
    generate = getattr(args, "predict_with_generate", False)
    refuse("predict_with_generate", generate, False, f"{name} evaluates the loss over ranks")
