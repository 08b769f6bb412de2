"""Padded batches of TRL's trainers, computed by all ranks together.

B sequences of this rank's batch, L their padded length, T rows of this rank, F fields.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput

from hcp.groups.process_groups import ProcessGroups
from hcp.integrations.accelerate import check_accelerator, with_barrier_of
from hcp.integrations.columns import IGNORED
from hcp.integrations.gathers import weights_come_later
from hcp.integrations.loader import check_model_config, domain
from hcp.integrations.model_cost import cost_of_model
from hcp.integrations.transformers.attention import (
    check_dropout,
    check_softcap,
    own_attention,
    register_hcp_attention,
)
from hcp.integrations.transformers.model import model_inputs
from hcp.integrations.transformers.padded_batches import expect_batch_of_text, kept_tokens
from hcp.integrations.transformers.registration import Registration
from hcp.integrations.transformers.routers import (
    check_routers,
    record_routers,
    router_aux_loss,
)
from hcp.integrations.transformers.trainer import compute_dtype
from hcp.planning.cost import CostModel
from hcp.planning.mask import Mask
from hcp.step.config import Config
from hcp.step.dispatch import Step, gather_masks
from hcp.step.planner import StepPlanner
from hcp.step.trees import Trees, prefix_trees
from hcp.tools.loggers import LogsMeans, MeanMetrics

_ROUTERS = "output_router_logits"
_OF_THE_BATCH = {"input_ids", "attention_mask", "labels", "fused_lm_head", "use_cache", _ROUTERS}
_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class PaddedTrainer(LogsMeans):
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
        trees: bool | Mapping[str, Any] = False,
        **keywords: Any,
    ) -> None:
        """`cp`: limits and options, see `hcp.Config`; a rank holds the rows of its share of a batch
        for the backward pass. `groups`: by default, all ranks of the job are one domain.
        `fused_rope`: see `register_hcp_attention`. `trees`: sequences of a rank's batch that begin
        alike, as answers to one prompt do, are computed as prefix trees, what they share once;
        True, or options of `hcp.prefix_trees`. Other arguments are TRL's.

        Raises ValueError for options that would be wrong, or have no effect."""
        check_model_config(cp)
        super().__init__(*positional, **keywords)
        trainer: Any = self
        _check(trainer, cp)
        cp = with_barrier_of(trainer.accelerator, cp)
        check_dropout(trainer.model)
        _expect_weights_of_reference(trainer)
        made = domain(groups, trainer.args.world_size, trainer.args.device)
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is None:
                continue
            check_softcap(model, trainer.args.device, compute_dtype(trainer.args, model))
            registration = Registration(
                trainer, model, partial(register_hcp_attention, model, fused_rope=fused_rope)
            )
            spread_padded(model, cp, made, cost, self._means, trees, registration.expect_done)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Inside this context, each rank computes whole sequences with Transformers' attention."""
        trainer: Any = self
        with own_attention(trainer.model):
            yield


def _expect_weights_of_reference(trainer: Any) -> None:
    """Refuse a reference of which some rank has no weights, on all ranks: TRL shards it and sends
    it none."""
    reference = getattr(trainer, "ref_model", None)
    if reference is None or not weights_come_later(trainer.accelerator):
        return
    own = sum(weight.is_meta for weight in reference.parameters())
    missing = trainer.accelerator.reduce(torch.tensor(own, device=trainer.accelerator.device))
    if missing:
        raise ValueError(
            f"{int(missing)} weights of the reference model are on the device meta, expected all "
            "ranks to have them: rank 0 alone read them (cpu_ram_efficient_loading), and TRL "
            "shards a reference as it is. Set cpu_ram_efficient_loading=False in fsdp_config, or "
            "train without a reference (adapters by peft_config, or beta=0.0 for GRPO)"
        )


