"""Losses and counts of Transformers' routers, of sequences and of the whole batch.

T rows on this rank, P parts of its group (see `hcp.integrations.routing`), L layers with experts,
K experts of a row, E experts.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hcp._words import GradReduce
from hcp.integrations.routing import (
    batch_balance,
    batch_sum,
    expert_counts,
    part_counts,
    part_sums,
    sequence_balance,
)
from hcp.step.handler import ContextParallelHandler
from hcp.step.loss import check_grad_reduce

_RECORDED = "router_logits"
"""What Transformers' models call the first output of their routers."""
_BIAS = "e_score_correction_bias"
"""The bias of a router of DeepSeek-V3's kind, which a model has in place of a loss."""


class RoutedLayer(NamedTuple):
    """What a router made of the rows of one micro-batch."""

    logits: Tensor
    """(T or more, E)."""
    chosen: Tensor
    """int64 (T or more, K): the experts that compute each row."""


@dataclass
class Routed:
    """What the routers of a model made of the rows of one micro-batch: of `record_routers`."""

    pooled: bool
    """Whether the loss has means over all layers, as Transformers' own. Otherwise each layer adds
    one, as in DeepSeek-V3's paper."""
    layers: list[RoutedLayer] = field(default_factory=list)


@contextlib.contextmanager
def record_routers(model: nn.Module) -> Iterator[Routed]:
    """Record what the routers of a model, which may be wrapped, make of a micro-batch: call the
    model once inside of this context.

    Raises ValueError for a model without routers that hcp knows, and under gradient checkpointing
    that is reentrant, which hides gradients.
    """
    routers, routed = routers_of(model), Routed(_is_pooled(model))
    grads = torch.is_grad_enabled()

    def record(router: nn.Module, given: object, output: Any) -> None:
        if torch.is_grad_enabled() != grads:
            raise ValueError(
                f"{type(router).__name__} runs without gradients, as in reentrant gradient "
                "checkpointing, expected use_reentrant=False for a loss of its router: "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        routed.layers.append(_layer_of(router, output))

    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        yield routed
    finally:
        for hook in hooks:
            hook.remove()


def check_routers(model: nn.Module) -> None:
    """Raise ValueError for a model whose routers' loss hcp does not know."""
    _is_pooled(model)


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model. Raises ValueError if it has none, or of another kind."""
    kinds = tuple(recorder.target_class for recorder in _recorders(model) if recorder.index == 0)
    routers = [module for module in model.modules() if isinstance(module, kinds)]
    if not routers:
        raise ValueError(
            f"{type(model).__name__} has no routers that return (logits, weights, experts), "
            "expected experts of Transformers for a loss of theirs: router_aux_loss_coef=0.0"
        )
    return routers


def router_aux_loss(
    cp: ContextParallelHandler,
    routed: Routed,
    *,
    grad_reduce: GradReduce | None = None,
    batch_counts: Tensor | None = None,
) -> Tensor:
    """Return this micro-batch's share of the loss by which a model balances its experts, a scalar:
    add it to that of `causal_lm_loss`, times a coefficient.

    Without `batch_counts` it is the mean, over the sequences of the batch, of the loss of each
    sequence alone. Each text of a tree is one. Every rank of the group calls it.

    With `batch_counts`, (L, E), it is that of all rows of the batch as one. These counts have to be
    known before the first backward, hence after a forward of all micro-batches: sum `aux_counts`
    over the micro-batches and the domain.

    The loss is the model's own, `load_balancing_loss_func`, of which it takes the coefficient
    `router_aux_loss_coef`. For models that have a bias in its place (DeepSeek-V3, GLM 4.5) it is
    the sequence-wise loss of DeepSeek-V3's paper (https://arxiv.org/abs/2412.19437), summed over
    layers. `grad_reduce`: as for `causal_lm_loss`.
    """
    check_grad_reduce(grad_reduce)
    scores = [_scores(routed, layer) for layer in routed.layers]
    sums = torch.stack([part_sums(cp, x) for x in scores], 1)  # (P, L, E)
    if batch_counts is None:
        share = sequence_balance(
            cp, _flat(routed, _counts(cp, routed, scores)), _flat(routed, sums)
        )
    else:
        counts = _checked(batch_counts, sums)
        share = batch_balance(cp, _flat(routed, counts), _flat(routed, sums))
    scale = float(cp.plan.ranks) if grad_reduce == "mean" else 1.0
    return share * (_factor(routed) * scale)


def aux_counts(cp: ContextParallelHandler, routed: Routed) -> Tensor:
    """Count this rank's rows that the loss counts for each expert: float64 (L, E), without padding.

    They differ from `tokens_per_expert` where a bias or groups choose the experts: the loss is of
    the highest scores.
    """
    scores = [_scores(routed, layer) for layer in routed.layers]
    return batch_sum(cp, _counts(cp, routed, scores).flatten(1)).view(len(scores), -1)


def tokens_per_expert(cp: ContextParallelHandler, routed: Routed) -> Tensor:
    """Count this rank's rows that choose each expert: int64 (L, E), without padding. A row of a
    tree counts once for each text through it.

    Summed over the micro-batches and ranks of a step they are those of the whole batch, by which
    experts are balanced without a loss (https://arxiv.org/abs/2408.15664).
    """
    return torch.stack(
        [expert_counts(cp, layer.chosen, layer.logits.shape[1]) for layer in routed.layers]
    )


def _recorders(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get(_RECORDED)
        if hasattr(recorded, "target_class"):
            yield recorded


def _is_pooled(model: nn.Module) -> bool:
    """Whether a model has Transformers' loss. Raises ValueError for one without routers, and for
    one that has neither this loss nor a bias in its place."""
    routers = routers_of(model)
    if any(_has_loss(type(router)) for router in routers):
        return True
    if any(hasattr(router, _BIAS) for router in routers):
        return False
    raise ValueError(
        f"{type(model).__name__} has neither load_balancing_loss_func nor {_BIAS}, expected one of "
        "them: its router's loss is not known; router_aux_loss_coef=0.0"
    )


def _has_loss(kind: type) -> bool:
    return hasattr(sys.modules.get(kind.__module__), "load_balancing_loss_func")


def _layer_of(router: nn.Module, output: Any) -> RoutedLayer:
    if not isinstance(output, tuple) or len(output) != 3 or output[2].dtype != torch.int64:
        raise ValueError(
            f"{type(router).__name__} returns {type(output).__name__}, expected (logits, weights, "
            "experts as int64): router_aux_loss_coef=0.0"
        )
    logits, _, chosen = output
    return RoutedLayer(logits.flatten(0, -2), chosen.flatten(0, -2))


def _scores(routed: Routed, layer: RoutedLayer) -> Tensor:
    """Return the scores of a layer, (T or more, E)."""
    wide = layer.logits.to(torch.promote_types(layer.logits.dtype, torch.float32))
    return wide.softmax(-1) if routed.pooled else F.normalize(wide.sigmoid(), p=1, dim=-1)


def _counts(cp: ContextParallelHandler, routed: Routed, scores: Sequence[Tensor]) -> Tensor:
    """Count the highest scores of each row, of each part: float64 (P, L, E)."""
    experts = routed.layers[0].chosen.shape[1]
    highest = (x.detach().topk(experts, -1).indices for x in scores)
    counts = [part_counts(cp, x, y.shape[1]) for x, y in zip(highest, scores, strict=True)]
    return torch.stack(counts, 1)


def _flat(routed: Routed, x: Tensor) -> Tensor:
    """Return (..., L, E) as (..., W): W is E where layers are pooled, else L * E."""
    return x.sum(-2) if routed.pooled else x.flatten(-2)


def _factor(routed: Routed) -> float:
    layers, (logits, chosen) = len(routed.layers), routed.layers[0]
    experts = logits.shape[1]
    return experts / layers**2 if routed.pooled else experts / chosen.shape[1]


def _checked(counts: Tensor, own: Tensor) -> Tensor:
    """Return counts of a whole batch, (L, E). `own`: (P, L, E)."""
    if counts.shape != own.shape[1:]:
        raise ValueError(
            f"batch_counts has shape {tuple(counts.shape)}, expected {tuple(own.shape[1:])}: "
            "layers and experts, of aux_counts, summed over the whole batch"
        )
    return counts
