"""Small trainings of the real Megatron-Core on gloo ranks, from weights that no layout changes.

`ranks.run_ranks` calls `train(rank, size, case, ...)`. A case names the model's options. Weights
are drawn from a parameter's global name and cut for the rank, so that all layouts of a model start
from equal weights. `train_alone` is the reference: one rank, Megatron's own model, layers, schedule
and data without hcp, one document in a micro-batch, or a step's documents side by side in one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import hcp
from hcp.planning.limits import rows_up_to
from hcp.tools.check import check_plan
from support.deep_ep import deep_ep_over_gloo


@dataclass(frozen=True)
class Case:
    flags: tuple[str, ...] = ()
    """Options of the program."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of TransformerConfig."""
    builder: str | None = None
    """A name in `BUILDERS` of another model than the program's."""
    lengths: tuple[tuple[int, ...], ...] = ()
    """Lengths of the documents of each step."""
    together: bool = False
    """Whether the reference has the documents of a step in one micro-batch, padded."""
    shared: int = 0
    """If not 0: as many tokens are the same in all documents of a step, as many more in each two,
    and ranks load prefix trees of them."""

    def but(self, *flags: str) -> Case:
        return dataclasses.replace(self, flags=(*self.flags, *flags))


@dataclass
class Outcome:
    losses: list[float]
    tokens: list[int]
    micro_batches: list[int]
    degrees: list[int]
    """The degree of every group of every plan."""
    gradients: dict[str, torch.Tensor]
    """Gradients of the first step, by global name; one rank's only."""
    differences: dict[str, float]
    """Distances from the given gradients, relative to their norm."""
    evaluations: list[Any]
    """Metrics under the training layout, and with all ranks of the domain in one CP group."""
    uncovered: list[str]
    """Places that `hcp.audit` finds and `hcp.eval_cp_context` would leave."""


LONGEST = 160
SMALL = (
    *("--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48"),
    *("--num-attention-heads", "4", "--num-query-groups", "2"),
    *("--max-length", str(LONGEST), "--lr", "2e-3"),
)


def lengths_of(steps: int) -> tuple[tuple[int, ...], ...]:
    """Draw short lengths, and in every other step one that a rank cannot hold."""
    generator = torch.Generator().manual_seed(7)
    batches = torch.randint(1, 40, (steps, 6), generator=generator).tolist()
    return tuple(tuple(b) if i % 2 else (*b, 100 + i) for i, b in enumerate(batches))


def train(rank: int, size: int, case: Case, expected: dict[str, torch.Tensor]) -> Outcome:
    return _on_cpu(case, lambda: _train(case, expected))


def train_alone(rank: int, size: int, case: Case) -> Outcome:
    return _on_cpu(case, lambda: _train_alone(case))


def _on_cpu(case: Case, body: Callable[[], Outcome]) -> Outcome:
    warnings.simplefilter("ignore")
    from hcp.integrations.megatron import megatron_on_cpu

    if case.builder == "hybrid":
        from support.megatron_scan import stand_in_for_kernels

        stand_in_for_kernels()
    more = {"wide": wide_routers, "predicting": wide_routers, "flex": deep_ep_over_gloo}
    around = more.get(case.builder or "", contextlib.nullcontext)()
    with megatron_on_cpu(), around, own_losses_of_experts():
        return body()


@contextlib.contextmanager
def own_losses_of_experts() -> Iterator[None]:
    """Keep what Megatron holds of experts' losses for its process, their scale and log, in a case.

    A backward outside its schedule leaves a scale that no schedule can overwrite, and a log has as
    many entries as the first model had layers.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    log_of_experts().clear()
    with mock.patch.object(MoEAuxLossAutoScaler, "main_loss_backward_scale", None):
        yield
    log_of_experts().clear()


def log_of_experts() -> dict[str, Any]:
    """Return the entries, by name, in which Megatron keeps experts' losses until it logs them."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        entries: dict[str, Any] = moe_utils.get_moe_metrics_tracker().metrics
        return entries
    before_017: dict[str, Any] = moe_utils.get_moe_layer_wise_logging_tracker()
    return before_017


