"""A Megatron-Core training script with dynamic context parallelism.

It differs from other scripts in four places: the layer specification (build_model), two options of
the config (transformer_config), the data (train), and the layout of an evaluation (evaluate). The
schedules, DistributedDataParallel, finalize_model_grads and the optimizer are Megatron's, as usual.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor

import hcp
from hcp.integrations import megatron as hcp_megatron
from hcp.integrations.barrier import waits_in_layers
from hcp.integrations.megatron.program.program_report import Run, report
from hcp.step.config import NO_WINDOW, Config
from hcp.tools.programs.arguments import cost_model
from hcp.tools.programs.progress import progress
from hcp.tools.programs.ranks import initialize_distributed, on_every_rank, same_on_every_rank
from hcp.tools.programs.run_records import Evaluation, StepRecord
from hcp.tools.programs.text_data import (
    VOCABULARY_SIZE,
    Corpus,
    Document,
    batch_indices,
    load,
    read_corpus,
)


@dataclass(frozen=True)
class Job:
    """State that the functions below share."""

    args: argparse.Namespace
    device: torch.device
    collection: ProcessGroupCollection
    """Megatron's own groups."""
    groups: hcp.ProcessGroups
    """hcp's view of these groups."""
    cost: hcp.CostModel
    forward_step: Callable[..., Any] = hcp_megatron.forward_step


# ---- The model -----------------------------------------------------------------------------------


def transformer_config(args: argparse.Namespace, **options: Any) -> TransformerConfig:
    experts = (
        dict(
            num_moe_experts=args.num_experts,
            moe_router_topk=args.moe_router_topk,
            moe_ffn_hidden_size=args.moe_ffn_hidden_size or args.ffn_hidden_size,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        )
        if args.num_experts
        else {}
    )
    stages, window = args.pipeline_model_parallel_size, args.config.window_size
    given = dict(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        mtp_num_layers=args.mtp_num_layers,
        moe_token_dispatcher_type="alltoall",
        cp_comm_type=args.cp_comm_type,
        window_size=None if window == NO_WINDOW else window,
        calculate_per_token_loss=True,  # one mean over the batch
        variable_seq_lengths=stages > 1,  # rows as the plan has them
        # Two stages would otherwise meet each other twice in one exchange.
        overlap_p2p_comm=args.num_virtual_stages_per_pipeline_rank is not None,
        batch_p2p_comm=args.num_virtual_stages_per_pipeline_rank is None,
    )
    return TransformerConfig(**{**given, **experts, **options})


def build_model(
    job: Job,
    config: TransformerConfig,
    build: Callable[[Job, TransformerConfig, int | None], torch.nn.Module] | None = None,
) -> list[DistributedDataParallel]:
    """Build the chunks of this rank's pipeline stage, each with its gradients in Megatron's
    buffers.

    `build` makes one chunk (default: of the GPT of the options)."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.params_dtype != torch.float64,
        use_distributed_optimizer=job.args.use_distributed_optimizer,
    )
    virtual = config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else list(range(virtual))
    chunks = [(build or build_chunk)(job, config, stage) for stage in stages]
    config.finalize_model_grads_func = finalize_model_grads
    return [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]


def build_chunk(job: Job, config: TransformerConfig, vp_stage: int | None) -> torch.nn.Module:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    spec = hcp_megatron.hcp_layer_spec(
        with_shared_norms(layer, config, vp_stage) if config.sequence_parallel else layer,
        fused_rope=job.args.apply_rope_fusion,
    )
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    model_class, mtp = GPTModel, None
    if config.mtp_num_layers:
        model_class = hcp_megatron.hcp_model_class(GPTModel)
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
        mtp = None if mtp is None else hcp_megatron.hcp_layer_spec(mtp)
    model = model_class(
        config,
        spec,
        VOCABULARY_SIZE,
        job.args.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=last,
        share_embeddings_and_output_weights=not job.args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        pg_collection=job.collection,
    )
    if job.args.linear_cross_entropy:
        hcp_megatron.use_linear_cross_entropy(model)
    model.to(job.device)
    return Float16Module(config, model) if config.bf16 else model


class SharedNorm(torch.nn.Module):
    """A norm under sequence parallelism: the gradients of its weight are summed over the
    tensor-parallel ranks, which share the rows. Megatron leaves it to Transformer Engine and
    Apex."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def with_shared_norms(layer: Any, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the specification of this stage's block, made from that of a layer."""
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SharedNorm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = SharedNorm
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules([layer] * count, SharedNorm)


