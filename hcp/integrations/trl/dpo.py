"""TRL's direct preference optimization with dynamic context parallelism."""

import trl

from hcp.integrations.trl.padded import PaddedTrainer


class DPOTrainer(PaddedTrainer, trl.DPOTrainer):  # type: ignore[misc]
    """`trl.DPOTrainer`, whose sequences are spread over ranks: chosen, rejected, and those of the
    reference model. Losses and metrics of any type are TRL's own."""
