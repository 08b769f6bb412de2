"""TRL: its trainers with dynamic context parallelism.

trainer = SFTTrainer(model, SFTConfig(packing=True), train_dataset=dataset,
                     cp=hcp.Config(max_seqlen_per_dp_cp_rank=4096))

`DPOTrainer` and `GRPOTrainer` are imported at their first use: they need a later TRL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hcp._versions import check_if_installed, require, require_seams

CHECK = "Compare the losses of a few steps with those of TRL's own trainer."

require("trl", ("trl:SFTTrainer", "trl:SFTConfig(loss_type)"), check=CHECK, needed_by=__name__)
check_if_installed("peft", check=CHECK)

# What imports trl comes after what refuses its absence.
from hcp.integrations.trl.sft import SFTTrainer  # noqa: E402

if TYPE_CHECKING:
    from hcp.integrations.trl.dpo import DPOTrainer
    from hcp.integrations.trl.grpo import GRPOTrainer
    from hcp.integrations.trl.reward import RewardTrainer

__all__ = ["DPOTrainer", "GRPOTrainer", "RewardTrainer", "SFTTrainer"]

_FUSED = (
    "trl.trainer.utils:add_fused_lm_head",
    "trl.trainer.utils:FusedCausalLMOutput(log_probs, label_mask)",
)
_LATER = {
    "DPOTrainer": ("dpo", (*_FUSED, "trl:DPOTrainer")),
    "GRPOTrainer": ("grpo", (*_FUSED, "trl:GRPOTrainer._generate_single_turn")),
    "RewardTrainer": ("reward", ("trl:RewardTrainer.compute_loss",)),
}
"""The module of each, and what it needs of TRL."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, seams = _LATER[name]
    require_seams("trl", seams, since="1.15", needed_by=name)
    return getattr(import_module(f"{__name__}.{module}"), name)