def build_optimizer(job: Job, model: list[DistributedDataParallel]) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=job.args.lr,
        weight_decay=0.0,
        adam_beta2=0.95,
        bf16=job.args.bf16,
        params_dtype=torch.bfloat16 if job.args.bf16 else torch.float32,
        use_distributed_optimizer=job.args.use_distributed_optimizer,
        clip_grad=job.args.clip_grad,
    )
    return get_megatron_optimizer(config, model)


# ---- Training ------------------------------------------------------------------------------------


def train_step(
    job: Job, model: list[DistributedDataParallel], optimizer: Any, step: Any
) -> tuple[float, int, float]:
    """Update the weights once. Return (loss, its tokens, gradient norm), equal on every rank."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = run_schedule(job, model, step, forward_only=False)
    _, norm, _ = optimizer.step()
    loss, tokens = on_all_stages(job, hcp_megatron.mean_loss(reports, job.groups.dp_cp, job.device))
    return loss, int(tokens), 0.0 if norm is None else float(norm)


def run_schedule(
    job: Job, model: list[DistributedDataParallel], step: Any, *, forward_only: bool
) -> list[dict[str, Tensor]]:
    """Run Megatron's schedule for this layout over the micro-batches of a plan."""
    schedule = get_forward_backward_func()
    chunks = len(model)
    return schedule(
        forward_step_func=job.forward_step,
        data_iterator=step.data_iterator(None if chunks == 1 else chunks),
        model=model,
        num_microbatches=len(step),
        seq_length=job.args.max_length,  # unused: every stage is told how many rows come
        micro_batch_size=1,
        forward_only=forward_only,
    )


def on_all_stages(job: Job, values: tuple[float, int]) -> list[float]:
    """Broadcast the last pipeline stage's values to every stage."""
    numbers = torch.tensor(values, dtype=torch.float64, device=job.device)
    group = job.groups.pp
    dist.broadcast(numbers, dist.get_process_group_ranks(group)[-1], group=group)
    return numbers.tolist()


def train(
    job: Job,
    config: Config,
    model: list[DistributedDataParallel],
    corpus: Corpus,
    run: Run,
) -> Iterator[None]:
    """Train on the seed's batches, and yield after every step, so that compared runs take
    turns."""
    args, groups = job.args, job.groups
    optimizer = build_optimizer(job, model)
    steps = plan_steps(job, config, batches(job, corpus), groups)
    for _ in range(args.train_iters):
        synchronize(job)
        started = time.perf_counter()
        step = next(steps)
        loss, tokens, norm = train_step(job, model, optimizer, step)
        synchronize(job)
        run.steps.append(
            StepRecord(
                loss=loss,
                grad_norm=norm,
                sequences=len(step.plan.lengths),
                tokens=sum(step.plan.lengths),
                loss_tokens=tokens,
                micro_batches=len(step),
                efficiency=step.plan.efficiency,
                seconds=time.perf_counter() - started,
                plan_seconds=step.planning.seconds,
                plan_waited=step.planning.waited,
            )
        )
        yield


def plan_steps(
    job: Job,
    config: Config,
    batches: Iterable[Iterable[dict[str, Tensor]]],
    groups: hcp.ProcessGroups,
    masks: bool = False,
) -> Iterator[Any]:
    """Plan batches as this job's schedule and tensor parallelism require."""
    args = job.args
    return hcp_megatron.plan_batches(
        batches,
        config,
        groups,
        cost=job.cost,
        alignment=args.alignment,
        virtual_stages=args.num_virtual_stages_per_pipeline_rank or 1,
        sync=config.sync_where(waiting=waits_in_layers(args)),
        masks=masks,
    )


def synchronize(job: Job) -> None:
    if job.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def batches(job: Job, corpus: Corpus) -> Iterator[Iterator[dict[str, Tensor]]]:
    """Yield the samples that this rank loads of each global batch: its share in the domain.

    Only its tensor- and pipeline-parallel peers load the same."""
    args, groups = job.args, job.groups
    for iteration in range(args.train_iters):
        indices = batch_indices(
            len(corpus.training),
            seed=args.seed,
            iteration=iteration,
            batch_size=args.global_batch_size,
        )
        own = indices[groups.rank("dp_cp") :: groups.size("dp_cp")]
        yield load(corpus.training, own, job.device)


# ---- Evaluation ----------------------------------------------------------------------------------


