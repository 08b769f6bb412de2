"""Small trainings of the real Megatron-Core on gloo ranks, from weights that no layout changes.

`train(rank, size, case, ...)` is what `ranks.run_ranks` calls. A case names the model's options;
weights are drawn from a parameter's global name and cut for the rank, so that every layout of the
same model starts from the same.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import hcp
from hcp.limits import rows_up_to


@dataclass(frozen=True)
class Case:
    flags: tuple[str, ...] = ()
    """Of the program."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of TransformerConfig."""
    builder: str | None = None
    """In `BUILDERS`: another model than the program's."""
    lengths: tuple[tuple[int, ...], ...] = ()
    """Of the documents of each step."""

    def but(self, *flags: str) -> Case:
        return Case((*self.flags, *flags), self.options, self.builder, self.lengths)


@dataclass
class Outcome:
    losses: list[float]
    tokens: list[int]
    micro_batches: list[int]
    degrees: list[int]
    """Of every group of every plan."""
    gradients: dict[str, torch.Tensor]
    """Of the first step, by global name; one rank's only."""
    differences: dict[str, float]
    """From the gradients that were given, relative to their norm."""
    evaluations: list[Any]
    """Under the training layout, and under one with all ranks of the domain in one CP group."""
    uncovered: list[str]
    """What `hcp.audit` finds and `hcp.eval_cp_context` would leave."""


LONGEST = 160
SMALL = (
    *("--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48"),
    *("--num-attention-heads", "4", "--num-query-groups", "2"),
    *("--max-length", str(LONGEST), "--lr", "2e-3"),
)


def lengths_of(steps: int) -> tuple[tuple[int, ...], ...]:
    """Short ones, and in every other step one that a rank does not hold."""
    generator = torch.Generator().manual_seed(7)
    batches = torch.randint(1, 40, (steps, 6), generator=generator).tolist()
    return tuple(tuple(b) if i % 2 else (*b, 100 + i) for i, b in enumerate(batches))


def train(
    rank: int, size: int, case: Case, expected: dict[str, torch.Tensor] | None = None
) -> Outcome:
    warnings.simplefilter("ignore")
    from hcp.integrations.megatron import megatron_on_cpu

    if case.builder == "hybrid":
        from megatron_scan import stand_in_for_kernels

        stand_in_for_kernels()
    with megatron_on_cpu():
        return _train(case, expected)


def _train(case: Case, expected: dict[str, torch.Tensor] | None) -> Outcome:
    from megatron.core import parallel_state

    from hcp.integrations.megatron.program import training

    parallel_state.destroy_model_parallel()
    args = small_arguments(case)
    job = training.start_job(args, torch.device("cpu"))
    if case.builder == "float64":
        own = functools.partial(job.forward_step, losses=float64_losses)
        job = dataclasses.replace(job, forward_step=own)
    config = training.transformer_config(args, **case.options)
    model = training.build_model(job, config, BUILDERS[case.builder] if case.builder else None)
    draw_weights(model, args)
    optimizer = training.build_optimizer(job, model)
    outcome = Outcome([], [], [], [], {}, {}, [], [])
    steps = training.plan_steps(job, args.config, share(case.lengths, job.groups), job.groups)
    for step in steps:
        hcp.check_plan(step.plan)
        outcome.micro_batches.append(len(step))
        outcome.degrees += [g.degree for batch in step.plan.micro_batches for g in batch]
        if not outcome.losses:
            gradients_of_first_step(job, model, step, args, expected, outcome)
        loss, tokens, _ = training.train_step(job, model, optimizer, step)
        outcome.losses.append(loss)
        outcome.tokens.append(tokens)
    evaluate_both_layouts(job, model, outcome)
    return outcome


def evaluate_both_layouts(job, model, outcome) -> None:
    from hcp.demo.data import Document
    from hcp.integrations.megatron.program import training

    texts = [bytes(document(99, i, n).tolist()) for i, n in enumerate((30, 1, 77, 5, 12, 40, 8))]
    documents = [Document(text, ends=True) for text in texts]
    wide = job.groups.with_context_parallel(job.args.domain)
    outcome.evaluations.append(training.evaluate(job, model, documents, job.groups))
    outcome.uncovered += [str(found) for found in hcp.audit(model, job.groups, wide).uncovered]
    with hcp.eval_cp_context(model, job.groups, wide):
        outcome.evaluations.append(training.evaluate(job, model, documents, wide))
    wide.close()