def _check(trainer: Any, cp: Config) -> None:
    name, kind = type(trainer).__name__, str(trainer.accelerator.distributed_type)
    check_accelerator(trainer.accelerator, accumulates=True)
    if kind.endswith("FSDP") and not trainer.accelerator.is_fsdp2:
        raise ValueError(
            f"the Accelerator uses FSDP 1, expected FSDP 2 or DDP: {name} computes several "
            "micro-batches in one forward, which was not tested with FSDP 1"
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
    model: Any,
    cp: Config,
    groups: ProcessGroups,
    cost: CostModel | None,
    trained: MeanMetrics,
    trees: bool | Mapping[str, Any] = False,
    expect_registered: Callable[[], None] = lambda: None,
) -> None:
    """Let all ranks compute a model's padded batches together where TRL asks for its fused head.

    Every rank of the domain calls the model equally often. `trained` gets the numbers of the
    batches whose gradients are computed. `trees`: see `PaddedTrainer`. `expect_registered`: raises
    as long as the model has another attention than hcp's."""
    cost = cost or cost_of_model(model, groups, cp.ranks_per_node)
    planned = (PlannedTrees if trees or isinstance(trees, Mapping) else PlannedAlone)(
        cp, groups, cost, trees if isinstance(trees, Mapping) else {}
    )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    fused = base.forward

    @wraps(fused)
    def forward(self: Any, *positional: Any, fused_lm_head: bool = False, **given: Any) -> Any:
        if not fused_lm_head:
            return fused(*positional, **given)
        expect_registered()
        if positional:
            given["input_ids"], *more = positional
            if more:
                raise ValueError("the model was called with several positional arguments")
        said, step = _computed(base, fused, given, planned)
        if torch.is_grad_enabled():
            trained.add(step)
        return said

    base.forward = types.MethodType(forward, base)


def _computed(
    base: nn.Module,
    fused: Callable[..., Any],
    given: Mapping[str, Any],
    planned: PlannedAlone,
) -> tuple[FusedCausalLMOutput, Step]:
    expect_batch_of_text(given, _OF_THE_BATCH, "a batch of text: hcp dispatches tokens only")
    tokens, labels = given["input_ids"], given["labels"]
    kept = kept_tokens(tokens, given.get("attention_mask"))
    samples = [_sample(*rows) for rows in zip(tokens, labels, kept, strict=True) if rows[-1].any()]
    routed = base if given.get(_ROUTERS) else None
    (rows, names, balance), step = planned.compute(fused, samples, routed)
    said = _padded(rows, names, kept, labels)
    return (said if balance is None else replace(said, aux_loss=balance)), step


class PlannedAlone:
    """Plans a rank's sequences as they are."""

    def __init__(
        self, cp: Config, groups: ProcessGroups, cost: CostModel | None, _: Mapping[str, Any]
    ) -> None:
        self._groups = groups
        self._masks: list[Mask | None] | None = None
        # Between two forwards TRL may generate, and a reference model computes.
        self._planner = StepPlanner.of(
            cp, groups.size("dp_cp"), cost=cost, masks=lambda _: self._masks, compares=False
        )

    def compute(
        self, fused: Callable[..., Any], samples: list[dict[str, Tensor]], routed: nn.Module | None
    ) -> tuple[OwnRows, Step]:
        """Compute the samples' rows in a step of all ranks. `routed`: the model, if the experts
        that its routers choose are to be balanced."""
        step = self._planner.step(samples, self._groups)
        return _own_rows(fused, step, routed), step


class PlannedTrees(PlannedAlone):
    """Plans a rank's sequences as prefix trees. A row that several share is computed once, and its
    gradient is the sum of theirs."""

    def __init__(
        self, cp: Config, groups: ProcessGroups, cost: CostModel | None, options: Mapping[str, Any]
    ) -> None:
        super().__init__(cp, groups, cost, options)
        self._options = options

    def compute(
        self, fused: Callable[..., Any], samples: list[dict[str, Tensor]], routed: nn.Module | None
    ) -> tuple[OwnRows, Step]:
        trees = prefix_trees([sample["input_ids"] for sample in samples], **self._options)
        self._masks = gather_masks(trees.masks, self._groups)
        labels = [sample["labels"] for sample in samples]
        samples = _tree_samples(trees, samples, labels)
        (rows, names, balance), step = super().compute(fused, samples, routed)
        # Where one sequence has a target, others that share the row may have none.
        own = zip(trees.by_rollout(rows), labels, strict=True)
        rows = [x.where((y != IGNORED)[:, None], 0.0) for x, y in own]
        return OwnRows(rows, names, balance), step