def evaluate(
    job: Job,
    model: list[DistributedDataParallel],
    documents: Sequence[Document],
    groups: hcp.ProcessGroups,
) -> Evaluation:
    """Return the mean loss of the documents, each once, under a layout."""
    args = job.args
    config = args.config.for_evaluation(groups.size("cp"), args.max_length, args.alignment)
    reports: list[dict[str, Tensor]] = []
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        for step in plan_steps(job, config, evaluation_batches(job, documents, groups), groups):
            reports += run_schedule(job, model, step, forward_only=True)
    for chunk in model:
        chunk.train()
    loss, tokens = on_all_stages(job, hcp_megatron.mean_loss(reports, groups.dp_cp, job.device))
    expected = sum(document.length - 1 for document in documents)
    if tokens != expected:
        raise hcp.HcpError(
            f"evaluation computed {tokens:.0f} loss tokens, expected {expected}",
            code="samples-missed",
        )
    return Evaluation(groups.size("cp"), groups.size("dp"), loss, len(documents), int(tokens))


def evaluation_batches(
    job: Job, documents: Sequence[Document], groups: hcp.ProcessGroups
) -> Iterator[Iterator[dict[str, Tensor]]]:
    """Yield this rank's share of each global batch. The last batch may be smaller."""
    size = job.args.global_batch_size
    for start in range(0, len(documents), size):
        indices = range(start, min(start + size, len(documents)))
        yield load(documents, indices[groups.rank("dp_cp") :: groups.size("dp_cp")], job.device)


# ---- The job -------------------------------------------------------------------------------------


def pretrain(args: argparse.Namespace) -> None:
    """Run the whole program, on one rank of a job that a launcher started."""
    device = initialize_distributed(args)
    on_cpu = hcp_megatron.megatron_on_cpu if device.type == "cpu" else contextlib.nullcontext
    try:
        with on_cpu():
            run(args, device)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def run(args: argparse.Namespace, device: torch.device) -> None:
    job = start_job(args, device)
    corpus = on_every_rank(lambda: read_corpus(args))
    same_on_every_rank("the documents under --data", corpus.digest)
    size = args.eval_context_parallel_size or (1 if job.groups.size("cp") > 1 else args.domain)
    eval_groups = job.groups.with_context_parallel(size)
    runs = [Run(config.sequence_packing_scheduler) for config in configs(args, corpus)]
    on_cpu = device.type == "cpu"  # a GPU draws a billion weights sooner
    models = [
        build_model(job, transformer_config(args, use_cpu_initialization=on_cpu)) for _ in runs
    ]
    same_weights(models)
    trainings = [
        train(job, config, model, corpus, run)
        for config, model, run in zip(configs(args, corpus), models, runs, strict=True)
    ]
    first = dist.get_rank() == 0
    with progress(args.train_iters, "training", "step", shown=first) as bar:
        for _ in zip(*trainings, strict=True):
            bar.update()
            if first:
                bar.write(" | ".join(run.line() for run in runs))
                sys.stdout.flush()
    for model, run in zip(models, runs, strict=True):
        run.evaluations.append(evaluate(job, model, corpus.validation, job.groups))
        with hcp.eval_cp_context(model, job.groups, eval_groups):
            run.evaluations.append(evaluate(job, model, corpus.validation, eval_groups))
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for chunk in models[0] for p in chunk.parameters())
        print(report(args, device, corpus.describe(), parameters, runs), flush=True)
    eval_groups.close()


def start_job(args: argparse.Namespace, device: torch.device) -> Job:
    """Initialise Megatron's global state, and take its groups."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    torch.manual_seed(args.seed)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    groups = hcp.ProcessGroups.from_existing(collection)
    cost = cost_model(args, device, 2 if args.bf16 else 4, args.config.ranks_per_node)
    return Job(args, device, collection, groups, cost)


def configs(args: argparse.Namespace, corpus: Corpus) -> list[Config]:
    """Return the configurations to run: the one that was asked for or, to compare, two that take
    turns.

    The two are static CP with the least degree that holds the longest document, and dynamic CP."""
    degree = args.config.static_degree(corpus.longest, args.domain, args.alignment)
    static = static_config(args.config, degree)
    dynamic = replace(args.config, sequence_packing_scheduler="dynamic_cp")
    if args.compare:
        return [static, dynamic]
    return [dynamic if args.config.sequence_packing_scheduler == "dynamic_cp" else static]


def static_config(config: Config, degree: int) -> Config:
    """Return the options for one degree for all sequences, with levels of a2a+p2p that fit it."""
    levels = config.dispatch_options(degree)["hierarchical_context_parallel_sizes"]
    return replace(
        config,
        sequence_packing_scheduler="static_cp",
        context_parallel_size=degree,
        hierarchical_context_parallel_sizes=levels,
    )


def same_weights(models: list[list[DistributedDataParallel]]) -> None:
    """Copy the weights of the first model to the others."""
    for model in models[1:]:
        for chunk, first in zip(model, models[0], strict=True):
            for own, given in zip(chunk.parameters(), first.parameters(), strict=True):
                own.data.copy_(given.data)
