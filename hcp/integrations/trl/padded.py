"""Padded batches of TRL's trainers, computed by all ranks together.

B sequences of this rank's batch, L their padded length, T rows of this rank, F fields.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput

from hcp.groups.process_groups import ProcessGroups
from hcp.integrations.accelerate import check_accelerator
from hcp.integrations.columns import IGNORED
from hcp.integrations.loader import check_model_config, domain
from hcp.integrations.model_cost import cost_of_model
from hcp.integrations.transformers.attention import (
    check_softcap,
    own_attention,
    register_hcp_attention,
)
from hcp.integrations.transformers.model import model_inputs
from hcp.integrations.transformers.routers import (
    check_routers,
    record_routers,
    router_aux_loss,
)
from hcp.integrations.transformers.trainer import compute_dtype
from hcp.planning.cost import CostModel
from hcp.step.config import Config
from hcp.step.dispatch import Step
from hcp.step.planner import StepPlanner
from hcp.tools.loggers import MeanMetrics

_ROUTERS = "output_router_logits"
_OF_THE_BATCH = {"input_ids", "attention_mask", "labels", "fused_lm_head", "use_cache", _ROUTERS}
_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class PaddedTrainer:
    """The common part of TRL's trainers of padded batches under hcp. It comes before one of them
    among the bases.

    Their forwards, with and without gradients, compute what TRL's fused LM head says of each token.
    hcp plans the sequences of all ranks' batches together, moves each to the ranks that compute
    it, and brings the results back. All else (losses, metrics, loaders) is TRL's own.
    """

    def __init__(
        self,
        *positional: Any,
        cp: Config,
        groups: ProcessGroups | None = None,
        cost: CostModel | None = None,
        fused_rope: bool = True,
        **keywords: Any,
    ) -> None:
        """`cp`: limits and options, see `hcp.Config`; a rank holds the rows of its share of a batch
        for the backward pass. `groups`: by default, all ranks of the job are one domain.
        `fused_rope`: see `register_hcp_attention`. Other arguments are TRL's.

        Raises ValueError for options that would be wrong, or have no effect."""
        check_model_config(cp)
        super().__init__(*positional, **keywords)
        trainer: Any = self
        _check(trainer, cp)
        made = domain(groups, trainer.args.world_size, trainer.args.device)
        self._means = MeanMetrics()
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is None:
                continue
            check_softcap(model, trainer.args.device, compute_dtype(trainer.args, model))
            with trainer.accelerator.autocast():
                register_hcp_attention(model, fused_rope=fused_rope)
            spread_padded(model, cp, made, cost, self._means)

    def train(self, *positional: Any, **keywords: Any) -> Any:
        self._means.clear()  # of forwards of a training before, which nothing logged
        return super().train(*positional, **keywords)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *others: Any, **keywords: Any) -> None:
        """Log, with the loss, the metrics of `StepStats`: means over the forwards that have
        trained since the last log, on this rank."""
        if "loss" in logs:
            logs |= self._means.take()
        super().log(logs, *others, **keywords)  # type: ignore[misc]

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Inside this context, each rank computes whole sequences with Transformers' attention."""
        trainer: Any = self
        with own_attention(trainer.model):
            yield


def _check(trainer: Any, cp: Config) -> None:
    name, kind = type(trainer).__name__, str(trainer.accelerator.distributed_type)
    check_accelerator(trainer.accelerator, accumulates=True)
    if kind.endswith("FSDP"):
        raise ValueError(
            f"the Accelerator uses FSDP, expected DDP: {name} computes several micro-batches in "
            "one forward, which was not tested with FSDP"
        )
    if trainer.aux_loss_enabled:
        check_routers(trainer.model)
    if cp.too_long != "refuse":
        raise ValueError(
            f"too_long is {cp.too_long!r}, expected 'refuse': {name} needs the results of every "
            "sample. Limit the lengths by its own options"
        )
    if cp.eval_context_parallel_size is not None:
        raise ValueError(
            f"eval_context_parallel_size is {cp.eval_context_parallel_size}, expected None: {name} "
            "evaluates in batches that are planned as in training"
        )


