"""TRL's supervised fine-tuning with dynamic context parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import trl
from torch import Tensor

from hcp.integrations.columns import MASKS, causal_lm_samples
from hcp.integrations.transformers.trainer import Trainer

COMPLETION = "completion_mask"
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
    named = ("input_ids", "labels", "seq_lengths", *more)
    return causal_lm_samples({name: item[name] for name in named if name in item})


class SFTTrainer(Trainer, trl.SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer`, which prepares the dataset, on hcp's `Trainer`, which plans and trains.

    Takes the arguments of both. Rows that TRL has packed are taken apart into their documents, so
    no token sees another document. Labels are those that TRL makes of completions or assistants'
    turns. TRL's own metrics (entropy, token accuracy) are not logged.

    Experts are balanced by `SFTConfig.router_aux_loss_coef`, in training: a mean over sequences,
    see `router_aux_loss`.
    """

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        """See `hcp.integrations.transformers.Trainer` and `trl.SFTTrainer`. Raises ValueError for
        options of TRL's that would have no effect."""
        super().__init__(*positional, **keywords)
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
