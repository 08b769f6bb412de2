"""Megatron-Bridge: Qwen3 with YaRN, whose evaluations run under another CP size than training.

    torchrun --nproc-per-node 2 examples/bridge.py      # a GPU for each rank
    PYTHONPATH=tests torchrun --nproc-per-node 2 -m support.bridge examples/bridge.py   # CPU ranks

Needs megatron-bridge, which imports packages that need a GPU: for CPU ranks, `support.bridge`
stands in for them. hcp adds the layers (`qwen3`) and one callback (`main`): before each evaluation
it puts the eval layout's groups wherever the model and Bridge hold those of training, and after it
the groups of training again. Weights stay where they are.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.training import config as bridge
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.losses import masked_next_token_loss
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from transformers import Qwen3Config

from hcp.integrations.megatron import EvalContextParallel, hcp_layer_spec

ROWS = 64
ON_GPUS = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPUS else torch.float32


def qwen3() -> Any:
    """A small Qwen3 of random weights. For a real one: AutoBridge.from_hf_pretrained(name)."""
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        architectures=["Qwen3ForCausalLM"],
    )
    model = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    model.seq_length = ROWS
    # YaRN: from 16 rows that the model was trained with to 64.
    model.position_embedding_type = "yarn"
    model.yarn_original_max_position_embeddings = 16
    model.yarn_rotary_scaling_factor = ROWS / 16
    model.yarn_beta_fast, model.yarn_beta_slow = 32.0, 1.0
    model.yarn_mscale = model.yarn_mscale_all_dim = 1.0
    model.yarn_correction_range_round_to_int = False
    # hcp's attention in Megatron's layers, which needs no Transformer Engine.
    layers = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    model.transformer_layer_spec = hcp_layer_spec(layers)
    model.cp_comm_type = "p2p"
    model.calculate_per_token_loss = True
    for fusion in ("gradient_accumulation", "cross_entropy_loss", "masked_softmax"):
        setattr(model, f"{fusion}_fusion", False)
    model.bias_activation_fusion = model.bias_dropout_fusion = False
    model.bf16, model.params_dtype, model.pipeline_dtype = ON_GPUS, DTYPE, DTYPE
    model.use_cpu_initialization, model.make_vocab_size_divisible_by = True, 1
    return model


def forward_step(state: Any, data_iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    """The script's own forward step: one sample, cut by the CP group that the model holds."""
    batch, cp = next(data_iterator), get_pg_collection([model]).cp

    def own(name: str) -> torch.Tensor:
        chunks = batch[name].to("cuda").chunk(2 * cp.size(), -1)
        return torch.cat([chunks[cp.rank()], chunks[2 * cp.size() - 1 - cp.rank()]], -1)

    bounds = torch.tensor([0, ROWS], dtype=torch.int32, device="cuda")
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=ROWS,
        max_seqlen_kv=ROWS,
    )
    losses = model(
        own("tokens"),
        own("position_ids"),
        None,
        labels=own("labels"),
        packed_seq_params=packed,
    )
    return losses, functools.partial(masked_next_token_loss, own("loss_mask").float())


class Evaluations(Callback):
    """Prints each evaluation, and the CP size under which it ran."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def on_eval_start(self, context: Any) -> None:
        self.cp = get_pg_collection(context.model).cp.size()

    def on_eval_end(self, context: Any) -> None:
        self.found.append((self.cp, float(context.total_loss_dict["lm loss"])))
        after = get_pg_collection(context.model).cp.size()
        if dist.get_rank() == 0:
            print(f"evaluation under CP {self.cp}: {self.found[-1][1]:.6f}, now CP {after}")


def configuration(eval_cp: int) -> bridge.ConfigContainer:
    """Bridge's own options. hcp's callback reads `dist.eval_context_parallel_size`."""
    return bridge.ConfigContainer(
        model=qwen3(),
        dist=bridge.DistributedInitConfig(
            distributed_backend="nccl" if ON_GPUS else "gloo", eval_context_parallel_size=eval_cp
        ),
        train=bridge.TrainingConfig(train_iters=4, global_batch_size=8, micro_batch_size=1),
        validation=bridge.ValidationConfig(eval_iters=1, eval_interval=2),
        optimizer=bridge.OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-3,
            bf16=ON_GPUS,
            params_dtype=DTYPE,
            use_distributed_optimizer=False,
        ),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="constant",
            lr_decay_iters=4,
            lr_warmup_iters=0,
            weight_decay_incr_style="constant",
            start_weight_decay=0.0,
            end_weight_decay=0.0,
        ),
        ddp=bridge.DistributedDataParallelConfig(
            use_distributed_optimizer=False,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            average_in_collective=False,
            grad_reduce_in_fp32=True,
        ),
        dataset=bridge.MockGPTDatasetConfig(
            random_seed=1,
            seq_length=ROWS,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            data_sharding=False,
            num_workers=0,
            dataloader_type="single",
            path_to_cache="cache",
        ),
        logger=bridge.LoggerConfig(log_interval=1, timing_log_level=0),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=95),
        checkpoint=bridge.CheckpointConfig(),
        rng=bridge.RNGConfig(seed=5, inference_rng_tracker=not ON_GPUS),
    )


def main() -> list[tuple[int, float]]:
    if ON_GPUS:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("nccl" if ON_GPUS else "gloo")
    else:
        store = dist.HashStore()
        dist.init_process_group("nccl" if ON_GPUS else "gloo", store=store, rank=0, world_size=1)
    evaluations = Evaluations()
    config = configuration(eval_cp=dist.get_world_size())
    # A callback after hcp's sees the eval layout in on_eval_start, and training's in on_eval_end.
    pretrain(config, forward_step, callbacks=[EvalContextParallel(), evaluations])
    return evaluations.found


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
