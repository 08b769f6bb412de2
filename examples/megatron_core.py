"""A GPT of Megatron-Core's layers, schedule and optimizer, with a CP degree for each micro-batch.

    torchrun --nproc-per-node 2 examples/megatron_core.py       # CPU ranks, or a GPU for each rank
    python examples/megatron_core.py                            # one rank

Needs `pip install megatron-core==0.16.1`, and no Transformer Engine. What hcp adds are the lines
with `hcp`: the layers (`build`), the batches and the forward step (`train`), the layout of the
evaluation. The losses are the same on any number of ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

import hcp
from hcp.integrations import megatron as hcp_megatron

VOCABULARY, LONGEST = 32, 400
ON_GPUS = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPUS else torch.float32


def build(collection: ProcessGroupCollection) -> DistributedDataParallel:
    """A model with hcp's attention. Its other layers are Megatron's."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=DTYPE,
        pipeline_dtype=DTYPE,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,  # one mean over the batch
        finalize_model_grads_func=finalize_model_grads,
    )
    spec = hcp_megatron.hcp_layer_spec(get_gpt_layer_local_spec())
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LONGEST,
        position_embedding_type="rope",
        pg_collection=collection,
    ).to("cuda")
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp, model)


def batches(seeds: range, rank: int, ranks: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """This rank's share of each global batch: documents that count upwards, in steps of their own.
    Labels and loss masks follow from the tokens."""
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        made = []
        for _ in range(16):
            length = 4 + int((LONGEST - 4) * torch.rand((), generator=draw) ** 4)
            first, step = torch.randint(1, 4, (2,), generator=draw).tolist()
            made.append({"tokens": (first + step * torch.arange(length)) % VOCABULARY})
        yield [{"tokens": sample["tokens"].to("cuda")} for sample in made[rank::ranks]]


def run(
    model: DistributedDataParallel, step: Any, groups: hcp.ProcessGroups, *, forward_only: bool
) -> float:
    """Run Megatron's schedule over the micro-batches of a plan. Return the mean loss."""
    reports = get_forward_backward_func()(
        forward_step_func=hcp_megatron.forward_step,
        data_iterator=step.data_iterator(),
        model=[model],
        num_microbatches=len(step),
        seq_length=LONGEST,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    loss, _ = hcp_megatron.mean_loss(reports, groups.dp_cp, "cuda")
    return loss


def train(steps: int = 10) -> tuple[list[float], list[float]]:
    """Train as one rank of the job. Return the losses, and those of both evaluations."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    groups = hcp.ProcessGroups.from_existing(collection)  # Megatron's own groups
    rank, ranks = groups.rank("dp_cp"), groups.size("dp_cp")
    options = hcp.Config(max_seqlen_per_dp_cp_rank=2 + LONGEST // ranks)
    model = build(collection)
    adam = OptimizerConfig(
        optimizer="adam", lr=3e-3, params_dtype=DTYPE, bf16=ON_GPUS, weight_decay=0.0
    )
    optimizer = get_megatron_optimizer(adam, [model])
    losses = []
    planned = hcp_megatron.plan_batches(batches(range(steps), rank, ranks), options, groups)
    for number, step in enumerate(planned):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(run(model, step, groups, forward_only=False))
        optimizer.step()
        if rank == 0:
            print(f"step {number:3}  loss {losses[-1]:.6f}")
    evaluations = [evaluate(model, groups, options)]
    eval_groups = groups.with_context_parallel(ranks)
    with hcp.eval_cp_context(model, groups, eval_groups):
        one_degree = options.for_evaluation(ranks, LONGEST)
        evaluations.append(evaluate(model, eval_groups, one_degree))
    if rank == 0:
        dynamic, all_ranks = evaluations
        print(f"evaluation  dynamic: {dynamic:.6f}  CP {ranks}: {all_ranks:.6f}")
    return losses, evaluations


@torch.no_grad()
def evaluate(
    model: DistributedDataParallel, groups: hcp.ProcessGroups, options: hcp.Config
) -> float:
    held_out = batches(range(10**6, 10**6 + 1), groups.rank("dp_cp"), groups.size("dp_cp"))
    (step,) = hcp_megatron.plan_batches(held_out, options, groups)
    return run(model, step, groups, forward_only=True)


def main() -> None:
    if ON_GPUS:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("nccl" if ON_GPUS else "gloo")
    else:
        store = dist.HashStore()
        dist.init_process_group("nccl" if ON_GPUS else "gloo", store=store, rank=0, world_size=1)
    # Without GPUs, "cuda" is the CPU inside this context.
    with contextlib.nullcontext() if ON_GPUS else hcp_megatron.megatron_on_cpu():
        train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