def small_arguments(case: Case) -> Any:
    """The options, with room on a rank for little more than its share of the longest document."""
    from hcp.integrations.megatron.program import arguments

    def parse(rows: int) -> Any:
        return arguments.parse_args([*SMALL, "--max-seqlen-per-dp-cp-rank", str(rows), *case.flags])

    return parse(rows_up_to(LONGEST, parse(LONGEST).domain) + 8)


def gradients_of_first_step(job, model, step, args, expected, outcome) -> None:
    from hcp.integrations.megatron.program import training

    if args.use_distributed_optimizer:
        return
    for chunk in model:
        chunk.zero_grad_buffer()
    training.run_schedule(job, model, step, forward_only=False)
    for name, parameter, cut in parameters_of(model, args):
        if expected is None:
            outcome.gradients[name] = parameter.main_grad.clone()
        else:
            own, theirs = parameter.main_grad, cut(expected[name])
            scale = float(theirs.norm()) or 1.0
            outcome.differences[name] = float((own - theirs).norm()) / scale


def share(
    lengths: Sequence[Sequence[int]], groups: hcp.ProcessGroups
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """This rank's documents of each step."""
    for i, batch in enumerate(lengths):
        documents = [document(i, j, n) for j, n in enumerate(batch)]
        yield [{"tokens": t} for t in documents[groups.rank("dp_cp") :: groups.size("dp_cp")]]


def document(step: int, place: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + place)
    return torch.randint(0, 256, (length,), generator=generator)


# ---- weights -------------------------------------------------------------------------------------


def draw_weights(model: Sequence[Any], args: Any) -> None:
    with torch.no_grad():
        for name, parameter, cut in parameters_of(model, args):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            full = torch.randn(full_shape(parameter, args), generator=generator) * 0.2
            if name.endswith(("norm.weight", "layernorm.weight")):
                full = 1 + full
            parameter.copy_(cut(full))


def parameters_of(model: Sequence[Any], args: Any) -> Iterator[tuple[str, Any, Any]]:
    """(global name, parameter, function that cuts this rank's part out of the whole)."""
    from megatron.core import parallel_state

    ep = parallel_state.get_expert_model_parallel_rank()
    for chunk in model:
        modules = dict(chunk.named_modules())
        for path, parameter in chunk.named_parameters():
            name = re.sub(r"\bmodule\.", "", path)
            if found := re.match(r"(.*?\blayers\.)(\d+)(.*)", name):
                layer = modules[path[: path.index(found[3])]] if found[3] else None
                if not name.startswith("mtp."):
                    name = f"{found[1]}{layer.layer_number - 1}{found[3]}"
            if found := re.match(r"(.*local_experts\.)(\d+)(.*)", name):
                count = args.num_experts // args.expert_model_parallel_size
                name = f"{found[1]}{int(found[2]) + ep * count}{found[3]}"
            tied = not args.untie_embeddings_and_output_weights
            if name == "output_layer.weight" and tied:
                name = "embedding.word_embeddings.weight"
            yield name, parameter, cutter(name, parameter, args)


def full_shape(parameter: Any, args: Any) -> list[int]:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[getattr(parameter, "partition_dim", 0)] *= args.tensor_model_parallel_size
    return shape


def cutter(name: str, parameter: Any, args: Any) -> Any:
    from megatron.core import parallel_state

    size, rank = args.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()

    def cut(full: torch.Tensor) -> torch.Tensor:
        if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return full
        dim = getattr(parameter, "partition_dim", 0)
        if "linear_fc1" in name:  # gate and value side by side, each cut
            return torch.cat([half.chunk(size, dim)[rank] for half in full.chunk(2, dim)], dim)
        return full.chunk(size, dim)[rank]

    return cut


# ---- models other than the program's -------------------------------------------------------------


def build_hybrid(job: Any, config: Any, vp_stage: int | None) -> torch.nn.Module:
    """Mamba, attention, Mamba, MLP."""
    from test_megatron import mamba_hybrid

    from hcp.integrations.megatron import hcp_layer_spec

    return mamba_hybrid(job.collection, None, config=config, wrap=hcp_layer_spec)


def build_in_float64(job: Any, config: Any, vp_stage: int | None) -> torch.nn.Module:
    from hcp.integrations.megatron.program import training

    return training.build_chunk(job, config, vp_stage).double()


def float64_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """In the place of Megatron's cross-entropy, which casts to float32."""
    assert logits.dtype == torch.float64
    return F.cross_entropy(logits[0], labels[0], reduction="none")[None]


BUILDERS: dict[str, Any] = {"hybrid": build_hybrid, "float64": build_in_float64}