def _tree_samples(
    trees: Trees, samples: list[dict[str, Tensor]], labels: list[Tensor]
) -> list[dict[str, Tensor]]:
    """The samples of trees: a row has a target where a sequence through it has one."""
    for sample, own in zip(samples, labels, strict=True):
        after = torch.cat((sample["input_ids"][1:], own[-1:]))
        if bool(((own != IGNORED) & (own != after)).any()):
            raise ValueError(
                "labels are other tokens than those that follow, expected the sequences' own: "
                "trees=True takes rows together that have the same next token"
            )
    targeted = trees.summed([(own != IGNORED).float() for own in labels])
    device = targeted[0].device if targeted else None
    columns = zip(trees.tokens, trees.labels, targeted, strict=True)
    return [
        {
            "input_ids": tokens.to(device),
            "labels": targets.to(device).where(some > 0, IGNORED),
        }
        for tokens, targets, some in columns
    ]


def _sample(tokens: Tensor, labels: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Return a sequence without its padding; each row's label is that of its successor."""
    own = labels[kept]
    after = torch.cat((own[1:], own.new_full((1,), IGNORED)))
    return {"input_ids": tokens[kept], "labels": after}


class OwnRows(NamedTuple):
    """What a model says of the sequences that this rank loaded."""

    rows: list[Tensor]
    """(tokens, F) of each."""
    names: list[str]
    """Of the F fields."""
    balance: Tensor | None
    """The loss of routers, the mean over the sequences of all ranks' batches: its mean over the
    ranks, which TRL takes of gradients and logs, counts each sequence once."""


def _own_rows(fused: Callable[..., Any], step: Step, routed: nn.Module | None) -> OwnRows:
    names: list[str] = []
    results: list[Tensor] = []
    shares: list[Tensor] = []
    for cp, local in step:
        labels = cp.at_least_one_row(local.labels, IGNORED).unsqueeze(0)
        with contextlib.nullcontext() if routed is None else record_routers(routed) as choices:
            said = fused(**model_inputs(cp, local), shift_labels=labels, fused_lm_head=True)
        if choices is not None:
            shares.append(router_aux_loss(cp, choices, grad_reduce="mean"))
        names = [name for name in _FIELDS if getattr(said, name) is not None]
        fields = torch.stack([_wide(getattr(said, name)[0]) for name in names], 1)
        results.append(fields[: cp.rows])
    balance = torch.stack(shares).sum() if shares else None
    return OwnRows(step.combine(results), names, balance)


def _wide(x: Tensor) -> Tensor:
    """Bools, and floats of fewer bits, as float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _padded(
    rows: list[Tensor], names: list[str], kept: Tensor, labels: Tensor
) -> FusedCausalLMOutput:
    """Return the fields (B, L - 1), as TRL's fused head does: of the token after each."""
    dtype = rows[0].dtype if rows else torch.float32
    full = torch.zeros(*kept.shape, len(names), dtype=dtype, device=kept.device)
    full = full.masked_scatter(kept.unsqueeze(-1), torch.cat([full[0, :0], *rows]))
    fields = dict(zip(names, full[:, :-1].unbind(-1), strict=True))
    if "is_top1" in fields:
        fields["is_top1"] = fields["is_top1"].bool()
    mask = labels[:, 1:] != IGNORED
    loss = -fields["log_probs"].sum() / mask.sum().clamp(min=1)
    return FusedCausalLMOutput(loss=loss, label_mask=mask, **fields)
