"""axolotl: supervised fine-tuning with dynamic context parallelism, as one of its plug-ins.

plugins:
  - hcp.integrations.axolotl.ContextParallelPlugin
hcp:
  max_seqlen_per_dp_cp_rank: 16384
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from hcp.integrations.downstream import planned_class, refuse
from hcp.step.config import Config

__all__ = ["ContextParallelArguments", "ContextParallelPlugin"]

ALONE = "hcp plans supervised fine-tuning alone"
OFFLOADS = "hcp's Trainer has a training step of its own, which would not offload"
EXPECTED = {
    "rl": ("", ALONE),
    "reward_model": (False, ALONE),
    "process_reward_model": (False, ALONE),
    "orpo_alpha": (0, ALONE),
    "context_parallel_size": (1, "hcp spreads sequences over the ranks itself"),
    "activation_offloading": (False, OFFLOADS),
    "layer_offloading": (False, OFFLOADS),
    "curriculum_sampling": (False, "say train_sampling_strategy='sequential' in training args"),
}
"""Options of axolotl's, the value that each must have unless it is not given, and the reason."""


class ContextParallelArguments(BaseModel):  # type: ignore[misc]
    """What the plug-in adds to axolotl's configuration."""

    hcp: dict[str, Any]
    """The options of `hcp.Config`."""


class ContextParallelPlugin(BasePlugin):  # type: ignore[misc]
    """Puts hcp's loader, plan and loss into axolotl's trainer. Its datasets, adapters, optimizers,
    schedules, logs and checkpoints stay."""

    def get_input_args(self) -> str:
        return f"{__name__}.{ContextParallelArguments.__name__}"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Take the mean over the tokens of all ranks, count steps by hcp's loader, and leave out
        the token counts of axolotl's own batches."""
        return {
            "average_tokens_across_devices": True,
            "include_tkps": False,
            "max_steps": cfg.max_steps or -1,
        }

    def get_trainer_cls(self, cfg: Any) -> type:
        """Return axolotl's trainer on hcp's. Raises ValueError for options that would be wrong, or
        have no effect."""
        from axolotl.core.trainers import AxolotlTrainer

        for name, (expected, reason) in EXPECTED.items():
            refuse(name, getattr(cfg, name, None), expected, reason)
        if not cfg.hcp:
            raise ValueError(
                f"hcp is {cfg.hcp!r}, expected the options of hcp.Config, such as "
                "max_seqlen_per_dp_cp_rank: 16384"
            )
        return planned_class(AxolotlTrainer, _no_more, cp=Config(**dict(cfg.hcp)))


def _no_more(trainer: Any) -> None:
    """`get_trainer_cls` has checked what is axolotl's, and hcp's Trainer the rest."""
