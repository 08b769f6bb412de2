"""Multi-token prediction: tokens, labels and masks roll along the plan's sequences."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

from torch import Tensor

from hcp.integrations.megatron.packed import handler_of, with_padding


def roll_tensor(
    tensor: Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: Any = None,
    packed_seq_params: Any = None,
) -> tuple[Tensor, Tensor]:
    """Shift (1, T) along the sequences of the micro-batch, and count. Replaces Megatron's function
    of this name.

    Megatron's count is the sum of the result. Release 0.19 scales the losses of a prediction layer
    by the ratio of this rank's tokens before and after the shift, which depends on the plan. So
    this function returns the count before the first shift. A token of each layer then has the
    weight of one of the main loss, as in release 0.16.
    """
    if tensor.dim() != 2 or tensor.shape[0] != 1 or dims not in (-1, 1):
        raise ValueError(
            f"tensor has shape {tuple(tensor.shape)} and dims is {dims}, expected (1, T) and -1"
        )
    cp = handler_of(packed_seq_params, cp_group)
    rolled = cp.roll_tensor(tensor[0, : cp.rows], shifts)
    rolled = with_padding(rolled, tensor.shape[1])[None]
    count: Tensor = getattr(tensor, "count_before_shifts", tensor.sum())
    rolled.count_before_shifts = count  # type: ignore[attr-defined]
    return rolled, count


def _with_our_roll(function: Any) -> Any:
    """Copy a function of Megatron's so that its global `roll_tensor` is hcp's. Megatron's own stays
    as it is."""
    names = {**function.__globals__, "roll_tensor": roll_tensor}
    if "process_mtp_loss" in function.__code__.co_names:
        names["process_mtp_loss"] = _with_our_roll(names["process_mtp_loss"])
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
    sequences.

    Only a model with `mtp_num_layers` needs it; `forward_step` refuses one that lacks it.
    """
    own = {"_postprocess": _with_our_roll(model._postprocess), "__module__": __name__}  # type: ignore[attr-defined]
    return type(f"Hcp{model.__name__}", (model,), {**own, "rolls_along_sequences": True})
