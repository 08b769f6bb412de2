"""torchtitan: packed attention under context parallelism, with a degree for each micro-batch.

    spec = model_registry("8B", attn_backend="varlen", converters=[PackedContextParallel.Config()])
    config = ContextParallelTrainer.Config(
        model_spec=spec, context_parallel=hcp.Config(max_seqlen_per_dp_cp_rank=16_384), ...
    )
    config.build().train()

torchtitan loads, shards parameters over all ranks, clips, steps and logs as always. In between, the
documents of a step are planned over these ranks. Attention receives each micro-batch's handler as
`attention_masks`. Importing this package imports torchtitan.
"""

from hcp._versions import require

SEAMS = (
    "torchtitan.trainer:Trainer.init_distributed",
    "torchtitan.trainer:Trainer.batch_generator(data_iterable)",
    "torchtitan.trainer:Trainer.forward_backward_step(input_dict, labels, global_valid_tokens)",
    "torchtitan.trainer:Trainer.close",
    "torchtitan.components.validate:Validator.validate(model_parts, step)",
    "torchtitan.components.loss:ChunkedLossWrapper",
    "torchtitan.components.dataloader:DataloaderExhaustedError",
    "torchtitan.components.checkpointer:DATALOADER",
    "torchtitan.models.common.attention:GQAttention",
    "torchtitan.models.common.attention:VarlenAttention.forward",
    "torchtitan.models.common.decoder:Decoder",
    "torchtitan.models.common.rope:ComplexRoPE.Config",
    "torchtitan.models.common.rope:CosSinRoPE.Config",
    "torchtitan.protocols.model:ModelConfigConverter.convert(model_config)",
)
"""The parts of torchtitan that this calls, derives from or overrides."""

require(
    "torchtitan",
    SEAMS,
    check="Compare the losses of a few steps on one rank and on two.",
    needed_by=__name__,
)

# What imports torchtitan comes after what refuses its absence.
from hcp.integrations.torchtitan.torchtitan_attention import (  # noqa: E402
    PackedAttention,
    PackedContextParallel,
)
from hcp.integrations.torchtitan.torchtitan_checks import check_supported  # noqa: E402
from hcp.integrations.torchtitan.trainer import ContextParallelTrainer  # noqa: E402
from hcp.integrations.torchtitan.validator import ContextParallelValidator  # noqa: E402

__all__ = [
    "ContextParallelTrainer",
    "ContextParallelValidator",
    "PackedAttention",
    "PackedContextParallel",
    "check_supported",
]