@contextlib.contextmanager
def wide_routers() -> Iterator[None]:
    """Make what Megatron's routers compute in float32 float64, and compile nothing."""
    from megatron.core.transformer.moe import moe_utils

    class Wide:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with (
        mock.patch.object(moe_utils, "torch", Wide()),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _start(case: Case, builders: dict[str | None, Any]) -> tuple[Any, list[Any], Any]:
    """Return the job, its model and optimizer."""
    from megatron.core import parallel_state

    from hcp.integrations.megatron.program import pretraining

    parallel_state.destroy_model_parallel()
    args = small_arguments(case)
    job = pretraining.start_job(args, torch.device("cpu"))
    config = pretraining.transformer_config(args, **case.options)
    model = pretraining.build_model(job, config, builders[case.builder])
    draw_weights(model, args)
    return job, model, pretraining.build_optimizer(job, model)


def _train(case: Case, expected: dict[str, torch.Tensor]) -> Outcome:
    from hcp.integrations.megatron.program import pretraining

    job, model, optimizer = _start(case, BUILDERS)
    args = job.args
    if case.builder in ("float64", "wide"):
        own = functools.partial(job.forward_step, losses=float64_losses)
        job = dataclasses.replace(job, forward_step=own)
    outcome = Outcome([], [], [], [], {}, {}, [], [])
    load, masks = (share_of_trees, True) if case.shared else (share, False)
    batches = load(case, job.groups)
    steps = pretraining.plan_steps(job, args.config, batches, job.groups, masks=masks)
    for step in steps:
        check_plan(step.plan)
        outcome.micro_batches.append(len(step))
        outcome.degrees += [g.degree for batch in step.plan.micro_batches for g in batch]
        if not outcome.losses:
            gradients_of_first_step(job, model, step, args, expected, outcome)
        loss, tokens, _ = pretraining.train_step(job, model, optimizer, step)
        outcome.losses.append(loss)
        outcome.tokens.append(tokens)
    evaluate_both_layouts(job, model, outcome)
    return outcome


EVALUATED = (30, 1, 77, 5, 12, 40, 8)
"""Bytes of the documents of an evaluation, without the end of each."""


def evaluate_both_layouts(job: Any, model: list[Any], outcome: Outcome) -> None:
    from hcp.integrations.megatron.program import pretraining
    from hcp.tools.programs.text_data import Document

    texts = [bytes(document(99, i, n).tolist()) for i, n in enumerate(EVALUATED)]
    documents = [Document(text, ends=True) for text in texts]
    wide = job.groups.with_context_parallel(job.args.domain)
    outcome.evaluations.append(pretraining.evaluate(job, model, documents, job.groups))
    outcome.uncovered += [str(found) for found in hcp.audit(model, job.groups, wide).uncovered]
    with hcp.eval_cp_context(model, job.groups, wide):
        outcome.evaluations.append(pretraining.evaluate(job, model, documents, wide))
    wide.close()


def small_arguments(case: Case) -> Any:
    """Return options by which a rank holds little more than its share of the longest document."""
    from hcp.integrations.megatron.program import program_arguments

    def parse(rows: int) -> Any:
        return program_arguments.parse_args(
            [*SMALL, "--max-seqlen-per-dp-cp-rank", str(rows), *case.flags]
        )

    return parse(rows_up_to(LONGEST, parse(LONGEST).domain) + 8)


def gradients_of_first_step(
    job: Any,
    model: list[Any],
    step: Any,
    args: Any,
    expected: dict[str, torch.Tensor],
    outcome: Outcome,
) -> None:
    from hcp.integrations.megatron.program import pretraining

    if args.use_distributed_optimizer:
        return
    for chunk in model:
        chunk.zero_grad_buffer()
    pretraining.run_schedule(job, model, step, forward_only=False)
    for name, bias in (pair for chunk in model for pair in chunk.named_buffers()):
        if name.endswith("expert_bias"):
            bias.zero_()  # the step has updated it
    for name, parameter, cut in parameters_of(model, args):
        own, theirs = parameter.main_grad, cut(expected[name])
        scale = float(theirs.norm()) or 1.0
        outcome.differences[name] = float((own - theirs).norm()) / scale


# ---- the reference -------------------------------------------------------------------------------


def _train_alone(case: Case) -> Outcome:
    job, model, optimizer = _start(case, OWN_BUILDERS)
    losses = float64_losses if case.builder in ("float64", "wide") else None
    outcome = Outcome([], [], [], [], {}, {}, [], [])
    for i in range(len(case.lengths)):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        documents = documents_of(case, i)
        loss, tokens = run_alone(model, documents, losses, together=case.together)
        if i == 0:
            for name, parameter, _ in parameters_of(model, job.args):
                outcome.gradients[name] = parameter.main_grad.clone()
        optimizer.step()
        outcome.losses.append(loss)
        outcome.tokens.append(tokens)
    texts = [document(99, i, n) for i, n in enumerate(EVALUATED)]
    ended = [torch.cat([text, torch.tensor([256])]) for text in texts]
    outcome.evaluations.append(run_alone(model, ended, losses, forward_only=True))
    return outcome


def run_alone(
    model: list[Any],
    documents: list[torch.Tensor],
    losses: Any,
    forward_only: bool = False,
    together: bool = False,
) -> tuple[float, int]:
    """Run Megatron's schedule over the documents, one per micro-batch, or all of them in one.
    Return (mean, tokens)."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = [documents] if together else [[document] for document in documents]
    reports = get_forward_backward_func()(
        forward_step_func=functools.partial(step_alone, losses=losses),
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=LONGEST,
        micro_batch_size=len(batches[0]),
        forward_only=forward_only,
    )
    total, tokens = torch.stack([report["lm loss"] for report in reports]).double().sum(0).tolist()
    return total / tokens, int(tokens)


def step_alone(
    data_iterator: Iterator[list[torch.Tensor]], model: Any, *, losses: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Compute documents, padded at their ends. Every token but the last predicts the next one."""
    documents = next(data_iterator)
    tokens = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    labels, mask = tokens.roll(-1, dims=1), torch.zeros(tokens.shape)
    for row, document in zip(mask, documents, strict=True):
        row[: len(document) - 1] = 1.0
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    mtp = {"loss_mask": mask} if model.config.mtp_num_layers else {}
    out = model(tokens, positions, None, labels=None if losses else labels, **mtp)
    out = losses(out, labels) if losses else out

    def sums(out: torch.Tensor) -> Any:
        total, count = (out * mask).sum(), mask.sum()
        return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}

    return out, sums


