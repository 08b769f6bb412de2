"""Multi-token prediction: tokens, labels and masks roll along the plan's documents."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hcp.integrations.megatron.megatron_packed import handler_of, with_padding
from hcp.integrations.megatron.mrope import OfAxes


class _Counted(Tensor):
    """A mask whose sum is the number of its tokens in the whole step."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def sum(self, *positional: Any, **named: Any) -> Tensor:
        if positional or named:
            return super().sum(*positional, **named)
        count = _counts(self)[0].view(())
        count.own_rows = self.as_subclass(Tensor).sum()  # type: ignore[attr-defined]
        return count


class PredictionTokens:
    """How many tokens of a step the main loss and each prediction layer count.

    Layer d predicts the token d further on, so that it counts those loss tokens of a sequence that
    have d tokens before them. Release 0.17 of Megatron-Core and later ones multiply its losses by
    the ratio of the main loss's tokens to its own, in order that both are means: of the micro-batch
    and rank. These numbers are the whole step's, and do not depend on the plan.
    """

    def __init__(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """`batches`: of the step's micro-batches on this rank, with their rows."""
        params = [batch["packed_seq_params"] for batch in batches]
        places = [with_padding(each.cp_handler.position_ids, each.rows) for each in params]
        masks = [batch["loss_mask"] for batch in batches]
        self._rows = [*zip(masks, places, strict=True)]
        self._handler = params[0].cp_handler
        self._counts: tuple[Tensor, ...] = ()

    def of(self, layers: int) -> tuple[Tensor, ...]:
        """Count for the main loss and so many layers, scalars in float64. Every rank of the domain
        calls it first in the same micro-batch, once in a step."""
        if len(self._counts) != 1 + layers:
            own = [
                torch.stack([(mask * (places >= depth)).sum() for depth in range(1 + layers)])
                for mask, places in self._rows
            ]
            counts = torch.stack(own).double().sum(0)
            self._counts = self._handler.group.sum_over_domain(counts).unbind()
        return self._counts


def mask_of(batch: Mapping[str, Any], layers: int) -> Tensor | None:
    """Return a batch's loss mask, which knows the counts of the step where this release of Megatron
    weighs prediction layers by them."""
    from megatron.core.transformer import multi_token_prediction

    mask: Tensor | None = batch["loss_mask"]
    if mask is None or not hasattr(multi_token_prediction, "process_mtp_loss"):
        return mask
    return _with_counts(mask.as_subclass(_Counted), batch["prediction_tokens"].of(layers))


def roll_tensor(
    tensor: Tensor | list[Tensor],
    shifts: int = -1,
    dims: int = -1,
    cp_group: Any = None,
    packed_seq_params: Any = None,
    return_sum: bool = True,
    *,
    fill_values: Sequence[float] | None = None,
    roll_context: Any = None,
    sequence_fields: Sequence[str] | None = None,
    roll_depth: int = 0,
) -> tuple[Tensor, Tensor | None] | list[Tensor]:
    """Shift (1, T), or positions (3, 1, T), along the documents of the micro-batch, and count.
    Replaces Megatron's function of this name.

    Megatron's count is that of this rank's tokens after the shift, which depends on the plan. This
    function returns the whole step's, if the mask knows it (see `mask_of`), else the count before
    the first shift: a token of each layer then has the weight of one of the main loss, as in
    release 0.16.

    Megatron's branch dev passes a list of tensors, with the value that enters each at the ends, and
    takes a list. It sums the loss mask itself, so the `sum()` of that mask is the count. What it
    prepares for its own layout of the ranks (`roll_context`, `roll_depth`) has no use here.
    """
    if isinstance(tensor, list):
        fills = [0] * len(tensor) if fill_values is None else fill_values
        fields = [""] * len(tensor) if sequence_fields is None else sequence_fields
        return [
            _field(one, shifts, dims, cp_group, packed_seq_params, fill, name)
            for one, fill, name in zip(tensor, fills, fields, strict=True)
        ]
    rolled = _rolled(tensor, shifts, dims, cp_group, packed_seq_params, 0)
    if not return_sum:
        return rolled, None
    _with_counts(rolled, _counts_after(tensor))
    return rolled, _counts(rolled)[0]


def _field(
    tensor: Tensor,
    shifts: int,
    dims: int,
    cp_group: Any,
    packed_seq_params: Any,
    fill: float,
    name: str,
) -> Tensor:
    rolled = _rolled(tensor, shifts, dims, cp_group, packed_seq_params, fill)
    if name == "loss_mask":
        rolled = _with_counts(rolled.as_subclass(_Counted), _counts_after(tensor))
    return rolled


def _with_counts(mask: Tensor, counts: Sequence[Tensor]) -> Tensor:
    mask.counts = counts  # type: ignore[attr-defined]
    return mask


def _counts(mask: Tensor) -> Sequence[Tensor]:
    """The tokens of a mask now, and after each further shift if they are known."""
    counts: Sequence[Tensor] | None = getattr(mask, "counts", None)
    return [mask.as_subclass(Tensor).sum()] if counts is None else counts


def _counts_after(mask: Tensor) -> Sequence[Tensor]:
    counts = _counts(mask)
    return counts[1:] or counts


def _rolled(
    tensor: Tensor, shifts: int, dims: int, cp_group: Any, packed_seq_params: Any, fill: float
) -> Tensor:
    last = tensor.dim() - 1
    if last not in (1, 2) or tensor.shape[-2] != 1 or dims not in (-1, last):
        raise ValueError(
            f"tensor has shape {tuple(tensor.shape)} and dims is {dims}, expected (1, T) or "
            "(3, 1, T), and -1"
        )
    cp = handler_of(packed_seq_params, cp_group)
    count = tensor.shape[-1]
    own = tensor.as_subclass(Tensor)[..., 0, : cp.rows].movedim(-1, 0)
    rolled = with_padding(cp.roll_tensor(own, shifts), count)
    if fill:
        inside = with_padding(cp.roll_tensor(torch.ones_like(own), shifts), count)
        rolled = torch.where(inside.bool(), rolled, torch.full_like(rolled, fill))
    return rolled.movedim(0, -1).unsqueeze(-2)


_COUNTS = "_compute_mtp_acceptance_counts"
_SUMS = "hcp_sums"


class _LoggedSums:
    """Stands in for Megatron's MTPLossLoggingHelper where a model computes its losses, and keeps
    sums over tokens in addition to its means over micro-batches."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def save_metrics_to_tracker(
        self,
        loss: Tensor,
        correct: Tensor,
        total: Tensor,
        layer_number: int | None,
        num_layers: int,
        **groups: Any,
    ) -> None:
        own = loss.detach() * _counts(total)[0].clamp(min=1)
        mean = own / total.clamp(min=1)
        self._own.save_metrics_to_tracker(mean, correct, total, layer_number, num_layers, **groups)
        if layer_number is None:
            return
        sums = self._own.tracker.setdefault(_SUMS, own.new_zeros(2, num_layers))
        sums[0, layer_number] += own
        sums[1, layer_number] += total.detach()

    def save_loss_to_tracker(self, loss: Tensor, tokens: Any, *others: Any, **named: Any) -> None:
        """As branch dev calls it, with the sum of this rank's losses and the tokens of its mask."""
        self._own.save_loss_to_tracker(loss, getattr(tokens, "own_rows", tokens), *others, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _with_count(counts: Any) -> Any:
    """Return Megatron's count of predictions, which hands on the count that the mean of their
    losses was divided by."""

    def counted(logits: Tensor, labels: Tensor, loss_mask: Tensor, *others: Any) -> Any:
        own = loss_mask.as_subclass(Tensor)
        correct, total = counts(logits, labels, own, *others)
        return correct, _with_counts(total, _counts(loss_mask)[:1])

    return counted


def taken_sums() -> Tensor | None:
    """Take the sums of losses and the tokens, (2, layers), of this rank's predictions since the
    last call. None if it computed none."""
    from megatron.core.transformer import multi_token_prediction

    taken: Tensor | None = multi_token_prediction.MTPLossLoggingHelper.tracker.pop(_SUMS, None)
    return taken


def _with_our_roll(function: Any) -> Any:
    """Copy a function of Megatron's so that its global `roll_tensor` is hcp's. Megatron's own stays
    as it is."""
    names = {**function.__globals__, "roll_tensor": roll_tensor}
    if "process_mtp_loss" in function.__code__.co_names:
        names["process_mtp_loss"] = _with_our_roll(names["process_mtp_loss"])
    if "save_metrics_to_tracker" in function.__code__.co_names:
        names[_COUNTS] = _with_count(names[_COUNTS])
    if "MTPLossLoggingHelper" in function.__code__.co_names:
        names["MTPLossLoggingHelper"] = _LoggedSums(names["MTPLossLoggingHelper"])
    made = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@cache
def rolling(layer: type) -> type:
    """Derive a class of MTP layers that roll tokens and positions along the plan's sequences."""
    own = {"_get_embeddings": _with_our_roll(layer._get_embeddings), "__module__": __name__}  # type: ignore[attr-defined]
    return type(f"Hcp{layer.__name__}", (layer,), own)


@cache
def hcp_model_class(model: type) -> type:
    """Derive a class of GPTModel, or of one like it, whose MTP losses take labels along the plan's
    sequences, and whose multimodal rotary embedding turns rows by their own positions.

    Only a model with `mtp_num_layers` or `position_embedding_type="mrope"` needs it; `forward_step`
    refuses one with the former that lacks it, and the layers one with the latter.
    """
    own = {"_postprocess": _with_our_roll(model._postprocess), "__module__": __name__}  # type: ignore[attr-defined]
    return type(f"Hcp{model.__name__}", (OfAxes, model), {**own, "rolls_along_sequences": True})
