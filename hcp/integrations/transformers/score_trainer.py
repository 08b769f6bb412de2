"""Transformers' Trainer for scores of sequences with dynamic context parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hcp.groups.process_groups import ProcessGroups
from hcp.integrations.accelerate import check_accelerator
from hcp.integrations.columns import causal_lm_samples
from hcp.integrations.loader import check_model_config, domain, is_stream
from hcp.integrations.transformers.attention import check_dropout, check_softcap
from hcp.integrations.transformers.scores import register_for_scores, spread_scores
from hcp.integrations.transformers.trainer import compute_dtype
from hcp.planning.cost import CostModel
from hcp.step.config import Config
from hcp.tools.loggers import LogsMeans

LABELS = ("labels", "label", "label_ids")
"""Names that datasets give to the label of a sequence, as Transformers' collators read them."""


class ScoreTrainer(LogsMeans):
    """The common part of trainers of `...ForSequenceClassification` under hcp. It comes before a
    Trainer among the bases.

    Their batches are padded, and of each rank. hcp removes the padding, plans the sequences of all
    ranks' batches together, moves each to the ranks that compute it, and brings the scores back.
    All else (loaders, losses, evaluation, metrics) is the Trainer's own.
    """

    left_out: tuple[str, ...] = ()
    """Columns of batches that the loss reads, and the model does not."""

    def __init__(
        self,
        *positional: Any,
        cp: Config,
        groups: ProcessGroups | None = None,
        cost: CostModel | None = None,
        fused_rope: bool = True,
        **keywords: Any,
    ) -> None:
        """`cp`: limits and options, see `hcp.Config`; a rank holds the rows of its share of a batch
        for the backward pass. `groups`: by default, all ranks of the job are one domain.
        `fused_rope`: see `register_hcp_attention`. Other arguments are those of the Trainer.

        Raises ValueError for options that would be wrong, or have no effect."""
        check_model_config(cp)
        super().__init__(*positional, **keywords)
        trainer: Any = self
        _check(trainer, cp)
        made = domain(groups, trainer.args.world_size, trainer.args.device)
        model = trainer.model
        check_softcap(model, trainer.args.device, compute_dtype(trainer.args, model))
        check_dropout(model)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        with trainer.accelerator.autocast():
            register_for_scores(base, fused_rope=fused_rope)
        spread_scores(model, cp, made, cost, self._means, self.left_out)
        # The model's own loss is a mean over sequences, which Transformers would multiply by the
        # number of ranks.
        trainer.model_accepts_loss_kwargs = False


class SequenceClassificationTrainer(ScoreTrainer, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` for decoders of the kind `...ForSequenceClassification` whose
    sequences are spread over ranks: rewards, values, classes.

    Items have `input_ids` and `labels`, of any length, or what a `data_collator` pads. The loss is
    the model's own, or that of `compute_loss_func`.
    """

    def __init__(self, *positional: Any, packed: bool = False, **keywords: Any) -> None:
        """See `ScoreTrainer` and `transformers.Trainer`. `packed`: rows of the datasets are packs,
        with a label for each of their documents. They are taken apart."""
        keywords = dict(keywords)
        if packed:
            for name in ("train_dataset", "eval_dataset"):
                keywords[name] = _taken_apart(name, keywords.get(name))
        collator = keywords.get("data_collator", positional[2] if len(positional) > 2 else None)
        if collator is None and len(positional) < 3:
            keywords["data_collator"] = pad_sequences
        super().__init__(*positional, **keywords)


# ---- items ---------------------------------------------------------------------------------------


def sequence_samples(item: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Make the samples of an item: `input_ids` and, if it has one, the label of each document.

    An item is one sequence, or a pack of documents, which end where `causal_lm_samples` says. Its
    `labels` (or `label`, `label_ids`) are then (documents, ...). Raises ValueError if they are not.
    """
    named = [name for name in LABELS if item.get(name) is not None]
    tokens = {name: column for name, column in item.items() if name not in LABELS}
    documents = [sample["input_ids"] for sample in causal_lm_samples(tokens)]
    if not named:
        return [{"input_ids": document} for document in documents]
    labels = torch.as_tensor(item[named[0]])
    if len(documents) == 1 and (labels.dim() == 0 or labels.shape[0] != 1):
        labels = labels.unsqueeze(0)
    if labels.dim() == 0 or labels.shape[0] != len(documents):
        raise ValueError(
            f"{named[0]} has shape {tuple(labels.shape)} in an item of {len(documents)} documents, "
            f"expected ({len(documents)}, ...): one label of each"
        )
    return [
        {"input_ids": document, "labels": label}
        for document, label in zip(documents, labels.unbind(), strict=True)
    ]


def pad_sequences(items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Collate items of one sequence each: hcp removes the padding before anything is computed."""
    samples = []
    for i, item in enumerate(items):
        found = sequence_samples(item)
        if len(found) > 1:
            raise ValueError(
                f"item {i} of a batch is a pack of {len(found)} documents, expected one sequence: "
                "say packed=True, by which the Trainer takes packs apart"
            )
        samples += found
    tokens = [sample["input_ids"] for sample in samples]
    batch = {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in tokens], batch_first=True),
    }
    if "labels" in samples[0]:
        batch["labels"] = torch.stack([sample["labels"] for sample in samples])
    return batch


def _taken_apart(name: str, dataset: Any) -> Any:
    if dataset is None:
        return None
    if isinstance(dataset, Mapping):
        return {key: _taken_apart(name, each) for key, each in dataset.items()}
    if is_stream(dataset):
        raise ValueError(
            f"packed=True and {name} is a stream, expected a dataset with a length: take the packs "
            "of a stream apart before, by sequence_samples"
        )
    return [sample for i in range(len(dataset)) for sample in sequence_samples(dataset[i])]


# ---- options -------------------------------------------------------------------------------------


def _check(trainer: Any, cp: Config) -> None:
    name, kind = type(trainer).__name__, str(trainer.accelerator.distributed_type)
    check_accelerator(trainer.accelerator, accumulates=True)
    if kind.endswith("FSDP"):
        raise ValueError(
            f"the Accelerator uses FSDP, expected DDP: {name} computes several micro-batches in "
            "one forward, which was not tested with FSDP"
        )
    if cp.too_long != "refuse":
        raise ValueError(
            f"too_long is {cp.too_long!r}, expected 'refuse': {name} needs the score of every "
            "sequence. Truncate when you tokenize"
        )
    if cp.eval_context_parallel_size is not None:
        raise ValueError(
            f"eval_context_parallel_size is {cp.eval_context_parallel_size}, expected None: {name} "
            "evaluates in batches that are planned as in training"
        )
    if trainer.args.torch_compile:
        raise ValueError(
            "TrainingArguments.torch_compile is True, expected False: a forward plans and exchanges"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"this process has {trainer.args.n_gpu} GPUs, expected one: start one process for "
            "each, with torchrun --nproc-per-node"
        )
