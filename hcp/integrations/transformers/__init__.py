"""Transformers: hcp's attention in decoder models, dynamic context parallelism in the Trainer.

register_hcp_attention(model)                      # in any loop of your own
logits = model(**model_inputs(cp, local)).logits   # a micro-batch of hcp.dispatch

trainer = Trainer(model, args, train_dataset=dataset, cp=hcp.Config(max_seqlen_per_dp_cp_rank=4096))
"""

from hcp._versions import require

SEAMS = (
    "transformers:AttentionInterface.register",
    "transformers:AttentionMaskInterface.register",
    "transformers:PreTrainedModel.set_attn_implementation",
    "transformers:Trainer.get_train_dataloader",
    "transformers:Trainer.get_eval_dataloader(eval_dataset)",
    "transformers:Trainer.get_test_dataloader(test_dataset)",
    "transformers:Trainer.training_step(model, inputs, num_items_in_batch)",
    "transformers:Trainer.compute_loss_context_manager",
    "transformers:Trainer.evaluation_loop(dataloader, prediction_loss_only, metric_key_prefix)",
    "transformers.trainer:skip_first_batches(dataloader, num_batches)",
    "transformers.trainer_pt_utils:get_length_grouped_indices(lengths, batch_size, generator)",
    "transformers.trainer_utils:EvalLoopOutput",
)
"""The parts of Transformers that hcp uses."""

require(
    "transformers",
    SEAMS,
    check="register_hcp_attention compares your model before training. To check the Trainer, "
    "compare losses: python -m hcp.integrations.transformers --ranks 2",
    needed_by=__name__,
)
require(
    "accelerate",
    ("accelerate:Accelerator.no_sync(model)", "accelerate:Accelerator.autocast"),
    check="Compare losses: python -m hcp.integrations.transformers --ranks 2",
    needed_by=__name__,
)

# What imports transformers comes after what refuses its absence.
from hcp.integrations.columns import causal_lm_sample, causal_lm_samples  # noqa: E402
from hcp.integrations.loader import (  # noqa: E402
    DynamicCPCollator,
    DynamicCPDataLoader,
    EvalDataLoader,
)
from hcp.integrations.transformers.attention import (  # noqa: E402
    ATTENTION,
    check_model,
    own_attention,
    register_hcp_attention,
)
from hcp.integrations.transformers.image_samples import (  # noqa: E402
    image_fields,
    image_sample,
    image_samples,
)
from hcp.integrations.transformers.images import (  # noqa: E402
    image_inputs,
    register_for_images,
)
from hcp.integrations.transformers.masks import masks_of  # noqa: E402
from hcp.integrations.transformers.model import (  # noqa: E402
    causal_lm_loss,
    causal_lm_losses,
    model_inputs,
)
from hcp.integrations.transformers.routers import (  # noqa: E402
    aux_counts,
    record_routers,
    router_aux_loss,
    tokens_per_expert,
)
from hcp.integrations.transformers.score_trainer import (  # noqa: E402
    SequenceClassificationTrainer,
    sequence_samples,
)
from hcp.integrations.transformers.scores import (  # noqa: E402
    register_for_scores,
    sequence_scores,
)
from hcp.integrations.transformers.seq2seq import (  # noqa: E402
    register_for_seq2seq,
    seq2seq_inputs,
)
from hcp.integrations.transformers.trainer import Trainer  # noqa: E402

__all__ = [
    "ATTENTION",
    "DynamicCPCollator",
    "DynamicCPDataLoader",
    "EvalDataLoader",
    "SequenceClassificationTrainer",
    "Trainer",
    "aux_counts",
    "causal_lm_loss",
    "causal_lm_losses",
    "causal_lm_sample",
    "causal_lm_samples",
    "check_model",
    "image_fields",
    "image_inputs",
    "image_sample",
    "image_samples",
    "masks_of",
    "model_inputs",
    "own_attention",
    "record_routers",
    "register_for_images",
    "register_for_scores",
    "register_for_seq2seq",
    "register_hcp_attention",
    "router_aux_loss",
    "seq2seq_inputs",
    "sequence_samples",
    "sequence_scores",
    "tokens_per_expert",
]
