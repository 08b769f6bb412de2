"""ms-swift: `swift sft` and `swift pt` with dynamic context parallelism.

plan_ms_swift(hcp.Config(max_seqlen_per_dp_cp_rank=16_384))      # in a file of --external_plugins
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from hcp._versions import has_seam
from hcp.integrations.downstream import planned_class, refuse
from hcp.step.config import Config

__all__ = ["plan_ms_swift"]

FACTORY = "swift.trainers.trainer_factory:TrainerFactory"
KIND = "causal_lm"
PLANNED = "PlannedTrainer"
"""The name in this module under which ms-swift finds the class."""


def plan_ms_swift(cp: Config, **options: Any) -> None:
    """Let ms-swift train causal language models over hcp, in this process.

    ms-swift imports the files of `--external_plugins` in every rank: call it in one of them.
    `options`: those of `hcp.integrations.transformers.Trainer`. Raises ImportError for an ms-swift
    without a factory of trainers, and ValueError, when the trainer is made, for options that hcp
    does not have."""
    seams = (f"{FACTORY}.TRAINER_MAPPING", "swift.trainers:Seq2SeqTrainer")
    if lost := [seam for seam in seams if not has_seam(seam)]:
        raise ImportError(
            f"ms-swift has no {', '.join(lost)}, which hcp uses: expected 4.6, as of "
            "pip install ms-swift"
        )
    module, name = FACTORY.split(":")
    factory = getattr(importlib.import_module(module), name)
    theirs = importlib.import_module("swift.trainers").Seq2SeqTrainer
    planned = planned_class(theirs, _check, cp=cp, **options)
    setattr(sys.modules[__name__], PLANNED, planned)
    factory.TRAINER_MAPPING[KIND] = f"{__name__}.{PLANNED}"


def _check(trainer: Any) -> None:
    """Refuse what ms-swift's own loaders and losses do, which hcp's stand for."""
    args, plain = trainer.args, "hcp computes the plain cross entropy"
    for name in ("enable_dft_loss", "enable_channel_loss"):
        refuse(name, getattr(args, name, None), False, plain)
    own = "ms-swift calls its losses with arguments that hcp does not have: leave --loss_type out"
    refuse("compute_loss_func", trainer.compute_loss_func, None, own)
    aux = getattr(args, "router_aux_loss_coef", None)
    refuse("router_aux_loss_coef", aux, 0, "give plan_ms_swift(router_aux_loss_coef=) instead")
    size = trainer.template.sequence_parallel_size
    refuse("sequence_parallel_size", size, 1, "hcp spreads sequences over the ranks itself")
    generate = getattr(args, "predict_with_generate", None)
    refuse("predict_with_generate", generate, False, "hcp evaluates the loss over ranks")
    if args.train_sampling_strategy == "random":
        shuffle = getattr(args, "train_dataloader_shuffle", None)
        refuse(
            "train_dataloader_shuffle",
            shuffle,
            True,
            "for rows in order say train_sampling_strategy='sequential'",
        )