def share(case: Case, groups: hcp.ProcessGroups) -> Iterator[list[dict[str, Any]]]:
    """Yield this rank's documents of each step."""
    for i in range(len(case.lengths)):
        documents = documents_of(case, i)
        yield [{"tokens": t} for t in documents[groups.rank("dp_cp") :: groups.size("dp_cp")]]


def share_of_trees(case: Case, groups: hcp.ProcessGroups) -> Iterator[list[dict[str, Any]]]:
    """Yield this rank's trees of each step. The last rank loads one document, without a mask, the
    first one all others."""
    rank, last = groups.rank("dp_cp"), groups.size("dp_cp") - 1
    for i in range(len(case.lengths)):
        *documents, alone = documents_of(case, i)
        trees = hcp.prefix_trees(documents if rank == 0 else [])
        weights = [(torch.arange(len(text)) < len(text) - 1).double() for text in documents]
        columns = (trees.tokens, trees.labels, trees.summed(weights) if rank == 0 else [])
        samples = [
            {"tokens": tokens, "labels": labels, "loss_mask": counts, "mask": mask}
            for tokens, labels, counts, mask in zip(*columns, trees.masks, strict=True)
        ]
        yield samples + [{"tokens": alone}] * (rank == last)


def documents_of(case: Case, step: int) -> list[torch.Tensor]:
    drawn = [document(step, j, n) for j, n in enumerate(case.lengths[step])]
    if not case.shared:
        return drawn
    root, *pairs = (document(step, 500 + j, case.shared) for j in range(1 + len(drawn) // 2 + 1))
    return [torch.cat([root, pairs[j // 2], own])[: len(own)] for j, own in enumerate(drawn)]


def document(step: int, place: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + place)
    return torch.randint(0, 256, (length,), generator=generator)


# ---- weights -------------------------------------------------------------------------------------


def draw_weights(model: Sequence[Any], args: Any) -> None:
    with torch.no_grad():
        for name, parameter, cut in parameters_of(model, args):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            full = torch.randn(full_shape(name, parameter, args), generator=generator) * 0.2
            if name.endswith(("norm.weight", "layernorm.weight")):
                full = 1 + full
            parameter.copy_(cut(full))


def parameters_of(model: Sequence[Any], args: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (global name, parameter, function that cuts this rank's part out of the whole)."""
    from megatron.core import parallel_state

    ep = parallel_state.get_expert_model_parallel_rank()
    for chunk in model:
        modules = dict(chunk.named_modules())
        for path, parameter in chunk.named_parameters():
            name = re.sub(r"\bmodule\.", "", path)
            if found := re.match(r"(.*?\blayers\.)(\d+)(.*)", name):
                layer: Any = modules[path[: path.index(found[3])]] if found[3] else None
                if not name.startswith("mtp."):
                    name = f"{found[1]}{layer.layer_number - 1}{found[3]}"
            if found := re.match(r"(.*local_experts\.)(\d+)(.*)", name):
                count = args.num_experts // args.expert_model_parallel_size
                name = f"{found[1]}{int(found[2]) + ep * count}{found[3]}"
            tied = not args.untie_embeddings_and_output_weights
            if name == "output_layer.weight" and tied:
                name = "embedding.word_embeddings.weight"
                if any(path.endswith(".word_embeddings") for path in modules):
                    continue  # of a last stage that predicts: Megatron makes it and uses the other
            yield name, parameter, cutter(name, parameter, args)


def tensor_parallel(name: str, args: Any) -> tuple[int, int]:
    """Return the number of ranks that share a parameter's layer, and this rank's place."""
    from megatron.core import parallel_state

    if "local_experts" in name:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        return args.expert_tensor_parallel_size, rank
    return args.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()


def full_shape(name: str, parameter: Any, args: Any) -> list[int]:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[getattr(parameter, "partition_dim", 0)] *= tensor_parallel(name, args)[0]
    return shape


def cutter(name: str, parameter: Any, args: Any) -> Any:
    size, rank = tensor_parallel(name, args)

    def cut(full: torch.Tensor) -> torch.Tensor:
        if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return full
        dim = getattr(parameter, "partition_dim", 0)
        if "linear_fc1" in name:  # gate and value side by side, each cut
            return torch.cat([half.chunk(size, dim)[rank] for half in full.chunk(2, dim)], dim)
        return full.chunk(size, dim)[rank]

    return cut


# ---- models --------------------------------------------------------------------------------------


def build_hybrid(job: Any, config: Any, vp_stage: int | None) -> torch.nn.Module:
    """Build a model of Mamba, attention, Mamba, MLP."""
    from hcp.integrations.megatron import hcp_layer_spec
    from support.megatron_models import mamba_hybrid

    return mamba_hybrid(job.collection, None, config=config, wrap=hcp_layer_spec)


def build_in_float64(job: Any, config: Any, vp_stage: int | None) -> torch.nn.Module:
    from hcp.integrations.megatron.program import pretraining

    return pretraining.build_chunk(job, config, vp_stage).double()


def build_own(job: Any, config: Any, vp_stage: int | None) -> torch.nn.Module:
    """Build Megatron's GPT of the program's options."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    mtp = get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers else None
    return GPTModel(
        config,
        spec,
        vocab_size=264,
        max_sequence_length=LONGEST,
        share_embeddings_and_output_weights=not job.args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        pg_collection=job.collection,
    )


def build_own_alltoall(job: Any, config: Any, vp_stage: int | None) -> torch.nn.Module:
    """On one rank, where the flex dispatcher refuses to run."""
    config.moe_token_dispatcher_type = "alltoall"
    return build_own(job, config, vp_stage)


def build_own_hybrid(job: Any, config: Any, vp_stage: int | None) -> torch.nn.Module:
    from support.megatron_models import mamba_hybrid

    return mamba_hybrid(job.collection, None, config=config)


def build_own_in_float64(job: Any, config: Any, vp_stage: int | None) -> torch.nn.Module:
    return build_own(job, config, vp_stage).double()


def float64_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Replaces Megatron's cross-entropy, which casts to float32."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    assert logits.dtype == torch.float64
    logits = gather_from_tensor_model_parallel_region(logits)
    return F.cross_entropy(logits[0], labels[0], reduction="none")[None]


BUILDERS: dict[str | None, Any] = {
    None: None,  # the program's own
    "hybrid": build_hybrid,
    "float64": build_in_float64,
    "wide": build_in_float64,
    "predicting": build_in_float64,
    "flex": None,
}
OWN_BUILDERS: dict[str | None, Any] = {
    None: build_own,
    "hybrid": build_own_hybrid,
    "float64": build_own_in_float64,
    "wide": build_own_in_float64,
    "predicting": build_own_in_float64,
    "flex": build_own_alltoall,
}
