"""TRL's supervised fine-tuning with dynamic context parallelism."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import trl
from torch import Tensor

from hcp.integrations.columns import MASKS, causal_lm_samples
from hcp.integrations.loader import is_stream
from hcp.integrations.transformers.trainer import Trainer

_log = logging.getLogger("hcp")

COMPLETION = "completion_mask"
LARGE_GIB = 4.0
"""Of logits that are told of."""
METRICS = ("entropy", "mean_token_accuracy", "num_tokens")
"""TRL's own, which hcp does not log."""
PLAIN = ("nll", "chunked_nll")
"""TRL's names of the plain cross entropy. It computes the second in chunks of rows."""


def prepared_samples(
    item: Mapping[str, Any], *, completion_only: bool = True
) -> list[dict[str, Tensor]]:
    """Make the samples of an item that TRL has prepared, by the columns that its collator reads.

    Where it has no `seq_lengths`, `position_ids` that go back to 0 count too; where it has no
    `labels`, which TRL makes of masks, the masks do. `completion_only`: whether a
    `completion_mask` counts, which TRL leaves in the dataset even if it does not."""
    absent = {name for name in ("seq_lengths", "labels") if item.get(name) is None}
    more = ["position_ids"] if "seq_lengths" in absent else []
    masks = MASKS if completion_only else tuple(name for name in MASKS if name != COMPLETION)
    more += masks if "labels" in absent else ()
    named = ("input_ids", "labels", "seq_lengths", *more) if "input_ids" in item else tuple(item)
    return causal_lm_samples({name: item[name] for name in named if name in item})


class SFTTrainer(Trainer, trl.SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer`, which prepares the dataset, on hcp's `Trainer`, which plans and trains.

    Takes the arguments of both. Rows that TRL has packed are taken apart into their documents, so
    no token sees another document. Labels are those that TRL makes of completions or assistants'
    turns. TRL's own metrics (entropy, token accuracy) are not logged.

    TRL's own trainer makes no logits. This one makes those of all rows of a rank, in float32, and
    their gradients, unless `linear_cross_entropy=True`; where they are large it says so.

    Experts are balanced by `SFTConfig.router_aux_loss_coef`, in training: a mean over sequences,
    see `router_aux_loss`.
    """

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        """See `hcp.integrations.transformers.Trainer` and `trl.SFTTrainer`. Raises ValueError for
        options of TRL's that would have no effect."""
        super().__init__(*positional, **keywords)
        _check(self)
        if keywords.get("to_sample") is None:
            only = self.completion_only_loss
            self.to_sample = partial(prepared_samples, completion_only=only)
        if self.args.loss_type not in PLAIN:
            raise ValueError(
                f"SFTConfig.loss_type is {self.args.loss_type!r}, expected {' or '.join(PLAIN)}: "
                "hcp computes the plain cross entropy; for another loss give compute_loss_func="
            )
        if self._is_vlm:
            raise ValueError(
                "the processing class is of a model with images, expected a tokenizer: hcp "
                "dispatches tokens only"
            )
        self._tell_of_logits()

    def _tell_of_logits(self) -> None:
        """Warn of logits that TRL's own trainer would not make, where they take much memory."""
        words = getattr(self.model.config.get_text_config(), "vocab_size", 0)
        rows = self.cp_config.max_seqlen_per_dp_cp_rank
        gib = rows * words * 4 / 2**30
        if self.linear_cross_entropy or self.compute_loss_func is not None or gib < LARGE_GIB:
            return
        if self.is_world_process_zero():
            _log.warning(
                "hcp: the logits of %s rows (max_seqlen_per_dp_cp_rank) and %s words take %.1f GiB "
                "of a rank in float32, and their gradients as much. TRL's own SFTTrainer makes "
                "none, and neither does SFTTrainer(..., linear_cross_entropy=True)",
                *(f"{rows:,}", f"{words:,}", gib),
            )

    def _coefficient_of_routers(self, given: float) -> float:
        """That of TRL's options, or of the model's configuration, unless one is given. The model's
        own loss is of the rows of a rank, and not asked for."""
        own = float(self.router_aux_loss_coef) if self.aux_loss_enabled else 0.0
        if self.aux_loss_enabled:
            self.model.config.get_text_config().output_router_logits = False
        return given or own

    def training_step(self, *positional: Any, **keywords: Any) -> Tensor:
        with self.maybe_activation_offload_context:
            return super().training_step(*positional, **keywords)


def _check(trainer: SFTTrainer) -> None:
    """Refuse options of TRL's that would have no effect, or fail late, and a dataset of which TRL
    has left nothing."""
    args = trainer.args
    if (multiple := getattr(args, "pad_to_multiple_of", None)) is not None:
        raise ValueError(
            f"SFTConfig.pad_to_multiple_of is {multiple!r}, expected None: hcp packs samples, and "
            "pads none"
        )
    best = (args.metric_for_best_model or "").removeprefix("eval_")
    if best in METRICS and trainer.compute_metrics is None:
        raise ValueError(
            f"SFTConfig.metric_for_best_model is {args.metric_for_best_model!r}, expected "
            f"'eval_loss' or one of compute_metrics: hcp does not log TRL's own, {METRICS}"
        )
    dataset = trainer.train_dataset
    if dataset is not None and not is_stream(dataset) and len(dataset) == 0:
        raise ValueError(
            "train_dataset has 0 samples once TRL has prepared it, expected some: it leaves out "
            "those whose labels are all -100, such as prompts that fill max_length "
            f"({args.max_length}) alone. Raise max_length, or check how labels are masked"
        )