def spread_padded(
    model: Any, cp: Config, groups: ProcessGroups, cost: CostModel | None, trained: MeanMetrics
) -> None:
    """Let all ranks compute a model's padded batches together where TRL asks for its fused head.

    Every rank of the domain calls the model equally often. `trained` gets the numbers of the
    batches whose gradients are computed."""
    cost = cost or cost_of_model(model, groups, cp.ranks_per_node)
    # Between two forwards TRL may generate, and a reference model computes.
    planner = StepPlanner.of(cp, groups.size("dp_cp"), cost=cost, compares=False)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    fused = base.forward

    @wraps(fused)
    def forward(self: Any, *positional: Any, fused_lm_head: bool = False, **given: Any) -> Any:
        if not fused_lm_head:
            return fused(*positional, **given)
        if positional:
            given["input_ids"], *more = positional
            if more:
                raise ValueError("the model was called with several positional arguments")
        said, step = _computed(base, fused, given, planner, groups)
        if torch.is_grad_enabled():
            trained.add(step)
        return said

    base.forward = types.MethodType(forward, base)


def _computed(
    base: nn.Module,
    fused: Callable[..., Any],
    given: Mapping[str, Any],
    planner: StepPlanner,
    groups: ProcessGroups,
) -> tuple[FusedCausalLMOutput, Step]:
    others = [
        name
        for name, value in given.items()
        if name not in _OF_THE_BATCH and value is not None and value is not False
    ]
    if others:
        raise ValueError(
            f"the model was called with {', '.join(sorted(others))}, expected a batch of text: hcp "
            "dispatches tokens only"
        )
    tokens, labels = given["input_ids"], given["labels"]
    kept = _kept(tokens, given.get("attention_mask"))
    samples = [_sample(*rows) for rows in zip(tokens, labels, kept, strict=True) if rows[-1].any()]
    step = planner.step(samples, groups)
    rows, names, balance = _own_rows(base, fused, step, balanced=bool(given.get(_ROUTERS)))
    said = _padded(rows, names, kept, labels)
    return (said if balance is None else replace(said, aux_loss=balance)), step


def _kept(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return which tokens are none of the padding, (B, L) bools."""
    if mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    if mask.shape != tokens.shape or bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and values up to {mask.max().item()}, "
            f"expected {tuple(tokens.shape)} and 0 or 1: 0 is padding, and each row one sequence"
        )
    return mask.bool()


def _sample(tokens: Tensor, labels: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Return a sequence without its padding; each row's label is that of its successor."""
    own = labels[kept]
    after = torch.cat((own[1:], own.new_full((1,), IGNORED)))
    return {"input_ids": tokens[kept], "labels": after}


def _own_rows(
    base: nn.Module, fused: Callable[..., Any], step: Step, *, balanced: bool
) -> tuple[list[Tensor], list[str], Tensor | None]:
    """Return what the model says of the sequences of this rank, (tokens, F) each, the names of the
    fields, and, if experts are to be balanced, the loss of their routers.

    That loss is the mean over the sequences of all ranks' batches: its mean over the ranks, which
    TRL takes of gradients and logs, counts each sequence once."""
    names: list[str] = []
    results: list[Tensor] = []
    shares: list[Tensor] = []
    for cp, local in step:
        labels = cp.at_least_one_row(local.labels, IGNORED).unsqueeze(0)
        with record_routers(base) if balanced else contextlib.nullcontext() as routed:
            said = fused(**model_inputs(cp, local), shift_labels=labels, fused_lm_head=True)
        if routed is not None:
            shares.append(router_aux_loss(cp, routed, grad_reduce="mean"))
        names = [name for name in _FIELDS if getattr(said, name) is not None]
        fields = torch.stack([getattr(said, name)[0].float() for name in names], 1)
        results.append(fields[: cp.rows])
    return step.combine(results), names, torch.stack(shares).sum() if shares else None


def _padded(
    rows: list[Tensor], names: list[str], kept: Tensor, labels: Tensor
) -> FusedCausalLMOutput:
    """Return the fields (B, L - 1), as TRL's fused head does: of the token after each."""
    full = torch.zeros(*kept.shape, len(names), device=kept.device)
    full = full.masked_scatter(kept.unsqueeze(-1), torch.cat([full[0, :0], *rows]))
    fields = dict(zip(names, full[:, :-1].unbind(-1), strict=True))
    if "is_top1" in fields:
        fields["is_top1"] = fields["is_top1"].bool()
    mask = labels[:, 1:] != IGNORED
    loss = -fields["log_probs"].sum() / mask.sum().clamp(min=1)
    return FusedCausalLMOutput(loss=loss, label_mask=mask, **fields)
