"""TRL's group relative policy optimization with dynamic context parallelism."""

from typing import Any

import trl

from hcp.integrations.trl.padded import PaddedTrainer


class GRPOTrainer(PaddedTrainer, trl.GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer`, whose log-probabilities are computed over ranks: those of the old policy
    and of the reference, forward only, and those that train. Each rank generates its own
    completions, of whole sequences."""

    def _generate_single_turn(self, *positional: Any, **keywords: Any) -> Any:
        with self._whole():
            return super()._generate_single_turn(*positional, **keywords)
