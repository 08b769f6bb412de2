"""TRL: its trainers with dynamic context parallelism.

trainer = SFTTrainer(model, SFTConfig(packing=True), train_dataset=dataset,
                     cp=hcp.Config(max_seqlen_per_dp_cp_rank=4096))
"""

from hcp.programs.versions import require

require(
    "trl",
    "1.16",
    "1.16",
    seams=(
        "trl:SFTTrainer",
        "trl:DPOTrainer",
        "trl:GRPOTrainer._generate_single_turn",
        "trl.trainer.utils:add_fused_lm_head",
        "trl.trainer.utils:FusedCausalLMOutput(log_probs, label_mask)",
    ),
    check="Compare the losses of a few steps with those of TRL's own trainer.",
    needed_by=__name__,
)

# What imports trl comes after what refuses its absence.
from hcp.integrations.trl.dpo import DPOTrainer  # noqa: E402
from hcp.integrations.trl.grpo import GRPOTrainer  # noqa: E402
from hcp.integrations.trl.sft import SFTTrainer  # noqa: E402

__all__ = ["DPOTrainer", "GRPOTrainer", "SFTTrainer"]
