"""TRL: its trainers with dynamic context parallelism.

trainer = SFTTrainer(model, SFTConfig(packing=True), train_dataset=dataset,
                     cp=hcp.Config(max_seqlen_per_dp_cp_rank=4096))
"""

from hcp._versions import check_if_installed, require

CHECK = "Compare the losses of a few steps with those of TRL's own trainer."

require(
    "trl",
    (
        "trl:SFTTrainer",
        "trl:DPOTrainer",
        "trl:GRPOTrainer._generate_single_turn",
        "trl:RewardTrainer.compute_loss",
        "trl.trainer.utils:add_fused_lm_head",
        "trl.trainer.utils:FusedCausalLMOutput(log_probs, label_mask)",
    ),
    check=CHECK,
    needed_by=__name__,
)
check_if_installed("peft", check=CHECK)

# What imports trl comes after what refuses its absence.
from hcp.integrations.trl.dpo import DPOTrainer  # noqa: E402
from hcp.integrations.trl.grpo import GRPOTrainer  # noqa: E402
from hcp.integrations.trl.reward import RewardTrainer  # noqa: E402
from hcp.integrations.trl.sft import SFTTrainer  # noqa: E402

__all__ = ["DPOTrainer", "GRPOTrainer", "RewardTrainer", "SFTTrainer"]
