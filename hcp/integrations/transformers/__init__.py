"""Transformers: hcp's attention in decoder models, dynamic context parallelism in the Trainer.

register_hcp_attention(model)                      # in any loop of your own
logits = model(**model_inputs(cp, local)).logits   # a micro-batch of hcp.dispatch

trainer = Trainer(model, args, train_dataset=dataset, cp=hcp.Config(max_seqlen_per_dp_cp_rank=4096))
"""

from hcp.programs.versions import require

require("transformers", "5.17", "5.23")
require("accelerate", "1.15", "1.15")  # of its Trainer

# What imports transformers comes after what refuses its absence.
from hcp.integrations.loader import (  # noqa: E402
    DynamicCPCollator,
    DynamicCPDataLoader,
    EvalDataLoader,
    causal_lm_sample,
    causal_lm_samples,
)
from hcp.integrations.transformers.attention import (  # noqa: E402
    ATTENTION,
    check_model,
    own_attention,
    register_hcp_attention,
)
from hcp.integrations.transformers.model import (  # noqa: E402
    causal_lm_loss,
    causal_lm_losses,
    model_inputs,
)
from hcp.integrations.transformers.trainer import Trainer  # noqa: E402

__all__ = [
    "ATTENTION",
    "DynamicCPCollator",
    "DynamicCPDataLoader",
    "EvalDataLoader",
    "Trainer",
    "causal_lm_loss",
    "causal_lm_losses",
    "causal_lm_sample",
    "causal_lm_samples",
    "check_model",
    "model_inputs",
    "own_attention",
    "register_hcp_attention",
]
