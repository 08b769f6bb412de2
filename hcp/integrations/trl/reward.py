"""TRL's training of reward models with dynamic context parallelism."""

import trl

from hcp.integrations.transformers.score_trainer import ScoreTrainer


class RewardTrainer(ScoreTrainer, trl.RewardTrainer):  # type: ignore[misc]
    """`trl.RewardTrainer`, whose sequences, chosen and rejected, are spread over ranks. Losses,
    margins and metrics are TRL's own."""

    left_out = ("margin",)
