"""Megatron's routers under plans: losses and counts of sequences, without padding. Each text of a
tree is one.

A layer makes a twin of its router for each micro-batch, so that what is recomputed in the backward
has the micro-batch of its forward.

T rows of this tensor-parallel rank, P parts of its group (`hcp.integrations.routing`), E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hcp
from hcp.integrations.megatron.megatron_packed import handler_of
from hcp.integrations.megatron.twin import twin
from hcp.integrations.routing import (
    batch_sum,
    batch_tokens,
    group_tokens,
    part_count,
    part_of_rows,
    part_sums,
    text_means,
)

_NAMES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""What Megatron's log calls its losses."""


class _PlannedRouter:
    """Mixed into a router: computes losses of the sequences of one micro-batch.

    Megatron divides the gradients of all losses by the tokens of the whole batch
    (`calculate_per_token_loss`). A loss is therefore added times the tokens that it is a mean of,
    as in Megatron.
    """

    cp: hcp.ContextParallelHandler
    rows: int
    """Those of the model's input on this rank, of which tensor-parallel ranks have parts."""

    def routing(self: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        self.places = self._places(len(logits))
        padding = self.places == part_count(self.cp)
        return super().routing(logits, padding_mask=padding.unsqueeze(1))  # type: ignore[misc]

    def apply_z_loss(self: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.training or not torch.is_grad_enabled():
            return logits
        squares = torch.logsumexp(logits, -1).square().unsqueeze(1)
        total = self._as_one(squares).sum()
        self._record("z_loss", total)
        return self._attached(logits, coefficient * total)

    def _apply_aux_loss(
        self: Any, probs: Tensor, scores: Tensor, routing_map: Tensor, *others: Any, **named: Any
    ) -> Tensor:
        """Balance the rows of the micro-batch on all ranks of the group as one."""
        return self._balanced(probs, "aux_loss", scores, routing_map, self._as_one)

    def _apply_seq_aux_loss(
        self: Any, probs: Tensor, scores: Tensor, routing_map: Tensor, *others: Any, **named: Any
    ) -> Tensor:
        """Balance the rows of each sequence."""
        return self._balanced(probs, "seq_aux_loss", scores, routing_map, self._by_part)

    def _apply_global_aux_loss(
        self: Any, probs: Tensor, scores: Tensor, routing_map: Tensor, *others: Any, **named: Any
    ) -> Tensor:
        """Balance this micro-batch by the mean counts of those of the step so far, on all ranks."""
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        counts, sums = self._as_one(routing_map.double()), self._as_one(scores)
        dist.all_reduce(counts, group=self.tp_dp_cp_group)
        self.global_tokens_per_expert += counts.to(self.global_tokens_per_expert.dtype)
        self.ga_steps += 1
        means = (self.global_tokens_per_expert / self.ga_steps).to(sums.dtype)
        rows = (counts.sum() / self.topk).clamp(min=1).to(sums.dtype)
        factor = self.config.num_moe_experts / (self.topk * self._repeats())
        share = (means * sums).sum() * factor / rows.square()
        self._log("global_load_balancing_loss", share * dist.get_world_size(self.tp_dp_cp_group))
        return self._attached(probs, coefficient * group_tokens(self.cp) * share)

    def _apply_expert_bias(
        self: Any, routing_map: Tensor, padding_mask: Tensor | None = None
    ) -> None:
        if self.enable_expert_bias and torch.is_grad_enabled():
            counts = self._as_one(routing_map.detach().double())
            self.local_tokens_per_expert += counts.to(self.local_tokens_per_expert.dtype)

    def _balanced(
        self: Any,
        probs: Tensor,
        kind: str,
        scores: Tensor,
        routing_map: Tensor,
        over: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Add the losses of what rows are summed over, each times its rows."""
        coefficient = self.get_aux_loss_coeff(kind)
        if coefficient == 0:
            return probs
        counts = self._of_group(over(routing_map.double()))
        if counts.dim() == 1:
            weights = counts * self.topk / counts.sum().clamp(min=1)
        else:
            weights = text_means(self.cp, counts, 1)
        sums = over(scores)
        factor = self.config.num_moe_experts / (self.topk * self._repeats())
        total = (weights.to(sums.dtype) * sums).sum() * factor
        self._record(_NAMES[kind], total)
        return self._attached(probs, coefficient * total)

    def _by_part(self: Any, x: Tensor) -> Tensor:
        """Sum rows (T, W) of this rank over each part: (P, W)."""
        return part_sums(self.cp, x, self.places)

    def _as_one(self: Any, x: Tensor) -> Tensor:
        """Sum rows (T, W) of this rank, each once for each text through it: (W,)."""
        return batch_sum(self.cp, self._by_part(x))

    def _of_group(self: Any, counts: Tensor) -> Tensor:
        """Sum counts over the ranks that share rows, and those of the group."""
        if self.config.sequence_parallel and dist.get_world_size(self.tp_group) > 1:
            dist.all_reduce(counts, group=self.tp_group)
        return self.cp.group.sum(counts)

    def _places(self: Any, count: int) -> Tensor:
        """The part of each row of this tensor-parallel rank, P for padding."""
        size, rank = (dist.get_world_size(self.tp_group), dist.get_rank(self.tp_group))
        if not self.config.sequence_parallel:
            size, rank = 1, 0
        if count * size != self.rows:
            raise ValueError(
                f"a router got {count} rows on each of {size} ranks, expected {self.rows} of the "
                "micro-batch: give its experts all rows at once (mlp_chunks_for_training 1)"
            )
        return part_of_rows(self.cp, self.rows)[rank * count : (rank + 1) * count]

    def _repeats(self: Any) -> int:
        """How often an MTP layer that is used for all predictions adds a loss."""
        repeated = getattr(self.config, "mtp_use_repeated_layer", False)
        layers = self.config.mtp_num_layers if getattr(self, "is_mtp_layer", False) else None
        return layers if repeated and layers else 1

    @staticmethod
    def _attached(x: Tensor, loss: Tensor) -> Tensor:
        """Return x, whose backward adds the gradient of a loss."""
        scaler = import_module("megatron.core.transformer.moe.moe_utils").MoEAuxLossAutoScaler
        attached: Tensor = scaler.apply(x, loss)
        return attached

    def _record(self: Any, name: str, total: Tensor) -> None:
        """Log a loss so that the mean over ranks and micro-batches, as Megatron takes it, is that
        over the tokens of the batch. `total`: times the rows that it is a mean of."""
        shares = dist.get_world_size(self.tp_dp_cp_group) * len(self.cp.plan.micro_batches)
        self._log(name, total * (shares / batch_tokens(self.cp)))

    def _log(self: Any, name: str, value: Tensor) -> None:
        """Add a value to those of which Megatron logs the mean over ranks and micro-batches."""
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        number = self.layer_number
        if getattr(self, "is_mtp_layer", False) and number is not None:
            number += self.config.num_layers
        _recorder()(name, value.detach(), number, layers, avg_group=self.tp_dp_cp_group)


class _PlannedLayer:
    """Mixed into a transformer layer with experts: its router sees the micro-batch."""

    def forward(self: Any, *given: Any, **options: Any) -> Any:
        params = options.get("packed_seq_params")
        if params is None or not watched(self.config):
            return super().forward(*given, **options)  # type: ignore[misc]
        router = self.mlp.router
        cp = handler_of(params, router.cp_group, self.config)
        own = twin(router, planned_router(router.__class__), cp=cp, rows=params.rows)
        made = twin(self, mlp=twin(self.mlp, router=own))
        return super(_PlannedLayer, made).forward(*given, **options)  # type: ignore[misc]


def watched(config: Any) -> bool:
    """Whether a router computes losses, or counts by which its biases change."""
    kinds, coefficients = (
        each if isinstance(each, (list, tuple)) else [each]
        for each in (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff)
    )
    balanced = any(str(kind).endswith("aux_loss") for kind in kinds) and any(coefficients)
    return bool(balanced or config.moe_z_loss_coeff or config.moe_router_enable_expert_bias)


@cache
def planned_router(router: type) -> type:
    """Derive a class of routers whose losses and counts are those of a plan's sequences."""
    return type(f"Hcp{router.__name__}", (_PlannedRouter, router), {"__module__": __name__})


@cache
def planned_layer(layer: type) -> type:
    """Derive a class of transformer layers with experts whose routers see the micro-batch."""
    return type(f"Hcp{layer.__name__}", (_PlannedLayer, layer), {"__module__": __name__})


def _recorder() -> Any:
    """Return Megatron's function that logs a router's loss."""
    try:
        logging = import_module("megatron.core.transformer.moe.moe_logging")
    except ModuleNotFoundError:  # before release 0.17
        return import_module("megatron.core.transformer.moe.moe_utils").save_to_aux_losses_tracker
    return logging.get_moe_metrics_tracker().record
